//! The CNI result that ADD returns, of what the stages before made.

use std::net::IpAddr;

use fairlead_address::DualStackAddrs;
use fairlead_api::names::{POD_GATEWAY_IPV4, POD_GATEWAY_IPV6};
use fairlead_dataplane::pods::PodLinks;
use serde_json::{Value, json};

use super::{Attachment, CheckContext};
use crate::cni::check;

/// Compares what the last plugin reported with what the kernel shows.
pub(super) fn check(context: &CheckContext) -> Vec<String> {
    let Some(previous) = &context.previous else { return Vec::new() };
    let previous = previous.without_own_default_routes();
    check::as_reported((&context.key.ifname, &context.netns), &previous, &context.kernel)
}

/// The container's interface first, as Coil has it. An interface beside another one has gateways and no route, so that nothing takes
/// it for the way to everything.
pub(super) fn result(attachment: &Attachment, addresses: &DualStackAddrs, links: &PodLinks) -> Value {
    let ip = |ip: IpAddr| {
        let length = if ip.is_ipv4() { 32 } else { 128 };
        json!({ "address": format!("{ip}/{length}"), "gateway": gateway(ip), "interface": 0 })
    };
    let ips: Vec<Value> = addresses.iter().map(ip).collect();
    let default = |ip: IpAddr| {
        let everything = if ip.is_ipv4() { "0.0.0.0/0" } else { "::/0" };
        json!({ "dst": everything, "gw": gateway(ip) })
    };
    let with_routes = addresses.iter().filter(|_| !links.is_additional);
    let routes: Vec<Value> = with_routes.map(default).collect();
    let interfaces = [
        json!({
            "name": attachment.key.ifname, "mac": links.container_mac.to_string(),
            "sandbox": attachment.netns, "mtu": links.mtu,
        }),
        json!({ "name": links.host_name, "mac": links.host_mac.to_string(), "mtu": links.mtu }),
    ];
    json!({ "cniVersion": "1.1.0", "interfaces": interfaces, "ips": ips, "routes": routes })
}

fn gateway(of: IpAddr) -> IpAddr {
    match of {
        IpAddr::V4(_) => POD_GATEWAY_IPV4.into(),
        IpAddr::V6(_) => POD_GATEWAY_IPV6.into(),
    }
}

#[cfg(test)]
mod tests {
    use fairlead_ipam::Key;
    use fairlead_ipam::check::Owner;
    use fairlead_netlink::route::MacAddress;

    use super::*;

    #[test]
    fn the_containers_interface_comes_first_and_has_the_addresses() {
        let attachment = Attachment {
            key: Key { container_id: "c".to_owned(), ifname: "eth0".to_owned() },
            netns: "/ns".into(),
            pod: Owner { namespace: "shop".to_owned(), name: "web".to_owned(), uid: None },
        };
        let addresses = ["10.1.0.5", "fd00:1::5"].map(|text| text.parse().unwrap()).into_iter().collect();
        let links = PodLinks {
            container_mac: MacAddress([2, 0, 0, 0, 0, 1]),
            container_index: 2,
            host_name: "veth1".to_owned(),
            host_mac: MacAddress([2, 0, 0, 0, 0, 2]),
            host_index: 7,
            mtu: 1420,
            is_additional: false,
        };
        let mut expected = json!({
            "cniVersion": "1.1.0",
            "interfaces": [
                {"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/ns", "mtu": 1420},
                {"name": "veth1", "mac": "02:00:00:00:00:02", "mtu": 1420},
            ],
            "ips": [
                {"address": "10.1.0.5/32", "gateway": "169.254.1.1", "interface": 0},
                {"address": "fd00:1::5/128", "gateway": "fe80::1", "interface": 0},
            ],
            "routes": [{"dst": "0.0.0.0/0", "gw": "169.254.1.1"}, {"dst": "::/0", "gw": "fe80::1"}],
        });
        assert_eq!(result(&attachment, &addresses, &links), expected);
        let links = PodLinks { is_additional: true, ..links };
        expected["routes"] = json!([]);
        assert_eq!(result(&attachment, &addresses, &links), expected, "beside the pod's first interface");
    }
}

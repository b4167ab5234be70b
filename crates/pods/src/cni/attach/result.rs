//! The CNI result that ADD returns, of what the stages before made.

use fairlead_address::DualStackAddrs;
use fairlead_dataplane::pods::PodLinks;
use serde_json::{Value, json};

use super::{Attachment, CheckContext};
use crate::cni::check;

/// Compares what the last plugin reported with what the kernel shows.
pub(super) fn check(context: &CheckContext) -> Vec<String> {
    let Some(previous) = &context.previous else { return Vec::new() };
    check::as_reported((&context.key.ifname, &context.netns), previous, &context.kernel)
}

/// The container's interface first, as Coil has it; no gateways, no routes.
pub(super) fn result(attachment: &Attachment, addresses: &DualStackAddrs, links: &PodLinks) -> Value {
    let ips: Vec<Value> = addresses
        .iter()
        .map(|ip| json!({ "address": format!("{ip}/{}", if ip.is_ipv4() { 32 } else { 128 }), "interface": 0 }))
        .collect();
    let interfaces = [
        json!({
            "name": attachment.key.ifname, "mac": links.container_mac.to_string(),
            "sandbox": attachment.netns, "mtu": links.mtu,
        }),
        json!({ "name": links.host_name, "mac": links.host_mac.to_string(), "mtu": links.mtu }),
    ];
    json!({ "cniVersion": "1.1.0", "interfaces": interfaces, "ips": ips })
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
        };
        let expected = json!({
            "cniVersion": "1.1.0",
            "interfaces": [
                {"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/ns", "mtu": 1420},
                {"name": "veth1", "mac": "02:00:00:00:00:02", "mtu": 1420},
            ],
            "ips": [{"address": "10.1.0.5/32", "interface": 0}, {"address": "fd00:1::5/128", "interface": 0}],
        });
        assert_eq!(result(&attachment, &addresses, &links), expected);
    }
}

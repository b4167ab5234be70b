//! The CNI result that ADD returns, of what the stages before made.

use fairlead_ipam::Key;
use serde_json::{Value, json};

use super::{AttachContext, CheckContext, Stage};
use crate::cni::check;
use crate::cni::failure::Failure;

/// The last stage.
pub(in crate::cni) struct ResultStage;

#[tonic::async_trait]
impl Stage for ResultStage {
    async fn attach(&self, context: &mut AttachContext) -> Result<(), Failure> {
        context.result = result(context).to_string().into_bytes();
        Ok(())
    }

    async fn detach(&self, _: &Key) -> Result<(), Failure> {
        Ok(())
    }

    async fn check(&self, context: &mut CheckContext) -> Result<(), Failure> {
        if let Some(previous) = &context.previous {
            let at = (context.key.ifname.as_str(), context.netns.as_path());
            check::as_reported(at, previous, &context.kernel, &mut context.differences);
        }
        Ok(())
    }
}

/// The container's interface first, as Coil has it; no gateways, no routes.
fn result(context: &AttachContext) -> Value {
    let ips: Vec<Value> = context
        .addresses
        .iter()
        .map(|ip| json!({ "address": format!("{ip}/{}", if ip.is_ipv4() { 32 } else { 128 }), "interface": 0 }))
        .collect();
    let interfaces: Vec<Value> = context
        .links
        .iter()
        .flat_map(|links| {
            [
                json!({
                    "name": context.key.ifname, "mac": links.container_mac.to_string(),
                    "sandbox": context.args.netns, "mtu": links.mtu,
                }),
                json!({ "name": links.host_name, "mac": links.host_mac.to_string(), "mtu": links.mtu }),
            ]
        })
        .collect();
    json!({ "cniVersion": "1.1.0", "interfaces": interfaces, "ips": ips })
}

#[cfg(test)]
mod tests {
    use fairlead_dataplane::pods::PodLinks;
    use fairlead_netlink::route::MacAddress;
    use fairlead_wire::cni::CniArgs;

    use super::*;

    #[test]
    fn the_containers_interface_comes_first_and_has_the_addresses() {
        let (container_id, ifname, netns) = ("c".to_owned(), "eth0".to_owned(), "/ns".to_owned());
        let mut context =
            AttachContext::new(CniArgs { container_id, ifname, netns, ..CniArgs::default() }).unwrap();
        context.addresses = ["10.1.0.5", "fd00:1::5"].map(|text| text.parse().unwrap()).into_iter().collect();
        context.links = Some(PodLinks {
            container_mac: MacAddress([2, 0, 0, 0, 0, 1]),
            container_index: 2,
            host_name: "veth1".to_owned(),
            host_mac: MacAddress([2, 0, 0, 0, 0, 2]),
            host_index: 7,
            mtu: 1420,
        });
        let expected = json!({
            "cniVersion": "1.1.0",
            "interfaces": [
                {"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/ns", "mtu": 1420},
                {"name": "veth1", "mac": "02:00:00:00:00:02", "mtu": 1420},
            ],
            "ips": [{"address": "10.1.0.5/32", "interface": 0}, {"address": "fd00:1::5/128", "interface": 0}],
        });
        assert_eq!(result(&context), expected);
    }
}

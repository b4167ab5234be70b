//! Prefixes of pods: blocks, and networks of pods that other plugins give addresses.

use fairlead_topology::Member;
use ipnet::IpNet;

use crate::model::inputs::Inputs;

/// Shortest prefix that is taken for a network of pods: the plan leaves out shorter ones.
const MIN_LENGTH: u8 = 8;

/// Prefixes of pods: blocks and, although the mesh may not carry them, networks of other plugins. No node is reached there: these plugins
/// lead packets to the pods of a node to an address of that node, which is in the mesh.
pub(super) fn pod_prefixes(inputs: &Inputs) -> impl Iterator<Item = &IpNet> {
    inputs.members.iter().flat_map(|member| member.blocks.iter().chain(plausible_networks(member)))
}

/// Networks of pods; what is so wide that no node has it says nothing about where nodes are.
fn plausible_networks(member: &Member) -> impl Iterator<Item = &IpNet> {
    member.pod_networks.iter().filter(|network| network.prefix_len() >= MIN_LENGTH)
}

/// Prefixes of the member's pods that the mesh carries.
pub(super) fn in_mesh<'a>(inputs: &Inputs, member: &'a Member) -> impl Iterator<Item = &'a IpNet> {
    let includes = inputs.settings.routing.includes_pod_networks;
    member.blocks.iter().chain(plausible_networks(member).filter(move |_| includes))
}

/// Prefixes of this node in the mesh.
pub(super) fn own_prefixes(inputs: &Inputs) -> Vec<IpNet> {
    let mut prefixes: Vec<IpNet> = inputs.own.claims.iter().copied().map(IpNet::from).collect();
    let own = inputs.members.iter().filter(|member| member.name == inputs.node);
    prefixes.extend(own.flat_map(|member| in_mesh(inputs, member)));
    prefixes
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::IpAddr;

    use fairlead_dataplane::uplink::HostNetwork;
    use fairlead_netlink::route::{Address, AddressFlags, Scope};

    use super::*;
    use crate::plan::desired::tests::{host, inputs, key, link, member};
    use crate::plan::desired::{Desired, Held, Host, OwnAddresses};

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    /// Two nodes with pods of another plugin, the second of which says that it is reached at a pod's address, too.
    fn two(includes: bool) -> Inputs {
        let with = |number: u32, network: &str| {
            let mut node = member(number);
            node.pod_networks = vec![net(network)];
            node
        };
        let mut other = with(2, "10.244.2.0/24");
        for inside in ["10.244.2.1:51820", "10.244.1.9:51820"] {
            other.endpoints.host.push(inside.parse().unwrap());
        }
        other.endpoints.manual = "10.244.1.7:51820".parse().ok();
        let mut inputs = inputs([with(1, "10.244.1.0/24"), other]);
        inputs.settings.routing.includes_pod_networks = includes;
        inputs
    }

    fn desired(inputs: &Inputs) -> Desired {
        Desired::new(inputs, &host(), Held::default(), &OwnAddresses::default())
    }

    #[test]
    fn pods_of_other_plugins_are_in_the_mesh_on_both_sides_where_it_says_so() {
        for includes in [true, false] {
            let desired = desired(&two(includes));
            let state = desired.mesh_state("wire_kube", &BTreeSet::new(), Vec::new(), |_| None);
            assert_eq!(desired.own_prefixes.contains(&net("10.244.1.0/24")), includes);
            assert_eq!(state.bypass.own.contains(&net("10.244.1.0/24")), includes);
            assert_eq!(state.targets_v4.contains(&net("10.244.2.0/24")), includes);
            assert!(!state.targets_v4.contains(&net("10.244.1.0/24")), "they are here");
            let config = &desired.peers[&key(2)].config;
            assert_eq!(config.allowed_ips.contains(&net("10.244.2.0/24")), includes);
        }
    }

    #[test]
    fn no_node_is_reached_at_an_address_of_pods_whether_the_mesh_carries_them_or_not() {
        for includes in [true, false] {
            let desired = desired(&two(includes));
            let tried = desired.peers[&key(2)].paths.candidates.iter().map(|it| it.address.to_string());
            assert_eq!(tried.collect::<Vec<_>>(), ["10.0.0.2:51820"]);
            let reasons: Vec<_> = desired.problems.iter().map(|problem| problem.reason()).collect();
            assert_eq!(reasons, ["UnusableEndpoint"], "the one that an administrator chose");
        }
    }

    /// The bridge of the other plugin has an address of the pods.
    #[test]
    fn the_gateway_of_the_pods_is_no_address_of_the_node() {
        let address = |link, text: &str| Address {
            link,
            prefix: net(text),
            scope: Scope::UNIVERSE,
            flags: AddressFlags::PERMANENT,
        };
        let network = HostNetwork {
            links: vec![link(2, "eth0"), link(3, "cni0")],
            addresses: vec![address(2, "10.0.0.1/24"), address(3, "10.244.1.1/24")],
            ..HostNetwork::default()
        };
        let host = Host::new(&network, &two(false));
        assert_eq!(host.addresses, [IpAddr::from([10, 0, 0, 1])]);
        assert_eq!(host.networks, [net("10.0.0.0/24")]);
    }
}

//! Prefixes of pods: in the mesh where it carries them, and never addresses of nodes.

use fairlead_dataplane::uplink::HostNetwork;
use fairlead_netlink::route::{Address, AddressFlags, Scope};

use super::*;

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

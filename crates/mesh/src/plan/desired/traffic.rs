//! Traffic: packets that go into the device, and packets that go past it.

use std::collections::BTreeSet;
use std::net::IpAddr;

use fairlead_address::{IpFamily, PrefixSet};
use fairlead_dataplane::mesh::sources::{self, Candidates};
use fairlead_dataplane::mesh::{Bypass, ControlPlane, OwnSource, PlainRoute};
use fairlead_keys::PublicKey;
use fairlead_topology::{self as topology, BlockRoute, Plan};
use ipnet::IpNet;

use super::host::{Host, mtu};
use crate::model::inputs::Inputs;

/// Targets, routes and exceptions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredTraffic {
    pub(super) mtu: u32,
    pub(super) targets_v4: Vec<IpNet>,
    pub(super) targets_v6: Vec<IpNet>,
    pub(super) bypass: Bypass,
    /// Addresses of other control-plane nodes, with their keys.
    pub(crate) control_plane: Vec<(IpAddr, PublicKey)>,
    pub(super) plain: Vec<PlainRoute>,
    plain_links: Vec<String>,
    pub(super) masqueraded: Vec<IpNet>,
    pub(super) without_default: Vec<IpFamily>,
    /// Families in which this host has addresses, and none that peers accept.
    pub(super) without_source: Vec<IpFamily>,
    pub(super) listen_port: u16,
    pub(super) sources: Vec<OwnSource>,
    pub(super) uplinks: Vec<String>,
}

impl DesiredTraffic {
    pub(super) fn new(inputs: &Inputs, host: &Host, plan: &Plan) -> Self {
        // An address inside a block, a network of pods or a range of Services is that of a pod or a Service, whatever a node says.
        let pods: PrefixSet = inputs.members.iter().flat_map(|it| inputs.pods_in_mesh(it)).collect();
        let control_plane = topology::control_plane(&inputs.members, &inputs.node, &plan.nodes);
        let control_plane_of =
            ControlPlane::of(control_plane.iter().map(|(node, _)| *node), &inputs.api_server);
        let bypass = Bypass { control_plane: control_plane_of, ..bypass(inputs, plan, &pods) };
        let targets_v4: Vec<IpNet> = plan.targets_ipv4.iter().copied().map(IpNet::from).collect();
        let targets_v6: Vec<IpNet> = plan.targets_ipv6.iter().copied().map(IpNet::from).collect();
        let sources = own_sources(inputs, host, plan);
        let targets = targets_v4.iter().chain(&targets_v6);
        let without_source = sources::missing(&sources, &host.addresses, targets).collect();
        Self {
            mtu: mtu(inputs, host),
            targets_v4,
            targets_v6,
            control_plane,
            plain: plan.routes.iter().map(plain_route).collect(),
            plain_links: plain_links(host, plan),
            masqueraded: plan.masqueraded.clone(),
            without_default: host.without_default.clone(),
            without_source,
            listen_port: host.port,
            sources,
            uplinks: host.links.values().cloned().collect(),
            bypass,
        }
    }

    /// Targets by family, without addresses to which packets are led nowhere.
    pub(super) fn targets_without(&self, bypassed: &PrefixSet) -> (Vec<IpNet>, Vec<IpNet>) {
        if *bypassed == PrefixSet::default() {
            return (self.targets_v4.clone(), self.targets_v6.clone());
        }
        let targets: PrefixSet = self.targets_v4.iter().chain(&self.targets_v6).collect();
        let left = targets.subtract(bypassed);
        let ipv4 = left.ipv4_prefixes().into_iter().map(IpNet::from).collect();
        (ipv4, left.ipv6_prefixes().into_iter().map(IpNet::from).collect())
    }

    /// Prefixes that leave without a tunnel.
    pub fn plain_prefixes(&self) -> BTreeSet<IpNet> {
        self.plain.iter().map(|route| route.destination).collect()
    }

    /// Names of the links on which packets of other nodes arrive without a tunnel.
    pub fn plain_links(&self) -> &[String] {
        &self.plain_links
    }
}

fn plain_route(route: &BlockRoute) -> PlainRoute {
    PlainRoute { destination: route.destination, gateway: route.gateway, link: route.link, is_tunnel: false }
}

/// Names of the links that plain routes lead onto.
fn plain_links(host: &Host, plan: &Plan) -> Vec<String> {
    let links: BTreeSet<u32> = plan.routes.iter().map(|route| route.link).collect();
    links.iter().filter_map(|link| host.links.get(link).cloned()).collect()
}

/// Packets that go past the mesh: those to real endpoints of the API server and of nodes, and answers of the relay's pods.
fn bypass(inputs: &Inputs, plan: &Plan, pods: &PrefixSet) -> Bypass {
    let servers = inputs.api_server.iter().filter(|server| !pods.contains(server.ip()));
    let relays = inputs.settings.relay_pods.iter().filter(|pod| pods.contains(pod.ip()));
    let mesh = inputs.mesh_addresses().into_iter().map(|address| IpNet::from(address.addr()));
    let claims = inputs.members.iter().filter(|it| it.name == inputs.node).flat_map(|it| &it.claims);
    let beside = claims.chain(&plan.masqueraded).copied();
    Bypass {
        servers: servers.copied().collect(),
        relays: relays.copied().collect(),
        nodes: plan.nodes.iter().copied().collect(),
        own: inputs.own_prefixes().into_iter().chain(mesh).chain(beside).collect(),
        control_plane: ControlPlane::default(),
    }
}

/// Addresses by which this node is known to peers.
fn own_sources(inputs: &Inputs, host: &Host, plan: &Plan) -> Vec<OwnSource> {
    let of_node = inputs.own.addresses.iter().filter(|it| !plan.is_claimed_twice(**it));
    let of_node: Vec<IpAddr> = of_node.copied().collect();
    let on_mesh: Vec<IpAddr> = inputs.mesh_addresses().iter().map(IpNet::addr).collect();
    let claims = &inputs.own.claims;
    sources::choose(Candidates { of_node: &of_node, on_mesh: &on_mesh, claims, on_host: &host.addresses })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use fairlead_topology::MemberAddresses;

    use super::*;
    use crate::plan::desired::tests::{host, inputs, member};
    use crate::plan::desired::{Desired, Held, OwnAddresses};

    fn sources_and_reasons(inputs: &Inputs) -> (Vec<String>, Vec<&'static str>) {
        let desired = Desired::new(inputs, &host(), Held::default(), &OwnAddresses::default());
        let state = desired.mesh_state("wire_kube", &BTreeSet::new(), Vec::new(), |_| None);
        let sources = state.sources.iter().map(|source| source.address.to_string()).collect();
        (sources, desired.problems.iter().map(|problem| problem.reason()).collect())
    }

    #[test]
    fn a_node_has_an_address_that_peers_accept_or_says_that_it_has_none() {
        let mut inputs_of_both = inputs([member(1), member(2)]);
        assert_eq!(sources_and_reasons(&inputs_of_both), (vec!["10.0.0.1".to_owned()], vec![]));
        inputs_of_both.own.claims.clear();
        assert_eq!(sources_and_reasons(&inputs_of_both), (vec![], vec!["NoAddressInMesh"]));
        let mut own = member(1);
        own.addresses.mesh = vec!["100.100.0.1".parse().unwrap()];
        let mut other = inputs([own, member(2)]);
        other.settings.mesh_ipv4 = "100.100.0.0/16".parse().ok();
        other.own.claims.clear();
        assert_eq!(sources_and_reasons(&other), (vec!["100.100.0.1".to_owned()], vec![]));
        assert_eq!(sources_and_reasons(&inputs([member(1)])).1, [""; 0], "nothing is in the mesh");
    }

    #[test]
    fn an_address_that_another_node_claims_too_is_the_source_only_without_another() {
        let mut own = member(1);
        let mut other = member(2);
        other.claims.extend(own.claims.clone());
        let twice = inputs([own.clone(), other.clone()]);
        assert_eq!(sources_and_reasons(&twice).0, ["10.0.0.1"]);
        own.addresses.mesh = vec!["100.100.0.1".parse().unwrap()];
        let mut with_another = inputs([own, other]);
        with_another.settings.mesh_ipv4 = "100.100.0.0/16".parse().ok();
        assert_eq!(sources_and_reasons(&with_another).0, ["100.100.0.1"]);
    }

    /// Until it is known whether the tunnel is up, it is not.
    #[test]
    fn control_plane_nodes_are_reached_past_the_mesh_until_their_tunnels_are_up() {
        let node = |number: u32, is_control_plane| {
            let mut node = member(number);
            let address = node.claims.first().map(IpNet::addr).into_iter().collect();
            node.addresses = MemberAddresses { is_control_plane, ..MemberAddresses::of_node(address) };
            node
        };
        let of = |is_own: bool| {
            let inputs = inputs([node(1, is_own), node(2, true), node(3, false)]);
            let desired = Desired::new(&inputs, &host(), Held::default(), &OwnAddresses::default());
            desired.mesh_state("wire_kube", &BTreeSet::new(), Vec::new(), |_| None).bypass.control_plane
        };
        let other: Vec<IpAddr> = vec!["10.0.0.2".parse().unwrap()];
        assert_eq!((of(true).nodes, of(true).down), (other.clone(), other));
        assert_eq!(of(false).nodes, [] as [IpAddr; 0]);
    }
}

//! Traffic: packets that go into the device, and packets that go past it.

use std::collections::BTreeSet;

use fairlead_address::{IpFamily, PrefixSet};
use fairlead_dataplane::mesh::{Bypass, PlainRoute};
use fairlead_topology::Plan;
use ipnet::IpNet;

use super::host::{Host, mtu};
use super::plain;
use super::pods::{in_mesh, own_prefixes};
use crate::model::inputs::Inputs;

/// Targets, routes and exceptions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredTraffic {
    pub(super) mtu: u32,
    pub(super) targets_v4: Vec<IpNet>,
    pub(super) targets_v6: Vec<IpNet>,
    pub(super) bypass: Bypass,
    pub(super) plain: Vec<PlainRoute>,
    plain_links: Vec<String>,
    pub(super) masqueraded: Vec<IpNet>,
    pub(super) without_default: Vec<IpFamily>,
}

impl DesiredTraffic {
    pub(super) fn new(inputs: &Inputs, host: &Host, plan: &Plan) -> Self {
        // An address inside a block, a network of pods or a range of Services is that of a pod or a Service, whatever a node says.
        let pods: PrefixSet = inputs.members.iter().flat_map(|it| in_mesh(inputs, it)).collect();
        Self {
            mtu: mtu(inputs, host),
            targets_v4: plan.targets_ipv4.iter().copied().map(IpNet::from).collect(),
            targets_v6: plan.targets_ipv6.iter().copied().map(IpNet::from).collect(),
            bypass: bypass(inputs, plan, &pods),
            plain: plan.routes.iter().map(plain::route).collect(),
            plain_links: plain::links(host, plan),
            masqueraded: plan.masqueraded.clone(),
            without_default: host.without_default.clone(),
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
        own: own_prefixes(inputs).into_iter().chain(mesh).chain(beside).collect(),
    }
}

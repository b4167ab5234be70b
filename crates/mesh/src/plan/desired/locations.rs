//! Locations of a mesh, as this node uses them: gateways of the others, and IP tunnels inside of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use fairlead_address::is_host;
use fairlead_api::resources::Granularity;
use fairlead_keys::PublicKey;
use fairlead_topology::{self as topology, Member, PeerPlan, Plan};
use ipnet::IpNet;

use crate::model::inputs::Inputs;

/// Most nodes behind a gateway that are asked whether it forwards.
const MAX_ASKED: usize = 4;

/// A gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredGateway {
    /// The node.
    pub name: String,
    /// Some addresses of nodes that are reached through it; empty unless it is in use.
    pub behind: Vec<IpAddr>,
}

/// The gateways of a mesh with locations.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DesiredGateways {
    /// Gateways that this node uses or may use.
    pub used: BTreeMap<PublicKey, DesiredGateway>,
    /// Gateways with which this node has tunnels although another one stands for the same location, also where it prepares for them.
    pub several: BTreeSet<String>,
    /// Whether this node has tunnels with nodes of other locations.
    pub is_gateway: bool,
}

/// IP tunnels inside of the location, and the prefixes that may take them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DesiredTunnels {
    /// Addresses at which tunnels begin: at most one of each family.
    pub local: Vec<IpAddr>,
    /// Addresses that may send to this node through a tunnel.
    pub senders: BTreeSet<IpAddr>,
    /// Prefixes and the ends of the tunnels to them, sorted.
    pub routes: Vec<(IpNet, IpAddr)>,
    /// The ends, with the node that has each, and its key.
    pub ends: BTreeMap<IpAddr, (String, PublicKey)>,
    /// The internal addresses of all members, wherever they are.
    pub internal: BTreeSet<IpAddr>,
}

/// Prefixes that a peer may send from although packets to them go to another peer, by identity.
pub(super) fn accepted(plan: &Plan) -> BTreeMap<PublicKey, Vec<IpNet>> {
    let accepting = plan.peers.iter().filter(|(_, peer)| !peer.accepted_ips.is_empty());
    accepting.map(|(key, peer)| (*key, peer.accepted_ips.clone())).collect()
}

/// Gateways whose location another one stands for as well.
pub(super) fn several(plan: &Plan) -> impl Iterator<Item = String> {
    let standing_in = plan.peers.values().filter(|peer| !peer.accepted_ips.is_empty());
    standing_in.filter_map(|peer| peer.members.first().cloned())
}

/// The peers that stand for other nodes, or may.
pub(super) fn used_gateways(inputs: &Inputs, plan: &Plan) -> BTreeMap<PublicKey, DesiredGateway> {
    // Elsewhere each node is reached by itself.
    if inputs.settings.locations.granularity != Granularity::Location {
        return BTreeMap::new();
    }
    let members: BTreeMap<&str, &Arc<Member>> =
        inputs.members.iter().map(|member| (member.name.as_str(), member)).collect();
    let gateway = |(key, peer): (&PublicKey, &Arc<PeerPlan>)| {
        let own = peer.members.iter().filter_map(|name| members.get(name.as_str()));
        let addresses = |member: &&Arc<Member>| -> Vec<IpAddr> {
            let claims = member.claims.iter().map(IpNet::addr);
            claims.chain(member.addresses.mesh.iter().copied()).collect()
        };
        let own: BTreeSet<IpAddr> = own.flat_map(addresses).collect();
        let hosts = peer.allowed_ips.iter().filter(|prefix| is_host(prefix)).map(IpNet::addr);
        let behind: Vec<IpAddr> =
            hosts.filter(|address| plan.nodes.contains(address) && !own.contains(address)).collect();
        let is_gateway = !(behind.is_empty() && peer.accepted_ips.is_empty());
        let every = behind.len().div_ceil(MAX_ASKED).max(1);
        let behind = behind.into_iter().step_by(every).collect();
        let name = peer.members.first().filter(|_| is_gateway)?.clone();
        Some((*key, DesiredGateway { name, behind }))
    };
    plan.peers.iter().filter_map(gateway).collect()
}

/// IP tunnels of the plan, with the nodes at their ends.
pub(super) fn ip_tunnels(members: &[Arc<Member>], plan: &Plan) -> DesiredTunnels {
    let peers = plan.peers.iter().filter(|_| !plan.tunnels.routes.is_empty());
    let keys = peers.flat_map(|(key, peer)| peer.members.iter().map(|name| (name.as_str(), *key)));
    let keys: BTreeMap<&str, PublicKey> = keys.collect();
    let end = |route: &topology::TunnelRoute| {
        Some((route.remote, (route.node.clone(), *keys.get(route.node.as_str())?)))
    };
    let sites = members.iter().filter_map(|member| member.site.as_ref());
    DesiredTunnels {
        local: plan.tunnels.local.clone(),
        senders: plan.tunnels.senders.clone(),
        routes: plan.tunnels.routes.iter().map(|route| (route.destination, route.remote)).collect(),
        ends: plan.tunnels.routes.iter().filter_map(end).collect(),
        internal: sites.flat_map(|site| &site.internal).map(|it| it.address).collect(),
    }
}

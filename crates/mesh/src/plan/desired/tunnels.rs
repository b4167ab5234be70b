//! The IP tunnels inside of this node's location.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use fairlead_api::resources::Encapsulation;
use fairlead_keys::PublicKey;
use fairlead_topology::{self as topology, Member, Plan};
use ipnet::IpNet;

use crate::model::inputs::Inputs;

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

/// Encapsulation that the mesh resource asks for.
pub(super) fn encapsulation(inputs: &Inputs) -> topology::Encapsulation {
    match inputs.settings.locations.encapsulation {
        Encapsulation::Always => topology::Encapsulation::Always,
        Encapsulation::CrossSubnet => topology::Encapsulation::CrossSubnet,
        Encapsulation::Never => topology::Encapsulation::Never,
    }
}

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

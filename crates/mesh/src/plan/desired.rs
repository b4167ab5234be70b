//! The mesh as this node should have it, from what the cluster and the host say. Pure.

mod held;
mod host;
mod locations;
mod nat64;
mod next_keys;
mod own_addresses;
mod own_endpoints;
mod peer;
mod peers;
mod policy;
mod problems;
mod published;
mod reuse;
mod sightings;
mod stun;
mod traffic;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use fairlead_dataplane::mesh::{MeshState, NarrowRoute, PlainRoute};
use fairlead_keys::{PeerConfig, PublicKey};
use fairlead_path::{NatType, OwnSide};
use fairlead_topology::{Planner, added, united};
use ipnet::IpNet;

pub use self::held::Held;
pub use self::host::{Host, mtu};
pub use self::locations::{DesiredGateway, DesiredGateways, DesiredTunnels};
pub use self::own_addresses::{OwnAddresses, OwnEndpoints, StunAnswers};
use self::own_endpoints::Location;
pub use self::peer::DesiredPeer;
use self::peers::peers;
use self::problems::problems;
use self::published::Harvest;
use self::reuse::{Known, Reuse};
use self::sightings::Sightings;
pub use self::stun::stun_servers;
pub use self::traffic::DesiredTraffic;
use super::down_peers;
use super::external::{self, DesiredExternal};
use crate::model::inputs::Inputs;
use crate::model::problem::MeshProblem;

/// Everything the kernel is to have, and what is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Desired {
    /// Nodes by identity.
    pub peers: BTreeMap<PublicKey, Arc<DesiredPeer>>,
    /// Peers among `peers` to which nothing is sent: they are peers with the granularity that other nodes may use.
    pub added: BTreeSet<PublicKey>,
    /// Peers outside of the cluster by identity.
    pub external: BTreeMap<PublicKey, DesiredExternal>,
    /// Keys that nodes are about to use, each with what the device is to have of it.
    pub prepared: BTreeMap<PublicKey, PeerConfig>,
    /// Prefixes that a peer may send from although packets to them go to another peer, by identity.
    pub accepted: BTreeMap<PublicKey, Vec<IpNet>>,
    /// This node's endpoints that it publishes.
    pub endpoints: OwnEndpoints,
    /// The address translation in front of this node, as far as it is known.
    pub nat: NatType,
    /// Addresses, networks and filters of this node, for its path agent.
    pub own_side: OwnSide,
    /// This node's prefixes.
    pub own_prefixes: Vec<IpNet>,
    /// Addresses of this node on the mesh, with the lengths of their subnets.
    pub mesh_addresses: Vec<IpNet>,
    /// Problems of the mesh, as of this plan: parts that were left out, answers that are not used.
    pub problems: Vec<MeshProblem>,
    /// Gateways of locations.
    pub gateways: DesiredGateways,
    /// IP tunnels inside of the location.
    pub tunnels: DesiredTunnels,
    /// Packets that go into the device, and those that go past it.
    pub traffic: DesiredTraffic,
    harvest: Harvest,
}

impl Desired {
    /// Plans and looks for the endpoints of every peer. Takes `O(n log n)`.
    pub fn new(inputs: &Inputs, host: &Host, held: Held, own_addresses: &OwnAddresses) -> Self {
        Self::following(None, &mut Planner::default(), inputs, host, held, own_addresses)
    }

    /// Plans as [`Self::new`] does. Parts of the last plan of `planner`, and of the desired state `before` with its inputs, stay where they
    /// follow from the same: a change of one member costs little more than copying lists.
    pub fn following(
        before: Option<(&Inputs, &Self)>,
        planner: &mut Planner,
        inputs: &Inputs,
        host: &Host,
        held: Held,
        own_addresses: &OwnAddresses,
    ) -> Self {
        let (policy, other) = policy::policy(inputs, host, held);
        let asked = other.map(|other| (other, policy.clone()));
        let used = planner.plan(&inputs.members, policy);
        let both = asked.and_then(|(other, policy)| united(&inputs.members, &policy, other, used));
        let plan = both.as_ref().map_or(used, |both| &both.plan);
        let planned = both.iter().map(|both| &both.other).chain([used]);
        let sightings = Sightings::new(&inputs.members);
        let cluster_addresses = inputs.cluster_addresses();
        let filters = inputs.filters();
        let mesh_addresses = inputs.mesh_addresses();
        let own_prefixes = inputs.own_prefixes();
        let location = Location::new(inputs, host, &sightings, own_addresses, &cluster_addresses);
        let reuse = Reuse::new(before.map(known), inputs, &location, &cluster_addresses);
        let peers =
            peers(inputs, plan, &sightings, &location, &cluster_addresses, &filters.tried, reuse.as_ref());
        let Location { endpoints, view, nat, refused } = location;
        let problems = problems(inputs, plan, &own_addresses.stun, &cluster_addresses);
        let traffic = DesiredTraffic::new(inputs, host, plan);
        let without_source = traffic.without_source.iter().copied();
        let sources = without_source.map(|family| MeshProblem::NoAddressInMesh { family });
        Self {
            prepared: next_keys::prepared(plan, &peers),
            peers,
            added: added(used, plan),
            external: external::external_peers(inputs, plan, &view.nat64),
            accepted: next_keys::accepted(plan, locations::accepted(plan)),
            endpoints: endpoints.published(&filters.published),
            nat,
            own_prefixes,
            mesh_addresses,
            problems: problems.into_iter().chain(refused).chain(sources).collect(),
            gateways: DesiredGateways {
                used: locations::used_gateways(inputs, used),
                several: planned.flat_map(locations::several).collect(),
                is_gateway: plan.is_gateway,
            },
            tunnels: locations::ip_tunnels(&inputs.members, plan),
            traffic,
            own_side: OwnSide {
                view,
                cluster_addresses,
                host: endpoints.host,
                mapped: endpoints.mapped,
                filters,
                extra: inputs.own.extra_endpoints.clone(),
            },
            harvest: Harvest::new(inputs),
        }
    }

    /// Whether this node is to publish that it sees a peer at an endpoint.
    pub fn publishes(&self, peer: &DesiredPeer, endpoint: SocketAddr) -> bool {
        self.harvest.publishes(peer, endpoint)
    }

    /// Desired state of the kernel: targets, routes and exceptions for the device `interface`.
    /// Packets to nodes that are `bypassed` are led nowhere; `encapsulated` takes IP tunnels. `route_mtu` says which packets the path to a
    /// peer passes, if these are shorter than the tunnel's.
    pub fn mesh_state(
        &self,
        interface: &str,
        bypassed: &BTreeSet<PublicKey>,
        encapsulated: Vec<PlainRoute>,
        route_mtu: impl Fn(&PublicKey) -> Option<u32>,
    ) -> MeshState {
        let narrow = narrow(&self.peers, self.traffic.mtu, route_mtu);
        let of_peers = self.external.values().flat_map(|peer| &peer.config.allowed_ips);
        // What takes a plain route or an IP tunnel needs no tunnel of WireGuard.
        let routes = self.traffic.plain.iter().chain(&encapsulated).map(|route| &route.destination);
        let bypassed = down_peers::addresses(bypassed, &self.peers, of_peers.chain(routes));
        let (targets_v4, targets_v6) = self.traffic.targets_without(&bypassed);
        MeshState {
            interface: interface.to_owned(),
            mtu: self.traffic.mtu,
            addresses: self.mesh_addresses.clone(),
            targets_v4,
            targets_v6,
            bypass: self.traffic.bypass.clone(),
            narrow,
            // What is plain comes first: of two routes to one prefix the first counts.
            plain: self.traffic.plain.iter().cloned().chain(encapsulated).collect(),
            masqueraded: self.traffic.masqueraded.clone(),
            without_default: self.traffic.without_default.clone(),
            listen_port: self.traffic.listen_port,
            sources: self.traffic.sources.clone(),
            uplinks: self.traffic.uplinks.clone(),
        }
    }
}

fn known<'a>((inputs, desired): (&'a Inputs, &'a Desired)) -> Known<'a> {
    Known { inputs, peers: &desired.peers, own_side: &desired.own_side, nat: desired.nat }
}

/// Prefixes of peers to which paths pass shorter packets than the tunnel's.
fn narrow(
    peers: &BTreeMap<PublicKey, Arc<DesiredPeer>>,
    tunnel: u32,
    route_mtu: impl Fn(&PublicKey) -> Option<u32>,
) -> Vec<NarrowRoute> {
    let of_peer = |(key, peer): (&PublicKey, &Arc<DesiredPeer>)| {
        let mtu = route_mtu(key).filter(|mtu| *mtu < tunnel)?;
        let prefixes = peer.config.allowed_ips.clone();
        Some(prefixes.into_iter().map(move |destination| NarrowRoute { destination, mtu }))
    };
    peers.iter().filter_map(of_peer).flatten().collect()
}

#[cfg(test)]
pub(crate) mod tests;

//! The mesh as this node should have it, from what the cluster and the host say. Pure.

mod gateways;
mod host;
mod nat64;
mod next_keys;
mod own_addresses;
mod own_endpoints;
mod peer;
mod peers;
mod plain;
mod pods;
mod problems;
mod published;
mod reuse;
mod sightings;
mod tunnels;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use fairlead_address::{AddressFilter, IpFamily, PrefixSet};
use fairlead_api::resources::Granularity;
use fairlead_dataplane::mesh::{Bypass, MeshState, PlainRoute};
use fairlead_dataplane::uplink;
use fairlead_keys::{PeerConfig, PublicKey};
use fairlead_path::{Nat64, NatType, OwnSide, OwnView, classify};
use fairlead_topology::{Down, Plan, Planner, Policy, added, united};
use ipnet::IpNet;

pub use self::gateways::DesiredGateway;
pub use self::host::Host;
pub use self::own_addresses::{OwnAddresses, StunAnswers};
use self::own_endpoints::{host_endpoints, mapped, reflexive, seen};
pub use self::peer::DesiredPeer;
use self::peers::peers;
use self::pods::{in_mesh, own_prefixes, pod_prefixes};
use self::problems::problems;
use self::reuse::{Known, Reuse};
use self::sightings::Sightings;
pub use self::tunnels::DesiredTunnels;
use super::down_peers;
use super::external::{self, DesiredExternal};
use super::inputs::Inputs;
use super::problem::MeshProblem;

/// What a WireGuard device has at each key, and which Peers have come to this node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Held {
    /// Prefixes by key.
    pub prefixes: BTreeMap<PublicKey, BTreeSet<IpNet>>,
    /// Terms of this node as an entry node, by key.
    pub entry_terms: BTreeMap<PublicKey, u64>,
    /// Gateways that do not forward.
    pub down: Down,
    /// Keys that members announced and that have completed a handshake.
    pub completed: BTreeSet<PublicKey>,
    /// While the granularity changes, the one that other nodes may use: this node has tunnels for that too.
    pub other: Option<Granularity>,
}

/// Everything the kernel is to have, and what is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Desired {
    /// Nodes by identity.
    pub peers: BTreeMap<PublicKey, Arc<DesiredPeer>>,
    /// Those of them to which nothing is sent: they are peers with the granularity that others may use.
    pub added: BTreeSet<PublicKey>,
    /// Peers outside of the cluster by identity.
    pub external: BTreeMap<PublicKey, DesiredExternal>,
    /// Keys that nodes are about to use, each with what the device is to have of it.
    pub prepared: BTreeMap<PublicKey, PeerConfig>,
    /// This node's endpoints that it publishes: its addresses with its port.
    pub host: Vec<SocketAddr>,
    /// Where other nodes see this one.
    pub observed: Vec<SocketAddr>,
    /// Where STUN servers see this node, other than at an address of its own.
    pub reflexive: Vec<SocketAddr>,
    /// Where gateways take packets for this node, other than at an address of its own.
    pub mapped: Vec<SocketAddr>,
    /// The public address that EC2 translates to its own.
    pub public_ipv4: Option<Ipv4Addr>,
    /// Where peers see this node, as they told it and no other node; without what is above.
    pub peer_reflexive: Vec<SocketAddr>,
    /// The address translation in front of this node, as far as it is known.
    pub nat: NatType,
    /// How this node reaches IPv4 endpoints.
    pub nat64: Nat64,
    /// What the paths have to know of this node.
    pub own_side: OwnSide,
    /// This node's prefixes.
    pub own_prefixes: Vec<IpNet>,
    /// Its addresses on the mesh, with the lengths of their subnets.
    pub mesh_addresses: Vec<IpNet>,
    /// What was left out.
    pub problems: Vec<MeshProblem>,
    /// Gateways that this node uses or may use.
    pub gateways: BTreeMap<PublicKey, DesiredGateway>,
    /// Those that this node has tunnels with although another one stands for the same location, also where it prepares for them.
    pub several_gateways: BTreeSet<String>,
    /// What peers may send from although other peers are sent for it.
    pub accepted: BTreeMap<PublicKey, Vec<IpNet>>,
    /// Whether this node has tunnels with nodes of other locations.
    pub is_gateway: bool,
    /// IP tunnels inside of the location.
    pub tunnels: DesiredTunnels,
    harvests_endpoints: bool,
    /// Which endpoints of peers this node publishes whose Nodes do not say that.
    published_of_peers: AddressFilter,
    mtu: u32,
    targets_v4: Vec<IpNet>,
    targets_v6: Vec<IpNet>,
    bypass: Bypass,
    plain: Vec<PlainRoute>,
    plain_links: Vec<String>,
    masqueraded: Vec<IpNet>,
    without_default: Vec<IpFamily>,
}

/// MTU of the device on this host.
pub fn mtu(inputs: &Inputs, host: &Host) -> u32 {
    uplink::mesh_mtu(inputs.settings.mtu, host.uplink_mtu)
}

/// The STUN servers to ask, each once; through the NAT64 those that this node has no route to.
pub fn stun_servers(inputs: &Inputs, host: &Host) -> Vec<SocketAddr> {
    let (nat64, _) = nat64::usable(inputs, &host.addresses, &host.ipv4_routes);
    let mut servers = Vec::new();
    for server in inputs.stun_servers() {
        let translated = nat64.endpoints(server).into_iter().next();
        let server = translated.unwrap_or(server);
        if !servers.contains(&server) {
            servers.push(server);
        }
    }
    servers
}

impl Desired {
    /// Plans and looks for the endpoints of every peer. Takes `O(n log n)`.
    pub fn new(inputs: &Inputs, host: &Host, held: Held, own_addresses: &OwnAddresses) -> Self {
        Self::following(None, &mut Planner::default(), inputs, host, held, own_addresses)
    }

    /// The same. What `planner` planned and what was desired before, with the inputs then, stays where it follows from the same: a change of
    /// one member costs little more than copying lists.
    pub fn following(
        before: Option<(&Inputs, &Self)>,
        planner: &mut Planner,
        inputs: &Inputs,
        host: &Host,
        held: Held,
        own_addresses: &OwnAddresses,
    ) -> Self {
        let OwnAddresses { stun, peers: by_peers, filtering } = own_addresses;
        let local = host.networks.iter().filter(|_| inputs.settings.bypass_local_subnets);
        let excluded = inputs.settings.excluded.iter().chain(local).copied().collect();
        let grants = inputs.settings.grants.clone();
        let api_server = inputs.api_server.iter().map(SocketAddr::ip);
        let reserved = api_server.chain(host.gateways.iter().copied()).map(IpNet::from).collect();
        let services = inputs.services.clone();
        let includes_pod_networks = inputs.settings.includes_pod_networks;
        let guarded = inputs.departures.guarded(includes_pod_networks).copied().collect();
        let Held { prefixes: held, entry_terms, down, completed, other } = held;
        let other = other.map(|other| plain::granularity(other, host, down.clone()));
        let granularity = plain::granularity(inputs.settings.granularity, host, down);
        let policy = Policy {
            excluded,
            guarded,
            held,
            completed,
            reserved,
            services,
            grants,
            sources: BTreeMap::clone(&inputs.sources),
            entry_terms,
            granularity,
            encapsulation: tunnels::encapsulation(inputs),
            includes_pod_networks,
            connected: host.networks.clone(),
            ..Policy::new(&inputs.node)
        };
        let asked = other.map(|other| (other, policy.clone()));
        let used = planner.plan(&inputs.members, policy);
        let both = asked.and_then(|(other, policy)| united(&inputs.members, &policy, other, used));
        let plan = both.as_ref().map_or(used, |both| &both.plan);
        let planned = both.iter().map(|both| &both.other).chain([used]);
        let sightings = Sightings::new(&inputs.members);
        // An address inside a block, a network of pods or a range of Services is that of a pod or a Service, whatever a node says.
        let pods_in_mesh: PrefixSet = inputs.members.iter().flat_map(|it| in_mesh(inputs, it)).collect();
        let cluster_addresses: PrefixSet = cluster_addresses(inputs);
        let is_outside = |endpoint: &SocketAddr| !cluster_addresses.contains(endpoint.ip());
        let mut endpoints = host_endpoints(inputs, &host.addresses, host.port);
        endpoints.retain(is_outside);
        let mut observed = sightings.own_endpoints(inputs);
        observed.retain(is_outside);
        let mut reflexive = reflexive(&endpoints, stun);
        reflexive.retain(is_outside);
        let mapped = mapped(inputs, host.port, &endpoints, &cluster_addresses);
        let is_news =
            |seen: &&SocketAddr| !(endpoints.contains(seen) || reflexive.contains(seen)) && is_outside(seen);
        let peer_reflexive: Vec<SocketAddr> = by_peers.iter().filter(is_news).copied().collect();
        let (nat64, refused) = nat64::usable(inputs, &host.addresses, &host.ipv4_routes);
        let own = OwnView {
            addresses: endpoints.iter().map(SocketAddr::ip).collect(),
            // A public address on an interface of this host says nothing about who else is near.
            public_ips: observed
                .iter()
                .filter(|seen| !endpoints.contains(seen))
                .chain(&reflexive)
                .chain(&mapped)
                .chain(&peer_reflexive)
                .map(SocketAddr::ip)
                .collect(),
            prefixes: host.networks.clone(),
            nat64,
        };
        let nat =
            classify(&endpoints, &seen(inputs, &sightings, stun, &own.nat64)).with_filtering(*filtering);
        let filters = inputs.filters();
        let published = |endpoints| filters.published.apply(endpoints, SocketAddr::ip);
        let known = before.map(|(inputs, desired)| Known {
            inputs,
            peers: &desired.peers,
            own_side: &desired.own_side,
            nat: desired.nat,
        });
        let reuse = Reuse::new(known, inputs, &own, &cluster_addresses, nat);
        let peers = peers(inputs, plan, &sightings, &own, &cluster_addresses, nat, reuse.as_ref());
        Self {
            prepared: next_keys::prepared(plan, &peers),
            peers,
            external: external::desired(inputs, plan, &own.nat64),
            nat,
            observed: published(observed),
            reflexive: published(reflexive),
            peer_reflexive: published(peer_reflexive),
            public_ipv4: inputs.public_ipv4.filter(|it| filters.published.allows((*it).into())),
            own_prefixes: own_prefixes(inputs),
            mesh_addresses: inputs.mesh_addresses(),
            problems: problems(inputs, plan, stun, &cluster_addresses).into_iter().chain(refused).collect(),
            nat64: own.nat64.clone(),
            bypass: bypass(inputs, plan, &pods_in_mesh),
            plain_links: plain::links(host, plan),
            gateways: gateways::desired(inputs, used),
            several_gateways: planned.flat_map(gateways::several).collect(),
            added: added(used, plan),
            accepted: next_keys::accepted(plan, gateways::accepted(plan)),
            masqueraded: plan.masqueraded.clone(),
            without_default: host.without_default.clone(),
            is_gateway: plan.is_gateway,
            tunnels: tunnels::desired(inputs, plan),
            plain: plan.routes.iter().map(plain::route).collect(),
            host: published(endpoints.clone()),
            mapped: published(mapped.clone()),
            own_side: OwnSide {
                view: own,
                cluster_addresses,
                host: endpoints,
                mapped,
                filters: filters.clone(),
                extra: inputs.extra_endpoints.clone(),
            },
            harvests_endpoints: inputs.settings.harvests_endpoints,
            published_of_peers: inputs.settings.filters.published.clone(),
            mtu: mtu(inputs, host),
            targets_v4: plan.targets_ipv4.iter().copied().map(IpNet::from).collect(),
            targets_v6: plan.targets_ipv6.iter().copied().map(IpNet::from).collect(),
        }
    }

    /// What leads packets into the device `interface`.
    /// Packets to nodes that are `bypassed` are led nowhere; `encapsulated` takes IP tunnels. `route_mtu` says which packets the path to a
    /// peer passes, if these are shorter than the tunnel's.
    pub fn mesh_state(
        &self,
        interface: &str,
        bypassed: &BTreeSet<PublicKey>,
        encapsulated: Vec<PlainRoute>,
        route_mtu: impl Fn(&PublicKey) -> Option<u32>,
    ) -> MeshState {
        let (targets_v4, targets_v6) = self.targets_without(bypassed, &encapsulated);
        MeshState {
            interface: interface.to_owned(),
            mtu: self.mtu,
            addresses: self.mesh_addresses.clone(),
            targets_v4,
            targets_v6,
            bypass: self.bypass.clone(),
            // What is plain comes first: of two routes to one prefix the first counts.
            plain: self.plain.iter().cloned().chain(encapsulated).collect(),
            narrow: plain::narrow(&self.peers, self.mtu, route_mtu),
            masqueraded: self.masqueraded.clone(),
            without_default: self.without_default.clone(),
        }
    }

    fn targets_without(
        &self,
        bypassed: &BTreeSet<PublicKey>,
        encapsulated: &[PlainRoute],
    ) -> (Vec<IpNet>, Vec<IpNet>) {
        let of_peers = self.external.values().flat_map(|peer| &peer.config.allowed_ips);
        // What takes a plain route or an IP tunnel needs no tunnel of WireGuard.
        let routes = self.plain.iter().chain(encapsulated).map(|route| &route.destination);
        let others = of_peers.chain(routes);
        let bypassed = down_peers::addresses(bypassed, &self.peers, others);
        if bypassed == PrefixSet::default() {
            return (self.targets_v4.clone(), self.targets_v6.clone());
        }
        let targets: PrefixSet = self.targets_v4.iter().chain(&self.targets_v6).collect();
        let left = targets.subtract(&bypassed);
        let ipv4 = left.ipv4_prefixes().into_iter().map(IpNet::from).collect();
        (ipv4, left.ipv6_prefixes().into_iter().map(IpNet::from).collect())
    }

    /// What leaves without a tunnel.
    pub fn plain_prefixes(&self) -> BTreeSet<IpNet> {
        self.plain.iter().map(|route| route.destination).collect()
    }

    /// Names of the links on which packets of other nodes arrive without a tunnel.
    pub fn plain_links(&self) -> &[String] {
        &self.plain_links
    }
}

/// Only what is really an endpoint of the API server or a node goes past the mesh, and what pods of the relay answer.
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

/// Addresses of pods and Services, and those of nodes on the mesh.
fn cluster_addresses(inputs: &Inputs) -> PrefixSet {
    let on_mesh = inputs.members.iter().flat_map(|member| &member.mesh_addresses);
    let on_mesh: Vec<IpNet> = on_mesh.copied().map(IpNet::from).collect();
    pod_prefixes(inputs).chain(&inputs.services).chain(&on_mesh).collect()
}

#[cfg(test)]
pub(crate) mod tests;

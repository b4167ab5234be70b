//! Desired state of the mesh on this host: what the planner says, and what the tables, rules and routes are made from.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use fairlead_api::names;
use fairlead_netlink::route::{IpFamily, Route};
use ipnet::IpNet;

/// The least MTU of a link in IPv6 (RFC 8200, section 5).
pub(super) const IPV6_MIN_MTU: u32 = 1280;

/// Desired state of the mesh on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MeshState {
    /// Name of the WireGuard device; it has to be there and up.
    pub interface: String,
    /// MTU of that device in bytes.
    pub mtu: u32,
    /// Addresses of this node on the device, with the lengths of their subnets. Those of other programs stay.
    pub addresses: Vec<IpNet>,
    /// IPv4 prefixes of the other nodes, in any order; they may overlap.
    pub targets_v4: Vec<IpNet>,
    /// IPv6 prefixes of the other nodes, in any order; they may overlap.
    pub targets_v6: Vec<IpNet>,
    /// Packets that go past the mesh although their destination is a target.
    pub bypass: Bypass,
    /// Prefixes of targets that are reached without the device.
    pub plain: Vec<PlainRoute>,
    /// Prefixes of targets to which the way through the device is narrower than the device.
    pub narrow: Vec<NarrowRoute>,
    /// Prefixes of hosts beside this node, which have no route to targets: what comes from these is masqueraded. In any order;
    /// they may overlap.
    pub masqueraded: Vec<IpNet>,
    /// Families without a default route on this host: the table gets routes to the targets of these, which the kernel finds before
    /// packets of this host are marked. Elsewhere the default route is found.
    pub without_default: Vec<IpFamily>,
    /// UDP port of WireGuard; 0 while it is not known.
    pub listen_port: u16,
    /// Addresses by which peers know this host, at most one of each family. Packets into the device get them as their source in place of one that
    /// peers do not accept from this node.
    pub sources: Vec<OwnSource>,
    /// Names of the links by which packets of other nodes come past the mesh.
    pub uplinks: Vec<String>,
}

/// An address of this node, among [`Bypass::own`], that packets into the mesh have as their source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnSource {
    /// The address.
    pub address: IpAddr,
    /// A link of this host has it: only then routes can prefer it.
    pub is_on_host: bool,
}

/// A prefix of a node, the path to which loses packets that are longer than this. The kernel tells their senders (RFC 1191,
/// RFC 8201).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NarrowRoute {
    /// The prefix.
    pub destination: IpNet,
    /// Length of the longest packets.
    pub mtu: u32,
}

/// A prefix of a node on a subnet of this host, for which its packets leave as they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlainRoute {
    /// The prefix.
    pub destination: IpNet,
    /// The node's address on the subnet.
    pub gateway: IpAddr,
    /// Index of the link.
    pub link: u32,
    /// The link is an IP tunnel, the other end of which is the gateway.
    pub is_tunnel: bool,
}

/// Connections between nodes and the API server go past the mesh, in both directions, or a tunnel that is down would cut
/// nodes off from the very thing that could mend it: their peers, and the pod that is to run here next. Connections of
/// pods do not: only the mesh leads back to them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Bypass {
    /// TCP endpoints of the API server, on this node or elsewhere.
    pub servers: Vec<SocketAddr>,
    /// Connections between control-plane nodes whose tunnel is not up.
    pub control_plane: ControlPlane,
    /// Endpoints of pods of the managed relay: their answers to nodes go the way the request came, since nodes connect to them past the mesh.
    pub relays: Vec<SocketAddr>,
    /// The other nodes' own addresses.
    pub nodes: Vec<IpAddr>,
    /// Prefixes from which peers accept packets of this node: its addresses and those of its pods. Connections to other addresses of this
    /// host come past the mesh, and are answered the same way.
    pub own: Vec<IpNet>,
}

/// Connections between control-plane nodes; without any nodes there is no exception. Packets that a guard against clear text has to let
/// pass are those of this host to [`Self::nodes`] from and to one of the ports.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ControlPlane {
    /// TCP ports whose protocols encrypt themselves.
    pub ports: Vec<u16>,
    /// Addresses of the other control-plane nodes; empty on other nodes.
    pub nodes: Vec<IpAddr>,
    /// Nodes among them whose tunnel is not up.
    pub down: Vec<IpAddr>,
}

impl ControlPlane {
    /// Connections with these nodes, none of which has a tunnel yet. API servers may listen on other ports than the usual one.
    pub fn of(nodes: impl Iterator<Item = IpAddr>, api_servers: &[SocketAddr]) -> Self {
        let ports: BTreeSet<u16> =
            names::CONTROL_PLANE_PORTS.into_iter().chain(api_servers.iter().map(SocketAddr::port)).collect();
        let nodes: Vec<IpAddr> = nodes.collect();
        Self { ports: ports.into_iter().collect(), down: nodes.clone(), nodes }
    }

    pub(super) fn families(&self) -> impl Iterator<Item = IpFamily> {
        let has_any = move |family: &IpFamily| self.nodes.iter().any(|node| IpFamily::of(*node) == *family);
        IpFamily::BOTH.into_iter().filter(has_any)
    }
}

/// `None` for a route to everything, whose place is taken, and for an MTU that IPv6 does not have.
pub(super) fn narrow_route(NarrowRoute { destination, mtu }: &NarrowRoute, link: u32) -> Option<Route> {
    let is_possible = destination.addr().is_ipv4() || *mtu >= IPV6_MIN_MTU;
    let onto = || Route::onto(names::TABLE_MESH, names::ROUTE_PROTOCOL, *destination, link);
    (is_possible && destination.prefix_len() > 0).then(|| Route { mtu: Some(*mtu), ..onto() })
}

pub(super) fn plain_route(PlainRoute { destination, gateway, link, is_tunnel }: &PlainRoute) -> Route {
    let table = names::TABLE_MESH;
    let protocol = names::ROUTE_PROTOCOL;
    if destination.addr() == *gateway && destination.prefix_len() == destination.max_prefix_len() {
        return Route::onto(table, protocol, *destination, *link);
    }
    // An administrator may give the subnet another length than this host's address has.
    Route {
        onlink: !is_tunnel || gateway.is_ipv4(),
        ..Route::via(table, protocol, *destination, *gateway, *link)
    }
}

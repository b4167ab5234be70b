//! Members that share a location with this node, and those of their prefixes that take the network of the location, as they are or in
//! IP tunnels.
//!
//! The location of a member comes from its Node, by way of the controller: no node says it of itself. Members of one location keep
//! their tunnels, and packets are accepted from both: nodes may see a change at different moments, and a route that is gone (its link
//! is down) leaves the tunnel behind it.
//!
//! Both ends of an IP tunnel are what every node takes for a member's tunnel address in a family: the first of its internal addresses,
//! unless another member of the location names it too. Packets to that address itself stay with the peer: what the kernel learns of the
//! path MTU to it counts for the outer packets, too, which would become ever shorter.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use fairlead_keys::PublicKey;
use ipnet::IpNet;

use crate::member::Member;
use crate::peer::PeerPlan;
use crate::policy::Policy;
use crate::problem::Problem;
use crate::routes::BlockRoute;
use crate::site::{Encapsulation, InternalAddress, OwnAddress, Site};

/// The IP tunnels of this node inside of its location. A packet in such a tunnel has outer addresses of the same family.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tunnels {
    /// Addresses of this node at which it receives, and from which it sends: at most one of each family.
    pub local: Vec<IpAddr>,
    /// Addresses of members of the location, from which packets are accepted.
    pub senders: BTreeSet<IpAddr>,
    /// Prefixes that may go through a tunnel in place of their peer, sorted by destination. The peer stays, for as long as the tunnel
    /// does not work.
    pub routes: Vec<TunnelRoute>,
}

/// A prefix and the end of the tunnel towards it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TunnelRoute {
    /// The prefix.
    pub destination: IpNet,
    /// The node at the other end.
    pub node: String,
    /// The node's address there.
    pub remote: IpAddr,
}

/// Plain routes to members of this node's location, each in place of its peer, sorted by destination; and the tunnels to those that
/// are to get no plain route. Takes `O(n log n)`.
pub(crate) fn routes(
    policy: &Policy,
    members: &[&Member],
    peers: &BTreeMap<PublicKey, Arc<PeerPlan>>,
    problems: &mut BTreeSet<Problem>,
) -> (Vec<BlockRoute>, Tunnels) {
    let location = || Location::of(&policy.own, policy.granularity.addresses()?, members);
    let Some(location) = location() else { return Default::default() };
    let encapsulation = policy.encapsulation;
    problems.extend(location.shared_addresses(encapsulation));
    let mut routes = Vec::new();
    let mut tunnels = location.tunnels(encapsulation);
    for peer in peers.values() {
        // With a key that two members publish, no one knows which of them is meant.
        let [name] = peer.members.as_slice() else { continue };
        let Some(neighbour) = location.neighbours.get(name.as_str()) else { continue };
        for &destination in &peer.allowed_ips {
            let node = name.clone();
            let is_ipv4 = destination.addr().is_ipv4();
            let plain =
                location.next_hop(neighbour, is_ipv4).filter(|_| encapsulation != Encapsulation::Always);
            if let Some((gateway, link)) = plain {
                routes.push(BlockRoute { destination, node, gateway, link });
            } else if tunnels.local.iter().any(|local| local.is_ipv4() == is_ipv4)
                && let Some(remote) = location.tunnel_address(neighbour, is_ipv4)
                && destination != IpNet::from(remote)
            {
                tunnels.routes.push(TunnelRoute { destination, node, remote });
            }
        }
    }
    routes.sort_by_key(|route| route.destination);
    tunnels.routes.sort_by_key(|route| route.destination);
    (routes, tunnels)
}

/// The location of this node.
struct Location<'a> {
    /// Place of this node in the location.
    site: &'a Site,
    /// Other members of the location, by name.
    neighbours: BTreeMap<&'a str, &'a Site>,
    /// Names of the members that name each address their own.
    holders: BTreeMap<IpAddr, BTreeSet<&'a str>>,
    /// This node's internal addresses, with the subnet and the link of each.
    own: Vec<(InternalAddress, IpNet, u32)>,
}

impl<'a> Location<'a> {
    /// `None` if this node is a location of its own.
    fn of(own: &'a str, addresses: &[OwnAddress], members: &[&'a Member]) -> Option<Self> {
        let site = members.iter().find(|member| member.name == own)?.site.as_ref()?;
        let on_host = |internal: &InternalAddress| {
            let found = addresses.iter().find(|it| it.prefix.addr() == internal.address)?;
            let forced = internal.length.map(|length| IpNet::new(internal.address, length));
            Some((*internal, forced.unwrap_or(Ok(found.prefix)).ok()?.trunc(), found.link))
        };
        let on_host: Vec<_> = site.internal.iter().filter_map(on_host).collect();
        if on_host.is_empty() {
            return None;
        }
        let mut holders: BTreeMap<IpAddr, BTreeSet<&str>> = BTreeMap::new();
        for address in addresses {
            holders.entry(address.prefix.addr()).or_default().insert(own);
        }
        let mut neighbours = BTreeMap::new();
        let is_node = |member: &&Member| member.external.is_none() && !member.discovery.is_only_source;
        let nodes = members.iter().copied().filter(is_node);
        for member in nodes.filter(|member| member.name != own) {
            let Some(other) = member.site.as_ref().filter(|it| it.location == site.location) else {
                continue;
            };
            neighbours.insert(member.name.as_str(), other);
            for internal in &other.internal {
                holders.entry(internal.address).or_default().insert(&member.name);
            }
        }
        Some(Self { site, neighbours, holders, own: on_host })
    }

    /// The ends of this node's tunnels, without routes.
    fn tunnels(&self, encapsulation: Encapsulation) -> Tunnels {
        if encapsulation == Encapsulation::Never {
            return Tunnels::default();
        }
        let is_on_host = |address: &IpAddr| self.own.iter().any(|(own, ..)| own.address == *address);
        let local = [true, false].into_iter().filter_map(|is_ipv4| self.tunnel_address(self.site, is_ipv4));
        let internal = self.neighbours.values().flat_map(|site| &site.internal);
        Tunnels {
            local: local.filter(is_on_host).collect(),
            senders: internal.map(|it| it.address).collect(),
            routes: Vec::new(),
        }
    }

    /// Address at which a member has its end of tunnels of a family; `None` if it has none there, or shares it with another member.
    fn tunnel_address(&self, site: &Site, is_ipv4: bool) -> Option<IpAddr> {
        let first = site.internal.iter().map(|it| it.address).find(|it| it.is_ipv4() == is_ipv4)?;
        self.holders.get(&first).is_none_or(|holders| holders.len() == 1).then_some(first)
    }

    /// Addresses on subnets of this node, or at ends of tunnels, that lead to no member, because several name them.
    fn shared_addresses(&self, encapsulation: Encapsulation) -> impl Iterator<Item = Problem> {
        let has_tunnels = encapsulation != Encapsulation::Never;
        let shared = self.holders.iter().filter(move |(address, holders)| {
            let is_near = || self.own.iter().any(|(_, subnet, _)| subnet.contains(*address));
            holders.len() > 1 && (has_tunnels || is_near())
        });
        shared.map(|(address, holders)| Problem::InternalAddressShared {
            address: *address,
            nodes: holders.iter().map(|name| (*name).to_owned()).collect(),
        })
    }

    /// An address of the member on a subnet of this node, which no other member names, and the link to it.
    fn next_hop(&self, neighbour: &Site, ipv4: bool) -> Option<(IpAddr, u32)> {
        let is_own = |address| self.holders.get(address).is_none_or(|holders| holders.len() == 1);
        let candidates = neighbour.internal.iter().filter(|it| it.address.is_ipv4() == ipv4);
        candidates.filter(|it| is_own(&it.address)).find_map(|internal| {
            let near = |(own, subnet, _): &&(InternalAddress, IpNet, u32)| {
                subnet.contains(&internal.address) && internal.may_reach(own.address)
            };
            self.own.iter().find(near).map(|(.., link)| (internal.address, *link))
        })
    }
}

#[cfg(test)]
mod tests;

//! Which members share a location with this node, and which of their prefixes take the network of the location as it is.
//!
//! Where a member is comes from its Node, by way of the controller: no node says it of itself. Members of one location keep their
//! tunnels, and packets are accepted from both: nodes may see a change at different moments, and a route that is gone
//! (its link is down) leaves the tunnel behind it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fairlead_api::wireguard::PublicKey;
use ipnet::IpNet;

use crate::gateways::Down;
use crate::member::Member;
use crate::plan::PeerPlan;
use crate::problem::Problem;
use crate::routes::{BlockRoute, OwnAddress};

/// Where a member is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Site {
    /// Name of its location; empty is the location of all members without another.
    pub location: String,
    /// Its addresses there, best first. Without any it is a location of its own.
    pub internal: Vec<InternalAddress>,
    /// An administrator wants it to be a gateway of its location.
    pub is_leader: bool,
    /// It has an address that all others can reach.
    pub is_public: bool,
    /// Prefixes of hosts beside it, which are no nodes, and which others reach through it.
    pub networks: Vec<IpNet>,
}

/// An address inside of a location.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct InternalAddress {
    /// The address.
    pub address: IpAddr,
    /// Length of its subnet, if an administrator gave it; else what this host has for its own address counts.
    pub length: Option<u8>,
}

impl InternalAddress {
    /// Whether both are in one subnet, as far as this one's length says.
    fn may_reach(&self, other: IpAddr) -> bool {
        let network = self.length.and_then(|length| IpNet::new(self.address, length).ok());
        network.is_none_or(|network| network.contains(&other))
    }
}

/// Which packets go without a tunnel.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Granularity {
    /// None.
    #[default]
    Full,
    /// Those to members of this node's location that are on a subnet with it. This host has these addresses.
    Cross(Vec<OwnAddress>),
    /// As `Cross`, and only gateways have tunnels with nodes of other locations.
    Location {
        /// Addresses of this host.
        addresses: Vec<OwnAddress>,
        /// Gateways that this node uses only if there is no other.
        down: Down,
    },
}

impl Granularity {
    /// Addresses of this host, where packets inside of the location go without a tunnel.
    fn addresses(&self) -> Option<&[OwnAddress]> {
        match self {
            Self::Cross(addresses) | Self::Location { addresses, .. } => Some(addresses),
            Self::Full => None,
        }
    }
}

/// Plain routes to members of this node's location, each in place of its peer, sorted by destination. Takes
/// `O(n log n)`.
pub(crate) fn routes(
    own: &str,
    granularity: &Granularity,
    members: &[Member],
    peers: &BTreeMap<PublicKey, PeerPlan>,
    problems: &mut BTreeSet<Problem>,
) -> Vec<BlockRoute> {
    let Some(addresses) = granularity.addresses() else { return Vec::new() };
    let Some(location) = Location::of(own, addresses, members) else { return Vec::new() };
    problems.extend(location.shared_addresses());
    let mut routes = Vec::new();
    for peer in peers.values() {
        // With a key that two members publish, no one knows which of them is meant.
        let [name] = peer.members.as_slice() else { continue };
        let Some(neighbour) = location.neighbours.get(name.as_str()) else { continue };
        for prefix in &peer.allowed_ips {
            if let Some((gateway, link)) = location.next_hop(neighbour, prefix.addr().is_ipv4()) {
                routes.push(BlockRoute { destination: *prefix, node: name.clone(), gateway, link });
            }
        }
    }
    routes.sort_by_key(|route| route.destination);
    routes
}

/// The location of this node.
struct Location<'a> {
    /// Its other members.
    neighbours: BTreeMap<&'a str, &'a Site>,
    /// Which members name an address their own.
    holders: BTreeMap<IpAddr, BTreeSet<&'a str>>,
    /// This node's internal addresses, with the subnet and the link of each.
    own: Vec<(InternalAddress, IpNet, u32)>,
}

impl<'a> Location<'a> {
    /// `None` if this node is a location of its own.
    fn of(own: &'a str, addresses: &[OwnAddress], members: &'a [Member]) -> Option<Self> {
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
        let is_node = |member: &&Member| member.external.is_none() && !member.is_discovered;
        for member in members.iter().filter(is_node).filter(|member| member.name != own) {
            let Some(other) = member.site.as_ref().filter(|it| it.location == site.location) else {
                continue;
            };
            neighbours.insert(member.name.as_str(), other);
            for internal in &other.internal {
                holders.entry(internal.address).or_default().insert(&member.name);
            }
        }
        Some(Self { neighbours, holders, own: on_host })
    }

    /// Addresses on subnets of this node that lead to no member, because several name them.
    fn shared_addresses(&self) -> impl Iterator<Item = Problem> {
        let shared = self.holders.iter().filter(|(address, holders)| {
            holders.len() > 1 && self.own.iter().any(|(_, subnet, _)| subnet.contains(*address))
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

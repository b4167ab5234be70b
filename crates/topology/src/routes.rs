//! Plain routes to the blocks of nodes on the same layer-2 network, in place of a mesh or a routing daemon.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::member::Member;
use crate::prefixes;
use crate::problem::Problem;
use crate::site::OwnAddress;

/// A block's prefix and the next hop towards it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockRoute {
    /// The prefix.
    pub destination: IpNet,
    /// The node that has it.
    pub node: String,
    /// Address of that node.
    pub gateway: IpAddr,
    /// Index of the link on which the address is a neighbour.
    pub link: u32,
}

/// Decides the routes of the node `own` to the blocks of all other nodes. Takes `O(n log n)` in the number of blocks and
/// nodes; the order of neither matters. A block that two nodes have is routed to neither.
pub(crate) fn plan(
    own: &str,
    own_addresses: &[OwnAddress],
    members: &[&Member],
    problems: &mut BTreeSet<Problem>,
) -> Vec<BlockRoute> {
    let known = Known::new(own, own_addresses, members);
    let mut routes = BTreeMap::new();
    for member in members.iter().filter(|member| member.name != own) {
        for prefix in member.blocks.iter().map(IpNet::trunc) {
            match known.route(member, prefix) {
                Ok(route) => drop(routes.insert(prefix, route)),
                Err(problem) => drop(problems.insert(problem)),
            }
        }
    }
    routes.into_values().collect()
}

struct Known<'a> {
    own_addresses: &'a [OwnAddress],
    /// Holders of each address: names of nodes, or `None` for this host.
    holders: BTreeMap<IpAddr, BTreeSet<Option<&'a str>>>,
    granted: BTreeMap<IpNet, BTreeSet<&'a str>>,
}

impl<'a> Known<'a> {
    fn new(own: &str, own_addresses: &'a [OwnAddress], members: &[&'a Member]) -> Self {
        let mut holders: BTreeMap<IpAddr, BTreeSet<Option<&str>>> = BTreeMap::new();
        for address in own_addresses {
            holders.entry(address.prefix.addr()).or_default().insert(None);
        }
        let mut granted: BTreeMap<IpNet, BTreeSet<&str>> = BTreeMap::new();
        for member in members {
            let holder = (member.name != own).then_some(member.name.as_str());
            for address in member.addresses.node.iter().flatten() {
                holders.entry(*address).or_default().insert(holder);
            }
            for prefix in &member.blocks {
                granted.entry(prefix.trunc()).or_default().insert(&member.name);
            }
        }
        Self { own_addresses, holders, granted }
    }

    fn route(&self, member: &Member, prefix: IpNet) -> Result<BlockRoute, Problem> {
        let node = || member.name.clone();
        if let Some(why) = prefixes::unusable(&prefix) {
            return Err(Problem::BlockUnusable { node: node(), prefix, why });
        }
        if let Some(nodes) = self.granted.get(&prefix).filter(|nodes| nodes.len() > 1) {
            let nodes = nodes.iter().map(|node| (*node).to_owned()).collect();
            return Err(Problem::BlockGrantedTwice { prefix, nodes });
        }
        if let Some((address, _)) = self.holders.range(prefix.network()..=prefix.broadcast()).next() {
            return Err(Problem::BlockCoversNode { node: node(), prefix, address: *address });
        }
        let Some(addresses) = &member.addresses.node else {
            return Err(Problem::NodeMissing { node: node() });
        };
        let (gateway, link) = self.next_hop(&member.name, addresses, prefix.addr().is_ipv6())?;
        Ok(BlockRoute { destination: prefix, node: node(), gateway, link })
    }

    /// The first address of the node that is a neighbour on a link of this host, else why none is.
    fn next_hop(&self, node: &str, addresses: &[IpAddr], ipv6: bool) -> Result<(IpAddr, u32), Problem> {
        let mut reason = Problem::NodeWithoutAddress { node: node.to_owned(), ipv6 };
        for address in addresses.iter().filter(|address| address.is_ipv6() == ipv6) {
            match self.neighbour(node, *address) {
                Ok(link) => return Ok((*address, link)),
                Err(problem) => reason = problem,
            }
        }
        Err(reason)
    }

    fn neighbour(&self, node: &str, address: IpAddr) -> Result<u32, Problem> {
        let mut holders = self.holders.get(&address).into_iter().flatten();
        if let Some(other) = holders.find(|holder| **holder != Some(node)) {
            let other = other.map(str::to_owned);
            return Err(Problem::NodeAddressShared { node: node.to_owned(), address, other });
        }
        let networks = self.own_addresses.iter().filter(|own| own.prefix.contains(&address));
        networks
            .min_by_key(|own| Reverse(own.prefix.prefix_len()))
            .map(|own| own.link)
            .ok_or_else(|| Problem::NodeNotConnected { node: node.to_owned(), address })
    }
}

#[cfg(test)]
mod tests;

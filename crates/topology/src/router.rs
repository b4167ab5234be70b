//! Plain routes to the blocks of nodes on the same layer-2 network, in place of a mesh or a routing daemon.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::prefixes::{self, Unusable};

/// An address of this host, with the length of the network it is in and the link it is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnAddress {
    /// Index of the link.
    pub link: u32,
    /// The address; its prefix is what the link is connected to.
    pub prefix: IpNet,
}

/// A node by its object: what it says its addresses inside the cluster are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouterNode {
    /// Its name.
    pub name: String,
    /// Its addresses of type InternalIP, in the order of the object.
    pub addresses: Vec<IpAddr>,
}

/// A block and the node the controller gave it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouterBlock {
    /// Name of the AddressBlock.
    pub name: String,
    /// The node it belongs to.
    pub node: String,
    /// Its prefixes, of one family or both.
    pub prefixes: Vec<IpNet>,
}

/// A block's prefix and the way there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockRoute {
    /// The prefix.
    pub destination: IpNet,
    /// The node that has it.
    pub node: String,
    /// That node's address.
    pub gateway: IpAddr,
    /// Index of the link on which the address is a neighbour.
    pub link: u32,
}

/// What the routes should be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Routing {
    /// At most one to each destination, sorted by it.
    pub routes: Vec<BlockRoute>,
    /// What was left out and why, sorted, each once.
    pub problems: Vec<RouterProblem>,
}

/// Why a block has no route. `Display` is a sentence for status.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum RouterProblem {
    /// Two nodes, or a node and this one, name one address: a neighbour cannot be told from the other.
    AddressTwice {
        /// The node that is not reached.
        node: String,
        /// The address.
        address: IpAddr,
        /// Another node that has it; `None` is this host.
        other: Option<String>,
    },
    /// A block covers the address of a node: the route would cut that node off.
    CoversNode {
        /// The block.
        block: String,
        /// Its prefix.
        prefix: IpNet,
        /// The address.
        address: IpAddr,
    },
    /// Two nodes have the same prefix.
    GrantedTwice {
        /// The prefix.
        prefix: IpNet,
        /// Who has it, sorted.
        nodes: Vec<String>,
    },
    /// The node has no InternalIP of the block's family.
    NoAddress {
        /// The node.
        node: String,
        /// Whether IPv6 is missing, else IPv4.
        ipv6: bool,
    },
    /// The node of a block does not exist.
    NoNode {
        /// The block.
        block: String,
        /// The name of the node.
        node: String,
    },
    /// No network of this host contains the node's address.
    NotConnected {
        /// The node.
        node: String,
        /// Its address.
        address: IpAddr,
    },
    /// A prefix nobody can route.
    Unusable {
        /// The block.
        block: String,
        /// The prefix.
        prefix: IpNet,
        /// What is wrong with it.
        why: Unusable,
    },
}

impl fmt::Display for RouterProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddressTwice { node, address, other } => write!(
                f,
                "no route to the pods of {node}: its InternalIP {address} is also that of {}; give each its own",
                other.as_deref().unwrap_or("this node")
            ),
            Self::CoversNode { block, prefix, address } => write!(
                f,
                "no route to AddressBlock {block}: {prefix} covers the node address {address}; give the pool \
                 subnets outside of the nodes' networks"
            ),
            Self::GrantedTwice { prefix, nodes } => write!(
                f,
                "no route to {prefix}: AddressBlocks give it to {}; delete the pods of all but one and its block",
                nodes.join(" and ")
            ),
            Self::NoAddress { node, ipv6 } => {
                let family = if *ipv6 { "IPv6" } else { "IPv4" };
                write!(
                    f,
                    "no {family} route to the pods of {node}: its Node has no InternalIP of that family"
                )
            }
            Self::NoNode { block, node } => {
                write!(f, "no route to AddressBlock {block}: its Node {node} does not exist")
            }
            Self::NotConnected { node, address } => write!(
                f,
                "no route to the pods of {node}: its InternalIP {address} is on no network of this node; use a \
                 WireKubeMesh or a routing daemon for nodes elsewhere"
            ),
            Self::Unusable { block, prefix, why } => {
                write!(f, "no route to AddressBlock {block}: {prefix} cannot be routed, {why}")
            }
        }
    }
}

/// Decides the routes of the node `own` to everybody else's blocks. Takes `O(n log n)` in the number of blocks and
/// nodes; the order of neither matters.
///
/// What two nodes are said to have is routed to neither, as in [`crate::plan`].
pub fn desired_routes(
    own: &str,
    own_addresses: &[OwnAddress],
    nodes: &[RouterNode],
    blocks: &[RouterBlock],
) -> Routing {
    let known = Known::new(own, own_addresses, nodes, blocks);
    let mut routes = BTreeMap::new();
    let mut problems = BTreeSet::new();
    for block in blocks.iter().filter(|block| block.node != own) {
        for prefix in block.prefixes.iter().map(IpNet::trunc) {
            match known.route(block, prefix) {
                Ok(route) => drop(routes.insert(prefix, route)),
                Err(problem) => drop(problems.insert(problem)),
            }
        }
    }
    Routing { routes: routes.into_values().collect(), problems: problems.into_iter().collect() }
}

struct Known<'a> {
    own_addresses: &'a [OwnAddress],
    nodes: BTreeMap<&'a str, &'a RouterNode>,
    /// Every address somebody has; `None` is this host.
    holders: BTreeMap<IpAddr, BTreeSet<Option<&'a str>>>,
    granted: BTreeMap<IpNet, BTreeSet<&'a str>>,
}

impl<'a> Known<'a> {
    fn new(
        own: &str,
        own_addresses: &'a [OwnAddress],
        nodes: &'a [RouterNode],
        blocks: &'a [RouterBlock],
    ) -> Self {
        let mut holders: BTreeMap<IpAddr, BTreeSet<Option<&str>>> = BTreeMap::new();
        for address in own_addresses {
            holders.entry(address.prefix.addr()).or_default().insert(None);
        }
        for node in nodes {
            let holder = (node.name != own).then_some(node.name.as_str());
            for address in &node.addresses {
                holders.entry(*address).or_default().insert(holder);
            }
        }
        let mut granted: BTreeMap<IpNet, BTreeSet<&str>> = BTreeMap::new();
        for block in blocks {
            for prefix in &block.prefixes {
                granted.entry(prefix.trunc()).or_default().insert(&block.node);
            }
        }
        let nodes = nodes.iter().map(|node| (node.name.as_str(), node)).collect();
        Self { own_addresses, nodes, holders, granted }
    }

    fn route(&self, block: &RouterBlock, prefix: IpNet) -> Result<BlockRoute, RouterProblem> {
        let name = || block.name.clone();
        if let Some(why) = prefixes::unusable(&prefix) {
            return Err(RouterProblem::Unusable { block: name(), prefix, why });
        }
        if let Some(nodes) = self.granted.get(&prefix).filter(|nodes| nodes.len() > 1) {
            let nodes = nodes.iter().map(|node| (*node).to_owned()).collect();
            return Err(RouterProblem::GrantedTwice { prefix, nodes });
        }
        if let Some((address, _)) = self.holders.range(prefix.network()..=prefix.broadcast()).next() {
            return Err(RouterProblem::CoversNode { block: name(), prefix, address: *address });
        }
        let missing = || RouterProblem::NoNode { block: name(), node: block.node.clone() };
        let node = self.nodes.get(block.node.as_str()).ok_or_else(missing)?;
        let (gateway, link) = self.way_to(node, prefix.addr().is_ipv6())?;
        Ok(BlockRoute { destination: prefix, node: node.name.clone(), gateway, link })
    }

    /// The first address of the node that is a neighbour's on a link of ours, else why none is.
    fn way_to(&self, node: &RouterNode, ipv6: bool) -> Result<(IpAddr, u32), RouterProblem> {
        let mut reason = RouterProblem::NoAddress { node: node.name.clone(), ipv6 };
        for address in node.addresses.iter().filter(|address| address.is_ipv6() == ipv6) {
            match self.neighbour(node, *address) {
                Ok(link) => return Ok((*address, link)),
                Err(problem) => reason = problem,
            }
        }
        Err(reason)
    }

    fn neighbour(&self, node: &RouterNode, address: IpAddr) -> Result<u32, RouterProblem> {
        let mut holders = self.holders.get(&address).into_iter().flatten();
        if let Some(other) = holders.find(|holder| **holder != Some(&node.name)) {
            let other = other.map(str::to_owned);
            return Err(RouterProblem::AddressTwice { node: node.name.clone(), address, other });
        }
        let networks = self.own_addresses.iter().filter(|own| own.prefix.contains(&address));
        networks
            .min_by_key(|own| Reverse(own.prefix.prefix_len()))
            .map(|own| own.link)
            .ok_or_else(|| RouterProblem::NotConnected { node: node.name.clone(), address })
    }
}

#[cfg(test)]
mod tests;

//! Sentences about problems, for users.

use std::fmt;

use super::Problem;
use crate::member::peer_name;

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoKey { node } => write!(
                f,
                "packets to {} are dropped: its WireGuard public key is all zeros; let it publish a new key",
                Name(node)
            ),
            Self::EntryNodesMissing { node, missing, is_unreachable } => {
                let missing = missing.join(", ");
                let (what, outcome) = match is_unreachable {
                    true => ("only entry nodes", "packets to it are dropped"),
                    false => ("entry nodes", "they have no tunnel with it"),
                };
                write!(
                    f,
                    "{} names {what} that publish no WireGuard key ({missing}): {outcome}; correct its entryNodes",
                    Name(node)
                )
            }
            Self::ExternalKeyTaken { node, other } => write!(
                f,
                "{} is left out: its public key is that of {}; give it a key of its own",
                Name(node),
                Name(other)
            ),
            Self::NextKeyTaken { node, other } => write!(
                f,
                "the key that {} announces as its next one is that of {}: the announcement is ignored",
                Name(node),
                Name(other)
            ),
            Self::ExternalPrefixRefused { node, prefix, why } => {
                write!(f, "{} claims {prefix}, which is left out: {why}; correct its allowedIPs", Name(node))
            }
            Self::PodNetworkRefused { node, prefix, why } => write!(
                f,
                "{} has {prefix} in spec.podCIDRs, which is left out of the mesh: {why}",
                Name(node)
            ),
            Self::SitePrefixRefused { node, prefix, why } => write!(
                f,
                "{} is to lead to {prefix}, which is left out: {why}; correct its annotation kilo.squat.ai/allowed-location-ips",
                Name(node)
            ),
            Self::NotPublished { node } => write!(
                f,
                "packets to the pods of {node} are dropped: it has address blocks and no WireKubePeer with a public key; \
                 see why its node program does not publish one, or delete its AddressBlocks if it is gone for good"
            ),
            Self::SharedKey { key, nodes, own } => {
                let outcome = if *own {
                    "packets to the others are dropped"
                } else {
                    "packets to all of them go to the one that has the private key"
                };
                write!(
                    f,
                    "nodes {} publish the same WireGuard public key {key}: {outcome}; delete the key file on all but one \
                     (cloned machines?), or the WireKubePeer of the one that copied it",
                    Names(nodes)
                )
            }
            Self::Unusable { node, prefix, why } => {
                write!(
                    f,
                    "{} names {prefix}, which is left out of the mesh: {why}; correct what it publishes",
                    Name(node)
                )
            }
            Self::ClaimedTwice { prefix, nodes, owner } => write!(
                f,
                "{prefix} is claimed by nodes {}: packets to it go to {}, whose claim goes first; give each node an \
                 address of its own, or name this one in routing.excludeCIDRs of the WireKubeMesh",
                Names(nodes),
                Name(owner).bare()
            ),
            Self::ClaimOverlapsClaim { node, prefix, other, other_prefix } => write!(
                f,
                "{node} claims {prefix}, which overlaps {other_prefix} of {}: the claim of {} is left out of the mesh; narrow it",
                Name(other),
                Name(node).bare(),
                node = Name(node)
            ),
            Self::ClaimOverlapsBlock { node, prefix, other, block } => write!(
                f,
                "{} claims {prefix}, which overlaps the address block {block} of node {other}: the claim is left out of the mesh; move the pool or the node's address",
                Name(node)
            ),
            Self::ClaimNotOfNode { node, prefix } => write!(
                f,
                "{node} announces {prefix}, which is left out of the mesh: its Node has no such InternalIP, or none that the controller believes \
                 (condition InternalIPsBelieved of the WireKubeMesh); if that is meant, grant it to {} in spec.grants of the WireKubeMesh",
                Name(node).bare(),
                node = Name(node)
            ),
            Self::ClaimNotYetConfirmed { node, prefix } => write!(
                f,
                "{node} announces {prefix}, which is left out of the mesh until the controller has copied the InternalIPs of its Node to \
                 status.node of its WireKubePeer; if this lasts, see that fairlead-controller runs and that the Node exists, or grant it \
                 to {} in spec.grants of the WireKubeMesh",
                Name(node).bare(),
                node = Name(node)
            ),
            Self::ClaimRefused { node, prefix, why } => write!(
                f,
                "{} says that {prefix} is its own, which is left out of the mesh: {why}",
                Name(node)
            ),
            Self::ClaimTooWide { node, prefix } => write!(
                f,
                "{} claims {prefix}, which is left out of the mesh: it is wider than /8; if that is meant, grant it in spec.grants of \
                 the WireKubeMesh",
                Name(node)
            ),
            Self::BlocksOverlap { node, block, other, other_block } => write!(
                f,
                "address block {block} of node {node} overlaps {other_block} of node {other}: packets to both are dropped; delete one of the blocks or the overlapping pool"
            ),
            Self::InternalAddressShared { address, nodes } => write!(
                f,
                "nodes {} of one location have the internal address {address}: packets to them take tunnels; give each node \
                 an address or a location of its own, or the annotation kilo.squat.ai/force-internal-ip",
                Names(nodes)
            ),
            Self::NodeAddressShared { node, address, other } => write!(
                f,
                "no route to the pods of {node}: its InternalIP {address} is also that of {}; give each its own",
                other.as_deref().unwrap_or("this node")
            ),
            Self::BlockCoversNode { node, prefix, address } => write!(
                f,
                "no route to block {prefix} of {node}: it covers the node address {address}; give the pool subnets \
                 outside of the nodes' networks"
            ),
            Self::BlockGrantedTwice { prefix, nodes } => write!(
                f,
                "no route to {prefix}: AddressBlocks give it to {}; delete the pods of all but one and its block",
                Names(nodes)
            ),
            Self::NodeWithoutAddress { node, ipv6 } => {
                let family = if *ipv6 { "IPv6" } else { "IPv4" };
                write!(
                    f,
                    "no {family} route to the pods of {node}: its Node has no InternalIP of that family; give kubelet \
                     one (--node-ip)"
                )
            }
            Self::NodeMissing { node } => write!(
                f,
                "no route to the blocks of {node}: its Node {node} does not exist; delete its AddressBlocks if it is \
                 gone for good"
            ),
            Self::NodeNotConnected { node, address } => write!(
                f,
                "no route to the pods of {node}: its InternalIP {address} is on no network of this node; use a \
                 WireKubeMesh or a routing daemon for nodes elsewhere"
            ),
            Self::BlockUnusable { node, prefix, why } => {
                write!(
                    f,
                    "no route to block {prefix} of {node}: {prefix} cannot be routed, {why}; correct its pool"
                )
            }
        }
    }
}

/// A member as it is named to users: `node a`, or `Peer b` for an external one.
struct Name<'a>(&'a str);

impl Name<'_> {
    /// Name without the word `node` before it.
    fn bare(&self) -> String {
        peer_name(self.0).map_or_else(|| self.0.to_owned(), |peer| format!("Peer {peer}"))
    }
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if peer_name(self.0).is_none() { "node " } else { "" };
        write!(f, "{kind}{}", self.bare())
    }
}

/// `a`, `a and b`, `a, b and c`, and no more than a person would read.
struct Names<'a>(&'a [String]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        let hidden = self.0.len().saturating_sub(SHOWN);
        let last = if hidden == 0 { self.0.len().saturating_sub(1) } else { usize::MAX };
        for (position, name) in self.0.iter().take(SHOWN).enumerate() {
            match position {
                0 => {}
                position if position == last => f.write_str(" and ")?,
                _ => f.write_str(", ")?,
            }
            Name(name).bare().fmt(f)?;
        }
        if hidden > 0 {
            write!(f, " and {hidden} more")?;
        }
        Ok(())
    }
}

//! What was left out of a plan, in words for the person who can repair it.

use std::fmt;

use fairlead_api::wireguard::PublicKey;
use ipnet::IpNet;

use crate::prefixes::Unusable;

/// Something that was left out of the mesh. `Display` is a sentence for status and Events: it names the nodes
/// and prefixes and says what to do.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Problem {
    /// A member without a usable public key.
    NoKey {
        /// The member.
        node: String,
    },
    /// Several members carry one name and different keys.
    SharedName {
        /// The name.
        node: String,
        /// How many carry it.
        members: usize,
    },
    /// Several members carry one public key.
    SharedKey {
        /// The key.
        key: PublicKey,
        /// Who carries it, sorted.
        nodes: Vec<String>,
        /// Whether this node is one of them.
        own: bool,
    },
    /// A prefix no mesh can carry.
    Unusable {
        /// Who named it.
        node: String,
        /// The prefix.
        prefix: IpNet,
        /// What is wrong with it.
        why: Unusable,
    },
    /// One prefix claimed by several nodes; left out on all of them.
    ClaimedTwice {
        /// The prefix.
        prefix: IpNet,
        /// Who claims it, sorted.
        nodes: Vec<String>,
    },
    /// A claim that covers or lies inside what another node has; the claim is left out.
    ClaimOverlapsClaim {
        /// Who claims it.
        node: String,
        /// The claim that is left out.
        prefix: IpNet,
        /// The other node.
        other: String,
        /// What the other node claims.
        other_prefix: IpNet,
    },
    /// A claim that overlaps a block the controller gave another node; the claim is left out.
    ClaimOverlapsBlock {
        /// Who claims it.
        node: String,
        /// The claim that is left out.
        prefix: IpNet,
        /// Who has the block.
        other: String,
        /// The block.
        block: IpNet,
    },
    /// Blocks of two nodes overlap; both are left out.
    BlocksOverlap {
        /// The node that comes first by name.
        node: String,
        /// Its block.
        block: IpNet,
        /// The other node.
        other: String,
        /// Its block.
        other_block: IpNet,
    },
}

impl Problem {
    /// Names of the nodes it is about, so that each can be told.
    pub fn nodes(&self) -> Vec<&str> {
        match self {
            Self::NoKey { node } | Self::SharedName { node, .. } | Self::Unusable { node, .. } => vec![node],
            Self::SharedKey { nodes, .. } | Self::ClaimedTwice { nodes, .. } => {
                nodes.iter().map(String::as_str).collect()
            }
            Self::ClaimOverlapsClaim { node, other, .. }
            | Self::ClaimOverlapsBlock { node, other, .. }
            | Self::BlocksOverlap { node, other, .. } => vec![node, other],
        }
    }

    /// Whether the user has done what it asks for: the address that several nodes claim is among those the mesh
    /// resource excludes, so that nobody misses it.
    pub fn is_settled_by(&self, excluded: &[IpNet]) -> bool {
        match self {
            Self::ClaimedTwice { prefix, .. } => excluded.iter().any(|out| out.contains(prefix)),
            _ => false,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoKey { node } => {
                write!(
                    f,
                    "node {node} is left out of the mesh: its WireGuard public key is all zeros; let it publish a new key"
                )
            }
            Self::SharedName { node, members } => write!(
                f,
                "node {node} is left out of the mesh: {members} members with different keys carry that name; remove the stale ones"
            ),
            Self::SharedKey { key, nodes, own } => {
                let outcome = if *own { "the others are left out of" } else { "all are left out of" };
                write!(
                    f,
                    "nodes {} have the same WireGuard public key {key}: {outcome} the mesh; delete the key file on all but one (cloned machines?)",
                    Names(nodes)
                )
            }
            Self::Unusable { node, prefix, why } => {
                write!(
                    f,
                    "node {node} names {prefix}, which is left out of the mesh: {why}; correct what it publishes"
                )
            }
            Self::ClaimedTwice { prefix, nodes } => write!(
                f,
                "{prefix} is claimed by nodes {}: it is left out of the mesh on all of them; give each node an address of its own, or name this one in routing.excludeCIDRs of the WireKubeMesh",
                Names(nodes)
            ),
            Self::ClaimOverlapsClaim { node, prefix, other, other_prefix } => write!(
                f,
                "node {node} claims {prefix}, which overlaps {other_prefix} of node {other}: the claim of {node} is left out of the mesh; narrow it"
            ),
            Self::ClaimOverlapsBlock { node, prefix, other, block } => write!(
                f,
                "node {node} claims {prefix}, which overlaps the address block {block} of node {other}: the claim is left out of the mesh; move the pool or the node's address"
            ),
            Self::BlocksOverlap { node, block, other, other_block } => write!(
                f,
                "address block {block} of node {node} overlaps {other_block} of node {other}: both are left out of the mesh; delete one of the blocks or the overlapping pool"
            ),
        }
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
            f.write_str(name)?;
        }
        if hidden > 0 {
            write!(f, " and {hidden} more")?;
        }
        Ok(())
    }
}

//! Problems of a plan: parts that were left out, in words for the person who can repair it.

mod display;

use std::fmt;
use std::net::IpAddr;

use fairlead_keys::PublicKey;
use ipnet::IpNet;

use crate::prefixes::Unusable;

/// Reason why a member does not get a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// Address of a name server of this host.
    NameServer,
    /// Address of the API server, or of the default gateway of this host.
    Reserved,
    /// Prefix from which Services have addresses.
    Service,
    /// Prefix wider than /8 that no administrator granted.
    TooWide,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NameServer => "a name server of this node has that address",
            Self::Reserved => "the API server or the default gateway of this node has that address",
            Self::Service => "these addresses belong to Services",
            Self::TooWide => "it is wider than /8, and would capture what belongs to others; name the networks that are meant, or grant it in spec.grants of the WireKubeMesh",
        })
    }
}

/// Part that was left out of the mesh or has no route. [`Self::reason`] is a word for programs. `Display` is a
/// sentence for status and Events: it names the nodes and prefixes and says what to do.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Problem {
    /// A member whose public key is all zeros.
    NoKey {
        /// The member.
        node: String,
    },
    /// The public key of an external member is that of a node or of an older one; the member is left out.
    ExternalKeyTaken {
        /// The external member.
        node: String,
        /// Name of the member that has the key.
        other: String,
    },
    /// The key that a member announces as its next one is that of another member; the announcement is ignored.
    NextKeyTaken {
        /// The member.
        node: String,
        /// Name of the member that has the key.
        other: String,
    },
    /// A prefix that an external member may not have; the prefix is left out.
    ExternalPrefixRefused {
        /// The external member.
        node: String,
        /// The prefix.
        prefix: IpNet,
        /// Reason of the refusal.
        why: Refusal,
    },
    /// A prefix of hosts beside a node that cannot be reached through it; it is left out.
    SitePrefixRefused {
        /// The node.
        node: String,
        /// The prefix.
        prefix: IpNet,
        /// Reason of the refusal.
        why: Refusal,
    },
    /// A network of a node's pods that cannot be in the mesh; it is left out.
    PodNetworkRefused {
        /// The node.
        node: String,
        /// The prefix.
        prefix: IpNet,
        /// Reason of the refusal.
        why: Refusal,
    },
    /// Entry nodes that an external member names and that have no tunnel with it, because they are no nodes of the mesh.
    EntryNodesMissing {
        /// The external member.
        node: String,
        /// Names of the entry nodes, as the member gives them.
        missing: Vec<String>,
        /// Whether there is no other.
        is_unreachable: bool,
    },
    /// A node with address blocks that has published no public key.
    NotPublished {
        /// The node.
        node: String,
    },
    /// Several members carry one public key.
    SharedKey {
        /// The key.
        key: PublicKey,
        /// Names of the members that carry it, sorted.
        nodes: Vec<String>,
        /// Whether this node is one of them.
        own: bool,
    },
    /// A prefix no mesh can carry.
    Unusable {
        /// Name of the member that names it.
        node: String,
        /// The prefix.
        prefix: IpNet,
        /// Reason why no mesh can carry it.
        why: Unusable,
    },
    /// One prefix claimed by several nodes.
    ClaimedTwice {
        /// The prefix.
        prefix: IpNet,
        /// Names of the members that claim it, sorted.
        nodes: Vec<String>,
        /// Name of the member that keeps it.
        owner: String,
    },
    /// A claim that lies inside what another node had first; the claim is left out.
    ClaimOverlapsClaim {
        /// Name of the member that claims it.
        node: String,
        /// The claim that is left out.
        prefix: IpNet,
        /// The other node.
        other: String,
        /// Prefix that the other member claims.
        other_prefix: IpNet,
    },
    /// A claim that overlaps a block the controller gave another node; the claim is left out.
    ClaimOverlapsBlock {
        /// Name of the member that claims it.
        node: String,
        /// The claim that is left out.
        prefix: IpNet,
        /// Name of the node that has the block.
        other: String,
        /// The block.
        block: IpNet,
    },
    /// An address that a node announces and its Node object does not have; the claim is left out.
    ClaimNotOfNode {
        /// Name of the node that claims it.
        node: String,
        /// The address.
        prefix: IpNet,
    },
    /// An address that a node announces, while the controller has not said yet which addresses its Node has; the claim is left out.
    ClaimNotYetConfirmed {
        /// Name of the node that claims it.
        node: String,
        /// The address.
        prefix: IpNet,
    },
    /// An address that a member says is its own, and that others need; it is left out.
    ClaimRefused {
        /// Name of the member that claims it.
        node: String,
        /// The address.
        prefix: IpNet,
        /// Reason of the refusal.
        why: Refusal,
    },
    /// A claim wider than /8 that no administrator granted; it is left out.
    ClaimTooWide {
        /// Name of the member that claims it.
        node: String,
        /// The claim.
        prefix: IpNet,
    },
    /// Blocks of two nodes overlap; packets to both are dropped.
    BlocksOverlap {
        /// The node that comes first by name.
        node: String,
        /// Block of this node.
        block: IpNet,
        /// The other node.
        other: String,
        /// Block of the other node.
        other_block: IpNet,
    },
    /// No route to a node whose address another node, or this one, has too.
    NodeAddressShared {
        /// The node that is not reached.
        node: String,
        /// The address.
        address: IpAddr,
        /// Another node that has it; `None` is this host.
        other: Option<String>,
    },
    /// An internal address that several members of a location name; tunnels lead to them.
    InternalAddressShared {
        /// The address.
        address: IpAddr,
        /// The members, sorted.
        nodes: Vec<String>,
    },
    /// No route to a block that covers the address of a node: the route would cut that node off.
    BlockCoversNode {
        /// Name of the node that has the block.
        node: String,
        /// The block.
        prefix: IpNet,
        /// The address.
        address: IpAddr,
    },
    /// No route to a block that several nodes have.
    BlockGrantedTwice {
        /// The block.
        prefix: IpNet,
        /// Names of the nodes that have it, sorted.
        nodes: Vec<String>,
    },
    /// No route to a node that has no InternalIP of the block's family.
    NodeWithoutAddress {
        /// The node.
        node: String,
        /// Whether IPv6 is missing, else IPv4.
        ipv6: bool,
    },
    /// No route to blocks of a node that does not exist.
    NodeMissing {
        /// The name of the node.
        node: String,
    },
    /// No route to a node on none of this host's networks.
    NodeNotConnected {
        /// The node.
        node: String,
        /// InternalIP of the node.
        address: IpAddr,
    },
    /// A block that cannot be routed.
    BlockUnusable {
        /// Name of the node that has it.
        node: String,
        /// The block.
        prefix: IpNet,
        /// Reason why it cannot be routed.
        why: Unusable,
    },
}

impl Problem {
    /// One word for conditions, Events and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::BlockCoversNode { .. } => "BlockCoversNode",
            Self::BlockGrantedTwice { .. } => "BlockGrantedTwice",
            Self::BlockUnusable { .. } => "BlockUnusable",
            Self::BlocksOverlap { .. } => "BlocksOverlap",
            Self::ClaimNotOfNode { .. } => "ClaimNotOfNode",
            Self::ClaimNotYetConfirmed { .. } => "ClaimNotYetConfirmed",
            Self::ClaimOverlapsBlock { .. } => "ClaimOverlapsBlock",
            Self::ClaimOverlapsClaim { .. } => "ClaimOverlapsClaim",
            Self::ClaimRefused { .. } => "ClaimRefused",
            Self::ClaimTooWide { .. } => "ClaimTooWide",
            Self::ClaimedTwice { .. } => "ClaimedTwice",
            Self::EntryNodesMissing { .. } => "EntryNodesMissing",
            Self::ExternalKeyTaken { .. } => "PeerKeyTaken",
            Self::ExternalPrefixRefused { .. } => "PeerPrefixRefused",
            Self::NextKeyTaken { .. } => "NextKeyTaken",
            Self::NoKey { .. } => "NoKey",
            Self::InternalAddressShared { .. } => "InternalAddressShared",
            Self::NodeAddressShared { .. } => "NodeAddressShared",
            Self::NodeMissing { .. } => "NodeMissing",
            Self::NodeNotConnected { .. } => "NodeNotConnected",
            Self::NodeWithoutAddress { .. } => "NodeWithoutAddress",
            Self::NotPublished { .. } => "NotPublished",
            Self::SharedKey { .. } => "SharedKey",
            Self::PodNetworkRefused { .. } => "PodCIDRRefused",
            Self::SitePrefixRefused { .. } => "LocationPrefixRefused",
            Self::Unusable { .. } => "Unusable",
        }
    }

    /// Whether it keeps a route from the built-in router, else a peer or prefix from the mesh.
    pub fn is_about_routes(&self) -> bool {
        matches!(
            self,
            Self::BlockCoversNode { .. }
                | Self::BlockGrantedTwice { .. }
                | Self::BlockUnusable { .. }
                | Self::NodeAddressShared { .. }
                | Self::NodeMissing { .. }
                | Self::NodeNotConnected { .. }
                | Self::NodeWithoutAddress { .. }
        )
    }

    /// Names of the nodes it is about.
    pub fn nodes(&self) -> Vec<&str> {
        match self {
            Self::BlockGrantedTwice { nodes, .. }
            | Self::ClaimedTwice { nodes, .. }
            | Self::InternalAddressShared { nodes, .. }
            | Self::SharedKey { nodes, .. } => nodes.iter().map(String::as_str).collect(),
            Self::BlocksOverlap { node, other, .. }
            | Self::ClaimOverlapsBlock { node, other, .. }
            | Self::ClaimOverlapsClaim { node, other, .. }
            | Self::ExternalKeyTaken { node, other }
            | Self::NextKeyTaken { node, other }
            | Self::NodeAddressShared { node, other: Some(other), .. } => vec![node, other],
            Self::BlockCoversNode { node, .. }
            | Self::BlockUnusable { node, .. }
            | Self::ClaimNotOfNode { node, .. }
            | Self::ClaimNotYetConfirmed { node, .. }
            | Self::ClaimRefused { node, .. }
            | Self::ClaimTooWide { node, .. }
            | Self::EntryNodesMissing { node, .. }
            | Self::ExternalPrefixRefused { node, .. }
            | Self::NoKey { node }
            | Self::NodeAddressShared { node, .. }
            | Self::NodeMissing { node }
            | Self::NodeNotConnected { node, .. }
            | Self::NodeWithoutAddress { node, .. }
            | Self::NotPublished { node }
            | Self::PodNetworkRefused { node, .. }
            | Self::SitePrefixRefused { node, .. }
            | Self::Unusable { node, .. } => vec![node],
        }
    }

    /// Whether the user has done what it asks for: the address that several nodes claim is among those the mesh
    /// resource excludes, so that no packet needs it.
    pub fn is_solved_by(&self, excluded: &[IpNet]) -> bool {
        match self {
            Self::ClaimedTwice { prefix, .. } => excluded.iter().any(|out| out.contains(prefix)),
            _ => false,
        }
    }
}

//! Problems of sources: parts that could not be read.

use std::net::IpAddr;

use fairlead_keys::InvalidKey;

use super::cluster_addresses::UnusableAddress;

/// A part of an object that was left out. `Display` is a sentence for users.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourceProblem {
    /// No source has answered since the start of this program, which uses what it saved before.
    #[error(
        "the API server has not answered since this program started: the mesh is as it was known at {saved}"
    )]
    ApiServerSilent {
        /// Time at which it was saved.
        saved: String,
    },
    /// An allowed prefix of a peer.
    #[error("WireKubePeer {peer}: allowedIPs entry {entry:?} is no CIDR; correct it")]
    InvalidAllowedIp {
        /// The WireKubePeer.
        peer: String,
        /// The entry.
        entry: String,
    },
    /// An internal address of a peer.
    #[error(
        "WireKubePeer {peer}: status.node.location.internalIPs entry {entry:?} is no address; the controller writes it: see its log"
    )]
    InvalidInternalIp {
        /// The WireKubePeer.
        peer: String,
        /// The entry.
        entry: String,
    },
    /// A prefix of hosts beside a peer.
    #[error(
        "WireKubePeer {peer}: status.node.location.allowedLocationIPs entry {entry:?} is no CIDR; the controller writes it: see its log"
    )]
    InvalidLocationPrefix {
        /// The WireKubePeer.
        peer: String,
        /// The entry.
        entry: String,
    },
    /// An annotation of this node about its location.
    #[error("Node {node}: annotation {annotation} is {value:?}, and is left out: {expected}")]
    InvalidLocation {
        /// The Node.
        node: String,
        /// Name of the annotation.
        annotation: &'static str,
        /// Value of the annotation.
        value: String,
        /// Value that is expected, in words.
        expected: &'static str,
    },
    /// Annotations of this node about its location, in a mesh without locations.
    #[error(
        "Node {node}: {annotations} have no effect, because spec.topology.granularity of the WireKubeMesh is {granularity}; write {wanted}, or remove them"
    )]
    LocationWithoutEffect {
        /// The Node.
        node: String,
        /// Names of the annotations.
        annotations: String,
        /// Granularity that the mesh resource has.
        granularity: &'static str,
        /// Granularities with which they have an effect.
        wanted: &'static str,
    },
    /// A setting of locations, in a mesh without locations.
    #[error(
        "WireKubeMesh {mesh}: {field} has no effect, because spec.topology.granularity is full; write cross or location, or remove it"
    )]
    TopologyWithoutEffect {
        /// The WireKubeMesh.
        mesh: String,
        /// The field.
        field: &'static str,
    },
    /// A setting of locations that is left out.
    #[error(
        "WireKubeMesh {mesh}: {field} entry {entry:?} is left out: it is no CIDR, or a label that kubelets may set"
    )]
    InvalidTopology {
        /// The WireKubeMesh.
        mesh: String,
        /// The field.
        field: &'static str,
        /// The entry.
        entry: String,
    },
    /// The annotation of a peer about birthday attempts.
    #[error(
        "WireKubePeer {peer}: annotation {annotation} is {value:?}, and is left out; write enabled or disabled"
    )]
    InvalidBirthdayAttack {
        /// The WireKubePeer.
        peer: String,
        /// Name of the annotation.
        annotation: &'static str,
        /// Value of the annotation.
        value: String,
    },
    /// A discovery service tells of something that is left out.
    #[error("discovery: {what} of member {member} is left out: {why}")]
    DiscoveredPart {
        /// The member, as it is named in the mesh.
        member: String,
        /// The part.
        what: String,
        /// Reason why it is left out.
        why: String,
    },
    /// The Secret that discovery needs.
    #[error("discovery services are not used: {0}")]
    DiscoverySecret(String),
    /// Members that have not changed to the present secret of the cluster.
    #[error(
        "discovery: the secret of the cluster has changed, but not on {members}; give them the new one within an hour of the change: then this node leaves the old one"
    )]
    ClusterSecretChanging {
        /// Names of the members.
        members: String,
    },
    /// A discovery service cannot be reached, or refuses this node.
    #[error("discovery service {server}: {error}; members are found by other means only")]
    DiscoveryUnavailable {
        /// The service.
        server: String,
        /// Error of the connection or the publication.
        error: String,
    },
    /// A part of this node that does not fit in what discovery services take.
    #[error("discovery: {0}")]
    DiscoveryOmission(String),
    /// A setting of discovery services.
    #[error("WireKubeMesh {mesh}: discovery.{field} {error}; correct it")]
    InvalidDiscovery {
        /// The WireKubeMesh.
        mesh: String,
        /// The field.
        field: &'static str,
        /// Error, in words that follow the name of the field.
        error: String,
    },
    /// The endpoint annotation of this node.
    #[error(
        "Node {node}: annotation {annotation} is {value:?}, which is no endpoint, and is left out; write ADDRESS:PORT, [IPV6 ADDRESS]:PORT or NAME:PORT"
    )]
    InvalidEndpoint {
        /// The Node.
        node: String,
        /// Name of the annotation.
        annotation: &'static str,
        /// Value of the annotation.
        value: String,
    },
    /// An endpoint beside the first in the annotation of this node.
    #[error("Node {node}: {value:?} in annotation {annotation} {why}; it is left out")]
    InvalidExtraEndpoint {
        /// The Node.
        node: String,
        /// Name of the annotation.
        annotation: &'static str,
        /// The endpoint.
        value: String,
        /// Reason why it is left out, and what to do.
        why: &'static str,
    },
    /// An excluded prefix of the mesh.
    #[error("WireKubeMesh {mesh}: excludeCIDRs entry {entry:?} is no CIDR; correct it")]
    InvalidExcludedCidr {
        /// The WireKubeMesh.
        mesh: String,
        /// The entry.
        entry: String,
    },
    /// An entry of a filter of endpoints.
    #[error(
        "WireKubeMesh {mesh}: {field} entry {entry:?} is no CIDR and no address, with or without '!' before it, and is left out; correct it"
    )]
    InvalidEndpointFilter {
        /// The WireKubeMesh.
        mesh: String,
        /// The field.
        field: &'static str,
        /// The entry.
        entry: String,
    },
    /// An entry of an annotation of this node that narrows what it has in the mesh, or where it is reached.
    #[error("Node {node}: {value:?} in annotation {annotation} is left out: {expected}")]
    InvalidNodeFilter {
        /// The Node.
        node: String,
        /// Name of the annotation.
        annotation: &'static str,
        /// The entry.
        value: String,
        /// Entry that is expected, in words.
        expected: &'static str,
    },
    /// A granted prefix of the mesh.
    #[error("WireKubeMesh {mesh}: entry {entry:?} of grants is no CIDR, and is left out; correct it")]
    InvalidGrant {
        /// The WireKubeMesh.
        mesh: String,
        /// The entry.
        entry: String,
    },
    /// A field of a Peer of Kilo.
    #[error("Peer {peer}: {value:?} in {field} cannot be read, and is left out; correct it")]
    InvalidExternalField {
        /// The Peer.
        peer: String,
        /// The field.
        field: &'static str,
        /// Value of the field.
        value: String,
    },
    /// A Peer of Kilo, which is left out.
    #[error("Peer {peer} is left out: {error}; correct it")]
    InvalidExternalPeer {
        /// The Peer.
        peer: String,
        /// Reason why it is left out.
        error: String,
    },
    /// The keepalive annotation of this node.
    #[error("Node {node}: annotation {annotation} is {value:?}, which is no number of seconds; correct it")]
    InvalidKeepalive {
        /// The Node.
        node: String,
        /// Name of the annotation.
        annotation: &'static str,
        /// Value of the annotation.
        value: String,
    },
    /// A member of which no source tells any more.
    #[error(
        "no source tells of member {member} any more, and none says that it was removed: {}; if it is gone for good: fairlead peer revoke {member}",
        if *.is_guarded { "packets to its addresses are dropped for 24 hours" } else { "its tunnel works, and is kept" }
    )]
    MemberMissing {
        /// The member.
        member: String,
        /// Whether its tunnel does not work, and packets to its addresses are dropped.
        is_guarded: bool,
    },
    /// This node was revoked.
    #[error(
        "this node was revoked (spec.revokedPeers of the WireKubeMesh): no other node connects to it; to take it back: fairlead peer unrevoke {node}"
    )]
    Revoked {
        /// The node.
        node: String,
    },
    /// An entry of the revoked peers.
    #[error("WireKubeMesh {mesh}: publicKey {value:?} in revokedPeers is no WireGuard key; correct it")]
    InvalidRevokedKey {
        /// The WireKubeMesh.
        mesh: String,
        /// Value of `publicKey`.
        value: String,
    },
    /// The endpoint a peer publishes.
    #[error("WireKubePeer {peer}: spec.endpoint {value:?} is no endpoint, and is left out; correct it")]
    InvalidPeerEndpoint {
        /// The WireKubePeer.
        peer: String,
        /// Value of `spec.endpoint`.
        value: String,
    },
    /// The file of `--peers`; what was read of it before still counts.
    #[error("file {path} of --peers: {error}; correct it; what was read before stays in use")]
    InvalidPeersFile {
        /// The file.
        path: String,
        /// Reason why the file cannot be used.
        error: String,
    },
    /// The key that a peer announces, which is ignored.
    #[error("WireKubePeer {peer}: spec.nextPublicKey is {error}; it is ignored")]
    InvalidNextPublicKey {
        /// The WireKubePeer.
        peer: String,
        /// Reason why it is no key.
        error: InvalidKey,
    },
    /// The key of a peer, which is left out for it.
    #[error("WireKubePeer {peer}: spec.publicKey is {error}")]
    InvalidPublicKey {
        /// The WireKubePeer.
        peer: String,
        /// Reason why it is no key.
        error: InvalidKey,
    },
    /// The preshared key that a Peer names is not there.
    #[error("Peer {peer} has no tunnel: {error}")]
    PresharedKeyMissing {
        /// The Peer.
        peer: String,
        /// Reason why the key is not there.
        error: String,
    },
    /// The relay of the mesh.
    #[error("WireKubeMesh {mesh}: {field} {error}; no relay is used")]
    InvalidRelay {
        /// The WireKubeMesh.
        mesh: String,
        /// The field.
        field: &'static str,
        /// Error, in words that follow the name of the field.
        error: String,
    },
    /// The endpoint annotation of this node names an address where no peer reaches it.
    #[error(
        "Node {node}: annotation {annotation} is {value:?}, which is {why}, and is left out; write an address of the node or its router"
    )]
    UnusableEndpoint {
        /// The Node.
        node: String,
        /// Name of the annotation.
        annotation: &'static str,
        /// Endpoint in the annotation.
        value: String,
        /// Reason why no peer can reach a node there.
        why: UnusableAddress,
    },
    /// The endpoint that a peer publishes as chosen by an administrator names such an address.
    #[error("WireKubePeer {peer}: spec.endpoint {value:?} is {why}, and is left out; correct it")]
    UnusablePeerEndpoint {
        /// The WireKubePeer.
        peer: String,
        /// Value of `spec.endpoint`.
        value: String,
        /// Reason why no peer can reach a node there.
        why: UnusableAddress,
    },
    /// An address of this Node is none where peers reach it.
    #[error(
        "Node {node}: its address {address} is {why}, and peers do not use it; give the node another address, or change the ranges"
    )]
    UnusableNodeAddress {
        /// The Node.
        node: String,
        /// The address.
        address: IpAddr,
        /// Reason why no peer can reach a node there.
        why: UnusableAddress,
    },
    /// A STUN server of the mesh.
    #[error("WireKubeMesh {mesh}: stunServers entry {entry:?} is not host:port, and is left out; correct it")]
    InvalidStunServer {
        /// The WireKubeMesh.
        mesh: String,
        /// The entry.
        entry: String,
    },
}

impl SourceProblem {
    /// Name of the peer it is about; `None` for this Node and the mesh.
    pub fn peer(&self) -> Option<&str> {
        match self {
            Self::InvalidAllowedIp { peer, .. }
            | Self::InvalidInternalIp { peer, .. }
            | Self::InvalidLocationPrefix { peer, .. }
            | Self::InvalidBirthdayAttack { peer, .. }
            | Self::InvalidPeerEndpoint { peer, .. }
            | Self::InvalidExternalField { peer, .. }
            | Self::InvalidExternalPeer { peer, .. }
            | Self::DiscoveredPart { member: peer, .. }
            | Self::MemberMissing { member: peer, .. }
            | Self::InvalidNextPublicKey { peer, .. }
            | Self::InvalidPublicKey { peer, .. }
            | Self::PresharedKeyMissing { peer, .. }
            | Self::UnusablePeerEndpoint { peer, .. } => Some(peer),
            Self::ApiServerSilent { .. }
            | Self::ClusterSecretChanging { .. }
            | Self::DiscoveryOmission(_)
            | Self::DiscoverySecret(_)
            | Self::DiscoveryUnavailable { .. }
            | Self::InvalidDiscovery { .. }
            | Self::InvalidEndpoint { .. }
            | Self::InvalidEndpointFilter { .. }
            | Self::InvalidExtraEndpoint { .. }
            | Self::InvalidExcludedCidr { .. }
            | Self::InvalidGrant { .. }
            | Self::InvalidKeepalive { .. }
            | Self::InvalidLocation { .. }
            | Self::InvalidNodeFilter { .. }
            | Self::LocationWithoutEffect { .. }
            | Self::InvalidRelay { .. }
            | Self::InvalidPeersFile { .. }
            | Self::InvalidRevokedKey { .. }
            | Self::Revoked { .. }
            | Self::InvalidStunServer { .. }
            | Self::InvalidTopology { .. }
            | Self::TopologyWithoutEffect { .. }
            | Self::UnusableEndpoint { .. }
            | Self::UnusableNodeAddress { .. } => None,
        }
    }

    /// One word for conditions, Events and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::ApiServerSilent { .. } => "APIServerSilent",
            Self::ClusterSecretChanging { .. } => "ClusterSecretChanging",
            Self::DiscoveredPart { .. } => "DiscoveredPartRejected",
            Self::DiscoveryOmission(_) => "DiscoveryOmission",
            Self::DiscoverySecret(_) => "DiscoverySecretUnusable",
            Self::DiscoveryUnavailable { .. } => "DiscoveryUnavailable",
            Self::InvalidAllowedIp { .. } => "InvalidAllowedIP",
            Self::InvalidDiscovery { .. } => "InvalidDiscovery",
            Self::InvalidEndpoint { .. } | Self::InvalidPeerEndpoint { .. } => "InvalidEndpoint",
            Self::InvalidEndpointFilter { .. } => "InvalidEndpointFilter",
            Self::InvalidExtraEndpoint { .. } => "InvalidExtraEndpoint",
            Self::InvalidExcludedCidr { .. } => "InvalidExcludedCIDR",
            Self::InvalidBirthdayAttack { .. } => "InvalidBirthdayAttack",
            Self::InvalidExternalField { .. } | Self::InvalidExternalPeer { .. } => "InvalidPeer",
            Self::InvalidGrant { .. } => "InvalidGrant",
            Self::InvalidInternalIp { .. } => "InvalidInternalIP",
            Self::InvalidKeepalive { .. } => "InvalidKeepalive",
            Self::InvalidLocationPrefix { .. } => "InvalidLocationPrefix",
            Self::InvalidLocation { .. } => "InvalidLocation",
            Self::LocationWithoutEffect { .. } => "LocationWithoutEffect",
            Self::InvalidNextPublicKey { .. } => "InvalidNextPublicKey",
            Self::InvalidNodeFilter { .. } => "InvalidNodeFilter",
            Self::InvalidPublicKey { .. } => "InvalidPublicKey",
            Self::InvalidRelay { .. } => "InvalidRelay",
            Self::InvalidPeersFile { .. } => "InvalidPeersFile",
            Self::InvalidRevokedKey { .. } => "InvalidRevokedKey",
            Self::InvalidStunServer { .. } => "InvalidStunServer",
            Self::InvalidTopology { .. } => "InvalidTopology",
            Self::MemberMissing { .. } => "MemberMissing",
            Self::PresharedKeyMissing { .. } => "PresharedKeyMissing",
            Self::Revoked { .. } => "Revoked",
            Self::TopologyWithoutEffect { field: "spec.topology.encapsulation", .. } => {
                "EncapsulationWithoutEffect"
            }
            Self::TopologyWithoutEffect { .. } => "LocationWithoutEffect",
            Self::UnusableEndpoint { .. } | Self::UnusablePeerEndpoint { .. } => "UnusableEndpoint",
            Self::UnusableNodeAddress { .. } => "UnusableNodeAddress",
        }
    }
}

//! `WireKubePeer` of `wirekube.io/v1alpha1`: what a node says of itself to the others.

mod endpoints;
mod node_facts;

use std::collections::BTreeMap;

use fairlead_address::{Endpoint, InvalidEndpoint};
use fairlead_keys::{InvalidKey, KEEPALIVE, PublicKey};
use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::location::Granularity;
use super::rules::{CIDR_LENGTH, cidrs, host_and_port, parse_prefixes, wireguard_key};
use endpoints::MAX_CANDIDATES;
pub use endpoints::{
    CandidateType, EndpointDiscoveryMethod, IceCandidate, NatType, ObservedEndpoint, PortPrediction,
};
pub use node_facts::NodeFacts;

/// Most peers that a status lists by name. Fairlead lists 100; other programs list all, and a node with more peers has others as its bounds.
const MAX_PEERS: usize = 1000;
/// Most problems, of which a node publishes 16 of up to 1,024 bytes.
const MAX_PROBLEMS: usize = 256;
const PROBLEM_LENGTH: usize = 4096;
/// Longest of the words by which WireKube names states.
const WORD_LENGTH: usize = 64;

/// The identity of a node and how to reach it.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[kube(
    group = "wirekube.io",
    version = "v1alpha1",
    kind = "WireKubePeer",
    plural = "wirekubepeers",
    shortname = "wkpeer",
    status = "WireKubePeerStatus",
    derive = "PartialEq",
    doc = "A member of the WireGuard mesh. Every node writes the one with its own name.",
    printcolumn(name = "Endpoint", type_ = "string", json_path = ".spec.endpoint"),
    printcolumn(name = "AllowedIP", type_ = "string", json_path = ".spec.allowedIPs[0]"),
    printcolumn(
        name = "Connected",
        type_ = "boolean",
        json_path = ".status.connected",
        description = "Whether the node has a usable path to all others"
    ),
    printcolumn(
        name = "NAT",
        type_ = "string",
        json_path = ".status.natType",
        description = "Kind of NAT the node is behind"
    ),
    printcolumn(
        name = "Mode",
        type_ = "string",
        json_path = ".status.transportMode",
        description = "Whether the node reaches the others directly, through a relay, or both"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct WireKubePeerSpec {
    /// WireGuard public key, as `wg pubkey` prints it. A peer without one is left out of the mesh.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 44))]
    #[x_kube(validation = wireguard_key())]
    pub public_key: String,
    /// Extension of Fairlead: the public key that the node is about to use instead. Others let it complete a handshake with this key, and
    /// follow the node to it then. One that another peer has or announced first is ignored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 44))]
    #[x_kube(validation = wireguard_key())]
    pub next_public_key: Option<String>,
    /// Initial endpoint for the other peers, as host:port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 270))]
    #[x_kube(validation = host_and_port())]
    pub endpoint: Option<String>,
    /// Prefixes in CIDR notation that are reached through this peer. A node lists its own addresses;
    /// the prefixes of its pods follow from its AddressBlocks.
    #[serde(default, rename = "allowedIPs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1000), inner(length(max = CIDR_LENGTH)))]
    #[x_kube(validation = cidrs())]
    pub allowed_ips: Vec<String>,
    /// Seconds between keepalives to this peer. 0 sends none.
    #[serde(default = "default_keepalive")]
    #[schemars(with = "i32", range(min = 0, max = 65535))]
    pub persistent_keepalive: u16,
}

/// Observed state of a node's paths. Only the node itself writes it.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct WireKubePeerStatus {
    /// Whether the node has a usable path to all others, directly or through a relay. In a mesh of more than 100 others: to
    /// those it was chosen to observe, so that one node that fails changes the status of a few.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connected: Option<bool>,
    /// Extension of Fairlead: numbers of other nodes that the node reaches, as of lastReportedAt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peers: Option<PeerCounts>,
    /// Time of the latest handshake that was completed with any peer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_handshake: Option<Time>,
    /// Time at which the node last wrote this status. The node writes it when something else of it changes, and every few
    /// minutes (in large meshes hours); handshake, bytes and counts are as of then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_reported_at: Option<Time>,
    /// Bytes received from all peers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_received: Option<i64>,
    /// Bytes sent to all peers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_sent: Option<i64>,
    /// Source of spec.endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint_discovery_method: Option<EndpointDiscoveryMethod>,
    /// Kind of NAT the node is behind. Empty if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nat_type: Option<NatType>,
    /// Addresses at which the node may be reached, for others to try.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_CANDIDATES))]
    pub ice_candidates: Vec<IceCandidate>,
    /// Pattern by which the node's symmetric NAT chooses ports, as a birthday attempt with a node behind another one has measured it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port_prediction: Option<PortPrediction>,
    /// State of the path search: gathering, checking, connected, relay, birthday or failed. Not written yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = WORD_LENGTH))]
    pub ice_state: Option<String>,
    /// The same as peerTransports, under the name newer WireKube versions use. Not written.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = MAX_PEERS))]
    pub connections: BTreeMap<String, PeerTransport>,
    /// Transport by which the node reaches each peer, by name: direct or relay. In a mesh of more than 100 others only those that
    /// are not reached directly.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = MAX_PEERS))]
    pub peer_transports: BTreeMap<String, PeerTransport>,
    /// Extension of Fairlead: why peers that peerTransports lists are relayed, by name; without times and counts, which
    /// `fairlead status` has.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 100, "additionalProperties" = { "type": "string", "maxLength": 256 }))]
    pub relay_reasons: BTreeMap<String, String>,
    /// direct when all peers are reached directly, relay when all are relayed, else mixed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport_mode: Option<TransportMode>,
    /// Round-trip time to the relay in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay_latency_ms: Option<i32>,
    /// kernel or userspace, as WireKube names them. Not written: see wireguard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = WORD_LENGTH))]
    pub bind_mode: Option<String>,
    /// Extension of Fairlead: the endpoints from which this node receives authenticated packets, by peer name.
    /// A peer behind a NAT learns its own public endpoint from it, and other peers get a candidate for that peer.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = MAX_PEERS))]
    pub observed_endpoints: BTreeMap<String, ObservedEndpoint>,
    /// Extension of Fairlead: Peers that name this node in entryNodes and have completed a handshake with it, by name. Packets to a Peer go
    /// through the one of its entry nodes that has the highest term.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 1000))]
    pub entry_terms: BTreeMap<String, EntryTerm>,
    /// Extension of Fairlead: problems, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_PROBLEMS), inner(length(max = PROBLEM_LENGTH)))]
    pub problems: Vec<String>,
    /// Extension of Fairlead: the second half of the IPv6 address that the node would have on the mesh, from the link-layer address of
    /// its first network device (modified EUI-64), as four groups of hexadecimal digits.
    #[serde(default, rename = "interfaceID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 19))]
    pub interface_id: Option<String>,
    /// Extension of Fairlead: what the Node of the same name says, copied by the controller; node programs may not write it. They
    /// judge by it what this peer claims, without a watch of all Nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeFacts>,
    /// Extension of Fairlead: the spec.topology.granularity of the WireKubeMesh that the node uses or has prepared for: its tunnels are up, and it accepts
    /// packets from wherever they then come. The mesh changes over once all nodes say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepared_granularity: Option<Granularity>,
    /// Extension of Fairlead: the WireGuard implementation of the node.
    #[serde(default, rename = "wireguard", skip_serializing_if = "Option::is_none")]
    pub wireguard: Option<WireGuardImplementation>,
    /// Conditions of the peer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// The highest term: what JSON has as an integer everywhere (RFC 8259, section 6).
pub const MAX_ENTRY_TERM: u64 = (1 << 53) - 1;

/// Order in which a Peer came to an entry node, compared with other entry nodes.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct EntryTerm {
    /// Public key of the Peer: terms of an earlier key do not count.
    #[schemars(length(max = 44))]
    pub public_key: String,
    /// One more than the highest that any entry node of the Peer had then.
    #[schemars(with = "i64", range(min = 1, max = MAX_ENTRY_TERM))]
    pub term: u64,
}

/// Numbers of peers that a node reaches.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerCounts {
    /// Number of all peers.
    pub total: u32,
    /// Number of peers that are reached directly.
    pub direct: u32,
    /// Number of peers without a usable path.
    pub unreachable: u32,
}

/// Transport by which one peer is reached.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum PeerTransport {
    /// Over UDP, without help.
    Direct,
    /// Through a relay.
    Relay,
    /// Unknown.
    #[serde(rename = "", other)]
    Unknown,
}

/// Transports by which all peers are reached.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum TransportMode {
    /// All directly.
    Direct,
    /// All through a relay.
    Relay,
    /// Some directly, some through a relay.
    Mixed,
    /// Unknown.
    #[serde(rename = "", other)]
    Unknown,
}

/// WireGuard implementation of a node.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum WireGuardImplementation {
    /// The kernel's.
    Kernel,
    /// The one inside Fairlead.
    Embedded,
    /// Unknown.
    #[serde(rename = "", other)]
    Unknown,
}

impl WireKubePeerSpec {
    /// The identity of the peer.
    ///
    /// # Errors
    /// The text is not a WireGuard key, or there is none.
    pub fn parse_public_key(&self) -> Result<PublicKey, InvalidKey> {
        self.public_key.parse()
    }

    /// The key that the peer is about to use; an empty text is none.
    ///
    /// # Errors
    /// The text is not a WireGuard key.
    pub fn parse_next_public_key(&self) -> Result<Option<PublicKey>, InvalidKey> {
        let text = self.next_public_key.as_deref().filter(|text| !text.is_empty());
        text.map(str::parse).transpose()
    }

    /// The published endpoint; an empty text is none.
    ///
    /// # Errors
    /// The text is no endpoint.
    pub fn parse_endpoint(&self) -> Result<Option<Endpoint>, InvalidEndpoint> {
        let text = self.endpoint.as_deref().filter(|text| !text.is_empty());
        text.map(str::parse).transpose()
    }

    /// The allowed IPs that are prefixes, with host bits cleared, and the texts that are not.
    pub fn parse_allowed_ips(&self) -> (Vec<IpNet>, Vec<&str>) {
        parse_prefixes(&self.allowed_ips)
    }
}

impl Default for WireKubePeerSpec {
    fn default() -> Self {
        Self {
            public_key: String::new(),
            next_public_key: None,
            endpoint: None,
            allowed_ips: Vec::new(),
            persistent_keepalive: default_keepalive(),
        }
    }
}

impl TransportMode {
    /// The aggregate over all peers; `None` without peers.
    pub fn of<'a>(transports: impl IntoIterator<Item = &'a PeerTransport>) -> Option<Self> {
        transports.into_iter().fold(None, |mode, transport| {
            let next = match transport {
                PeerTransport::Direct => Self::Direct,
                PeerTransport::Relay => Self::Relay,
                PeerTransport::Unknown => return mode,
            };
            Some(if mode.is_none_or(|mode| mode == next) { next } else { Self::Mixed })
        })
    }
}

fn default_keepalive() -> u16 {
    const { KEEPALIVE.as_secs() as u16 }
}

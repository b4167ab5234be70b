//! Endpoints of a node: the one it has, its candidates, the NAT it is behind, and where others see it.

use std::net::SocketAddr;

use fairlead_address::{Endpoint, InvalidEndpoint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::resources::rules::ENDPOINT_LENGTH;

/// Most candidates, and most sampled ports. A node has some ten of the former, and a NAT is measured with some hundred ports.
pub(super) const MAX_CANDIDATES: usize = 1024;

/// Source of an endpoint.
// Of a word that a newer version may add, a node only has to know that it does not know it: one unknown word
// must not hide all peers. The same holds for the other enums here.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum EndpointDiscoveryMethod {
    /// The annotation of the node names it.
    Manual,
    /// The node has a public IPv6 address.
    Ipv6,
    /// A STUN server reported it.
    Stun,
    /// The metadata service of AWS reported it.
    AwsMetadata,
    /// The router opened a port.
    Upnp,
    /// The node has the address itself.
    InternalIp,
    /// Extension of Fairlead: peers reported it.
    Observed,
    /// Unknown.
    #[default]
    #[serde(rename = "", other)]
    Unknown,
}

/// Kinds of NAT, as WireKube names them. RFC 4787 tells mapping from filtering.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum NatType {
    /// No NAT.
    Open,
    /// Endpoint-independent mapping.
    Cone,
    /// Endpoint-independent mapping, address- and port-dependent filtering.
    PortRestrictedCone,
    /// Address- and port-dependent mapping.
    Symmetric,
    /// Unknown.
    #[default]
    #[serde(rename = "", other)]
    Unknown,
}

/// An address at which a node may be reached.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct IceCandidate {
    /// host is an address of the node, srflx one a STUN server saw, prflx one a peer saw, relay a relay.
    #[serde(rename = "type")]
    pub type_: CandidateType,
    /// The address as host:port.
    #[schemars(length(max = ENDPOINT_LENGTH))]
    pub address: String,
    /// A candidate with a higher priority is tried earlier.
    pub priority: i32,
}

/// Kinds of candidates, as ICE (RFC 8445) names them.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum CandidateType {
    /// An address of the node.
    Host,
    /// An address a STUN server saw.
    Srflx,
    /// An address a peer saw.
    Prflx,
    /// A relay.
    Relay,
    /// Unknown.
    #[serde(rename = "", other)]
    Unknown,
}

/// Pattern by which a NAT chooses ports.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PortPrediction {
    /// The port seen last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_port: Option<i32>,
    /// Mean distance between ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub increment: Option<i32>,
    /// Greatest deviation from the mean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jitter: Option<i32>,
    /// Ports seen, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_CANDIDATES))]
    pub sample_ports: Vec<i32>,
}

/// An endpoint from which a node receives authenticated packets of a peer.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ObservedEndpoint {
    /// Public key the packets were authenticated with: observations of an earlier key do not count.
    #[schemars(length(max = 44))]
    pub public_key: String,
    /// Address and port the packets came from, IPv6 in brackets.
    #[schemars(length(max = ENDPOINT_LENGTH))]
    pub endpoint: String,
    /// Time at which the endpoint was last seen, to the minute or so: it is not written again for every packet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seen: Option<Time>,
}

impl ObservedEndpoint {
    /// The address and port.
    ///
    /// # Errors
    /// The text is not address:port; packets come from no name.
    pub fn parse_endpoint(&self) -> Result<SocketAddr, InvalidEndpoint> {
        self.endpoint.parse::<Endpoint>()?.address().ok_or_else(|| InvalidEndpoint(self.endpoint.clone()))
    }
}

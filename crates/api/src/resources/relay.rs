//! `spec.relay` of the WireKubeMesh: the relay for peers without a direct path.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rules::{NAME_LENGTH, host_and_port};

/// Longest Kubernetes quantity: 18 digits with a sign, a point and a suffix are enough for any, and this is several times that.
const QUANTITY_LENGTH: usize = 64;

/// Longest PEM certificates of authorities, as base64: some hundred of them.
pub(super) const CA_BUNDLE_LENGTH: usize = 262_144;

/// The relay for peers without a direct path.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.provider != 'external' || has(self.external)")
    .message("spec.relay.external is required when provider is external: it says where the relay is"))]
pub struct Relay {
    /// auto relays while there is no direct path, always relays everything, never relays nothing.
    #[serde(default)]
    pub mode: RelayMode,
    /// external is a relay operated outside of Fairlead, managed is one that Fairlead runs in this cluster.
    pub provider: RelayProvider,
    /// Longest time in seconds to wait for a direct handshake before the relay is used. With peers that answer path probes
    /// Fairlead does not wait: the relay is used until a direct path has answered.
    #[serde(default = "default_handshake_timeout")]
    #[schemars(with = "i32", range(min = 5, max = 300))]
    pub handshake_timeout_seconds: u32,
    /// Longest time in seconds between attempts to replace the relay by a direct path, while there is traffic.
    #[serde(default = "default_direct_retry_interval")]
    #[schemars(with = "i32", range(min = 30, max = 86400))]
    pub direct_retry_interval_seconds: u32,
    /// A relay operated outside of Fairlead. Required when provider is external.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub external: Option<ExternalRelay>,
    /// A relay in this cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed: Option<ManagedRelay>,
}

/// Packets for which the relay is used.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum RelayMode {
    /// Packets to peers without a direct path.
    #[default]
    Auto,
    /// All packets.
    Always,
    /// No packets.
    Never,
}

/// Operator of the relay.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum RelayProvider {
    /// An operator outside of Fairlead.
    External,
    /// Fairlead, in this cluster.
    Managed,
}

/// Transport to the relay.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum RelayTransport {
    /// TLS over TCP.
    #[default]
    Tcp,
    /// WebSocket.
    Ws,
    /// WebSocket over TLS.
    Wss,
}

/// A relay operated outside of Fairlead.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ExternalRelay {
    /// Address of the relay: host:port for tcp, or a URL for ws and wss.
    #[schemars(length(min = 1, max = 2048))]
    pub endpoint: String,
    /// Extension of Fairlead: PEM certificates of the authorities that certify the relay, as base64. Defaults to those that the
    /// nodes trust.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = CA_BUNDLE_LENGTH))]
    pub ca_bundle: Option<String>,
    /// Address for control connections, if it differs from endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 2048))]
    pub control_endpoint: Option<String>,
    /// Transport to the relay.
    #[serde(default)]
    pub transport: RelayTransport,
    /// Secret whose key `token` authenticates to the relay. Nodes may read kube-system/fairlead-relay; another one needs a Role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth_secret_ref: Option<SecretRef>,
}

/// A Secret.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct SecretRef {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Namespace of the Secret. Defaults to kube-system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = NAME_LENGTH))]
    pub namespace: Option<String>,
}

/// A relay in this cluster.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ManagedRelay {
    /// Number of pods that run the relay. Each forwards to the others what is for nodes connected to these.
    #[serde(default = "default_one")]
    #[schemars(range(min = 1))]
    pub replicas: i32,
    /// Kind of the Service in front of it. Nodes connect to the load balancer's address, or to the node port at the ExternalIP, else
    /// the InternalIP, of the node that runs the relay.
    #[serde(default)]
    pub service_type: RelayServiceType,
    /// Port of the Service. With NodePort, nodes use the node port that Kubernetes assigns.
    #[serde(default = "default_relay_port")]
    #[schemars(with = "i32", range(min = 1, max = 65535))]
    pub port: u16,
    /// Container image. Defaults to the image of the controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub image: Option<String>,
    /// host:port at which nodes reach the relay, where that is not what the Service says: behind a router that forwards a port,
    /// or a load balancer that Kubernetes does not know. What is there has to pass TLS through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 270))]
    #[x_kube(validation = host_and_port())]
    pub control_endpoint: Option<String>,
    /// Transport to it: TLS over TCP, or WebSocket over TLS (wss), for networks that let nothing else through.
    #[serde(default)]
    pub transport: RelayTransport,
    /// Resource requests and limits of its pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<RelayResources>,
}

/// Kind of the Service in front of a managed relay.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RelayServiceType {
    /// A load balancer of the cloud.
    #[default]
    LoadBalancer,
    /// A port of every node.
    NodePort,
}

/// Resource requests and limits of the pods of a managed relay, as Kubernetes quantities.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct RelayResources {
    /// CPU request, such as 100m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = QUANTITY_LENGTH))]
    pub cpu_request: Option<String>,
    /// Memory request, such as 64Mi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = QUANTITY_LENGTH))]
    pub memory_request: Option<String>,
    /// CPU limit, such as 500m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = QUANTITY_LENGTH))]
    pub cpu_limit: Option<String>,
    /// Memory limit, such as 128Mi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = QUANTITY_LENGTH))]
    pub memory_limit: Option<String>,
}

impl Default for ManagedRelay {
    fn default() -> Self {
        Self {
            replicas: default_one(),
            service_type: RelayServiceType::default(),
            port: default_relay_port(),
            image: None,
            control_endpoint: None,
            transport: RelayTransport::default(),
            resources: None,
        }
    }
}

fn default_handshake_timeout() -> u32 {
    30
}

fn default_direct_retry_interval() -> u32 {
    120
}

fn default_one() -> i32 {
    1
}

fn default_relay_port() -> u16 {
    3478
}

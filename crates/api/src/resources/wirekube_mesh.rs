//! `WireKubeMesh` of `wirekube.io/v1alpha1`: the settings of the mesh.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::discovery::Discovery;
use super::rules::{CIDR_LENGTH, cidr_of_family, cidrs, explained, host_and_port};
use crate::names::{MESH_MTU, WIREGUARD_INTERFACE, WIREGUARD_PORT};

/// Settings that every node of the mesh shares.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[kube(
    group = "wirekube.io",
    version = "v1alpha1",
    kind = "WireKubeMesh",
    plural = "wirekubemeshes",
    shortname = "wkmesh",
    status = "WireKubeMeshStatus",
    derive = "PartialEq",
    doc = "The settings of the WireGuard mesh. Create one per cluster; every node reads the first by name.",
    printcolumn(name = "Port", type_ = "integer", json_path = ".spec.listenPort"),
    printcolumn(name = "Interface", type_ = "string", json_path = ".spec.interfaceName"),
    printcolumn(
        name = "Ready",
        type_ = "integer",
        json_path = ".status.readyPeers",
        description = "Peers with a usable path to all others"
    ),
    printcolumn(
        name = "Total",
        type_ = "integer",
        json_path = ".status.totalPeers",
        description = "All peers"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct WireKubeMeshSpec {
    /// UDP port WireGuard listens on, on every node, for IPv4 and IPv6.
    #[serde(default = "default_listen_port")]
    #[schemars(with = "i32", range(min = 1024, max = 65535))]
    pub listen_port: u16,
    /// Name of the WireGuard device on every node.
    #[serde(default = "default_interface_name")]
    #[schemars(length(min = 1, max = 15))]
    #[x_kube(validation = explained(
        "self.matches('^[A-Za-z0-9_.-]+$') && self != '.' && self != '..'",
        "\"'\" + self + \"' cannot be the name of a network device\"",
    ))]
    pub interface_name: String,
    /// Maximum MTU of the device, in bytes. A node whose uplink has a smaller MTU uses less.
    #[serde(default = "default_mtu")]
    #[schemars(with = "i32", range(min = 576, max = 65535))]
    pub mtu: u16,
    /// STUN servers as host:port, with or without the prefix `stun:`; port 3478 if there is none. At least two, because only
    /// the responses of several servers show the type of a NAT. Every node asks the first eight addresses from its WireGuard
    /// port about three times a minute; without the field it asks none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 2, max = 16), inner(length(max = 270)))]
    #[x_kube(validation = explained(
        r"self.all(server, server.matches('^(stun:)?([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\\[[0-9A-Fa-f:.]+\\])(:[0-9]{1,5})?$'))",
        r#"'STUN server ' + self.filter(server, !server.matches('^(stun:)?([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\\[[0-9A-Fa-f:.]+\\])(:[0-9]{1,5})?$'))[0] + ' is not host:port'"#,
    ))]
    pub stun_servers: Vec<String>,
    /// URL of the Kubernetes API server, for nodes that cannot use the Service address before the mesh is up.
    #[serde(default, rename = "apiServerURL", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    #[x_kube(validation = explained(
        "isURL(self) && url(self).getScheme() == 'https'", "\"'\" + self + \"' is not an https URL\""))]
    pub api_server_url: Option<String>,
    /// IPv4 prefix from which every node gets an address of its own inside the mesh.
    #[serde(default, rename = "meshCIDR", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = CIDR_LENGTH))]
    #[x_kube(validation = cidr_of_family(4))]
    pub mesh_cidr: Option<String>,
    /// Which prefixes a node publishes by itself. If omitted, its InternalIP addresses.
    #[serde(default, rename = "autoAllowedIPs", skip_serializing_if = "Option::is_none")]
    pub auto_allowed_ips: Option<AutoAllowedIps>,
    /// Whether connections of pods to destinations outside of the cluster get the address of their node. Connections to pods,
    /// nodes and Services never do. `spec.masquerade` of an AddressPool overrides it.
    #[serde(default = "default_masquerade")]
    pub masquerade: bool,
    /// Prefixes in CIDR notation outside of the cluster that see the addresses of pods: they have routes to the pods.
    #[serde(default, rename = "nonMasqueradeCIDRs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1000), inner(length(max = CIDR_LENGTH)))]
    #[x_kube(validation = cidrs())]
    pub non_masquerade_cidrs: Vec<String>,
    /// Which destinations stay out of the mesh.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routing: Option<Routing>,
    /// How paths through NATs are found and validated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nat_traversal: Option<NatTraversal>,
    /// The relay for peers without a direct path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<Relay>,
    /// Discovery services, through which nodes find each other without the Kubernetes API, too. Not in WireKube.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub discovery: Option<Discovery>,
}

/// Which prefixes a node publishes by itself.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AutoAllowedIps {
    /// Whether a node publishes its InternalIP addresses.
    #[serde(default, rename = "includeNodeInternalIP")]
    pub include_node_internal_ip: bool,
}

/// Which destinations stay out of the mesh.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Routing {
    /// Whether addresses in a subnet that the node itself is attached to are reached there (bypass) or through
    /// the mesh (tunnel, the default).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_subnet_policy: Option<LocalSubnetPolicy>,
    /// Prefixes in CIDR notation that never enter the mesh.
    #[serde(default, rename = "excludeCIDRs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1000), inner(length(max = CIDR_LENGTH)))]
    #[x_kube(validation = cidrs())]
    pub exclude_cidrs: Vec<String>,
}

/// How addresses in a subnet that the node is attached to are reached.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum LocalSubnetPolicy {
    /// In that subnet.
    Bypass,
    /// Through the mesh.
    Tunnel,
}

/// How paths through NATs are found and validated.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new(
    "!has(self.directConnectedWindowSeconds) || self.directConnectedWindowSeconds >= self.handshakeValidWindowSeconds + 30")
    .message("directConnectedWindowSeconds must be at least 30 more than handshakeValidWindowSeconds"))]
pub struct NatTraversal {
    /// Which symmetric NATs are traversed by trying many ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub birthday_attack: Option<BirthdayAttack>,
    /// Whether nodes ask their default gateway, over IPv4 and IPv6, to lead the WireGuard port to them (PCP, NAT-PMP, UPnP). Not in WireKube.
    #[serde(default = "enabled")]
    pub port_mapping: Toggle,
    /// Seconds after a handshake during which a direct path counts as working.
    #[serde(default = "default_handshake_valid_window")]
    #[schemars(with = "i32", range(min = 5, max = 86400))]
    pub handshake_valid_window_seconds: u32,
    /// Seconds to wait for the response to a probe of a suspected path.
    #[serde(default = "default_health_probe_timeout")]
    #[schemars(with = "i32", range(min = 1, max = 30))]
    pub health_probe_timeout_seconds: u32,
    /// Seconds without a handshake after which a direct path is abandoned. Defaults to 120 more than
    /// handshakeValidWindowSeconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<i32>", range(min = 35, max = 90000))]
    pub direct_connected_window_seconds: Option<u32>,
}

/// Which symmetric NATs are traversed by trying many ports, which some providers take for an attack. Absent: those of peers behind
/// port-restricted NATs. disabled: none. enabled: those of peers behind symmetric NATs as well. The annotation
/// wirekube.io/birthday-attack on a WireKubePeer, with one of these words, overrides it for the paths of that peer.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum BirthdayAttack {
    /// None.
    Disabled,
    /// Both kinds.
    Enabled,
}

/// A switch.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Toggle {
    /// Off.
    #[default]
    Disabled,
    /// On.
    Enabled,
}

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

/// When the relay is used.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum RelayMode {
    /// While there is no direct path.
    #[default]
    Auto,
    /// For everything.
    Always,
    /// For nothing.
    Never,
}

/// Who runs the relay.
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
    #[schemars(length(max = 262_144))]
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
    /// Its name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Its namespace. Defaults to kube-system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// A relay in this cluster.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ManagedRelay {
    /// How many pods run it. Each passes on what is for nodes of the others.
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
    pub cpu_request: Option<String>,
    /// Memory request, such as 64Mi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_request: Option<String>,
    /// CPU limit, such as 500m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_limit: Option<String>,
    /// Memory limit, such as 128Mi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<String>,
}

/// Observed state of the mesh, written by the controller.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct WireKubeMeshStatus {
    /// Peers with a usable path to all others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_peers: Option<i32>,
    /// All peers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_peers: Option<i32>,
    /// Where nodes reach the managed relay, as host:port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay_endpoint: Option<String>,
    /// Extension of Fairlead: PEM certificates of the authorities that certify the managed relay, as base64.
    #[serde(default, rename = "relayCABundle", skip_serializing_if = "Option::is_none")]
    pub relay_ca_bundle: Option<String>,
    /// Extension of Fairlead: addresses of the managed relay's pods. Their answers to nodes do not enter the mesh that they carry.
    #[serde(default, rename = "relayPodIPs", skip_serializing_if = "Vec::is_empty")]
    pub relay_pod_ips: Vec<String>,
    /// `Ready` is False, with the reason, while peers are missing; `RelayReady` while the managed relay cannot be used;
    /// `FieldsIgnored` is True while fields have no effect.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

impl Default for WireKubeMeshSpec {
    fn default() -> Self {
        Self {
            listen_port: default_listen_port(),
            interface_name: default_interface_name(),
            mtu: default_mtu(),
            stun_servers: Vec::new(),
            api_server_url: None,
            mesh_cidr: None,
            auto_allowed_ips: None,
            masquerade: default_masquerade(),
            non_masquerade_cidrs: Vec::new(),
            routing: None,
            nat_traversal: None,
            relay: None,
            discovery: None,
        }
    }
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

impl Default for NatTraversal {
    fn default() -> Self {
        Self {
            birthday_attack: None,
            port_mapping: enabled(),
            handshake_valid_window_seconds: default_handshake_valid_window(),
            health_probe_timeout_seconds: default_health_probe_timeout(),
            direct_connected_window_seconds: None,
        }
    }
}

impl NatTraversal {
    /// How long a direct path without a handshake is kept, with the default filled in.
    pub fn direct_connected_window(&self) -> Duration {
        let default = self.handshake_valid_window_seconds.saturating_add(120);
        Duration::from_secs(self.direct_connected_window_seconds.unwrap_or(default).into())
    }
}

fn enabled() -> Toggle {
    Toggle::Enabled
}

fn default_masquerade() -> bool {
    true
}

fn default_listen_port() -> u16 {
    WIREGUARD_PORT
}

fn default_interface_name() -> String {
    WIREGUARD_INTERFACE.to_owned()
}

fn default_mtu() -> u16 {
    const { MESH_MTU as u16 }
}

fn default_handshake_valid_window() -> u32 {
    180
}

fn default_health_probe_timeout() -> u32 {
    5
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

//! `WireKubeMesh` of `wirekube.io/v1alpha1`: the settings of the mesh.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::discovery::Discovery;
use super::location::{Granularity, Topology};
use super::relay::{CA_BUNDLE_LENGTH, Relay};
use super::rules::{
    ADDRESS_LENGTH, CIDR_LENGTH, ENDPOINT_LENGTH, FILTER_LENGTH, OBJECT_NAME_PATTERN, address_filter,
    cidr_of_family, cidrs, explained, wireguard_key,
};
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
    /// IPv4 prefix from which the controller gives every node an address of its own on the mesh. It stays the node's, and is kept for a
    /// day after its WireKubePeer was deleted. In IPv6 every node has one without being asked for.
    #[serde(default, rename = "meshCIDR", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = CIDR_LENGTH))]
    #[x_kube(validation = cidr_of_family(4))]
    pub mesh_cidr: Option<String>,
    /// Prefixes that a node has in the mesh beside its AddressBlocks. If omitted, its InternalIP addresses.
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
    /// Destinations that stay out of the mesh.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routing: Option<Routing>,
    /// Filters by address for the endpoints that a node publishes, as KubeSpan's `filters.endpoints`: prefixes in CIDR notation and
    /// addresses, with `!` before those that take endpoints away. Beginning with none, each entry in turn adds endpoints or takes them away;
    /// without the field all are published. Endpoints that administrators annotate are always published. Not in WireKube.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = FILTER_LENGTH)))]
    #[x_kube(validation = address_filter())]
    pub endpoint_filters: Vec<String>,
    /// Filters for the endpoints of other nodes that a node tries, in the notation of endpointFilters, wherever it has learned of them. Packets
    /// of a peer are accepted wherever they come from. Not in WireKube.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = FILTER_LENGTH)))]
    #[x_kube(validation = address_filter())]
    pub peer_endpoint_filters: Vec<String>,
    /// Whether nodes publish at which endpoints they see others, as KubeSpan's `harvestExtraEndpoints`. Without it, and without STUN servers,
    /// two nodes behind NATs hardly find each other. Not in WireKube.
    #[serde(default = "default_harvest")]
    pub harvest_extra_endpoints: bool,
    /// Discovery and validation of paths through NATs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nat_traversal: Option<NatTraversal>,
    /// The relay for peers without a direct path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<Relay>,
    /// Discovery services, through which nodes find each other without the Kubernetes API, too. Not in WireKube.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub discovery: Option<Discovery>,
    /// Prefixes that nodes and Peers may have although they are not theirs anyway: claims to parts of a granted prefix go before those of
    /// others. An address that a node announces and its Node does not have as InternalIP counts only with a grant, and so does what is wider than
    /// /8, such as 0.0.0.0/0. AddressBlocks go before grants, and addresses of nodes before granted ranges around them. Not in WireKube.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub grants: Vec<Grant>,
    /// Names and keys of nodes that were removed from the mesh for good: no node accepts them, whatever tells of them. `fairlead peer revoke`
    /// and `fairlead peer unrevoke` change the list. Not in WireKube.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 500))]
    pub revoked_peers: Vec<RevokedPeer>,
    /// Tunnels between nodes, by the locations of the nodes. Absent: every node has a tunnel to every other. Not in WireKube.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<Topology>,
}

/// Prefixes that one node or Peer may have.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.node) != has(self.peer)").message("a grant is for a node or for a peer: name one of them"))]
pub struct Grant {
    /// Name of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub node: Option<String>,
    /// Name of the Peer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub peer: Option<String>,
    /// Prefixes in CIDR notation.
    #[schemars(length(min = 1, max = 16), inner(length(max = CIDR_LENGTH)))]
    #[x_kube(validation = cidrs())]
    pub cidrs: Vec<String>,
}

/// A node that is in the mesh no more, by name, by key, or both.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.name) || has(self.publicKey)").message("name or publicKey is required: who is revoked"))]
pub struct RevokedPeer {
    /// Name of the node: no key is accepted of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = OBJECT_NAME_PATTERN))]
    pub name: Option<String>,
    /// WireGuard public key: it is accepted of no node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 44))]
    #[x_kube(validation = wireguard_key())]
    pub public_key: Option<String>,
}

/// Prefixes that a node has in the mesh beside its AddressBlocks.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!self.includePodCIDRs || has(self.includeNodeInternalIP)")
    .message("say includeNodeInternalIP too: if it is omitted beside another field, nodes are not reached at their addresses"))]
pub struct AutoAllowedIps {
    /// Whether a node publishes its InternalIP addresses. If only this field is omitted, it does not.
    #[serde(default, rename = "includeNodeInternalIP", skip_serializing_if = "Option::is_none")]
    pub include_node_internal_ip: Option<bool>,
    /// Whether a node has spec.podCIDRs of its Node in the mesh, as KubeSpan's `advertiseKubernetesNetworks`: for clusters whose pods get their
    /// addresses there from another plugin, such as Flannel, Calico, Cilium or host-local. AddressBlocks go before them. Not in WireKube.
    #[serde(default, rename = "includePodCIDRs")]
    pub include_pod_cidrs: bool,
}

/// Destinations that stay out of the mesh.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Routing {
    /// Whether addresses in a subnet that the node itself is attached to are reached there, unencrypted (bypass), or through
    /// the mesh (tunnel, the default). With bypass, addresses of another site with the same subnet are not reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_subnet_policy: Option<LocalSubnetPolicy>,
    /// Prefixes in CIDR notation that never enter the mesh.
    #[serde(default, rename = "excludeCIDRs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1000), inner(length(max = CIDR_LENGTH)))]
    #[x_kube(validation = cidrs())]
    pub exclude_cidrs: Vec<String>,
    /// Whether packets to a node whose tunnel is down leave without a tunnel, IN CLEAR TEXT, by the routes that the host has otherwise, as
    /// KubeSpan's `allowDownPeerBypass`. By default they are dropped. It is for nodes only: packets to Peers, and to nodes
    /// without a usable key, are dropped all the same. Not in WireKube.
    #[serde(default)]
    pub allow_down_peer_bypass: bool,
}

/// Way to addresses in a subnet that the node is attached to.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum LocalSubnetPolicy {
    /// Directly in that subnet.
    Bypass,
    /// Through the mesh.
    Tunnel,
}

/// Discovery and validation of paths through NATs.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new(
    "!has(self.directConnectedWindowSeconds) || self.directConnectedWindowSeconds >= self.handshakeValidWindowSeconds + 30")
    .message("directConnectedWindowSeconds must be at least 30 more than handshakeValidWindowSeconds"))]
pub struct NatTraversal {
    /// Symmetric NATs that are traversed by trying many ports.
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

/// Symmetric NATs that are traversed by trying many ports, which some providers take for an attack. Absent: those of peers behind
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
    /// Address at which nodes reach the managed relay, as host:port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = ENDPOINT_LENGTH))]
    pub relay_endpoint: Option<String>,
    /// Extension of Fairlead: PEM certificates of the authorities that certify the managed relay, as base64.
    #[serde(default, rename = "relayCABundle", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = CA_BUNDLE_LENGTH))]
    pub relay_ca_bundle: Option<String>,
    /// Extension of Fairlead: addresses of the managed relay's pods. Their answers to nodes do not enter the mesh that they carry.
    #[serde(default, rename = "relayPodIPs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_RELAY_POD_IPS), inner(length(max = ADDRESS_LENGTH)))]
    pub relay_pod_ips: Vec<String>,
    /// Extension of Fairlead: addresses of spec.meshCIDR that are kept for nodes which were deleted.
    #[serde(default, rename = "keptMeshIPs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    pub kept_mesh_ips: Vec<KeptMeshIp>,
    /// Extension of Fairlead: WireKubePeers whose deletion the controller has seen, for nodes that were off then: they believe neither a
    /// discovery service nor a file that tells of such a name or key. The newest; one that is published again is not in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_DELETED_PEERS))]
    pub deleted_peers: Vec<DeletedPeer>,
    /// Extension of Fairlead: the granularity in use. The controller sets it to spec.topology.granularity once the nodes have prepared for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granularity: Option<Granularity>,
    /// `GranularityInUse` is False while nodes have not prepared for spec.topology.granularity; it names them.
    /// `MeshAddressesAssigned` is False while a node has no address on the mesh;
    /// `InternalIPsBelieved` is False while an InternalIP of a Node is left out, as that of another Node or unlike its first ones;
    /// `Ready` is False, with the reason, while peers are missing; `RelayReady` while the managed relay cannot be used;
    /// `FieldsIgnored` is True while fields have no effect.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

impl WireKubeMesh {
    /// The granularity in use: that of the spec, if the controller has not said another one.
    pub fn granularity(&self) -> Granularity {
        let in_use = self.status.as_ref().and_then(|status| status.granularity);
        in_use.unwrap_or_else(|| self.wanted_granularity())
    }

    /// The mesh that controller and nodes follow if there are several: the first by name.
    pub fn selected(meshes: &[Arc<Self>]) -> Option<&Arc<Self>> {
        meshes.iter().min_by(|one, other| one.metadata.name.cmp(&other.metadata.name))
    }

    /// Whether the networks of pods that Nodes have are in the mesh.
    pub fn includes_pod_networks(&self) -> bool {
        self.spec.auto_allowed_ips.as_ref().is_some_and(|auto| auto.include_pod_cidrs)
    }

    /// The granularity that the spec asks for.
    pub fn wanted_granularity(&self) -> Granularity {
        self.spec.topology.as_ref().map(|topology| topology.granularity).unwrap_or_default()
    }
}

/// Type of the condition that is False while nodes have not prepared for the granularity of the spec.
pub const GRANULARITY_IN_USE: &str = "GranularityInUse";

/// Most addresses of the managed relay's pods: one of each family of five replicas, with as many again during an update, and three times that.
const MAX_RELAY_POD_IPS: usize = 64;

/// Largest number of deleted peers in the status.
pub const MAX_DELETED_PEERS: usize = 256;

/// A WireKubePeer that was deleted.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct DeletedPeer {
    /// Name of the WireKubePeer.
    #[schemars(length(max = 253))]
    pub name: String,
    /// WireGuard public key of the peer.
    #[schemars(length(max = 44))]
    pub public_key: String,
    /// WireGuard public key that the peer was about to use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 44))]
    pub next_public_key: Option<String>,
    /// Time until which the deletion is remembered.
    pub until: Time,
}

/// An address on the mesh that is kept for a node.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct KeptMeshIp {
    /// Name of the node.
    #[schemars(length(max = 253))]
    pub node: String,
    /// Address that is kept.
    #[schemars(length(max = 45))]
    pub ip: String,
    /// Time until which the address is kept.
    pub until: Time,
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
            endpoint_filters: Vec::new(),
            peer_endpoint_filters: Vec::new(),
            harvest_extra_endpoints: default_harvest(),
            nat_traversal: None,
            relay: None,
            discovery: None,
            grants: Vec::new(),
            revoked_peers: Vec::new(),
            topology: None,
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

fn enabled() -> Toggle {
    Toggle::Enabled
}

fn default_harvest() -> bool {
    true
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

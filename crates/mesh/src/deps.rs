//! Dependencies of the mesh, which the program that runs it provides.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use fairlead_api::resources::WireKubeMesh;
use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::EventPublisher;
use fairlead_dataplane::kernel_watch::KernelWatch;
use fairlead_dataplane::wireguard::Preference;
use fairlead_keys::PrivateKey;
use fairlead_members::cached_block::CachedBlock;
use fairlead_members::cached_peer::CachedPeer;
use fairlead_members::external_peers::CachedExternalPeer;
use fairlead_members::kubernetes::Deletions;
use fairlead_members::preshared_keys::PresharedKeys;
use fairlead_topology::SourceNodes;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::Client;
use tokio::sync::watch;

use super::tell::metrics::MeshMetrics;

/// Arguments of [`start`](super::start()).
pub struct MeshDeps {
    /// Client of the API server.
    pub client: Client,
    /// This node.
    pub node: MeshNode,
    /// Objects of the cluster.
    pub caches: MeshCaches,
    /// Source addresses of egress gateways.
    pub sources: SourceWatches,
    /// Changes of the kernel's network state by other programs.
    pub kernel: KernelWatch,
    /// Events and metrics.
    pub outputs: MeshOutputs,
}

/// This node as its program is configured.
pub struct MeshNode {
    /// Name of the node.
    pub name: String,
    /// Private key of the node, its identity.
    pub private_key: PrivateKey,
    /// WireGuard implementation to use.
    pub preference: Preference,
    /// Directory in which the state of the cluster is saved.
    pub state_directory: PathBuf,
    /// Path of the socket over which one program hands the device inside of its process to the next program.
    pub handover: PathBuf,
    /// Whether it has a WireKubePeer.
    pub publishes: bool,
    /// Routing table of the node's pods.
    pub table_pods: u32,
    /// A file with members of the mesh.
    pub peers_file: Option<PathBuf>,
}

/// Objects of the cluster that the mesh follows.
pub struct MeshCaches {
    /// This node's own object.
    pub nodes: Arc<Cache<Node>>,
    /// The mesh resources, of which one counts.
    pub meshes: Arc<Cache<WireKubeMesh>>,
    /// Prefixes of Services.
    pub service_ranges: Arc<Cache<ServiceCIDR>>,
    /// All peers.
    pub peers: Arc<Cache<CachedPeer>>,
    /// Peers whose deletion the watch has shown.
    pub deleted_peers: Deletions,
    /// All blocks.
    pub blocks: Arc<Cache<CachedBlock>>,
    /// Peers outside of the cluster.
    pub external_peers: Arc<Cache<CachedExternalPeer>>,
    /// Preshared keys that these name.
    pub preshared_keys: Arc<Cache<PresharedKeys>>,
    /// Endpoints of the API server; `None` until it has answered.
    pub api_server: watch::Receiver<Option<Vec<SocketAddr>>>,
}

/// Source addresses of egress gateways.
pub struct SourceWatches {
    /// Addresses that this node announces.
    pub announced: watch::Receiver<BTreeSet<IpAddr>>,
    /// Nodes that may claim each address; `None` until the API server has said it.
    pub nodes: watch::Receiver<Option<Arc<BTreeMap<IpAddr, SourceNodes>>>>,
}

/// Places in which users see the mesh: Events and metrics.
pub struct MeshOutputs {
    /// Problems on the Node, where `kubectl describe node` shows them.
    pub events: EventPublisher,
    /// Gauges of the peers.
    pub metrics: MeshMetrics,
    /// Whether peers have metrics of their own.
    pub metrics_per_peer: bool,
}

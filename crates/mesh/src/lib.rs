//! The mesh: tunnels to all members, and what leads packets into them.
//!
//! Data goes one way. [`inputs`] reads the cluster's objects: members by way of [`fairlead_members`], settings, this Node.
//! [`desired`] plans with [`fairlead_topology`] and lists the endpoints of each peer; it is pure. [`reconciler`] brings the
//! kernel there, by `fairlead-dataplane` and, where the kernel has no WireGuard, `fairlead-tunnel`. [`path_port`] drives
//! [`fairlead_path`] and chooses endpoints; a timer of a path reads neither the cluster's objects nor links, routes or nftables.
//! [`relay`], [`discovery`], [`port_mapping`] and others ask servers beside all of this, and are read as inputs.
//!
//! Results go to this node's own WireKubePeer ([`publish`]), to metrics, and by [`MeshView`] to the status. What must outlive the
//! API server stands in the state directory: keys ([`identity`]), and what was last known of the cluster.
//!
//! It does not know pods or egress gateways: prefixes of this node's pods are those of its AddressBlocks, and source addresses
//! of gateways are handed to it.

pub mod desired;
pub mod discovery;
pub mod down_peers;
mod ec2;
pub mod encapsulation;
pub mod entries;
pub mod external;
pub mod gateways;
mod granted;
mod granularity;
pub mod identity;
pub mod inputs;
pub mod kernel;
mod key_changes;
mod key_rotation;
pub mod keys;
pub mod metrics;
mod names;
pub mod nat64;
mod observers;
pub mod path_history;
pub mod path_port;
mod paths;
pub mod port_mapping;
pub mod problem;
pub mod publish;
mod publisher;
pub mod reconciler;
pub mod relay;
pub mod relay_reason;
pub mod report;
mod reports;
mod run;
mod saved;
mod selection;
pub mod settings;
mod state_file;
#[cfg(test)]
mod tests;
pub mod write_budget;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use fairlead_address::InterfaceId;
use fairlead_api::names::MARK_FROM_WIREGUARD;
use fairlead_api::resources::WireKubeMesh;
use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::EventPublisher;
use fairlead_cluster::subsystem::Supervisor;
use fairlead_dataplane::kernel_watch::KernelWatch;
use fairlead_dataplane::uplink::{HostNetwork, Ignored};
use fairlead_dataplane::wireguard::Preference;
use fairlead_keys::{PrivateKey, PublicKey};
use fairlead_members::MemberSource;
use fairlead_members::cached_block::CachedBlock;
use fairlead_members::cached_peer::CachedPeer;
use fairlead_members::discovery::Discovery;
use fairlead_members::external_peers::{CachedExternalPeer, ExternalPeers};
use fairlead_members::kubernetes::{Deletions, Kubernetes};
use fairlead_members::membership::Membership;
use fairlead_members::preshared_keys::PresharedKeys;
use fairlead_members::provenance::{DiscoveryStatus, Heard, Provenance};
use fairlead_members::static_peers::{PeersFile, StaticSource};
use fairlead_path::Identity;
use fairlead_topology::SourceNodes;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::Client;
use tokio::sync::{oneshot, watch};

use self::discovery::{DiscoveryTask, Shared};
use self::inputs::{InputReader, MeshIdentity, NetworkWatches};
use self::kernel::HostKernel;
use self::key_rotation::KeyRotation;
use self::keys::{KeyStore, Keys};
use self::metrics::MeshMetrics;
use self::nat64::{Nat64Answer, Nat64Task};
use self::path_port::PathPort;
use self::paths::PathDriver;
use self::port_mapping::{PortMappingTask, PortMappings};
use self::problem::MeshFailure;
use self::publisher::Publisher;
pub use self::publisher::pause_after_write;
use self::reconciler::{DeviceSlot, Mesh};
use self::relay::{RelayLink, RelayView};
use self::reports::Reports;
pub use self::reports::Snapshot;
use self::saved::StateFile;

/// What the mesh works with.
pub struct MeshDeps {
    /// Client of the API server.
    pub client: Client,
    /// This node's name.
    pub node: String,
    /// This node's identity.
    pub private_key: PrivateKey,
    /// Which WireGuard to use.
    pub preference: Preference,
    /// Where what the cluster says is saved.
    pub state_directory: PathBuf,
    /// Where devices inside processes are handed from one program to the next.
    pub handover: PathBuf,
    /// This node's own object.
    pub nodes: Arc<Cache<Node>>,
    /// The mesh resources, of which one [is selected](selection::selected).
    pub meshes: Arc<Cache<WireKubeMesh>>,
    /// Where Services have their addresses.
    pub service_ranges: Arc<Cache<ServiceCIDR>>,
    /// All peers.
    pub peers: Arc<Cache<CachedPeer>>,
    /// Whether this node has a WireKubePeer.
    pub publishes: bool,
    /// A file with members of the mesh.
    pub peers_file: Option<PathBuf>,
    /// Those whose deletion the watch has shown.
    pub deleted_peers: Deletions,
    /// All blocks.
    pub blocks: Arc<Cache<CachedBlock>>,
    /// Peers outside of the cluster.
    pub external_peers: Arc<Cache<CachedExternalPeer>>,
    /// Preshared keys that these name.
    pub preshared_keys: Arc<Cache<PresharedKeys>>,
    /// Where the API server is; `None` until it has answered.
    pub api_server: watch::Receiver<Option<Vec<SocketAddr>>>,
    /// What other programs change of the kernel's network state.
    pub kernel: KernelWatch,
    /// Source addresses of egress gateways that this node announces.
    pub announced_sources: watch::Receiver<BTreeSet<IpAddr>>,
    /// Which nodes may have such an address; `None` until the API server has said it.
    pub source_nodes: watch::Receiver<Option<Arc<BTreeMap<IpAddr, SourceNodes>>>>,
    /// Publishes problems on the Node, where `kubectl describe node` shows them.
    pub events: EventPublisher,
    /// Gauges of the peers.
    pub metrics: MeshMetrics,
    /// Whether peers have metrics of their own.
    pub metrics_per_peer: bool,
}

/// Joins the mesh. The device outlives the subsystem: see [`MeshHandle::into_device`].
pub fn start(deps: MeshDeps, supervisor: &mut Supervisor) -> MeshHandle {
    let time_to_direct = deps.metrics.time_to_direct();
    let reports = Arc::new(Reports::new(&deps.node, Some(deps.metrics), deps.metrics_per_peer));
    let store = Arc::new(KeyStore::open(deps.state_directory.clone(), deps.private_key));
    let Keys { private_key, public_key, .. } = store.current();
    let file = StateFile { directory: deps.state_directory, node: deps.node.clone() };
    let (cached, discovered) = DiscoveryTask::known_before(&file);
    let (known, discovered) = watch::channel(Arc::new(discovered));
    let (peers_file, static_peers) = deps.peers_file.map(PeersFile::open).unzip();
    let (services, discovery_status) = watch::channel(DiscoveryStatus::default());
    let provenance = Provenance {
        peers: Arc::clone(&deps.peers),
        file: static_peers.as_ref().map(StaticSource::subscribe),
        discovered: discovered.clone(),
        discovery: discovery_status.clone(),
    };
    let mut sources: Vec<Box<dyn MemberSource>> = vec![
        Box::new(Kubernetes::of_mesh(Arc::clone(&deps.peers), deps.deleted_peers, deps.blocks)),
        Box::new(ExternalPeers::new(deps.external_peers, deps.preshared_keys)),
        Box::new(Discovery::new(discovered)),
    ];
    sources.extend(static_peers.map(|source| Box::new(source) as Box<dyn MemberSource>));
    let (mapped, port_mappings) = watch::channel(PortMappings::default());
    let meshes = Arc::clone(&deps.meshes);
    let (found, nat64) = watch::channel(Nat64Answer::default());
    let nat64_task = Nat64Task { kernel: deps.kernel.subscribe(port_mapping::concerns), found };
    let (credentials, cluster) = watch::channel(Shared::saved(&file));
    let interface_id = interface_id().inspect_err(|error| {
        tracing::warn!(%error, "cannot read link-layer addresses: the address on the mesh is made of the key");
    });
    let mesh_identity = MeshIdentity {
        interface_id: interface_id.ok().flatten(),
        is_in_cluster: deps.publishes,
        cluster,
        keys: store.subscribe(),
    };
    let seen = Arc::clone(&reports);
    let session = Box::new(move |key: &PublicKey| seen.session(key));
    let reader = InputReader::new(
        file.clone(),
        Arc::clone(&deps.nodes),
        deps.meshes,
        deps.service_ranges,
        Membership::new(deps.node.clone(), sources, session),
        deps.api_server,
        NetworkWatches {
            port_mappings,
            public_ipv4: ec2::start(&deps.kernel, supervisor.subsystem("mesh")),
            nat64,
            mesh_identity,
            announced_sources: deps.announced_sources,
            source_nodes: deps.source_nodes,
        },
    );
    let probes = Identity { private_key: private_key.clone(), public_key, epoch: rand::random() };
    let (relay_key, key) = watch::channel(private_key);
    let (registered, is_registered) = watch::channel(None);
    let rotation = KeyRotation {
        node: deps.node.clone(),
        store: Arc::clone(&store),
        peers: Arc::clone(&deps.peers),
        publishes: deps.publishes,
        relay: reader.relay(),
        relay_key,
        registered: is_registered,
    };
    let (view, status) = RelayView::open();
    let paths = PathDriver::new(probes, rand::random(), view.clone(), time_to_direct, Instant::now());
    let relay = RelayLink {
        instance: rand::random(),
        client: deps.client.clone(),
        server: reader.relay(),
        file: file.clone(),
        key,
        registered,
        paths: Arc::clone(paths.port()),
        view,
        status,
    };
    let discovery = DiscoveryTask {
        client: deps.client.clone(),
        node: deps.node.clone(),
        keys: store.subscribe(),
        settings: reader.discovery(),
        file: file.clone(),
        cached,
        reports: Arc::clone(&reports),
        known,
        credentials,
        status: services,
        secret_interval: discovery::SECRET_INTERVAL,
        mark: MARK_FROM_WIREGUARD,
    };
    let port = Arc::clone(paths.port());
    let device = DeviceSlot::new(deps.preference, deps.handover);
    let mesh = Mesh::new(HostKernel::default(), device, paths);
    let port_mapping = PortMappingTask {
        meshes,
        kernel: deps.kernel.subscribe(port_mapping::concerns),
        port: mesh.listen_port(),
        nonce: store.nonce(),
        found: mapped,
    };
    let publisher = Publisher {
        client: deps.client,
        node: deps.node,
        keys: store.subscribe(),
        nodes: deps.nodes,
        peers: deps.peers,
        events: deps.events,
        reports: Arc::clone(&reports),
    };
    let subsystem = supervisor.subsystem("mesh");
    if deps.publishes {
        subsystem.spawn("publisher", publisher.run(reports.subscribe()));
    }
    subsystem.spawn("key rotation", rotation.run());
    subsystem.spawn("relay", relay.run());
    subsystem.spawn("discovery", discovery.run());
    subsystem.spawn("port mapping", port_mapping.run());
    subsystem.spawn("NAT64", nat64_task.run());
    if let Some(file) = peers_file {
        subsystem.spawn("static peers", file.run());
    }
    subsystem.spawn("saved state", file.keep(reader.unsaved()));
    let (stopped, device) = oneshot::channel();
    let running = Arc::clone(&reports);
    let kernel = deps.kernel.subscribe(run::concerns);
    subsystem.spawn_graceful("reconciler", |stop| async move {
        let mesh = run::run(reader, kernel, mesh, running, stop.cancelled_owned()).await;
        drop(stopped.send(mesh.into_device()));
    });
    let view = MeshView {
        keys: Some(store),
        reports,
        paths: Some(port),
        discovery: discovery_status,
        provenance: Some(provenance),
    };
    MeshHandle { view, device }
}

/// What the first link-layer address of this host makes of IPv6 addresses.
fn interface_id() -> fairlead_netlink::Result<Option<InterfaceId>> {
    let mac = HostNetwork::read()?.first_mac(&Ignored::default());
    Ok(mac.map(|mac| InterfaceId::of_mac(mac.0)))
}

/// The mesh of this node, for the program that runs it.
pub struct MeshHandle {
    view: MeshView,
    device: oneshot::Receiver<DeviceSlot>,
}

impl MeshHandle {
    /// The handle of a node that stays outside of the mesh.
    pub fn outside(failure: MeshFailure) -> Self {
        let reports = Reports::new("", None, false);
        reports.fail(failure);
        let (_, device) = oneshot::channel();
        let (_, discovery) = watch::channel(DiscoveryStatus::default());
        let reports = Arc::new(reports);
        Self { view: MeshView { keys: None, reports, paths: None, discovery, provenance: None }, device }
    }

    /// What other subsystems may know of the mesh.
    pub fn view(&self) -> MeshView {
        self.view.clone()
    }

    /// The device, once the subsystem was stopped.
    pub async fn into_device(self) -> Option<DeviceSlot> {
        self.device.await.ok()
    }
}

/// What other subsystems may know of the mesh.
#[derive(Clone)]
pub struct MeshView {
    keys: Option<Arc<KeyStore>>,
    reports: Arc<Reports>,
    paths: Option<Arc<PathPort>>,
    discovery: watch::Receiver<DiscoveryStatus>,
    provenance: Option<Provenance>,
}

impl MeshView {
    /// When the sources of members last told of them.
    pub fn heard(&self, saved: Option<Instant>) -> Heard {
        self.provenance.as_ref().map(|provenance| provenance.heard(saved)).unwrap_or_default()
    }

    /// How the discovery services of the mesh do.
    pub fn discovery(&self) -> DiscoveryStatus {
        self.discovery.borrow().clone()
    }

    /// This node's keys; `None` when its key file is unusable.
    pub fn keys(&self) -> Option<&Arc<KeyStore>> {
        self.keys.as_ref()
    }

    /// The paths to the peers; `None` on a node that stays outside of the mesh.
    pub fn paths(&self) -> Option<&Arc<PathPort>> {
        self.paths.as_ref()
    }

    /// The mesh as of the last step.
    pub fn snapshot(&self) -> Snapshot {
        self.reports.snapshot()
    }

    /// MTU of the device; `None` before there is one.
    pub fn mtu(&self) -> Option<u32> {
        self.snapshot().report.map(|report| report.device.mtu)
    }

    /// Why pods do not reach other nodes through the mesh. A cluster without a mesh has no problem with it.
    pub fn problem(&self) -> Option<MeshFailure> {
        self.snapshot().failure.filter(|failure| *failure != MeshFailure::NoMesh)
    }
}

//! The tasks of the mesh, and the channels between them.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Instant;

use fairlead_address::InterfaceId;
use fairlead_api::names::MARK_FROM_WIREGUARD;
use fairlead_api::resources::WireKubeMesh;
use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::EventPublisher;
use fairlead_cluster::subsystem::{Subsystem, Supervisor};
use fairlead_dataplane::kernel_watch::KernelWatch;
use fairlead_dataplane::uplink::{HostNetwork, Ignored};
use fairlead_keys::PublicKey;
use fairlead_members::MemberSource;
use fairlead_members::discovery::{Discovered, Discovery};
use fairlead_members::discovery_client::{DiscoveryTask, SECRET_INTERVAL, Shared};
use fairlead_members::external_peers::ExternalPeers;
use fairlead_members::kubernetes::Kubernetes;
use fairlead_members::membership::Membership;
use fairlead_members::provenance::{DiscoveryStatus, Provenance};
use fairlead_members::settings::{MeshSettings, selected};
use fairlead_members::state_file::StateFile;
use fairlead_members::static_peers::{PeersFile, StaticSource};
use fairlead_path::Identity;
use fairlead_port_mapping::ec2;
use fairlead_port_mapping::task::{self, PortMappingTask, PortMappings, Wanted};
use fairlead_relay::client::LinkStatus;
use fairlead_topology::Member;
use kube::Client;
use tokio::sync::{oneshot, watch};

use super::apply::kernel::HostKernel;
use super::apply::path_port::PathPort;
use super::apply::paths::PathDriver;
use super::apply::reconciler::{DeviceSlot, Mesh};
use super::apply::relay::{RelayLink, RelayView};
use super::deps::{MeshCaches, MeshDeps, MeshNode, MeshOutputs};
use super::gather::key_rotation::KeyRotation;
use super::gather::keys::{KeyStore, Keys};
use super::gather::nat64::Nat64Task;
use super::gather::network::{MeshIdentity, NetworkWatches};
use super::gather::reader::InputReader;
use super::model::nat64::Nat64Answer;
use super::tell::local_node::ReportedNode;
use super::tell::publisher::Publisher;
use super::tell::reports::Reports;
use super::{MeshHandle, MeshView, run};

/// Dependencies that tasks of the mesh have in common.
struct Common {
    client: Client,
    node: String,
    /// Whether this node has a WireKubePeer.
    publishes: bool,
    store: Arc<KeyStore>,
    file: StateFile,
    reports: Arc<Reports>,
}

/// Joins the mesh. The device outlives the subsystem: see [`MeshHandle::into_device`].
pub fn start(deps: MeshDeps, supervisor: &mut Supervisor) -> MeshHandle {
    let MeshDeps { client, node, caches, sources, kernel, outputs } = deps;
    let MeshOutputs { events, metrics, metrics_per_peer } = outputs;
    let time_to_direct = metrics.time_to_direct();
    let common = Common::open(client, &node, Reports::new(&node.name, Some(metrics), metrics_per_peer));
    let (peers_file, static_peers) = node.peers_file.map(PeersFile::open).unzip();
    let discovery = DiscoveryChannels::open(&common.file);
    let provenance = discovery.provenance(&caches, static_peers.as_ref());
    let membership = common.membership(&caches, static_peers, discovery.discovered.clone());
    let (mapped, port_mappings) = watch::channel(PortMappings::default());
    let (found, nat64) = watch::channel(Nat64Answer::default());
    let network = NetworkWatches {
        port_mappings,
        public_ipv4: public_ipv4(&kernel, supervisor.subsystem("mesh")),
        nat64,
        mesh_identity: common.identity(discovery.cluster.clone()),
        announced_sources: sources.announced,
        source_nodes: sources.nodes,
    };
    let reader = common.reader(&caches, membership, network);
    let (view, status) = RelayView::open();
    let paths =
        PathDriver::new(common.probes(), rand::random(), view.clone(), time_to_direct, Instant::now());
    let port = Arc::clone(paths.port());
    let slot = DeviceSlot::new(node.preference, node.handover);
    let mesh = Mesh::new(HostKernel::new(node.table_pods), slot, paths);
    let port_mapping = common.port_mapping(&caches, &kernel, mesh.listen_port(), mapped);
    let subsystem = supervisor.subsystem("mesh");
    if common.publishes {
        subsystem.spawn("publisher", common.publisher(&caches, events).run(common.reports.subscribe()));
    }
    let (rotation, relay) = common.keyed(&caches, &reader, (Arc::clone(&port), view, status));
    subsystem.spawn("key rotation", rotation.run());
    subsystem.spawn("relay", relay.run());
    let (discovery_status, discovery) = discovery.task(&common, &reader);
    subsystem.spawn("discovery", discovery.run());
    subsystem.spawn("port mapping", port_mapping.run());
    let nat64 = Nat64Task { kernel: kernel.subscribe(task::concerns), found };
    subsystem.spawn("NAT64", nat64.run());
    if let Some(file) = peers_file {
        subsystem.spawn("static peers", file.run());
    }
    subsystem.spawn("saved state", common.file.clone().keep(reader.unsaved()));
    let (stopped, device) = oneshot::channel();
    let running = Arc::clone(&common.reports);
    let kernel = kernel.subscribe(fairlead_dataplane::mesh::concerns);
    subsystem.spawn_graceful("reconciler", |stop| async move {
        let mesh = run::run(reader, kernel, mesh, running, stop.cancelled_owned()).await;
        drop(stopped.send(mesh.into_device()));
    });
    let view = MeshView {
        keys: Some(common.store),
        reports: common.reports,
        paths: Some(port),
        discovery: discovery_status,
        provenance: Some(provenance),
    };
    MeshHandle { view, device }
}

/// The ends of the channels of discovery, and what its files have.
struct DiscoveryChannels {
    cached: (Vec<Member>, Option<Instant>),
    known: watch::Sender<Arc<Discovered>>,
    discovered: watch::Receiver<Arc<Discovered>>,
    credentials: watch::Sender<Option<Shared>>,
    cluster: watch::Receiver<Option<Shared>>,
    services: watch::Sender<DiscoveryStatus>,
    status: watch::Receiver<DiscoveryStatus>,
}

impl DiscoveryChannels {
    fn open(file: &StateFile) -> Self {
        let (cached, discovered) = DiscoveryTask::known_before(file);
        let (known, discovered) = watch::channel(Arc::new(discovered));
        let (services, status) = watch::channel(DiscoveryStatus::default());
        let (credentials, cluster) = watch::channel(Shared::saved(file));
        Self { cached, known, discovered, credentials, cluster, services, status }
    }

    fn provenance(&self, caches: &MeshCaches, static_peers: Option<&StaticSource>) -> Provenance {
        Provenance {
            peers: Arc::clone(&caches.peers),
            file: static_peers.map(StaticSource::subscribe),
            discovered: self.discovered.clone(),
            discovery: self.status.clone(),
        }
    }

    fn task(
        self,
        common: &Common,
        reader: &InputReader,
    ) -> (watch::Receiver<DiscoveryStatus>, DiscoveryTask) {
        let task = DiscoveryTask {
            client: common.client.clone(),
            node: common.node.clone(),
            local: Arc::new(ReportedNode {
                name: common.node.clone(),
                keys: common.store.subscribe(),
                reports: Arc::clone(&common.reports),
            }),
            settings: reader.discovery(),
            file: common.file.clone(),
            cached: self.cached,
            known: self.known,
            credentials: self.credentials,
            status: self.services,
            secret_interval: SECRET_INTERVAL,
            mark: MARK_FROM_WIREGUARD,
        };
        (self.status, task)
    }
}

impl Common {
    fn open(client: Client, node: &MeshNode, reports: Reports) -> Self {
        let directory = node.state_directory.clone();
        Self {
            client,
            node: node.name.clone(),
            publishes: node.publishes,
            store: Arc::new(KeyStore::open(directory.clone(), node.private_key.clone())),
            file: StateFile { directory, node: node.name.clone() },
            reports: Arc::new(reports),
        }
    }

    fn reader(&self, caches: &MeshCaches, membership: Membership, network: NetworkWatches) -> InputReader {
        InputReader::new(
            self.file.clone(),
            Arc::clone(&caches.nodes),
            Arc::clone(&caches.meshes),
            Arc::clone(&caches.service_ranges),
            membership,
            caches.api_server.clone(),
            network,
        )
    }

    fn port_mapping(
        &self,
        caches: &MeshCaches,
        kernel: &KernelWatch,
        port: watch::Receiver<Option<u16>>,
        found: watch::Sender<PortMappings>,
    ) -> PortMappingTask {
        let meshes = Arc::clone(&caches.meshes);
        PortMappingTask {
            wanted_changed: meshes.subscribe(),
            wanted: Box::new(move || port_mapping_wanted(&meshes)),
            kernel: kernel.subscribe(task::concerns),
            port,
            nonce: self.store.nonce(),
            found,
        }
    }

    fn membership(
        &self,
        caches: &MeshCaches,
        static_peers: Option<StaticSource>,
        discovered: watch::Receiver<Arc<Discovered>>,
    ) -> Membership {
        let peers = Arc::clone(&caches.peers);
        let blocks = Arc::clone(&caches.blocks);
        let keys = Arc::clone(&caches.preshared_keys);
        let mut sources: Vec<Box<dyn MemberSource>> = vec![
            Box::new(Kubernetes::of_mesh(peers, caches.deleted_peers.clone(), blocks)),
            Box::new(ExternalPeers::new(Arc::clone(&caches.external_peers), keys)),
            Box::new(Discovery::new(discovered)),
        ];
        sources.extend(static_peers.map(|source| Box::new(source) as Box<dyn MemberSource>));
        let seen = Arc::clone(&self.reports);
        let session = Box::new(move |key: &PublicKey| seen.session(key));
        Membership::new(self.node.clone(), sources, session)
    }

    fn identity(&self, cluster: watch::Receiver<Option<Shared>>) -> MeshIdentity {
        let interface_id = interface_id().inspect_err(|error| {
            tracing::warn!(%error, "cannot read link-layer addresses: the address on the mesh is made of the key");
        });
        MeshIdentity {
            interface_id: interface_id.ok().flatten(),
            is_in_cluster: self.publishes,
            cluster,
            keys: self.store.subscribe(),
        }
    }

    fn probes(&self) -> Identity {
        let Keys { private_key, public_key, .. } = self.store.current();
        Identity { private_key, public_key, epoch: rand::random() }
    }

    fn publisher(&self, caches: &MeshCaches, events: EventPublisher) -> Publisher {
        Publisher {
            client: self.client.clone(),
            node: self.node.clone(),
            keys: self.store.subscribe(),
            nodes: Arc::clone(&caches.nodes),
            peers: Arc::clone(&caches.peers),
            events,
            reports: Arc::clone(&self.reports),
        }
    }

    /// The rotation of the key, and the link to the relay, which follows it.
    fn keyed(
        &self,
        caches: &MeshCaches,
        reader: &InputReader,
        (paths, view, status): (Arc<PathPort>, RelayView, watch::Sender<LinkStatus>),
    ) -> (KeyRotation, RelayLink) {
        let (relay_key, key) = watch::channel(self.store.current().private_key);
        let (registered, is_registered) = watch::channel(None);
        let rotation = KeyRotation {
            node: self.node.clone(),
            store: Arc::clone(&self.store),
            peers: Arc::clone(&caches.peers),
            publishes: self.publishes,
            relay: reader.relay(),
            relay_key,
            registered: is_registered,
        };
        let relay = RelayLink {
            instance: rand::random(),
            client: self.client.clone(),
            server: reader.relay(),
            file: self.file.clone(),
            key,
            registered,
            paths,
            view,
            status,
        };
        (rotation, relay)
    }
}

/// Public address of this node from the metadata of EC2.
fn public_ipv4(kernel: &KernelWatch, subsystem: &mut Subsystem) -> watch::Receiver<Option<Ipv4Addr>> {
    let (found, address) = watch::channel(None);
    subsystem.spawn("EC2 metadata", ec2::follow(kernel.subscribe(task::concerns), found));
    address
}

fn port_mapping_wanted(meshes: &Cache<WireKubeMesh>) -> Wanted {
    if !meshes.is_ready() {
        return Wanted::Unknown;
    }
    let settings = selected(meshes).map(|mesh| MeshSettings::parse(&mesh, &mut Vec::new()));
    let settings = settings.filter(|settings| settings.traversal.port_mapping);
    settings.map_or(Wanted::No, |settings| Wanted::Yes { interface: settings.device.interface })
}

/// Interface identifier (modified EUI-64) of the first link-layer address of this host.
fn interface_id() -> fairlead_netlink::Result<Option<InterfaceId>> {
    let mac = HostNetwork::read()?.first_mac(&Ignored::default());
    Ok(mac.map(|mac| InterfaceId::of_mac(mac.0)))
}

//! Work of the elected replica: it grants blocks, maintains AddressPools, releases the blocks of deleted Nodes,
//! counts the peers of the mesh, copies what Nodes say to them, runs its relay, and names fields that have no effect.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fairlead_api::names::LABEL_CONTROL_PLANE;
use fairlead_api::resources::{
    AddressBlock, AddressPool, BlockRequest, Egress, NodeFilters, NodeLocation, Topology, WireKubeMesh,
    WireKubePeer,
};
use fairlead_cluster::caches::{self, Cache, config};
use fairlead_cluster::events::{EventMetrics, EventPublisher};
use fairlead_cluster::lean;
use fairlead_cluster::metrics::{Pool, declare};
use fairlead_cluster::subsystem::{Subsystem, Supervisor};
use fairlead_ipam::orphans::Graces;
use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, NodeCondition, NodeSpec, NodeStatus};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::runtime::events::Reporter;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::deleted_peers::{self, Noted};
use crate::grants::{self, GrantMetrics};
use crate::known_blocks::KnownBlocks;
use crate::network_unavailable::NETWORK_UNAVAILABLE;
use crate::orphans::{self, OrphanMetrics};
use crate::relay::Reconciler;
use crate::stores::Stores;
use crate::used_ranges::{PeerPrefixes, Sources, Used};
use crate::work_queue::{ReconcileMetrics, WorkQueueMetrics};
use crate::{
    discovery, granularity, leadership, mesh, network_policies, network_unavailable, peer_facts, pools,
    stray_peers, used_ranges, without_effect,
};

/// Pauses of the leader before and between parts of its work.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pauses {
    /// Pause before it grants blocks that no node claims.
    pub(crate) hold_off: Duration,
    /// Pauses before it frees the blocks of a deleted Node.
    pub(crate) graces: Graces,
    /// Interval of attempts to free blocks.
    pub(crate) sweep_interval: Duration,
}

/// Starts the leader's work, which ends when the subsystem is stopped.
pub(crate) fn start(
    supervisor: &mut Supervisor,
    client: &Client,
    identity: &str,
    metrics: &LeaderMetrics,
    pauses: Pauses,
) {
    let subsystem = supervisor.subsystem(leadership::NAME);
    let caches = Caches::start(subsystem, client);
    let stores = caches.stores();
    metrics.leads(Some(stores.clone()));
    let reporter = Reporter::from("fairlead-controller");
    let events = EventPublisher::start(subsystem, client.clone(), reporter, metrics.events.clone());
    caches.start_blocks(subsystem, client, stores, &events, metrics, pauses);
    caches.start_services(subsystem, client, identity, &events);
    caches.start_mesh(subsystem, client, events);
}

/// Objects that the leader watches.
struct Caches {
    blocks: Cache<AddressBlock>,
    /// The blocks, as decisions about requests take them.
    known: Arc<Mutex<KnownBlocks>>,
    pools: Cache<AddressPool>,
    requests: Cache<BlockRequest>,
    nodes: Cache<Node>,
    meshes: Cache<WireKubeMesh>,
    peers: Cache<WireKubePeer>,
    /// Deletions of peers.
    noted: Noted,
    egresses: Cache<Egress>,
    services: Cache<ServiceCIDR>,
    /// Peers outside of the cluster.
    external: Cache<PeerPrefixes>,
}

impl Caches {
    fn start(subsystem: &mut Subsystem, client: &Client) -> Self {
        let pools = caches::watch_all(subsystem, "AddressPools", client, config());
        let known = Arc::new(Mutex::new(KnownBlocks::default()));
        let blocks = watcher(Api::all(client.clone()), config()).modify(lean::labelled);
        let follower = Arc::clone(&known);
        let blocks = blocks.inspect(move |event| {
            if let Ok(event) = event {
                grants::lock(&follower).observe(Instant::now(), event);
            }
        });
        let blocks = caches::start(subsystem, "AddressBlocks", blocks);
        let requests = watcher(Api::all(client.clone()), config()).modify(lean::identified);
        let requests = caches::start(subsystem, "BlockRequests", requests);
        let nodes = watcher(Api::all(client.clone()), config()).modify(trim_node);
        let nodes = caches::start(subsystem, "Nodes", nodes);
        let meshes = caches::watch_all(subsystem, "WireKubeMeshes", client, config());
        let peers = watcher(Api::all(client.clone()), config()).modify(lean::any);
        let peers = caches::without_deleted(peers);
        let noted = Noted::default();
        let noting = noted.clone();
        let peers = caches::start_noting(subsystem, "WireKubePeers", peers, move |peer| noting.note(peer));
        let egresses = caches::watch_all(subsystem, "Egresses", client, config());
        let services = caches::watch_all(subsystem, "ServiceCIDRs", client, config());
        let external = PeerPrefixes::watch(subsystem, client);
        Self { blocks, known, pools, requests, nodes, meshes, peers, noted, egresses, services, external }
    }

    fn stores(&self) -> Stores {
        let Self { blocks, nodes, pools, requests, .. } = self;
        Stores {
            blocks: blocks.store.clone(),
            nodes: nodes.store.clone(),
            pools: pools.store.clone(),
            requests: requests.store.clone(),
            known: Arc::clone(&self.known),
            generations: [blocks.subscribe(), nodes.subscribe(), pools.subscribe(), requests.subscribe()],
        }
    }

    /// Starts to grant and release blocks, and to maintain their pools.
    fn start_blocks(
        &self,
        subsystem: &mut Subsystem,
        client: &Client,
        stores: Stores,
        events: &EventPublisher,
        metrics: &LeaderMetrics,
        pauses: Pauses,
    ) {
        let changed = self.requests.subscribe();
        let grants =
            grants::run(client.clone(), stores.clone(), changed, metrics.grants.clone(), pauses.hold_off);
        subsystem.spawn("grants", stores.clone().then(grants));
        let (used, changed) = self.start_ranges(subsystem, client, events);
        let changes = [self.pools.subscribe(), self.blocks.subscribe(), changed];
        let counts = metrics.reconciles.clone();
        let pools = pools::run(client.clone(), stores.clone(), changes, used, events.clone(), counts);
        subsystem.spawn("pools", stores.clone().then(pools));
        let changes = [self.nodes.subscribe(), self.blocks.subscribe()];
        let orphans = orphans::run(client.clone(), stores.clone(), changes, metrics.orphans.clone(), pauses);
        subsystem.spawn("orphans", stores.then(orphans));
    }

    /// Starts to collect the ranges that something else uses than the pools; returns them, and a number that grows when they change.
    fn start_ranges(
        &self,
        subsystem: &mut Subsystem,
        client: &Client,
        events: &EventPublisher,
    ) -> (watch::Receiver<Used>, watch::Receiver<u64>) {
        let (ranges, used) = watch::channel(None);
        let (generation, changed) = watch::channel(0);
        let sources = Sources {
            nodes: self.nodes.clone(),
            pools: self.pools.clone(),
            meshes: self.meshes.clone(),
            services: self.services.clone(),
            egresses: self.egresses.clone(),
            external: self.external.clone(),
        };
        let ranges = used_ranges::run(client.clone(), sources, ranges, generation, events.clone());
        subsystem.spawn("ranges in use", ranges);
        (used, changed)
    }

    /// Starts to name fields that have no effect, to tell Kubernetes where there is a network, and to make the relay and the Secret that the
    /// mesh asks for.
    fn start_services(
        &self,
        subsystem: &mut Subsystem,
        client: &Client,
        identity: &str,
        events: &EventPublisher,
    ) {
        let Self { meshes, egresses, nodes, .. } = self;
        let changes = [meshes.subscribe(), egresses.subscribe()];
        let ignored =
            without_effect::run(client.clone(), meshes.store.clone(), egresses.store.clone(), changes);
        subsystem.spawn("conditions of what has no effect", ignored);
        let relay = Reconciler::new(client.clone(), meshes.store.clone(), identity.to_owned());
        subsystem.spawn("relay", relay.run(meshes.subscribe()));
        let network =
            network_unavailable::run(client.clone(), nodes.store.clone(), nodes.subscribe(), events.clone());
        subsystem.spawn("conditions of Nodes", network);
        subsystem.spawn("NetworkPolicies", network_policies::run(client.clone(), events.clone()));
        let secret = discovery::run(client.clone(), meshes.store.clone(), meshes.subscribe());
        subsystem.spawn("secret for discovery", secret);
    }

    /// Starts to copy to the peers of the mesh what Nodes say, and to report what the peers say to the mesh.
    fn start_mesh(self, subsystem: &mut Subsystem, client: &Client, events: EventPublisher) {
        let Self { nodes, meshes, peers, noted, .. } = self;
        let changes = [nodes.subscribe(), peers.subscribe(), meshes.subscribe()];
        let all_meshes = meshes.store.clone();
        let all_nodes = nodes.store.clone();
        let all_peers = peers.store.clone();
        let granularity = granularity::run(
            client.clone(),
            all_meshes,
            all_nodes.clone(),
            all_peers.clone(),
            changes,
            events.clone(),
        );
        subsystem.spawn("granularity", granularity);
        let changes = [nodes.subscribe(), peers.subscribe(), meshes.subscribe()];
        let sources = peer_facts::Sources {
            nodes: nodes.store.clone(),
            peers: peers.store.clone(),
            meshes: meshes.store.clone(),
            watches: changes,
        };
        subsystem.spawn("facts of Nodes", peer_facts::run(client.clone(), sources, events));
        let changes = [nodes.subscribe(), peers.subscribe()];
        let stray = stray_peers::run(client.clone(), all_nodes, all_peers, changes);
        subsystem.spawn("WireKubePeers of deleted Nodes", stray);
        let changes = [meshes.subscribe(), peers.subscribe()];
        let deleted =
            deleted_peers::run(client.clone(), meshes.store.clone(), peers.store.clone(), noted, changes);
        subsystem.spawn("deleted WireKubePeers", deleted);
        let changes = [meshes.subscribe(), peers.subscribe()];
        subsystem.spawn("mesh", mesh::run(client.clone(), meshes.store, peers.store, changes));
    }
}

/// Node objects are large, and change with every heartbeat.
pub(crate) fn trim_node(node: &mut Node) {
    let labels = node.metadata.labels.take();
    let annotations = node.metadata.annotations.take();
    lean::identified(node);
    node.metadata.labels = labels.map(|mut labels| {
        labels.retain(|name, _| Topology::may_be_location(name) || name == LABEL_CONTROL_PLANE);
        labels
    });
    node.metadata.annotations =
        kept(annotations, &[NodeLocation::ANNOTATIONS, NodeFilters::ANNOTATIONS].concat());
    let networks = node.spec.take().map(|NodeSpec { pod_cidr, pod_cidrs, .. }| NodeSpec {
        pod_cidr,
        pod_cidrs,
        ..NodeSpec::default()
    });
    node.spec = networks;
    let NodeStatus { addresses, mut capacity, conditions, .. } = node.status.take().unwrap_or_default();
    let conditions = conditions.map(|mut conditions| {
        conditions.retain(|condition| ["Ready", NETWORK_UNAVAILABLE].contains(&condition.type_.as_str()));
        let without_times = |NodeCondition { type_, status, reason, .. }| {
            let reason = reason.filter(|_| type_ == NETWORK_UNAVAILABLE);
            NodeCondition { type_, status, reason, ..NodeCondition::default() }
        };
        conditions.into_iter().map(without_times).collect()
    });
    if let Some(capacity) = &mut capacity {
        capacity.retain(|resource, _| resource == "pods");
    }
    node.status = Some(NodeStatus { addresses, capacity, conditions, ..NodeStatus::default() });
}

fn kept(texts: Option<BTreeMap<String, String>>, names: &[&str]) -> Option<BTreeMap<String, String>> {
    let mut texts = texts?;
    texts.retain(|name, _| names.contains(&name.as_str()));
    (!texts.is_empty()).then_some(texts)
}

/// Counts since the start of this replica, and the pools while it leads.
#[derive(Debug, Clone)]
pub(crate) struct LeaderMetrics {
    pub(crate) grants: GrantMetrics,
    pub(crate) orphans: OrphanMetrics,
    reconciles: ReconcileMetrics,
    events: EventMetrics,
    leader: Gauge,
    usage: Arc<PoolUsage>,
}

impl LeaderMetrics {
    /// Declares them in `registry`. The names under `coil_controller`, `workqueue` and
    /// `controller_runtime` are those of Coil's controller and mean the same.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let usage = Arc::new(PoolUsage::default());
        let coil = registry.sub_registry_with_prefix("coil_controller");
        coil.register_collector(Box::new(Arc::clone(&usage)));
        let reconciles = ReconcileMetrics::register(registry);
        let requests = WorkQueueMetrics::register(registry, "blockrequest", reconciles.clone());
        let ours = registry.sub_registry_with_prefix("fairlead_controller");
        Self {
            grants: GrantMetrics::register(ours, requests),
            reconciles,
            orphans: OrphanMetrics::register(ours),
            events: EventMetrics::register(ours),
            leader: declare(ours, "leader", "Whether this replica is the leader"),
            usage,
        }
    }

    /// This replica leads and has these caches, or does not lead any more.
    pub(crate) fn leads(&self, stores: Option<Stores>) {
        self.leader.set(i64::from(stores.is_some()));
        self.grants.queue.clear();
        *self.usage.0.lock().unwrap_or_else(PoisonError::into_inner) = stores;
    }
}

/// Blocks per pool, counted at each scrape.
#[derive(Debug, Default)]
struct PoolUsage(Mutex<Option<Stores>>);

impl Collector for PoolUsage {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let Some(stores) = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone() else {
            return Ok(());
        };
        let max = Family::<Pool, Gauge>::default();
        let allocated = Family::<Pool, Gauge>::default();
        let blocks = stores.blocks.state();
        for pool in stores.pools.state() {
            let label = Pool { pool: pool.name_any() };
            let count = blocks.iter().filter(|block| block.pool() == Some(&label.pool)).count();
            allocated.get_or_create(&label).set(i64::try_from(count).unwrap_or(i64::MAX));
            let capacity = fairlead_ipam::Pool::try_from(pool.as_ref()).map_or(0, |pool| pool.capacity());
            max.get_or_create(&label).set(i64::try_from(capacity).unwrap_or(i64::MAX));
        }
        for (name, help, family) in [
            ("max_blocks", "Blocks that the pool can be divided into; 0 if it is invalid.", max),
            ("allocated_blocks", "Blocks of the pool that nodes own.", allocated),
        ] {
            family.encode(encoder.encode_descriptor(name, help, None, family.metric_type())?)?;
        }
        Ok(())
    }
}

//! The watch caches of the node program.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::names::{LABEL_NODE, LABEL_POOL, LABEL_RESERVED};
use fairlead_api::resources::{AddressBlock, AddressPool, WireKubeMesh, WireKubePeer};
use fairlead_cluster::caches::{self, Cache};
use fairlead_cluster::lean;
use fairlead_cluster::pods::{self as cluster_pods, SlimPod};
use fairlead_cluster::subsystem::{Readiness, Subsystem};
use k8s_openapi::api::core::v1::{Namespace, Node};
use kube::api::PartialObjectMeta;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

use super::settings::Settings;

/// How long the start waits for the API server before it serves what does not need it (DEL, status).
const FIRST_LISTS_TIMEOUT: Duration = Duration::from_secs(5);
/// How often it checks whether all lists have arrived.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Objects of the cluster that this node works with. `/readyz` waits for their first lists.
pub(crate) struct Caches {
    /// Whether addresses are allocated, and so pools and blocks are waited for.
    allocates: bool,
    pub(crate) nodes: Arc<Cache<Node>>,
    pub(crate) namespaces: Arc<Cache<PartialObjectMeta<Namespace>>>,
    pub(crate) pools: Arc<Cache<AddressPool>>,
    pub(crate) blocks: Arc<Cache<AddressBlock>>,
    pub(crate) meshes: Arc<Cache<WireKubeMesh>>,
    pub(crate) peers: Arc<Cache<WireKubePeer>>,
    /// The pods of this node: they explain addresses, no CNI operation reads them, and nothing waits for them.
    pub(crate) pods: Arc<Cache<SlimPod>>,
}

impl Caches {
    /// Starts the watches.
    pub(crate) fn start(subsystem: &mut Subsystem, client: &Client, settings: &Settings) -> Arc<Self> {
        let node = &settings.node;
        let own_node = caches::config().fields(&format!("metadata.name={node}"));
        let own = node.clone();
        let blocks = watcher(Api::all(client.clone()), caches::config());
        let blocks = blocks.modify(move |block| trim_block(block, &own));
        let own_pods = caches::config().fields(&format!("spec.nodeName={node}"));
        let pods = watcher(Api::<SlimPod>::all(client.clone()), own_pods).modify(cluster_pods::trimmed);
        let caches = Arc::new(Self {
            allocates: settings.enable_ipam,
            nodes: start(subsystem, "this Node", client, own_node),
            namespaces: start(subsystem, "Namespaces", client, caches::config()),
            pools: start(subsystem, "AddressPools", client, caches::config()),
            blocks: Arc::new(caches::start(subsystem, "AddressBlocks", blocks)),
            meshes: start(subsystem, "WireKubeMeshes", client, caches::config()),
            peers: start(subsystem, "WireKubePeers", client, caches::config()),
            pods: Arc::new(caches::start(subsystem, "this node's Pods", pods)),
        });
        subsystem.readiness(Arc::<Self>::clone(&caches));
        caches
    }

    /// Waits for the first lists, but not for an API server that is away.
    pub(crate) async fn wait_for_first_lists(&self) {
        let deadline = Instant::now() + FIRST_LISTS_TIMEOUT;
        while !self.missing().is_empty() {
            if Instant::now() >= deadline {
                tracing::warn!(missing = ?self.missing(), "the API server has not answered yet; serving without it");
                return;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Which first lists have not arrived yet.
    fn missing(&self) -> Vec<&'static str> {
        [
            ("Node", self.nodes.is_ready()),
            ("Namespaces", self.namespaces.is_ready()),
            ("AddressPools", self.pools.is_ready() || !self.allocates),
            ("AddressBlocks", self.blocks.is_ready() || !self.allocates),
            ("WireKubeMeshes", self.meshes.is_ready()),
            ("WireKubePeers", self.peers.is_ready()),
        ]
        .into_iter()
        .filter_map(|(what, ready)| (!ready).then_some(what))
        .collect()
    }
}

impl Readiness for Caches {
    fn not_ready(&self) -> Option<String> {
        let missing = self.missing();
        (!missing.is_empty()).then(|| format!("waiting for the API server's {}", missing.join(", ")))
    }
}

/// Of the thousands of blocks of other nodes only prefixes, node and pool are read.
fn trim_block(block: &mut AddressBlock, own_node: &str) {
    lean::labelled(block);
    if block.node() == Some(own_node) {
        return;
    }
    block.metadata.uid = None;
    block.metadata.resource_version = None;
    if let Some(labels) = &mut block.metadata.labels {
        labels.retain(|name, _| [LABEL_NODE, LABEL_POOL, LABEL_RESERVED].contains(&name.as_str()));
    }
}

fn start<K>(
    subsystem: &mut Subsystem,
    what: &'static str,
    client: &Client,
    config: watcher::Config,
) -> Arc<Cache<K>>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let events = watcher(Api::all(client.clone()), config).modify(lean::any);
    Arc::new(caches::start(subsystem, what, events))
}

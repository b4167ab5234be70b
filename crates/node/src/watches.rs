//! What the node program watches.

use std::fmt::Debug;
use std::sync::Arc;

use fairlead_api::names::{LABEL_NODE, LABEL_POOL, LABEL_RESERVED};
use fairlead_api::resources::{AddressBlock, AddressPool, WireKubeMesh, WireKubePeer};
use fairlead_cluster::caches::{self, Cache};
use fairlead_cluster::lean;
use fairlead_cluster::pods::{self as cluster_pods, SlimPod};
use k8s_openapi::api::core::v1::{Namespace, Node};
use kube::api::PartialObjectMeta;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;

use crate::program::Settings;

/// Objects of the cluster that this node works with.
pub(crate) struct Caches {
    /// Whether addresses are given, and so pools and blocks are waited for.
    pub(crate) gives_addresses: bool,
    pub(crate) nodes: Arc<Cache<Node>>,
    pub(crate) namespaces: Arc<Cache<PartialObjectMeta<Namespace>>>,
    pub(crate) pools: Arc<Cache<AddressPool>>,
    pub(crate) blocks: Arc<Cache<AddressBlock>>,
    pub(crate) meshes: Arc<Cache<WireKubeMesh>>,
    pub(crate) peers: Arc<Cache<WireKubePeer>>,
}

impl Caches {
    /// Starts the watches.
    pub(crate) fn spawn(tasks: &mut JoinSet<()>, client: &Client, settings: &Settings) -> Self {
        let node = &settings.node;
        let own_node = caches::config().fields(&format!("metadata.name={node}"));
        let own = node.clone();
        let blocks = watcher(Api::all(client.clone()), caches::config());
        let blocks = blocks.modify(move |block| trim_block(block, &own));
        Self {
            gives_addresses: settings.enable_ipam,
            nodes: Arc::new(spawn(tasks, "this Node", client, own_node)),
            namespaces: Arc::new(spawn(tasks, "Namespaces", client, caches::config())),
            pools: Arc::new(spawn(tasks, "AddressPools", client, caches::config())),
            blocks: Arc::new(caches::spawn(tasks, "AddressBlocks", blocks)),
            meshes: Arc::new(spawn(tasks, "WireKubeMeshes", client, caches::config())),
            peers: Arc::new(spawn(tasks, "WireKubePeers", client, caches::config())),
        }
    }

    /// Which first lists have not come yet.
    pub(crate) fn missing(&self) -> Vec<&'static str> {
        [
            ("Node", self.nodes.is_ready()),
            ("Namespaces", self.namespaces.is_ready()),
            ("AddressPools", self.pools.is_ready() || !self.gives_addresses),
            ("AddressBlocks", self.blocks.is_ready() || !self.gives_addresses),
            ("WireKubeMeshes", self.meshes.is_ready()),
            ("WireKubePeers", self.peers.is_ready()),
        ]
        .into_iter()
        .filter_map(|(what, ready)| (!ready).then_some(what))
        .collect()
    }

    /// The same for people; `None` when all are there.
    pub(crate) fn not_ready(&self) -> Option<String> {
        let missing = self.missing();
        (!missing.is_empty()).then(|| format!("waiting for the API server's {}", missing.join(", ")))
    }
}

/// Of the thousands of blocks of other nodes only the prefixes matter, whose they are and of which pool.
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

fn spawn<K>(tasks: &mut JoinSet<()>, what: &'static str, client: &Client, config: watcher::Config) -> Cache<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    caches::spawn(tasks, what, watcher(Api::all(client.clone()), config).modify(lean::any))
}

/// The pods of this node, which nothing waits for: they explain addresses, and no verb asks for them.
pub(crate) fn own_pods(tasks: &mut JoinSet<()>, client: &Client, node: &str) -> Arc<Cache<SlimPod>> {
    let config = caches::config().fields(&format!("spec.nodeName={node}"));
    let pods = watcher(Api::<SlimPod>::all(client.clone()), config).modify(cluster_pods::trimmed);
    Arc::new(caches::spawn(tasks, "this node's Pods", pods))
}

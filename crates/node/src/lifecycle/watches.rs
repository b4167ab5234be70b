//! The watch caches of the node program.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::names::{PEER_PRESHARED_KEYS_SECRET, SYSTEM_NAMESPACE};
use fairlead_api::resources::{AddressPool, KiloPeer, WireKubeMesh};
use fairlead_cluster::caches::{self, Cache, Refusal};
use fairlead_cluster::pods::{self as cluster_pods, SlimPod};
use fairlead_cluster::subsystem::{Readiness, Subsystem};
use fairlead_members::cached_block::CachedBlock;
use fairlead_members::cached_peer::CachedPeer;
use fairlead_members::external_peers::CachedExternalPeer;
use fairlead_members::kubernetes::Deletions;
use fairlead_members::preshared_keys::PresharedKeys;
use fairlead_pods::ipam::own_blocks::OwnBlocks;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Namespace, Node, Secret};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::api::{ApiResource, DynamicObject, PartialObjectMeta};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};

use super::settings::Settings;

/// Time for which the start waits for the API server before it serves what does not need it (DEL, status).
const FIRST_LISTS_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which it checks whether all lists have arrived.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Objects of the cluster that this node works with. `/readyz` waits for their first lists, but not for those that the API
/// server refuses and pods can do without: see [`Caches::refusals`].
pub(crate) struct Caches {
    /// Whether addresses are allocated, and so pools and blocks are waited for.
    allocates: bool,
    pub(crate) nodes: Arc<Cache<Node>>,
    pub(crate) namespaces: Arc<Cache<PartialObjectMeta<Namespace>>>,
    pub(crate) pools: Arc<Cache<AddressPool>>,
    pub(crate) blocks: Arc<Cache<CachedBlock>>,
    pub(crate) own_blocks: OwnBlocks,
    pub(crate) meshes: Arc<Cache<WireKubeMesh>>,
    pub(crate) peers: Arc<Cache<CachedPeer>>,
    /// Peers whose deletion the watch has shown.
    pub(crate) deleted_peers: Deletions,
    /// Peers outside of the cluster. A cluster may not have the resource.
    pub(crate) external_peers: Arc<Cache<CachedExternalPeer>>,
    /// The Secret with preshared keys that they name, which need not be there.
    pub(crate) preshared_keys: Arc<Cache<PresharedKeys>>,
    /// Ranges of the addresses of Services. Nothing waits for them but the mesh.
    pub(crate) service_ranges: Arc<Cache<ServiceCIDR>>,
    /// The pods of this node: they explain addresses, and ADD reads their annotations. Nothing waits for them.
    pub(crate) pods: Arc<Cache<SlimPod>>,
}

impl Caches {
    /// Starts the watches.
    pub(crate) fn start(subsystem: &mut Subsystem, client: &Client, settings: &Settings) -> Arc<Self> {
        let node = &settings.node;
        let own_node = caches::config().fields(&format!("metadata.name={node}"));
        let own = node.clone();
        let blocks = watcher(Api::all(client.clone()), caches::config());
        let (mut follower, own_blocks) = OwnBlocks::of(node);
        let blocks = blocks.inspect(move |event| {
            if let Ok(event) = event {
                follower.observe(event);
            }
        });
        let blocks = caches::parsed(blocks, move |block| CachedBlock::new(block, &own));
        let own = node.clone();
        let peers = caches::without_deleted(watcher(Api::all(client.clone()), caches::config()));
        let peers = caches::parsed(peers, move |peer| CachedPeer::new(peer, &own));
        let kilo = Api::<DynamicObject>::all_with(client.clone(), &ApiResource::erase::<KiloPeer>(&()));
        let external = watcher(kilo, caches::config());
        let external = caches::parsed(external, |peer| CachedExternalPeer::new(&peer));
        let secrets = Api::<Secret>::namespaced(client.clone(), SYSTEM_NAMESPACE);
        // RBAC lets nodes list and watch the one of this name.
        let named = caches::config().fields(&format!("metadata.name={PEER_PRESHARED_KEYS_SECRET}"));
        let keys = caches::parsed(watcher(secrets, named), |secret| PresharedKeys::new(&secret));
        let own_pods = caches::config().fields(&format!("spec.nodeName={node}"));
        let pods = watcher(Api::<SlimPod>::all(client.clone()), own_pods).modify(cluster_pods::trimmed);
        let deleted_peers = Deletions::default();
        let deleted = deleted_peers.clone();
        let peers = caches::start_noting(subsystem, "WireKubePeers", peers, move |peer| deleted.note(peer));
        let caches = Arc::new(Self {
            allocates: settings.enable_ipam,
            nodes: Arc::new(caches::watch_all(subsystem, "this Node", client, own_node)),
            namespaces: Arc::new(caches::watch_all(subsystem, "Namespaces", client, caches::config())),
            pools: Arc::new(caches::watch_all(subsystem, "AddressPools", client, caches::config())),
            blocks: Arc::new(caches::start(subsystem, "AddressBlocks", blocks)),
            own_blocks,
            meshes: Arc::new(caches::watch_all(subsystem, "WireKubeMeshes", client, caches::config())),
            peers: Arc::new(peers),
            deleted_peers,
            external_peers: Arc::new(caches::start(subsystem, "Peers", external)),
            preshared_keys: Arc::new(caches::start(subsystem, "preshared keys of Peers", keys)),
            service_ranges: Arc::new(caches::watch_all(subsystem, "ServiceCIDRs", client, caches::config())),
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

    /// Longest time for which the API server has refused a list without which there is no mesh, from its first to its latest answer.
    pub(crate) fn mesh_refused_for(&self) -> Duration {
        let refused = [
            self.nodes.refused_for(),
            self.meshes.refused_for(),
            self.peers.refused_for(),
            self.blocks.refused_for(),
        ];
        refused.into_iter().max().unwrap_or_default()
    }

    /// Refusals of the API server and the features that therefore do not work, one sentence each.
    pub(crate) fn refusals(&self) -> Vec<String> {
        let mesh = "this node is not in the mesh";
        let all = [
            (self.nodes.refusal(), mesh),
            (self.namespaces.refusal(), "no pod can start"),
            (self.pools.refusal(), "pools that are disabled are still allocated from"),
            (self.blocks.refusal(), "changes of AddressBlocks are noticed late"),
            (
                self.meshes.refusal(),
                "this node is not in the mesh, and changes nothing of what it masquerades",
            ),
            (self.peers.refusal(), mesh),
            (self.external_peers.refusal(), "this node connects to no Peers"),
            (self.preshared_keys.refusal(), "Peers with spec.presharedKeyRef have no tunnel with this node"),
            (
                self.service_ranges.refusal(),
                "addresses of Services that peers publish as their own are asked by path probes, and Peers may have such addresses",
            ),
            (self.pods.refusal(), "`fairlead ipam` does not know the pods of addresses"),
        ];
        // Without the mesh's resources there is no mesh to miss.
        let missed = |refusal: &Refusal| matches!(refusal, Refusal::Forbidden(_));
        let sentence = |(refusal, effect): (Option<Refusal>, &str)| {
            let refusal = refusal.filter(missed)?;
            Some(format!("{effect}: {refusal}; grant what deploy/rbac/node.yaml grants"))
        };
        all.into_iter().filter_map(sentence).collect()
    }

    /// Names of the first lists that have not arrived yet.
    fn missing(&self) -> Vec<&'static str> {
        [
            ("Node", self.nodes.has_answer()),
            ("Namespaces", self.namespaces.is_ready()),
            ("AddressPools", self.pools.has_answer() || !self.allocates),
            ("AddressBlocks", self.blocks.is_ready() || !self.allocates),
            ("WireKubeMeshes", self.meshes.has_answer()),
            ("WireKubePeers", self.peers.has_answer()),
        ]
        .into_iter()
        .filter_map(|(what, ready)| (!ready).then_some(what))
        .collect()
    }
}

impl Readiness for Caches {
    fn not_ready(&self) -> Option<String> {
        let missing = self.missing();
        if missing.is_empty() {
            return None;
        }
        let mut reason = format!("waiting for the API server's {}", missing.join(", "));
        for refusal in self.refusals() {
            reason.push_str("; ");
            reason.push_str(&refusal);
        }
        Some(reason)
    }
}

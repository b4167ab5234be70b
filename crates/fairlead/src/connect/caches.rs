//! The watch caches of `fairlead connect`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fairlead_api::resources::{AddressBlock, AddressPool, KiloPeer, WireKubeMesh, WireKubePeer};
use fairlead_cli::peer::Cluster;
use fairlead_cluster::caches::{self, Cache, Refusal, config};
use fairlead_cluster::lean;
use fairlead_cluster::subsystem::Subsystem;
use fairlead_members::configuration::Objects;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::api::DynamicObject;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde_json::json;

/// Time-out of the first lists of the API server.
const FIRST_LISTS_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval at which it is checked whether they have arrived.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Watch caches from which the configuration of this machine is made.
pub(super) struct Caches {
    blocks: Cache<AddressBlock>,
    meshes: Cache<WireKubeMesh>,
    own: Cache<KiloPeer>,
    peers: Cache<WireKubePeer>,
    pools: Cache<AddressPool>,
    services: Cache<ServiceCIDR>,
}

impl Caches {
    /// Starts the watches. Of the Peers it is this machine's alone: the others' have preshared keys.
    pub(super) fn start(subsystem: &mut Subsystem, client: &Client, peer: &str) -> Self {
        let own = config().fields(&format!("metadata.name={peer}"));
        let peers = watcher(Api::all(client.clone()), config()).modify(lean::any);
        let peers = caches::start(subsystem, "WireKubePeers", caches::without_deleted(peers));
        Self {
            peers,
            blocks: caches::watch_all(subsystem, "AddressBlocks", client, config()),
            meshes: caches::watch_all(subsystem, "WireKubeMeshes", client, config()),
            own: caches::watch_all(subsystem, "this machine's Peer", client, own),
            pools: caches::watch_all(subsystem, "AddressPools", client, config()),
            services: caches::watch_all(subsystem, "ServiceCIDRs", client, config()),
        }
    }

    /// Waits for the first lists.
    ///
    /// # Errors
    /// The API server refuses one, or does not answer.
    pub(super) async fn wait(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + FIRST_LISTS_TIMEOUT;
        loop {
            let refusals = self.answers().into_iter().filter_map(|(_, _, refusal)| refusal);
            if let Some(refusal) = refusals.into_iter().find(is_final) {
                bail!(
                    "the API server refuses what this command reads ({refusal}): deploy/examples/connect.yaml has the rights"
                );
            }
            let missing = self.answers().into_iter().find(|(_, has_answer, _)| !has_answer);
            let Some((what, ..)) = missing else { break };
            if Instant::now() >= deadline {
                bail!("the API server has not listed {what} in {} s", FIRST_LISTS_TIMEOUT.as_secs());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        for (refusal, what) in [(self.peers.refusal(), "WireKubePeers"), (self.own.refusal(), "Peers")] {
            if let Some(refusal) = refusal {
                return Err(refusal).context(format!("{what} are missing"));
            }
        }
        Ok(())
    }

    /// A number that differs after each change.
    pub(super) fn generation(&self) -> u64 {
        let caches = [
            self.blocks.generation(),
            self.meshes.generation(),
            self.own.generation(),
            self.peers.generation(),
            self.pools.generation(),
            self.services.generation(),
        ];
        caches.iter().sum()
    }

    /// This machine's Peer, as the watch shows it.
    pub(super) fn own(&self) -> Option<Arc<KiloPeer>> {
        self.own.store.state().pop()
    }

    /// Nodes of the mesh, and of the Peers that of this machine.
    ///
    /// # Errors
    /// The Peer cannot be written as JSON.
    pub(super) fn cluster(&self, own: Option<&KiloPeer>) -> anyhow::Result<Cluster> {
        let external = own.map(|own| serde_json::from_value::<DynamicObject>(json!(own))).transpose()?;
        let meshes = self.meshes.store.state();
        let objects = Objects {
            peers: all(&self.peers),
            blocks: all(&self.blocks),
            external: external.into_iter().collect(),
            // Nodes follow the first by name.
            mesh: meshes.iter().min_by_key(|mesh| mesh.name_any()).map(|mesh| (**mesh).clone()),
        };
        Ok(Cluster::of(objects, &self.pools.store.state(), &self.services.store.state()))
    }

    fn answers(&self) -> [(&'static str, bool, Option<Refusal>); 6] {
        [
            ("AddressBlocks", self.blocks.has_answer(), self.blocks.refusal()),
            ("WireKubeMeshes", self.meshes.has_answer(), self.meshes.refusal()),
            ("this machine's Peer", self.own.has_answer(), self.own.refusal()),
            ("WireKubePeers", self.peers.has_answer(), self.peers.refusal()),
            ("AddressPools", self.pools.has_answer(), self.pools.refusal()),
            ("ServiceCIDRs", self.services.has_answer(), self.services.refusal()),
        ]
    }
}

/// A kind that the API server does not have has no objects.
fn is_final(refusal: &Refusal) -> bool {
    matches!(refusal, Refusal::Forbidden(_))
}

fn all<K>(cache: &Cache<K>) -> Vec<K>
where
    K: Resource<DynamicType = ()> + Clone,
{
    cache.store.state().iter().map(|object| (**object).clone()).collect()
}

//! Being elected, and working while elected.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use fairlead_api::names::{LEASE_IPAM, SYSTEM_NAMESPACE};
use fairlead_cluster::caches::{self, Cache};
use fairlead_cluster::{http, lean};
use k8s_openapi::api::core::v1::Node;
use kube::api::PartialObjectMeta;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use kube_lease_manager::LeaseManagerBuilder;
use tokio::task::JoinSet;

use crate::metrics::Metrics;
use crate::{grants, mesh, orphans, pools, webhook};

/// Seconds after which another copy takes over from a leader that has gone silent (Coil's figure).
const LEASE_SECONDS: u64 = 15;
/// Seconds before its end at which the leader renews the lease.
const RENEW_SECONDS: u64 = 10;

/// How long the webhook is still served at the end: API servers hear a moment later that this copy is going.
const LINGER: Duration = Duration::from_secs(3);

/// How the program is to run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name of this copy in the Lease.
    pub identity: String,
    /// Where metrics are served.
    pub metrics: SocketAddr,
    /// Where health is served.
    pub health: SocketAddr,
    /// How often blocks are compared with Nodes besides at every change of a Node.
    pub sweep: Duration,
    /// The admission webhook.
    pub webhook: webhook::Settings,
}

/// Runs the controller until `stop` resolves.
///
/// # Errors
/// The lease cannot be used at all.
pub async fn run(
    settings: Settings,
    config: kube::Config,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let client = Client::try_from(config).context("cannot make a Kubernetes client")?;
    let metrics = Arc::new(Metrics::default());
    let shown = Arc::clone(&metrics);
    let mut servers = JoinSet::new();
    servers.spawn(http::serve("metrics", settings.metrics, http::metrics(move || shown.text())));
    let ready = webhook::spawn(&mut servers, &settings.webhook, &client, &metrics);
    servers.spawn(http::serve("health", settings.health, http::health(ready)));
    let lease = LeaseManagerBuilder::new(client.clone(), LEASE_IPAM)
        .with_namespace(SYSTEM_NAMESPACE)
        .with_identity(&settings.identity)
        .with_duration(LEASE_SECONDS)
        .with_grace(RENEW_SECONDS)
        .build()
        .await
        .with_context(|| format!("cannot use Lease {SYSTEM_NAMESPACE}/{LEASE_IPAM}"))?;
    let (mut elected, election) = lease.watch().await;
    let mut stop = std::pin::pin!(stop);
    // Dropping the tasks stops them at once: a leader that lost its lease writes nothing more.
    let mut work: Option<JoinSet<()>> = None;
    loop {
        let leading = *elected.borrow_and_update();
        match (leading, &work) {
            (true, None) => {
                tracing::info!(identity = settings.identity, "elected");
                work = Some(lead(&client, &metrics, settings.sweep));
            }
            (false, Some(_)) => {
                tracing::warn!(identity = settings.identity, "lost the lease; waiting for the next election");
                work = None;
                metrics.lead(None);
            }
            _ => {}
        }
        tokio::select! {
            changed = elected.changed() => if changed.is_err() { anyhow::bail!("the election stopped") },
            () = &mut stop => break,
        }
    }
    drop(work);
    // Gives the lease back, so that the next copy need not wait for its end.
    drop(elected);
    let _ = tokio::time::timeout(Duration::from_secs(2), election).await;
    tokio::time::sleep(LINGER).await;
    drop(servers);
    Ok(())
}

fn lead(client: &Client, metrics: &Arc<Metrics>, sweep: Duration) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let config = caches::config;
    let pool_cache = caches::spawn(
        &mut tasks,
        "AddressPools",
        watcher(Api::all(client.clone()), config()).modify(lean::any),
    );
    let blocks = watcher(Api::all(client.clone()), config()).modify(lean::labelled);
    let block_cache = caches::spawn(&mut tasks, "AddressBlocks", blocks);
    metrics.lead(Some((pool_cache.store.clone(), block_cache.store.clone())));
    let requests = watcher(Api::all(client.clone()), config()).modify(lean::identified);
    let requests = caches::spawn(&mut tasks, "BlockRequests", requests);
    let nodes: Cache<PartialObjectMeta<Node>> = caches::spawn(
        &mut tasks,
        "Nodes",
        watcher(Api::all(client.clone()), config()).modify(lean::identified),
    );
    let meshes = caches::spawn(
        &mut tasks,
        "WireKubeMeshes",
        watcher(Api::all(client.clone()), config()).modify(lean::any),
    );
    let peers = caches::spawn(
        &mut tasks,
        "WireKubePeers",
        watcher(Api::all(client.clone()), config()).modify(lean::any),
    );
    let (mesh_store, peer_store) = (meshes.store.clone(), peers.store.clone());
    tasks.spawn(mesh::run(client.clone(), mesh_store, peer_store, meshes.subscribe(), peers.subscribe()));
    let (client, metrics) = (client.clone(), Arc::clone(metrics));
    tasks.spawn(async move {
        // Deciding from half a list could give an address twice.
        let first_lists = async {
            pool_cache.store.wait_until_ready().await.ok()?;
            block_cache.store.wait_until_ready().await.ok()?;
            requests.store.wait_until_ready().await.ok()?;
            nodes.store.wait_until_ready().await.ok()
        };
        if first_lists.await.is_none() {
            return;
        }
        let (pool_store, block_store) = (pool_cache.store.clone(), block_cache.store.clone());
        let stores = (pool_store.clone(), block_store.clone());
        let granter =
            Arc::new(grants::Granter::new(client.clone(), stores.0, stores.1, Arc::clone(&metrics)));
        tokio::join!(
            granter.run(requests.store.clone(), requests.subscribe()),
            pools::run(
                client.clone(),
                pool_store,
                block_store.clone(),
                pool_cache.subscribe(),
                block_cache.subscribe()
            ),
            orphans::run(client.clone(), nodes.store.clone(), block_store, nodes.subscribe(), metrics, sweep),
        );
    });
    tasks
}

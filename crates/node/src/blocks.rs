//! This node's blocks: kept in step with the API server, exported to table 119, given back when empty.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::names::COIL_FINALIZER;
use fairlead_api::resources::AddressBlock;
use fairlead_dataplane::routes;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use tokio::time::timeout;

use crate::ipam::Ipam;
use fairlead_cluster::caches::Cache;

/// How long a block must have been empty before it is given back: a pod that is replaced finds it still here.
const GRACE: Duration = Duration::from_secs(300);
/// How often the table and the empty blocks are looked at when nothing changes.
const SWEEP: Duration = Duration::from_secs(30);

/// Keeps blocks, table 119 and the address book in step for ever.
pub async fn run(client: Client, ipam: Arc<Ipam>, blocks: Arc<Cache<AddressBlock>>) {
    let mut changes = blocks.subscribe();
    let mut empty_since = BTreeMap::new();
    loop {
        if blocks.is_ready() {
            ipam.sync_blocks(&blocks.store.state());
            export(&ipam).await;
            give_back(&client, &ipam, &mut empty_since).await;
        }
        let _ = timeout(SWEEP, changes.changed()).await;
    }
}

async fn export(ipam: &Ipam) {
    let prefixes = ipam.prefixes();
    let done = tokio::task::spawn_blocking(move || routes::sync_export(&prefixes)).await;
    match done {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::warn!(%error, "cannot bring table 119 up to date"),
        Err(error) => tracing::warn!(%error, "bringing table 119 up to date stopped half-way"),
    }
}

/// Gives back blocks that nobody has needed for the grace.
async fn give_back(client: &Client, ipam: &Ipam, empty_since: &mut BTreeMap<String, Instant>) {
    let now = Instant::now();
    let releasable = ipam.releasable();
    empty_since.retain(|name, _| releasable.contains(name));
    for name in releasable {
        let since = *empty_since.entry(name.clone()).or_insert(now);
        if now.saturating_duration_since(since) < GRACE || !ipam.close(&name) {
            continue;
        }
        match delete(client, &name).await {
            Ok(()) => tracing::info!(block = name, "gave an empty block back"),
            Err(error) => {
                tracing::warn!(block = name, %error, "cannot give an empty block back; will try again");
                ipam.reopen(&name);
            }
        }
    }
}

/// Deletes the block and takes our finalizer off, in this order: in between nobody can be given it.
async fn delete(client: &Client, name: &str) -> Result<(), kube::Error> {
    let blocks: Api<AddressBlock> = Api::all(client.clone());
    let gone = |error: kube::Error| match error {
        kube::Error::Api(status) if status.code == 404 => Ok(()),
        other => Err(other),
    };
    if let Err(error) = blocks.delete(name, &DeleteParams::default()).await {
        return gone(error);
    }
    let Some(block) = blocks.get_opt(name).await? else { return Ok(()) };
    let others: Vec<&String> =
        block.finalizers().iter().filter(|finalizer| *finalizer != COIL_FINALIZER).collect();
    let patch = serde_json::json!({
        "metadata": { "finalizers": others, "resourceVersion": block.resource_version() }
    });
    match blocks.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => Ok(()),
        Err(error) => gone(error),
    }
}

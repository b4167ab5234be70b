//! This node's blocks: kept in step with the API server, exported to routing daemons, given back when empty.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::names::COIL_FINALIZER;
use fairlead_api::resources::AddressBlock;
use fairlead_dataplane::routes;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::ipam::Ipam;
use crate::metrics::Metrics;
use fairlead_cluster::caches::Cache;

/// How often the table and the empty blocks are looked at when nothing changes.
const SWEEP: Duration = Duration::from_secs(30);

/// How long the API server may take to say whether a block is there.
const LOOK: Duration = Duration::from_secs(5);

/// Keeps blocks, the export table and the address book in step for ever. A block is given back when it has been empty for
/// `grace`: a pod that is replaced finds it still here.
pub async fn run(
    client: Client,
    ipam: Arc<Ipam>,
    blocks: Arc<Cache<AddressBlock>>,
    mut pools: watch::Receiver<u64>,
    metrics: Arc<Metrics>,
    grace: Duration,
) {
    let mut changes = blocks.subscribe();
    let mut empty_since = BTreeMap::new();
    loop {
        if blocks.is_ready() {
            ipam.sync_blocks(&blocks.store.state());
            drop_gone(&client, &ipam).await;
            ipam.sync_pools();
            export(&ipam).await;
            give_back(&client, &ipam, &metrics, (&mut empty_since, grace)).await;
        }
        let changed = async {
            tokio::select! {
                _ = changes.changed() => {}
                _ = pools.changed() => {}
                () = ipam.drained() => {}
            }
        };
        let _ = timeout(SWEEP.min(grace), changed).await;
    }
}

/// Drops granted blocks that were deleted before the watch showed them: it may never show them. Without an answer they
/// stay.
async fn drop_gone(client: &Client, ipam: &Ipam) {
    let blocks: Api<AddressBlock> = Api::all(client.clone());
    for (name, uid) in ipam.unseen() {
        let Ok(Ok(present)) = timeout(LOOK, blocks.get_opt(&name)).await else { continue };
        if present.and_then(|block| block.uid()).as_ref() != Some(&uid) {
            tracing::warn!(block = name, "a granted block was deleted at once");
            ipam.forget(&name);
        }
    }
}

async fn export(ipam: &Ipam) {
    let prefixes = ipam.prefixes();
    let numbers = ipam.numbers();
    let done = tokio::task::spawn_blocking(move || routes::sync_export(numbers, &prefixes)).await;
    match done {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::warn!(%error, "cannot bring the export table up to date"),
        Err(error) => tracing::warn!(%error, "bringing the export table up to date stopped half-way"),
    }
}

/// Gives back blocks that nobody has needed for the grace, and empty ones of withdrawn pools at once.
async fn give_back(
    client: &Client,
    ipam: &Ipam,
    metrics: &Metrics,
    (empty_since, grace): (&mut BTreeMap<String, Instant>, Duration),
) {
    let now = Instant::now();
    let releasable = ipam.releasable();
    empty_since.retain(|name, _| releasable.contains(name));
    for name in releasable {
        let since = *empty_since.entry(name.clone()).or_insert(now);
        if now.saturating_duration_since(since) < grace && !ipam.drains(&name) {
            continue;
        }
        match give_back_one(client, ipam, &name).await {
            Ok(true) => {
                metrics.block_given_back(true);
                tracing::info!(block = name, "gave an empty block back");
            }
            Ok(false) => {}
            Err(error) => {
                metrics.block_given_back(false);
                tracing::warn!(block = name, %error, "cannot give an empty block back; will try again");
            }
        }
    }
}

/// False when there was nothing to do.
///
/// The server is asked before the block is closed, so that an outage takes no block out of use. Once the deletion has
/// been sent, a block without an answer stays closed: another node may have its addresses by now.
async fn give_back_one(client: &Client, ipam: &Ipam, name: &str) -> Result<bool, kube::Error> {
    let blocks: Api<AddressBlock> = Api::all(client.clone());
    let present = blocks.get_opt(name).await?;
    if !ipam.close(name) {
        return Ok(false);
    }
    // Gone, or granted to another: the watch is about to say so, and until then it stays closed.
    let Some(present) = present.filter(|block| block.node() == Some(ipam.node())) else { return Ok(false) };
    let precisely_this = Preconditions { uid: present.uid(), resource_version: present.resource_version() };
    let parameters = DeleteParams { preconditions: Some(precisely_this), ..DeleteParams::default() };
    match blocks.delete(name, &parameters).await {
        Ok(_) => {}
        Err(error) => {
            if certainly_refused(&error) {
                ipam.reopen(name);
            }
            return done_if_gone(error);
        }
    }
    drop_finalizer(&blocks, name, present.uid()).await?;
    ipam.forget(name);
    Ok(true)
}

/// After the deletion, not before: in between nobody can be given the block.
async fn drop_finalizer(
    blocks: &Api<AddressBlock>,
    name: &str,
    uid: Option<String>,
) -> Result<(), kube::Error> {
    let Some(block) = blocks.get_opt(name).await?.filter(|block| block.uid() == uid) else { return Ok(()) };
    let others: Vec<&String> =
        block.finalizers().iter().filter(|finalizer| *finalizer != COIL_FINALIZER).collect();
    let patch = serde_json::json!({
        "metadata": { "finalizers": others, "resourceVersion": block.resource_version() }
    });
    match blocks.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => Ok(()),
        Err(error) => done_if_gone(error).map(drop),
    }
}

fn done_if_gone(error: kube::Error) -> Result<bool, kube::Error> {
    match error {
        kube::Error::Api(status) if status.code == 404 => Ok(true),
        other => Err(other),
    }
}

/// Whether the server said no before it changed anything. Not for a conflict: then the block may be another one; not
/// for 5xx: the change may have been stored.
fn certainly_refused(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 400 | 401 | 403 | 405 | 422 | 429))
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use kube::core::Status;
    use tokio::task::JoinSet;

    use super::*;
    use crate::ipam::tests::{block, client, node};

    /// A server on which a block has no finalizer but ours and whose DELETE is answered with `code`.
    fn server(code: u16) -> Client {
        client(move |call| {
            let object = || serde_json::to_string(&block("a-0", "a", "10.0.0.0/30")).unwrap();
            let status = format!(r#"{{"kind":"Status","apiVersion":"v1","status":"Failure","code":{code}}}"#);
            let answer = match call.split(' ').next() {
                Some("DELETE") if code != 200 => (code, status),
                _ => (200, object()),
            };
            std::future::ready(answer).boxed()
        })
    }

    #[tokio::test]
    async fn a_block_is_used_again_only_after_a_plain_refusal() {
        for (code, known, open) in
            [(200, false, false), (403, true, true), (409, true, false), (504, true, false)]
        {
            let mut tasks = JoinSet::new();
            let client = server(code);
            let (ipam, _requester) = node(client.clone(), &["a"], &mut tasks);
            ipam.add_block(&block("a-0", "a", "10.0.0.0/30"));
            let outcome = give_back_one(&client, &ipam, "a-0").await;
            assert_eq!(outcome.is_ok(), code == 200, "{code}: {outcome:?}");
            let usage = ipam.usage();
            assert_eq!(!usage.is_empty(), known, "{code}");
            assert_eq!(usage.first().is_some_and(|usage| usage.open), open, "{code}");
        }
    }

    #[tokio::test]
    async fn a_granted_block_stays_while_the_watch_is_behind_and_goes_when_it_was_deleted() {
        let other = |block: &mut AddressBlock| block.metadata.uid = Some("another".to_owned());
        for (shown, present, stays) in [(false, true, true), (true, true, true), (false, false, false)] {
            let mut tasks = JoinSet::new();
            let client = client(move |_| {
                let mut there = block("a-0", "a", "10.0.0.0/30");
                if !present {
                    other(&mut there);
                }
                std::future::ready((200, serde_json::to_string(&there).unwrap())).boxed()
            });
            let (ipam, requester) = node(client.clone(), &["a"], &mut tasks);
            let granted = block("a-0", "a", "10.0.0.0/30");
            ipam.add_block(&granted);
            let later = tokio::time::Instant::now() + Duration::from_secs(600);
            let key = fairlead_ipam::Key { container_id: "pod".to_owned(), ifname: "eth0".to_owned() };
            let given = ipam.allocate(&requester, "a", &key, later).await.unwrap();
            // Of the same name, but an older one, as the watch still has it.
            let mut older = block("a-0", "a", "10.9.0.0/30");
            other(&mut older);
            ipam.sync_blocks(&[]);
            ipam.sync_blocks(&[Arc::new(older)]);
            assert_eq!(ipam.usage().first().map(|usage| usage.used), Some(1), "it is in use");
            assert!(
                ipam.prefixes()
                    .iter()
                    .any(|net| given.ipv4.is_some_and(|ip| net.contains(&std::net::IpAddr::from(ip))))
            );
            if shown {
                ipam.sync_blocks(&[Arc::new(granted)]);
                assert_eq!(ipam.unseen(), []);
                ipam.sync_blocks(&[]);
                assert!(ipam.usage().is_empty(), "what the watch has shown goes when it no longer does");
                continue;
            }
            drop_gone(&client, &ipam).await;
            assert_eq!(!ipam.usage().is_empty(), stays);
        }
    }

    #[test]
    fn only_a_plain_no_lets_a_block_be_used_again() {
        let answer = |code| kube::Error::Api(Box::new(Status { code, ..Status::default() }));
        for code in [400, 401, 403, 405, 422, 429] {
            assert!(certainly_refused(&answer(code)), "{code}");
        }
        for code in [404, 409, 500, 503, 504] {
            assert!(!certainly_refused(&answer(code)), "{code}");
        }
        let lost = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        assert!(!certainly_refused(&kube::Error::Service(Box::new(lost))));
    }
}

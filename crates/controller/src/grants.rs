//! Answers BlockRequests with AddressBlocks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_api::resources::{
    AddressBlock, AddressPool, BlockRequest, BlockRequestOutcome, BlockRequestStatus,
};
use fairlead_cluster::writes::is_stale;
use fairlead_ipam::queue::{Attempt, Pending, RequestQueue};
use fairlead_ipam::{ClaimedBlock, ExistingBlock, Grant, PoolState, Refusal, Request, grant};
use fairlead_limits::Backoff;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;

mod metrics;
mod objects;

use self::objects::{conditions, new_block, parse};
use crate::known_blocks::KnownBlocks;
use crate::stores::Stores;

pub(crate) use self::metrics::GrantMetrics;

/// Longest sleep of the loop when nothing happens.
const IDLE: Duration = Duration::from_secs(10);
/// Time limit of one call of the API server: a call that hangs must not keep a slot.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause before a granted request gets a status: its node finds the block by its label and deletes the request, which saves
/// the write.
const STATUS_PAUSE: Duration = Duration::from_millis(250);
/// Longest pause before the status of a granted request is written again.
const MAX_STATUS_PAUSE: Duration = Duration::from_secs(60);
/// Attempts with other numbers when the API server has a block of that name already.
const MAX_ATTEMPTS: usize = 16;

/// Answers pending requests forever. After every list of all blocks, only claims are answered for `hold_off`: if etcd was
/// restored from a backup, blocks in use are missing from the list, and their nodes need a moment to say so.
pub(crate) async fn run(
    client: Client,
    stores: Stores,
    mut changed: watch::Receiver<u64>,
    metrics: GrantMetrics,
    hold_off: Duration,
) {
    let requests = stores.requests.clone();
    let queue_metrics = metrics.queue.clone();
    let granter = Arc::new(Granter { client, stores, metrics });
    let mut queue = RequestQueue::default();
    let mut running = JoinSet::new();
    // At most one of each request.
    let mut unwritten = JoinSet::new();
    loop {
        let now = Instant::now();
        let held_until = granter.known().listed().map_or(now, |listed| listed + hold_off);
        let pending = pending(requests.state());
        let views: Vec<Pending<'_>> = pending.iter().map(|(uid, request)| view(uid, request)).collect();
        queue_metrics.waiting(now, queue.due(now, held_until, &views));
        for uid in queue.start(now, held_until, &views) {
            queue_metrics.started(now, &uid);
            let Some((_, request)) = pending.iter().find(|(of, _)| *of == uid) else { continue };
            let granter = Arc::clone(&granter);
            let request = Arc::clone(request);
            running.spawn(async move {
                let answer = granter.answer(&request).await;
                (request, answer)
            });
        }
        let due = queue.next_due(now).into_iter().chain((held_until > now).then_some(held_until)).min();
        let due = due.map_or(IDLE, |due| due.saturating_duration_since(now).min(IDLE));
        tokio::select! {
            _ = changed.changed() => {}
            Some(first) = running.join_next() => {
                let mut next = Some(first);
                while let Some(ended) = next {
                    if let Some((request, answer)) = unwrap(ended) {
                        let uid = request.uid().unwrap_or_default();
                        let attempt = if answer.is_ok() { Attempt::Answered } else { Attempt::Failed };
                        queue_metrics.ended(Instant::now(), &uid, attempt);
                        queue.end(Instant::now(), &uid, attempt);
                        if let Ok(Some(status)) = answer {
                            let granter = Arc::clone(&granter);
                            unwritten.spawn(async move { granter.write_unless_deleted(&request, &status).await });
                        }
                    }
                    next = running.try_join_next();
                }
            }
            Some(ended) = unwritten.join_next() => drop(unwrap(ended)),
            () = tokio::time::sleep(due) => {}
        }
    }
}

/// Takes the result of a task; `None` if the task was cancelled. A panic of the task goes on here.
fn unwrap<T>(ended: Result<T, JoinError>) -> Option<T> {
    match ended.map_err(JoinError::try_into_panic) {
        Ok(value) => Some(value),
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        Err(Err(_)) => None,
    }
}

fn view<'a>(uid: &'a str, request: &'a BlockRequest) -> Pending<'a> {
    Pending { uid, node: &request.spec.node_name, claims: request.spec.in_use.is_some() }
}

/// Reason why a request could not be answered.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// The API server refused.
    #[error("cannot {operation}: {source}")]
    Api {
        /// Operation that failed, as in "cannot {operation}".
        operation: String,
        /// Error of the API client.
        source: Box<kube::Error>,
    },
    /// The API server did not answer.
    #[error("cannot {operation}: the API server did not answer within {} s", CALL_TIMEOUT.as_secs())]
    TimedOut {
        /// Operation that got no answer, as in "cannot {operation}".
        operation: String,
    },
    /// The watch lacks the pool or the blocks that the API server has.
    #[error("the watch does not show pool {0} or its latest blocks yet")]
    WatchLags(String),
}

async fn call<T>(
    operation: impl Into<String>,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    match timeout(CALL_TIMEOUT, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(Error::Api { operation: operation.into(), source: Box::new(source) }),
        Err(_) => Err(Error::TimedOut { operation: operation.into() }),
    }
}

struct Granter {
    client: Client,
    stores: Stores,
    metrics: GrantMetrics,
}

impl Granter {
    /// Grants a block and returns the status that says so, or writes the status that refuses one.
    async fn answer(&self, request: &BlockRequest) -> Result<Option<BlockRequestStatus>, Error> {
        let answer = self.try_answer(request).await;
        answer.inspect_err(|error| {
            tracing::warn!(request = request.name_any(), %error, "cannot answer; retrying");
        })
    }

    async fn try_answer(&self, request: &BlockRequest) -> Result<Option<BlockRequestStatus>, Error> {
        let outcome = match parse(request) {
            Ok(claim) => self.block_for(request, claim).await?,
            Err(refusal) => Err(refusal),
        };
        let conditions = conditions(&outcome, jiff::Timestamp::now());
        match outcome {
            Ok(block) => {
                self.metrics.granted();
                tracing::info!(request = request.name_any(), block, node = request.spec.node_name, "granted");
                Ok(Some(BlockRequestStatus { conditions, address_block_name: Some(block) }))
            }
            Err(refusal) => {
                self.metrics.refused(refusal.reason());
                tracing::warn!(request = request.name_any(), reason = refusal.reason().as_str(), %refusal, "refused");
                let status = BlockRequestStatus { conditions, address_block_name: None };
                self.write(request, &status).await.map(|()| None)
            }
        }
    }

    /// Writes the status of a granted request, if its node has not deleted it soon.
    async fn write_unless_deleted(&self, request: &BlockRequest, status: &BlockRequestStatus) {
        let mut backoff = Backoff::new(STATUS_PAUSE, MAX_STATUS_PAUSE);
        loop {
            tokio::time::sleep(backoff.next_whole()).await;
            let shown = self.stores.requests.get(&ObjectRef::from_obj(request));
            if shown.is_none_or(|shown| shown.uid() != request.uid()) {
                return;
            }
            match self.write(request, status).await {
                Ok(()) => return,
                Err(error) => tracing::warn!(request = request.name_any(), %error, "will try again"),
            }
        }
    }

    async fn write(&self, request: &BlockRequest, status: &BlockRequestStatus) -> Result<(), Error> {
        let requests: Api<BlockRequest> = Api::all(self.client.clone());
        let name = request.name_any();
        let parameters = PatchParams::default();
        let patch =
            Patch::Merge(serde_json::json!({ "metadata": { "uid": request.uid() }, "status": status }));
        let written = requests.patch_status(&name, &parameters, &patch);
        match call(format!("write the status of BlockRequest {name}"), written).await {
            // The node deleted its request.
            Err(Error::Api { source, .. }) if is_stale(&source) => Ok(()),
            written => written.map(drop),
        }
    }

    /// Name of the request's block: the one it has already, or a new one.
    async fn block_for(
        &self,
        request: &BlockRequest,
        claim: Option<ClaimedBlock>,
    ) -> Result<Result<String, Refusal>, Error> {
        let blocks: Api<AddressBlock> = Api::all(self.client.clone());
        let watch_lags = || Error::WatchLags(request.spec.pool_name.clone());
        let parameters = PostParams::default();
        for _ in 0..MAX_ATTEMPTS {
            let (index, name, nets) = match self.decide(request, claim) {
                Grant::Existing { name } => return Ok(Ok(name)),
                Grant::Refused(Refusal::UnknownPool { pool }) if self.pool_exists(&pool).await? => {
                    return Err(watch_lags());
                }
                Grant::Refused(refusal) => return Ok(Err(refusal)),
                Grant::New { index, name, nets } => (index, name, nets),
            };
            let pool = self.stores.pools.get(&ObjectRef::new(&request.spec.pool_name));
            let block = new_block(request, pool.ok_or_else(watch_lags)?.as_ref(), index, &name, &nets);
            let created = blocks.create(&parameters, &block);
            match call(format!("create AddressBlock {name}"), created).await {
                Ok(_) => return Ok(Ok(name)),
                // Made by hand, or not in the watch yet: it stays assumed, so the next number is tried.
                Err(Error::Api { source, .. }) if matches!(&*source, kube::Error::Api(status) if status.is_already_exists()) =>
                {
                    self.known().assume_of_another(&name);
                }
                Err(error) => {
                    self.known().forget(&name);
                    return Err(error);
                }
            }
        }
        Err(watch_lags())
    }

    /// Whether the API server has a pool that the watch does not show yet. The name was checked: it goes into a URL.
    async fn pool_exists(&self, pool: &str) -> Result<bool, Error> {
        let pools: Api<AddressPool> = Api::all(self.client.clone());
        Ok(call(format!("read AddressPool {pool}"), pools.get_metadata_opt(pool)).await?.is_some())
    }

    /// Decides and assumes a new block under one lock, so that two requests never get the same block.
    fn decide(&self, request: &BlockRequest, claim: Option<ClaimedBlock>) -> Grant {
        let mut known = self.known();
        let now = Instant::now();
        let uid = request.uid().unwrap_or_default();
        let pool = request.spec.pool_name.as_str();
        let node = request.spec.node_name.as_str();
        let pod_capacity = self.stores.nodes.get(&ObjectRef::new(node)).and_then(|node| pod_capacity(&node));
        let question = Request { uid: &uid, pool, node, pod_capacity, claim };
        let answer = grant(&question, &pool_states(&self.stores.pools.state()), known.current(now));
        if let Grant::New { index, name, nets } = &answer {
            let block = ExistingBlock {
                name: name.clone(),
                pool: pool.to_owned(),
                node: node.to_owned(),
                index: *index,
                nets: *nets,
                request: Some(uid),
                terminating: false,
            };
            known.assume(now, block);
        }
        answer
    }

    fn known(&self) -> MutexGuard<'_, KnownBlocks> {
        lock(&self.stores.known)
    }
}

/// The blocks, locked for a moment.
pub(crate) fn lock(known: &Mutex<KnownBlocks>) -> MutexGuard<'_, KnownBlocks> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Number of pods that a Node can run, from `status.capacity.pods`; `None` if that is missing or malformed.
pub(crate) fn pod_capacity(node: &Node) -> Option<u32> {
    let quantity = &node.status.as_ref()?.capacity.as_ref()?.get("pods")?.0;
    let digits = quantity.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    // The API server writes 1000 as "1k" (`resource.Quantity`).
    let unit = match quantity.strip_prefix(digits)? {
        "" => 1,
        "k" => 1000,
        "Ki" => 1024,
        _ => return None,
    };
    digits.parse::<u32>().ok()?.checked_mul(unit)
}

/// Unanswered requests with their UIDs, the oldest first, so that none starves.
fn pending(requests: Vec<Arc<BlockRequest>>) -> Vec<(String, Arc<BlockRequest>)> {
    let is_pending = |request: &Arc<BlockRequest>| {
        request.outcome() == BlockRequestOutcome::Pending && request.metadata.deletion_timestamp.is_none()
    };
    let mut pending: Vec<Arc<BlockRequest>> = requests.into_iter().filter(is_pending).collect();
    pending.sort_by_cached_key(|request| {
        (request.metadata.creation_timestamp.as_ref().map(|time| time.0), request.name_any())
    });
    pending.into_iter().map(|request| (request.uid().unwrap_or_default(), request)).collect()
}

/// The pools by name, as the decisions take them.
pub(crate) fn pool_states(pools: &[Arc<AddressPool>]) -> BTreeMap<String, PoolState> {
    pools.iter().map(|pool| (pool.name_any(), pool.as_ref().into())).collect()
}

#[cfg(test)]
mod tests;

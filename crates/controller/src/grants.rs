//! Answers BlockRequests with AddressBlocks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_api::names::{COIL_FINALIZER, LABEL_NODE, LABEL_POOL, LABEL_REQUEST};
use fairlead_api::resources::{
    AddressBlock, AddressBlockFields, AddressPool, BlockRequest, BlockRequestCondition,
    BlockRequestConditionType, BlockRequestOutcome, BlockRequestStatus, ConditionStatus, InvalidName,
};
use fairlead_cluster::metrics::register;
use fairlead_cluster::writes::is_stale;
use fairlead_ipam::grant::REASON_ALLOCATED;
use fairlead_ipam::queue::{Attempt, Pending, RequestQueue};
use fairlead_ipam::{
    ClaimedBlock, DualStackNets, ExistingBlock, Grant, PoolState, Refusal, RefusalReason, Request, grant,
};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client, Resource, ResourceExt};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::known_blocks::KnownBlocks;
use crate::stores::Stores;
use crate::work_queue::WorkQueueMetrics;

/// How long the loop sleeps when nothing happens.
const IDLE: Duration = Duration::from_secs(10);
/// How long one call of the API server may take: a call that hangs must not keep a slot.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
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
    let (requests, queue_metrics) = (stores.requests.clone(), metrics.queue.clone());
    let granter = Arc::new(Granter { client, stores, metrics });
    let (mut queue, mut running) = (RequestQueue::default(), JoinSet::new());
    loop {
        let now = Instant::now();
        let held_until = granter.known().listed().map_or(now, |listed| listed + hold_off);
        let pending = pending(requests.state());
        let views: Vec<Pending<'_>> = pending.iter().map(|(uid, request)| view(uid, request)).collect();
        queue_metrics.waiting(now, queue.due(now, held_until, &views));
        for uid in queue.start(now, held_until, &views) {
            queue_metrics.started(now, &uid);
            let Some((_, request)) = pending.iter().find(|(of, _)| *of == uid) else { continue };
            let (granter, request) = (Arc::clone(&granter), Arc::clone(request));
            running.spawn(async move { (uid, granter.answer(&request).await) });
        }
        let due = queue.next_due(now).into_iter().chain((held_until > now).then_some(held_until)).min();
        let due = due.map_or(IDLE, |due| due.saturating_duration_since(now).min(IDLE));
        tokio::select! {
            _ = changed.changed() => {}
            Some(ended) = running.join_next() => match ended {
                Ok((uid, attempt)) => {
                    queue_metrics.ended(Instant::now(), &uid, attempt);
                    queue.end(Instant::now(), &uid, attempt);
                }
                Err(error) => if let Ok(panic) = error.try_into_panic() {
                    std::panic::resume_unwind(panic);
                }
            },
            () = tokio::time::sleep(due) => {}
        }
    }
}

fn view<'a>(uid: &'a str, request: &'a BlockRequest) -> Pending<'a> {
    Pending { uid, node: &request.spec.node_name, claims: request.spec.in_use.is_some() }
}

/// Counts answers.
#[derive(Debug, Clone)]
pub(crate) struct GrantMetrics {
    grants: Counter,
    refusals: Family<ReasonLabel, Counter>,
    pub(crate) queue: WorkQueueMetrics,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

impl GrantMetrics {
    /// Declares them in `registry`.
    pub(crate) fn register(registry: &mut Registry, queue: WorkQueueMetrics) -> Self {
        let (grants, refusals) = ("BlockRequests answered with a block", "BlockRequests refused, by reason");
        Self {
            grants: register(registry, "block_grants", grants, Counter::default()),
            refusals: register(registry, "block_refusals", refusals, Family::default()),
            queue,
        }
    }

    /// A request was answered with a block.
    pub(crate) fn granted(&self) {
        self.grants.inc();
    }

    /// A request was refused.
    pub(crate) fn refused(&self, reason: RefusalReason) {
        self.refusals.get_or_create(&ReasonLabel { reason: reason.as_str() }).inc();
    }
}

/// Why a request could not be answered.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// The API server refused.
    #[error("cannot {operation}: {source}")]
    Api {
        /// What was tried.
        operation: String,
        /// Its answer.
        source: Box<kube::Error>,
    },
    /// The API server did not answer.
    #[error("cannot {operation}: the API server did not answer within {} s", CALL_TIMEOUT.as_secs())]
    TimedOut {
        /// What was tried.
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
    async fn answer(&self, request: &BlockRequest) -> Attempt {
        match self.try_answer(request).await {
            Ok(()) => Attempt::Answered,
            Err(error) => {
                tracing::warn!(request = request.name_any(), %error, "cannot answer; retrying");
                Attempt::Failed
            }
        }
    }

    async fn try_answer(&self, request: &BlockRequest) -> Result<(), Error> {
        let outcome = match parse(request) {
            Ok(claim) => self.block_for(request, claim).await?,
            Err(refusal) => Err(refusal),
        };
        match &outcome {
            Ok(block) => {
                self.metrics.granted();
                tracing::info!(request = request.name_any(), block, node = request.spec.node_name, "granted");
            }
            Err(refusal) => {
                self.metrics.refused(refusal.reason());
                tracing::warn!(request = request.name_any(), reason = refusal.reason().as_str(), %refusal, "refused");
            }
        }
        let status = BlockRequestStatus {
            conditions: conditions(&outcome, jiff::Timestamp::now()),
            address_block_name: outcome.ok(),
        };
        let requests: Api<BlockRequest> = Api::all(self.client.clone());
        let (name, parameters) = (request.name_any(), PatchParams::default());
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
        let (mut known, now) = (self.known(), Instant::now());
        let uid = request.uid().unwrap_or_default();
        let (pool, node) = (request.spec.pool_name.as_str(), request.spec.node_name.as_str());
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

/// The claim of a request, whose fields an older schema may have let in.
fn parse(request: &BlockRequest) -> Result<Option<ClaimedBlock>, Refusal> {
    request.check_names().map_err(|InvalidName { field, text }| Refusal::InvalidRequest { field, text })?;
    let claim = |fields: &AddressBlockFields| {
        let nets = fields
            .parse()
            .map_err(|error| Refusal::InvalidRequest { field: "inUse", text: error.to_string() })?;
        Ok(ClaimedBlock { index: fields.index, nets })
    };
    request.spec.in_use.as_ref().map(claim).transpose()
}

/// How many pods a Node can run, if it says so.
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

fn new_block(
    request: &BlockRequest,
    pool: &AddressPool,
    index: u32,
    name: &str,
    nets: &DualStackNets,
) -> AddressBlock {
    let labels = [
        (LABEL_POOL, request.spec.pool_name.clone()),
        (LABEL_NODE, request.spec.node_name.clone()),
        (LABEL_REQUEST, request.uid().unwrap_or_default()),
    ];
    let owner = pool
        .controller_owner_ref(&())
        .map(|owner| OwnerReference { block_owner_deletion: Some(true), ..owner });
    let fields = AddressBlockFields {
        index,
        ipv4: nets.ipv4.map(|net| net.to_string()),
        ipv6: nets.ipv6.map(|net| net.to_string()),
    };
    let mut block = AddressBlock::new(name, fields);
    block.metadata = ObjectMeta {
        name: Some(name.to_owned()),
        labels: Some(labels.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()),
        finalizers: Some(vec![COIL_FINALIZER.to_owned()]),
        owner_references: owner.map(|owner| vec![owner]),
        ..ObjectMeta::default()
    };
    block
}

/// `Complete` for every answer, and `Failed` for a refusal, as Coil writes them.
fn conditions(outcome: &Result<String, Refusal>, now: jiff::Timestamp) -> Vec<BlockRequestCondition> {
    let (reason, message) = match outcome {
        Ok(block) => (REASON_ALLOCATED, format!("allocated a block {block}")),
        Err(refusal) => (refusal.reason().as_condition(), refusal.to_string()),
    };
    let condition = |type_| BlockRequestCondition {
        type_,
        status: ConditionStatus::True,
        last_probe_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
        reason: reason.to_owned(),
        message: message.clone(),
    };
    let failed = outcome.is_err().then(|| condition(BlockRequestConditionType::Failed));
    [condition(BlockRequestConditionType::Complete)].into_iter().chain(failed).collect()
}

#[cfg(test)]
mod tests {
    use fairlead_ipam::BlockIndex;

    use super::*;

    fn pool(name: &str, ipv4: &str) -> Arc<AddressPool> {
        Arc::new(
            serde_json::from_value(serde_json::json!({
                "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": name, "uid": "p" },
                "spec": { "blockSizeBits": 2, "subnets": [{ "ipv4": ipv4 }] },
            }))
            .unwrap(),
        )
    }

    #[test]
    fn a_refusal_is_complete_and_failed_with_the_reason_of_coil() {
        let refused =
            conditions(&Err(Refusal::OutOfBlocks { pool: "p".into() }), jiff::Timestamp::UNIX_EPOCH);
        assert_eq!(refused.len(), 2);
        assert!(
            refused
                .iter()
                .all(|c| c.reason == "out of blocks" && c.message == "pool p does not have free blocks")
        );
    }

    #[test]
    fn names_that_would_change_the_url_are_refused_for_good() {
        for (pool, node, field) in [
            ("default?", "n1", "poolName"),
            ("default/status", "n1", "poolName"),
            ("p1", "../n1", "nodeName"),
        ] {
            let spec = serde_json::json!({ "spec": { "nodeName": node, "poolName": pool } });
            let refusal = parse(&request("r", 0, spec)).unwrap_err();
            assert!(refusal.to_string().contains(field), "{refusal}");
            assert_eq!(refusal.reason(), RefusalReason::InvalidRequest);
        }
        let claim = |ipv4: &str| {
            let in_use = serde_json::json!({ "index": 3, "ipv4": ipv4 });
            let spec = serde_json::json!({ "nodeName": "n1", "poolName": "p1", "inUse": in_use });
            parse(&request("r", 0, serde_json::json!({ "spec": spec })))
        };
        assert_eq!(claim("10.0.0.12/30").unwrap().map(|claim| claim.index), Some(3));
        assert_eq!(claim("10.0.0.12").unwrap_err().reason(), RefusalReason::InvalidRequest);
        assert_eq!(parse(&request("r", 0, serde_json::Value::Null)).unwrap(), None);
    }

    #[test]
    fn the_pod_capacity_of_a_node_is_a_number_or_unknown() {
        let capacity = |pods: &str| {
            let node = serde_json::json!({ "metadata": {}, "status": { "capacity": { "pods": pods } } });
            pod_capacity(&serde_json::from_value(node).unwrap())
        };
        assert_eq!((capacity("250"), capacity("many"), capacity("-1")), (Some(250), None, None));
        // As the API server writes them.
        assert_eq!((capacity("1k"), capacity("2Ki")), (Some(1000), Some(2048)));
        assert_eq!(pod_capacity(&Node::default()), None);
    }

    fn request(name: &str, second: u8, more: serde_json::Value) -> Arc<BlockRequest> {
        let mut request = serde_json::json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "BlockRequest",
            "metadata": { "name": name, "uid": name, "creationTimestamp": format!("2026-01-01T00:00:0{second}Z") },
            "spec": { "nodeName": "n1", "poolName": "p1" },
        });
        if let (Some(request), serde_json::Value::Object(more)) = (request.as_object_mut(), more) {
            request.extend(more);
        }
        Arc::new(serde_json::from_value(request).unwrap())
    }

    #[test]
    fn the_oldest_pending_request_is_answered_first() {
        let done = serde_json::json!({ "status": { "conditions": [{
            "type": "Complete", "status": "True", "reason": "allocated", "message": "",
            "lastProbeTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z",
        }], "addressBlockName": "p1-0" } });
        let none = serde_json::Value::Null;
        let requests = vec![
            request("late", 3, none.clone()),
            request("answered", 0, done),
            request("early", 1, none.clone()),
            request("also", 3, none),
        ];
        let order: Vec<String> = pending(requests).into_iter().map(|(uid, _)| uid).collect();
        assert_eq!(order, ["early", "also", "late"]);
    }

    #[test]
    fn a_new_block_has_the_fields_of_coil() {
        let request: BlockRequest = serde_json::from_value(serde_json::json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "BlockRequest", "metadata": { "name": "r", "uid": "u" },
            "spec": { "nodeName": "n1", "poolName": "p1" },
        }))
        .unwrap();
        let pool = pool("p1", "10.0.0.0/24");
        let states = pool_states(std::slice::from_ref(&pool));
        let question = Request { uid: "u", pool: "p1", node: "n1", pod_capacity: None, claim: None };
        let Grant::New { index, name, nets } = grant(&question, &states, &BlockIndex::default()) else {
            panic!("no block")
        };
        let json = serde_json::to_value(new_block(&request, &pool, index, &name, &nets)).unwrap();
        assert_eq!(json["metadata"]["name"], "p1-0");
        assert_eq!(json["index"], 0);
        assert_eq!(json["ipv4"], "10.0.0.0/30");
        assert_eq!(json["metadata"]["labels"][LABEL_REQUEST], "u");
        assert_eq!(json["metadata"]["finalizers"][0], COIL_FINALIZER);
        let owner = serde_json::json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "name": "p1", "uid": "p",
            "controller": true, "blockOwnerDeletion": true,
        });
        assert_eq!(json["metadata"]["ownerReferences"], serde_json::json!([owner]));
    }

    #[test]
    fn an_invalid_pool_is_refused_with_its_error() {
        let states = pool_states(&[pool("p1", "10.0.0.0/31")]);
        let question = Request { uid: "u", pool: "p1", node: "n1", pod_capacity: None, claim: None };
        let Grant::Refused(refusal) = grant(&question, &states, &BlockIndex::default()) else {
            panic!("granted")
        };
        assert!(refusal.to_string().contains("10.0.0.0/31"), "{refusal}");
    }
}

//! Answers BlockRequests with AddressBlocks.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_api::names::{COIL_FINALIZER, LABEL_NODE, LABEL_POOL, LABEL_REQUEST};
use fairlead_api::resources::{
    AddressBlock, AddressBlockFields, AddressPool, BlockRequest, BlockRequestCondition,
    BlockRequestConditionType, BlockRequestOutcome, BlockRequestStatus, ConditionStatus,
};
use fairlead_cluster::metrics::register;
use fairlead_cluster::writes::is_stale;
use fairlead_ipam::grant::REASON_ALLOCATED;
use fairlead_ipam::{
    AssumedBlocks, BlockNets, ExistingBlock, Grant, PoolState, Refusal, RefusalReason, Request, grant,
};
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

use crate::stores::Stores;

/// Requests answered at once.
const MAX_CONCURRENT: usize = 16;
/// Pause before a request is retried whose answer could not be written.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How long a block is assumed to exist although the watch does not show it. The watch shows it within a second; one that
/// was deleted in between must not be assumed forever, and the API server refuses a name that is taken after all.
const ASSUMED_LIFETIME: Duration = Duration::from_secs(60);
/// Pause while the watch lacks a pool that the API server has.
const WATCH_LAG: Duration = Duration::from_millis(100);
/// Attempts with other numbers when the API server has a block of that name already.
const MAX_ATTEMPTS: usize = 16;

/// Answers pending requests forever.
pub(crate) async fn run(
    client: Client,
    stores: Stores,
    mut changed: watch::Receiver<u64>,
    metrics: GrantMetrics,
) {
    let requests = stores.requests.clone();
    let granter = Arc::new(Granter { client, stores, known: Mutex::default(), metrics });
    let (mut running, mut busy) = (JoinSet::new(), BTreeMap::<String, Instant>::new());
    loop {
        let now = Instant::now();
        busy.retain(|_, until| *until > now);
        for (uid, request) in pending(requests.state()) {
            if running.len() < MAX_CONCURRENT && !busy.contains_key(&uid) {
                busy.insert(uid, now + RETRY_INTERVAL);
                let granter = Arc::clone(&granter);
                running.spawn(async move {
                    if let Err(error) = granter.answer(&request).await {
                        tracing::warn!(request = request.name_any(), %error, "cannot answer; retrying");
                    }
                });
            }
        }
        tokio::select! {
            _ = changed.changed() => {}
            Some(_) = running.join_next() => {}
            () = tokio::time::sleep(RETRY_INTERVAL) => {}
        }
    }
}

/// Counts answers.
#[derive(Debug, Clone)]
pub(crate) struct GrantMetrics {
    grants: Counter,
    refusals: Family<ReasonLabel, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

impl GrantMetrics {
    /// Declares them in `registry`.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let refusals = "BlockRequests refused, by reason";
        Self {
            grants: register(
                registry,
                "block_grants",
                "BlockRequests answered with a block",
                Counter::default(),
            ),
            refusals: register(registry, "block_refusals", refusals, Family::default()),
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
    /// The watch lacks the pool or the blocks that the API server has.
    #[error(
        "{MAX_ATTEMPTS} blocks in a row exist already in pool {0}, or the pool is unknown; the watch lags behind"
    )]
    WatchLags(String),
}

fn api(operation: impl Into<String>) -> impl FnOnce(kube::Error) -> Error {
    move |source| Error::Api { operation: operation.into(), source: Box::new(source) }
}

struct Granter {
    client: Client,
    stores: Stores,
    known: Mutex<KnownBlocks>,
    metrics: GrantMetrics,
}

impl Granter {
    async fn answer(&self, request: &BlockRequest) -> Result<(), Error> {
        let outcome = self.block_for(request).await?;
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
        let patch = serde_json::json!({ "metadata": { "uid": request.uid() }, "status": status });
        match requests.patch_status(&request.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await
        {
            Ok(_) => Ok(()),
            // The node deleted its request, or made another, which is answered by itself.
            Err(error) if is_stale(&error) => Ok(()),
            Err(error) => Err(api(format!("write the status of BlockRequest {}", request.name_any()))(error)),
        }
    }

    /// Name of the request's block: the one it has already, or a new one.
    async fn block_for(&self, request: &BlockRequest) -> Result<Result<String, Refusal>, Error> {
        let blocks: Api<AddressBlock> = Api::all(self.client.clone());
        for _ in 0..MAX_ATTEMPTS {
            let (index, name, nets) = match self.decide(request) {
                Grant::Existing { name } => return Ok(Ok(name)),
                Grant::Refused(Refusal::UnknownPool { pool }) if self.pool_exists(&pool).await? => {
                    tokio::time::sleep(WATCH_LAG).await;
                    continue;
                }
                Grant::Refused(refusal) => return Ok(Err(refusal)),
                Grant::New { index, name, nets } => (index, name, nets),
            };
            let Some(pool) = self.stores.pools.get(&ObjectRef::new(&request.spec.pool_name)) else {
                continue;
            };
            match blocks.create(&PostParams::default(), &new_block(request, &pool, index, &name, &nets)).await
            {
                Ok(_) => return Ok(Ok(name)),
                // Made by hand, or not in the watch yet: it stays assumed, so the next number is tried.
                Err(kube::Error::Api(status)) if status.is_already_exists() => {
                    self.known().assume_of_another(&name);
                }
                Err(error) => {
                    self.known().assumed.forget(&name);
                    return Err(api(format!("create AddressBlock {name}"))(error));
                }
            }
        }
        Err(Error::WatchLags(request.spec.pool_name.clone()))
    }

    /// Whether the API server has a pool that the watch does not show yet.
    async fn pool_exists(&self, pool: &str) -> Result<bool, Error> {
        let pools: Api<AddressPool> = Api::all(self.client.clone());
        Ok(pools.get_opt(pool).await.map_err(api(format!("read AddressPool {pool}")))?.is_some())
    }

    /// Decides and assumes a new block under one lock, so that two requests never get the same block.
    fn decide(&self, request: &BlockRequest) -> Grant {
        let (mut known, now) = (self.known(), Instant::now());
        known.observe(self.stores.blocks.state(), now);
        let uid = request.uid().unwrap_or_default();
        let question = Request { uid: &uid, pool: &request.spec.pool_name, node: &request.spec.node_name };
        let answer = grant(&question, &pool_states(&self.stores.pools.state()), &known.blocks());
        if let Grant::New { index, name, nets } = &answer {
            let block = ExistingBlock {
                name: name.clone(),
                pool: request.spec.pool_name.clone(),
                index: *index,
                nets: *nets,
                request: Some(uid),
                terminating: false,
            };
            known.assumed.assume(now, name, None, block);
        }
        answer
    }

    fn known(&self) -> MutexGuard<'_, KnownBlocks> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All blocks that the API server has.
#[derive(Default)]
struct KnownBlocks {
    /// Those that the watch shows, by name, each parsed once.
    observed: HashMap<String, (Arc<AddressBlock>, ExistingBlock)>,
    /// Those just created.
    assumed: AssumedBlocks<ExistingBlock>,
}

impl KnownBlocks {
    fn observe(&mut self, shown: Vec<Arc<AddressBlock>>, now: Instant) {
        let mut before = std::mem::take(&mut self.observed);
        let entry = |object: Arc<AddressBlock>| {
            let parsed = before.remove(object.name_any().as_str());
            let parsed = parsed.filter(|(parsed, _)| Arc::ptr_eq(parsed, &object));
            let block = parsed.map_or_else(|| object.as_ref().into(), |(_, block)| block);
            (block.name.clone(), (object, block))
        };
        self.observed = shown.into_iter().map(entry).collect();
        self.assumed.observe(
            self.observed.iter().map(|(name, (object, _))| {
                (name.as_str(), object.metadata.uid.as_deref().unwrap_or_default())
            }),
        );
        self.assumed.expire(now, ASSUMED_LIFETIME);
    }

    /// A block of this name exists, but was not created for the request at hand.
    fn assume_of_another(&mut self, name: &str) {
        if let Some(assumed) = self.assumed.get_mut(name) {
            assumed.block.request = None;
        }
    }

    fn blocks(&self) -> Vec<&ExistingBlock> {
        let observed = self.observed.values().map(|(_, block)| block);
        observed.chain(self.assumed.iter().map(|(_, assumed)| &assumed.block)).collect()
    }
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
    nets: &BlockNets,
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
    use super::*;

    const NONE: [ExistingBlock; 0] = [];

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
    fn a_block_is_known_from_its_grant_and_then_as_the_watch_shows_it() {
        let block = |pool: &str| -> Arc<AddressBlock> {
            Arc::new(
                serde_json::from_value(serde_json::json!({
                    "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "index": 0, "ipv4": "10.0.0.0/30",
                    "metadata": { "name": "p1-0", "labels": { LABEL_POOL: pool } },
                }))
                .unwrap(),
            )
        };
        let (mut known, now) = (KnownBlocks::default(), Instant::now());
        known.assumed.assume(now, "p1-0", None, block("assumed").as_ref().into());
        let pools =
            |known: &KnownBlocks| known.blocks().iter().map(|block| block.pool.clone()).collect::<Vec<_>>();
        known.observe(Vec::new(), now);
        assert_eq!(pools(&known), ["assumed"]);
        known.observe(vec![block("p1")], now);
        assert_eq!(pools(&known), ["p1"]);
        known.observe(vec![block("changed")], now);
        assert_eq!(pools(&known), ["changed"]);
        known.observe(Vec::new(), now);
        assert!(known.blocks().is_empty());
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
        let question = Request { uid: "u", pool: "p1", node: "n1" };
        let Grant::New { index, name, nets } = grant(&question, &states, &NONE) else { panic!("no block") };
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
        let question = Request { uid: "u", pool: "p1", node: "n1" };
        let Grant::Refused(refusal) = grant(&question, &states, &NONE) else { panic!("granted") };
        assert!(refusal.to_string().contains("10.0.0.0/31"), "{refusal}");
    }
}

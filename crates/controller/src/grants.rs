//! BlockRequests to AddressBlocks.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_api::names::{COIL_FINALIZER, LABEL_NODE, LABEL_POOL, LABEL_REQUEST};
use fairlead_api::resources::{
    AddressBlock, AddressBlockFields, AddressPool, BlockRequest, BlockRequestCondition,
    BlockRequestConditionType, BlockRequestOutcome, BlockRequestStatus, ConditionStatus,
};
use fairlead_ipam::grant::REASON_ALLOCATED;
use fairlead_ipam::{BlockNets, ExistingBlock, Grant, PoolState, Refusal, Request, grant};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::metrics::Metrics;

/// Requests that are worked on at once.
const AT_ONCE: usize = 16;
/// Pause before a request whose answer could not be written is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// How long a block just made counts although the watch has not shown it. It shows within a second; one that was made
/// and deleted in between must not be remembered for ever, and a name taken after all is refused by the API server.
const FRESH: Duration = Duration::from_secs(60);
/// How long to wait for the watch to bring what the API server has already.
const WATCH_LAG: Duration = Duration::from_millis(100);
/// How often another number is tried when the API server has the name already.
const NAME_TRIES: usize = 16;

/// What granting works with.
pub(crate) struct Granter {
    client: Client,
    pools: Store<AddressPool>,
    blocks: Store<AddressBlock>,
    book: Mutex<Book>,
    metrics: Arc<Metrics>,
}

/// All blocks.
#[derive(Default)]
struct Book {
    /// Those that the watch shows, by name, each read once.
    shown: HashMap<String, (Arc<AddressBlock>, ExistingBlock)>,
    /// Those just made.
    fresh: HashMap<String, (Instant, ExistingBlock)>,
}

impl Book {
    fn sync(&mut self, shown: Vec<Arc<AddressBlock>>, now: Instant) {
        let mut before = std::mem::take(&mut self.shown);
        let entry = |object: Arc<AddressBlock>| {
            let known = before.remove(object.name_any().as_str());
            let known = known.filter(|(known, _)| Arc::ptr_eq(known, &object));
            let block = known.map_or_else(|| object.as_ref().into(), |(_, block)| block);
            (block.name.clone(), (object, block))
        };
        self.shown = shown.into_iter().map(entry).collect();
        let shown = &self.shown;
        self.fresh
            .retain(|name, (at, _)| now.saturating_duration_since(*at) < FRESH && !shown.contains_key(name));
    }

    fn blocks(&self) -> Vec<&ExistingBlock> {
        self.shown
            .values()
            .map(|(_, block)| block)
            .chain(self.fresh.values().map(|(_, block)| block))
            .collect()
    }
}

/// Why a request could not be answered now.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The API server refused.
    #[error("cannot {what}: {source}")]
    Api {
        /// What was tried.
        what: String,
        /// Its answer.
        source: Box<kube::Error>,
    },
    /// The watch shows neither the pool nor the blocks that the API server has.
    #[error(
        "{NAME_TRIES} blocks in a row exist already in pool {0}, or the pool was not seen; the watch seems to lag"
    )]
    WatchLags(String),
}

fn api(what: impl Into<String>) -> impl FnOnce(kube::Error) -> Error {
    move |source| Error::Api { what: what.into(), source: Box::new(source) }
}

impl Granter {
    /// Grants from these caches, which must have their first lists.
    pub(crate) fn new(
        client: Client,
        pools: Store<AddressPool>,
        blocks: Store<AddressBlock>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { client, pools, blocks, book: Mutex::default(), metrics }
    }

    /// Answers pending requests for ever; one that fails delays no other.
    pub(crate) async fn run(
        self: Arc<Self>,
        requests: Store<BlockRequest>,
        mut changed: watch::Receiver<u64>,
    ) {
        let (mut running, mut busy) = (JoinSet::new(), BTreeMap::<String, Instant>::new());
        loop {
            let now = Instant::now();
            busy.retain(|_, until| *until > now);
            for (uid, request) in pending(requests.state()) {
                if running.len() < AT_ONCE && !busy.contains_key(&uid) {
                    busy.insert(uid, now + AGAIN);
                    let granter = Arc::clone(&self);
                    running.spawn(async move {
                        if let Err(error) = granter.answer(&request).await {
                            tracing::warn!(request = request.name_any(), %error, "cannot answer; will try again");
                        }
                    });
                }
            }
            tokio::select! {
                _ = changed.changed() => {}
                Some(_) = running.join_next() => {}
                () = tokio::time::sleep(AGAIN) => {}
            }
        }
    }

    async fn answer(&self, request: &BlockRequest) -> Result<(), Error> {
        let (block, outcome) = match self.block_for(request).await? {
            Ok(name) => (Some(name.clone()), Ok(format!("allocated a block {name}"))),
            Err(refusal) => (None, Err(refusal)),
        };
        match &outcome {
            Ok(_) => {
                self.metrics.granted();
                tracing::info!(request = request.name_any(), block, node = request.spec.node_name, "granted");
            }
            Err(refusal) => {
                self.metrics.refused(refusal.reason().as_condition());
                tracing::warn!(request = request.name_any(), %refusal, "refused");
            }
        }
        let status = BlockRequestStatus {
            address_block_name: block,
            conditions: conditions(&outcome, jiff::Timestamp::now()),
        };
        let requests: Api<BlockRequest> = Api::all(self.client.clone());
        let patch = serde_json::json!({ "metadata": { "uid": request.uid() }, "status": status });
        match requests.patch_status(&request.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await
        {
            Ok(_) => Ok(()),
            // The node took its request back, or made another: that one is answered by itself.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(api(format!("write the status of BlockRequest {}", request.name_any()))(error)),
        }
    }

    /// The block of a request: the one it has already, or a new one.
    async fn block_for(&self, request: &BlockRequest) -> Result<Result<String, Refusal>, Error> {
        let blocks: Api<AddressBlock> = Api::all(self.client.clone());
        for _ in 0..NAME_TRIES {
            let (index, name, nets) = match self.decide(request) {
                Grant::Existing { name } => return Ok(Ok(name)),
                Grant::Refused(Refusal::UnknownPool { pool }) if self.exists(&pool).await? => {
                    tokio::time::sleep(WATCH_LAG).await;
                    continue;
                }
                Grant::Refused(refusal) => return Ok(Err(refusal)),
                Grant::New { index, name, nets } => (index, name, nets),
            };
            let Some(pool) = self.pools.get(&ObjectRef::new(&request.spec.pool_name)) else { continue };
            match blocks.create(&PostParams::default(), &new_block(request, &pool, index, &name, &nets)).await
            {
                Ok(_) => return Ok(Ok(name)),
                // Somebody made it by hand, or the watch lags: it stays in `fresh`, so the next number is tried.
                Err(kube::Error::Api(status)) if status.code == 409 => self.belongs_to_another(&name),
                Err(error) => {
                    self.forget(&name);
                    return Err(api(format!("create AddressBlock {name}"))(error));
                }
            }
        }
        Err(Error::WatchLags(request.spec.pool_name.clone()))
    }

    /// Whether the API server has a pool: the watch may not have brought one that was made a moment ago.
    async fn exists(&self, pool: &str) -> Result<bool, Error> {
        let pools: Api<AddressPool> = Api::all(self.client.clone());
        Ok(pools.get_opt(pool).await.map_err(api(format!("read AddressPool {pool}")))?.is_some())
    }

    /// Decides, and remembers a new block in the same breath, so that two requests never get one block.
    fn decide(&self, request: &BlockRequest) -> Grant {
        let mut book = self.book();
        let now = Instant::now();
        book.sync(self.blocks.state(), now);
        let uid = request.uid().unwrap_or_default();
        let wanted = Request { uid: &uid, pool: &request.spec.pool_name, node: &request.spec.node_name };
        let answer = grant(&wanted, &pool_states(&self.pools.state()), &book.blocks());
        if let Grant::New { index, name, nets } = &answer {
            let block = ExistingBlock {
                name: name.clone(),
                pool: request.spec.pool_name.clone(),
                index: *index,
                nets: *nets,
                request: Some(uid),
                terminating: false,
            };
            book.fresh.insert(name.clone(), (now, block));
        }
        answer
    }

    fn belongs_to_another(&self, name: &str) {
        if let Some((_, block)) = self.book().fresh.get_mut(name) {
            block.request = None;
        }
    }

    fn forget(&self, name: &str) {
        self.book().fresh.remove(name);
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Requests that want an answer, with their UIDs, the oldest first: however many come, none waits for ever.
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

/// The pools as decisions see them.
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
    let owner = OwnerReference {
        api_version: "coil.cybozu.com/v2".to_owned(),
        kind: "AddressPool".to_owned(),
        name: pool.name_any(),
        uid: pool.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    };
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
        owner_references: Some(vec![owner]),
        ..ObjectMeta::default()
    };
    block
}

/// `Complete` for every answer, `Failed` besides for a refusal, as Coil writes them.
fn conditions(outcome: &Result<String, Refusal>, now: jiff::Timestamp) -> Vec<BlockRequestCondition> {
    let condition = |type_, reason: &str, message: String| BlockRequestCondition {
        type_,
        status: ConditionStatus::True,
        last_probe_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
        reason: reason.to_owned(),
        message,
    };
    match outcome {
        Ok(message) => {
            vec![condition(BlockRequestConditionType::Complete, REASON_ALLOCATED, message.clone())]
        }
        Err(refusal) => {
            let reason = refusal.reason().as_condition();
            vec![
                condition(BlockRequestConditionType::Complete, reason, refusal.to_string()),
                condition(BlockRequestConditionType::Failed, reason, refusal.to_string()),
            ]
        }
    }
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
    fn a_refusal_is_complete_and_failed_with_coils_words() {
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
    fn a_block_counts_from_its_grant_on_and_as_it_is_shown_last() {
        let block = |pool: &str| -> Arc<AddressBlock> {
            Arc::new(
                serde_json::from_value(serde_json::json!({
                    "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "index": 0, "ipv4": "10.0.0.0/30",
                    "metadata": { "name": "p1-0", "labels": { LABEL_POOL: pool } },
                }))
                .unwrap(),
            )
        };
        let (mut book, now) = (Book::default(), Instant::now());
        book.fresh.insert("p1-0".to_owned(), (now, block("fresh").as_ref().into()));
        let pools = |book: &Book| book.blocks().iter().map(|block| block.pool.clone()).collect::<Vec<_>>();
        book.sync(Vec::new(), now);
        assert_eq!(pools(&book), ["fresh"]);
        book.sync(vec![block("p1")], now);
        assert_eq!(pools(&book), ["p1"]);
        book.sync(vec![block("changed")], now);
        assert_eq!(pools(&book), ["changed"]);
        book.sync(Vec::new(), now);
        assert!(book.blocks().is_empty());
    }

    #[test]
    fn a_new_block_has_coils_shape() {
        let request: BlockRequest = serde_json::from_value(serde_json::json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "BlockRequest", "metadata": { "name": "r", "uid": "u" },
            "spec": { "nodeName": "n1", "poolName": "p1" },
        }))
        .unwrap();
        let pool = pool("p1", "10.0.0.0/24");
        let states = pool_states(std::slice::from_ref(&pool));
        let wanted = Request { uid: "u", pool: "p1", node: "n1" };
        let Grant::New { index, name, nets } = grant(&wanted, &states, &NONE) else { panic!("no block") };
        let json = serde_json::to_value(new_block(&request, &pool, index, &name, &nets)).unwrap();
        assert_eq!(json["metadata"]["name"], "p1-0");
        assert_eq!(json["index"], 0);
        assert_eq!(json["ipv4"], "10.0.0.0/30");
        assert_eq!(json["metadata"]["labels"][LABEL_REQUEST], "u");
        assert_eq!(json["metadata"]["finalizers"][0], COIL_FINALIZER);
        assert_eq!(json["metadata"]["ownerReferences"][0]["controller"], true);
    }

    #[test]
    fn a_pool_that_cannot_be_used_says_why() {
        let states = pool_states(&[pool("p1", "10.0.0.0/31")]);
        let wanted = Request { uid: "u", pool: "p1", node: "n1" };
        let Grant::Refused(refusal) = grant(&wanted, &states, &NONE) else { panic!("granted") };
        assert!(refusal.to_string().contains("10.0.0.0/31"), "{refusal}");
    }
}

//! Asking the controller for blocks: as many BlockRequests of a pool side by side as the pods that wait need, a few at
//! most, and never in the way of another pool.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fairlead_api::names::LABEL_REQUEST;
use fairlead_api::resources::{AddressBlock, BlockRequest, BlockRequestOutcome, BlockRequestSpec};
use fairlead_ipam::RefusalReason;
use fairlead_ipam::demand::{Demand, blocks_wanted};
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, ObjectMeta, PostParams, WatchEvent, WatchParams};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client, ResourceExt};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// How long one request may stay unanswered before it is made anew.
const ANSWER: Duration = Duration::from_secs(30);
/// Pause before an unanswered request whose watch has ended is watched again.
const WATCH_AGAIN: Duration = Duration::from_millis(500);
/// How long a refusal counts for pods that ask after it; then the controller is asked again.
pub const REFUSAL_LIFETIME: Duration = Duration::from_secs(3);
/// Pools that may wait to be asked for; more are asked for again by the pods that wait.
const QUEUE: usize = 256;

/// Why there is no block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The reason of the controller's condition; `None` when it was not the controller that refused.
    pub reason: Option<RefusalReason>,
    /// In words.
    pub message: String,
}

/// The latest refusals by pool.
#[derive(Debug, Default)]
struct Refusals(Mutex<BTreeMap<String, (Instant, Refusal)>>);

/// Somebody misses blocks of a pool.
struct Wish {
    pool: String,
    /// Addresses in one.
    block_size: usize,
}

/// A handle by which pods' starts ask for blocks.
#[derive(Clone)]
pub struct Requester {
    wanted: mpsc::Sender<Wish>,
    refusals: Arc<Refusals>,
    answered: watch::Receiver<u64>,
}

/// What the request task needs.
pub struct Context {
    /// Client of the API server.
    pub client: Client,
    /// This node's name.
    pub node: String,
    /// Has this node's Node object; the API server is asked while it is not there.
    pub nodes: Store<Node>,
    /// Has blocks; the API server is asked for one that is not there yet.
    pub blocks: Store<AddressBlock>,
    /// How many pods miss an address of a pool at this moment. A wish may be older than the block that fulfilled it.
    pub missing: Box<dyn Fn(&str) -> usize + Send + Sync>,
    /// Takes a granted block into use at once, before the watch brings it.
    pub granted: Box<dyn Fn(&AddressBlock) + Send + Sync>,
}

impl Requester {
    /// Starts the request task.
    pub fn spawn(tasks: &mut JoinSet<()>, context: Context) -> Self {
        let (wanted, queue) = mpsc::channel(QUEUE);
        let (answers, answered) = watch::channel(0);
        let refusals = Arc::new(Refusals::default());
        tasks.spawn(serve(Arc::new(context), queue, Arc::clone(&refusals), answers));
        Self { wanted, refusals, answered }
    }

    /// Asks for blocks of `pool`, as many as the pods that miss an address need, when one has `block_size` of them. Those
    /// under way count.
    pub fn want(&self, pool: &str, block_size: usize) {
        // A full queue drops the wish; whoever waits wishes again.
        let _ = self.wanted.try_send(Wish { pool: pool.to_owned(), block_size });
    }

    /// Why the controller refused a block of `pool` lately.
    pub fn refusal(&self, pool: &str, now: Instant) -> Option<Refusal> {
        let refusals = self.refusals.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, refusal) = refusals.get(pool)?;
        (now.saturating_duration_since(*at) < REFUSAL_LIFETIME).then(|| refusal.clone())
    }

    /// Sees each answer of the controller.
    pub fn answers(&self) -> watch::Receiver<u64> {
        self.answered.clone()
    }
}

async fn serve(
    context: Arc<Context>,
    mut queue: mpsc::Receiver<Wish>,
    refusals: Arc<Refusals>,
    answers: watch::Sender<u64>,
) {
    let (mut demand, mut answered, mut running) = (Demand::default(), BTreeSet::new(), JoinSet::new());
    loop {
        tokio::select! {
            Some(Wish { pool, block_size }) = queue.recv() => {
                let wanted = blocks_wanted((context.missing)(&pool), block_size);
                while let Some(number) = demand.begin(&pool, wanted) {
                    let name = name(&pool, &context.node, number);
                    let task = Task { pool: pool.clone(), number, answered: answered.contains(&name), name };
                    let context = Arc::clone(&context);
                    running.spawn(async move { (bounded_request(&context, &task).await, task) });
                }
            }
            Some(Ok((outcome, task))) = running.join_next() => {
                let Task { pool, number, name, .. } = task;
                let last = demand.end(&pool, number);
                let mut known = refusals.0.lock().unwrap_or_else(PoisonError::into_inner);
                match outcome {
                    Ok(()) => {
                        answered.insert(name);
                        known.remove(&pool);
                    }
                    Err(error) => {
                        answered.remove(&name);
                        tracing::warn!(pool, %error, "no block");
                        // While others are under way, a block may still come for the pods that wait.
                        if last {
                            known.insert(pool, (Instant::now(), error.into_refusal()));
                        }
                    }
                }
                drop(known);
                answers.send_modify(|count| *count += 1);
            }
            else => return,
        }
    }
}

/// One request to be made.
struct Task {
    pool: String,
    number: usize,
    name: String,
    /// Whether the last one of this name was answered, so that it can be replaced without a look.
    answered: bool,
}

/// The first request has the name that Coil gives it. The others' begin differently, so that they are never those of
/// another node or pool.
fn name(pool: &str, node: &str, number: usize) -> String {
    match number {
        0 => BlockRequest::name_for(pool, node),
        number => format!("req{}-{pool}-{node}", number.saturating_add(1)),
    }
}

/// Why a block did not come.
#[derive(Debug, thiserror::Error)]
enum RequestError {
    /// The controller's words name the pool.
    #[error("{message}")]
    Refused { reason: Option<RefusalReason>, message: String },
    #[error("BlockRequest {name} was not answered within {} s: is the API server reachable, and is `fairlead controller` running and elected?", ANSWER.as_secs())]
    Unanswered { name: String },
    #[error("cannot {what}: {source}")]
    Api { what: String, source: Box<kube::Error> },
}

impl RequestError {
    fn into_refusal(self) -> Refusal {
        let message = self.to_string();
        match self {
            Self::Refused { reason, .. } => Refusal { reason, message },
            Self::Api { .. } | Self::Unanswered { .. } => Refusal { reason: None, message },
        }
    }
}

fn api(what: impl Into<String>) -> impl FnOnce(kube::Error) -> RequestError {
    move |source| RequestError::Api { what: what.into(), source: Box::new(source) }
}

/// An API server that has gone silent must not keep the pool's next request waiting.
async fn bounded_request(context: &Context, task: &Task) -> Result<(), RequestError> {
    let unanswered = || RequestError::Unanswered { name: task.name.clone() };
    timeout(ANSWER, request(context, task)).await.unwrap_or_else(|_| Err(unanswered()))
}

async fn request(context: &Context, task: &Task) -> Result<(), RequestError> {
    let name = &task.name;
    let requests: Api<BlockRequest> = Api::all(context.client.clone());
    let made = make(context, &requests, task).await?;
    let request = answer(&requests, made).await.map_err(api(format!("read BlockRequest {name}")))?;
    match request.as_ref().map(BlockRequest::outcome) {
        Some(BlockRequestOutcome::Granted(block)) => {
            let uid = request.as_ref().and_then(ResourceExt::uid);
            // A block of that name may have been another's before.
            let for_this = |seen: &Arc<AddressBlock>| seen.labels().get(LABEL_REQUEST) == uid.as_ref();
            let block = match context.blocks.get(&ObjectRef::new(block)).filter(for_this) {
                Some(seen) => seen,
                None => {
                    let blocks: Api<AddressBlock> = Api::all(context.client.clone());
                    Arc::new(blocks.get(block).await.map_err(api(format!("read AddressBlock {block}")))?)
                }
            };
            (context.granted)(&block);
            Ok(())
        }
        Some(BlockRequestOutcome::Refused { reason, message }) => {
            let reason = RefusalReason::from_condition(reason);
            Err(RequestError::Refused { reason, message: message.to_owned() })
        }
        Some(BlockRequestOutcome::Pending) | None => Err(RequestError::Unanswered { name: name.to_owned() }),
    }
}

/// Makes the request, in place of the answered one of last time.
async fn make(
    context: &Context,
    requests: &Api<BlockRequest>,
    task: &Task,
) -> Result<BlockRequest, RequestError> {
    let Task { pool, name, answered, .. } = task;
    let wanted = BlockRequest {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            owner_references: Some(vec![owner(context).await?]),
            ..ObjectMeta::default()
        },
        spec: BlockRequestSpec { node_name: context.node.clone(), pool_name: pool.clone() },
        status: None,
    };
    let delete = || async {
        match requests.delete(name, &DeleteParams::default()).await {
            Err(error) if !is(&error, 404) => {
                Err(api(format!("delete the answered BlockRequest {name}"))(error))
            }
            _ => Ok(()),
        }
    };
    let parameters = PostParams::default();
    let create = || requests.create(&parameters, &wanted);
    let created = || api(format!("create BlockRequest {name}"));
    if *answered {
        delete().await?;
    }
    match create().await {
        Err(error) if is(&error, 409) => {}
        other => return other.map_err(created()),
    }
    match requests.get_opt(name).await.map_err(api(format!("read BlockRequest {name}")))? {
        // Unanswered: made before a restart of ours; its answer is as good.
        Some(present) if present.outcome() == BlockRequestOutcome::Pending => return Ok(present),
        Some(_) => delete().await?,
        None => {}
    }
    create().await.map_err(created())
}

fn is(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}

/// The request once it is answered; `None` when it is gone. Asks until it is.
async fn answer(
    requests: &Api<BlockRequest>,
    made: BlockRequest,
) -> Result<Option<BlockRequest>, kube::Error> {
    let mut request = made;
    loop {
        if request.outcome() != BlockRequestOutcome::Pending {
            return Ok(Some(request));
        }
        if let Ok(Some(answered)) = watch_for_answer(requests, &request).await {
            return Ok(Some(answered));
        }
        // The watch has ended, as every one does at times, or the request is gone.
        match requests.get_opt(&request.name_any()).await? {
            Some(present) => request = present,
            None => return Ok(None),
        }
        sleep(WATCH_AGAIN).await;
    }
}

/// Watches from the version that is known on, so that no answer can be missed and nothing has to be listed first.
async fn watch_for_answer(
    requests: &Api<BlockRequest>,
    request: &BlockRequest,
) -> Result<Option<BlockRequest>, kube::Error> {
    let version = request.resource_version().unwrap_or_default();
    let parameters = WatchParams::default().fields(&format!("metadata.name={}", request.name_any()));
    let mut events = pin!(requests.watch(&parameters, &version).await?);
    while let Some(event) = events.try_next().await? {
        match event {
            WatchEvent::Added(request) | WatchEvent::Modified(request)
                if request.outcome() != BlockRequestOutcome::Pending =>
            {
                return Ok(Some(request));
            }
            WatchEvent::Deleted(_) | WatchEvent::Error(_) => return Ok(None),
            WatchEvent::Added(_) | WatchEvent::Modified(_) | WatchEvent::Bookmark(_) => {}
        }
    }
    Ok(None)
}

/// The Node owns the request, so that Kubernetes collects it when the node goes for good.
async fn owner(context: &Context) -> Result<OwnerReference, RequestError> {
    let known = context.nodes.get(&ObjectRef::new(&context.node));
    let uid = match known.and_then(|node| node.uid()) {
        Some(uid) => uid,
        None => {
            let nodes: Api<Node> = Api::all(context.client.clone());
            let node = nodes.get_metadata(&context.node).await;
            node.map_err(api(format!("read Node {}", context.node)))?.metadata.uid.unwrap_or_default()
        }
    };
    Ok(OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: context.node.clone(),
        uid,
        controller: Some(false),
        block_owner_deletion: Some(false),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_request_has_coils_name_and_the_others_have_nobodys() {
        assert_eq!(name("p", "n", 0), "req-p-n");
        assert_eq!(name("p", "n", 1), "req2-p-n");
        assert_ne!(name("p", "n", 1), name("2-p", "n", 0));
    }
}

//! Asking the controller for blocks: at most one BlockRequest per pool at a time, never in the way of another pool.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fairlead_api::resources::{AddressBlock, BlockRequest, BlockRequestOutcome, BlockRequestSpec};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, ObjectMeta, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Client};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// How long one request may stay unanswered before it is made anew.
const ANSWER: Duration = Duration::from_secs(30);
/// How long a refusal counts for pods that ask after it; then the controller is asked again.
pub const REFUSAL_LIFETIME: Duration = Duration::from_secs(3);
/// Pools that may wait to be asked for; more are asked for again by the pods that wait.
const QUEUE: usize = 256;

/// Why there is no block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The reason of the controller's condition; empty when it was not the controller that refused.
    pub reason: String,
    /// In words.
    pub message: String,
}

/// The latest refusals by pool.
#[derive(Debug, Default)]
struct Refusals(Mutex<BTreeMap<String, (Instant, Refusal)>>);

/// A handle by which pods' starts ask for blocks.
#[derive(Clone)]
pub struct Requester {
    wanted: mpsc::Sender<String>,
    refusals: Arc<Refusals>,
    answered: watch::Receiver<u64>,
}

/// What the request task needs.
pub struct Context {
    /// Client of the API server.
    pub client: Client,
    /// This node's name.
    pub node: String,
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

    /// Asks for a block of `pool`, unless that is already under way.
    pub fn want(&self, pool: &str) {
        // A full queue drops the wish; whoever waits wishes again.
        let _ = self.wanted.try_send(pool.to_owned());
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
    mut queue: mpsc::Receiver<String>,
    refusals: Arc<Refusals>,
    answers: watch::Sender<u64>,
) {
    let (mut under_way, mut running) = (BTreeSet::new(), JoinSet::new());
    loop {
        tokio::select! {
            Some(pool) = queue.recv() => {
                if under_way.insert(pool.clone()) {
                    let context = Arc::clone(&context);
                    running.spawn(async move { (bounded_request(&context, &pool).await, pool) });
                }
            }
            Some(Ok((outcome, pool))) = running.join_next() => {
                under_way.remove(&pool);
                let mut known = refusals.0.lock().unwrap_or_else(PoisonError::into_inner);
                match outcome {
                    Ok(()) => {
                        known.remove(&pool);
                    }
                    Err(error) => {
                        tracing::warn!(pool, %error, "no block");
                        known.insert(pool, (Instant::now(), error.into_refusal()));
                    }
                }
                drop(known);
                answers.send_modify(|count| *count += 1);
            }
            else => return,
        }
    }
}

/// Why a block did not come.
#[derive(Debug, thiserror::Error)]
enum RequestError {
    /// The controller's words name the pool.
    #[error("{message}")]
    Refused { reason: String, message: String },
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
            Self::Api { .. } | Self::Unanswered { .. } => Refusal { reason: String::new(), message },
        }
    }
}

fn api(what: impl Into<String>) -> impl FnOnce(kube::Error) -> RequestError {
    move |source| RequestError::Api { what: what.into(), source: Box::new(source) }
}

/// An API server that has gone silent must not keep the pool's next request waiting.
async fn bounded_request(context: &Context, pool: &str) -> Result<(), RequestError> {
    let name = BlockRequest::name_for(pool, &context.node);
    timeout(ANSWER, request(context, pool)).await.unwrap_or(Err(RequestError::Unanswered { name }))
}

async fn request(context: &Context, pool: &str) -> Result<(), RequestError> {
    let name = BlockRequest::name_for(pool, &context.node);
    let requests: Api<BlockRequest> = Api::all(context.client.clone());
    replace(context, &requests, &name, pool).await?;
    let done = await_condition(requests.clone(), &name, |request: Option<&BlockRequest>| {
        request.is_some_and(|request| request.outcome() != BlockRequestOutcome::Pending)
    });
    let answered = done.await.map_err(|_| RequestError::Unanswered { name: name.clone() })?;
    match answered.as_ref().map(BlockRequest::outcome) {
        Some(BlockRequestOutcome::Granted(block)) => {
            let blocks: Api<AddressBlock> = Api::all(context.client.clone());
            let block = blocks.get(block).await.map_err(api(format!("read AddressBlock {block}")))?;
            (context.granted)(&block);
            Ok(())
        }
        Some(BlockRequestOutcome::Refused { reason, message }) => {
            Err(RequestError::Refused { reason: reason.to_owned(), message: message.to_owned() })
        }
        Some(BlockRequestOutcome::Pending) | None => Err(RequestError::Unanswered { name }),
    }
}

/// Makes the request, in place of the answered one of last time.
async fn replace(
    context: &Context,
    requests: &Api<BlockRequest>,
    name: &str,
    pool: &str,
) -> Result<(), RequestError> {
    let wanted = BlockRequest {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            owner_references: Some(vec![owner(context).await?]),
            ..ObjectMeta::default()
        },
        spec: BlockRequestSpec { node_name: context.node.clone(), pool_name: pool.to_owned() },
        status: None,
    };
    match requests.get_opt(name).await.map_err(api(format!("read BlockRequest {name}")))? {
        // Unanswered: made before a restart of ours; its answer is as good.
        Some(present) if present.outcome() == BlockRequestOutcome::Pending => return Ok(()),
        Some(_) => {
            requests
                .delete(name, &DeleteParams::default())
                .await
                .map_err(api(format!("delete the answered BlockRequest {name}")))?;
        }
        None => {}
    }
    requests
        .create(&PostParams::default(), &wanted)
        .await
        .map(drop)
        .map_err(api(format!("create BlockRequest {name}")))
}

/// The Node owns the request, so that Kubernetes collects it when the node goes for good.
async fn owner(context: &Context) -> Result<OwnerReference, RequestError> {
    let nodes: Api<Node> = Api::all(context.client.clone());
    let node = nodes.get_metadata(&context.node).await.map_err(api(format!("read Node {}", context.node)))?;
    Ok(OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: context.node.clone(),
        uid: node.metadata.uid.unwrap_or_default(),
        controller: Some(false),
        block_owner_deletion: Some(false),
    })
}

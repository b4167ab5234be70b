//! Makes the BlockRequests that the state demands, side by side.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use fairlead_api::names::LABEL_REQUEST;
use fairlead_api::resources::{AddressBlock, BlockRequest, BlockRequestOutcome, BlockRequestSpec};
use fairlead_ipam::Block;
use fairlead_ipam::request::{RequestCall, RequestEnd, RequestFlow, RequestOutcome, RequestReply};
use fairlead_ipam::state::{BlockDemand, NodeState, RequestFailure};
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, ObjectMeta, PostParams, WatchEvent, WatchParams};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client, ResourceExt};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::Ipam;

/// How long one request may stay unanswered before it is made anew.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause before an unanswered request whose watch has ended is watched again.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// What requests need.
pub struct Requests {
    /// Client of the API server.
    pub client: Client,
    /// What demands requests and takes the granted blocks.
    pub ipam: Arc<Ipam>,
    /// The API server is asked while this node's Node object is not there.
    pub nodes: Store<Node>,
    /// The API server is asked for a block that is not there yet.
    pub blocks: Store<AddressBlock>,
}

/// Makes requests as they are demanded.
pub async fn run(requests: Requests) {
    let (requests, mut running) = (Arc::new(requests), JoinSet::new());
    loop {
        while let Some(demand) = requests.ipam.update(NodeState::next_request) {
            let requests = Arc::clone(&requests);
            running.spawn(async move { (requests.make(&demand).await, demand) });
        }
        tokio::select! {
            () = requests.ipam.request.notified() => {}
            Some(ended) = running.join_next() => match ended {
                Ok((outcome, demand)) => {
                    let failure = |error: RequestError| {
                        tracing::warn!(pool = demand.pool, %error, "no block");
                        error.into_failure()
                    };
                    requests.ipam.end_request(&demand, outcome.map_err(failure));
                }
                Err(error) => if let Ok(panic) = error.try_into_panic() {
                    std::panic::resume_unwind(panic);
                }
            }
        }
    }
}

/// The first request has the name that Coil gives it. The others' begin differently, so that they never equal those of
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
    #[error("{}", .0.message)]
    Refused(RequestFailure),
    #[error("BlockRequest {name} was not answered within {} s: is the API server reachable, and is `fairlead controller` running and elected?", REQUEST_TIMEOUT.as_secs())]
    Unanswered { name: String },
    #[error("cannot {what}: {source}")]
    Api { what: String, source: Box<kube::Error> },
}

impl RequestError {
    fn into_failure(self) -> RequestFailure {
        let message = self.to_string();
        match self {
            Self::Refused(failure) => failure,
            Self::Api { .. } | Self::Unanswered { .. } => RequestFailure { reason: None, message },
        }
    }
}

fn api(what: impl Into<String>) -> impl FnOnce(kube::Error) -> RequestError {
    move |source| RequestError::Api { what: what.into(), source: Box::new(source) }
}

fn reply(request: &BlockRequest) -> RequestReply {
    RequestReply::Present(match request.outcome() {
        BlockRequestOutcome::Granted(block) => RequestOutcome::Granted {
            block: block.to_owned(),
            request_uid: request.uid().unwrap_or_default(),
        },
        BlockRequestOutcome::Pending => RequestOutcome::Pending,
        BlockRequestOutcome::Refused { reason, message } => RequestOutcome::refused(reason, message),
    })
}

impl Requests {
    /// An API server that does not answer must not keep the pool's next request waiting.
    async fn make(&self, demand: &BlockDemand) -> Result<Option<Block>, RequestError> {
        let name = name(&demand.pool, &self.ipam.node, demand.number);
        let made = timeout(REQUEST_TIMEOUT, self.follow(demand, &name)).await;
        made.unwrap_or_else(|_| Err(RequestError::Unanswered { name: name.clone() }))
    }

    /// Makes the calls of one request. `None` is a block that is not this node's or not usable.
    async fn follow(&self, demand: &BlockDemand, name: &str) -> Result<Option<Block>, RequestError> {
        let requests: Api<BlockRequest> = Api::all(self.client.clone());
        let (mut flow, mut present) = (RequestFlow::new(demand.replaces_answered), None);
        loop {
            let reply = match flow.call() {
                RequestCall::AwaitAnswer => {
                    let known = present.take();
                    let answered = answer(&requests, name, known).await;
                    let answered = answered.map_err(api(format!("read BlockRequest {name}")))?;
                    answered.as_ref().map_or(RequestReply::Absent, reply)
                }
                RequestCall::Create => {
                    let request = self.new_request(&demand.pool, name).await?;
                    match requests.create(&PostParams::default(), &request).await {
                        Ok(created) => reply(present.insert(created)),
                        Err(kube::Error::Api(status))
                            if status.is_conflict() || status.is_already_exists() =>
                        {
                            RequestReply::AlreadyExists
                        }
                        Err(error) => return Err(api(format!("create BlockRequest {name}"))(error)),
                    }
                }
                RequestCall::Delete => match requests.delete(name, &DeleteParams::default()).await {
                    Ok(_) => RequestReply::Deleted,
                    Err(kube::Error::Api(status)) if status.is_not_found() => RequestReply::Deleted,
                    Err(error) => {
                        return Err(api(format!("delete the answered BlockRequest {name}"))(error));
                    }
                },
                RequestCall::Read => {
                    let read = requests.get_opt(name).await;
                    present = read.map_err(api(format!("read BlockRequest {name}")))?;
                    present.as_ref().map_or(RequestReply::Absent, reply)
                }
                RequestCall::ReadBlock { block, request_uid } => {
                    return self.read_block(block, request_uid).await;
                }
            };
            flow.advance(reply).map_err(|end| match end {
                RequestEnd::Refused(failure) => RequestError::Refused(failure),
                RequestEnd::Unanswered => RequestError::Unanswered { name: name.to_owned() },
            })?;
        }
    }

    async fn read_block(&self, name: &str, request_uid: &str) -> Result<Option<Block>, RequestError> {
        // A block of that name may have been another's before.
        let is_granted = |seen: &Arc<AddressBlock>| {
            seen.labels().get(LABEL_REQUEST).map(String::as_str) == Some(request_uid)
        };
        let block = match self.blocks.get(&ObjectRef::new(name)).filter(is_granted) {
            Some(seen) => seen,
            None => {
                let blocks: Api<AddressBlock> = Api::all(self.client.clone());
                Arc::new(blocks.get(name).await.map_err(api(format!("read AddressBlock {name}")))?)
            }
        };
        Ok(self.ipam.own_block(&block))
    }

    /// The Node owns the request, so that Kubernetes collects it when the node is removed.
    async fn new_request(&self, pool: &str, name: &str) -> Result<BlockRequest, RequestError> {
        let node = &self.ipam.node;
        let known = self.nodes.get(&ObjectRef::new(node)).and_then(|node| node.uid());
        let uid = match known {
            Some(uid) => uid,
            None => {
                let nodes: Api<Node> = Api::all(self.client.clone());
                let read = nodes.get_metadata(node).await.map_err(api(format!("read Node {node}")))?;
                read.metadata.uid.unwrap_or_default()
            }
        };
        let owner = OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: node.clone(),
            uid,
            controller: Some(false),
            block_owner_deletion: Some(false),
        };
        Ok(BlockRequest {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                owner_references: Some(vec![owner]),
                ..ObjectMeta::default()
            },
            spec: BlockRequestSpec { node_name: node.clone(), pool_name: pool.to_owned() },
            status: None,
        })
    }
}

/// The request once it is answered; `None` when it is gone.
async fn answer(
    requests: &Api<BlockRequest>,
    name: &str,
    mut known: Option<BlockRequest>,
) -> Result<Option<BlockRequest>, kube::Error> {
    loop {
        if let Some(request) = known {
            if request.outcome() != BlockRequestOutcome::Pending {
                return Ok(Some(request));
            }
            if let Ok(Some(answered)) = watch_for_answer(requests, &request).await {
                return Ok(Some(answered));
            }
        }
        // The watch has ended, as every one does at times, or the request is gone.
        known = requests.get_opt(name).await?;
        if known.is_none() {
            return Ok(None);
        }
        sleep(WATCH_INTERVAL).await;
    }
}

/// Watches from the known version, so that no answer is missed and nothing has to be listed first.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_request_has_coils_name_and_the_others_are_unique() {
        assert_eq!(name("p", "n", 0), "req-p-n");
        assert_eq!(name("p", "n", 1), "req2-p-n");
        assert_ne!(name("p", "n", 1), name("2-p", "n", 0));
    }
}

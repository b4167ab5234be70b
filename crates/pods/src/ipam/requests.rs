//! Makes the BlockRequests that the state demands, side by side.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fairlead_api::resources::{
    AddressBlock, AddressBlockFields, BlockRequest, BlockRequestOutcome, BlockRequestSpec,
};
use fairlead_cluster::writes::is_stale;
use fairlead_ipam::state::{BlockDemand, NodeState, RequestFailure};
use fairlead_ipam::{Block, ClaimedBlock, Pool, RefusalReason};
use fairlead_limits::Backoff;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, ListParams, ObjectMeta, PostParams};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client, Resource, ResourceExt};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::allocator::Ipam;
use super::own_blocks::OwnBlocks;

/// Longest time in which a request stays unanswered before it is made anew.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait at the start until the requests of an earlier process are deleted.
const LEFTOVERS_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before a request without a block is read for the first time; it doubles with each.
const MIN_READ_PAUSE: Duration = Duration::from_millis(500);
/// Longest pause.
const MAX_READ_PAUSE: Duration = Duration::from_secs(5);

/// Dependencies of the task that requests blocks.
pub struct Requests {
    /// Client of the API server.
    pub client: Client,
    /// Allocator that demands blocks and takes those that are granted.
    pub ipam: Arc<Ipam>,
    /// The API server is asked while this node's Node object is not there.
    pub nodes: Store<Node>,
    /// Show a granted block as soon as it is there.
    pub blocks: OwnBlocks,
    /// Name of the last refused request of each pool.
    pub refused: Mutex<BTreeMap<String, String>>,
}

/// Makes requests as they are demanded.
pub async fn run(requests: Requests) {
    let requests = Arc::new(requests);
    let mut running = JoinSet::new();
    requests.delete_leftovers().await;
    loop {
        while let Some(demand) = requests.next() {
            let requests = Arc::clone(&requests);
            running.spawn(async move { requests.serve(&demand).await });
        }
        tokio::select! {
            () = requests.ipam.request.notified() => {}
            Some(ended) = running.join_next() => if let Err(error) = ended
                && let Ok(panic) = error.try_into_panic()
            {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

/// Reason why a block did not come.
#[derive(Debug, thiserror::Error)]
enum RequestError {
    #[error("{}", .0.message)]
    Refused(RequestFailure),
    #[error("the BlockRequest was not answered within {} s: is the API server reachable, and is `fairlead controller` running and elected?", REQUEST_TIMEOUT.as_secs())]
    Unanswered,
    #[error("cannot {what}: {source}")]
    Api { what: String, source: Box<kube::Error> },
}

impl RequestError {
    fn into_failure(self) -> RequestFailure {
        let message = self.to_string();
        match self {
            Self::Refused(failure) => failure,
            Self::Api { .. } | Self::Unanswered => RequestFailure { reason: None, message },
        }
    }
}

fn api(what: impl Into<String>) -> impl FnOnce(kube::Error) -> RequestError {
    move |source| RequestError::Api { what: what.into(), source: Box::new(source) }
}

impl Requests {
    /// Claims first: another node may get the block.
    fn next(&self) -> Option<BlockDemand> {
        let pool = |name: &str| Pool::try_from(self.ipam.pools.get(&ObjectRef::new(name))?.as_ref()).ok();
        let decide = |state: &mut NodeState<_>| {
            state.next_claim(Instant::now(), pool).or_else(|| state.next_request())
        };
        self.ipam.update(decide)
    }

    /// Makes one request, reports what came of it, and deletes it. One that was refused stays for users to see, until the next
    /// one of its pool has an answer.
    async fn serve(&self, demand: &BlockDemand) {
        let mut name = None;
        // An API server that does not answer must not keep the pool's next request waiting.
        let outcome = timeout(REQUEST_TIMEOUT, self.make(demand, &mut name)).await;
        let outcome = outcome.unwrap_or_else(|_| Err(RequestError::Unanswered));
        let refused = matches!(outcome, Err(RequestError::Refused(_)));
        let failure = |error: RequestError| {
            tracing::warn!(pool = demand.pool, claim = ?demand.claim, %error, "no block");
            error.into_failure()
        };
        self.ipam.end_request(demand, outcome.map_err(failure));
        let previous = self.refused.lock().unwrap_or_else(PoisonError::into_inner).remove(&demand.pool);
        if refused && let Some(name) = name.take() {
            self.refused.lock().unwrap_or_else(PoisonError::into_inner).insert(demand.pool.clone(), name);
        }
        for name in previous.into_iter().chain(name) {
            if let Err(error) = self.delete(&name).await {
                tracing::debug!(name, %error, "cannot delete a BlockRequest; it is deleted at the next start");
            }
        }
    }

    fn requests(&self) -> Api<BlockRequest> {
        Api::all(self.client.clone())
    }

    /// Deletes a request that may be gone already.
    async fn delete(&self, name: &str) -> kube::Result<()> {
        match self.requests().delete(name, &DeleteParams::default()).await {
            Err(error) if !is_stale(&error) => Err(error),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Deletes what an earlier process of this node has left. Only this program makes requests for this node, so nothing
    /// waits for them; a block that was granted meanwhile is in the watch.
    async fn delete_leftovers(&self) {
        let own = ListParams::default().fields(&format!("spec.nodeName={}", self.ipam.node));
        let delete_all = async {
            for request in self.requests().list(&own).await? {
                self.delete(&request.name_any()).await?;
            }
            Ok::<_, kube::Error>(())
        };
        match timeout(LEFTOVERS_TIMEOUT, delete_all).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "cannot delete the BlockRequests of an earlier start"),
            Err(_) => {
                tracing::warn!("cannot delete the BlockRequests of an earlier start: no answer in time")
            }
        }
    }

    /// Creates the request and waits for its block. `None` is a block that is not this node's or not usable. `name` is set as
    /// soon as there is a request.
    async fn make(
        &self,
        demand: &BlockDemand,
        name: &mut Option<String>,
    ) -> Result<Option<Block>, RequestError> {
        let request = self.new_request(demand).await?;
        let created = self.requests().create(&PostParams::default(), &request).await;
        let created = created.map_err(api(format!("create a BlockRequest for pool {}", demand.pool)))?;
        let uid = created.uid().unwrap_or_default();
        let created_name = created.name_any();
        *name = Some(created_name.clone());
        tokio::select! {
            biased;
            block = self.blocks.granted(&uid) => Ok(self.ipam.own_block(&block)),
            answer = self.read_answer(&created_name, &uid) => answer,
        }
    }

    /// Reads the request until it is answered: the watch of blocks shows no refusal, and the API server may not allow it.
    async fn read_answer(&self, name: &str, uid: &str) -> Result<Option<Block>, RequestError> {
        let mut backoff = Backoff::new(MIN_READ_PAUSE, MAX_READ_PAUSE);
        loop {
            sleep(backoff.next_whole()).await;
            let read = self.requests().get_opt(name).await;
            let read = read.map_err(api(format!("read BlockRequest {name}")))?;
            let Some(request) = read.filter(|read| read.uid().as_deref() == Some(uid)) else {
                return Err(RequestError::Unanswered);
            };
            match request.outcome() {
                BlockRequestOutcome::Granted(block) => return self.read_block(block, uid).await,
                BlockRequestOutcome::Pending => {}
                BlockRequestOutcome::Refused { reason, message } => {
                    let reason = RefusalReason::from_condition(reason);
                    let message = message.to_owned();
                    return Err(RequestError::Refused(RequestFailure { reason, message }));
                }
            }
        }
    }

    async fn read_block(&self, name: &str, request_uid: &str) -> Result<Option<Block>, RequestError> {
        let block = match self.blocks.clone().granted_now(request_uid) {
            Some(shown) => shown,
            None => {
                let blocks: Api<AddressBlock> = Api::all(self.client.clone());
                Arc::new(blocks.get(name).await.map_err(api(format!("read AddressBlock {name}")))?)
            }
        };
        Ok(self.ipam.own_block(&block))
    }

    async fn new_request(&self, demand: &BlockDemand) -> Result<BlockRequest, RequestError> {
        let pool = &demand.pool;
        let node = &self.ipam.node;
        let in_use = demand.claim.map(|ClaimedBlock { index, nets }| {
            let text = nets.map(|net| net.to_string(), |net| net.to_string());
            AddressBlockFields { index, ipv4: text.ipv4, ipv6: text.ipv6 }
        });
        let spec = BlockRequestSpec { node_name: node.clone(), pool_name: pool.clone(), in_use };
        let metadata = ObjectMeta {
            generate_name: Some(BlockRequest::name_prefix(pool, node)),
            owner_references: self.owner().await?.map(|owner| vec![owner]),
            ..ObjectMeta::default()
        };
        Ok(BlockRequest { metadata, spec, status: None })
    }

    /// The Node owns the request, so that Kubernetes collects it when the node is removed.
    async fn owner(&self) -> Result<Option<OwnerReference>, RequestError> {
        let node = &self.ipam.node;
        if let Some(known) = self.nodes.get(&ObjectRef::new(node)) {
            return Ok(known.owner_ref(&()));
        }
        let nodes: Api<Node> = Api::all(self.client.clone());
        let read = nodes.get_metadata(node).await.map_err(api(format!("read Node {node}")))?;
        Ok(read.owner_ref(&()))
    }
}

#[cfg(test)]
mod tests {
    use fairlead_dataplane::routing_ids::RoutingIds;
    use futures::FutureExt as _;
    use kube::runtime::reflector;
    use kube::runtime::watcher::Event;
    use serde_json::json;
    use testbed_api::server::client;

    use super::*;

    fn node(uid: &str) -> serde_json::Value {
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1", "uid": uid } })
    }

    /// Requests of node n1, whose object the API server has.
    fn requests(nodes: Store<Node>) -> Requests {
        let client = client(|call| {
            assert_eq!(call, "GET /api/v1/nodes/n1");
            std::future::ready((200, node("read").to_string())).boxed()
        });
        let ipam = Ipam::new("n1", RoutingIds::default(), reflector::store().0, Api::all(client.clone()));
        Requests {
            client,
            ipam: Arc::new(ipam),
            nodes,
            blocks: OwnBlocks::of("n1").1,
            refused: Mutex::default(),
        }
    }

    /// As in Coil: when a node goes, Kubernetes collects what it asked for.
    #[tokio::test]
    async fn a_request_is_owned_by_its_node() {
        let (known, mut writer) = reflector::store();
        writer.apply_watcher_event(&Event::Apply(serde_json::from_value(node("known")).unwrap()));
        for (nodes, uid) in [(known, "known"), (reflector::store().0, "read")] {
            let demand = BlockDemand { pool: "a".to_owned(), claim: None };
            let request = requests(nodes).new_request(&demand).await.unwrap();
            let owners = serde_json::to_value(request.metadata.owner_references).unwrap();
            assert_eq!(owners, json!([{ "apiVersion": "v1", "kind": "Node", "name": "n1", "uid": uid }]));
        }
    }
}

//! Blocks of nodes that are gone: nobody else can free them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fairlead_api::names::COIL_FINALIZER;
use fairlead_api::resources::AddressBlock;
use k8s_openapi::api::core::v1::Node;
use kube::api::{DeleteParams, PartialObjectMeta, Patch, PatchParams, Preconditions};
use kube::runtime::reflector::Store;
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;

use crate::metrics::Metrics;

/// Blocks whose node is not among `nodes`. Reserved blocks and those without a node stay. Pure.
pub(crate) fn orphans<'a>(
    blocks: &'a [Arc<AddressBlock>],
    nodes: &BTreeSet<String>,
) -> Vec<&'a AddressBlock> {
    let orphaned = |block: &&Arc<AddressBlock>| {
        !block.is_reserved() && block.node().is_some_and(|node| !nodes.contains(node))
    };
    blocks.iter().filter(orphaned).map(AsRef::as_ref).collect()
}

/// Frees blocks of deleted nodes for ever: when a node changes, and every `sweep` besides.
pub(crate) async fn run(
    client: Client,
    nodes: Store<PartialObjectMeta<Node>>,
    blocks: Store<AddressBlock>,
    mut changed: watch::Receiver<u64>,
    metrics: Arc<Metrics>,
    sweep: Duration,
) {
    loop {
        let known: BTreeSet<String> = nodes.state().iter().map(|node| node.name_any()).collect();
        for block in orphans(&blocks.state(), &known) {
            let (name, node) = (block.name_any(), block.node().unwrap_or_default());
            match free(&client, block).await {
                Ok(Outcome::Freed) => {
                    metrics.orphan("freed");
                    tracing::info!(block = name, node, "freed the block of a deleted node");
                }
                Ok(Outcome::Kept) => metrics.orphan("kept"),
                Err(error) => {
                    metrics.orphan("failed");
                    tracing::warn!(block = name, node, %error, "cannot free the block of a deleted node; will try again");
                }
            }
        }
        let _ = tokio::time::timeout(sweep, changed.changed()).await;
    }
}

/// What became of a block that seemed to be nobody's.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// It is gone.
    Freed,
    /// Its node is back, or it is another block by now: nothing was taken from anybody.
    Kept,
}

/// Frees precisely the block that was looked at, and only while its node is gone; caches may be behind.
///
/// Once the deletion has been accepted, no pod gets an address from the block. Then the node is asked for once more: if
/// it came back in between, its program holds the finalizer and lets go of the block when the last pod has left.
async fn free(client: &Client, block: &AddressBlock) -> Result<Outcome, kube::Error> {
    let (name, node) = (block.name_any(), block.node().unwrap_or_default());
    let blocks: Api<AddressBlock> = Api::all(client.clone());
    if is_there(client, node).await? {
        return Ok(Outcome::Kept);
    }
    let precisely_this = Preconditions { uid: block.uid(), resource_version: block.resource_version() };
    let parameters = DeleteParams { preconditions: Some(precisely_this), ..DeleteParams::default() };
    // Without finalizers it is gone with this.
    if let Err(error) = blocks.delete(&name, &parameters).await {
        return when_changed(error);
    }
    let Some(present) = blocks.get_opt(&name).await?.filter(|present| present.uid() == block.uid()) else {
        return Ok(Outcome::Freed);
    };
    if is_there(client, node).await? {
        return Ok(Outcome::Kept);
    }
    let others: Vec<&String> =
        present.finalizers().iter().filter(|finalizer| *finalizer != COIL_FINALIZER).collect();
    let metadata = serde_json::json!({ "finalizers": others, "resourceVersion": present.resource_version() });
    let patch = serde_json::json!({ "metadata": metadata });
    match blocks.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => Ok(Outcome::Freed),
        Err(error) => when_changed(error),
    }
}

async fn is_there(client: &Client, node: &str) -> Result<bool, kube::Error> {
    Ok(Api::<Node>::all(client.clone()).get_metadata_opt(node).await?.is_some())
}

fn when_changed(error: kube::Error) -> Result<Outcome, kube::Error> {
    match error {
        kube::Error::Api(status) if status.code == 404 => Ok(Outcome::Freed),
        // The watch brings what it is now, and the next sweep looks again.
        kube::Error::Api(status) if status.code == 409 => Ok(Outcome::Kept),
        other => Err(other),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use axum::extract::{Request, State};
    use axum::http::StatusCode;
    use axum::response::{IntoResponse, Response};

    use super::*;

    fn block(node: Option<&str>, reserved: Option<&str>) -> Arc<AddressBlock> {
        let labels =
            serde_json::json!({ "coil.cybozu.com/node": node, "coil.cybozu.com/reserved": reserved });
        let mut labels = labels.as_object().unwrap().clone();
        labels.retain(|_, value| !value.is_null());
        let metadata = serde_json::json!({ "name": node.unwrap_or("none"), "labels": labels, "uid": "u",
            "resourceVersion": "7", "finalizers": [COIL_FINALIZER, "of.another/one"] });
        Arc::new(
            serde_json::from_value::<AddressBlock>(serde_json::json!({
                "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "metadata": metadata, "index": 0,
            }))
            .unwrap(),
        )
    }

    #[test]
    fn only_blocks_of_missing_nodes_are_orphans() {
        let blocks = [
            block(Some("here"), None),
            block(Some("gone"), None),
            block(Some("gone"), Some("true")),
            block(None, None),
        ];
        let nodes = BTreeSet::from(["here".to_owned()]);
        let found: Vec<String> = orphans(&blocks, &nodes).iter().map(|block| block.name_any()).collect();
        assert_eq!(found, ["gone"]);
    }

    /// An API server with one block and the answers of Nodes one after another. It notes what is written.
    struct Server {
        nodes: Mutex<Vec<bool>>,
        writes: Mutex<Vec<(String, serde_json::Value)>>,
        delete: u16,
    }

    async fn answer(State(server): State<Arc<Server>>, request: Request) -> Response {
        let (parts, body) = request.into_parts();
        let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
        let call = format!("{} {}", parts.method, parts.uri.path());
        let failure = |code: u16| {
            let status = serde_json::json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
                "reason": if code == 404 { "NotFound" } else { "Conflict" }});
            (StatusCode::from_u16(code).unwrap(), status.to_string()).into_response()
        };
        if parts.method != "GET" {
            server.writes.lock().unwrap().push((call.clone(), serde_json::from_slice(&body).unwrap()));
        }
        match call.split('/').nth(1) {
            Some("api") if server.nodes.lock().unwrap().pop().unwrap() => {
                serde_json::json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
                    "metadata": {"name": "gone"}})
                .to_string()
                .into_response()
            }
            Some("api") => failure(404),
            _ if call.starts_with("DELETE") && server.delete != 200 => failure(server.delete),
            _ => serde_json::to_string(&*block(Some("gone"), None)).unwrap().into_response(),
        }
    }

    /// Outcome and writes, when the node is there as `nodes` says, asked the first time and the second.
    async fn freeing(first: bool, second: bool, delete: u16) -> (Outcome, Vec<(String, serde_json::Value)>) {
        let server = Server { nodes: Mutex::new(vec![second, first]), writes: Mutex::default(), delete };
        let server = Arc::new(server);
        let router = axum::Router::new().fallback(answer).with_state(Arc::clone(&server));
        let outcome = free(&Client::new(router, "default"), &block(Some("gone"), None)).await.unwrap();
        let writes = server.writes.lock().unwrap().clone();
        (outcome, writes)
    }

    #[tokio::test]
    async fn only_the_block_that_was_looked_at_is_freed() {
        let (outcome, writes) = freeing(false, false, 200).await;
        assert_eq!((outcome, writes.len()), (Outcome::Freed, 2), "{writes:?}");
        assert!(writes[0].0.starts_with("DELETE "), "{writes:?}");
        assert_eq!(writes[0].1["preconditions"], serde_json::json!({"uid": "u", "resourceVersion": "7"}));
        let finalizers = serde_json::json!({"finalizers": ["of.another/one"], "resourceVersion": "7"});
        assert_eq!(writes[1].1["metadata"], finalizers);
    }

    #[tokio::test]
    async fn a_block_that_changed_or_whose_node_came_back_is_left_alone() {
        let (outcome, writes) = freeing(true, true, 200).await;
        assert_eq!((outcome, writes.len()), (Outcome::Kept, 0), "{writes:?}");
        let (outcome, writes) = freeing(false, false, 409).await;
        assert_eq!((outcome, writes.len()), (Outcome::Kept, 1), "{writes:?}");
        // The node came back between the two looks: its program has the finalizer.
        let (outcome, writes) = freeing(false, true, 200).await;
        assert_eq!((outcome, writes.len()), (Outcome::Kept, 1), "{writes:?}");
    }
}

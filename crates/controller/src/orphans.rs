//! Releases the blocks of deleted Nodes, whose own programs cannot.

use std::time::{Duration, Instant};

use fairlead_api::names::{COIL_FINALIZER, LABEL_REQUEST, is_object_name};
use fairlead_api::resources::AddressBlock;
use fairlead_cluster::metrics::declare;
use fairlead_cluster::writes::remove_finalizer;
use fairlead_ipam::orphans::{Absences, OwnedBlock};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, ListParams, Preconditions};
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client, ResourceExt};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::leader::Pauses;
use crate::stores::Stores;

/// Changes are collected this long: Nodes change all the time.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// Pause before a block is looked at again that could not be freed.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Releases blocks of deleted Nodes forever.
pub(crate) async fn run(
    client: Client,
    stores: Stores,
    [mut nodes_changed, mut blocks_changed]: [watch::Receiver<u64>; 2],
    metrics: OrphanMetrics,
    pauses: Pauses,
) {
    let mut absences = Absences::default();
    loop {
        let now = Instant::now();
        let blocks = stores.blocks.state();
        let owned: Vec<OwnedBlock<'_>> = blocks.iter().filter_map(|block| owned(block)).collect();
        let exists = |node: &str| stores.nodes.get(&ObjectRef::new(node)).is_some();
        let due = absences.observe(now, pauses.graces, &owned, exists);
        let mut pause = pauses.sweep_interval;
        for block in blocks.iter().filter(|block| block.uid().is_some_and(|uid| due.contains(&uid))) {
            let freed = try_release(&client, block, &metrics).await;
            pause = if freed { pause } else { pause.min(RETRY_INTERVAL) };
        }
        let next = absences.next_due(now, pauses.graces, &owned);
        let pause = next.map_or(pause, |next| pause.min(next.saturating_duration_since(now)));
        let changed = async {
            tokio::select! {
                _ = nodes_changed.changed() => {}
                _ = blocks_changed.changed() => {}
            }
            tokio::time::sleep(DEBOUNCE).await;
        };
        let _ = tokio::time::timeout(pause, changed).await;
    }
}

/// Reserved blocks and those without a node are never released.
fn owned(block: &AddressBlock) -> Option<OwnedBlock<'_>> {
    let uid = block.metadata.uid.as_deref()?;
    let node = block.node()?;
    let granted = block.labels().contains_key(LABEL_REQUEST);
    (!block.is_reserved()).then_some(OwnedBlock { uid, node, granted })
}

/// Whether it is released.
async fn try_release(client: &Client, block: &AddressBlock, metrics: &OrphanMetrics) -> bool {
    let name = block.name_any();
    let node = block.node().unwrap_or_default();
    let outcome = release(client, block).await;
    metrics.count(outcome.as_ref().ok());
    match outcome {
        Ok(Outcome::Freed) => tracing::info!(block = name, node, "released the block of a deleted Node"),
        Ok(Outcome::Kept) => {}
        Ok(Outcome::Held(ref finalizers)) => tracing::warn!(
            block = name,
            node,
            finalizers = finalizers.join(", "),
            "the block of a deleted Node is deleted, and finalizers of other programs keep it; remove them, or wait for these programs"
        ),
        Ok(Outcome::InUse) => {
            tracing::info!(block = name, node, "kept the block of a deleted Node: Pods of it are left");
        }
        Err(error) => {
            tracing::warn!(block = name, node, %error, "cannot release the block of a deleted Node; retrying");
            return false;
        }
    }
    outcome.is_ok_and(|outcome| outcome == Outcome::Freed)
}

/// Outcome of an attempt to free an orphaned block.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The block is gone.
    Freed,
    /// The block is being deleted, and exists until these finalizers of others are gone.
    Held(Vec<String>),
    /// Pods of its Node are left.
    InUse,
    /// The block is no orphan: its Node exists again, or the object has changed.
    Kept,
}

/// Counts orphaned blocks by what became of them.
#[derive(Debug, Clone)]
pub(crate) struct OrphanMetrics(Family<[(&'static str, &'static str); 1], Counter>);

impl OrphanMetrics {
    /// Declares them in `registry`.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let help = "Blocks of deleted Nodes: freed, held by finalizers of others, in use by Pods, kept because something changed meanwhile, or failed";
        Self(declare(registry, "orphan_blocks", help))
    }

    /// A block was released or kept; `None` if that failed.
    pub(crate) fn count(&self, outcome: Option<&Outcome>) {
        let result = match outcome {
            Some(Outcome::Freed) => "freed",
            Some(Outcome::Held(_)) => "held",
            Some(Outcome::InUse) => "in_use",
            Some(Outcome::Kept) => "kept",
            None => "failed",
        };
        self.0.get_or_create(&[("result", result)]).inc();
    }
}

/// Deletes exactly the object that was read, and only while neither its Node nor Pods of it exist; caches may lag behind.
///
/// Once the deletion has been accepted, no pod gets an address from the block. Then the Node is read again: if it was
/// created in between, its program owns the finalizer and releases the block when the last pod has left.
async fn release(client: &Client, block: &AddressBlock) -> Result<Outcome, kube::Error> {
    let name = block.name_any();
    let node = block.node().unwrap_or_default();
    let blocks: Api<AddressBlock> = Api::all(client.clone());
    if exists(client, node).await? {
        return Ok(Outcome::Kept);
    }
    if has_pods(client, node).await? {
        return Ok(Outcome::InUse);
    }
    let preconditions = Preconditions { uid: block.uid(), resource_version: block.resource_version() };
    let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    // Without finalizers this deletes it.
    if let Err(error) = blocks.delete(&name, &parameters).await {
        return if_stale(error);
    }
    let Some(present) = blocks.get_opt(&name).await?.filter(|present| present.uid() == block.uid()) else {
        return Ok(Outcome::Freed);
    };
    if exists(client, node).await? {
        return Ok(Outcome::Kept);
    }
    let removed = remove_finalizer(&blocks, &present, COIL_FINALIZER).await;
    removed.map_or_else(if_stale, |left| match left.finalizers() {
        [] => Ok(Outcome::Freed),
        held => Ok(Outcome::Held(held.to_vec())),
    })
}

/// The label of a block made by hand may be no name of a Node, and must not get into a URL then.
async fn exists(client: &Client, node: &str) -> Result<bool, kube::Error> {
    if !is_object_name(node) {
        return Ok(false);
    }
    Ok(Api::<Node>::all(client.clone()).get_metadata_opt(node).await?.is_some())
}

/// Whether there are Pods of a Node that have not ended. Kubernetes deletes the Pods of a deleted Node itself, within a
/// minute; until then their containers may run.
async fn has_pods(client: &Client, node: &str) -> Result<bool, kube::Error> {
    if !is_object_name(node) {
        return Ok(false);
    }
    let fields = format!("spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed");
    let parameters = ListParams::default().fields(&fields).limit(1);
    let pods = Api::<Pod>::all(client.clone()).list_metadata(&parameters).await?;
    Ok(!pods.items.is_empty())
}

fn if_stale(error: kube::Error) -> Result<Outcome, kube::Error> {
    match error {
        kube::Error::Api(status) if status.is_not_found() => Ok(Outcome::Freed),
        // The watch shows what it is now, and the next sweep decides again.
        kube::Error::Api(status) if status.is_conflict() => Ok(Outcome::Kept),
        other => Err(other),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

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
    fn reserved_blocks_and_those_of_no_node_are_not_released() {
        let node = |node, reserved| owned(&block(node, reserved)).map(|owned| owned.node.to_owned());
        assert_eq!(node(Some("gone"), None).as_deref(), Some("gone"));
        assert_eq!((node(Some("gone"), Some("true")), node(None, None)), (None, None));
    }

    /// An API server with one block and a sequence of answers about the Node. It records writes.
    struct Server {
        nodes: Mutex<Vec<bool>>,
        pods: usize,
        writes: Mutex<Vec<(String, serde_json::Value)>>,
        delete: u16,
        finalizers: Mutex<Vec<String>>,
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
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            if let Some(left) = body["metadata"]["finalizers"].as_array() {
                let left = left.iter().filter_map(|it| it.as_str().map(str::to_owned));
                *server.finalizers.lock().unwrap() = left.collect();
            }
            server.writes.lock().unwrap().push((call.clone(), body));
        }
        match call.split('/').nth(1) {
            Some("api") if parts.uri.path().ends_with("/pods") => {
                let query = parts.uri.query().unwrap_or_default();
                assert!(query.contains("spec.nodeName%3Dgone"), "{query}");
                let pod = serde_json::json!({ "metadata": { "name": "left" } });
                serde_json::json!({"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1",
                    "metadata": {}, "items": vec![pod; server.pods]})
                .to_string()
                .into_response()
            }
            Some("api") if server.nodes.lock().unwrap().pop().unwrap() => {
                serde_json::json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
                    "metadata": {"name": "gone"}})
                .to_string()
                .into_response()
            }
            Some("api") => failure(404),
            _ if call.starts_with("DELETE") && server.delete != 200 => failure(server.delete),
            _ => {
                let mut present = AddressBlock::clone(&block(Some("gone"), None));
                present.metadata.finalizers = Some(server.finalizers.lock().unwrap().clone());
                serde_json::to_string(&present).unwrap().into_response()
            }
        }
    }

    /// Outcome and writes; `first` and `second` say whether the Node exists when it is read.
    async fn releasing(
        first: bool,
        second: bool,
        pods: usize,
        delete: u16,
        finalizers: &[&str],
    ) -> (Outcome, Vec<(String, serde_json::Value)>) {
        let server = Server {
            nodes: Mutex::new(vec![second, first]),
            pods,
            writes: Mutex::default(),
            delete,
            finalizers: Mutex::new(finalizers.iter().copied().map(str::to_owned).collect()),
        };
        let server = Arc::new(server);
        let router = axum::Router::new().fallback(answer).with_state(Arc::clone(&server));
        let outcome = release(&Client::new(router, "default"), &block(Some("gone"), None)).await.unwrap();
        let writes = server.writes.lock().unwrap().clone();
        (outcome, writes)
    }

    const OWN: &[&str] = &[COIL_FINALIZER];

    #[tokio::test]
    async fn a_block_that_finalizers_of_others_keep_is_not_reported_as_freed() {
        let (outcome, _) = releasing(false, false, 0, 200, OWN).await;
        assert_eq!(outcome, Outcome::Freed);
        let (outcome, writes) = releasing(false, false, 0, 200, &["of.another/one"]).await;
        assert_eq!(outcome, Outcome::Held(vec!["of.another/one".to_owned()]), "{writes:?}");
    }

    #[tokio::test]
    async fn only_the_object_that_was_read_is_deleted() {
        let (outcome, writes) = releasing(false, false, 0, 200, &[COIL_FINALIZER, "of.another/one"]).await;
        let held = Outcome::Held(vec!["of.another/one".to_owned()]);
        assert_eq!((outcome, writes.len()), (held, 2), "{writes:?}");
        assert!(writes[0].0.starts_with("DELETE "), "{writes:?}");
        assert_eq!(writes[0].1["preconditions"], serde_json::json!({"uid": "u", "resourceVersion": "7"}));
        let finalizers = serde_json::json!({"finalizers": ["of.another/one"], "resourceVersion": "7"});
        assert_eq!(writes[1].1["metadata"], finalizers);
    }

    #[tokio::test]
    async fn a_block_that_changed_or_whose_node_exists_again_is_kept() {
        let (outcome, writes) = releasing(true, true, 0, 200, OWN).await;
        assert_eq!((outcome, writes.len()), (Outcome::Kept, 0), "{writes:?}");
        let (outcome, writes) = releasing(false, false, 0, 409, OWN).await;
        assert_eq!((outcome, writes.len()), (Outcome::Kept, 1), "{writes:?}");
        // The Node was created between the two reads: its program owns the finalizer.
        let (outcome, writes) = releasing(false, true, 0, 200, OWN).await;
        assert_eq!((outcome, writes.len()), (Outcome::Kept, 1), "{writes:?}");
    }

    #[tokio::test]
    async fn a_block_is_kept_while_pods_of_its_node_are_left() {
        let (outcome, writes) = releasing(false, false, 1, 200, OWN).await;
        assert_eq!((outcome, writes.len()), (Outcome::InUse, 0), "{writes:?}");
    }
}

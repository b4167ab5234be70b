//! Blocks of nodes that are gone: nobody else can free them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fairlead_api::names::COIL_FINALIZER;
use fairlead_api::resources::AddressBlock;
use k8s_openapi::api::core::v1::Node;
use kube::api::{DeleteParams, PartialObjectMeta, Patch, PatchParams};
use kube::runtime::reflector::Store;
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;

/// How often blocks are compared with nodes when no node changes.
const SWEEP: Duration = Duration::from_secs(300);

/// Blocks whose node is not among `nodes`. Reserved blocks and those without a node stay. Pure.
pub fn orphans<'a>(blocks: &'a [Arc<AddressBlock>], nodes: &BTreeSet<String>) -> Vec<&'a AddressBlock> {
    let orphaned = |block: &&Arc<AddressBlock>| {
        !block.is_reserved() && block.node().is_some_and(|node| !nodes.contains(node))
    };
    blocks.iter().filter(orphaned).map(AsRef::as_ref).collect()
}

/// Frees blocks of deleted nodes for ever.
pub async fn run(
    client: Client,
    nodes: Store<PartialObjectMeta<Node>>,
    blocks: Store<AddressBlock>,
    mut changed: watch::Receiver<u64>,
) {
    loop {
        let known: BTreeSet<String> = nodes.state().iter().map(|node| node.name_any()).collect();
        for block in orphans(&blocks.state(), &known) {
            if let Err(error) = free(&client, block).await {
                tracing::warn!(block = block.name_any(), %error, "cannot free the block of a deleted node; will try again");
            }
        }
        let _ = tokio::time::timeout(SWEEP, changed.changed()).await;
    }
}

/// Asks once more whether the node is gone before it takes the block: a cache may be behind.
async fn free(client: &Client, block: &AddressBlock) -> Result<(), kube::Error> {
    let (name, node) = (block.name_any(), block.node().unwrap_or_default());
    if Api::<Node>::all(client.clone()).get_metadata_opt(node).await?.is_some() {
        return Ok(());
    }
    let blocks: Api<AddressBlock> = Api::all(client.clone());
    let others: Vec<&String> =
        block.finalizers().iter().filter(|finalizer| *finalizer != COIL_FINALIZER).collect();
    let patch = serde_json::json!({ "metadata": { "finalizers": others } });
    let freed = async {
        blocks.delete(&name, &DeleteParams::default()).await?;
        blocks.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        Ok(())
    };
    match freed.await {
        Ok(()) => {
            tracing::info!(block = name, node, "freed the block of a deleted node");
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blocks_of_missing_nodes_are_orphans() {
        let block = |node: Option<&str>, reserved: Option<&str>| {
            let labels =
                serde_json::json!({ "coil.cybozu.com/node": node, "coil.cybozu.com/reserved": reserved });
            let labels: serde_json::Map<_, _> = labels
                .as_object()
                .unwrap()
                .clone()
                .into_iter()
                .filter(|(_, value)| !value.is_null())
                .collect();
            Arc::new(
                serde_json::from_value::<AddressBlock>(serde_json::json!({
                    "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock",
                    "metadata": { "name": node.unwrap_or("none"), "labels": labels }, "index": 0,
                }))
                .unwrap(),
            )
        };
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
}

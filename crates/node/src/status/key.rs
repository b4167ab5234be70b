//! The WireGuard key of this node: what it is, and replacing it.

use std::sync::Arc;

use fairlead_cluster::naming::some_of;
use fairlead_mesh::MeshView;
use fairlead_mesh::gather::keys::Keys;
use fairlead_wire::node::{RotateKeyRequest, RotateKeyResponse, StatusResponse};
use tonic::Status;

/// Most names in a sentence.
const MAX_NAMES: usize = 5;

/// Says which keys there are, and why the next one is not in use.
pub(super) fn describe(keys: &Keys, answer: &mut StatusResponse) {
    answer.public_key = keys.public_key.to_string();
    let Some(next) = &keys.next else { return };
    answer.next_public_key = next.public_key.to_string();
    answer.problems.extend(next.waits_for.as_ref().map(|why| {
        format!("the next WireGuard key of this node is not in use yet: {why}; this node keeps trying")
    }));
}

/// Begins to replace the key.
pub(super) async fn rotate(
    node: &str,
    mesh: &MeshView,
    RotateKeyRequest { force }: RotateKeyRequest,
) -> Result<RotateKeyResponse, Status> {
    let (Some(store), Some(report)) = (mesh.keys(), mesh.snapshot().report) else {
        return Err(Status::failed_precondition("this node is in no mesh; see `fairlead status`"));
    };
    let external: Vec<String> = report.external.iter().map(|peer| peer.name.clone()).collect();
    if !(force || external.is_empty() || store.current().next.is_some()) {
        return Err(Status::failed_precondition(format!(
            "Peers have the public key of this node in their configuration ({}), and lose their tunnel with it until they have the next one: \
             print it with `fairlead peer show`, or `fairlead showconf peer`, once the key is replaced. --force replaces it",
            some_of(&external, MAX_NAMES)
        )));
    }
    let store = Arc::clone(store);
    let begun = tokio::task::spawn_blocking(move || store.begin(rand::random())).await;
    let keys = begun.map_err(|error| Status::internal(error.to_string()))?;
    let keys = keys.map_err(|error| Status::internal(error.to_string()))?;
    Ok(RotateKeyResponse {
        node: node.to_owned(),
        public_key: keys.public_key.to_string(),
        next_public_key: keys.next_public_key().map(|key| key.to_string()).unwrap_or_default(),
        external_peers: external,
    })
}

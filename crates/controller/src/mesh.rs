//! The status of WireKubeMeshes: how many peers are connected.

use std::sync::Arc;
use std::time::Duration;

use fairlead_api::resources::{WireKubeMesh, WireKubePeer};
use fairlead_cluster::writes::is_stale;
use kube::api::{Patch, PatchParams};
use kube::runtime::reflector::Store;
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;

/// Changes are collected this long: a node that joins changes the status of all others within a second.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// Interval without a change, for writes that failed.
const RESYNC_INTERVAL: Duration = Duration::from_secs(30);

/// Connected peers and all peers. Pure.
pub(crate) fn count(peers: &[Arc<WireKubePeer>]) -> (i32, i32) {
    let ready =
        peers.iter().filter(|peer| peer.status.as_ref().is_some_and(|s| s.connected == Some(true))).count();
    let clamp = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    (clamp(ready), clamp(peers.len()))
}

/// Keeps the counts current forever.
pub(crate) async fn run(
    client: Client,
    meshes: Store<WireKubeMesh>,
    peers: Store<WireKubePeer>,
    [mut meshes_changed, mut peers_changed]: [watch::Receiver<u64>; 2],
) {
    let api: Api<WireKubeMesh> = Api::all(client);
    loop {
        let (ready, total) = count(&peers.state());
        for mesh in meshes.state() {
            let present = mesh.status.clone().unwrap_or_default();
            if (present.ready_peers, present.total_peers) == (Some(ready), Some(total)) {
                continue;
            }
            let patch = serde_json::json!({ "status": { "readyPeers": ready, "totalPeers": total } });
            let written =
                api.patch_status(&mesh.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await;
            match written {
                Ok(_) => {}
                Err(error) if is_stale(&error) => {}
                Err(error) => {
                    tracing::warn!(mesh = mesh.name_any(), %error, "cannot write the status; retrying")
                }
            }
        }
        let changed = async {
            tokio::select! {
                _ = meshes_changed.changed() => {}
                _ = peers_changed.changed() => {}
            }
        };
        let _ = tokio::time::timeout(RESYNC_INTERVAL, changed).await;
        tokio::time::sleep(DEBOUNCE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_connected_peers_are_ready() {
        let peer = |connected: Option<bool>| {
            Arc::new(
                serde_json::from_value::<WireKubePeer>(serde_json::json!({
                    "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer", "metadata": { "name": "n" },
                    "spec": {}, "status": connected.map(|connected| serde_json::json!({ "connected": connected })),
                }))
                .unwrap(),
            )
        };
        assert_eq!(count(&[peer(Some(true)), peer(Some(false)), peer(None)]), (1, 3));
    }
}

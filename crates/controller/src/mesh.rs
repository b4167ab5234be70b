//! The status of WireKubeMeshes: how many peers are connected.

use std::sync::Arc;
use std::time::Duration;

use fairlead_api::conditions::{Finding, condition};
use fairlead_api::resources::{WireKubeMesh, WireKubePeer};
use fairlead_cluster::writes::apply_status;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::runtime::reflector::Store;
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;

use crate::changes::Changes;

/// Field manager of the counts and of the condition.
const MANAGER: &str = "fairlead-controller-mesh";
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

/// The condition `Ready`. Pure.
fn ready_condition(ready: i32, total: i32, present: &[Condition], now: jiff::Timestamp) -> Condition {
    let holds = ready == total;
    let reason = if holds { "Connected" } else { "PeersNotConnected" };
    let message =
        format!("{ready} of {total} peers are connected; `fairlead status` says why others are not");
    condition(present, Finding { type_: "Ready", holds, reason, message }, None, Time(now))
}

/// Keeps the counts current forever.
pub(crate) async fn run(
    client: Client,
    meshes: Store<WireKubeMesh>,
    peers: Store<WireKubePeer>,
    watches: [watch::Receiver<u64>; 2],
) {
    let api: Api<WireKubeMesh> = Api::all(client);
    let mut changes = Changes { watches, resync: RESYNC_INTERVAL, debounce: DEBOUNCE };
    loop {
        let (ready, total) = count(&peers.state());
        for mesh in meshes.state() {
            let present = mesh.status.clone().unwrap_or_default();
            let condition = ready_condition(ready, total, &present.conditions, jiff::Timestamp::now());
            if (present.ready_peers, present.total_peers) == (Some(ready), Some(total))
                && present.conditions.contains(&condition)
            {
                continue;
            }
            let name = mesh.name_any();
            let patch = serde_json::json!({
                "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh", "metadata": { "name": name },
                "status": { "readyPeers": ready, "totalPeers": total, "conditions": [condition] },
            });
            if let Err(error) = apply_status(&api, &name, MANAGER, &patch).await {
                tracing::warn!(mesh = name, %error, "cannot write the status; retrying");
            }
        }
        changes.next().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_condition_says_how_many_are_missing_and_keeps_its_time() {
        let at = |seconds| jiff::Timestamp::from_second(seconds).unwrap();
        let first = ready_condition(2, 3, &[], at(1));
        assert_eq!((first.status.as_str(), first.reason.as_str()), ("False", "PeersNotConnected"));
        assert!(first.message.starts_with("2 of 3 peers are connected"), "{}", first.message);
        let later = ready_condition(1, 3, std::slice::from_ref(&first), at(2));
        assert_eq!(later.last_transition_time, first.last_transition_time);
        let ready = ready_condition(3, 3, &[later], at(3));
        assert_eq!((ready.status.as_str(), ready.last_transition_time.0), ("True", at(3)));
    }

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

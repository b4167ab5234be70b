//! Deletes WireKubePeers whose Node is gone and which the garbage collection of Kubernetes does not delete: it goes by owner references,
//! which the holder of a stolen token could take away before a policy refused it. Else the peer of a machine that was removed, and what
//! was copied of its Node, would stay in the mesh.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::names::LABEL_WIREKUBE_NODE;
use fairlead_api::resources::WireKubePeer;
use k8s_openapi::api::core::v1::Node;
use kube::api::{DeleteParams, Preconditions};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;

use crate::changes::Changes;

/// Time that a Node has to be gone: the garbage collection of Kubernetes takes seconds, and a Node may be registered anew.
const GRACE: Duration = Duration::from_secs(60);
/// Changes are collected this long: Nodes change all the time.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// Interval without a change.
const RESYNC_INTERVAL: Duration = Duration::from_secs(10);

/// Deletes stray peers forever, after the first lists.
pub(crate) async fn run(
    client: Client,
    nodes: Store<Node>,
    peers: Store<WireKubePeer>,
    mut watches: [watch::Receiver<u64>; 2],
) {
    // In half a list every Node is gone that comes later.
    for watch in &mut watches {
        if watch.wait_for(|generation| *generation > 0).await.is_err() {
            return;
        }
    }
    let mut changes = Changes { watches, resync: RESYNC_INTERVAL, debounce: DEBOUNCE };
    let mut absences = Absences::default();
    loop {
        let node = |name: &str| nodes.get(&ObjectRef::new(name)).map(|node| node.uid().unwrap_or_default());
        for peer in absences.due(&peers.state(), node, Instant::now()) {
            delete(&client, &peer).await;
        }
        changes.next().await;
    }
}

/// Deletes the object that was read, while its Node is gone by what the API server says now.
async fn delete(client: &Client, peer: &WireKubePeer) {
    let name = peer.name_any();
    let node = match Api::<Node>::all(client.clone()).get_metadata_opt(&name).await {
        Ok(node) => node.map(|node| node.metadata.uid.unwrap_or_default()),
        Err(error) => {
            tracing::warn!(peer = name, %error, "cannot read the Node of a WireKubePeer; retrying");
            return;
        }
    };
    if !is_stray(peer, node.as_deref()) {
        return;
    }
    let preconditions = Preconditions { uid: peer.uid(), resource_version: None };
    let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    match Api::<WireKubePeer>::all(client.clone()).delete(&name, &parameters).await {
        Ok(_) => tracing::info!(peer = name, "deleted the WireKubePeer of a deleted Node"),
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {}
        Err(error) => {
            tracing::warn!(peer = name, %error, "cannot delete the WireKubePeer of a deleted Node; retrying");
        }
    }
}

/// Times since which peers are stray, by UID.
#[derive(Debug, Default)]
struct Absences(BTreeMap<String, Instant>);

impl Absences {
    /// Peers that have been stray for long enough. `node` gives the UID of the Node of a name.
    fn due(
        &mut self,
        peers: &[Arc<WireKubePeer>],
        node: impl Fn(&str) -> Option<String>,
        now: Instant,
    ) -> Vec<Arc<WireKubePeer>> {
        let is_stray = |peer: &&Arc<WireKubePeer>| is_stray(peer, node(&peer.name_any()).as_deref());
        let stray: BTreeMap<String, &Arc<WireKubePeer>> =
            peers.iter().filter(is_stray).filter_map(|peer| Some((peer.uid()?, peer))).collect();
        self.0.retain(|uid, _| stray.contains_key(uid));
        let mut due = Vec::new();
        for (uid, peer) in stray {
            let since = *self.0.entry(uid).or_insert(now);
            if now.saturating_duration_since(since) >= GRACE {
                due.push(Arc::clone(peer));
            }
        }
        due
    }
}

/// Whether the Node that a peer is of is gone, by name and UID; `node` is the UID of the Node of its name. A peer that an administrator
/// made for a machine that never was a Node is none.
fn is_stray(peer: &WireKubePeer, node: Option<&str>) -> bool {
    let name = peer.name_any();
    let owners = peer.metadata.owner_references.iter().flatten();
    let mut owners = owners.filter(|owner| owner.kind == "Node" && owner.name == name).peekable();
    match node {
        Some(uid) => owners.peek().is_some() && owners.all(|owner| owner.uid != uid),
        None => {
            let was_copied = peer.status.as_ref().is_some_and(|status| status.node.is_some());
            owners.peek().is_some() || was_copied || peer.labels().contains_key(LABEL_WIREKUBE_NODE)
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn peer(metadata: serde_json::Value, status: serde_json::Value) -> Arc<WireKubePeer> {
        let mut peer = json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer",
            "metadata": { "name": "n1", "uid": "peer" }, "spec": {}, "status": status,
        });
        peer["metadata"].as_object_mut().unwrap().extend(metadata.as_object().unwrap().clone());
        Arc::new(serde_json::from_value(peer).unwrap())
    }

    fn owned(uid: &str) -> serde_json::Value {
        json!({ "ownerReferences": [{ "apiVersion": "v1", "kind": "Node", "name": "n1", "uid": uid }] })
    }

    #[test]
    fn a_peer_is_stray_once_its_node_is_gone_by_name_or_uid_whatever_was_taken_away() {
        let copied = json!({ "node": { "internalIPs": ["192.0.2.1"] } });
        let labelled = json!({ "labels": { "wirekube.io/node": "n1" } });
        for (metadata, status) in
            [(owned("old"), json!(null)), (labelled, json!(null)), (json!({}), copied.clone())]
        {
            assert!(is_stray(&peer(metadata, status), None));
        }
        assert!(is_stray(&peer(owned("old"), copied.clone()), Some("new")), "another Node has its name");
        assert!(!is_stray(&peer(owned("new"), copied.clone()), Some("new")));
        assert!(!is_stray(&peer(json!({}), copied), Some("new")), "of which Node it is nothing says");
        let by_hand = peer(json!({}), json!(null));
        assert!(!is_stray(&by_hand, None) && !is_stray(&by_hand, Some("new")));
    }

    #[test]
    fn a_stray_peer_is_deleted_after_its_node_was_gone_all_the_time() {
        let (mut absences, start) = (Absences::default(), Instant::now());
        let peers = [peer(owned("u"), json!(null))];
        let mut due = |seconds, node: Option<&str>| {
            absences.due(&peers, |_| node.map(str::to_owned), start + Duration::from_secs(seconds)).len()
        };
        assert_eq!((due(0, None), due(59, None)), (0, 0));
        assert_eq!((due(59, Some("u")), due(61, None), due(120, None)), (0, 0, 0), "it was registered again");
        assert_eq!((due(121, None), due(122, None)), (1, 1));
    }
}

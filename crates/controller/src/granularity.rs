//! Granularity in use: the one that the WireKubeMesh asks for, once the nodes have prepared for it.
//!
//! A node that has not would lose packets of those that use another one, so a live node that does not say that it has, as an old
//! program never does, keeps the granularity as it was, and is named. A node counts as live unless Kubernetes lost its kubelet (its Node
//! is `Ready: Unknown`) and no live node lists it in `status.peerTransports` of its WireKubePeer. None of that compares clocks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::conditions::{Finding, condition};
use fairlead_api::resources::{GRANULARITY_IN_USE, Granularity, WireKubeMesh, WireKubePeer};
use fairlead_cluster::events::{EventPublisher, PendingEvent};
use fairlead_cluster::naming::some_of;
use fairlead_cluster::writes::apply_status;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::runtime::reflector::Store;
use kube::{Api, Client, Resource as _, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::changes::Changes;

/// Field manager of the granularity and of the condition.
const MANAGER: &str = "fairlead-controller-granularity";
/// Changes are collected this long.
const DEBOUNCE: Duration = Duration::from_millis(200);
/// Interval without a change, for what has waited long enough.
const RESYNC_INTERVAL: Duration = Duration::from_secs(5);
/// Time that nodes have to prepare before a message names them, and the shortest time between two such messages: every node reads them.
const PATIENCE: Duration = Duration::from_secs(30);
/// Most names in a message.
const MAX_NAMES: usize = 8;

/// Keeps the granularity current forever.
pub(crate) async fn run(
    client: Client,
    meshes: Store<WireKubeMesh>,
    nodes: Store<Node>,
    peers: Store<WireKubePeer>,
    mut watches: [watch::Receiver<u64>; 3],
    events: EventPublisher,
) {
    // In half a list nodes are missing that have not prepared.
    for watch in &mut watches {
        if watch.wait_for(|generation| *generation > 0).await.is_err() {
            return;
        }
    }
    let api: Api<WireKubeMesh> = Api::all(client);
    let mut changes = Changes { watches, resync: RESYNC_INTERVAL, debounce: DEBOUNCE };
    let mut patience = Patience::default();
    loop {
        if let Some(mesh) = WireKubeMesh::selected(&meshes.state()) {
            let waits_for = waits_for(mesh, &nodes.state(), &peers.state());
            if let Some(progress) = patience.progress(mesh, &waits_for, Instant::now()) {
                tell(&api, &events, mesh, progress).await;
            }
        }
        changes.next().await;
    }
}

/// Progress of a change of the granularity, as the status says it.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    /// The granularity of the spec is in use.
    InUse,
    /// Nodes keep it from that; the message names them.
    Pending(String),
}

/// Writes the status of the mesh; of a change that is pending, an Event as well.
async fn tell(api: &Api<WireKubeMesh>, events: &EventPublisher, mesh: &WireKubeMesh, progress: Progress) {
    let patch = status(mesh, &progress, jiff::Timestamp::now());
    let name = mesh.name_any();
    if let Err(error) = apply_status(api, &name, MANAGER, &patch).await {
        tracing::warn!(mesh = name, %error, "cannot write the granularity; retrying");
    }
    if let Progress::Pending(note) = progress {
        events.warn(PendingEvent {
            regarding: mesh.object_ref(&()),
            reason: "GranularityPending",
            action: "ChangeGranularity",
            note,
        });
    }
}

/// Names of live nodes that have not prepared for the granularity of the spec, sorted. Pure.
fn waits_for(mesh: &WireKubeMesh, nodes: &[Arc<Node>], peers: &[Arc<WireKubePeer>]) -> Vec<String> {
    let wanted = mesh.wanted_granularity();
    if mesh.status.as_ref().and_then(|status| status.granularity).is_none_or(|in_use| in_use == wanted) {
        return Vec::new();
    }
    let known: BTreeMap<String, bool> = nodes.iter().map(|node| (node.name_any(), is_lost(node))).collect();
    let has_kubelet = |peer: &&Arc<WireKubePeer>| known.get(&peer.name_any()) == Some(&false);
    let seen = peers.iter().filter(has_kubelet).filter_map(|peer| peer.status.as_ref());
    let seen: BTreeSet<&String> = seen.flat_map(|status| status.peer_transports.keys()).collect();
    let is_live = |peer: &&Arc<WireKubePeer>| {
        let name = peer.name_any();
        // A WireKubePeer without a Node is one that was deleted, and one without a key is no member yet.
        !peer.spec.public_key.is_empty()
            && known.get(&name).is_some_and(|is_lost| !is_lost || seen.contains(&name))
    };
    let is_prepared = |peer: &&Arc<WireKubePeer>| {
        peer.status.as_ref().and_then(|status| status.prepared_granularity) == Some(wanted)
    };
    let waits = peers.iter().filter(is_live).filter(|peer| !is_prepared(peer));
    let mut names: Vec<String> = waits.map(|peer| peer.name_any()).collect();
    names.sort();
    names
}

/// Whether Kubernetes has lost the kubelet.
fn is_lost(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "Unknown")
}

/// Start of the wait for nodes, by the granularity that is wanted, and time of the last message.
#[derive(Debug, Default)]
struct Patience {
    since: Option<(Granularity, Instant)>,
    said: Option<Instant>,
}

impl Patience {
    /// Progress that the status is to say; `None` if it says so already, or does not yet.
    fn progress(&mut self, mesh: &WireKubeMesh, waits_for: &[String], now: Instant) -> Option<Progress> {
        let present = mesh.status.clone().unwrap_or_default();
        let wanted = mesh.wanted_granularity();
        if waits_for.is_empty() {
            *self = Self::default();
            let waited =
                present.conditions.iter().any(|it| it.type_ == GRANULARITY_IN_USE && it.status == "False");
            return (present.granularity != Some(wanted) || waited).then_some(Progress::InUse);
        }
        let since = self.since.filter(|(granularity, _)| *granularity == wanted).unwrap_or((wanted, now));
        if self.since.replace(since) != Some(since) {
            self.said = None;
        }
        let has_waited = |since: Instant| now.saturating_duration_since(since) >= PATIENCE;
        if !has_waited(since.1) || self.said.is_some_and(|said| !has_waited(said)) {
            return None;
        }
        let message = message(&mesh.name_any(), present.granularity.unwrap_or(wanted), wanted, waits_for);
        let is_known =
            |it: &Condition| it.type_ == GRANULARITY_IN_USE && it.status == "False" && it.message == message;
        if present.conditions.iter().any(is_known) {
            return None;
        }
        self.said = Some(now);
        Some(Progress::Pending(message))
    }
}

fn message(mesh: &str, in_use: Granularity, wanted: Granularity, waits_for: &[String]) -> String {
    format!(
        "WireKubeMesh {mesh}: granularity {} stays in use until these nodes have prepared for {}: {}; update their node programs, \
         see why these do not run, or delete the Nodes that are gone",
        in_use.as_str(),
        wanted.as_str(),
        some_of(waits_for, MAX_NAMES)
    )
}

/// Patch of the status of the mesh. Pure.
fn status(mesh: &WireKubeMesh, progress: &Progress, now: jiff::Timestamp) -> Value {
    let present = mesh.status.clone().unwrap_or_default();
    let wanted = mesh.wanted_granularity();
    let (in_use, reason, message) = match progress {
        Progress::InUse => (wanted, "NodesPrepared", format!("granularity {} is in use", wanted.as_str())),
        Progress::Pending(message) => {
            (present.granularity.unwrap_or(wanted), "NodesNotPrepared", message.clone())
        }
    };
    let holds = *progress == Progress::InUse;
    let finding = Finding { type_: GRANULARITY_IN_USE, holds, reason, message };
    let condition = condition(&present.conditions, finding, mesh.metadata.generation, Time(now));
    json!({
        "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh", "metadata": { "name": mesh.name_any() },
        "status": { "granularity": in_use, "conditions": [condition] },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn mesh(wanted: &str, status: &Value) -> WireKubeMesh {
        let object = json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh", "metadata": { "name": "default" },
            "spec": { "topology": { "granularity": wanted } }, "status": status,
        });
        serde_json::from_value(object).unwrap()
    }

    fn node(name: &str, ready: &str) -> Arc<Node> {
        let status = json!({ "conditions": [{ "type": "Ready", "status": ready }] });
        Arc::new(serde_json::from_value(json!({ "metadata": { "name": name }, "status": status })).unwrap())
    }

    fn peer(name: &str, prepared: Option<&str>, reaches: &[&str]) -> Arc<WireKubePeer> {
        let reached: BTreeMap<&str, &str> = reaches.iter().map(|name| (*name, "direct")).collect();
        let object = json!({
            "metadata": { "name": name }, "spec": { "publicKey": "x" },
            "status": { "preparedGranularity": prepared, "peerTransports": reached },
        });
        Arc::new(serde_json::from_value(object).unwrap())
    }

    #[test]
    fn each_live_node_has_to_say_so_and_a_dead_one_does_not() {
        let mesh = mesh("location", &json!({ "granularity": "full" }));
        let nodes = [node("a", "True"), node("b", "False"), node("c", "Unknown"), node("d", "True")];
        let waits = |peers: &[Arc<WireKubePeer>]| waits_for(&mesh, &nodes, peers);
        let (a, b) = (peer("a", Some("location"), &[]), peer("b", Some("location"), &[]));
        assert_eq!(waits(&[a.clone(), b.clone()]), [""; 0]);
        let c = peer("c", Some("full"), &["a", "d"]);
        assert_eq!(
            waits(&[a.clone(), b.clone(), c.clone()]),
            [""; 0],
            "its kubelet and its tunnels are gone"
        );
        let sees_c = peer("a", Some("location"), &["c"]);
        assert_eq!(waits(&[sees_c, b.clone(), c]), ["c"], "only its API server is gone");
        assert_eq!(waits(&[peer("d", None, &[]), a.clone(), peer("b", Some("full"), &[])]), ["b", "d"]);
        assert_eq!(waits(&[a, b, peer("e", None, &[])]), [""; 0], "it has no Node");
    }

    #[test]
    fn a_mesh_that_never_had_another_one_waits_for_no_node() {
        let old = [peer("a", None, &[])];
        for status in [json!({}), json!({ "granularity": "location" })] {
            assert_eq!(waits_for(&mesh("location", &status), &[node("a", "True")], &old), [""; 0]);
        }
    }

    #[test]
    fn nodes_are_named_after_a_while_and_rarely_and_the_change_is_one_write() {
        let (mut patience, start) = (Patience::default(), Instant::now());
        let mut mesh = mesh("location", &json!({ "granularity": "full" }));
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(patience.progress(&mesh, &names(&["a", "b"]), start), None);
        let at = start + PATIENCE;
        let progress = patience.progress(&mesh, &names(&["a", "b"]), at).unwrap();
        let Progress::Pending(message) = &progress else { panic!("{progress:?}") };
        assert!(message.contains("full stays in use") && message.contains("location: a, b;"), "{message}");
        let written = status(&mesh, &progress, jiff::Timestamp::UNIX_EPOCH);
        assert_eq!(written["status"]["granularity"], "full");
        assert_eq!(written["status"]["conditions"][0]["status"], "False");
        mesh.status = serde_json::from_value(written["status"].clone()).unwrap();
        assert_eq!(patience.progress(&mesh, &names(&["b"]), at + SECOND), None, "every node reads it");
        assert_eq!(patience.progress(&mesh, &names(&["a", "b"]), at + PATIENCE), None, "said");
        let later = patience.progress(&mesh, &names(&["b"]), at + PATIENCE);
        assert!(matches!(later, Some(Progress::Pending(_))));
        assert_eq!(patience.progress(&mesh, &[], at), Some(Progress::InUse));
        let written = status(&mesh, &Progress::InUse, jiff::Timestamp::UNIX_EPOCH);
        assert_eq!(written["status"]["granularity"], "location");
        mesh.status = serde_json::from_value(written["status"].clone()).unwrap();
        assert_eq!(patience.progress(&mesh, &[], at), None);
        assert_eq!(mesh.status.unwrap().conditions[0].status, "True");
    }

    #[test]
    fn of_many_nodes_some_are_named() {
        let names: Vec<String> = (0..20).map(|number| format!("n{number}")).collect();
        let message = message("default", Granularity::Full, Granularity::Location, &names);
        assert!(message.contains("n7 and 12 more") && message.len() < 1000, "{message}");
    }
}

//! The condition `NetworkUnavailable` of Nodes. Controllers of clouds set it on Nodes for which they make routes, and the scheduler places no
//! pod there before it is `False`. Where Fairlead is the network, it is set to `False` once the pod of the node program is `Ready`, and only
//! where another program had set it: a Node without the condition gets none.
//!
//! The condition is the only part of a Node that the controller writes (`deploy/policy/network-unavailable.yaml`); node programs write none.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::names::{NODE_PROGRAM, SYSTEM_NAMESPACE};
use fairlead_cluster::events::{EventPublisher, PendingEvent};
use fairlead_cluster::writes::apply_status;
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node, NodeCondition, Pod};
use kube::api::ListParams;
use kube::runtime::reflector::Store;
use kube::{Api, Client, Resource as _, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::changes::Changes;

/// The condition (k8s.io/api/core/v1, `NodeNetworkUnavailable`).
pub(crate) const NETWORK_UNAVAILABLE: &str = "NetworkUnavailable";
/// Field manager of the condition.
const MANAGER: &str = "fairlead-controller-network";
/// Reason of the condition, in the manner of other networks.
const REASON: &str = "FairleadIsUp";
/// Changes are collected this long.
const DEBOUNCE: Duration = Duration::from_millis(500);
/// Interval of looks for node programs that have become ready: their pods are not watched.
const RESYNC_INTERVAL: Duration = Duration::from_secs(3);
/// Nodes whose node program is looked for at once; the others have their turn in the next look.
const MAX_ASKED: usize = 32;
/// Requests at a time.
const CONCURRENCY: usize = 8;
/// Shortest pauses after the first, second and further writes for a Node; the last one repeats.
const PAUSES: [Duration; 4] =
    [Duration::from_secs(10), Duration::from_secs(10), Duration::from_secs(60), Duration::from_secs(600)];
/// Writes for one Node from which on an Event says that another program sets the condition again and again.
const WRITES_BEFORE_EVENT: usize = 3;
/// Time without another write after which the earlier ones are forgotten.
const MEMORY: Duration = Duration::from_secs(3600);

/// Keeps the conditions of Nodes on which the node program is ready forever.
pub(crate) async fn run(
    client: Client,
    nodes: Store<Node>,
    changed: watch::Receiver<u64>,
    events: EventPublisher,
) {
    let mut changes = Changes { watches: [changed], resync: RESYNC_INTERVAL, debounce: DEBOUNCE };
    let mut memory = Memory::default();
    loop {
        let due = memory.due(&nodes.state(), Instant::now());
        let ready: Vec<_> = stream::iter(due)
            .map(|node| {
                let client = &client;
                async move { is_ready(client, &node.name_any()).await.then_some(node) }
            })
            .buffer_unordered(CONCURRENCY)
            .collect()
            .await;
        for node in ready.into_iter().flatten() {
            clear(&client, &node, &mut memory, &events).await;
        }
        changes.next().await;
    }
}

/// Whether a pod of the node program is `Ready` on the node.
async fn is_ready(client: &Client, node: &str) -> bool {
    let labels = format!("app.kubernetes.io/name=coil,app.kubernetes.io/component={NODE_PROGRAM}");
    let fields = format!("spec.nodeName={node}");
    let parameters = ListParams::default().labels(&labels).fields(&fields);
    let pods = Api::<Pod>::namespaced(client.clone(), SYSTEM_NAMESPACE);
    match pods.list(&parameters).await {
        Ok(pods) => pods.items.iter().any(has_network),
        Err(error) => {
            tracing::warn!(node, %error, "cannot read whether the node program is ready; retrying");
            false
        }
    }
}

/// Whether the kubelet says that the node program is ready and not about to end.
fn has_network(pod: &Pod) -> bool {
    let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    pod.metadata.deletion_timestamp.is_none()
        && conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

async fn clear(client: &Client, node: &Node, memory: &mut Memory, events: &EventPublisher) {
    let name = node.name_any();
    let patch = patch(&name, jiff::Timestamp::now());
    if let Err(error) = apply_status(&Api::<Node>::all(client.clone()), &name, MANAGER, &patch).await {
        tracing::warn!(node = name, %error, "cannot set the condition {NETWORK_UNAVAILABLE} of the Node to False; retrying");
        return;
    }
    let writes = memory.wrote(node, Instant::now());
    tracing::info!(node = name, writes, "set the condition {NETWORK_UNAVAILABLE} of the Node to False");
    if writes >= WRITES_BEFORE_EVENT {
        events.warn(PendingEvent {
            regarding: node.object_ref(&()),
            reason: "NetworkUnavailableSetAgain",
            action: "SetCondition",
            note: note(node),
        });
    }
}

/// Reason and advice of the Event. Pure.
fn note(node: &Node) -> String {
    let reason = unavailable(node).and_then(|condition| condition.reason.as_deref()).unwrap_or("none given");
    format!(
        "another program sets the condition {NETWORK_UNAVAILABLE} of this Node to True again and again (its reason: {reason}), although \
         the node program is ready; no pod is placed here meanwhile. Fairlead needs no routes of the cloud: run the cloud controller manager with \
         --configure-cloud-routes=false"
    )
}

/// The condition, while it is true.
fn unavailable(node: &Node) -> Option<&NodeCondition> {
    let mut conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.find(|condition| condition.type_ == NETWORK_UNAVAILABLE && condition.status == "True")
}

/// Patch of the status of a Node. Pure.
fn patch(node: &str, now: jiff::Timestamp) -> Value {
    let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let condition = json!({
        "type": NETWORK_UNAVAILABLE, "status": "False", "reason": REASON,
        "message": "Fairlead's node program is ready on this node",
        "lastHeartbeatTime": now, "lastTransitionTime": now,
    });
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": node },
        "status": { "conditions": [condition] },
    })
}

/// Writes of conditions, by the UIDs of Nodes.
#[derive(Debug, Default)]
struct Memory {
    writes: BTreeMap<String, (usize, Instant)>,
    /// Name of the last Node that was due, where not all could be asked.
    last: Option<String>,
}

impl Memory {
    /// Nodes with the condition for which the time of another write has come. A watch that is late shows the condition for a moment
    /// longer, and a program that fights for it is answered more and more rarely.
    fn due(&mut self, nodes: &[Arc<Node>], now: Instant) -> Vec<Arc<Node>> {
        let present: BTreeSet<String> = nodes.iter().filter_map(|node| node.uid()).collect();
        let elapsed = |since: Instant| now.saturating_duration_since(since);
        self.writes.retain(|uid, (_, at)| present.contains(uid) && elapsed(*at) < MEMORY);
        let may_write = |node: &Node| {
            let Some((count, at)) = node.uid().and_then(|uid| self.writes.get(&uid).copied()) else {
                return true;
            };
            let pause = PAUSES.get(count.saturating_sub(1)).or(PAUSES.last());
            pause.is_none_or(|pause| elapsed(at) >= *pause)
        };
        let is_due = |node: &&Arc<Node>| unavailable(node).is_some() && may_write(node);
        let mut due: Vec<Arc<Node>> = nodes.iter().filter(is_due).cloned().collect();
        due.sort_by_key(|node| node.name_any());
        if let Some(last) = self.last.take() {
            let next = due.partition_point(|node| node.name_any() <= last);
            due.rotate_left(next);
        }
        if due.len() > MAX_ASKED {
            due.truncate(MAX_ASKED);
            self.last = due.last().map(|node| node.name_any());
        }
        due
    }

    /// The condition of a Node was written; returns how often, this time included.
    fn wrote(&mut self, node: &Node, now: Instant) -> usize {
        let (count, at) = self.writes.entry(node.uid().unwrap_or_default()).or_insert((0, now));
        (*count, *at) = (count.saturating_add(1), now);
        *count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn node(name: &str, conditions: &Value) -> Arc<Node> {
        let metadata = json!({ "name": name, "uid": format!("uid of {name}") });
        let object = json!({ "metadata": metadata, "status": { "conditions": conditions } });
        Arc::new(serde_json::from_value(object).unwrap())
    }

    fn cut_off(name: &str) -> Arc<Node> {
        let condition = json!({ "type": "NetworkUnavailable", "status": "True", "reason": "NoRouteCreated" });
        node(name, &json!([{ "type": "Ready", "status": "True" }, condition]))
    }

    fn names(nodes: &[Arc<Node>]) -> Vec<String> {
        nodes.iter().map(|node| node.name_any()).collect()
    }

    #[test]
    fn only_where_another_program_has_set_it_it_is_written() {
        let available = node("b", &json!([{ "type": "NetworkUnavailable", "status": "False" }]));
        let nodes = [cut_off("a"), available, node("c", &json!([{ "type": "Ready", "status": "False" }]))];
        assert_eq!(names(&Memory::default().due(&nodes, Instant::now())), ["a"]);
    }

    #[test]
    fn each_change_is_answered_once_and_a_fight_more_and_more_rarely() {
        let (mut memory, start) = (Memory::default(), Instant::now());
        let nodes = [cut_off("a")];
        let mut now = start;
        for (expected, pause) in [(1, 10), (2, 10), (3, 60), (4, 600), (5, 600)] {
            assert_eq!(memory.due(&nodes, now).len(), 1);
            assert_eq!(memory.wrote(&nodes[0], now), expected);
            assert!(memory.due(&nodes, now + SECOND * (pause - 1)).is_empty(), "after write {expected}");
            now += SECOND * pause;
        }
        assert!(note(&nodes[0]).contains("(its reason: NoRouteCreated)"), "{}", note(&nodes[0]));
        assert!(note(&nodes[0]).len() < 1000);
        // After an hour of peace, or with another Node of that name, it begins anew.
        memory.due(&nodes, now + MEMORY);
        assert_eq!(memory.wrote(&nodes[0], now + MEMORY), 1);
        memory.due(&[], now + MEMORY);
        assert!(memory.writes.is_empty());
    }

    #[test]
    fn of_many_nodes_that_wait_each_has_its_turn() {
        let nodes: Vec<_> = (0..70).map(|number| cut_off(&format!("n{number:02}"))).collect();
        let mut memory = Memory::default();
        let now = Instant::now();
        let rounds: Vec<Vec<String>> = (0..3).map(|_| names(&memory.due(&nodes, now))).collect();
        let asked: BTreeSet<&String> = rounds.iter().flatten().collect();
        assert_eq!(asked.len(), 70);
        assert!(rounds.iter().all(|round| round.len() == MAX_ASKED));
    }

    #[test]
    fn a_program_that_ends_or_is_not_ready_has_no_network() {
        let pod = |metadata: Value, ready: &str| -> Pod {
            let status = json!({ "conditions": [{ "type": "Ready", "status": ready }] });
            serde_json::from_value(json!({ "metadata": metadata, "status": status })).unwrap()
        };
        assert!(has_network(&pod(json!({}), "True")));
        assert!(!has_network(&pod(json!({}), "False")));
        assert!(!has_network(&pod(json!({ "deletionTimestamp": "2026-01-01T00:00:00Z" }), "True")));
    }

    #[test]
    fn the_patch_has_this_condition_alone() {
        let patch = patch("a", jiff::Timestamp::UNIX_EPOCH);
        let conditions = patch["status"]["conditions"].as_array().unwrap();
        assert_eq!(conditions.len(), 1);
        assert_eq!(
            (&conditions[0]["status"], &conditions[0]["lastTransitionTime"]),
            (&json!("False"), &json!("1970-01-01T00:00:00Z"))
        );
        assert_eq!(patch["status"].as_object().unwrap().len(), 1);
    }
}

//! Messages about pools for users: from the API server, and in Events on pods.

use anyhow::ensure;
use testbed_kube::images::AGNHOST;
use testbed_lab::eventually;

use crate::bed::{Room, TIMEOUT, overlap_is_refused, pool};
use crate::mesh::BED;

fn pod(name: &str) -> String {
    format!(
        "\
apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{app: {name}}}}}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{{name: main, image: '{AGNHOST}', args: [pause]}}]
"
    )
}

fn event(room: &Room<'_>, pod: &str, reason: &str) -> String {
    let words = format!(
        "get events.v1.events.k8s.io --field-selector regarding.name={pod},reason={reason} -o jsonpath={{.items[*].note}}"
    );
    let reported = || {
        let note = room.kubectl(&words)?;
        ensure!(!note.is_empty(), "no Event {reason} on {pod}: {:?}", room.kubectl("get events"));
        Ok(note)
    };
    eventually(TIMEOUT, reported).unwrap()
}

#[test]
fn addresses_of_another_pool_are_refused() {
    let cluster = BED.shared();
    overlap_is_refused(&cluster, &pool("thief", "10.64.8.0/24", 2));
    assert!(cluster.kubectl(&["get", "addresspool", "thief"]).is_err(), "nothing is left of it");
    cluster.apply(&pool("honest", "10.99.0.0/24", 2)).unwrap();
    cluster.kubectl(&["delete", "addresspool", "honest", "--timeout=60s"]).unwrap();
}

#[test]
fn a_pod_is_told_that_its_pool_is_unknown_and_starts_when_it_is_made() {
    let cluster = BED.shared();
    let room = Room::of_pool(&cluster, "unknown-pool", Some("late"));
    room.apply(&pod("waits")).unwrap();
    let note = event(&room, "waits", "UnknownPool");
    assert!(note.contains("pool late does not exist"), "{note}");
    cluster.apply(&pool("late", "10.98.0.0/24", 2)).unwrap();
    let started = room.ready_pod("waits");
    assert!(started.addresses[0].to_string().starts_with("10.98.0."), "{started:?}");
}

#[test]
fn a_pod_is_told_that_its_pool_is_dry_and_starts_when_an_address_is_free() {
    let cluster = BED.shared();
    cluster.apply(&pool("one", "10.97.0.1/32", 0)).unwrap();
    let room = Room::of_pool(&cluster, "dry-pool", Some("one"));
    room.apply(&pod("first")).unwrap();
    let first = room.ready_pod("first");
    room.apply(&pod("second")).unwrap();
    let note = event(&room, "second", "PoolExhausted");
    assert!(note.contains("pool one does not have free blocks"), "{note}");
    let reason = "jsonpath={.status.conditions[?(@.type=='Exhausted')].status}";
    let exhausted = || {
        let status = cluster.kubectl(&["get", "addresspool", "one", "-o", reason])?;
        ensure!(status == "True", "the pool does not say that it is dry: {status}");
        Ok(())
    };
    eventually(TIMEOUT, exhausted).unwrap();
    // The block stays on the first pod's node for a while; an address is free for pods there.
    room.kubectl("delete pod second --wait=true").unwrap();
    room.kubectl("delete pod first --wait=true").unwrap();
    let there = pod("third").replace("spec:\n", &format!("spec:\n  nodeName: {}\n", first.node));
    room.apply(&there).unwrap();
    assert_eq!(room.ready_pod("third").addresses, first.addresses);
}

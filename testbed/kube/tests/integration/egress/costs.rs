//! Costs of deletion: pods that say of themselves how many connections they have.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use anyhow::ensure;
use serde_json::{Value, json};
use testbed_lab::eventually;

use crate::egress::bed::{Bed, TIMEOUT, bed, egress, serve};

const COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// The port that the pods of Egresses serve their load at.
const PORT: u16 = 8080;

/// A gateway that says what it has to do, and whether its clock is wrong.
fn says(address: &str, connections: Arc<AtomicU64>, clock_error: Option<i64>) {
    serve(address, PORT, "/load", move || {
        let connections = connections.load(Ordering::Relaxed);
        let load = json!({
            "connections": connections, "clients": 1, "draining": false, "clockErrorSeconds": clock_error,
        });
        ("200 OK", load.to_string())
    });
}

/// The two pods that the ReplicaSet of Egress `nat` has made.
pub(crate) fn gateways(bed: &Bed, namespace: &str) -> Vec<String> {
    let made = || {
        let list =
            bed.get(&["pods", "--namespace", namespace, "--selector", "app.kubernetes.io/instance=nat"])?;
        let items = list["items"].as_array().into_iter().flatten();
        let names: Vec<String> =
            items.filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned)).collect();
        ensure!(names.len() == 2, "{names:?}");
        Ok(names)
    };
    eventually(TIMEOUT, made).unwrap()
}

/// As kubelet would say of a pod.
fn runs(bed: &Bed, namespace: &str, pod: &str, address: &str) {
    set_status(
        bed,
        namespace,
        pod,
        &json!({ "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }] }),
    );
}

/// As kubelet would say of a pod.
pub(crate) fn set_status(bed: &Bed, namespace: &str, pod: &str, status: &Value) {
    let patch = json!({ "status": status }).to_string();
    let arguments = [
        "patch",
        "pod",
        pod,
        "--namespace",
        namespace,
        "--subresource=status",
        "--type=merge",
        "--patch",
        &patch,
    ];
    bed.plane.kubectl(&arguments).unwrap();
}

/// A pod with the labels of a gateway, which no ReplicaSet has made.
fn foreign(bed: &Bed, namespace: &str) {
    let labels = json!({
        "app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress", "app.kubernetes.io/instance": "nat",
    });
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "foreign", "namespace": namespace, "labels": labels },
        "spec": { "containers": [{ "name": "egress", "image": "a" }] },
    });
    // The namespace has no ServiceAccount for a moment.
    eventually(TIMEOUT, || bed.plane.apply(&pod.to_string())).unwrap();
}

#[test]
fn gateways_with_fewer_connections_cost_less() {
    let (bed, namespace) = (bed(), "costs");
    bed.namespace(namespace);
    let loads = [5_u64, 700].map(|load| Arc::new(AtomicU64::new(load)));
    bed.plane.apply(&egress(namespace, "nat", &json!({ "replicas": 2 }))).unwrap();
    let names = gateways(&bed, namespace);
    let addresses = ["127.77.0.1", "127.77.0.2", "127.77.0.3"];
    for ((name, load), address) in names.iter().zip(&loads).zip(addresses) {
        says(address, Arc::clone(load), (address == addresses[1]).then_some(-3600));
        runs(&bed, namespace, name, address);
    }
    foreign(&bed, namespace);
    says(addresses[2], Arc::new(AtomicU64::new(1)), Some(7200));
    runs(&bed, namespace, "foreign", addresses[2]);
    let cost = |pod: &Value| pod["metadata"]["annotations"][COST].clone();
    let costs = |expected: [&str; 2]| {
        for (name, expected) in names.iter().zip(expected) {
            bed.until(namespace, &["pod", name], |pod| {
                ensure!(cost(pod) == expected);
                Ok(())
            });
        }
    };
    costs(["3", "10"]);
    let words = format!("pod {}: the clock of its node is at least a minute behind", names[1]);
    bed.is_named(namespace, "ClockWrong", &words);
    // The order is another one.
    loads[0].store(3000, Ordering::Relaxed);
    loads[1].store(0, Ordering::Relaxed);
    costs(["12", "0"]);
    let version = |name: &str| bed.there(namespace, &["pod", name])["metadata"]["resourceVersion"].clone();
    let versions = || names.iter().map(|name| version(name)).collect::<Vec<_>>();
    let before = versions();
    loads[0].store(9000, Ordering::Relaxed);
    thread::sleep(std::time::Duration::from_secs(35));
    assert_eq!(versions(), before, "the order is as before");
    assert_eq!(
        cost(&bed.there(namespace, &["pod", "foreign"])),
        Value::Null,
        "it is no gateway of the Egress"
    );
    bed.delete(namespace, ["egress", "nat"]);
}

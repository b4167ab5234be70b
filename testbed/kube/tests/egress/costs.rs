//! Costs of deletion: pods that say of themselves how many connections they have.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use anyhow::ensure;
use serde_json::{Value, json};
use testbed_lab::eventually;

use crate::bed::{Bed, TIMEOUT, bed, egress};

const COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// A gateway that answers at `/load`; its port.
fn serve(connections: Arc<AtomicU64>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = [0; 1024];
            let length = stream.read(&mut request).unwrap_or_default();
            assert!(request[..length].starts_with(b"GET /load HTTP/1.1\r\n"));
            let connections = connections.load(Ordering::Relaxed);
            let body = format!("{{\"connections\":{connections},\"clients\":1,\"draining\":false}}");
            let _ = write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        }
    });
    port
}

/// A running pod with the labels of a gateway of Egress `nat`, which a ReplicaSet has made.
fn pod(bed: &Bed, namespace: &str, name: &str, set: &str, port: u16) {
    let owner = json!([{
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": set, "uid": set, "controller": true,
    }]);
    let labels = json!({
        "app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress", "app.kubernetes.io/instance": "nat",
    });
    let container =
        json!({ "name": "egress", "image": "a", "ports": [{ "name": "metrics", "containerPort": port }] });
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": namespace, "labels": labels, "ownerReferences": owner },
        "spec": { "containers": [container] },
    });
    // The namespace has no ServiceAccount for a moment.
    eventually(TIMEOUT, || bed.plane.apply(&pod.to_string())).unwrap();
    let status =
        json!({ "status": { "phase": "Running", "podIP": "127.0.0.1", "podIPs": [{ "ip": "127.0.0.1" }] } });
    let patch = status.to_string();
    let arguments = [
        "patch",
        "pod",
        name,
        "--namespace",
        namespace,
        "--subresource=status",
        "--type=merge",
        "--patch",
        &patch,
    ];
    bed.plane.kubectl(&arguments).unwrap();
}

#[test]
fn gateways_with_fewer_connections_cost_less() {
    let (bed, namespace) = (bed(), "costs");
    bed.namespace(namespace);
    let loads = [5_u64, 700].map(|load| Arc::new(AtomicU64::new(load)));
    for (name, load) in ["a", "b"].into_iter().zip(&loads) {
        pod(&bed, namespace, name, "nat-5f6d", serve(Arc::clone(load)));
    }
    pod(&bed, namespace, "foreign", "other-5f6d", serve(Arc::new(AtomicU64::new(1))));
    bed.plane.apply(&egress(namespace, "nat", &json!({ "replicas": 2 }))).unwrap();
    let cost = |pod: &Value| pod["metadata"]["annotations"][COST].clone();
    let costs = |expected: [&str; 2]| {
        for (name, expected) in ["a", "b"].into_iter().zip(expected) {
            bed.until(namespace, &["pod", name], |pod| {
                ensure!(cost(pod) == expected);
                Ok(())
            });
        }
    };
    costs(["3", "10"]);
    // The order is another one.
    loads[0].store(3000, Ordering::Relaxed);
    loads[1].store(0, Ordering::Relaxed);
    costs(["12", "0"]);
    let version = |name: &str| bed.there(namespace, &["pod", name])["metadata"]["resourceVersion"].clone();
    let before = ["a", "b"].map(version);
    loads[0].store(9000, Ordering::Relaxed);
    thread::sleep(std::time::Duration::from_secs(35));
    assert_eq!(["a", "b"].map(version), before, "the order is as before");
    assert_eq!(
        cost(&bed.there(namespace, &["pod", "foreign"])),
        Value::Null,
        "it is no gateway of the Egress"
    );
    bed.delete(namespace, ["egress", "nat"]);
}

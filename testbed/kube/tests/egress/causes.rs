//! Gateways that are not available, and why.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::thread;

use anyhow::ensure;
use serde_json::{Value, json};
use testbed_lab::eventually;

use crate::bed::{Bed, TIMEOUT, bed, egress};
use crate::costs::{gateways, set_status};

/// The port at which gateways say whether they are ready.
const PORT: u16 = 8081;

/// A gateway that says why it is not ready.
fn serve(address: &str) {
    let listener = TcpListener::bind((address, PORT)).unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = [0; 1024];
            let length = stream.read(&mut request).unwrap_or_default();
            assert!(request[..length].starts_with(b"GET /readyz HTTP/1.1\r\n"));
            let body =
                "[-]data path failed: DataPathRefused: bpf: Operation not permitted\nreadyz check failed\n";
            let _ = write!(
                stream,
                "HTTP/1.1 503 Service Unavailable\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
        }
    });
}

/// The condition and an Event have these words.
fn is_named(bed: &Bed, namespace: &str, reason: &str, words: &str) {
    bed.until(namespace, &["egress", "nat"], |egress| {
        let conditions = egress["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let ready = conditions.iter().find(|condition| condition["type"] == "Ready");
        let message = ready.and_then(|ready| ready["message"].as_str()).unwrap_or_default();
        ensure!(message.contains(&format!("{reason}: ")) && message.contains(words), "{message}");
        Ok(())
    });
    let is_published = || {
        let events = bed.get(&["events.events.k8s.io", "--namespace", namespace])?;
        let events = events["items"].as_array().cloned().unwrap_or_default();
        let is_it = |event: &Value| {
            event["regarding"]["name"] == "nat"
                && event["reason"] == reason
                && event["note"].as_str().is_some_and(|note| note.contains(words))
        };
        ensure!(events.iter().any(is_it), "{events:?}");
        Ok(())
    };
    eventually(TIMEOUT, is_published).unwrap();
}

#[test]
fn why_gateways_do_not_run_is_in_the_condition_and_an_event() {
    let (bed, namespace) = (bed(), "causes");
    bed.namespace(namespace);
    bed.plane.apply(&egress(namespace, "nat", &json!({ "replicas": 2 }))).unwrap();
    let names = gateways(&bed, namespace);
    let waiting = |name: &str| {
        json!({ "name": name, "image": "a", "imageID": "", "ready": false, "restartCount": 0,
            "state": { "waiting": { "reason": "ImagePullBackOff", "message": "Back-off pulling image" } } })
    };
    set_status(
        &bed,
        namespace,
        &names[0],
        &json!({ "phase": "Pending", "containerStatuses": [waiting("egress")] }),
    );
    is_named(
        &bed,
        namespace,
        "GatewayPodFails",
        "container egress: ImagePullBackOff: Back-off pulling image",
    );
    // It starts, and the kernel refuses the programs of its tunnels.
    let address = "127.78.0.1";
    serve(address);
    let running = json!({ "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }], "containerStatuses": null });
    set_status(&bed, namespace, &names[0], &running);
    is_named(&bed, namespace, "GatewayNotReady", "DataPathRefused: bpf: Operation not permitted");
}

//! Gateways that are not available, and why.

use serde_json::json;

use crate::egress::bed::{bed, egress, serve};
use crate::egress::costs::{gateways, set_status};

/// The port at which gateways say whether they are ready.
const PORT: u16 = 8081;

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
    bed.is_named(namespace, "GatewayPodFails", "container egress: ImagePullBackOff: Back-off pulling image");
    // It starts, and the kernel refuses the programs of its tunnels.
    let address = "127.78.0.1";
    let body = "[-]data path failed: DataPathRefused: bpf: Operation not permitted\nreadyz check failed\n";
    serve(address, PORT, "/readyz", move || ("503 Service Unavailable", body.to_owned()));
    let running = json!({ "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }], "containerStatuses": null });
    set_status(&bed, namespace, &names[0], &running);
    bed.is_named(namespace, "GatewayNotReady", "DataPathRefused: bpf: Operation not permitted");
}

//! Bounds of lists and maps hold for what is written new, and never hold up an object that was stored before there were any: the API
//! server judges only what a write changes.
//!
//! The CustomResourceDefinition is a copy of that of WireKubePeers under another name, first without its bounds, so that the other tests keep theirs.

use serde_json::{Value, json};

use crate::crds::bed::{Bed, KEY, bed, is_refused_soon};

const NAME: &str = "boundedpeers.bounds.example";

/// A definition with the schema of WireKubePeers, with their bounds or without those that the test goes beyond.
fn definition(bed: &Bed, is_bounded: bool) -> Value {
    let mut spec = bed.get(&["crd", "wirekubepeers.wirekube.io"])["spec"].clone();
    spec["group"] = json!("bounds.example");
    spec["names"] = json!({ "kind": "BoundedPeer", "plural": "boundedpeers", "singular": "boundedpeer", "listKind": "BoundedPeerList" });
    if !is_bounded {
        let status = "/versions/0/schema/openAPIV3Schema/properties/status/properties";
        for (part, bound) in
            [("problems", "maxItems"), ("problems/items", "maxLength"), ("peerTransports", "maxProperties")]
        {
            let part = spec.pointer_mut(&format!("{status}/{part}")).unwrap().as_object_mut().unwrap();
            part.remove(bound).expect("it is bounded");
        }
    }
    json!({ "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": { "name": NAME }, "spec": spec })
}

fn create(bed: &Bed, name: &str) {
    let object = json!({ "apiVersion": "bounds.example/v1alpha1", "kind": "BoundedPeer",
        "metadata": { "name": name, "finalizers": ["bounds.example/kept"] }, "spec": { "publicKey": KEY } });
    bed.plane.apply(&object.to_string()).unwrap();
}

fn patch(bed: &Bed, name: &str, patch: &Value, options: &[&str]) -> Result<String, String> {
    let patch = patch.to_string();
    let arguments = ["patch", "boundedpeer", name, "--type=merge", "--patch", &patch];
    bed.plane.kubectl(&[&arguments[..], options].concat()).map_err(|error| format!("{error:#}"))
}

fn problems(count: usize) -> Value {
    let problems: Vec<String> = (0..count).map(|number| format!("problem {number}")).collect();
    json!({ "status": { "problems": problems } })
}

#[test]
fn what_is_beyond_a_bound_is_refused_and_what_was_stored_with_more_goes_on() {
    let bed = bed();
    let status = ["--subresource=status"];
    bed.plane.apply(&definition(&bed, false).to_string()).unwrap();
    bed.plane.kubectl(&["wait", "--for=condition=Established", "crd", NAME, "--timeout=60s"]).unwrap();
    create(&bed, "old");
    create(&bed, "new");
    let transports: serde_json::Map<String, Value> =
        (0..1001).map(|number| (format!("n{number}"), json!("direct"))).collect();
    let mut stored = problems(300);
    stored["status"]["peerTransports"] = Value::Object(transports);
    stored["status"]["problems"][0] = json!("x".repeat(5000));
    patch(&bed, "old", &stored, &status).unwrap();

    bed.plane.apply(&definition(&bed, true).to_string()).unwrap();
    is_refused_soon("status.problems: Too many: 257: must have at most 256 items", || {
        patch(&bed, "new", &problems(257), &["--subresource=status", "--dry-run=server"])
    });
    patch(&bed, "new", &problems(256), &status).unwrap();

    patch(&bed, "old", &json!({ "spec": { "persistentKeepalive": 7 } }), &[]).unwrap();
    patch(&bed, "old", &json!({ "metadata": { "labels": { "changed": "yes" } } }), &[]).unwrap();
    patch(&bed, "old", &json!({ "status": { "connected": true, "iceState": "connected" } }), &status)
        .unwrap();
    let kept = bed.get(&["boundedpeer", "old"]);
    assert_eq!(kept["status"]["problems"].as_array().unwrap().len(), 300);
    assert_eq!(
        (&kept["spec"]["persistentKeepalive"], &kept["status"]["connected"]),
        (&json!(7), &json!(true))
    );
    let more = patch(&bed, "old", &problems(301), &status).unwrap_err();
    assert!(more.contains("must have at most 256 items"), "{more}");
    // Within one bound, while another list stays beyond its own.
    patch(&bed, "old", &problems(2), &status).unwrap();

    for name in ["old", "new"] {
        bed.plane.kubectl(&["delete", "boundedpeer", name, "--wait=false"]).unwrap();
        patch(&bed, name, &json!({ "metadata": { "finalizers": null } }), &[]).unwrap();
        bed.plane.kubectl(&["wait", "--for=delete", "boundedpeer", name, "--timeout=60s"]).unwrap();
    }
    bed.plane.kubectl(&["delete", "crd", NAME, "--wait=false"]).unwrap();
}

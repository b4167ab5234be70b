//! The API server warns when something is applied that has no effect yet.

use std::time::{Duration, Instant};

use fairlead_api::resources::not_implemented::{NotImplemented, WIREKUBE_MESH};
use serde_json::{Value, json};

use crate::crds::bed::{KEY, bed};

/// Warnings that kubectl prints about this object; empty without any.
fn warnings(object: &Value) -> String {
    let arguments = ["create", "--dry-run=server", "--warnings-as-errors", "-f", "-"];
    match bed().plane.kubectl_stdin(&arguments, &object.to_string()) {
        Ok(_) => String::new(),
        Err(error) => format!("{error:#}"),
    }
}

fn object(entry: &NotImplemented, spec: &Value) -> Value {
    json!({
        "apiVersion": format!("{}/{}", entry.group, entry.version), "kind": entry.kind, "spec": spec,
        "metadata": { "name": "warned", "namespace": "default" },
    })
}

#[test]
fn only_what_has_no_effect_is_warned_of() {
    let bed = bed();
    let fields = json!({
        "apiServerURL": "https://192.0.2.1:6443", "natTraversal": {},
        "relay": { "provider": "managed", "managed": { "replicas": 6, "transport": "ws" } },
    });
    let warned = object(&WIREKUBE_MESH, &fields);
    let expected = WIREKUBE_MESH.message(&warned).unwrap();
    // The API server puts a policy into force some time after it has accepted it.
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        let said = warnings(&warned);
        if said.contains(&expected) {
            break;
        }
        assert!(Instant::now() < end, "expected '{expected}' in: {said}");
        std::thread::sleep(Duration::from_millis(100));
    }
    let policies = bed.get(&["validatingadmissionpolicy"]);
    for policy in policies["items"].as_array().unwrap() {
        assert!(policy["status"]["typeChecking"]["expressionWarnings"].is_null(), "{policy}");
    }
    what_has_an_effect_is_applied_without_a_word();
}

fn what_has_an_effect_is_applied_without_a_word() {
    let works = json!({
        "listenPort": 51821, "interfaceName": "wg9", "mtu": 1400,
        "autoAllowedIPs": { "includeNodeInternalIP": false },
        "relay": { "provider": "managed", "managed": { "replicas": 5, "transport": "wss" } },
        "routing": { "localSubnetPolicy": "bypass", "excludeCIDRs": ["192.0.2.0/24"] },
        "harvestExtraEndpoints": false,
        "endpointFilters": ["0.0.0.0/0", "!10.3.0.0/16", "2001:db8::1"], "peerEndpointFilters": ["::/0", "192.0.2.1"],
        "grants": [{ "node": "n1", "cidrs": ["192.0.2.0/24"] }],
        "topology": { "granularity": "location", "encapsulation": "always", "label": "topology.kubernetes.io/zone",
            "internalCIDRs": ["10.0.0.0/8"] },
    });
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": "unwarned", "annotations": {
            "wirekube.io/endpoint": "192.0.2.1:51820", "wirekube.io/internal-ip": "10.0.0.1", "kilo.squat.ai/leader": "",
        } },
    });
    let peer = json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": "unwarned" },
        "spec": { "publicKey": KEY, "allowedIPs": ["10.0.0.1/32"] },
    });
    let egress = json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "Egress",
        "metadata": { "name": "unwarned", "namespace": "default" }, "spec": { "destinations": ["0.0.0.0/0"] },
    });
    for object in [egress, peer, object(&WIREKUBE_MESH, &works), object(&WIREKUBE_MESH, &json!({})), node] {
        assert_eq!(warnings(&object), "");
    }
}

//! A WireKubePeer goes with its Node and stays small, whatever the token of its node writes.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::crds::bed::{Bed, Program, bed, owned_peer, peer, refused};

/// Node and client with its token, once the policy is in force.
fn node<'a>(bed: &'a Bed, name: &str) -> (Program<'a>, String) {
    bed.plane.apply(&format!("{{apiVersion: v1, kind: Node, metadata: {{name: {name}}}}}")).unwrap();
    let program = bed.program("fairlead-node", Some(name));
    let end = Instant::now() + Duration::from_secs(60);
    while program.create_dry(&without_owner(bed, name)).is_ok() {
        assert!(Instant::now() < end, "the policy does not come into force");
        std::thread::sleep(Duration::from_millis(100));
    }
    let uid = bed.get(&["node", name])["metadata"]["uid"].as_str().unwrap().to_owned();
    (program, uid)
}

fn without_owner(bed: &Bed, name: &str) -> String {
    let mut peer = object(bed, name);
    peer["metadata"]["ownerReferences"].take();
    peer.to_string()
}

fn object(bed: &Bed, name: &str) -> Value {
    serde_json::from_str(&owned_peer(bed, name, "[]")).unwrap()
}

fn patch_status(program: &Program<'_>, name: &str, patch: &Value) -> Result<String, String> {
    // Longer than an argument may be.
    let file = "--patch-file=/dev/stdin";
    program.run(&["patch", "wkpeer", name, "--subresource=status", "--type=merge", file], &patch.to_string())
}

#[test]
fn a_peer_belongs_to_the_node_of_its_token() {
    let bed = bed();
    let (program, uid) = node(&bed, "owner");
    let other = bed.get(&["node", "n1"])["metadata"]["uid"].as_str().unwrap().to_owned();
    let words = format!("must be Node 'owner' with UID {uid}");
    let of_new = "the only owner of the new WireKubePeer 'owner' must be Node 'owner'";
    let owner = |fields: Value| {
        let mut owner = json!({ "apiVersion": "v1", "kind": "Node", "name": "owner", "uid": uid });
        owner.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        owner
    };
    let foreign = [
        // Garbage collection would delete it.
        json!([owner(json!({ "uid": "7d6e4a0c-53f1-4f0c-9d1e-000000000000" }))]),
        json!([]),
        // It would outlive its Node.
        json!([owner(json!({})), owner(json!({ "name": "n1", "uid": other }))]),
        json!([owner(json!({ "kind": "Namespace", "name": "kube-system" }))]),
        // The Node would wait for it.
        json!([owner(json!({ "blockOwnerDeletion": true }))]),
        json!([owner(json!({ "controller": true }))]),
    ];
    let mut peer = object(&bed, "owner");
    // Of a peer that is not there yet, garbage collection deletes nothing.
    for owners in &foreign[1..] {
        peer["metadata"]["ownerReferences"] = owners.clone();
        refused(program.create_dry(&peer.to_string()), of_new);
    }
    program.create(&owned_peer(&bed, "owner", "[]")).unwrap();
    for owners in &foreign {
        let patch = json!({ "metadata": { "ownerReferences": owners } }).to_string();
        refused(program.merge("wkpeer", "owner", &patch), &words);
    }
    let finalizers = r#"{"metadata": {"finalizers": ["example.com/stays"]}}"#;
    refused(program.merge("wkpeer", "owner", finalizers), "may not change the finalizers");
    let mut finalized = object(&bed, "owner");
    finalized["metadata"]["finalizers"] = json!(["example.com/stays"]);
    refused(program.create_dry(&finalized.to_string()), "may not change the finalizers");
    // What an administrator added stays his.
    bed.plane.kubectl(&["patch", "wkpeer", "owner", "--type=merge", "-p", finalizers]).unwrap();
    program.merge("wkpeer", "owner", r#"{"spec": {"endpoint": "203.0.113.7:1"}}"#).unwrap();
    let without = r#"{"metadata": {"finalizers": null}}"#;
    refused(program.merge("wkpeer", "owner", without), "may not change the finalizers");
    bed.plane.kubectl(&["patch", "wkpeer", "owner", "--type=merge", "-p", without]).unwrap();
    let policy = bed.get(&["validatingadmissionpolicy", "fairlead-peers-of-nodes"]);
    assert!(policy["status"]["typeChecking"]["expressionWarnings"].is_null(), "{policy}");
}

#[test]
fn a_peer_of_an_earlier_node_of_the_name_becomes_that_of_the_present_one() {
    let bed = bed();
    let (program, uid) = node(&bed, "again");
    let earlier = owned_peer(&bed, "again", "[]").replace(&uid, "7d6e4a0c-53f1-4f0c-9d1e-000000000001");
    // Garbage collection is not part of this control plane.
    bed.plane.kubectl_stdin(&["create", "-f", "-"], &earlier).unwrap();
    let owners = &object(&bed, "again")["metadata"]["ownerReferences"];
    let patch = json!({ "metadata": { "ownerReferences": owners } }).to_string();
    program.merge("wkpeer", "again", &patch).unwrap();
}

/// A token that a kubelet requests while its Node is not registered has a name and no UID, and it is used for most of an hour. So is one
/// of an earlier Node of the name.
#[test]
fn a_token_from_before_its_node_was_registered_publishes_the_peer_of_that_node() {
    let bed = bed();
    // Waits for the policy.
    node(&bed, "ghosted");
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: on-ghost, namespace: kube-system}, spec: {nodeName: ghost, \
         serviceAccountName: fairlead-node, containers: [{name: a, image: a}]}}";
    bed.plane.apply(pod).unwrap();
    let request = || {
        let words =
            ["create", "token", "fairlead-node", "--namespace=kube-system", "--bound-object-kind=Pod"];
        bed.plane.kubectl(&[&words[..], &["--bound-object-name=on-ghost"]].concat()).unwrap()
    };
    let register = || bed.plane.apply("{apiVersion: v1, kind: Node, metadata: {name: ghost}}").unwrap();
    let without_uid = request();
    register();
    let of_an_earlier_node = request();
    bed.plane.kubectl(&["delete", "node", "ghost"]).unwrap();
    register();
    for (token, name) in [(without_uid, "ghost-without-uid"), (of_an_earlier_node, "ghost-earlier")] {
        let program = bed.program_with(token.trim(), name);
        refused(
            program.create_dry(&peer("n1", "[]")),
            "node 'ghost' may only write the WireKubePeer of its own name",
        );
        let mut of_other = object(&bed, "n1");
        of_other["metadata"]["name"] = json!("ghost");
        refused(program.create_dry(&of_other.to_string()), "must be Node 'ghost', without controller");
        program.create(&owned_peer(&bed, "ghost", "[]")).unwrap();
        program.merge("wkpeer", "ghost", r#"{"spec": {"endpoint": "203.0.113.7:1"}}"#).unwrap();
        patch_status(&program, "ghost", &json!({ "status": { "connected": true } })).unwrap();
        let uid = "7d6e4a0c-53f1-4f0c-9d1e-000000000002";
        let other = json!({ "apiVersion": "v1", "kind": "Node", "name": "ghost", "uid": uid });
        for owners in [json!([]), json!([other])] {
            let patch = json!({ "metadata": { "ownerReferences": owners } }).to_string();
            refused(program.merge("wkpeer", "ghost", &patch), "a node may not take it away");
        }
        bed.plane.kubectl(&["delete", "wkpeer", "ghost"]).unwrap();
    }
    bed.plane.kubectl(&["delete", "pod", "on-ghost", "--namespace=kube-system", "--force"]).unwrap();
    bed.plane.kubectl(&["delete", "node", "ghost"]).unwrap();
}

/// The controller's copy has to fit into the same object.
#[test]
fn a_peer_stays_small_enough_for_what_the_controller_copies() {
    let bed = bed();
    let (program, _) = node(&bed, "small");
    program.create(&owned_peer(&bed, "small", "[]")).unwrap();
    let many = |count: usize, length: usize, value: Value| -> Value {
        let name = |number: usize| format!("{}{number}", "x".repeat(length));
        (0..count).map(|number| (name(number), value.clone())).collect::<serde_json::Map<_, _>>().into()
    };
    let seen = json!({ "publicKey": "x".repeat(40), "endpoint": "203.0.113.7:51820" });
    let too_much = [
        json!({ "problems": ["x".repeat(1_000_000)] }),
        json!({ "iceState": "x".repeat(200_000) }),
        json!({ "connections": many(300, 4, json!("direct")) }),
        json!({ "peerTransports": many(250, 600, json!("direct")) }),
        json!({ "observedEndpoints": many(2, 100_000, seen.clone()) }),
        json!({ "portPrediction": { "samplePorts": vec![1; 2000] } }),
    ];
    for status in too_much {
        let error = patch_status(&program, "small", &json!({ "status": status })).unwrap_err();
        // The schema bounds single texts and lists, the policy all of them together.
        let words = ["is too large: at most 256", "Too long: may not be more than", "Too many: "];
        assert!(words.iter().any(|it| error.contains(it)), "{error}");
    }
    let annotation = json!({ "metadata": { "annotations": { "a": "x".repeat(100_000) } } }).to_string();
    refused(program.merge("wkpeer", "small", &annotation), "may not change annotations");
    let label = r#"{"metadata": {"labels": {"a": "b"}}}"#;
    refused(program.merge("wkpeer", "small", label), "nor labels other than wirekube.io/node");
    let applied = json!({ "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer",
        "metadata": { "name": "small" }, "spec": { "endpoint": "203.0.113.7:1" } });
    let apply = ["apply", "--server-side", "--field-manager=another", "-f", "-"];
    refused(program.run(&apply, &applied.to_string()), "as the field manager fairlead-node");
    let apply = ["apply", "--server-side", "--field-manager=fairlead-node", "-f", "-"];
    program.run(&apply, &applied.to_string()).unwrap();
    // The most that is taken, and what the controller adds.
    let most = json!({
        "peerTransports": many(256, 200, json!("direct")),
        "observedEndpoints": many(200, 100, seen),
        "problems": vec!["x".repeat(1024); 16],
    });
    patch_status(&program, "small", &json!({ "status": most })).unwrap();
    let facts = json!({ "status": { "node": { "internalIPs": ["192.0.2.1"] } } }).to_string();
    let copy = ["patch", "wkpeer", "small", "--subresource=status", "--type=merge", "--patch", &facts];
    bed.plane.kubectl(&copy).unwrap();
}

//! A node program requests tokens that are bound to its own pod or Node, for gateways of Egresses, and no others.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::crds::bed::{Bed, Program, bed, refused};

const AUDIENCE: &str = "egress.coil.cybozu.com/internet-egress/nat/00";
const OWN: &str = "may only request tokens that are bound, by name and UID, to its own pod";

/// A pod of node programs on a node, and its UID.
fn pod(bed: &Bed, name: &str, node: &str) -> String {
    let pod = format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, namespace: kube-system}}, spec: {{nodeName: {node}, \
         serviceAccountName: fairlead-node, containers: [{{name: a, image: a}}]}}}}"
    );
    bed.plane.apply(&pod).unwrap();
    let pod = bed.get(&["pod", name, "--namespace=kube-system"]);
    pod["metadata"]["uid"].as_str().unwrap().to_owned()
}

/// A node program in that pod.
fn in_pod<'a>(bed: &'a Bed, name: &str, uid: &str) -> Program<'a> {
    let (name_of, uid_of) = (format!("--bound-object-name={name}"), format!("--bound-object-uid={uid}"));
    let token = ["create", "token", "fairlead-node", "--namespace=kube-system", "--bound-object-kind=Pod"];
    let token = bed.plane.kubectl(&[&token[..], &[&name_of, &uid_of]].concat()).unwrap();
    bed.program_with(token.trim(), name)
}

fn request(program: &Program<'_>, spec: &Value) -> Result<String, String> {
    let request =
        serde_json::json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec});
    let path = "/api/v1/namespaces/kube-system/serviceaccounts/fairlead-node/token";
    program.run(&["create", "--raw", path, "-f", "-"], &request.to_string())
}

/// The API server puts a policy into force some time after it has accepted it.
fn await_policy(program: &Program<'_>) {
    let end = Instant::now() + Duration::from_secs(120);
    while request(program, &with(spec("Node", "", ""), "boundObjectRef", Value::Null)).is_ok() {
        assert!(Instant::now() < end, "the policy does not come into force");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn spec(kind: &str, name: &str, uid: &str) -> Value {
    let api_version = "v1";
    serde_json::json!({"audiences": [AUDIENCE], "expirationSeconds": 3600,
        "boundObjectRef": {"apiVersion": api_version, "kind": kind, "name": name, "uid": uid}})
}

fn with(mut spec: Value, field: &str, value: Value) -> Value {
    spec[field] = value;
    spec
}

#[test]
fn a_node_program_gets_tokens_of_its_own_pod_or_node_for_gateways_only() {
    let bed = bed();
    let (uid, other) = (pod(&bed, "own-n1", "n1"), pod(&bed, "other-n2", "n2"));
    let node = |name: &str| bed.get(&["node", name])["metadata"]["uid"].as_str().unwrap().to_owned();
    let (n1, n2) = (node("n1"), node("n2"));
    let program = in_pod(&bed, "own-n1", &uid);
    await_policy(&program);
    let own = spec("Pod", "own-n1", &uid);
    let answer: Value = serde_json::from_str(&request(&program, &own).unwrap()).unwrap();
    assert!(answer["status"]["token"].as_str().is_some_and(|token| !token.is_empty()), "{answer}");
    request(&program, &spec("Node", "n1", &n1)).unwrap();

    for foreign in [
        spec("Pod", "other-n2", &other),
        spec("Pod", "own-n1", &other),
        spec("Pod", "other-n2", &uid),
        spec("Pod", "own-n1", ""),
        spec("Node", "n2", &n2),
        spec("Node", "n1", ""),
        spec("Secret", "own-n1", &uid),
        with(own.clone(), "boundObjectRef", Value::Null),
    ] {
        refused(request(&program, &foreign), OWN);
    }
    let server = "https://kubernetes.default.svc.cluster.local";
    for audiences in [serde_json::json!([server]), serde_json::json!([AUDIENCE, server])] {
        refused(request(&program, &with(own.clone(), "audiences", audiences)), "must begin with egress.coil");
    }
    refused(request(&program, &with(own.clone(), "audiences", Value::Null)), "must begin with egress.coil");
    refused(request(&program, &with(own, "expirationSeconds", 3601.into())), "expire within an hour");
}

/// As where the program runs outside of a pod.
#[test]
fn a_token_that_is_bound_to_a_node_requests_tokens_of_that_node_and_an_unbound_one_none() {
    let bed = bed();
    let uid = bed.get(&["node", "n1"])["metadata"]["uid"].as_str().unwrap().to_owned();
    let (n1, unbound) = (bed.program("fairlead-node", Some("n1")), bed.program("fairlead-node", None));
    await_policy(&unbound);
    request(&n1, &spec("Node", "n1", &uid)).unwrap();
    let pod = pod(&bed, "bound-n1", "n1");
    refused(request(&n1, &spec("Pod", "bound-n1", &pod)), OWN);
    refused(request(&unbound, &spec("Node", "n1", &uid)), OWN);
    refused(request(&unbound, &with(spec("Pod", "", ""), "boundObjectRef", Value::Null)), OWN);
    let policy = bed.get(&["validatingadmissionpolicy", "fairlead-node-tokens"]);
    assert!(policy["status"]["typeChecking"]["expressionWarnings"].is_null(), "{policy}");
}

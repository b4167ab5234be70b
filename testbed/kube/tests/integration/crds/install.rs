//! Manifests that a user installs: the base and the overlays of `deploy/`, as the API server takes them.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::crds::bed::{bed, checkout, owned_peer, peer, refused};

const DAEMON_SET: [&str; 4] = ["daemonset", "coild", "--namespace", "kube-system"];
const DEPLOYMENT: [&str; 4] = ["deployment", "coil-ipam-controller", "--namespace", "kube-system"];

/// Every container of a workload, the init containers first.
fn containers(workload: &Value) -> Vec<&Value> {
    let of = |list: &str| workload.pointer(&format!("/spec/template/spec/{list}")).and_then(Value::as_array);
    ["initContainers", "containers"].into_iter().filter_map(of).flatten().collect()
}

#[test]
fn the_image_is_the_one_that_this_version_makes() {
    let bed = bed();
    let image = concat!("localhost/fairlead:", env!("CARGO_PKG_VERSION"));
    for workload in [bed.get(&DAEMON_SET), bed.get(&DEPLOYMENT)] {
        let images: BTreeSet<&str> =
            containers(&workload).iter().map(|container| container["image"].as_str().unwrap()).collect();
        assert_eq!(images, BTreeSet::from([image]));
    }
}

#[test]
fn coils_selectors_are_kept_so_that_its_programs_are_replaced() {
    let bed = bed();
    for (workload, component) in
        [(bed.get(&DAEMON_SET), "coild"), (bed.get(&DEPLOYMENT), "coil-ipam-controller")]
    {
        let expected = json!({"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": component});
        assert_eq!(workload["spec"]["selector"]["matchLabels"], expected);
    }
}

#[test]
fn objects_that_the_workloads_refer_to_exist() {
    let bed = bed();
    let mut configurations = Vec::new();
    for workload in [bed.get(&DAEMON_SET), bed.get(&DEPLOYMENT)] {
        let account = workload["spec"]["template"]["spec"]["serviceAccountName"].as_str().unwrap();
        bed.get(&["serviceaccount", account, "--namespace", "kube-system"]);
        for container in containers(&workload) {
            for variable in container["env"].as_array().into_iter().flatten() {
                let key = &variable["valueFrom"]["configMapKeyRef"];
                let Some(name) = key["name"].as_str() else { continue };
                let map = bed.get(&["configmap", name, "--namespace", "kube-system"]);
                let netconf = map["data"][key["key"].as_str().unwrap()].as_str().unwrap();
                configurations.push(serde_json::from_str::<Value>(netconf).unwrap());
            }
        }
    }
    // The network configuration is the only one, of the init container; it runs the plugin that the image installs.
    let [netconf] = &configurations[..] else { panic!("{configurations:?}") };
    assert_eq!(netconf["name"], "k8s-pod-network");
    assert_eq!(netconf["plugins"][0], json!({"type": "coil", "socket": "/run/coild.sock"}));
}

#[test]
fn the_overlays_are_taken_too() {
    let bed = bed();
    for (overlay, words) in [
        ("registry", "registry.example.com/fairlead:"),
        ("router", "--router"),
        ("mesh-only", "--enable-ipam=false"),
        ("egress", "coil-egress-controller"),
    ] {
        let directory = checkout().join("deploy/overlays").join(overlay);
        let arguments = ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "-o=json", "-k"];
        let arguments = [&arguments[..], &[directory.to_str().unwrap()]].concat();
        let printed = bed.plane.kubectl(&arguments).unwrap();
        assert!(printed.contains(words), "{overlay} has no {words}");
    }
}

/// Tokens of controllers are worth more than a node, and workers run the pods of everyone.
#[test]
fn controllers_prefer_nodes_of_the_control_plane_and_do_not_need_them() {
    let directory = checkout().join("deploy/overlays/egress");
    let arguments = ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "-o=json", "-k"];
    let arguments = [&arguments[..], &[directory.to_str().unwrap()]].concat();
    let printed: Value = serde_json::from_str(&bed().plane.kubectl(&arguments).unwrap()).unwrap();
    let mut found = BTreeSet::new();
    let objects = printed["items"].as_array().unwrap().iter();
    for object in objects.filter(|object| object["kind"] == "Deployment") {
        let pod = &object["spec"]["template"]["spec"];
        let affinity = &pod["affinity"]["nodeAffinity"];
        let preferred = &affinity["preferredDuringSchedulingIgnoredDuringExecution"][0]["preference"];
        let role = json!([{ "key": "node-role.kubernetes.io/control-plane", "operator": "Exists" }]);
        assert_eq!(preferred["matchExpressions"], role);
        assert!(affinity["requiredDuringSchedulingIgnoredDuringExecution"].is_null());
        let tolerated = json!({ "key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule" });
        assert!(pod["tolerations"].as_array().unwrap().contains(&tolerated));
        found.insert(object["metadata"]["name"].as_str().unwrap().to_owned());
    }
    assert_eq!(found, ["coil-egress-controller", "coil-ipam-controller"].map(str::to_owned).into());
}

/// PodMonitors need CRDs that are not here, so the API server does not see the overlay.
#[test]
fn the_monitoring_overlay_scrapes_with_a_token_what_is_served_with_tls() {
    let directory = checkout().join("deploy/overlays/monitoring");
    let rendered = bed().plane.kubectl(&["kustomize", directory.to_str().unwrap()]).unwrap();
    for words in
        ["- --metrics-secure\n", "scheme: https\n", "name: fairlead-metrics-reader\n", "portNumber: 93"]
    {
        assert!(rendered.matches(words).count() >= 2, "{words} in\n{rendered}");
    }
}

#[test]
fn the_job_that_uninstalls_is_taken_and_has_the_image_of_the_programs() {
    let bed = bed();
    let directory = checkout().join("deploy/uninstall");
    let arguments =
        ["apply", "--server-side", "--dry-run=server", "-o=json", "-k", directory.to_str().unwrap()];
    let printed = bed.plane.kubectl(&arguments).unwrap();
    let image = concat!("\"image\": \"localhost/fairlead:", env!("CARGO_PKG_VERSION"), "\"");
    assert!(printed.contains(image), "{printed}");
}

/// The kubelet's tokens for pods are bound to the pod; the API server adds the node on which it is.
#[test]
fn the_token_of_a_pod_of_the_daemon_set_speaks_for_its_node() {
    let bed = bed();
    let mut template = bed.get(&DAEMON_SET)["spec"]["template"].clone();
    template["spec"]["nodeName"] = json!("n2");
    template["metadata"]["name"] = json!("coild-of-n2");
    template["metadata"]["namespace"] = json!("kube-system");
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]});
    bed.plane.apply(&pod.to_string()).unwrap();
    let of_pod = bed.get(&["pod", "coild-of-n2", "--namespace", "kube-system"]);
    assert_eq!(of_pod["spec"]["priority"], 2_000_001_000, "system-node-critical");
    let arguments =
        ["create", "token", "fairlead-node", "--namespace", "kube-system", "--bound-object-kind", "Pod"];
    let name = ["--bound-object-name", "coild-of-n2"];
    let token = bed.plane.kubectl(&[&arguments[..], &name[..]].concat()).unwrap();
    let program = bed.program_with(token.trim(), "pod-of-n2");
    program.create_dry(&owned_peer(&bed, "n2", "[]")).unwrap();
    refused(
        program.create_dry(&peer("n1", "[]")),
        "node 'n2' may only write the WireKubePeer of its own name",
    );
    bed.plane
        .kubectl(&["delete", "pod", "coild-of-n2", "--namespace", "kube-system", "--now", "--wait=false"])
        .unwrap();
}

#[test]
fn another_network_configuration_rolls_out_by_another_name() {
    let workload = bed().get(&DAEMON_SET);
    let key = &containers(&workload)[0]["env"][0]["valueFrom"]["configMapKeyRef"];
    let name = key["name"].as_str().unwrap();
    assert!(name.starts_with("coil-config-"), "{name} has no hash of its content");
}

//! The controller with the rights of its ServiceAccount, beside a real API server.

use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use testbed_lab::{eventually, executable};

use crate::controller_bed::Bed;

const TIMEOUT: Duration = Duration::from_secs(60);

/// One for the tests that run at the same time; the last one to end takes it away.
fn bed() -> Arc<Bed> {
    static SHARED: Mutex<Weak<Bed>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    shared.upgrade().unwrap_or_else(|| {
        let bed = Arc::new(Bed::start(&policy()));
        *shared = Arc::downgrade(&bed);
        bed
    })
}

/// A NetworkPolicy, which no program enforces.
fn policy() -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "name": "deny", "namespace": "default" },
        "spec": { "podSelector": {}, "policyTypes": ["Ingress"] },
    })
}

impl Bed {
    /// Waits until a condition of an object has this status; returns it.
    #[track_caller]
    fn condition(&self, object: &[&str], type_: &str, status: &str) -> Value {
        let found = eventually(TIMEOUT, || {
            let object = self.get(object)?;
            let condition = condition(&object, type_).context("no such condition")?;
            ensure!(condition["status"] == status, "{condition}");
            Ok(condition)
        });
        found.unwrap_or_else(|error| panic!("{object:?}, {type_}: {error:#}"))
    }

    /// Waits for an Event about an object; returns its note.
    #[track_caller]
    fn event(&self, name: &str, reason: &str) -> String {
        let note = eventually(TIMEOUT, || {
            let events = self.get(&["events.events.k8s.io", "--all-namespaces"])?;
            let is_it = |event: &&Value| event["regarding"]["name"] == name && event["reason"] == reason;
            let event = events["items"].as_array().context("no list")?.iter().find(is_it).cloned();
            Ok(event.context("no such Event")?["note"].as_str().unwrap_or_default().to_owned())
        });
        note.unwrap_or_else(|error| panic!("{name}, {reason}: {error:#}"))
    }

    /// Changes the status of an object as a user with all rights.
    fn set_status(&self, object: &[&str], status: &Value) {
        let patch = json!({ "status": status }).to_string();
        let arguments = ["--subresource=status", "--type=strategic", "-p", &patch];
        self.plane.kubectl(&[&["patch"], object, &arguments].concat()).unwrap();
    }

    fn node(&self, name: &str) {
        self.plane.apply(&format!("{{apiVersion: v1, kind: Node, metadata: {{name: {name}}}}}")).unwrap();
    }

    fn pool(&self, name: &str, subnet: &str) {
        let pool = json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": name },
            "spec": { "subnets": [{ "ipv4": subnet }] },
        });
        self.plane.apply(&pool.to_string()).unwrap();
    }

    /// Exit code of `fairlead status`, and its output.
    fn status(&self) -> (Option<i32>, String) {
        let mut command = Command::new(executable("fairlead").unwrap());
        command.args(["status", "--cluster", "--kubeconfig"]).arg(self.plane.kubeconfig());
        let output = command.stdin(Stdio::null()).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    }
}

fn condition(object: &Value, type_: &str) -> Option<Value> {
    let conditions = object["status"]["conditions"].as_array()?;
    conditions.iter().find(|condition| condition["type"] == type_).cloned()
}

#[test]
fn a_pool_is_compared_with_what_else_has_addresses_and_names_both() {
    let bed = bed();
    bed.pool("mixed", "10.77.0.0/16");
    let free = bed.condition(&["addresspool", "mixed"], "RangeInUse", "False");
    assert_eq!(free["reason"], "RangeFree");
    // What comes later cannot be refused.
    bed.node("inside");
    let patch = r#"{"spec": {"podCIDR": "10.77.8.0/24", "podCIDRs": ["10.77.8.0/24"]}}"#;
    bed.plane.kubectl(&["patch", "node", "inside", "--type=merge", "-p", patch]).unwrap();
    let plugin = bed.condition(&["addresspool", "mixed"], "RangeInUse", "True");
    assert_eq!(plugin["reason"], "RangeOfPodCIDRs", "{plugin}");
    assert!(bed.event("mixed", "RangeInUse").contains("10.77.8.0/24 of spec.podCIDRs of Node inside"));
    bed.set_status(
        &["node", "inside"],
        &json!({ "addresses": [{ "type": "InternalIP", "address": "10.77.0.9" }] }),
    );
    let services = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": { "name": "more" },
        "spec": { "cidrs": ["10.77.4.0/24"] },
    });
    bed.plane.apply(&services.to_string()).unwrap();
    let told = eventually(TIMEOUT, || {
        let found = condition(&bed.get(&["addresspool", "mixed"])?, "RangeInUse").context("none")?;
        let message = found["message"].as_str().unwrap_or_default().to_owned();
        ensure!(
            found["reason"] == "RangeInUse" && message.contains("Service") && message.contains("10.77.0.9"),
            "{found}"
        );
        Ok(message)
    });
    let told = told.unwrap();
    for words in [
        "10.77.0.0/16 shares addresses with 10.77.4.0/24 of ServiceCIDR more",
        "10.77.0.0/16 shares addresses with 10.77.0.9/32 of Node inside",
    ] {
        assert!(told.contains(words), "{words} is not in {told}");
    }
    let (code, text) = bed.status();
    assert_eq!(code, Some(3), "{text}");
    assert!(text.contains("pool mixed: 10.77.0.0/16 shares addresses"), "{text}");
    // It can be disabled, and the condition goes with its cause.
    let disable = r#"{"spec": {"disabled": true}}"#;
    bed.plane.kubectl(&["patch", "addresspool", "mixed", "--type=merge", "-p", disable]).unwrap();
    bed.plane.kubectl(&["delete", "node", "inside"]).unwrap();
    bed.plane.kubectl(&["delete", "servicecidr", "more", "--wait=false"]).unwrap();
    let unprotect = r#"{"metadata": {"finalizers": null}}"#;
    let _ = bed.plane.kubectl(&["patch", "servicecidr", "more", "--type=merge", "-p", unprotect]);
    bed.condition(&["addresspool", "mixed"], "RangeInUse", "False");
}

/// Packets for these addresses are led to Peers, to hosts beside a Node and to egress gateways.
#[test]
fn a_pool_is_compared_with_what_is_led_elsewhere_and_names_both() {
    let bed = bed();
    bed.pool("led", "10.83.0.0/16");
    bed.condition(&["addresspool", "led"], "RangeInUse", "False");
    let peer = |name: &str, prefix: &str| {
        let peer = json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": name },
            "spec": { "publicKey": "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=", "allowedIPs": [prefix] },
        });
        bed.plane.apply(&peer.to_string()).unwrap();
    };
    // The way out of the cluster lies around all pools.
    peer("exit", "0.0.0.0/0");
    peer("office", "10.82.0.0/15");
    let wider = bed.condition(&["addresspool", "led"], "RangeInUse", "True");
    assert_eq!(wider["reason"], "RangeWithinWider", "{wider}");
    let words =
        "10.83.0.0/16 shares addresses with 10.82.0.0/15 of spec.allowedIPs of Peer office: hosts there";
    assert!(wider["message"].as_str().unwrap().starts_with(words), "{wider}");
    assert!(bed.event("led", "RangeInUse").starts_with(words));
    peer("laptop", "10.83.1.1/32");
    bed.node("beside");
    let annotation = "kilo.squat.ai/allowed-location-ips=10.83.2.0/24";
    bed.plane.kubectl(&["annotate", "node", "beside", annotation]).unwrap();
    let egress = json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "Egress", "metadata": { "name": "led", "namespace": "default" },
        "spec": { "destinations": ["0.0.0.0/0"], "sourceAddresses": ["10.83.3.7", "10.83.3.8"] },
    });
    bed.plane.apply(&egress.to_string()).unwrap();
    // As the controller of egress gateways, which does not run here, permits the first.
    let permitted = r#"{"status": {"sourceAddresses": [{"addresses": ["10.83.3.7"]}]}}"#;
    let patch = ["patch", "egress", "led", "--subresource=status", "--type=merge", "-p", permitted];
    bed.plane.kubectl(&patch).unwrap();
    let all = [
        "10.83.3.7/32 of status.sourceAddresses of Egress default/led",
        "10.83.1.1/32 of spec.allowedIPs of Peer laptop",
        "10.83.2.0/24 of kilo.squat.ai/allowed-location-ips of Node beside",
    ];
    let told = eventually(TIMEOUT, || {
        let found = condition(&bed.get(&["addresspool", "led"])?, "RangeInUse").context("none")?;
        let message = found["message"].as_str().unwrap_or_default();
        ensure!(all.iter().all(|words| message.contains(words)), "{found}");
        Ok(found)
    });
    let told = told.unwrap();
    assert_eq!(told["reason"], "RangeInUse", "{told}");
    let message = told["message"].as_str().unwrap();
    assert!(message.contains(" and 1 more: ") && !message.contains("10.83.3.8"), "{message}");
    bed.plane.kubectl(&["delete", "peers.kilo.squat.ai", "exit", "office", "laptop"]).unwrap();
    bed.plane.kubectl(&["delete", "node", "beside"]).unwrap();
    bed.plane.kubectl(&["delete", "egress", "led"]).unwrap();
    bed.condition(&["addresspool", "led"], "RangeInUse", "False");
}

#[test]
fn addresses_on_the_mesh_are_compared_with_pools() {
    let bed = bed();
    bed.pool("beside", "10.81.0.0/24");
    let mesh = json!({
        "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh", "metadata": { "name": "default" },
        "spec": { "meshCIDR": "10.81.0.0/16" },
    });
    bed.plane.apply(&mesh.to_string()).unwrap();
    let of_mesh = bed.condition(&["wkmesh", "default"], "RangeInUse", "True");
    let words = "10.81.0.0/16 shares addresses with 10.81.0.0/24 of AddressPool beside";
    assert!(of_mesh["message"].as_str().unwrap().contains(words), "{of_mesh}");
    assert!(bed.event("default", "RangeInUse").contains(words));
    let of_pool = bed.condition(&["addresspool", "beside"], "RangeInUse", "True");
    let words = "10.81.0.0/24 shares addresses with 10.81.0.0/16 of spec.meshCIDR of WireKubeMesh default";
    assert!(of_pool["message"].as_str().unwrap().contains(words), "{of_pool}");
    let elsewhere = r#"{"spec": {"meshCIDR": "100.100.0.0/16"}}"#;
    bed.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", elsewhere]).unwrap();
    bed.condition(&["wkmesh", "default"], "RangeInUse", "False");
    bed.condition(&["addresspool", "beside"], "RangeInUse", "False");
}

#[test]
fn a_network_that_a_cloud_calls_unavailable_is_available_once_the_node_program_is_ready() {
    let bed = bed();
    let unavailable = json!({ "conditions": [
        { "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "m" },
        { "type": "NetworkUnavailable", "status": "True", "reason": "NoRouteCreated", "message": "m" },
    ] });
    for node in ["cloudy", "dark", "plain"] {
        bed.node(node);
    }
    for node in ["cloudy", "dark"] {
        bed.set_status(&["node", node], &unavailable);
    }
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "coild-cloudy", "namespace": "kube-system",
            "labels": { "app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "coild" } },
        "spec": { "nodeName": "cloudy", "containers": [{ "name": "a", "image": "registry.example.com/a" }] },
    });
    bed.plane.apply(&pod.to_string()).unwrap();
    let ready = json!({ "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] });
    bed.set_status(&["pod", "coild-cloudy", "--namespace", "kube-system"], &ready);
    let cleared = bed.condition(&["node", "cloudy"], "NetworkUnavailable", "False");
    assert_eq!(cleared["reason"], "FairleadIsUp", "{cleared}");
    let kubelets = condition(&bed.get(&["node", "cloudy"]).unwrap(), "Ready").unwrap();
    assert_eq!((&kubelets["status"], &kubelets["reason"]), (&json!("True"), &json!("KubeletReady")));
    // The cloud sets it again, and again.
    for _ in 0..2 {
        bed.set_status(&["node", "cloudy"], &unavailable);
        bed.condition(&["node", "cloudy"], "NetworkUnavailable", "False");
    }
    let note = bed.event("cloudy", "NetworkUnavailableSetAgain");
    assert!(note.contains("NoRouteCreated") && note.contains("--configure-cloud-routes=false"), "{note}");
    let dark = condition(&bed.get(&["node", "dark"]).unwrap(), "NetworkUnavailable").unwrap();
    assert_eq!(dark["status"], "True", "no node program is there");
    assert_eq!(condition(&bed.get(&["node", "plain"]).unwrap(), "NetworkUnavailable"), None);
}

#[test]
fn network_policies_are_named_while_no_program_enforces_them() {
    let bed = bed();
    let note = bed.event("deny", "NotEnforced");
    assert!(note.starts_with("NetworkPolicy default/deny is not enforced"), "{note}");
    assert!(bed.status().1.contains("NetworkPolicy default/deny is not enforced"), "{}", bed.status().1);
    let labels = json!({ "k8s-app": "calico-node" });
    let enforcer = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": { "name": "calico-node", "namespace": "kube-system", "labels": labels },
        "spec": { "selector": { "matchLabels": labels }, "template": {
            "metadata": { "labels": labels },
            "spec": { "containers": [{ "name": "a", "image": "registry.example.com/a" }] },
        } },
    });
    bed.plane.apply(&enforcer.to_string()).unwrap();
    assert!(!bed.status().1.contains("is not enforced"), "{}", bed.status().1);
    bed.plane.kubectl(&["delete", "daemonset", "calico-node", "--namespace", "kube-system"]).unwrap();
}

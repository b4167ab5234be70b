//! The controller beside a real API server: InternalIPs stay with the Node that had them first, and peers go with their Nodes. The
//! controllers of Kubernetes do not run, and with them no garbage collection.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use testbed_lab::eventually;

use crate::controller_bed::Bed;

/// More than the minute for which a Node has to be gone.
const TIMEOUT: Duration = Duration::from_secs(150);
const KEY: &str = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";

impl Bed {
    #[track_caller]
    fn until(&self, object: &[&str], check: impl Fn(&Value) -> bool) -> Value {
        let found = eventually(TIMEOUT, || {
            let found = self.get(object)?;
            ensure!(check(&found), "{found}");
            Ok(found)
        });
        found.unwrap_or_else(|error| panic!("{object:?}: {error:#}"))
    }

    /// A Node and its peer.
    fn join(&self, name: &str, address: &str) {
        self.plane.apply(&format!("{{apiVersion: v1, kind: Node, metadata: {{name: {name}}}}}")).unwrap();
        self.kubelet_says(name, &[address]).unwrap();
        let uid = self.get(&["node", name]).unwrap()["metadata"]["uid"].clone();
        let owner = json!({ "apiVersion": "v1", "kind": "Node", "name": name, "uid": uid });
        let peer = json!({ "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer",
            "metadata": { "name": name, "ownerReferences": [owner] },
            "spec": { "publicKey": KEY, "allowedIPs": [format!("{address}/32")] } });
        self.plane.apply(&peer.to_string()).unwrap();
    }

    /// The kubelet writes the addresses of its own Node, or who has stolen its certificate.
    fn kubelet_says(&self, node: &str, addresses: &[&str]) -> Result<String> {
        let addresses = addresses.iter().map(|it| json!({ "type": "InternalIP", "address": it }));
        let mut object = self.get(&["node", node])?;
        object["status"]["addresses"] = addresses.collect();
        if let Some(metadata) = object["metadata"].as_object_mut() {
            metadata.remove("resourceVersion");
        }
        // `kubectl patch --subresource` reads the status, which kubelets may not.
        let path = format!("/api/v1/nodes/{node}/status");
        let user = format!("--as=system:node:{node}");
        let replace = [user.as_str(), "--as-group=system:nodes", "replace", "--raw", &path, "-f", "-"];
        self.plane.kubectl_stdin(&replace, &object.to_string())
    }
}

fn internal_ips(peer: &Value) -> &Value {
    &peer["status"]["node"]["internalIPs"]
}

fn believed(mesh: &Value) -> Option<&Value> {
    let conditions = mesh["status"]["conditions"].as_array()?;
    conditions.iter().find(|condition| condition["type"] == "InternalIPsBelieved")
}

#[test]
fn a_stolen_kubelet_certificate_takes_no_address_and_a_peer_goes_with_its_node() {
    let mesh = json!({ "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh", "metadata": { "name": "default" }, "spec": {} });
    let bed = Bed::start(&mesh);
    // The thief is the older Node.
    bed.join("thief", "192.0.2.2");
    bed.join("victim", "192.0.2.1");
    for (name, address) in [("thief", "192.0.2.2"), ("victim", "192.0.2.1")] {
        bed.until(&["wkpeer", name], |peer| *internal_ips(peer) == json!([address]));
    }
    // Both the address of another Node, and that of a server elsewhere.
    bed.kubelet_says("thief", &["192.0.2.2", "192.0.2.1", "203.0.113.80"]).unwrap();
    let mesh = bed.until(&["wkmesh", "default"], |mesh| {
        believed(mesh).is_some_and(|condition| condition["status"] == "False")
    });
    let condition = believed(&mesh).unwrap();
    assert_eq!(condition["reason"], "InternalIPRefused");
    let message = condition["message"].as_str().unwrap();
    let words = "InternalIP 192.0.2.1 of Node thief is not believed: Node victim had it first";
    assert!(message.contains(words) && message.contains("203.0.113.80"), "{message}");
    bed.until(&["events.events.k8s.io", "--namespace", "default"], |events| {
        events["items"].as_array().is_some_and(|events| {
            events.iter().any(|event| {
                event["reason"] == "InternalIPRefused"
                    && event["regarding"]["name"] == "thief"
                    && event["note"].as_str().is_some_and(|note| note.starts_with(words))
            })
        })
    });
    assert_eq!(*internal_ips(&bed.get(&["wkpeer", "thief"]).unwrap()), json!(["192.0.2.2"]));
    assert_eq!(*internal_ips(&bed.get(&["wkpeer", "victim"]).unwrap()), json!(["192.0.2.1"]));
    let grants = r#"{"spec": {"grants": [{"node": "thief", "cidrs": ["203.0.113.80/32"]}]}}"#;
    bed.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", grants]).unwrap();
    bed.until(&["wkpeer", "thief"], |peer| *internal_ips(peer) == json!(["192.0.2.2", "203.0.113.80"]));
    bed.kubelet_says("thief", &["192.0.2.2"]).unwrap();
    bed.until(&["wkmesh", "default"], |mesh| {
        believed(mesh).is_some_and(|condition| condition["status"] == "True")
    });
    // A finalizer of before the policy holds the peer, and its owner was taken away.
    let held = r#"{"metadata": {"finalizers": ["example.com/stays"], "ownerReferences": null}}"#;
    bed.plane.kubectl(&["patch", "wkpeer", "thief", "--type=merge", "-p", held]).unwrap();
    bed.plane.kubectl(&["delete", "node", "thief"]).unwrap();
    bed.until(&["wkpeer", "thief"], |peer| !peer["metadata"]["deletionTimestamp"].is_null());
    bed.until(&["wkmesh", "default"], |mesh| {
        let deleted = mesh["status"]["deletedPeers"].as_array();
        deleted.is_some_and(|deleted| deleted.iter().any(|peer| peer["name"] == "thief"))
    });
    assert!(bed.get(&["wkpeer", "victim"]).unwrap()["metadata"]["deletionTimestamp"].is_null());
}

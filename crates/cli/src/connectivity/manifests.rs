//! The objects of a test.

use k8s_openapi::api::core::v1::{Namespace, Pod, Service};
use serde_json::{Value, json};

use super::plan::{PORT, SERVICE};

/// Label with the role of a pod.
pub(super) const ROLE: &str = "fairlead-connectivity";
/// Role of the pods that are connected to.
pub(super) const TARGET: &str = "target";
/// Role of the pods that connect.
pub(super) const PROBE: &str = "probe";

/// User of the image without rights on its files.
const USER: i64 = 10_000;

/// A namespace of its own, in which the strictest standard for pods holds.
pub(super) fn namespace() -> serde_json::Result<Namespace> {
    serde_json::from_value(json!({ "metadata": {
        "generateName": "fairlead-connectivity-",
        "labels": {
            "pod-security.kubernetes.io/enforce": "restricted",
            "app.kubernetes.io/name": "fairlead",
            "app.kubernetes.io/component": "connectivity-test",
        },
    } }))
}

/// The Service in front of the targets.
pub(super) fn service() -> serde_json::Result<Service> {
    serde_json::from_value(json!({
        "metadata": { "name": SERVICE },
        "spec": {
            "selector": { ROLE: TARGET }, "ipFamilyPolicy": "PreferDualStack",
            "ports": [{ "port": PORT, "protocol": "TCP" }],
        },
    }))
}

/// A pod that is connected to.
pub(super) fn target(name: &str, node: &str, image: &str) -> serde_json::Result<Pod> {
    let port = PORT.to_string();
    let arguments = ["connectivity", "serve", "--port", &port, "--name", name];
    let readiness = json!({ "tcpSocket": { "port": PORT }, "periodSeconds": 1 });
    serde_json::from_value(pod(name, TARGET, node, image, &arguments, &readiness))
}

/// A pod that connects.
pub(super) fn probe(name: &str, node: &str, image: &str, targets: &[String]) -> serde_json::Result<Pod> {
    let arguments = ["connectivity", "probe"].into_iter().chain(targets.iter().map(String::as_str));
    serde_json::from_value(pod(name, PROBE, node, image, &arguments.collect::<Vec<_>>(), &Value::Null))
}

/// Bound to its node, so that taints and other pods do not matter.
fn pod(name: &str, role: &str, node: &str, image: &str, arguments: &[&str], readiness: &Value) -> Value {
    json!({
        "metadata": { "name": name, "labels": { ROLE: role } },
        "spec": {
            "nodeName": node,
            "restartPolicy": if role == PROBE { "Never" } else { "Always" },
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 1,
            "tolerations": [{ "operator": "Exists" }],
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": USER, "runAsGroup": USER,
                "seccompProfile": { "type": "RuntimeDefault" },
            },
            "containers": [{
                "name": role, "image": image, "args": arguments, "readinessProbe": readiness,
                "securityContext": {
                    "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": { "drop": ["ALL"] },
                },
                "resources": { "requests": { "cpu": "10m", "memory": "16Mi" }, "limits": { "memory": "64Mi" } },
            }],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_bound_to_their_node_and_only_targets_are_behind_the_service() {
        let (target, probe) =
            (target("t", "n1", "i").unwrap(), probe("p", "n2", "i", &["a:1".to_owned()]).unwrap());
        let selector = service().unwrap().spec.unwrap().selector.unwrap();
        assert_eq!(target.metadata.labels.as_ref(), Some(&selector));
        assert_ne!(probe.metadata.labels.as_ref(), Some(&selector));
        assert_eq!(target.spec.as_ref().unwrap().node_name.as_deref(), Some("n1"));
        let arguments = probe.spec.unwrap().containers.remove(0).args.unwrap();
        assert_eq!(arguments, ["connectivity", "probe", "a:1"]);
    }
}

//! Pods reduced to what concerns addresses. All other fields are not even parsed, so that a node program stays small beside
//! pods with long specifications.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fairlead_api::names::{
    ANNOTATION_EGRESS_PREFIX, APP_NAME, EGRESS_COMPONENT, LABEL_APP_COMPONENT, LABEL_APP_INSTANCE,
    LABEL_APP_NAME,
};
use k8s_openapi::api::core::v1::Pod;
use kube::Resource;
use kube::api::ObjectMeta;
use serde::{Deserialize, Serialize};

/// Annotation on the mirror of a static pod: the UID by which kubelet knows the pod (kubelet, `ConfigHashAnnotationKey`).
const ANNOTATION_STATIC_UID: &str = "kubernetes.io/config.hash";

/// A pod: its identity, its node, and the addresses in its status.
#[derive(Resource, Serialize, Deserialize, Clone, Debug, Default)]
#[resource(inherit = Pod)]
pub struct SlimPod {
    /// Name, namespace, UID; see [`trimmed`].
    #[serde(default)]
    pub metadata: ObjectMeta,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    node_name: Option<String>,
    host_network: bool,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct Status {
    phase: Option<String>,
    #[serde(rename = "podIPs")]
    pod_ips: Vec<PodIp>,
}

#[derive(Serialize, Deserialize, Clone, Debug)]
struct PodIp {
    ip: String,
}

impl SlimPod {
    /// Namespace of the pod; empty for an object without one, which the API server does not return.
    pub fn namespace(&self) -> &str {
        self.metadata.namespace.as_deref().unwrap_or_default()
    }

    /// Name of the pod.
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// UIDs of the pod: the object's, and kubelet's own for a static pod. Container runtimes pass kubelet's.
    pub fn uids(&self) -> Vec<String> {
        let of_static = self.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_STATIC_UID));
        self.metadata.uid.iter().chain(of_static).cloned().collect()
    }

    /// The node it is bound to, if any.
    pub fn node(&self) -> Option<&str> {
        self.spec.node_name.as_deref()
    }

    /// Whether it uses its node's network and has no address of its own.
    pub fn uses_host_network(&self) -> bool {
        self.spec.host_network
    }

    /// Whether it has terminated (`status.phase`), so that its addresses may belong to other pods.
    pub fn has_ended(&self) -> bool {
        matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"))
    }

    /// The name of the Egress in its namespace of which it is a gateway, by its labels; `None` for other pods.
    pub fn gateway_of(&self) -> Option<&str> {
        gateway_of(self.metadata.labels.as_ref())
    }

    /// `status.podIPs`, without entries that are no address.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.status.pod_ips.iter().filter_map(|listed| listed.ip.parse().ok()).collect()
    }
}

/// The name of the Egress of which a pod with these labels is a gateway. Everyone who may create pods can set them: they give a
/// pod no rights.
pub fn gateway_of(labels: Option<&BTreeMap<String, String>>) -> Option<&str> {
    let labels = labels?;
    let is = |label: &str, value: &str| labels.get(label).is_some_and(|found| found == value);
    let is_gateway = is(LABEL_APP_NAME, APP_NAME) && is(LABEL_APP_COMPONENT, EGRESS_COMPONENT);
    labels.get(LABEL_APP_INSTANCE).filter(|_| is_gateway).map(String::as_str)
}

/// Keeps of the metadata only the identity, the annotations that concern the network, and the labels, by which Egresses select pods.
pub fn trimmed(pod: &mut SlimPod) {
    let whole = std::mem::take(&mut pod.metadata);
    let is_kept = |name: &str| name == ANNOTATION_STATIC_UID || name.starts_with(ANNOTATION_EGRESS_PREFIX);
    let annotations = whole.annotations.map(|mut all| {
        all.retain(|name, _| is_kept(name));
        all
    });
    pod.metadata = ObjectMeta {
        labels: whole.labels,
        name: whole.name,
        namespace: whole.namespace,
        uid: whole.uid,
        resource_version: whole.resource_version,
        annotations: annotations.filter(|kept| !kept.is_empty()),
        ..ObjectMeta::default()
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(mut json: serde_json::Value) -> SlimPod {
        json["apiVersion"] = "v1".into();
        json["kind"] = "Pod".into();
        let mut pod = serde_json::from_value(json).unwrap();
        trimmed(&mut pod);
        pod
    }

    #[test]
    fn only_what_concerns_addresses_is_kept() {
        let pod = pod(serde_json::json!({
            "metadata": {
                "name": "web", "namespace": "shop", "uid": "u1", "labels": { "a": "b" },
                "annotations": {
                    "kubernetes.io/config.hash": "h1", "egress.coil.cybozu.com/nat": "a", "note": "long",
                },
                "managedFields": [{ "manager": "kubelet" }],
            },
            "spec": { "nodeName": "n1", "containers": [{ "name": "main", "image": "i" }] },
            "status": { "phase": "Running", "podIPs": [{ "ip": "10.0.0.1" }, { "ip": "fd00::1" }, { "ip": "?" }] },
        }));
        assert_eq!((pod.namespace(), pod.name(), pod.node()), ("shop", "web", Some("n1")));
        assert_eq!(pod.uids(), ["u1", "h1"]);
        assert_eq!(pod.addresses(), ["10.0.0.1".parse::<IpAddr>().unwrap(), "fd00::1".parse().unwrap()]);
        assert!(!pod.uses_host_network() && !pod.has_ended());
        assert_eq!(pod.metadata.labels.as_ref().map(BTreeMap::len), Some(1));
        assert_eq!(pod.metadata.managed_fields, None);
        assert_eq!(pod.metadata.annotations.unwrap().len(), 2);
    }

    #[test]
    fn a_gateway_is_known_by_its_labels() {
        let labels = |component: &str| {
            serde_json::json!({
                "app.kubernetes.io/name": "coil", "app.kubernetes.io/component": component,
                "app.kubernetes.io/instance": "nat", "pod-template-hash": "x",
            })
        };
        let gateway = pod(serde_json::json!({ "metadata": { "name": "g", "labels": labels("egress") } }));
        assert_eq!(gateway.gateway_of(), Some("nat"));
        let other = pod(serde_json::json!({ "metadata": { "name": "c", "labels": labels("ipam") } }));
        assert_eq!(other.gateway_of(), None);
    }

    #[test]
    fn a_pod_that_is_not_scheduled_yet_is_parsed() {
        let unscheduled = pod(serde_json::json!({ "metadata": { "name": "web" }, "spec": {}, "status": {} }));
        assert_eq!((unscheduled.node(), unscheduled.addresses()), (None, vec![]));
        let ended = pod(serde_json::json!({
            "metadata": { "name": "job" }, "spec": { "hostNetwork": true }, "status": { "phase": "Failed" },
        }));
        assert!(ended.has_ended() && ended.uses_host_network());
    }
}

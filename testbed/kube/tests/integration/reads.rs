//! Objects by the words of `kubectl get`, read without a kubectl for each: tests that wait for one ask many times.

use anyhow::Result;
use serde_json::Value;
use testbed_kube::ControlPlane;

/// Words for a kind, its API and resource, and whether its objects are in namespaces.
const KINDS: [(&str, &str, &str, bool); 16] = [
    ("addresspool", "/apis/coil.cybozu.com/v2", "addresspools", false),
    ("clusterrolebinding", "/apis/rbac.authorization.k8s.io/v1", "clusterrolebindings", false),
    ("deployment", "/apis/apps/v1", "deployments", true),
    ("egress", "/apis/coil.cybozu.com/v2", "egresses", true),
    ("endpointslices", "/apis/discovery.k8s.io/v1", "endpointslices", true),
    ("events", "/api/v1", "events", true),
    ("events.events.k8s.io", "/apis/events.k8s.io/v1", "events", true),
    ("lease", "/apis/coordination.k8s.io/v1", "leases", true),
    ("node", "/api/v1", "nodes", false),
    ("pdb", "/apis/policy/v1", "poddisruptionbudgets", true),
    ("pod", "/api/v1", "pods", true),
    ("pods", "/api/v1", "pods", true),
    ("service", "/api/v1", "services", true),
    ("serviceaccount", "/api/v1", "serviceaccounts", true),
    ("wkmesh", "/apis/wirekube.io/v1alpha1", "wirekubemeshes", false),
    ("wkpeer", "/apis/wirekube.io/v1alpha1", "wirekubepeers", false),
];

/// Output of `kubectl get -o json` with these words; by kubectl itself where they are not known here.
pub(crate) fn get(plane: &ControlPlane, words: &[&str]) -> Result<Value> {
    if let Some(path) = path(words) {
        return plane.get(&path);
    }
    Ok(serde_json::from_str(&plane.kubectl(&[&["get", "-o", "json"], words].concat())?)?)
}

/// Path in the API of what the words name: a kind, an object or none, namespaces and a selector.
fn path(words: &[&str]) -> Option<String> {
    let (kind, rest) = words.split_first()?;
    let (_, api, resource, is_namespaced) = KINDS.iter().find(|(known, ..)| known == kind)?;
    let (mut object, mut namespace, mut query) = (String::new(), Some("default"), String::new());
    let mut rest = rest.iter().copied();
    while let Some(word) = rest.next() {
        match word.strip_prefix("--selector=") {
            Some(selector) => query = format!("?labelSelector={selector}"),
            None if word == "--selector" => query = format!("?labelSelector={}", rest.next()?),
            None if word == "--namespace" => namespace = Some(rest.next()?),
            None if word == "--all-namespaces" => namespace = None,
            None if word.starts_with('-') || !object.is_empty() => return None,
            None => object = format!("/{word}"),
        }
    }
    let namespace = namespace.filter(|_| *is_namespaced).map(|it| format!("/namespaces/{it}"));
    let path = format!("{api}{}/{resource}{object}{query}", namespace.unwrap_or_default());
    // A space would end it.
    (!path.contains(' ')).then_some(path)
}

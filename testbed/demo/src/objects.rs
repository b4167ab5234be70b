//! The Kubernetes objects of the demo. A cluster has most of them already; here no other program makes them.

use std::net::IpAddr;

use serde_json::{Value, json};

/// Namespace of the demo's pods.
pub const NAMESPACE: &str = "demo";

/// Path in the API of all blocks.
pub const BLOCKS: &str = "/apis/coil.cybozu.com/v2/addressblocks";
/// Path in the API of all Events.
pub const EVENTS: &str = "/apis/events.k8s.io/v1/events";
/// Path in the API of all meshes.
pub const MESHES: &str = "/apis/wirekube.io/v1alpha1/wirekubemeshes";
/// Path in the API of all Nodes.
pub const NODES: &str = "/api/v1/nodes";
/// Path in the API of what nodes publish of themselves.
pub const PEERS: &str = "/apis/wirekube.io/v1alpha1/wirekubepeers";
/// Path in the API of all pools.
pub const POOLS: &str = "/apis/coil.cybozu.com/v2/addresspools";
/// Path in the API of all requests for blocks.
pub const REQUESTS: &str = "/apis/coil.cybozu.com/v2/blockrequests";

/// Objects that a user applies: the mesh and a pool. The same as `deploy/examples`, in one text.
pub const MESH_AND_POOL: &str = concat!(
    include_str!("../../../deploy/examples/mesh.yaml"),
    "\n---\n",
    include_str!("../../../deploy/examples/pool.yaml")
);

/// The mesh alone: `deploy/examples/mesh.yaml`.
pub const MESH: &str = include_str!("../../../deploy/examples/mesh.yaml");

/// The pool alone: `deploy/examples/pool.yaml`.
pub const POOL: &str = include_str!("../../../deploy/examples/pool.yaml");

/// Path in the API of a namespace.
pub fn namespace_path(namespace: &str) -> String {
    format!("/api/v1/namespaces/{namespace}")
}

/// Path in the API of a pod.
pub fn pod_path(namespace: &str, name: &str) -> String {
    format!("{}/pods/{name}", namespace_path(namespace))
}

/// Namespace of the pods.
pub fn namespace() -> String {
    format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {NAMESPACE}}}\n")
}

/// A Node, as a cluster would have it.
pub fn node(name: &str) -> String {
    format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\n")
}

/// The status a kubelet would write: the node's addresses.
pub fn node_status(addresses: &[IpAddr]) -> Value {
    let address = |address: &IpAddr| json!({ "type": "InternalIP", "address": address.to_string() });
    json!({ "status": { "addresses": addresses.iter().map(address).collect::<Vec<Value>>() } })
}

/// A pod bound to a node, as the scheduler leaves it.
pub fn pod(name: &str, node: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: {NAMESPACE}}}\nspec:\n  nodeName: {node}\n  \
         automountServiceAccountToken: false\n  containers: [{{name: main, image: \"example.invalid/none\"}}]\n"
    )
}

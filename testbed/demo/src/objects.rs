//! The Kubernetes objects of the demo. A cluster has most of them already; here no other program makes them.

use std::fmt::Write;
use std::net::IpAddr;

/// Namespace of the demo's pods.
pub const NAMESPACE: &str = "demo";

/// Objects that a user applies: the mesh and a pool. The same as `deploy/examples`, in one text.
pub const MESH_AND_POOL: &str = concat!(
    include_str!("../../../deploy/examples/mesh.yaml"),
    "\n---\n",
    include_str!("../../../deploy/examples/pool.yaml")
);

/// The pool alone: `deploy/examples/pool.yaml`.
pub const POOL: &str = include_str!("../../../deploy/examples/pool.yaml");

/// Nodes and the pods' namespace, as a cluster would have them.
pub fn cluster(nodes: &[String]) -> String {
    let mut yaml = format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {NAMESPACE}}}\n");
    for node in nodes {
        // Writing to a string cannot fail.
        let _ = write!(yaml, "---\napiVersion: v1\nkind: Node\nmetadata: {{name: {node}}}\n");
    }
    yaml
}

/// The status a kubelet would write: the node's addresses.
pub fn node_status(addresses: &[IpAddr]) -> String {
    let addresses: Vec<serde_json::Value> = addresses
        .iter()
        .map(|address| serde_json::json!({ "type": "InternalIP", "address": address.to_string() }))
        .collect();
    serde_json::json!({ "status": { "addresses": addresses } }).to_string()
}

/// A pod bound to a node, as the scheduler leaves it.
pub fn pod(name: &str, node: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: {NAMESPACE}}}\nspec:\n  nodeName: {node}\n  \
         automountServiceAccountToken: false\n  containers: [{{name: main, image: \"example.invalid/none\"}}]\n"
    )
}

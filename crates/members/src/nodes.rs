//! Node objects: the parts of them that are read.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Node, NodeStatus};
use kube::api::ObjectMeta;

/// Types of addresses inside the cluster.
pub const INTERNAL: &[&str] = &["InternalIP"];
/// Types of all addresses at which the node may be reached.
pub const ANY: &[&str] = &["InternalIP", "ExternalIP"];

/// Addresses of the Node object of these types, in the order of the types, each once.
pub fn addresses(node: &Node, types: &[&str]) -> Vec<IpAddr> {
    let listed = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let mut addresses = Vec::new();
    for type_ in types {
        for entry in listed.clone().filter(|entry| entry.type_ == *type_) {
            match entry.address.parse() {
                Ok(address) if !addresses.contains(&address) => addresses.push(address),
                _ => {}
            }
        }
    }
    addresses
}

/// Leaves of a Node only its name and addresses: a node program must stay small in a large cluster.
pub fn trim(node: &mut Node) {
    let addresses = node.status.take().and_then(|status| status.addresses);
    *node = Node {
        metadata: ObjectMeta { name: node.metadata.name.take(), ..ObjectMeta::default() },
        spec: None,
        status: Some(NodeStatus { addresses, ..NodeStatus::default() }),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_node_only_name_and_addresses_are_kept() {
        let mut node: Node = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "b", "annotations": { "a": "b" }, "labels": { "c": "d" } },
            "spec": { "podCIDR": "10.0.0.0/24" },
            "status": { "addresses": [{ "type": "InternalIP", "address": "192.0.2.2" }], "images": [{ "sizeBytes": 1 }] },
        }))
        .unwrap();
        trim(&mut node);
        assert_eq!(addresses(&node, INTERNAL).len(), 1);
        let expected = serde_json::json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": "b" },
            "status": { "addresses": [{ "type": "InternalIP", "address": "192.0.2.2" }] },
        });
        assert_eq!(serde_json::to_value(&node).unwrap(), expected);
    }
}

//! Nodes reduced to where they and their pods are.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::Node;
use kube::Resource;
use kube::api::ObjectMeta;
use serde::{Deserialize, Serialize};

/// A Node: where it is, and its pods are; other fields are not even parsed.
#[derive(Resource, Serialize, Deserialize, Clone, Debug, Default)]
#[resource(inherit = Node)]
pub struct SlimNode {
    #[serde(default)]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: NodeFields,
    #[serde(default)]
    status: NodeState,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct NodeFields {
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Vec<String>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct NodeState {
    addresses: Vec<NodeAddress>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct NodeAddress {
    address: String,
}

impl SlimNode {
    /// `status.addresses` without names.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.status.addresses.iter().filter_map(|it| it.address.parse().ok())
    }

    /// `spec.podCIDRs`
    pub fn pod_cidrs(&self) -> &[String] {
        &self.spec.pod_cidrs
    }
}

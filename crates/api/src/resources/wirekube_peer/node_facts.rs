//! Facts of the Node object that the controller copies into the peer of the same name.

use fairlead_address::AddressFilter;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::names::LABEL_CONTROL_PLANE;
use crate::resources::location::NodeLocation;
use crate::resources::node_annotations::{MAX_ENTRIES, MAX_POD_PREFIXES, NodeFilters};
use crate::resources::rules::{ADDRESS_LENGTH, CIDR_LENGTH, FILTER_LENGTH, parse_prefixes};

/// Facts from the Node object of a peer, as the controller last read it.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NodeFacts {
    /// Addresses of the Node of type InternalIP that the controller believes: none that another Node had first.
    #[serde(default, rename = "internalIPs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = ADDRESS_LENGTH)))]
    pub internal_ips: Vec<String>,
    /// Addresses that the controller copied first. A public address that the Node has later is believed in their networks, and where
    /// spec.grants of the WireKubeMesh gives it.
    #[serde(default, rename = "firstInternalIPs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 45)))]
    pub first_internal_ips: Vec<String>,
    /// Whether the Node has the label node-role.kubernetes.io/control-plane. Such nodes reach etcd, the API server and the kubelet of each other past the mesh while
    /// there is no tunnel between them.
    #[serde(default, rename = "controlPlane", skip_serializing_if = "std::ops::Not::not")]
    pub is_control_plane: bool,
    /// Location of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<NodeLocation>,
    /// The annotation wirekube.io/endpoint-filters: filters by which endpoints of the node are chosen for publication. Without it, spec.endpointFilters of the
    /// WireKubeMesh says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = MAX_ENTRIES), inner(length(max = FILTER_LENGTH)))]
    pub endpoint_filters: Option<Vec<String>>,
    /// Prefixes in spec.podCIDRs of the Node without those it excludes from the mesh. They are in the mesh if spec.autoAllowedIPs.includePodCIDRs
    /// of the WireKubeMesh says so.
    #[serde(default, rename = "podCIDRs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_POD_PREFIXES), inner(length(max = CIDR_LENGTH)))]
    pub pod_cidrs: Vec<String>,
    /// Addresses of the node on the mesh, which the controller gave it: one of the IPv6 subnet of the cluster, and one of spec.meshCIDR
    /// of the WireKubeMesh. They are on its WireGuard device, and no other node has them.
    #[serde(default, rename = "meshIPs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4), inner(length(max = 45)))]
    pub mesh_ips: Vec<String>,
}

impl NodeFacts {
    /// The networks of a Node's pods in the mesh: `spec.podCIDRs`, or `spec.podCIDR` where that is all there is, without what the Node
    /// excludes ([`NodeFilters`]); what is no prefix is left out.
    pub fn pod_cidrs_of(node: &Node) -> Vec<IpNet> {
        NodeFilters::pod_cidrs(node)
    }

    /// Whether a Node has the label of control-plane nodes, whatever its value.
    pub fn is_control_plane_of(node: &Node) -> bool {
        node.metadata.labels.iter().any(|labels| labels.contains_key(LABEL_CONTROL_PLANE))
    }

    /// The filter that was copied.
    pub fn parse_endpoint_filters(&self) -> Option<AddressFilter> {
        let entries = self.endpoint_filters.as_ref()?;
        Some(AddressFilter::new(entries.iter().filter_map(|entry| entry.parse().ok())))
    }

    /// Networks of pods that were copied; texts that are no prefixes are left out.
    pub fn parse_pod_cidrs(&self) -> Vec<IpNet> {
        parse_prefixes(&self.pod_cidrs).0
    }
}

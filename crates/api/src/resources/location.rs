//! Where nodes are: the settings of a mesh about locations, and what of a Node is copied to its WireKubePeer.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fairlead_address::{Endpoint, is_private, is_reachable};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rules::{CIDR_LENGTH, parse_prefixes};
use crate::names::{
    ANNOTATION_KILO_ALLOWED_LOCATION_IPS, ANNOTATION_KILO_FORCE_ENDPOINT, ANNOTATION_KILO_FORCE_INTERNAL_IP,
    ANNOTATION_KILO_LEADER, ANNOTATION_KILO_LOCATION, LABEL_REGION,
};

/// Longest name of a location.
const MAX_NAME: usize = 253;
/// Most prefixes of hosts beside a node.
const MAX_NETWORKS: usize = 256;
/// Most internal addresses of a node.
const MAX_INTERNAL: usize = 16;

/// How nodes are connected, by where they are.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Topology {
    /// full: every node has a tunnel to every other, wherever they are. cross: only to those of other locations; inside of a
    /// location, packets take the network of the location as they are, unencrypted, and the tunnel only where a node is not on
    /// the same subnet. location: as cross, and two to four nodes of each location are its gateways; only gateways have
    /// tunnels to other locations, and the other nodes reach these through them.
    #[serde(default)]
    pub granularity: Granularity,
    /// What packets take inside of a location with granularity cross or location, without encryption: IP tunnels (IPIP; IPv6 in
    /// IPv6) between the internal addresses of the nodes. never: none; to a node on another subnet they take the encrypted tunnel.
    /// crosssubnet: to nodes on other subnets. always: to all nodes of the location. Where the kernel has no such tunnels, or the
    /// network does not let them pass, packets take the encrypted tunnel.
    #[serde(default)]
    pub encapsulation: Encapsulation,
}

/// To which nodes of its location a node sends packets through an IP tunnel, as Kilo names it.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Encapsulation {
    /// All.
    Always,
    /// Those on other subnets.
    CrossSubnet,
    /// None.
    #[default]
    Never,
}

/// Between which nodes there are tunnels, as Kilo names it.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Granularity {
    /// Nodes of different locations.
    Cross,
    /// All nodes.
    #[default]
    Full,
    /// Gateways of different locations.
    Location,
}

/// Where a node is. The controller copies it from the Node, so that a change of a Node costs one write and no node
/// has to watch all Nodes; nodes may not write it.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NodeLocation {
    /// The annotation kilo.squat.ai/location, else the label topology.kubernetes.io/region. Nodes without either share the
    /// location without a name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = MAX_NAME))]
    pub name: String,
    /// Its addresses inside of the location: the annotation kilo.squat.ai/force-internal-ip, else its addresses of type
    /// InternalIP. A node without any is a location of its own. With a length, it is that of the subnet.
    #[serde(default, rename = "internalIPs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_INTERNAL), inner(length(max = CIDR_LENGTH)))]
    pub internal_ips: Vec<String>,
    /// The annotation kilo.squat.ai/leader, whatever its value: it is to be a gateway of its location.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leader: bool,
    /// It has a public address: kilo.squat.ai/force-endpoint names one, or it is among the addresses of the Node. Such
    /// nodes are gateways rather than others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub public: bool,
    /// The annotation kilo.squat.ai/allowed-location-ips: prefixes in CIDR notation of hosts beside the node, which are no
    /// nodes. Others reach them through it, and it masquerades.
    #[serde(default, rename = "allowedLocationIPs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_NETWORKS), inner(length(max = CIDR_LENGTH)))]
    pub networks: Vec<String>,
}

/// An annotation that cannot be read, and is left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidAnnotation {
    /// Its name.
    pub annotation: &'static str,
    /// Its value.
    pub value: String,
    /// What it should be.
    pub expected: &'static str,
}

impl NodeLocation {
    /// The annotations that [`Self::of`] reads.
    pub const ANNOTATIONS: &'static [&'static str] = &[
        ANNOTATION_KILO_ALLOWED_LOCATION_IPS,
        ANNOTATION_KILO_FORCE_ENDPOINT,
        ANNOTATION_KILO_FORCE_INTERNAL_IP,
        ANNOTATION_KILO_LEADER,
        ANNOTATION_KILO_LOCATION,
    ];

    /// What the labels, annotations and addresses of a Node say.
    pub fn of(node: &Node) -> (Self, Vec<InvalidAnnotation>) {
        let none = BTreeMap::new();
        let annotations = node.metadata.annotations.as_ref().unwrap_or(&none);
        let region = node.metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_REGION));
        let mut invalid = Vec::new();
        let mut name = annotations.get(ANNOTATION_KILO_LOCATION).or(region).cloned().unwrap_or_default();
        let forced = annotations
            .get(ANNOTATION_KILO_FORCE_INTERNAL_IP)
            .and_then(|text| forced_addresses(text).map_err(|()| invalid.push(bad_address(text))).ok());
        let mut internal_ips =
            forced.unwrap_or_else(|| internal_addresses(node).map(|it| it.to_string()).collect());
        internal_ips.truncate(MAX_INTERNAL);
        if name.len() > MAX_NAME {
            let expected = "at most 253 bytes; the node is a location of its own";
            let value = name.chars().take(40).collect();
            invalid.push(InvalidAnnotation { annotation: ANNOTATION_KILO_LOCATION, value, expected });
            name.clear();
            internal_ips.clear();
        }
        let leader = annotations.contains_key(ANNOTATION_KILO_LEADER);
        let public = is_public(node, annotations.get(ANNOTATION_KILO_FORCE_ENDPOINT));
        let networks = annotations.get(ANNOTATION_KILO_ALLOWED_LOCATION_IPS);
        let networks = networks.map(|text| networks_of(text, &mut invalid)).unwrap_or_default();
        (Self { name, internal_ips, leader, public, networks }, invalid)
    }

    /// The prefixes of hosts beside the node, with host bits cleared, and the texts that are none.
    pub fn parse_networks(&self) -> (Vec<IpNet>, Vec<&str>) {
        parse_prefixes(&self.networks)
    }

    /// The internal addresses with the length of their subnet, if an administrator gave it, and the texts that are none.
    pub fn parse_internal_ips(&self) -> (Vec<(IpAddr, Option<u8>)>, Vec<&str>) {
        let (mut addresses, mut unreadable) = (Vec::new(), Vec::new());
        for text in &self.internal_ips {
            let prefix = || text.parse().map(|it: IpNet| (it.addr(), Some(it.prefix_len())));
            match text.parse().map(|address| (address, None)).or_else(|_| prefix()) {
                Ok(address) => addresses.push(address),
                Err(_) => unreadable.push(text.as_str()),
            }
        }
        (addresses, unreadable)
    }
}

fn internal_addresses(node: &Node) -> impl Iterator<Item = IpAddr> {
    let listed = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let internal = listed.filter(|it| it.type_ == "InternalIP").filter_map(|it| it.address.parse().ok());
    internal.filter(|address| is_reachable(*address))
}

/// Carrier-grade NAT (100.64.0.0/10) and unique local addresses (fc00::/7) are not public. A name of an endpoint may
/// stand for any address.
fn is_public(node: &Node, endpoint: Option<&String>) -> bool {
    let endpoint = endpoint.and_then(|text| text.parse::<Endpoint>().ok());
    if let Some(endpoint) = endpoint {
        return endpoint.address().is_some_and(|it| is_reachable(it.ip()) && !is_private(it.ip()));
    }
    let listed = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let addresses = listed.filter(|it| matches!(it.type_.as_str(), "ExternalIP" | "InternalIP"));
    let mut addresses = addresses.filter_map(|it| it.address.parse().ok());
    addresses.any(|address| is_reachable(address) && !is_private(address))
}

/// Nothing or a hyphen is no address; else CIDRs, separated by commas.
fn forced_addresses(text: &str) -> Result<Vec<String>, ()> {
    if matches!(text.trim(), "" | "-") {
        return Ok(Vec::new());
    }
    let parse = |part: &str| part.trim().parse::<IpNet>().ok().filter(|it| is_reachable(it.addr()));
    text.split(',').map(|part| parse(part).map(|it| it.to_string()).ok_or(())).collect()
}

/// CIDRs, separated by commas, each once. What is none is left out, and the others count, as with Kilo.
fn networks_of(text: &str, invalid: &mut Vec<InvalidAnnotation>) -> Vec<String> {
    let mut refuse = |value: &str, expected| {
        let value = value.chars().take(CIDR_LENGTH).collect();
        invalid.push(InvalidAnnotation { annotation: ANNOTATION_KILO_ALLOWED_LOCATION_IPS, value, expected });
    };
    let mut networks = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        match part.parse::<IpNet>().map(|it| it.trunc().to_string()) {
            Ok(network) if networks.contains(&network) => {}
            Ok(_) if networks.len() >= MAX_NETWORKS => {
                refuse(part, "name at most 256 prefixes; this one and those after it are left out");
                break;
            }
            Ok(network) => networks.push(network),
            Err(_) => refuse(part, "write ADDRESS/LENGTH, separated by commas"),
        }
    }
    networks
}

fn bad_address(text: &str) -> InvalidAnnotation {
    InvalidAnnotation {
        annotation: ANNOTATION_KILO_FORCE_INTERNAL_IP,
        value: text.to_owned(),
        expected: "write ADDRESS/LENGTH, or - for none",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(annotations: Value, addresses: &[(&str, &str)]) -> (NodeLocation, Vec<&'static str>) {
        let addresses: Vec<Value> =
            addresses.iter().map(|(kind, it)| json!({ "type": kind, "address": it })).collect();
        let metadata =
            json!({ "name": "n", "labels": { LABEL_REGION: "region" }, "annotations": annotations });
        let node = json!({ "metadata": metadata, "status": { "addresses": addresses } });
        let (location, invalid) = NodeLocation::of(&serde_json::from_value(node).unwrap());
        (location, invalid.iter().map(|it| it.annotation).collect())
    }

    const PRIVATE: (&str, &str) = ("InternalIP", "10.0.0.5");

    #[test]
    fn the_annotation_comes_before_the_label_even_if_it_is_empty() {
        assert_eq!(read(json!({}), &[]).0.name, "region");
        assert_eq!(read(json!({ ANNOTATION_KILO_LOCATION: "lab" }), &[]).0.name, "lab");
        assert_eq!(read(json!({ ANNOTATION_KILO_LOCATION: "" }), &[]).0.name, "");
        let long = read(json!({ ANNOTATION_KILO_LOCATION: "x".repeat(254) }), &[PRIVATE]);
        assert_eq!(long, (NodeLocation::default(), vec![ANNOTATION_KILO_LOCATION]));
    }

    #[test]
    fn the_annotation_makes_a_leader_and_an_address_of_the_internet_a_public_node() {
        assert!(!read(json!({}), &[PRIVATE]).0.leader);
        assert!(read(json!({ ANNOTATION_KILO_LEADER: "false" }), &[PRIVATE]).0.leader, "as Kilo reads it");
        let public = |address| read(json!({}), &[PRIVATE, ("ExternalIP", address)]).0.public;
        for private in ["100.64.0.1", "fd00:1::1", "fc00::1", "fe80::1", "x"] {
            assert!(!public(private), "{private}");
        }
        assert!(public("203.0.113.7") && public("2001:db9::1"));
        let forced = |endpoint: &str| {
            let annotations = json!({ ANNOTATION_KILO_FORCE_ENDPOINT: endpoint });
            read(annotations, &[("InternalIP", "203.0.113.7")]).0.public
        };
        assert!(forced("203.0.113.8:51820") && forced("nonsense"));
        assert!(!forced("10.0.0.1:51820") && !forced("node.example:51820"));
    }

    #[test]
    fn prefixes_beside_a_node_are_read_and_what_is_none_costs_only_itself() {
        let networks = |text: &str| {
            let (location, invalid) = read(json!({ ANNOTATION_KILO_ALLOWED_LOCATION_IPS: text }), &[PRIVATE]);
            (location.networks, invalid)
        };
        let both = networks("10.9.0.7/16, fd00:9::/48,10.9.0.0/16,");
        assert_eq!(both, (vec!["10.9.0.0/16".to_owned(), "fd00:9::/48".to_owned()], vec![]));
        assert_eq!(networks(""), (vec![], vec![]));
        let bad = networks("10.9.0.0/33,x,10.8.0.1,10.7.0.0/24");
        assert_eq!(bad, (vec!["10.7.0.0/24".to_owned()], vec![ANNOTATION_KILO_ALLOWED_LOCATION_IPS; 3]));
        let many: Vec<String> = (0..400).map(|at| format!("10.{}.{}.0/24", at / 256, at % 256)).collect();
        let many = networks(&many.join(","));
        assert_eq!((many.0.len(), many.1.len()), (256, 1));
    }

    #[test]
    fn an_administrator_says_which_address_is_internal() {
        let internal = |text: &str| read(json!({ ANNOTATION_KILO_FORCE_INTERNAL_IP: text }), &[PRIVATE]);
        assert_eq!(read(json!({}), &[PRIVATE, ("InternalIP", "fe80::1")]).0.internal_ips, ["10.0.0.5"]);
        for none in ["", "-", " - "] {
            assert_eq!(internal(none).0.internal_ips, Vec::<String>::new(), "{none:?}");
        }
        let both = internal("192.168.7.9/16, fd00::9/64");
        assert_eq!(both.0.internal_ips, ["192.168.7.9/16", "fd00::9/64"]);
        assert_eq!(both.0.parse_internal_ips().0.len(), 2);
        for bad in ["10.0.0.9", "x", "10.0.0.9/33", "127.0.0.1/8", "fd00::1/64,x"] {
            let (location, invalid) = internal(bad);
            assert_eq!(location.internal_ips, ["10.0.0.5"], "{bad}");
            assert_eq!(invalid, [ANNOTATION_KILO_FORCE_INTERNAL_IP], "{bad}");
        }
    }
}

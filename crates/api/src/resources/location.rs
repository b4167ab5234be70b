//! Locations of nodes: the settings of a mesh about them, and the parts of a Node that are copied to its WireKubePeer.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fairlead_address::{Endpoint, is_private, is_reachable};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rules::{CIDR_LENGTH, cidrs, explained, parse_prefixes};
use crate::names::{
    ANNOTATION_INTERNAL_IP, ANNOTATION_KILO_ALLOWED_LOCATION_IPS, ANNOTATION_KILO_FORCE_ENDPOINT,
    ANNOTATION_KILO_FORCE_INTERNAL_IP, ANNOTATION_KILO_LEADER, ANNOTATION_KILO_LOCATION, LABEL_REGION,
    LABEL_ZONE, RESTRICTED_LABEL_PREFIX,
};

/// Longest name of a location.
const MAX_NAME: usize = 253;
/// Most prefixes of hosts beside a node.
const MAX_NETWORKS: usize = 256;
/// Most internal addresses of a node.
const MAX_INTERNAL: usize = 16;

/// Tunnels between nodes, by the locations of the nodes.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Topology {
    /// full: every node has a tunnel to every other, wherever they are. cross: only to those of other locations; inside of a
    /// location, packets take the network of the location as they are, unencrypted, and the tunnel only where a node is not on
    /// the same subnet. location: as cross, and two to four nodes of each location are its gateways; only gateways have
    /// tunnels to other locations, and the other nodes reach these through them.
    #[serde(default)]
    pub granularity: Granularity,
    /// Use of unencrypted IP tunnels (IPIP; IPv6 in IPv6) between the internal addresses of the nodes of a location, with granularity
    /// cross or location. never: none; to a node on another subnet packets take the encrypted tunnel. crosssubnet: to nodes on other
    /// subnets. always: to all nodes of the location. Where the kernel has no such tunnels, or the network does not let them pass,
    /// packets take the encrypted tunnel.
    #[serde(default)]
    pub encapsulation: Encapsulation,
    /// Label of Nodes that names their location, where the annotation kilo.squat.ai/location does not: topology.kubernetes.io/region
    /// (the default), topology.kubernetes.io/zone, or one that begins with node-restriction.kubernetes.io/. Kubelets may set others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 317))]
    #[x_kube(validation = explained(
        "self in ['topology.kubernetes.io/region', 'topology.kubernetes.io/zone'] || self.matches('^node-restriction[.]kubernetes[.]io/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$')",
        r#""'" + self + "' is no label that only administrators and controllers set: topology.kubernetes.io/region, topology.kubernetes.io/zone or node-restriction.kubernetes.io/NAME""#,
    ))]
    pub label: Option<String>,
    /// Prefixes in CIDR notation: addresses of type InternalIP in them are addresses of a node inside of its location. Without prefixes all
    /// InternalIPs are. A node without such an address is a location of its own. Annotations that name internal addresses come first.
    #[serde(default, rename = "internalCIDRs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = CIDR_LENGTH)))]
    #[x_kube(validation = cidrs())]
    pub internal_cidrs: Vec<String>,
}

impl Topology {
    /// Whether a label of Nodes may name locations: kubelets cannot set it on a Node that is there.
    pub fn may_be_location(label: &str) -> bool {
        [LABEL_REGION, LABEL_ZONE].contains(&label) || label.starts_with(RESTRICTED_LABEL_PREFIX)
    }

    /// The label that names locations.
    pub fn location_label(&self) -> &str {
        self.label.as_deref().filter(|label| Self::may_be_location(label)).unwrap_or(LABEL_REGION)
    }

    /// Prefixes of internal addresses, and the texts that are no prefixes; `None` if internal addresses may be anywhere.
    pub fn internal_prefixes(&self) -> Option<(Vec<IpNet>, Vec<&str>)> {
        (!self.internal_cidrs.is_empty()).then(|| parse_prefixes(&self.internal_cidrs))
    }
}

/// Nodes of its location to which a node sends packets through an IP tunnel, as Kilo names them.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Encapsulation {
    /// All nodes.
    Always,
    /// Nodes on other subnets.
    CrossSubnet,
    /// No nodes.
    #[default]
    Never,
}

/// Granularity of the mesh, as Kilo names it: the nodes between which there are tunnels.
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

impl Granularity {
    /// Word for it in the spec.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cross => "cross",
            Self::Full => "full",
            Self::Location => "location",
        }
    }
}

/// Location of a node. The controller copies it from the Node, so that a change of a Node costs one write and no node
/// has to watch all Nodes; nodes may not write it.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NodeLocation {
    /// The annotation kilo.squat.ai/location, else the label that spec.topology.label of the WireKubeMesh names, which by default is
    /// topology.kubernetes.io/region. Nodes without either share the location without a name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = MAX_NAME))]
    pub name: String,
    /// Addresses of the node inside of the location: the annotation kilo.squat.ai/force-internal-ip, else wirekube.io/internal-ip, else its
    /// addresses of type InternalIP that spec.topology.internalCIDRs covers. A node without any is a location of its own. With a length, it is that of the subnet.
    #[serde(default, rename = "internalIPs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_INTERNAL), inner(length(max = CIDR_LENGTH)))]
    pub internal_ips: Vec<String>,
    /// The annotation kilo.squat.ai/leader, whatever its value: it is to be a gateway of its location.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leader: bool,
    /// Whether the node has a public address: kilo.squat.ai/force-endpoint names one, or one is among the addresses of the Node.
    /// Such nodes are gateways rather than others.
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
    /// Name of the annotation.
    pub annotation: &'static str,
    /// Value of the annotation, or the part of it that is wrong.
    pub value: String,
    /// Advice on what to write instead.
    pub expected: &'static str,
}

impl NodeLocation {
    /// The annotations that [`Self::of`] reads.
    pub const ANNOTATIONS: &'static [&'static str] = &[
        ANNOTATION_INTERNAL_IP,
        ANNOTATION_KILO_ALLOWED_LOCATION_IPS,
        ANNOTATION_KILO_FORCE_ENDPOINT,
        ANNOTATION_KILO_FORCE_INTERNAL_IP,
        ANNOTATION_KILO_LEADER,
        ANNOTATION_KILO_LOCATION,
    ];

    /// Reads the labels, annotations and addresses of a Node, as the mesh takes them. What cannot be read is reported.
    pub fn of(node: &Node, topology: &Topology) -> (Self, Vec<InvalidAnnotation>) {
        let none = BTreeMap::new();
        let annotations = node.metadata.annotations.as_ref().unwrap_or(&none);
        let label = node.metadata.labels.as_ref().and_then(|labels| labels.get(topology.location_label()));
        let mut invalid = Vec::new();
        let mut name = annotations.get(ANNOTATION_KILO_LOCATION).or(label).cloned().unwrap_or_default();
        let forced = annotations
            .get(ANNOTATION_KILO_FORCE_INTERNAL_IP)
            .and_then(|text| forced_addresses(text).map_err(|()| invalid.push(bad_address(text))).ok());
        let forced = forced.or_else(|| {
            let text = annotations.get(ANNOTATION_INTERNAL_IP)?;
            wirekube_address(text).map_err(|()| invalid.push(bad_wirekube_address(text))).ok()
        });
        let mut internal_ips = forced.unwrap_or_else(|| {
            internal_addresses(node, topology).into_iter().map(|it| it.to_string()).collect()
        });
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
        let mut addresses = Vec::new();
        let mut unreadable = Vec::new();
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

fn internal_addresses(node: &Node, topology: &Topology) -> Vec<IpAddr> {
    let listed = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let internal = listed.filter(|it| it.type_ == "InternalIP").filter_map(|it| it.address.parse().ok());
    let prefixes = topology.internal_prefixes().map(|(prefixes, _)| prefixes);
    let is_inside = |address: &IpAddr| {
        prefixes.as_ref().is_none_or(|prefixes| prefixes.iter().any(|prefix| prefix.contains(address)))
    };
    internal.filter(|address| is_reachable(*address)).filter(is_inside).collect()
}

/// An address, with or without the length of its subnet.
fn wirekube_address(text: &str) -> Result<Vec<String>, ()> {
    let text = text.trim();
    let address = text.parse::<IpNet>().map(|it| (it.addr(), it.to_string()));
    let address = address.or_else(|_| text.parse::<IpAddr>().map(|it| (it, it.to_string())));
    let (address, text) = address.map_err(|_| ())?;
    if is_reachable(address) { Ok(vec![text]) } else { Err(()) }
}

fn bad_wirekube_address(text: &str) -> InvalidAnnotation {
    let value = text.chars().take(CIDR_LENGTH).collect();
    InvalidAnnotation {
        annotation: ANNOTATION_INTERNAL_IP,
        value,
        expected: "write ADDRESS or ADDRESS/LENGTH",
    }
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
        let (location, invalid) =
            NodeLocation::of(&serde_json::from_value(node).unwrap(), &Topology::default());
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
    fn the_mesh_says_which_label_names_locations_and_which_addresses_are_internal() {
        let labels = json!({ "topology.kubernetes.io/zone": "z", "node-restriction.kubernetes.io/site": "s",
            LABEL_REGION: "r", "example.com/site": "x" });
        let addresses = ["10.0.0.5", "192.168.7.5", "fd00::5"];
        let addresses: Vec<_> =
            addresses.iter().map(|it| json!({ "type": "InternalIP", "address": it })).collect();
        let node =
            json!({ "metadata": { "name": "n", "labels": labels }, "status": { "addresses": addresses } });
        let mut node: Node = serde_json::from_value(node).unwrap();
        let of = |node: &Node, topology: Value| {
            NodeLocation::of(node, &serde_json::from_value::<Topology>(topology).unwrap())
        };
        let name = |label: &str| of(&node, json!({ "label": label })).0.name;
        assert_eq!(
            [LABEL_ZONE, "node-restriction.kubernetes.io/site", LABEL_REGION].map(name),
            ["z", "s", "r"]
        );
        assert_eq!(name("example.com/site"), "r", "kubelets may set it");
        assert_eq!(name("node-restriction.kubernetes.io/other"), "");

        let internal = |cidrs: &[&str]| of(&node, json!({ "internalCIDRs": cidrs })).0.internal_ips;
        assert_eq!(internal(&["192.168.0.0/16", "fd00::/8"]), ["192.168.7.5", "fd00::5"]);
        assert_eq!(internal(&["172.16.0.0/12"]), [""; 0], "a location of its own");
        assert_eq!(internal(&["x"]), [""; 0]);
        assert_eq!(internal(&[]).len(), 3);

        // Annotations come first, and that of Kilo before that of WireKube.
        let mut annotated = |annotations: &[(&str, &str)]| {
            let owned = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
            node.metadata.annotations = Some(owned.collect());
            let (location, invalid) = of(&node, json!({ "internalCIDRs": ["172.16.0.0/12"] }));
            (location.internal_ips, invalid.len())
        };
        let (wirekube, kilo) = (ANNOTATION_INTERNAL_IP, ANNOTATION_KILO_FORCE_INTERNAL_IP);
        assert_eq!(annotated(&[(wirekube, "10.9.0.1")]), (vec!["10.9.0.1".to_owned()], 0));
        assert_eq!(annotated(&[(wirekube, "10.9.0.1/16")]), (vec!["10.9.0.1/16".to_owned()], 0));
        assert_eq!(annotated(&[(wirekube, "10.9.0.1"), (kilo, "-")]), (vec![], 0));
        for bad in ["", "-", "127.0.0.1", "10.9.0.1,10.9.0.2"] {
            assert_eq!(annotated(&[(wirekube, bad)]), (vec![], 1), "{bad}");
        }
    }

    proptest::proptest! {
        /// Anyone who may annotate a Node can write anything: what is copied to a WireKubePeer has the limits of its schema.
        #[test]
        fn hostile_annotations_never_panic_and_stay_within_limits(
            texts in proptest::collection::vec("[0-9a-f.:/,%! -]{0,60}|.{0,300}", 6),
            cidrs in proptest::collection::vec("[0-9a-f.:/]{0,30}", 0..3),
        ) {
            let names = NodeLocation::ANNOTATIONS.iter().map(|name| (*name).to_owned());
            let mut node = Node::default();
            node.metadata.annotations = Some(names.zip(texts.clone()).collect());
            let topology =
                Topology { label: texts.first().cloned(), internal_cidrs: cidrs, ..Topology::default() };
            let (location, invalid) = NodeLocation::of(&node, &topology);
            proptest::prop_assert!(location.name.len() <= MAX_NAME);
            proptest::prop_assert!(location.internal_ips.len() <= MAX_INTERNAL);
            proptest::prop_assert!(location.networks.len() <= MAX_NETWORKS);
            proptest::prop_assert!(invalid.len() <= MAX_NETWORKS + NodeLocation::ANNOTATIONS.len());
            let all = location.internal_ips.iter().chain(&location.networks);
            proptest::prop_assert!(all.clone().all(|text| text.len() <= CIDR_LENGTH));
            proptest::prop_assert!(location.parse_internal_ips().1.is_empty());
            proptest::prop_assert!(location.parse_networks().1.is_empty());
        }
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

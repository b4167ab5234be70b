//! Annotations of a Node that narrow what it has in the mesh, and where it is reached. The node reads them itself; the controller copies what
//! others have to know of them.

use std::str::FromStr;

use fairlead_address::{AddressFilter, FilterEntry, PrefixSet};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;

use super::location::InvalidAnnotation;
use super::rules::{CIDR_LENGTH, parse_prefixes};
use crate::names::{
    ANNOTATION_ENDPOINT_FILTERS, ANNOTATION_KUBESPAN_EXCLUDED, ANNOTATION_PEER_ENDPOINT_FILTERS,
};

/// Most entries of one annotation.
pub(super) const MAX_ENTRIES: usize = 64;
/// Most `podCIDRs` of a Node that are read: Kubernetes allows one of each family.
const MAX_POD_CIDRS: usize = 8;
/// Most prefixes that are copied of what is left of them.
pub(super) const MAX_POD_PREFIXES: usize = 64;

/// Filters that a Node sets for itself, by its annotations.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeFilters {
    /// Prefixes that are not reached through the mesh, of the node's own addresses and networks of pods: KubeSpan's
    /// `kubespan-exclude-advertised-networks`.
    pub excluded: Vec<IpNet>,
    /// Filter of its endpoints that nodes publish, itself included; `None` if the mesh says it.
    pub published: Option<AddressFilter>,
    /// Filter of the endpoints of others that it tries; `None` if the mesh says it.
    pub tried: Option<AddressFilter>,
}

impl NodeFilters {
    /// The annotations that [`Self::of`] reads.
    pub const ANNOTATIONS: &'static [&'static str] =
        &[ANNOTATION_ENDPOINT_FILTERS, ANNOTATION_KUBESPAN_EXCLUDED, ANNOTATION_PEER_ENDPOINT_FILTERS];

    /// Reads the annotations of a Node. Entries that cannot be read are left out and reported, and the rest counts.
    pub fn of(node: &Node) -> (Self, Vec<InvalidAnnotation>) {
        let mut invalid = Vec::new();
        let cidr = "write ADDRESS/LENGTH, separated by commas";
        let excluded = entries::<IpNet>(node, ANNOTATION_KUBESPAN_EXCLUDED, cidr, &mut invalid);
        let mut excluded = excluded.map(|(read, _)| read).unwrap_or_default();
        excluded.iter_mut().for_each(|prefix| *prefix = prefix.trunc());
        if without(&listed_pod_cidrs(node), &excluded).is_none() {
            let expected = "name fewer prefixes, or shorter ones: they would leave more than 64 of spec.podCIDRs, all of which stay in the mesh";
            let value = excluded.first().map(ToString::to_string).unwrap_or_default();
            invalid.push(InvalidAnnotation { annotation: ANNOTATION_KUBESPAN_EXCLUDED, value, expected });
        }
        let published = filter(node, ANNOTATION_ENDPOINT_FILTERS, &mut invalid);
        let tried = filter(node, ANNOTATION_PEER_ENDPOINT_FILTERS, &mut invalid);
        (Self { excluded, published, tried }, invalid)
    }

    /// The networks of a Node's pods in the mesh: `spec.podCIDRs`, or `spec.podCIDR` where that is all there is, without what the Node
    /// excludes; what is no prefix is left out.
    pub(super) fn pod_cidrs(node: &Node) -> Vec<IpNet> {
        let listed = listed_pod_cidrs(node);
        let (filters, _) = Self::of(node);
        without(&listed, &filters.excluded).unwrap_or(listed)
    }
}

fn listed_pod_cidrs(node: &Node) -> Vec<IpNet> {
    let spec = node.spec.as_ref();
    let listed = spec.and_then(|spec| spec.pod_cidrs.as_deref()).filter(|listed| !listed.is_empty());
    let first = spec.and_then(|spec| spec.pod_cidr.as_ref()).map(std::slice::from_ref);
    let (mut prefixes, _) = parse_prefixes(listed.or(first).unwrap_or_default());
    prefixes.sort_unstable();
    prefixes.dedup();
    prefixes.truncate(MAX_POD_CIDRS);
    prefixes
}

/// Rest of the prefixes without the excluded ones, in order; `None` if it has more than `MAX_POD_PREFIXES`. Untouched
/// ones stay as they are.
fn without(prefixes: &[IpNet], excluded: &[IpNet]) -> Option<Vec<IpNet>> {
    let all: PrefixSet = excluded.iter().collect();
    let left = prefixes.iter().flat_map(|prefix| {
        if !excluded.iter().any(|it| it.contains(prefix) || prefix.contains(it)) {
            return vec![*prefix];
        }
        PrefixSet::from_iter([*prefix]).subtract(&all).prefixes().collect()
    });
    let left: Vec<IpNet> = left.take(MAX_POD_PREFIXES.saturating_add(1)).collect();
    (left.len() <= MAX_POD_PREFIXES).then_some(left)
}

/// A filter that replaces that of the mesh. One of which nothing can be read replaces nothing; an empty one lets everything pass.
fn filter(
    node: &Node,
    annotation: &'static str,
    invalid: &mut Vec<InvalidAnnotation>,
) -> Option<AddressFilter> {
    let expected = "write prefixes and addresses, some with ! before them, separated by commas";
    let (read, is_whole) = entries::<FilterEntry>(node, annotation, expected, invalid)?;
    if read.is_empty() {
        return is_whole.then(AddressFilter::default);
    }
    if read.iter().all(|entry| entry.is_negated) {
        let expected = "every entry takes addresses away, which leaves none: begin with those that are added, such as 0.0.0.0/0,::/0";
        let value = read.first().map(ToString::to_string).unwrap_or_default();
        invalid.push(InvalidAnnotation { annotation, value, expected });
        return None;
    }
    Some(AddressFilter::new(read))
}

/// The entries of an annotation, separated by commas, and whether all could be read; `None` without the annotation.
fn entries<T: FromStr>(
    node: &Node,
    annotation: &'static str,
    expected: &'static str,
    invalid: &mut Vec<InvalidAnnotation>,
) -> Option<(Vec<T>, bool)> {
    let text = node.metadata.annotations.as_ref()?.get(annotation)?;
    let before = invalid.len();
    let mut read = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let value = || part.chars().take(CIDR_LENGTH).collect();
        match part.parse() {
            Ok(_) if read.len() >= MAX_ENTRIES => {
                let expected = "name at most 64; this one and those after it are left out";
                invalid.push(InvalidAnnotation { annotation, value: value(), expected });
                break;
            }
            Ok(entry) => read.push(entry),
            Err(_) => invalid.push(InvalidAnnotation { annotation, value: value(), expected }),
        }
    }
    let is_whole = invalid.len() == before;
    Some((read, is_whole))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::resources::NodeFacts;

    fn node(annotations: Value, networks: &[&str]) -> Node {
        let metadata = json!({ "name": "n", "annotations": annotations });
        serde_json::from_value(json!({ "metadata": metadata, "spec": { "podCIDRs": networks } })).unwrap()
    }

    fn excluded(text: &str, networks: &[&str]) -> (Vec<String>, Vec<String>, Vec<String>) {
        let node = node(json!({ ANNOTATION_KUBESPAN_EXCLUDED: text }), networks);
        let (filters, invalid) = NodeFilters::of(&node);
        let texts = |prefixes: &[IpNet]| prefixes.iter().map(ToString::to_string).collect();
        let left = texts(&NodeFacts::pod_cidrs_of(&node));
        (texts(&filters.excluded), left, invalid.into_iter().map(|it| it.value).collect())
    }

    #[test]
    fn what_a_node_excludes_is_taken_from_its_networks_of_pods() {
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let networks = &["10.244.1.0/24", "fd00:1::/64"];
        let read = excluded("10.244.1.128/25, 192.168.1.7/16,", networks);
        let both = texts(&["10.244.1.128/25", "192.168.0.0/16"]);
        assert_eq!(read, (both, texts(&["10.244.1.0/25", "fd00:1::/64"]), vec![]));
        assert_eq!(excluded("fd00::/8", networks).1, texts(&["10.244.1.0/24"]));
        assert_eq!(excluded("", networks), (vec![], texts(networks), vec![]));
        let bad = excluded("10.0.0.0/33,x,10.244.1.0/24", networks);
        assert_eq!((bad.1, bad.2), (texts(&["fd00:1::/64"]), texts(&["10.0.0.0/33", "x"])));
        // Neighbours stay as they are listed, where nothing is taken from them.
        let neighbours = &["10.244.0.0/24", "10.244.1.0/24"];
        assert_eq!(excluded("10.0.0.0/16", neighbours).1, texts(neighbours));
        // Each single address of a /64 leaves 64 prefixes.
        let (_, left, problems) = excluded("fd00:1::1/128,10.244.1.1/32", networks);
        assert_eq!((left, problems), (texts(networks), texts(&["fd00:1::1/128"])));
    }

    #[test]
    fn a_filter_of_a_node_replaces_that_of_the_mesh_unless_nothing_of_it_counts() {
        let read = |text: &str| {
            let node = node(json!({ ANNOTATION_ENDPOINT_FILTERS: text }), &[]);
            let (NodeFilters { published, tried, .. }, invalid) = NodeFilters::of(&node);
            assert_eq!(tried, None);
            let entries = published.map(|it| it.entries().iter().map(ToString::to_string).collect());
            (entries, invalid.len())
        };
        let some = |texts: &[&str]| Some(texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>());
        assert_eq!(read("0.0.0.0/0, !10.0.0.0/8,"), (some(&["0.0.0.0/0", "!10.0.0.0/8"]), 0));
        assert_eq!(read("192.0.2.1,nonsense"), (some(&["192.0.2.1/32"]), 1));
        assert_eq!(read(""), (some(&[]), 0));
        assert_eq!(read("nonsense"), (None, 1));
        assert_eq!(read("!10.0.0.0/8"), (None, 1));
        let many = vec!["10.0.0.0/8"; 100].join(",");
        let (entries, problems) = read(&many);
        assert_eq!((entries.map(|it| it.len()), problems), (Some(MAX_ENTRIES), 1));
        let node = node(json!({ ANNOTATION_PEER_ENDPOINT_FILTERS: "::/0" }), &[]);
        let (filters, invalid) = NodeFilters::of(&node);
        assert!(filters.published.is_none() && filters.tried.is_some() && invalid.is_empty());
        assert_eq!(NodeFilters::of(&Node::default()), (NodeFilters::default(), vec![]));
    }
}

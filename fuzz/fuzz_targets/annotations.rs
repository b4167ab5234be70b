//! What administrators, clouds and other programs write on Nodes: annotations about locations, endpoints, and what of them is
//! published and tried. Parts of the input are separated by NUL.
#![no_main]

use fairlead_address::Endpoint;
use fairlead_api::resources::{NodeFilters, NodeLocation, Topology};
use k8s_openapi::api::core::v1::{Node, NodeSpec};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let mut parts = text.split('\0').map(str::to_owned);
    let topology = Topology {
        label: parts.next(),
        internal_cidrs: parts.next().into_iter().collect(),
        ..Topology::default()
    };
    let pod_cidrs =
        topology.internal_cidrs.iter().flat_map(|text| text.split(',')).map(str::to_owned).collect();
    let mut node = Node {
        spec: Some(NodeSpec { pod_cidrs: Some(pod_cidrs), ..NodeSpec::default() }),
        ..Node::default()
    };
    let names =
        NodeLocation::ANNOTATIONS.iter().chain(NodeFilters::ANNOTATIONS).map(|name| (*name).to_owned());
    node.metadata.annotations = Some(names.zip(parts).collect());
    let (location, _) = NodeLocation::of(&node, &topology);
    // What is copied to a WireKubePeer is read again there.
    assert!(location.parse_internal_ips().1.is_empty());
    assert!(location.parse_networks().1.is_empty());
    let (filters, _) = NodeFilters::of(&node);
    assert!(filters.excluded.iter().all(|prefix| *prefix == prefix.trunc()));
    for entry in text.split([',', '\0']) {
        if let Ok(endpoint) = entry.parse::<Endpoint>() {
            assert_eq!(endpoint.to_string().parse().ok(), Some(endpoint));
        }
    }
});

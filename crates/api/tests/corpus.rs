//! Every input that the fuzz target `annotations` keeps is read again, without a fuzzer.
#![cfg(test)]

use std::path::Path;

use fairlead_api::resources::{NodeLocation, Topology};
use k8s_openapi::api::core::v1::Node;

#[test]
fn kept_annotations_never_panic_and_one_is_good() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/annotations");
    let mut good = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let mut parts = text.split('\0').map(str::to_owned);
        let topology = Topology {
            label: parts.next(),
            internal_cidrs: parts.next().into_iter().collect(),
            ..Topology::default()
        };
        let mut node = Node::default();
        let names = NodeLocation::ANNOTATIONS.iter().map(|name| (*name).to_owned());
        node.metadata.annotations = Some(names.zip(parts).collect());
        let (location, invalid) = NodeLocation::of(&node, &topology);
        if invalid.is_empty() {
            good.push(location);
        }
    }
    let [location] = &good[..] else { panic!("{good:?}") };
    assert_eq!((location.name.as_str(), location.leader), ("lab", true));
    assert_eq!((location.internal_ips.len(), location.networks.len()), (2, 2));
}

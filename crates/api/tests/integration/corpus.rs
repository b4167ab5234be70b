//! Every input that the fuzz target `annotations` keeps is read again, without a fuzzer.

use std::path::Path;

use fairlead_api::resources::{NodeFilters, NodeLocation, Topology};
use k8s_openapi::api::core::v1::Node;

#[test]
fn kept_annotations_never_panic_and_some_are_good() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/annotations");
    let (mut good, mut filtering) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(directory).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let mut parts = text.split('\0').map(str::to_owned);
        let topology = Topology {
            label: parts.next(),
            internal_cidrs: parts.next().into_iter().collect(),
            ..Topology::default()
        };
        let mut node = Node::default();
        let names =
            NodeLocation::ANNOTATIONS.iter().chain(NodeFilters::ANNOTATIONS).map(|name| (*name).to_owned());
        node.metadata.annotations = Some(names.zip(parts).collect());
        let (location, invalid) = NodeLocation::of(&node, &topology);
        if invalid.is_empty() {
            good.push(location);
        }
        let (filters, invalid) = NodeFilters::of(&node);
        if invalid.is_empty() && filters.published.is_some() {
            filtering.push(filters);
        }
    }
    good.sort_unstable_by(|one, other| one.name.cmp(&other.name));
    let names: Vec<_> = good.iter().map(|location| location.name.as_str()).collect();
    assert_eq!(names, ["attic", "lab", "shed"]);
    assert!(good.iter().all(|it| it.leader && it.internal_ips.len() == 2 && it.networks.len() == 2));
    let [filters] = &filtering[..] else { panic!("{filtering:?}") };
    assert_eq!(filters.excluded.len(), 2);
    let [published, tried] = [&filters.published, &filters.tried].map(|filter| filter.as_ref().unwrap());
    assert!(!published.allows("10.0.0.1".parse().unwrap()) && !tried.allows("192.0.2.1".parse().unwrap()));
}

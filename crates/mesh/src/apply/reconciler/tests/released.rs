//! Blocks that nodes released.

use std::collections::BTreeMap;

use fairlead_members::departures::{Departures, ReleasedBlocks};
use prometheus_client::registry::Registry;

use super::*;
use crate::tell::metrics::MeshMetrics;

#[test]
fn released_blocks_are_reported_unless_they_are_excluded() {
    let now = Instant::now();
    let block = |text: &str, seconds| (text.parse::<IpNet>().unwrap(), now + Duration::from_secs(seconds));
    let released: BTreeMap<IpNet, Instant> =
        [block("10.64.1.0/26", 60), block("10.64.2.0/26", 70), block("10.64.3.0/26", 80)].into();
    let mut inputs = inputs([member(1), member(2), member(3)]);
    inputs.settings.routing.excluded = vec!["10.64.2.0/24".parse().unwrap()];
    let released = ReleasedBlocks::restored(released);
    inputs.departures = Departures::restored(BTreeMap::new(), BTreeMap::new(), released);
    let report = mesh(&Shared::default()).reconcile(&Arc::new(inputs), now).unwrap();
    assert_eq!(report.released, [block("10.64.1.0/26", 60), block("10.64.3.0/26", 80)]);
    let mut all = Registry::default();
    MeshMetrics::register(&mut all).update("node-1", &report, false);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &all).unwrap();
    assert!(text.contains("\nfairlead_mesh_released_blocks 2\n"), "{text}");
}

//! Another version of Fairlead is rolled out while pods talk.

use std::time::Instant;

use testbed_nodes::install::Mode;

use crate::bed::{Room, Running, addresses_agree};
use crate::mesh::BED;

/// The node programs that move the packets of the tunnels are replaced, and hand their tunnels over: nothing is lost, neither
/// on one node nor between nodes.
#[test]
fn an_upgrade_loses_nothing() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "upgrade");
    let running = Running::start(&room);
    let mark = Instant::now();
    cluster.upgrade_fairlead(Mode::Mesh, "upgraded").unwrap();
    running.local.iter().chain(&running.across).for_each(|traffic| traffic.lost_nothing(mark));
    running.untouched(&room);
    running.more_start(&room);
    addresses_agree(&cluster);
}

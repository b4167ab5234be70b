//! Another version of Fairlead is rolled out while pods talk.

use std::time::Instant;

use testbed_nodes::install::Mode;

use crate::BED;
use crate::bed::{Room, Running, addresses_agree};

/// The node program that moves the packets of the tunnels is replaced: with WireGuard inside the process, messages between
/// nodes are lost until its successor is there. Everything on one node goes on, and so does every connection.
#[test]
fn an_upgrade_keeps_pods_addresses_and_connections() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "upgrade");
    let running = Running::start(&room);
    let mark = Instant::now();
    cluster.upgrade_fairlead(Mode::Mesh, "upgraded").unwrap();
    running.local.iter().for_each(|traffic| traffic.lost_nothing(mark));
    for traffic in &running.across {
        traffic.since(mark);
    }
    running.untouched(&room);
    running.more_start(&room);
    addresses_agree(&cluster);
}

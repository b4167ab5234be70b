//! Another version of Fairlead is rolled out while pods talk.

use std::time::Instant;

use testbed_nodes::install::Mode;

use crate::BED;
use crate::bed::{Room, Running, addresses_agree};

/// The node program that moves the packets of the tunnels is replaced: with WireGuard inside the process, messages between
/// nodes are lost until its successor has shaken hands. Nothing else is: not on one node, and no connection.
#[test]
fn an_upgrade_keeps_pods_addresses_and_connections() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "upgrade");
    let running = Running::start(&room);
    let mark = Instant::now();
    cluster.upgrade_fairlead(Mode::Mesh, "upgraded").unwrap();
    running.local.iter().for_each(|traffic| traffic.lost_nothing(mark));
    let lost: usize = running.across.iter().map(|traffic| traffic.lost_since(mark)).sum();
    println!("upgrade with WireGuard inside the process: {lost} messages lost between nodes");
    running.untouched(&room);
    running.more_start(&room);
    addresses_agree(&cluster);
}

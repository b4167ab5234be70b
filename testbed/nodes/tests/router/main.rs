//! Fairlead on real nodes of one network, without a mesh: `deploy/overlays/router`.
//!
//! Packets between pods go through the kernel alone, so nothing may be lost whatever happens to Fairlead.

#![cfg(test)]

#[path = "../bed/mod.rs"]
mod bed;

use std::time::Instant;

use anyhow::Result;
use testbed_lab::Progress;
use testbed_nodes::Cluster;
use testbed_nodes::install::{Mode, POOL_RANGES, test_images};
use testbed_nodes::topology::{Families, Network, one_network};

use bed::{Room, Running, addresses_agree};

static BED: bed::Bed = bed::Bed::new(build);

fn build() -> Result<Cluster> {
    let topology = one_network(2, Families::Dual, Network::Installed { pods: POOL_RANGES });
    let cluster = Cluster::start(topology, &test_images()?, Progress::default())?;
    cluster.install_fairlead(Mode::Router)?;
    Ok(cluster)
}

#[test]
fn an_upgrade_loses_no_packet_between_running_pods() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "upgrade");
    let running = Running::start(&room);
    let mark = Instant::now();
    cluster.upgrade_fairlead(Mode::Router, "upgraded").unwrap();
    running.all().for_each(|traffic| traffic.lost_nothing(mark));
    running.untouched(&room);
    running.more_start(&room);
    addresses_agree(&cluster);
}

//! A node between its boot and the first reconciliation of the mesh, of which the kernel has nothing: what is for pods of other nodes is refused.

use std::sync::atomic::{AtomicBool, Ordering};

use fairlead_dataplane::mesh::{refuse, remove, stop_refusing};
use ipnet::IpNet;

use crate::mesh_common::Namespace;
use crate::mesh_guard_routes::{WITHOUT_GUARD, assert_kept, everything, own_rules};
use crate::mesh_guard_routes_bed::{Bed, DATAGRAMS};

/// Table with the routes to pods of a node.
const TABLE_PODS: u32 = 116;
/// Prefixes of the other node's pods, and their addresses.
const PREFIXES: [&str; 2] = ["10.77.2.0/24", "fd77:2::/64"];
const PODS: [&str; 2] = ["10.77.2.2", "fd77:2::2"];
/// Addresses of the other node.
const NODES: [&str; 2] = ["192.0.2.2", "fd02::2"];
/// Datagrams of pod and host to two addresses.
const ALL: usize = 2 * 2 * DATAGRAMS;
/// Commands that take away what a reboot does, but for the device; [`WITHOUT_GUARD`] has the others.
const REBOOT: &str = "nft flush ruleset; for family in -4 -6; do for table in 180 181 182 183; do \
     ip $family route flush table $table 2>/dev/null || true; done; for pref in 32500 32800; do \
     while ip $family rule del pref $pref 2>/dev/null; do :; done; done; done";
/// Commands that print rules and routes of the mesh.
const SHOWN: &str = "ip rule; ip -6 rule; for table in 180 181 182 183; do for family in -4 -6; do \
     ip $family route show table $table 2>/dev/null || true; done; done";

fn refused(node: &Namespace, prefixes: &[&str]) -> bool {
    let prefixes: Vec<IpNet> = prefixes.iter().map(|prefix| prefix.parse().unwrap()).collect();
    node.run(|| refuse(|| Ok(Some((prefixes, "wire_kube".to_owned()))), TABLE_PODS).unwrap())
}

#[test]
fn after_a_reboot_pods_of_other_nodes_are_refused_until_the_mesh_is_there_and_nodes_are_not() {
    let mut bed = Bed::new();
    let rules = own_rules(&bed);
    bed.a.node.sh(REBOOT);
    bed.a.node.sh(WITHOUT_GUARD);
    let clear = bed.leaks_to(&PODS);
    assert!(clear >= ALL, "the kernel has nothing of the mesh: {clear}");

    assert!(refused(&bed.a.node, &PREFIXES));
    assert_eq!(bed.leaks_to(&PODS), 0);
    let clear = bed.leaks_to(&NODES);
    assert!(clear >= ALL, "an API server may have moved to another node: {clear}");
    let own: usize = ["10.77.1.2", "fd77:1::2"].iter().map(|pod| bed.send(&bed.a.node, pod)).sum();
    assert_eq!(own, 2 * DATAGRAMS, "the node's own pods");

    bed.apply_anew();
    assert_kept(everything(&bed), "reconciled");
    assert_eq!(own_rules(&bed), rules);
}

#[test]
fn a_program_that_starts_beside_the_mesh_of_an_earlier_one_refuses_nothing() {
    let bed = Bed::new();
    let before = bed.a.node.sh(SHOWN);
    assert!(!refused(&bed.a.node, &PREFIXES));
    assert_eq!(bed.a.node.sh(SHOWN), before);
    let has_asked = AtomicBool::new(false);
    let wanted = || {
        has_asked.store(true, Ordering::Relaxed);
        Ok(None)
    };
    assert!(!bed.a.node.run(|| refuse(wanted, TABLE_PODS).unwrap()));
    assert!(!has_asked.load(Ordering::Relaxed), "what an earlier run saved is not read");
}

#[test]
fn what_is_refused_is_removed_where_there_is_no_mesh_any_more() {
    let node = Namespace::new();
    let before = node.sh(SHOWN);
    assert!(!node.run(|| refuse(|| Ok(None), TABLE_PODS).unwrap()));
    assert!(!refused(&node, &[]));
    assert_eq!(node.sh(SHOWN), before, "nothing is to be refused");
    assert!(refused(&node, &PREFIXES));
    let shown = node.sh(SHOWN);
    for prefix in PREFIXES {
        assert!(shown.contains(&format!("unreachable {prefix} ")), "{shown}");
    }
    assert!(!refused(&node, &["10.77.3.0/24"]));
    assert_eq!(node.sh(SHOWN), shown, "a program that is started again");
    node.run(|| remove().unwrap());
    assert_eq!(node.sh(SHOWN), before);
}

#[test]
fn what_is_refused_ends_without_a_mesh_and_what_a_mesh_has_made_stays() {
    let node = Namespace::new();
    let before = node.sh(SHOWN);
    assert!(!node.run(|| stop_refusing().unwrap()), "nothing is refused");
    assert!(refused(&node, &PREFIXES));
    assert!(node.run(|| stop_refusing().unwrap()));
    assert_eq!(node.sh(SHOWN), before);

    let bed = Bed::new();
    let before = bed.a.node.sh(SHOWN);
    assert!(!bed.a.node.run(|| stop_refusing().unwrap()));
    assert_eq!(bed.a.node.sh(SHOWN), before);
}

/// A program that is killed between rules and routes has refused nothing yet.
#[test]
fn what_was_begun_is_completed() {
    let node = Namespace::new();
    assert!(refused(&node, &PREFIXES));
    let shown = node.sh(SHOWN);
    node.sh("ip route flush table 181; ip -6 route flush table 181");
    assert!(refused(&node, &PREFIXES));
    assert_eq!(node.sh(SHOWN), shown);
}

#[test]
fn nothing_is_refused_where_another_program_has_the_numbers() {
    let node = Namespace::new();
    node.sh("ip tuntap add kubespan mode tun && ip link set kubespan up; \
         ip route replace default dev kubespan table 180 proto static");
    let before = node.sh(SHOWN);
    assert!(!refused(&node, &PREFIXES));
    assert_eq!(node.sh(SHOWN), before);
}

//! A live session changes its path, between nodes that have two: IPv4 and IPv6.

#![cfg(test)]

mod outage;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fairlead_demo::{World, probe, topology};
use outage::{TIMEOUT, loses_nothing, node, peer, resumes, tcp, udp};
use testbed_lab::Progress;
use testbed_lab::traffic::Flow;

/// Until traffic is back on the other path: 2 to 3 s. Without probes, the silence of the peer is only noticed after 12 s.
const OTHER_PATH: Duration = Duration::from_secs(10);

/// Where `from` sends what is for `to`.
fn endpoint(world: &World, from: &str, to: &str) -> SocketAddr {
    let seen = peer(node(world, from), to).unwrap();
    seen["endpoint"].as_str().unwrap_or_else(|| panic!("{seen}")).parse().unwrap()
}

/// Drops WireGuard's port on a host in one family and these directions.
fn drop_wireguard(world: &World, name: &str, family: &str, hooks: &[&str]) {
    let chains: String = hooks
        .iter()
        .map(|hook| {
            format!(
                "chain {hook} {{ type filter hook {hook} priority 0; meta nfproto {family} udp dport 51820 drop; }}\n"
            )
        })
        .collect();
    node(world, name)
        .host
        .shell(&format!("nft -f - <<'END'\ntable inet testdrop {{\n{chains}}}\nEND"))
        .unwrap();
}

fn black_hole(world: &World, what: &str, hooks: &[&str], flows: &[Flow], elsewhere: &[Flow]) {
    // Longer than a session is idle after the last test's traffic, and until what flows is observed.
    std::thread::sleep(Duration::from_secs(6));
    let before = endpoint(world, "rack-1", "rack-2");
    let family = if before.is_ipv4() { "ipv4" } else { "ipv6" };
    println!("{what}: {before} and {}", endpoint(world, "rack-2", "rack-1"));
    let mark = Instant::now();
    drop_wireguard(world, "rack-1", family, hooks);
    resumes(what, flows, mark, mark, OTHER_PATH);
    loses_nothing(what, elsewhere, mark);
    let moved = || {
        let now = endpoint(world, "rack-1", "rack-2");
        anyhow::ensure!(now.is_ipv4() != before.is_ipv4(), "still {now}");
        Ok(now)
    };
    let now = testbed_lab::eventually(TIMEOUT, moved).unwrap();
    println!("{what}: from {before} to {now}");
    let mark = Instant::now();
    node(world, "rack-1").host.shell("nft delete table inet testdrop").unwrap();
    std::thread::sleep(Duration::from_secs(3));
    loses_nothing(what, flows, mark);
}

#[test]
fn a_path_that_becomes_a_black_hole_is_left_for_the_other_family() {
    let mut world = World::start(&topology::one_network(&[]), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    let deadline = Instant::now() + TIMEOUT;
    let (pairs, _) = probe::all_pairs(&world.pods, deadline, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");
    let flows =
        [udp(&world, "rack-1", "rack-2"), udp(&world, "rack-2", "rack-1"), tcp(&world, "rack-2", "rack-1")];
    let elsewhere = [udp(&world, "rack-2", "rack-3"), tcp(&world, "rack-3", "rack-2")];
    black_hole(&world, "a black hole in both directions", &["input", "output"], &flows, &elsewhere);
    black_hole(&world, "a black hole towards one node", &["input"], &flows, &elsewhere);
}

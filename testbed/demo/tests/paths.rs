//! A live session changes its path, between nodes that have two: IPv4 and IPv6.

#![cfg(test)]

mod outage;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fairlead_demo::{World, probe, topology};
use outage::{TIMEOUT, loses_nothing, node, peer, pod, resumes, tcp, udp};
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
        ensure!(now.is_ipv4() != before.is_ipv4(), "still {now}");
        Ok(now)
    };
    let now = testbed_lab::eventually(TIMEOUT, moved).unwrap();
    println!("{what}: from {before} to {now}");
    let mark = Instant::now();
    node(world, "rack-1").host.shell("nft delete table inet testdrop").unwrap();
    std::thread::sleep(Duration::from_secs(3));
    loses_nothing(what, flows, mark);
}

/// A packet of the tunnel's MTU, which must not be fragmented.
fn long_ping(world: &World) -> Result<()> {
    let (from, to) = (pod(world, "rack-1"), pod(world, "rack-2").addresses[0]);
    from.namespace.shell(&format!("ping -n -c 1 -W 1 -M do -s 1392 {to}")).map(drop)
}

fn drop_long_datagrams(world: &World, families: &[&str]) {
    let rules: String = families
        .iter()
        .map(|family| format!("meta nfproto {family} udp dport 51820 udp length > 1400 drop\n"))
        .collect();
    let table = format!(
        "table inet testdrop\ndelete table inet testdrop\n\
         table inet testdrop {{\nchain input {{\ntype filter hook input priority 0\n{rules}}}\n}}"
    );
    node(world, "rack-1").host.shell(&format!("nft -f - <<'END'\n{table}\nEND")).unwrap();
}

/// The problem `PathMTU` of a node, if it has it.
fn path_mtu(world: &World, name: &str) -> Result<Option<String>> {
    let status = node(world, name).status()?;
    let problems = status["problems"].as_array().context("no problems")?;
    let words = problems.iter().filter_map(serde_json::Value::as_str);
    Ok(words.filter(|words| words.contains("lower spec.mtu")).map(str::to_owned).next())
}

/// No router says so, and short packets pass.
fn long_packets_lost(world: &World, flows: &[Flow]) {
    testbed_lab::eventually(TIMEOUT, || long_ping(world)).unwrap();
    let before = endpoint(world, "rack-1", "rack-2");
    let lost = if before.is_ipv4() { "ipv4" } else { "ipv6" };
    let mark = Instant::now();
    drop_long_datagrams(world, &[lost]);
    let passes = || {
        long_ping(world)?;
        let now = endpoint(world, "rack-1", "rack-2");
        ensure!(now.is_ipv4() != before.is_ipv4(), "still {now}");
        Ok(())
    };
    testbed_lab::eventually(TIMEOUT, passes).unwrap();
    println!("long packets are lost over {lost}: they pass again after {:?}", mark.elapsed());
    drop_long_datagrams(world, &["ipv4", "ipv6"]);
    let told = || path_mtu(world, "rack-1")?.context("no problem");
    println!("{}", testbed_lab::eventually(TIMEOUT, told).unwrap());
    loses_nothing("long packets are lost", flows, mark);
    node(world, "rack-1").host.shell("nft delete table inet testdrop").unwrap();
    let gone = || {
        let problem = path_mtu(world, "rack-1")?;
        ensure!(problem.is_none(), "{problem:?}");
        long_ping(world)
    };
    testbed_lab::eventually(TIMEOUT, gone).unwrap();
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
    long_packets_lost(&world, &flows);
    black_hole(&world, "a black hole in both directions", &["input", "output"], &flows, &elsewhere);
    black_hole(&world, "a black hole towards one node", &["input"], &flows, &elsewhere);
}

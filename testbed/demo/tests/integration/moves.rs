//! Sessions in use move to better paths, of which not one message may be lost, and a node moves to another network. Nothing is fake
//! but the kubelet.

use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, loses_nothing, node, peer, pod, resumes};
use anyhow::{Context, Result, ensure};
use fairlead_demo::servers;
use fairlead_demo::{World, probe, topology};
use serde_json::json;
use testbed_lab::relay::TOKEN;
use testbed_lab::traffic::Flow;
use testbed_lab::{Progress, eventually};

/// Between two messages.
const PACE: Duration = Duration::from_millis(10);
/// Time for which traffic flows before a move.
const BEFORE: Duration = Duration::from_secs(1);
/// Time for which it is watched after one: messages of the last second do not count.
const AFTER: Duration = Duration::from_secs(2);
/// Longest time until traffic of a node that moved to another network is back. The goal is 3 s.
const ROAMED: Duration = Duration::from_secs(30);

/// Messages from each of two nodes to the other one, which answers each.
fn both_ways(world: &World, [one, other]: [&str; 2]) -> [Flow; 2] {
    [(one, other), (other, one)].map(|(from, to)| {
        let (from, to) = (pod(world, from), pod(world, to));
        Flow::udp_every(PACE, from, to, to.addresses[0]).unwrap()
    })
}

/// Endpoints at which two nodes have each other.
fn endpoints(world: &World, [one, other]: [&str; 2]) -> Result<[String; 2]> {
    let endpoint = |from: &str, to: &str| {
        let seen = peer(node(world, from), to).with_context(|| format!("{from} has no peer {to}"))?;
        ensure!(seen["state"] == "up", "{from} to {to}: {seen}");
        Ok(seen["endpoint"].as_str().unwrap_or_default().to_owned())
    };
    Ok([endpoint(one, other)?, endpoint(other, one)?])
}

/// Waits until both nodes send by the path that a test expects.
fn settles(world: &World, pair: [&str; 2], is_expected: impl Fn(&str) -> bool) -> [String; 2] {
    let settled = || {
        let found = endpoints(world, pair)?;
        ensure!(found.iter().all(|endpoint| is_expected(endpoint)), "{pair:?}: {found:?}");
        Ok(found)
    };
    eventually(TIMEOUT, settled).unwrap()
}

/// Traffic between two nodes moves from one path to another one when something changes, and not one message is lost.
fn moves(
    world: &World,
    what: &str,
    pair: [&str; 2],
    is_before: impl Fn(&str) -> bool,
    change: impl FnOnce(),
    is_after: impl Fn(&str) -> bool,
) {
    let before = settles(world, pair, is_before);
    let flows = both_ways(world, pair);
    std::thread::sleep(BEFORE);
    let mark = Instant::now();
    change();
    let after = settles(world, pair, is_after);
    println!("{what}: {before:?} became {after:?} after {:.1} s", mark.elapsed().as_secs_f64());
    std::thread::sleep(AFTER);
    loses_nothing(what, &flows, mark);
}

/// A cable between two nodes, which gives them a network of their own.
fn plug_in(world: &World, [one, other]: [&str; 2], network: &str) {
    let [one, other] = [one, other].map(|name| &node(world, name).host);
    let add = format!("ip link add lan0 type veth peer name lan0 netns {}", other.holder_pid());
    one.shell(&add).unwrap();
    for (host, last) in [(one, 1), (other, 2)] {
        host.shell(&format!("ip link set lan0 up\nip addr add {network}.{last}/24 dev lan0")).unwrap();
    }
}

fn is_relayed(endpoint: &str) -> bool {
    endpoint.contains("://")
}

/// Nodes behind one router, which keeps its hosts apart as that of a guest network does, reach each other by the relay, and then by a
/// cable.
fn a_lan_is_found(world: &World) {
    let pair = ["home-1", "home-2"];
    let change = || plug_in(world, pair, "192.168.77");
    let is_lan = |endpoint: &str| endpoint.starts_with("192.168.77.");
    moves(world, "a LAN is found", pair, is_relayed, change, is_lan);
}

/// An address of the network is better than one on the Internet, and IPv4 is better than IPv6.
fn the_family_changes(world: &World) {
    let pair = ["cloud-1", "cloud-2"];
    let host = &node(world, pair[0]).host;
    let add = format!("ip addr add {}/64 dev eth0 nodad", host.address6().unwrap());
    let is_public = |endpoint: &str| endpoint.starts_with("198.51.100.");
    let is_ipv6 = |endpoint: &str| endpoint.starts_with("[fd00:1a:");
    let change = || drop(host.shell(&add).unwrap());
    moves(world, "IPv4 to IPv6", pair, is_public, change, is_ipv6);
    let change = || plug_in(world, pair, "192.168.78");
    moves(world, "IPv6 to IPv4", pair, is_ipv6, change, |endpoint| endpoint.starts_with("192.168.78."));
}

/// A move of a node to another address, another router and another public address ends no connection in use.
fn a_node_roams(world: &World) {
    let what = "office-1 moves to the cafe";
    let flows = [["office-1", "cloud-1"], ["office-1", "home-1"]].map(|pair| both_ways(world, pair));
    let flows: Vec<Flow> = flows.into_iter().flatten().collect();
    std::thread::sleep(BEFORE);
    let cafe = world.sites.iter().find(|site| site.name() == "cafe").unwrap();
    let mark = Instant::now();
    node(world, "office-1").host.roam(cafe).unwrap();
    resumes(what, &flows, mark, mark, ROAMED);
    let longest = flows.iter().map(|flow| flow.figures_since(mark).longest_gap).max().unwrap();
    println!("{what}: longest gap {:.1} s (goal: 3 s)", longest.as_secs_f64());
    let public = cafe.router().address().to_string();
    let is_there = || {
        ["cloud-1", "home-1"].iter().try_for_each(|from| {
            let [_, endpoint] = endpoints(world, ["office-1", from])?;
            ensure!(endpoint.starts_with(&public), "{from}: {endpoint}");
            Ok(())
        })
    };
    eventually(TIMEOUT, is_there).unwrap();
}

#[test]
fn sessions_move_to_better_paths_and_lose_nothing() {
    let mut world = World::start(&topology::moving(), &Progress::default()).unwrap();
    let relay = servers::relay(&world).unwrap();
    let router = node(&world, "home-1").host.router().unwrap();
    router.shell("for port in h0 h1; do ip link set $port type bridge_slave isolated on; done").unwrap();
    let cloud = &node(&world, "cloud-1").host;
    // A route left behind would make the kernel send from the address on the mesh.
    let without_ipv6 = "ip addr del ADDRESS/64 dev eth0\nip -6 route del default dev eth0";
    cloud.shell(&without_ipv6.replace("ADDRESS", &cloud.address6().unwrap().to_string())).unwrap();
    world.apply_pool().unwrap();
    servers::apply_token(&world, TOKEN).unwrap();
    servers::apply_mesh(&world, &json!({ "relay": relay.spec("always") })).unwrap();
    world.start_pods().unwrap();
    let (pairs, _) = probe::all_pairs(&world.pods, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");
    let change = || servers::apply_mesh(&world, &json!({ "relay": relay.spec("auto") })).unwrap();
    let pair = ["office-1", "home-1"];
    moves(&world, "relay to direct", pair, is_relayed, change, |endpoint| !is_relayed(endpoint));
    a_lan_is_found(&world);
    the_family_changes(&world);
    a_node_roams(&world);
}

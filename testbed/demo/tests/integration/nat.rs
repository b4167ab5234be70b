//! Nodes behind every kind of NAT: which of them have a direct path, and that all reach all. Nothing is fake but the kubelet.

mod behaviour;
mod judge;
mod times;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fairlead_demo::cni::Pod;
use fairlead_demo::nat_matrix::{self, PathKind, Place, way};
use fairlead_demo::servers;
use fairlead_demo::{World, probe};
use serde_json::{Value, json};
use testbed_lab::Progress;
use testbed_lab::relay::TOKEN;

use crate::nat::judge::{Judge, public_addresses};
use crate::nat::times::Times;
use crate::outage::{TIMEOUT, node};

/// Longest time until all paths are as expected: a busy machine makes first attempts fail, and the next ones come after up to 120 s
/// (`directRetryIntervalSeconds`).
const SETTLES: Duration = Duration::from_secs(450);
/// Time for which the ways that were found must stay.
const STAYS: Duration = Duration::from_secs(20);

/// Ways of packets from a node to another one, by their names.
type Ways = BTreeMap<(String, String), Found>;

/// Path to a peer, as a node reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    Direct,
    Relay,
    /// There is no session.
    Unreachable,
}

impl Found {
    fn of(peer: &Value) -> Self {
        match peer["endpoint"].as_str() {
            _ if peer["state"] != "up" => Self::Unreachable,
            Some(endpoint) if endpoint.contains("://") => Self::Relay,
            _ => Self::Direct,
        }
    }
}

/// Asks every node which way each peer is reached.
fn ways(world: &World) -> Result<Ways> {
    let statuses: Vec<Result<(String, Value)>> = std::thread::scope(|scope| {
        let asking: Vec<_> =
            world.nodes.iter().map(|node| scope.spawn(|| Ok((node.name.clone(), node.status()?)))).collect();
        asking.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut ways = Ways::new();
    for status in statuses {
        let (from, status) = status?;
        for peer in status["peers"].as_array().context("no peers")? {
            let to = peer["name"].as_str().context("no name")?;
            ways.insert((from.clone(), to.to_owned()), Found::of(peer));
        }
    }
    Ok(ways)
}

/// Every node knows the kind of its NAT: two STUN servers show how it maps, and the relay's second port how it filters.
fn nat_types_are_known(world: &World, places: &[Place]) -> Result<()> {
    for place in places {
        let status = node(world, place.node).status()?;
        let expected = place.kind.nat_type();
        ensure!(status["natType"] == expected, "{}: {}, not {expected:?}", place.node, status["natType"]);
    }
    Ok(())
}

fn pairs(places: &[Place]) -> impl Iterator<Item = (&Place, &Place)> {
    let all = places.iter().flat_map(|from| places.iter().map(move |to| (from, to)));
    all.filter(|(from, to)| from.node != to.node)
}

/// The pairs whose way is not as expected, and what is found instead.
fn differing<'a>(places: &'a [Place], ways: &Ways) -> impl Iterator<Item = (&'a Place, &'a Place, String)> {
    let differs = |(from, to): (&'a Place, &'a Place)| {
        let expected = way(from, to);
        let found = ways.get(&(from.node.to_owned(), to.node.to_owned())).copied();
        let is_found = found == Some(if expected.is_direct() { Found::Direct } else { Found::Relay });
        (!is_found).then(|| (from, to, format!("{} to {}: {found:?}, not {expected:?}", from.node, to.node)))
    };
    pairs(places).filter_map(differs)
}

/// Paths that are not as expected any more, each with its last changes.
fn left_paths(world: &World, places: &[Place], ways: &Ways) -> Vec<String> {
    let left = differing(places, ways);
    left.map(|(from, to, difference)| {
        let (_, status) = node(world, from.node).ask(&["status", to.node]).unwrap();
        format!("{difference}: {}", status["peers"][0]["pathChanges"])
    })
    .collect()
}

/// Sends pings from every pod to every other one until each is answered.
fn all_reach_each_other(world: &World, deadline: Instant) -> Vec<String> {
    let try_from = |from: &Pod| {
        let mut missing: Vec<(String, IpAddr)> = world
            .pods
            .iter()
            .filter(|to| to.name != from.name)
            .map(|to| (to.node.clone(), to.addresses[0]))
            .collect();
        while !missing.is_empty() && Instant::now() < deadline {
            missing.retain(|(_, to)| probe::ping(from, *to).is_err());
        }
        missing.into_iter().map(|(to, _)| format!("{} to {to}: no answer", from.node)).collect::<Vec<_>>()
    };
    std::thread::scope(|scope| {
        let trying: Vec<_> = world.pods.iter().map(|pod| scope.spawn(move || try_from(pod))).collect();
        trying.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

/// Waits until the ways are as expected.
fn settle(world: &World, places: &[Place]) {
    let as_expected = || {
        // A session that is not used looks for no better path.
        let missing = all_reach_each_other(world, Instant::now() + TIMEOUT);
        ensure!(missing.is_empty(), "{}", missing.join("\n"));
        let ways = ways(world)?;
        let differences: Vec<String> = differing(places, &ways).map(|(.., difference)| difference).collect();
        ensure!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.join("\n"));
        Ok(())
    };
    if let Err(error) = testbed_lab::eventually(SETTLES, as_expected) {
        let changes = ways(world).map(|ways| left_paths(world, places, &ways)).unwrap_or_default();
        panic!("{error:#}\nwith their last changes:\n{}", changes.join("\n"));
    }
}

/// Pairs of nodes between two sets of addresses, and the expected way of their packets.
#[derive(Default)]
struct Expected {
    is_direct: bool,
    pairs: Vec<String>,
}

/// Compares what was counted on the Internet with what is expected.
fn compare(world: &World, places: &[Place], seen: &judge::Seen) {
    let addresses = |place: &Place| {
        let host = &node(world, place.node).host;
        public_addresses(host.public_address(), host.address6())
    };
    // Nodes behind one router are one to the Internet.
    let mut between: BTreeMap<[Vec<IpAddr>; 2], Expected> = BTreeMap::new();
    for (from, to) in pairs(places) {
        let ends = [from, to].map(addresses);
        if ends[0][0] != ends[1][0] {
            let expected = between.entry(ends).or_default();
            expected.is_direct |= way(from, to).is_direct();
            expected.pairs.push(format!("{} to {}", from.node, to.node));
        }
    }
    let wrong: Vec<String> = between
        .iter()
        .filter(|([from, to], expected)| seen.went(from, to) != expected.is_direct)
        .map(|(_, Expected { is_direct, pairs })| {
            format!("{}: {} direct packets", pairs.join(", "), if *is_direct { "no" } else { "there are" })
        })
        .collect();
    assert!(wrong.is_empty(), "on the Internet:\n{}", wrong.join("\n"));
    for place in places {
        let [address, ..] = addresses(place)[..] else { panic!("{place:?}") };
        assert_eq!(seen.udp.contains(&address), place.kind.name != "no-udp", "UDP of {}", place.node);
        assert!(seen.relay.contains(&address), "{} has no connection to the relay", place.node);
    }
}

/// The grid of kinds, as a table in Markdown.
fn grid(places: &[Place], ways: &Ways) -> String {
    let mut names: Vec<&str> = Vec::new();
    places.iter().map(|place| place.kind.name).for_each(|name| {
        if !names.contains(&name) {
            names.push(name);
        }
    });
    let cell = |row: &str, column: &str| {
        let of_kinds = pairs(places).filter(|(from, to)| from.kind.name == row && to.kind.name == column);
        let between_sites =
            of_kinds.filter(|(from, to)| from.site != to.site && way(from, to) != PathKind::CarrierAddresses);
        let found: BTreeSet<&str> = between_sites
            .filter_map(|(from, to)| ways.get(&(from.node.to_owned(), to.node.to_owned())))
            .map(|found| match found {
                Found::Direct => "direct",
                Found::Relay => "relay",
                Found::Unreachable => "unreachable",
            })
            .collect();
        found.into_iter().collect::<Vec<_>>().join(" and ")
    };
    let mut text = format!("| |{}|\n|---|{}\n", names.join("|"), "---|".repeat(names.len()));
    for row in &names {
        let cells: Vec<String> = names.iter().map(|column| cell(row, column)).collect();
        text += &format!("| **{row}** |{}|\n", cells.join("|"));
    }
    text
}

#[test]
fn nodes_behind_every_kind_of_nat_find_direct_paths_where_there_are_any() {
    let began = Instant::now();
    let places = nat_matrix::places();
    let mut world = World::start(&nat_matrix::topology(&places), &Progress::default()).unwrap();
    let servers = ["stun-1", "stun-2"].map(|name| servers::stun_server(&world, name).unwrap());
    let relay = servers::relay(&world).unwrap();
    world.apply_pool().unwrap();
    servers::apply_token(&world, TOKEN).unwrap();
    world.start_pods().unwrap();
    println!("{} nodes after {:.1?}", places.len(), began.elapsed());

    let applied = Instant::now();
    let names: Vec<String> = servers.iter().map(|(host, _)| format!("stun:{}", host.address())).collect();
    let spec = json!({
        "stunServers": names,
        "relay": relay.spec("auto"),
        // They would go on for long, each node with several others.
        "natTraversal": { "birthdayAttack": "disabled" },
    });
    servers::apply_mesh(&world, &spec).unwrap();
    let missing = all_reach_each_other(&world, applied + TIMEOUT);
    println!("all pairs {:.1?} after the mesh", applied.elapsed());
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    settle(&world, &places);
    println!("all paths {:.1?} after the mesh", applied.elapsed());
    testbed_lab::eventually(TIMEOUT, || nat_types_are_known(&world, &places)).unwrap();
    println!("{}", behaviour::compare(&world, &places).unwrap());

    let judge = Judge::new(&world, &relay.host).unwrap();
    judge.restart().unwrap();
    let began = Instant::now();
    while began.elapsed() < STAYS {
        let missing = all_reach_each_other(&world, Instant::now() + TIMEOUT);
        assert!(missing.is_empty(), "{}", missing.join("\n"));
        let left = left_paths(&world, &places, &ways(&world).unwrap());
        if !left.is_empty() {
            // A path that answers nothing for 0.6 s is left, and a busy machine can do that to it.
            println!("changed after {:.1?}:\n{}", began.elapsed(), left.join("\n"));
            settle(&world, &places);
        }
    }
    compare(&world, &places, &judge.seen().unwrap());
    println!("{}", grid(&places, &ways(&world).unwrap()));
    println!("{}", Times::read(&world, &places).unwrap());
}

//! A mesh in which only gateways have tunnels between locations: three locations of three nodes each.

#![cfg(test)]

mod outage;
mod site;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use fairlead_demo::{World, probe, topology};
use outage::{TIMEOUT, loses_nothing, node, report, resumes, tcp, udp};
use site::{Beside, reached};
use testbed_lab::traffic::Flow;
use testbed_lab::{Progress, eventually};

const LOCATIONS: [&str; 3] = ["cloud", "home", "farm"];
/// Bounds what takes no time, for a busy machine.
const WITHIN: Duration = Duration::from_secs(50);

fn set_granularity(world: &World, granularity: &str) {
    let patch = format!(r#"{{"spec": {{"topology": {{"granularity": "{granularity}"}}}}}}"#);
    world.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", &patch]).unwrap();
}

fn peers(world: &World, name: &str) -> Result<BTreeSet<String>> {
    let status = node(world, name).status()?;
    let peers = status["peers"].as_array().cloned().unwrap_or_default();
    Ok(peers.iter().filter_map(|peer| peer["name"].as_str().map(str::to_owned)).collect())
}

/// The first two of each location are gateways, or these two of a location.
fn has_gateways(world: &World, location: &str, gateways: [u8; 2]) -> Result<()> {
    let gateways_of = |other: &str| if other == location { gateways } else { [1, 2] };
    for own in LOCATIONS {
        for number in 1..=3 {
            let name = format!("{own}-{number}");
            let near = [1, 2, 3].map(|other| format!("{own}-{other}"));
            let mut expected: BTreeSet<String> = near.into_iter().filter(|other| *other != name).collect();
            if gateways_of(own).contains(&number) {
                let others = LOCATIONS.into_iter().filter(|other| *other != own);
                expected
                    .extend(others.flat_map(|other| gateways_of(other).map(|it| format!("{other}-{it}"))));
            }
            let found = peers(world, &name)?;
            ensure!(found == expected, "peers of {name}: {found:?}, not {expected:?}");
        }
    }
    Ok(())
}

fn all_pods_reach_each_other(world: &World) {
    let (pairs, _) = probe::all_pairs(&world.pods, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    let failed: Vec<_> = pairs.iter().filter(|pair| !(pair.tcp && pair.icmp)).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

/// Three locations with a pod on every node, each of which reaches every other.
fn mesh() -> World {
    let mut world = World::start(&topology::three_by_three(), &Progress::default()).unwrap();
    for location in LOCATIONS {
        let annotation = format!("kilo.squat.ai/location={location}");
        let [a, b, c] = [1, 2, 3].map(|number| format!("{location}-{number}"));
        world.plane.kubectl(&["annotate", "node", &a, &b, &c, &annotation]).unwrap();
    }
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    all_pods_reach_each_other(&world);
    world
}

/// Counts what a node sends to WireGuard ports of another location.
fn count_tunnels(world: &World, name: &str, prefix: &str) {
    let script = format!(
        "nft add table inet judge\n\
         nft 'add chain inet judge out {{ type filter hook postrouting priority 300; }}'\n\
         nft add rule inet judge out ip daddr {prefix} udp dport 51820 counter\n"
    );
    node(world, name).host.shell(&script).unwrap();
}

fn counted(world: &World, name: &str) -> u64 {
    let listed = node(world, name).host.shell("nft list chain inet judge out").unwrap();
    let counts = listed
        .lines()
        .filter_map(|line| line.split_once("packets ")?.1.split(' ').next()?.parse::<u64>().ok());
    counts.sum()
}

fn flows(world: &World) -> [Flow; 5] {
    [
        udp(world, "cloud-3", "home-3"),
        tcp(world, "farm-3", "home-3"),
        udp(world, "farm-3", "cloud-3"),
        udp(world, "home-1", "cloud-3"),
        udp(world, "home-3", "home-2"),
    ]
}

#[test]
fn between_locations_packets_go_through_gateways() {
    let world = mesh();
    let flows = flows(&world);
    let (mark, from) = (Instant::now(), Instant::now());
    set_granularity(&world, "location");
    eventually(TIMEOUT, || has_gateways(&world, "", [1, 2])).unwrap();
    resumes("granularity: location", &flows, mark, from, WITHIN);
    all_pods_reach_each_other(&world);

    count_tunnels(&world, "home-3", "198.51.100.0/24");
    count_tunnels(&world, "home-1", "198.51.100.0/24");
    let mark = Instant::now();
    std::thread::sleep(Duration::from_secs(3));
    loses_nothing("through gateways", &flows, mark);
    assert_eq!(counted(&world, "home-3"), 0, "only gateways have tunnels to other locations");
    assert!(counted(&world, "home-1") > 0);

    // An administrator names a gateway: it and the first other one.
    let (mark, from) = (Instant::now(), Instant::now());
    world.plane.kubectl(&["annotate", "node", "home-3", "kilo.squat.ai/leader="]).unwrap();
    eventually(TIMEOUT, || has_gateways(&world, "home", [1, 3])).unwrap();
    resumes("another gateway", &flows, mark, from, WITHIN);
    all_pods_reach_each_other(&world);

    let (mark, from) = (Instant::now(), Instant::now());
    set_granularity(&world, "full");
    let is_full = || {
        let found = peers(&world, "home-3")?;
        ensure!(found.len() == 8, "{found:?}");
        Ok(())
    };
    eventually(TIMEOUT, is_full).unwrap();
    resumes("granularity: full", &flows, mark, from, WITHIN);
    report("granularity: full", &flows, mark);
}

fn problems(world: &World, name: &str) -> Result<String> {
    Ok(node(world, name).status()?["problems"].to_string())
}

/// Whether these nodes know that home-1 does not forward.
fn is_left(world: &World, is_left: bool) -> Result<()> {
    for name in ["cloud-1", "cloud-2", "farm-1", "home-3"] {
        let problems = problems(world, name)?;
        ensure!(problems.contains("behind the gateway home-1") == is_left, "{name}: {problems}");
    }
    Ok(())
}

#[test]
fn a_gateway_that_does_not_forward_or_is_dead_is_left_and_used_again() {
    let world = mesh();
    set_granularity(&world, "location");
    eventually(TIMEOUT, || has_gateways(&world, "", [1, 2])).unwrap();
    all_pods_reach_each_other(&world);
    let flows =
        [udp(&world, "cloud-3", "home-3"), tcp(&world, "farm-3", "home-3"), udp(&world, "home-2", "farm-3")];
    // Nodes behind gateways have answered.
    std::thread::sleep(Duration::from_secs(5));
    is_left(&world, false).unwrap();

    let (mark, from) = (Instant::now(), Instant::now());
    let broken = "nft add table inet broken\n\
                  nft 'add chain inet broken forward { type filter hook forward priority 0; policy drop; }'\n";
    node(&world, "home-1").host.shell(broken).unwrap();
    eventually(TIMEOUT, || is_left(&world, true)).unwrap();
    resumes("a gateway does not forward", &flows, mark, from, WITHIN);
    node(&world, "home-1").host.shell("nft delete table inet broken").unwrap();
    let mark = Instant::now();
    eventually(2 * TIMEOUT, || is_left(&world, false)).unwrap();
    println!("the gateway is used again after {:.1} s", from.elapsed().as_secs_f64());
    std::thread::sleep(Duration::from_secs(5));
    is_left(&world, false).unwrap();
    loses_nothing("the gateway is used again", &flows, mark);

    let (mark, from) = (Instant::now(), Instant::now());
    node(&world, "home-1").host.shell("ip link set eth0 down").unwrap();
    eventually(TIMEOUT, || is_left(&world, true)).unwrap();
    resumes("a gateway is dead", &flows, mark, from, WITHIN);
}

#[test]
fn hosts_beside_a_node_are_reached_from_all_locations_and_see_that_node() {
    let world = mesh();
    let printer = Beside::start(&world, "home-3");
    let annotation = "kilo.squat.ai/allowed-location-ips=10.77.0.0/24";
    world.plane.kubectl(&["annotate", "node", "home-3", annotation]).unwrap();
    let others = ["home-1", "home-2", "cloud-1", "cloud-3", "farm-3"];
    for granularity in ["full", "location"] {
        set_granularity(&world, granularity);
        others.iter().for_each(|from| reached(&world, from, "10.77.0.2"));
        let (from_node, from_others) = printer.requests(&world);
        println!("{granularity}: {from_node} echo requests came from home-3, {from_others} from others");
        assert!(from_node >= 10 && from_others == 0, "{from_node} {from_others}");
    }
    world.plane.kubectl(&["annotate", "node", "home-3", "kilo.squat.ai/allowed-location-ips-"]).unwrap();
    let pod = world.pods.iter().find(|pod| pod.node == "cloud-3").unwrap();
    let is_left = || {
        ensure!(probe::ping(pod, "10.77.0.2".parse()?).is_err(), "the host is still reached");
        Ok(())
    };
    eventually(TIMEOUT, is_left).unwrap();
}

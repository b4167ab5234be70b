//! Failures of the node program, as users see them.

use std::time::{Duration, Instant};

use crate::outage::{loses_nothing, mesh, node, peer, pod, resumes, tcp, udp, used};
use anyhow::{Context as _, Result, ensure};
use fairlead_demo::World;
use fairlead_demo::node::Node;
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use testbed_lab::traffic::Flow;

const START: Duration = Duration::from_secs(60);
/// Longest time until tunnels work again after the start of a node program that was killed: it takes 0.1 to 0.2 s.
const RESTARTED: Duration = Duration::from_secs(2);
/// The same when nothing of its mappings is left in the router: it sends first, as after its start.
const RESTARTED_BEHIND_NAT: Duration = Duration::from_secs(10);
/// The same when its clock was set back: its peers refuse its handshakes.
const RESTARTED_IN_THE_PAST: Duration = Duration::from_secs(30);

/// The node program of home-1 is killed with SIGKILL and started again at once, as its supervisor would.
///
/// Stops, with the embedded WireGuard: traffic between home-1 and other nodes, until the program is back and has shaken
/// hands again. Goes on: traffic between pods on home-1, all traffic of other nodes, established connections (they
/// wait), the pods' addresses, the WireGuard device. Then the same again while the router forgets its mappings, as when
/// a power cut takes both, and with a clock that is an hour behind that of the run before.
#[test]
fn a_killed_node_program_comes_back_and_nothing_is_forgotten() {
    let mut world = mesh();
    let neighbour = world.start_pod("neighbour", "home-1").unwrap().clone();
    let across = [
        udp(&world, "home-1", "cloud-1"),
        udp(&world, "cloud-1", "home-1"),
        udp(&world, "home-1", "office-2"),
        udp(&world, "home-1", "home-2"),
        tcp(&world, "home-1", "cloud-1"),
        tcp(&world, "office-2", "home-1"),
    ];
    let local = pod(&world, "home-1");
    let elsewhere = [
        udp(&world, "cloud-2", "office-1"),
        udp(&world, "home-2", "office-1"),
        tcp(&world, "home-2", "cloud-2"),
        Flow::udp(local, &neighbour, neighbour.addresses[0]).unwrap(),
        Flow::tcp(&neighbour, local, local.addresses[1]).unwrap(),
    ];
    std::thread::sleep(Duration::from_secs(1));

    killed_and_started(&mut world, &across, &elsewhere);
    pods_keep_their_addresses(&mut world);
    killed_while_the_router_forgets(&mut world, &across, &elsewhere);
    drop(across);
    started_with_its_clock_set_back(&mut world, &elsewhere);
}

fn killed_and_started(world: &mut World, across: &[Flow], elsewhere: &[Flow]) {
    let what = "kill -9 of the node program";
    let (used_before, index_before) = (used(node(world, "home-1")), index(world));
    let mark = Instant::now();
    let home = world.node("home-1").unwrap();
    home.kill().unwrap();
    let carrier = home.host.shell("cat /sys/class/net/wire_kube/carrier").unwrap();
    assert_eq!(carrier.trim(), "0", "the device has no carrier while the program is dead");
    home.start().unwrap();
    resumes(what, across, mark, Instant::now(), RESTARTED);
    loses_nothing(what, elsewhere, mark);
    world.node("home-1").unwrap().wait_ready(START).unwrap();
    every_session_is_new(world, mark);
    assert_eq!(index(world), index_before, "the device was adopted, not made anew");
    let same = |world: &World| {
        let now = used(node(world, "home-1"));
        anyhow::ensure!(now == used_before, "{used_before} addresses were in use, now {now}");
        Ok(())
    };
    world.wait_for(START, same).unwrap();
}

/// The figures are those of sessions that were lost and made anew, not of some that lived on.
fn every_session_is_new(world: &World, mark: Instant) {
    let status = node(world, "home-1").status().unwrap();
    let since = mark.elapsed().as_secs_f64();
    let peers = status["peers"].as_array().unwrap();
    assert_eq!(peers.len(), world.nodes.len() - 1);
    for peer in peers {
        let age = peer["handshakeAgeSeconds"].as_f64();
        assert!(age.is_some_and(|age| age < since), "no handshake in the last {since} s: {peer}");
    }
}

fn index(world: &World) -> String {
    node(world, "home-1").host.shell("cat /sys/class/net/wire_kube/ifindex").unwrap()
}

/// The state rebuilt from the kernel is complete: no address is allocated twice, and a released one is free again.
fn pods_keep_their_addresses(world: &mut World) {
    let before = used(node(world, "home-1"));
    let newcomer = world.start_pod("newcomer", "home-1").unwrap().clone();
    let others = world.pods.iter().filter(|pod| pod.name != newcomer.name);
    for address in others.flat_map(|pod| &pod.addresses) {
        assert!(!newcomer.addresses.contains(address), "{address} was allocated twice");
    }
    let plugin = node(world, "home-1").plugin().unwrap();
    let again = plugin.add(&pod(world, "home-1").container).unwrap();
    assert_eq!(
        again,
        pod(world, "home-1").addresses,
        "a repeated ADD of an adopted pod returns its addresses"
    );
    assert_eq!(used(node(world, "home-1")), before + 1);
    let old = world.pods.iter().find(|pod| pod.name == "neighbour").unwrap();
    plugin.del(&newcomer.container).unwrap();
    plugin.del(&old.container).unwrap();
    assert_eq!(
        used(node(world, "home-1")),
        before - 1,
        "DEL works for pods from before and after the restart"
    );
}

fn killed_while_the_router_forgets(world: &mut World, across: &[Flow], elsewhere: &[Flow]) {
    let what = "kill -9 and a router that forgets";
    let router = world.sites.iter().find(|site| site.name() == "home").unwrap().router().clone();
    let mark = Instant::now();
    let home = world.node("home-1").unwrap();
    home.kill().unwrap();
    router.lose_mappings().unwrap();
    home.start().unwrap();
    resumes(what, across, mark, Instant::now(), RESTARTED_BEHIND_NAT);
    every_session_is_new(world, mark);
    // Nothing of the cloud and the office went through that router.
    loses_nothing(what, &elsewhere[..1], mark);
}

/// Only home-1 has something to send.
fn started_with_its_clock_set_back(world: &mut World, elsewhere: &[Flow]) {
    let what = "a clock set back";
    restart(world, Some("+1h"));
    let flows = [udp(world, "home-1", "cloud-1"), udp(world, "home-1", "office-2")];
    let mark = Instant::now();
    resumes("a clock set forward", &flows, mark, mark, RESTARTED_BEHIND_NAT);
    let mark = Instant::now();
    restart(world, None);
    resumes(what, &flows, mark, mark, RESTARTED_IN_THE_PAST);
    // Without being asked they start one too, after 15 s in which something that they sent was not answered.
    for peer in ["cloud-1", "office-2"] {
        let log = std::fs::read_to_string(node(world, peer).log()).unwrap();
        assert!(log.contains("starting a handshake"), "{peer} was not asked for a handshake");
    }
    // Nothing of the cloud and the office went through home's router.
    loses_nothing(what, &elsewhere[..1], mark);
}

fn restart(world: &mut World, clock_ahead: Option<&'static str>) {
    let home = world.node("home-1").unwrap();
    home.kill().unwrap();
    home.clock_ahead = clock_ahead;
    home.start().unwrap();
}

/// The node programs of three sites are replaced one after the other, as an upgrade does it, while pods talk through tunnels
/// inside these programs. Nothing stops, and neither when the clocks of these programs are set an hour forward and back.
#[test]
fn an_upgraded_node_program_loses_nothing() {
    let mut world = mesh();
    let nodes = ["cloud-1", "home-1", "office-2"];
    let pairs = [("home-1", "cloud-1"), ("cloud-1", "office-2"), ("office-2", "cloud-1")];
    let flows: Vec<Flow> =
        pairs.iter().flat_map(|(from, to)| [udp(&world, from, to), tcp(&world, from, to)]).collect();
    std::thread::sleep(Duration::from_secs(1));
    let mark = Instant::now();
    for name in nodes {
        let node = world.node(name).unwrap();
        node.set_clock("+0").unwrap();
        node.has_own_clock = true;
        node.upgrade(START).unwrap();
    }
    std::thread::sleep(Duration::from_secs(2));
    loses_nothing("an upgrade of the node program", &flows, mark);
    clocks_jump(&world, &flows);
}

/// Clocks an hour apart, in each direction, and all right again; the nodes exchange what they know all the time.
fn clocks_jump(world: &World, flows: &[Flow]) {
    for (home, cloud) in [("+1h", "+0"), ("+0", "+1h"), ("-1h", "+0"), ("+0", "+0")] {
        let what = format!("the clock of home-1 is {home}, that of cloud-1 {cloud}");
        let mark = Instant::now();
        let clocks = [("home-1", home), ("cloud-1", cloud)];
        for (name, ahead) in clocks {
            node(world, name).set_clock(ahead).unwrap();
        }
        std::thread::sleep(Duration::from_secs(8));
        for (name, ahead) in clocks {
            world.wait_for(START, |world| is_ahead(node(world, name), ahead)).unwrap();
        }
        loses_nothing(&what, flows, mark);
        for (at, other) in [("home-1", "cloud-1"), ("cloud-1", "home-1"), ("home-1", "office-2")] {
            let seen = peer(node(world, at), other).unwrap();
            assert_eq!(seen["state"], "up", "{what}: {seen}");
        }
    }
}

/// The last line of its log has the time that its program knows.
fn is_ahead(node: &Node, ahead: &str) -> Result<()> {
    let log = std::fs::read_to_string(node.log())?;
    let mut lines = log.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let at: Option<Timestamp> = lines.find_map(|line| line["timestamp"].as_str()?.parse().ok());
    let hours: i64 = ahead.trim_end_matches('h').parse()?;
    let expected = Timestamp::now() + SignedDuration::from_hours(hours);
    let off = at.context("nothing logged")?.duration_since(expected);
    ensure!(off.abs() < SignedDuration::from_mins(2), "{} is off by {off:?}, with {ahead}", node.name);
    Ok(())
}

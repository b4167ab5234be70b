//! Common parts of the tests of failures: a mesh that works, and traffic that is watched while something fails.

use std::time::{Duration, Instant};

use fairlead_demo::cni::{self, Container, Pod};
use fairlead_demo::node::Node;
use fairlead_demo::topology::{self, Topology};
use fairlead_demo::{World, probe};
use serde_json::Value;
use testbed_lab::Progress;
use testbed_lab::traffic::Flow;

/// Only bounds a test that would hang.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// Time until messages of now are old enough to be counted.
const SETTLE: Duration = Duration::from_millis(1100);

/// Time without a loss after which flows are steady.
const STEADY: Duration = Duration::from_secs(1);

/// Three sites with a pod on every node, each of which reaches every other.
pub(crate) fn mesh() -> World {
    mesh_of(&topology::three_sites())
}

/// The same of other sites.
pub(crate) fn mesh_of(topology: &Topology) -> World {
    let mut world = World::start(topology, &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    let (pairs, _) =
        probe::all_pairs(&world.pods, Instant::now() + Duration::from_secs(60), |_, _| String::new())
            .unwrap();
    let failed: Vec<_> = pairs.iter().filter(|pair| !(pair.tcp && pair.icmp)).collect();
    assert!(failed.is_empty(), "before anything is broken: {failed:?}");
    world
}

pub(crate) fn pod<'a>(world: &'a World, node: &str) -> &'a Pod {
    world.pods.iter().find(|pod| pod.node == node).unwrap_or_else(|| panic!("no pod on {node}"))
}

pub(crate) fn node<'a>(world: &'a World, name: &str) -> &'a Node {
    world.nodes.iter().find(|node| node.name == name).unwrap_or_else(|| panic!("no node {name}"))
}

/// UDP between the pods of two nodes.
pub(crate) fn udp(world: &World, from: &str, to: &str) -> Flow {
    let (from, to) = (pod(world, from), pod(world, to));
    Flow::udp(from, to, to.addresses[0]).unwrap()
}

/// An established connection between the pods of two nodes, over IPv6 inside.
pub(crate) fn tcp(world: &World, from: &str, to: &str) -> Flow {
    let (from, to) = (pod(world, from), pod(world, to));
    Flow::tcp(from, to, to.addresses[1]).unwrap()
}

/// Waits until nothing of these flows has been lost for a moment: a path that is up in one direction may still be sought in the other.
pub(crate) fn steady(flows: &[Flow]) {
    let deadline = Instant::now() + TIMEOUT;
    let lossy = |mark: Instant| {
        let is_lossy = |flow: &&Flow| {
            let figures = flow.figures_since(mark);
            figures.sent == 0 || figures.lost > 0
        };
        flows.iter().filter(is_lossy).map(Flow::name).collect::<Vec<_>>()
    };
    loop {
        let mark = Instant::now();
        std::thread::sleep(STEADY + SETTLE);
        let names = lossy(mark);
        if names.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "not steady in {TIMEOUT:?}: {names:?}");
    }
}

/// Waits until every flow flows again and prints what each suffered since `mark`. All must be back `within` this time,
/// counted from `from`: ten times what `docs/outages.md` says, so that a busy machine passes and a timeout that replaces
/// a reaction does not.
pub(crate) fn resumes(what: &str, flows: &[Flow], mark: Instant, from: Instant, within: Duration) {
    let (floor, deadline) = (Instant::now(), Instant::now() + TIMEOUT);
    let mut missing: Vec<&Flow> = flows.iter().collect();
    while !missing.is_empty() {
        missing.retain(|flow| {
            assert!(flow.ended().is_none(), "{what}: {} ended: {:?}", flow.name(), flow.ended());
            let back = flow.flows_since(floor);
            if back {
                println!("{what}: {} is back after {:.1} s", flow.name(), from.elapsed().as_secs_f64());
            }
            !back
        });
        let names: Vec<&str> = missing.iter().map(|flow| flow.name()).collect();
        assert!(Instant::now() < deadline, "{what}: not back in {TIMEOUT:?}: {names:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    let back = from.elapsed();
    std::thread::sleep(SETTLE);
    report(what, flows, mark);
    println!("{what}: everything was back after {:.1} s", back.as_secs_f64());
    assert!(back <= within, "{what}: back after {back:.1?}, not within {within:?}");
}

/// Prints how long something took, and asserts its bound, for which the same holds as for [`resumes`].
pub(crate) fn took(what: &str, from: Instant, within: Duration) {
    let took = from.elapsed();
    println!("{what}: after {:.1} s", took.as_secs_f64());
    assert!(took <= within, "{what}: after {took:.1?}, not within {within:?}");
}

/// Asserts that not one message was lost since `mark`; those of the last second do not count yet.
pub(crate) fn loses_nothing(what: &str, flows: &[Flow], mark: Instant) {
    report(what, flows, mark);
    for flow in flows {
        let found = flow.figures_since(mark);
        assert!(found.sent > 0, "{what}: {} sent nothing", flow.name());
        assert!(
            found.lost == 0,
            "{what}: {} was disturbed: {found:?} {:?}, lost {:?} after the beginning",
            flow.name(),
            flow.ended(),
            flow.lost_since(mark)
        );
    }
}

/// Asserts that no flow went without an answer for longer than the limit since `mark`; for pauses of the sender itself, which a busy
/// machine causes, it may be longer.
pub(crate) fn gaps_are_within(what: &str, flows: &[Flow], mark: Instant, limit: Duration) {
    report(what, flows, mark);
    for flow in flows {
        let found = flow.figures_since(mark);
        assert!(
            found.longest_gap <= limit + found.longest_pause,
            "{what}: {} was disturbed: {found:?}",
            flow.name()
        );
    }
}

/// Prints what each flow suffered since `mark`.
pub(crate) fn report(what: &str, flows: &[Flow], mark: Instant) {
    for flow in flows {
        let found = flow.figures_since(mark);
        println!(
            "{what}: {:<34} longest gap {:>6} ms (sender's longest pause {} ms), {} of {} lost",
            flow.name(),
            found.longest_gap.as_millis(),
            found.longest_pause.as_millis(),
            found.lost,
            found.sent
        );
    }
}

/// Addresses in use on a node, as `fairlead status` counts them.
pub(crate) fn used(node: &Node) -> u64 {
    let status = node.status().unwrap();
    status["blocks"].as_array().unwrap().iter().map(|block| block["used"].as_u64().unwrap()).sum()
}

/// One peer of a node, as `fairlead status` shows it.
pub(crate) fn peer(node: &Node, name: &str) -> Option<Value> {
    let status = node.status().ok()?;
    status["peers"].as_array()?.iter().find(|peer| peer["name"] == name).cloned()
}

/// A container of a Kubernetes namespace that was never attached, with nothing but its network namespace.
pub(crate) fn container(world: &World, name: &str, namespace: &str) -> Container {
    let inside = world.lab().bare_namespace(name).unwrap();
    Container { namespace: namespace.to_owned(), ..cni::container(name, &inside) }
}

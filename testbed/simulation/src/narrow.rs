//! Paths that lose long datagrams and say nothing.

use std::time::Duration;

use fairlead_path::EndpointReason;

use super::router::Nat;
use super::{SECOND, World, router};

const MTU: u32 = 1420;
/// A WireGuard datagram is so much longer than the packet in it.
const OVERHEAD: u32 = 32;

/// Two nodes with a tunnel of [`MTU`].
fn world(seed: u64, has_relay: bool) -> World {
    with_mtu(seed, has_relay, Some(MTU))
}

/// The same, or without any test of long datagrams.
fn with_mtu(seed: u64, has_relay: bool, mtu: Option<u32>) -> World {
    let routers = vec![router(Nat::FullCone, 1), router(Nat::FullCone, 2)];
    let mut world = World::new(["192.168.1.2", "192.168.2.2"], routers);
    for (node, number) in world.nodes.iter_mut().zip(1..) {
        node.reseed(seed * 2 + number);
        mtu.iter().for_each(|mtu| node.agent.set_mtu(*mtu));
    }
    if has_relay {
        world.start_relay(false);
        world.exchange_with_relay();
    } else {
        world.exchange(&[]);
    }
    world.run(10 * SECOND);
    world
}

fn route_mtus(world: &World) -> [Option<u32>; 2] {
    let [one, other] = &world.nodes;
    [one.agent.route_mtu(&other.key), other.agent.route_mtu(&one.key)]
}

fn passes(world: &mut World, mtu: u32) {
    world.network.longest = Some(usize::try_from(mtu + OVERHEAD).unwrap());
}

fn moves(world: &World) -> Vec<(Duration, EndpointReason)> {
    let of = |endpoints: &Vec<(Duration, _, EndpointReason)>| {
        endpoints.iter().map(|(at, _, reason)| (*at, *reason)).collect::<Vec<_>>()
    };
    world.nodes.iter().flat_map(|node| of(&node.endpoints)).collect()
}

#[test]
fn routes_get_the_mtu_that_the_only_path_passes_until_it_passes_all() {
    for (seed, limit, expected) in [(0, 1300, 1296), (1, 1280, 1280), (2, 1412, 1408), (3, 1215, 1200)] {
        let mut world = world(seed, false);
        assert_eq!(route_mtus(&world), [None, None]);
        let before = moves(&world);
        passes(&mut world, limit);
        world.run(60 * SECOND);
        assert_eq!(route_mtus(&world), [Some(expected); 2], "a path that passes {limit}");
        // Narrower still, as when its traffic takes another way.
        passes(&mut world, 1232);
        world.run(90 * SECOND);
        assert_eq!(route_mtus(&world), [Some(expected.min(1232)); 2], "then 1232");
        world.network.longest = None;
        world.run(60 * SECOND);
        assert_eq!(route_mtus(&world), [None, None]);
        assert_eq!(moves(&world), before, "the path is used all the time");
        let changes = world.nodes.each_ref().map(|node| node.route_mtus.len());
        assert!(changes.iter().all(|changes| *changes <= 3), "{changes:?}");
    }
}

#[test]
fn where_nothing_useful_passes_routes_are_left_alone_and_little_is_asked() {
    let mut world = world(0, false);
    passes(&mut world, 1100);
    world.run(120 * SECOND);
    let before = world.nodes.each_ref().map(|node| node.probes);
    world.run(600 * SECOND);
    assert_eq!(route_mtus(&world), [None, None]);
    let probes = world.nodes.each_ref().map(|node| node.probes);
    for (now, before) in probes.iter().zip(before) {
        // A check each 2 s, answers to those of the peer, tests of full size each 30 s, and searches ever more rarely.
        assert!(now - before < 2 * 600 / 2 + 2 * 20 * 6 + 300, "{} in 600 s", now - before);
    }
}

#[test]
fn with_a_relay_the_session_goes_there_instead() {
    let mut world = world(0, true);
    passes(&mut world, 1300);
    world.run(60 * SECOND);
    assert!(world.endpoints().iter().all(|endpoint| endpoint.ip().is_loopback()), "{:?}", world.endpoints());
    assert_eq!(route_mtus(&world), [None, None]);
}

/// As on a host whose processors are busy: whatever is lost, what is asked for the sake of MTUs must not make a path fail, and no
/// path is taken for narrow for long.
#[test]
fn losses_make_no_path_narrow_and_the_search_makes_no_path_fail() {
    let mut failed = [0, 0];
    for seed in 0..20 {
        for (mtu, failed) in [None, Some(MTU)].into_iter().zip(&mut failed) {
            let mut world = with_mtu(seed, false, mtu);
            world.network.loss = 300;
            world.run(300 * SECOND);
            let reasons = moves(&world);
            *failed += reasons.iter().filter(|(_, reason)| *reason == EndpointReason::PathFailed).count();
            world.network.loss = 0;
            world.run(60 * SECOND);
            assert_eq!(route_mtus(&world), [None, None], "seed {seed}");
        }
    }
    let [without, with] = failed;
    assert!(
        with <= without + without / 5 + 2,
        "paths failed {with} times, and {without} times without tests"
    );
}

//! Packets that go over the relay as well while the direct path is in doubt.

use std::net::IpAddr;
use std::time::Duration;

use super::router::Nat;
use super::{DATA_INTERVAL, SECOND, World, router};

/// Two nodes with a direct path that is in use, and a relay.
fn world() -> World {
    seeded(0)
}

fn seeded(seed: u64) -> World {
    let routers = vec![router(Nat::FullCone, 1), router(Nat::FullCone, 2)];
    let mut world = World::new(["192.168.1.2", "192.168.2.2"], routers);
    for (node, number) in world.nodes.iter_mut().zip(1..) {
        node.reseed(seed * 2 + number);
    }
    world.start_relay(false);
    world.exchange_with_relay();
    world.run(10 * SECOND);
    assert!(is_direct(&world));
    world
}

fn is_direct(world: &World) -> bool {
    world.endpoints().iter().all(|endpoint| !endpoint.ip().is_loopback())
}

/// The addresses between which the path loses everything: from the first node to the second, back, or both.
fn directions(world: &World) -> [Vec<(IpAddr, IpAddr)>; 3] {
    let [second, first] = world.endpoints().map(|endpoint| endpoint.ip());
    let (there, back) = ((first, second), (second, first));
    [vec![there], vec![back], vec![there, back]]
}

fn copies(world: &World) -> [u64; 2] {
    world.nodes.each_ref().map(|node| node.copies)
}

#[test]
fn what_a_path_loses_arrives_by_way_of_the_relay_before_the_path_is_left() {
    // The path in use is checked every 2 s, each node at its own moment.
    let phases = [0, 500, 1000, 1500].map(Duration::from_millis);
    for (lost, phase) in (0..3).flat_map(|lost| phases.map(|phase| (lost, phase))) {
        let mut world = world();
        world.run(phase);
        let lost = directions(&world)[lost].clone();
        world.network.black_holes.extend(lost.iter().copied());
        let broken = world.now;
        world.run(5 * SECOND);
        // 500 ms of silence, the late answers of two checks (80 ms each), and twice the way over the relay.
        let gap = world.longest_gap(broken);
        assert!(gap <= Duration::from_millis(770), "{lost:?} at {phase:?}: {gap:?}");
        assert!(!is_direct(&world), "{lost:?} at {phase:?}");
        // Until the path is left, and the device uses the other one.
        let most = 2 * SECOND.as_millis() / DATA_INTERVAL.as_millis();
        let sent = copies(&world);
        assert!(sent.iter().all(|sent| (1..=most).contains(&u128::from(*sent))), "{lost:?}: {sent:?}");
        world.run(5 * SECOND);
        assert_eq!(copies(&world), sent, "{lost:?}");
    }
}

#[test]
fn nothing_is_sent_twice_once_the_path_answers_again() {
    for lost in 0..3 {
        let mut world = world();
        let lost = directions(&world)[lost].clone();
        world.network.black_holes.extend(lost.iter().copied());
        let broken = world.now;
        while copies(&world) == [0, 0] && world.now < broken + SECOND {
            world.run(Duration::from_millis(10));
        }
        world.run(Duration::from_millis(150));
        world.network.black_holes.clear();
        // A repeated check and its answer.
        world.run(Duration::from_millis(250));
        let sent = copies(&world);
        assert!(sent.iter().any(|sent| *sent > 0), "{lost:?}");
        world.run(20 * SECOND);
        assert_eq!(copies(&world), sent, "{lost:?}");
        assert!(is_direct(&world), "{lost:?}: {:?}", world.endpoints());
    }
}

/// Number of times since then that WireGuard of either node took the relay for a direct endpoint that delivers, by itself.
fn roamed_to_relay(world: &World, since: Duration) -> usize {
    let roamed = world.nodes.iter().flat_map(|node| &node.roamed);
    roamed.filter(|(at, to)| *at > since && to.ip().is_loopback()).count()
}

/// One node doubts the path and the other does not: what comes by way of the relay must not lead either of them there and back.
#[test]
fn a_path_that_is_in_doubt_for_a_moment_is_kept_by_both_and_nothing_echoes() {
    for (lost, milliseconds) in (0..3).flat_map(|lost| [100, 300, 600, 1000].map(|time| (lost, time))) {
        for seed in 0..5 {
            let mut world = seeded(seed);
            let before = world.nodes.each_ref().map(|node| node.endpoints.len());
            let lost = directions(&world)[lost].clone();
            let began = world.now;
            world.network.black_holes.extend(lost.iter().copied());
            world.run(Duration::from_millis(milliseconds));
            world.network.black_holes.clear();
            world.run(20 * SECOND);
            assert!(is_direct(&world), "{lost:?} for {milliseconds} ms: {:?}", world.endpoints());
            let roamed: Vec<_> = world.nodes.iter().map(|node| &node.roamed).collect();
            assert!(roamed_to_relay(&world, began) <= 1, "{lost:?} for {milliseconds} ms: {roamed:?}");
            let moves = world.nodes.each_ref().map(|node| node.endpoints.len());
            let more: usize = moves.iter().zip(before).map(|(now, before)| now - before).sum();
            assert!(more <= 3, "{lost:?} for {milliseconds} ms: {more} moves");
        }
    }
}

/// The kernel's WireGuard moves with each packet, and sends one way only.
#[test]
fn a_session_with_the_kernels_wireguard_comes_to_rest_on_the_direct_path() {
    for (kernels, lost) in
        [[true, false], [false, true], [true, true]].into_iter().flat_map(|it| [(it, 0), (it, 1), (it, 2)])
    {
        for seed in 0..5 {
            let mut world = seeded(seed);
            for (node, is_kernel) in world.nodes.iter_mut().zip(kernels) {
                node.is_kernel = is_kernel;
            }
            let lost = directions(&world)[lost].clone();
            world.network.black_holes.extend(lost.iter().copied());
            world.run(10 * SECOND);
            assert!(!is_direct(&world), "{kernels:?} {lost:?}");
            world.network.black_holes.clear();
            // The direct path is sought for again within two minutes.
            world.run(130 * SECOND);
            let settled = world.now;
            world.run(30 * SECOND);
            assert!(is_direct(&world), "{kernels:?} {lost:?}: {:?}", world.endpoints());
            assert_eq!(roamed_to_relay(&world, settled), 0, "{kernels:?} {lost:?}");
        }
    }
}

#[test]
fn without_a_relay_nothing_is_sent_twice() {
    let mut world = World::new(["192.168.1.2", "192.168.1.3"], vec![router(Nat::FullCone, 1)]);
    world.run(10 * SECOND);
    let [lost, ..] = directions(&world);
    world.network.black_holes.extend(lost);
    world.run(10 * SECOND);
    assert_eq!(copies(&world), [0, 0]);
}

/// `FAIRLEAD_SIMULATION_SEEDS` runs more of them.
#[test]
fn a_path_with_losses_stays_in_use_and_little_is_sent_twice() {
    let seeds = std::env::var("FAIRLEAD_SIMULATION_SEEDS").map_or(10, |seeds| seeds.parse().unwrap());
    for seed in 0..seeds {
        let mut world = seeded(seed);
        world.network.loss = 20;
        world.network.delays.1 = Duration::from_millis(20 + 10 * (seed % 10));
        world.run(120 * SECOND);
        let sent: u64 = world.nodes.iter().map(|node| u64::from(node.sent)).sum();
        let copied: u64 = copies(&world).iter().sum();
        assert!(copied * 20 <= sent, "seed {seed}: {copied} of {sent}");
        let moves = world.nodes.each_ref().map(|node| &node.endpoints);
        assert_eq!(roamed_to_relay(&world, 10 * SECOND), 0, "seed {seed}");
        assert!(is_direct(&world), "seed {seed}: {:?}, {moves:?}", world.endpoints());
    }
}

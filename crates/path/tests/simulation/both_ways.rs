//! Packets that go over the relay as well while the direct path is in doubt.

use std::net::IpAddr;
use std::time::Duration;

use fairlead_path::{PeerPaths, RelayPath};

use super::network::{Nat, relay_endpoint};
use super::node::Node;
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
    world.network.relayed = world.nodes.iter().map(|node| node.address).collect();
    for (from, to) in [(0, 1), (1, 0)] {
        let (candidates, key, now) = (world.candidates(from), world.nodes[from].key, world.now);
        let relay = RelayPath {
            endpoint: relay_endpoint(from),
            is_only: false,
            handshake_timeout: 30 * SECOND,
            direct_retry: 120 * SECOND,
        };
        let paths = PeerPaths { relay: Some(relay), ..PeerPaths::default() };
        world.nodes[to].add_peer_with(now, key, &candidates, paths);
    }
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

/// The longest time without a new message since `since`, at either node.
fn longest_gap(world: &World, since: Duration) -> Duration {
    let gap = |node: &Node| {
        let times = node.arrived.values().copied().filter(|at| *at > since).chain([world.now]);
        let mut times: Vec<Duration> = times.chain([since]).collect();
        times.sort();
        times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap()
    };
    let [one, other] = &world.nodes;
    gap(one).max(gap(other))
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
        let gap = longest_gap(&world, broken);
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
        world.run(Duration::from_millis(750));
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
        assert!(is_direct(&world), "seed {seed}: {:?}", world.endpoints());
    }
}

//! A direct path between a symmetric and a port-restricted NAT.

use std::net::SocketAddr;
use std::time::Duration;

use fairlead_path::{BirthdayOutcome, BirthdayPolicy, NatType, PeerPaths, RelayPath, birthday_side};

use super::relay::relay_endpoint;
use super::router::Nat;
use super::{SECOND, World, router};

const SYMMETRIC: NatType = NatType::Symmetric;
const RESTRICTED: NatType = NatType::PortRestrictedCone;

/// The first node behind the symmetric NAT or the second, with a relay.
fn world(first_is_symmetric: bool, policies: [BirthdayPolicy; 2]) -> World {
    seeded(first_is_symmetric, policies, 0)
}

fn seeded(first_is_symmetric: bool, policies: [BirthdayPolicy; 2], seed: u64) -> World {
    let nats = [Nat::Symmetric, Nat::PortRestricted];
    behind(if first_is_symmetric { nats } else { [nats[1], nats[0]] }, policies, seed)
}

/// With a relay and a STUN server.
pub(crate) fn behind(nats: [Nat; 2], policies: [BirthdayPolicy; 2], seed: u64) -> World {
    let types = nats.map(|nat| if nat == Nat::PortRestricted { RESTRICTED } else { SYMMETRIC });
    let routers = vec![router(nats[0], 1), router(nats[1], 2)];
    let mut world = World::new(["192.168.1.2", "192.168.2.2"], routers);
    for (node, number) in world.nodes.iter_mut().zip(1..) {
        node.reseed(seed * 2 + number);
    }
    for (router, number) in world.network.routers.iter_mut().zip(1..) {
        router.reseed(seed * 2 + number);
    }
    let server = SocketAddr::from(([198, 51, 100, 1], 3478));
    world.network.stun = Some(server);
    let now = world.now;
    world.nodes.iter_mut().for_each(|node| node.agent.set_stun_servers(now, &[server]));
    world.start_relay(false);
    for (from, to) in [(0, 1), (1, 0)] {
        let candidates = world.candidates(from);
        let key = world.nodes[from].key;
        let relay = RelayPath {
            endpoint: relay_endpoint(from),
            is_only: false,
            handshake_timeout: 30 * SECOND,
            direct_retry: 120 * SECOND,
        };
        let birthday = birthday_side(policies[to], types[to], types[from]);
        let paths = PeerPaths { relay: Some(relay), birthday, ..PeerPaths::default() };
        world.nodes[to].add_peer_with(now, key, &candidates, paths);
    }
    world
}

pub(crate) fn is_direct(world: &World) -> bool {
    world.endpoints().iter().all(|endpoint| !endpoint.ip().is_loopback())
}

pub(crate) fn outcomes(world: &World, node: usize, outcome: BirthdayOutcome) -> u64 {
    world.nodes[node].agent.birthday_outcomes().get(&outcome).copied().unwrap_or_default()
}

/// Runs until both nodes use the direct path, and returns how long that took since they began to try ports.
fn time_to_direct(world: &mut World, limit: Duration) -> Option<Duration> {
    let (end, mut began) = (world.now + limit, None);
    while world.now < end {
        world.run(Duration::from_millis(10));
        if began.is_none() && world.nodes.iter().any(|node| !node.sockets.is_empty()) {
            began = Some(world.now);
        }
        if let Some(began) = began.filter(|_| is_direct(world)) {
            return Some(world.now - began);
        }
    }
    None
}

const DEFAULT: [BirthdayPolicy; 2] = [BirthdayPolicy::PortRestricted; 2];

#[test]
fn a_port_of_the_symmetric_nat_is_found_and_used_without_losing_a_packet() {
    for first_is_symmetric in [true, false] {
        let mut world = world(first_is_symmetric, DEFAULT);
        let took = time_to_direct(&mut world, 30 * SECOND).expect("still relayed");
        assert!(took <= 5 * SECOND, "{took:?}");
        world.run(60 * SECOND);
        assert!(is_direct(&world));
        assert_eq!(world.lost(), 0);
        let symmetric = usize::from(!first_is_symmetric);
        assert_eq!(world.nodes.each_ref().map(|node| node.sockets.len()), [0, 0]);
        assert_eq!(world.nodes[symmetric].kept.len(), 1);
        for node in [0, 1] {
            assert_eq!(outcomes(&world, node, BirthdayOutcome::Found), 1);
            assert!(world.nodes[node].probes <= 256 + 2048 + 200, "{}", world.nodes[node].probes);
        }
    }
}

#[test]
fn nothing_is_tried_where_either_node_is_told_not_to() {
    for off in [0, 1] {
        let mut policies = DEFAULT;
        policies[off] = BirthdayPolicy::Disabled;
        let mut world = world(true, policies);
        world.run(60 * SECOND);
        assert!(!is_direct(&world) && world.first_arrival(SECOND).is_some());
        let sent: Vec<u64> = world.nodes.iter().map(|node| node.probes).collect();
        assert!(sent.iter().all(|sent| *sent <= 250), "{sent:?}");
        assert_eq!(outcomes(&world, 0, BirthdayOutcome::Found), 0);
        // A build that does not know the flag ignores it in the same way.
        assert_eq!(outcomes(&world, 0, BirthdayOutcome::PeerSilent) > 0, off == 1);
    }
}

#[test]
fn an_idle_session_is_left_on_the_relay() {
    let mut world = world(true, DEFAULT);
    world.sends_data = false;
    world.run(60 * SECOND);
    assert!(!is_direct(&world));
    assert_eq!(outcomes(&world, 0, BirthdayOutcome::Found), 0);
}

#[test]
fn a_path_that_is_lost_is_found_again_as_fast_and_its_socket_closed() {
    for first_is_symmetric in [true, false] {
        let symmetric = usize::from(!first_is_symmetric);
        let mut world = world(first_is_symmetric, DEFAULT);
        time_to_direct(&mut world, 30 * SECOND).expect("still relayed");
        world.run(10 * SECOND);
        let before = world.nodes[symmetric].kept.clone();
        world.network.routers[symmetric].rebind();
        let took = time_to_direct(&mut world, 30 * SECOND).expect("relayed again");
        assert!(took <= 3 * SECOND, "{took:?}");
        world.run(60 * SECOND);
        assert!(is_direct(&world));
        let after = &world.nodes[symmetric].kept;
        assert_eq!(after.len(), 1);
        assert_ne!(*after, before);
    }
}

/// `FAIRLEAD_SIMULATION_SEEDS` runs more of them.
#[test]
fn attempts_succeed_over_lossy_and_slow_networks() {
    let seeds = std::env::var("FAIRLEAD_SIMULATION_SEEDS").map_or(10, |seeds| seeds.parse().unwrap());
    let mut times = Vec::new();
    for seed in 0..seeds {
        let mut world = seeded(seed % 2 == 0, DEFAULT, seed);
        world.network.delays.1 = Duration::from_millis(2 + seed * 37 % 150);
        world.network.loss = u32::try_from(seed * 13 % 50).unwrap();
        let took = time_to_direct(&mut world, 60 * SECOND);
        times.push(took.unwrap_or_else(|| panic!("seed {seed}: still relayed")));
        world.run(20 * SECOND);
        // The socket is closed where its path has failed. Endpoints say less: a copy of what the path has lost makes a node roam to the
        // relay for a moment.
        let symmetric = usize::from(seed % 2 != 0);
        let is_kept = world.nodes[symmetric].kept.len() == 1;
        assert!(is_kept || is_direct(&world), "seed {seed}: {:?}", world.endpoints());
    }
    times.sort();
    println!("time to direct: median {:?}, longest {:?}", times[times.len() / 2], times[times.len() - 1]);
}

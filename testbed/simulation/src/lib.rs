//! Two agents and a relay in one process, on a clock of the test: it has only tests.
//!
//! Real: the agents and their probes, encrypted; what the relay decides, and the frames of its protocol. Modelled: WireGuard (a handshake,
//! data, roaming), NAT routers, delays, losses, TCP. `FAIRLEAD_SIMULATION_SEEDS=N` runs N random worlds instead of a few: a soak test.

#![cfg(test)]

mod attacker;
mod birthday;
mod both_symmetric;
mod both_ways;
mod idle_mappings;
mod narrow;
mod network;
mod node;
mod relay;
mod relayed;
mod router;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use fairlead_path::{EndpointReason, PeerPaths, RelayPath};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use network::Network;
use node::Node;
use relay::{News, RelayHost, relay_endpoint};
use router::{Nat, Router};

const TICK: Duration = Duration::from_millis(1);
const DATA_INTERVAL: Duration = Duration::from_millis(10);
const SECOND: Duration = Duration::from_secs(1);
const PORT: u16 = 51820;
/// Address of the relay.
const RELAY: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 9));

struct World {
    now: Duration,
    network: Network,
    nodes: [Node; 2],
    sends_data: bool,
    /// Between two messages of a node.
    interval: Duration,
    /// A node whose host stands still, and until when.
    suspended: Option<(usize, Duration)>,
}

fn address(text: &str) -> SocketAddr {
    SocketAddr::new(text.parse().unwrap(), PORT)
}

fn router(nat: Nat, site: u8) -> Router {
    Router::new(nat, [192, 168, site], Ipv4Addr::new(203, 0, 113, site))
}

impl World {
    /// Each node knows the other's addresses: its own, and what a STUN server would say of it.
    fn new(addresses: [&str; 2], routers: Vec<Router>) -> Self {
        let mut world = Self::without_peers(addresses, routers);
        world.exchange(&[]);
        world
    }

    fn without_peers(addresses: [&str; 2], routers: Vec<Router>) -> Self {
        let network = Network::new(routers);
        let nodes = [Node::new(1, address(addresses[0])), Node::new(2, address(addresses[1]))];
        Self { now: SECOND, network, nodes, sends_data: true, interval: DATA_INTERVAL, suspended: None }
    }

    fn candidates(&mut self, node: usize) -> Vec<SocketAddr> {
        let own = self.nodes[node].address;
        let server = SocketAddr::from(([198, 51, 100, 1], 3478));
        let site = self.network.routers.iter_mut().find(|router| router.has_inside(own.ip()));
        let mapped = site.map(|router| router.outer(self.now, own, server));
        mapped.into_iter().chain([own]).collect()
    }

    /// Stands in for the peer resources: tells each node the other's candidates. Addresses in `hidden` are not published.
    fn exchange(&mut self, hidden: &[SocketAddr]) {
        for (from, to) in [(0, 1), (1, 0)] {
            let mut candidates = self.candidates(from);
            candidates.retain(|candidate| !hidden.contains(candidate));
            let key = self.nodes[from].key;
            self.nodes[to].add_peer(self.now, key, &candidates);
        }
    }

    /// Stands in for the peer resources as `exchange`, with the relay.
    fn exchange_with_relay(&mut self) {
        for (from, to) in [(0, 1), (1, 0)] {
            let (candidates, key, now) = (self.candidates(from), self.nodes[from].key, self.now);
            let relay = RelayPath {
                endpoint: relay_endpoint(from),
                is_only: false,
                handshake_timeout: 30 * SECOND,
                direct_retry: 120 * SECOND,
            };
            let paths = PeerPaths { relay: Some(relay), ..PeerPaths::default() };
            self.nodes[to].add_peer_with(now, key, &candidates, paths);
        }
    }

    /// A relay to which both nodes are connected; the peers are to be added again with its endpoints.
    fn start_relay(&mut self, passes_udp: bool) {
        let clients = self.nodes.each_ref().map(|node| (node.key, node.address));
        self.network.relay = Some(RelayHost::new(RELAY, passes_udp, &clients));
        self.deliver();
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.deliver();
            let sends = self.sends_data && self.now.as_millis().is_multiple_of(self.interval.as_millis());
            self.suspended.take_if(|(_, until)| *until <= self.now);
            let suspended = self.suspended.map(|(node, _)| node);
            for (_, node) in (0..).zip(&mut self.nodes).filter(|(number, _)| Some(*number) != suspended) {
                node.run(self.now, &mut self.network);
                if sends {
                    node.send_data(self.now, &mut self.network);
                }
            }
            self.now = self.next().clamp(self.now + TICK, end);
        }
    }

    /// Delivers what has arrived.
    fn deliver(&mut self) {
        for datagram in self.network.arrivals(self.now) {
            let suspended = self.suspended.map(|(node, _)| node);
            let mut nodes = (0..).zip(&mut self.nodes).filter(|(number, _)| Some(*number) != suspended);
            if let Some((_, node)) = nodes.find(|(_, node)| node.is_at(datagram.to)) {
                node.receive(self.now, datagram, &mut self.network);
            }
        }
        let news = self.network.relay.as_mut().map(RelayHost::take_news).unwrap_or_default();
        for (node, news) in news {
            let agent = &mut self.nodes[node].agent;
            match news {
                News::Down => agent.relay_changed(self.now, false),
                News::Port(peer, port) => agent.relay_port_allocated(self.now, peer, port),
                News::Stun(server) => agent.set_relay_stun(self.now, Some(server)),
                News::Up => agent.relay_changed(self.now, true),
            }
        }
    }

    /// When something happens next: in whole milliseconds, as timers of programs, and at each moment for data.
    fn next(&self) -> Duration {
        let interval = DATA_INTERVAL.as_millis();
        let data = (self.now.as_millis() / interval + 1) * interval;
        let timers = self.nodes.iter().filter_map(|node| node.agent.poll_timeout());
        let next = timers.chain(self.network.next(self.now)).min().unwrap_or(Duration::MAX);
        let next = next.as_nanos().div_ceil(TICK.as_nanos()).min(data);
        Duration::from_millis(u64::try_from(next).unwrap())
    }

    /// The endpoints in use: that of the second node at the first, and that of the first at the second.
    fn endpoints(&self) -> [SocketAddr; 2] {
        let [one, other] = &self.nodes;
        [one.endpoint(&other.key).unwrap(), other.endpoint(&one.key).unwrap()]
    }

    /// Data messages that were sent before `until` and did not arrive, both ways.
    fn lost(&self) -> usize {
        let [one, other] = &self.nodes;
        let lost = |from: &Node, to: &Node| {
            // The last ones may be under way.
            let settled = from.sent.saturating_sub(10);
            (1..=settled).filter(|number| !to.arrived.contains_key(number)).count()
        };
        lost(one, other) + lost(other, one)
    }

    /// When the first data message arrived since `since`, at the node where that took longer.
    fn first_arrival(&self, since: Duration) -> Option<Duration> {
        let first = |node: &Node| node.arrived.values().copied().filter(|at| *at > since).min();
        let [one, other] = &self.nodes;
        Some(first(one)?.max(first(other)?) - since)
    }

    /// Runs, and returns the longest time in which no node sent a probe. A session of this simulation ends after 195 s, for it has no
    /// further handshakes, and begins again with probes.
    fn longest_silence(&mut self, time: Duration) -> Duration {
        let (end, mut since, mut longest) = (self.now + time, self.now, Duration::ZERO);
        while self.now < end {
            let before = self.nodes.each_ref().map(|node| node.probes);
            self.run(SECOND);
            if self.nodes.each_ref().map(|node| node.probes) != before {
                since = self.now;
            }
            longest = longest.max(self.now - since);
        }
        longest
    }

    /// The longest time without a new message since `since`, at either node.
    fn longest_gap(&self, since: Duration) -> Duration {
        let gap = |node: &Node| {
            let times = node.arrived.values().copied().filter(|at| *at > since).chain([self.now]);
            let mut times: Vec<Duration> = times.chain([since]).collect();
            times.sort();
            times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap()
        };
        let [one, other] = &self.nodes;
        gap(one).max(gap(other))
    }

    fn black_hole(&mut self, one: IpAddr, other: IpAddr) {
        self.network.black_holes.extend([(one, other), (other, one)]);
    }
}

#[test]
fn two_port_restricted_nats_are_opened_in_three_round_trips() {
    let routers = vec![router(Nat::PortRestricted, 1), router(Nat::PortRestricted, 2)];
    let mut world = World::new(["192.168.1.2", "192.168.2.2"], routers);
    world.run(2 * SECOND);
    // Round trip is 40 ms. The first requests are dropped by the NATs; those after 100 ms pass.
    let first = world.first_arrival(SECOND).expect("no traffic");
    assert!(first <= Duration::from_millis(300), "{first:?}");
    let ips = world.endpoints().map(|endpoint| endpoint.ip().to_string());
    assert_eq!(ips, ["203.0.113.2", "203.0.113.1"]);
}

#[test]
fn a_symmetric_nat_reaches_a_full_cone() {
    let routers = vec![router(Nat::Symmetric, 1), router(Nat::FullCone, 2)];
    let mut world = World::new(["192.168.1.2", "192.168.2.2"], routers);
    world.run(2 * SECOND);
    assert!(world.first_arrival(SECOND).is_some_and(|first| first <= Duration::from_millis(300)));
}

#[test]
fn nodes_of_one_site_use_their_own_addresses() {
    let mut world = World::new(["192.168.1.2", "192.168.1.3"], vec![router(Nat::PortRestricted, 1)]);
    world.run(2 * SECOND);
    assert_eq!(world.endpoints(), [address("192.168.1.3"), address("192.168.1.2")]);
    assert!(world.first_arrival(SECOND).is_some_and(|first| first <= Duration::from_millis(100)));
}

/// The site's own addresses are published later, as when a node learns another address.
#[test]
fn a_live_session_moves_into_the_site_without_losing_a_packet_and_both_sides_agree() {
    let nat = Router::new(Nat::FullCone, [192, 168, 1], Ipv4Addr::new(203, 0, 113, 1));
    let other = Router::new(Nat::FullCone, [192, 168, 2], Ipv4Addr::new(203, 0, 113, 2));
    let mut world = World::new(["192.168.1.2", "192.168.2.2"], vec![nat, other]);
    world.network.black_holes.clear();
    world.run(5 * SECOND);
    let before = world.endpoints();
    assert!(before.iter().all(|endpoint| endpoint.ip().to_string().starts_with("203.")), "{before:?}");
    // A link between the sites comes up: each is inside the other's network.
    let addresses = world.nodes.each_ref().map(|node| node.address);
    world.network.link_sites();
    world.exchange(&addresses);
    world.exchange(&[]);
    world.run(10 * SECOND);
    assert_eq!(world.endpoints(), [addresses[1], addresses[0]]);
    assert_eq!(world.lost(), 0);
    let moves = world.nodes.iter().flat_map(|node| &node.endpoints);
    let moves: Vec<_> = moves.filter(|(_, _, reason)| *reason == EndpointReason::BetterPath).collect();
    assert_eq!(moves.len(), 1, "one node moves the session, once: {moves:?}");
}

#[test]
fn a_path_that_becomes_a_black_hole_is_left_for_another() {
    let routers = vec![router(Nat::FullCone, 1), router(Nat::FullCone, 2)];
    let mut world = World::new(["192.168.1.2", "192.168.2.2"], routers);
    world.network.link_sites();
    world.run(10 * SECOND);
    let [other, one] = world.endpoints();
    assert_eq!([one, other], [address("192.168.1.2"), address("192.168.2.2")]);
    world.black_hole(one.ip(), other.ip());
    let broken = world.now;
    world.run(20 * SECOND);
    let back = world.first_arrival(broken + Duration::from_millis(50)).expect("no traffic");
    assert!(back <= 4 * SECOND, "{back:?}");
    let endpoints = world.endpoints().map(|endpoint| endpoint.ip().to_string());
    assert_eq!(endpoints, ["203.0.113.2", "203.0.113.1"]);
}

#[test]
fn a_router_that_forgets_its_mappings_costs_seconds() {
    let routers = vec![router(Nat::PortRestricted, 1), router(Nat::FullCone, 2)];
    let mut world = World::new(["192.168.1.2", "192.168.2.2"], routers);
    world.run(10 * SECOND);
    world.network.routers[0].rebind();
    let broken = world.now;
    world.run(10 * SECOND);
    // The packets of the first node come from another port, and the second one's WireGuard roams.
    let back = world.first_arrival(broken + Duration::from_millis(50)).expect("no traffic");
    assert!(back <= SECOND, "{back:?}");
}

#[test]
fn an_idle_session_sends_no_probes() {
    let routers = vec![router(Nat::PortRestricted, 1), router(Nat::PortRestricted, 2)];
    let mut world = World::new(["192.168.1.2", "192.168.2.2"], routers);
    world.run(5 * SECOND);
    world.sends_data = false;
    // In the first minutes it is tested whether the path lasts from one keepalive to the next.
    world.run(900 * SECOND);
    assert!(world.longest_silence(600 * SECOND) >= 100 * SECOND);
}

/// WireGuard refuses initiations that are older than the greatest it has seen, and the other node takes its session for alive.
#[test]
fn a_node_that_was_rebooted_with_its_clock_set_back_is_sent_a_handshake() {
    for is_idle in [false, true] {
        let routers = vec![router(Nat::PortRestricted, 1), router(Nat::PortRestricted, 2)];
        let mut world = World::new(["192.168.1.2", "192.168.2.2"], routers);
        world.run(5 * SECOND);
        world.sends_data = !is_idle;
        world.run(if is_idle { 120 * SECOND } else { 5 * SECOND });
        world.nodes[0].reboot();
        world.exchange(&[]);
        world.sends_data = true;
        let rebooted = world.now;
        world.run(30 * SECOND);
        let back = world.first_arrival(rebooted + Duration::from_millis(50)).expect("no traffic");
        assert!(back <= 5 * SECOND, "idle: {is_idle}, {back:?}");
        assert_eq!(world.nodes.each_ref().map(|node| node.handshakes_asked), [0, 1], "idle: {is_idle}");
    }
}

/// A peer of another implementation (Talos, a telephone) drops probes.
#[test]
fn a_peer_that_is_gone_costs_ever_fewer_probes() {
    let mut world = World::new(["192.168.1.2", "192.168.2.2"], Vec::new());
    world.black_hole(world.nodes[0].address.ip(), world.nodes[1].address.ip());
    world.run(60 * SECOND);
    let first = world.nodes[0].probes;
    world.run(600 * SECOND);
    let later = world.nodes[0].probes - first;
    assert!(first <= 30 && later <= 30, "{first} in the first minute, {later} in the next ten");
}

const KINDS: [Nat; 3] = [Nat::FullCone, Nat::PortRestricted, Nat::Symmetric];

/// Whether the table of RFC 4787's kinds has a direct path for this pair.
fn is_direct(one: Nat, other: Nat) -> bool {
    let is_hard = |nat| nat == Nat::Symmetric;
    match (one, other) {
        (Nat::FullCone, _) | (_, Nat::FullCone) => true,
        _ => !is_hard(one) && !is_hard(other),
    }
}

/// `FAIRLEAD_SIMULATION_SEEDS` runs more of them.
#[test]
fn random_pairs_connect_survive_what_happens_and_agree_on_a_path() {
    let seeds = std::env::var("FAIRLEAD_SIMULATION_SEEDS").map_or(40, |seeds| seeds.parse().unwrap());
    for seed in 0..seeds {
        let mut random = SmallRng::seed_from_u64(seed);
        let kinds = [KINDS[random.random_range(0..3)], KINDS[random.random_range(0..3)]];
        let routers = vec![router(kinds[0], 1), router(kinds[1], 2)];
        let mut world = World::new(["192.168.1.2", "192.168.2.2"], routers);
        world.network.delays.1 = Duration::from_millis(random.random_range(2..150));
        world.network.loss = random.random_range(0..50);
        if !is_direct(kinds[0], kinds[1]) {
            world.run(20 * SECOND);
            assert_eq!(world.first_arrival(SECOND), None, "seed {seed}: {kinds:?}");
            assert!(world.nodes.iter().all(|node| node.probes <= 60), "seed {seed}");
            continue;
        }
        world.run(random.random_range(5..20) * SECOND);
        let first =
            world.first_arrival(SECOND).unwrap_or_else(|| panic!("seed {seed}: {kinds:?} no traffic"));
        assert!(first <= 3 * SECOND, "seed {seed}: {kinds:?} first after {first:?}");
        if kinds[0] == Nat::FullCone && random.random_range(0..2) == 0 {
            world.network.routers[1].rebind();
            world.run(20 * SECOND);
        }
        let linked = world.now;
        world.network.link_sites();
        world.exchange(&world.nodes.each_ref().map(|node| node.address));
        world.exchange(&[]);
        world.run(60 * SECOND);
        let addresses = world.nodes.each_ref().map(|node| node.address);
        assert_eq!(world.endpoints(), [addresses[1], addresses[0]], "seed {seed}: {kinds:?}");
        let settled = linked + 30 * SECOND;
        let moves = world.nodes.iter().flat_map(|node| &node.endpoints).filter(|(at, ..)| *at > settled);
        assert_eq!(moves.count(), 0, "seed {seed}: {kinds:?} still moving");
    }
}

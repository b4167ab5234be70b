//! Birthday attempts of two agents over real NATs (nftables, connection tracking), many times.
//!
//! Real: the agents, their probes, sockets, routers and their mappings. Modelled: WireGuard, as in the simulation beside this, and the relay, which
//! is a queue. The demo runs the same with the node program (`testbed/demo/tests/birthday.rs`).

mod network;
#[path = "../../src/node.rs"]
#[allow(dead_code, reason = "the simulation uses its other parts")]
mod node;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fairlead_path::{BirthdayOutcome, BirthdayPolicy, NatType, PeerPaths, RelayPath, birthday_side};
use testbed_lab::Nat;

use network::{Network, relay_endpoint};
use node::Node;

const PORT: u16 = 51820;
const SECOND: Duration = Duration::from_secs(1);
const DATA_INTERVAL: Duration = Duration::from_millis(10);
/// The goal: how long an attempt may take.
const GOAL: Duration = Duration::from_secs(5);
/// Longer than the first attempt takes, and shorter than the time to the next one.
const LIMIT: Duration = Duration::from_secs(15);

/// Result of one run.
struct Run {
    /// Time since the attempt began, until both nodes used the direct path.
    took: Option<Duration>,
    /// Entries of connection tracking, at the router that has more.
    tracked: usize,
    /// Probes of the node that sent more.
    probes: u64,
}

struct World {
    network: Network,
    nats: [Nat; 2],
    started: Instant,
    sent: Duration,
    nodes: [Node; 2],
}

fn nat_type(nat: Nat) -> NatType {
    match nat {
        Nat::SymmetricPredictable | Nat::SymmetricRandom => NatType::Symmetric,
        _ => NatType::PortRestrictedCone,
    }
}

impl World {
    fn new(nats: [Nat; 2]) -> Self {
        let network = Network::new(nats);
        let nodes = nodes(&network);
        Self { network, nats, started: Instant::now(), sent: Duration::ZERO, nodes }
    }

    fn now(&self) -> Duration {
        SECOND + self.started.elapsed()
    }

    /// New nodes, with other random numbers, behind routers without mappings.
    fn restart(&mut self, seed: u64, policy: BirthdayPolicy) {
        self.network.restart();
        self.nodes = nodes(&self.network);
        for (node, number) in self.nodes.iter_mut().zip(1..) {
            node.reseed(seed * 2 + number);
        }
        let (now, server) = (self.now(), self.network.stun_server());
        for (from, to) in [(0, 1), (1, 0)] {
            let types = [to, from].map(|node: usize| nat_type(self.nats[node]));
            let relay = RelayPath {
                endpoint: relay_endpoint(from),
                is_only: false,
                handshake_timeout: 30 * SECOND,
                direct_retry: 120 * SECOND,
            };
            let birthday = birthday_side(policy, types[0], types[1]);
            let paths = PeerPaths { relay: Some(relay), birthday, ..PeerPaths::default() };
            let seen = SocketAddr::from((self.network.hosts[from].public_address(), PORT));
            let key = self.nodes[from].key;
            self.nodes[to].agent.set_stun_servers(now, &[server]);
            self.nodes[to].add_peer_with(now, key, &[seen], paths);
        }
    }

    fn turn(&mut self) {
        let now = self.now();
        for datagram in self.network.arrivals(now) {
            if let Some(node) = self.nodes.iter_mut().find(|node| node.is_at(datagram.to)) {
                node.receive(now, datagram, &mut self.network);
            }
        }
        let sends_data = now >= self.sent + DATA_INTERVAL;
        for node in &mut self.nodes {
            node.run(now, &mut self.network);
            if sends_data {
                node.send_data(now, &mut self.network);
            }
        }
        if sends_data {
            self.sent = now;
        }
        let nodes = &self.nodes;
        self.network.close_unless(|address| nodes.iter().any(|node| node.is_at(address)));
        std::thread::sleep(Duration::from_millis(1));
    }

    fn is_direct(&self) -> bool {
        let [one, other] = &self.nodes;
        let is_direct = |node: &Node, peer: &Node| {
            node.endpoint(&peer.key).is_some_and(|endpoint| !endpoint.ip().is_loopback())
        };
        is_direct(one, other) && is_direct(other, one)
    }

    fn has_failed(&self) -> bool {
        let failed = |node: &Node| node.agent.birthday_outcomes().contains_key(&BirthdayOutcome::NoPortFound);
        self.nodes.iter().all(failed)
    }

    /// One attempt, until both nodes use the path that it has found, or have given up.
    fn attempt(&mut self, seed: u64, policy: BirthdayPolicy) -> Run {
        self.restart(seed, policy);
        let (mut began, end) = (None, self.now() + LIMIT);
        let mut took = None;
        while self.now() < end && took.is_none() && !self.has_failed() {
            self.turn();
            let is_running =
                |[node, peer]: [usize; 2]| self.nodes[node].birthday_runs(self.now(), self.nodes[peer].key);
            if began.is_none() && ([0, 1].into_iter().any(|node| is_running([node, 1 - node]))) {
                began = Some(self.now());
            }
            took = began.filter(|_| self.is_direct()).map(|began| self.now() - began);
        }
        let probes = self.nodes.iter().map(|node| node.probes).max().unwrap();
        Run { took, tracked: self.network.tracked(), probes }
    }
}

fn nodes(network: &Network) -> [Node; 2] {
    [0, 1].map(|node| {
        let address = SocketAddr::from((network.hosts[node].address(), PORT));
        Node::new(u8::try_from(node + 1).unwrap(), address)
    })
}

/// Prints what became of the runs, and returns how many had a path within the goal.
fn report(name: &str, runs: &[Run]) -> usize {
    let mut times: Vec<Duration> = runs.iter().filter_map(|run| run.took).collect();
    times.sort();
    let within = times.iter().filter(|took| **took <= GOAL).count();
    let at = |percent: usize| times.get(times.len().saturating_sub(1) * percent / 100).copied();
    let [p50, p99, longest] = [50, 99, 100].map(|percent| at(percent).unwrap_or_default());
    let tracked = runs.iter().map(|run| run.tracked).max().unwrap_or_default();
    let probes = runs.iter().map(|run| run.probes).max().unwrap_or_default();
    println!(
        "{name}: {within} of {} runs have a direct path within 5 s; p50 {p50:.2?}, p99 {p99:.2?}, longest {longest:.2?}; at most \
         {probes} probes of a node and {tracked} entries of connection tracking at a router",
        runs.len()
    );
    within
}

/// Runs that a rate of success needs.
const RATE_RUNS: u64 = 200;
/// Runs in which each that finds no port takes [`LIMIT`], and that only bounds are asked of.
const BOUND_RUNS: u64 = 32;

/// As many attempts as `FAIRLEAD_BIRTHDAY_RUNS` says, else `runs`.
fn soak(name: &str, nats: [Nat; 2], policy: BirthdayPolicy, runs: u64) -> (usize, Vec<Run>) {
    let count = std::env::var("FAIRLEAD_BIRTHDAY_RUNS").map_or(runs, |runs| runs.parse().unwrap());
    let mut world = World::new(nats);
    let mut runs = Vec::new();
    for seed in 0..count {
        runs.push(world.attempt(seed, policy));
        if seed % 20 == 19 {
            report(name, &runs);
        }
    }
    (report(name, &runs), runs)
}

/// Three seconds each. Needs root.
#[test]
#[ignore = "needs root and ten minutes: cargo xtask test soak"]
fn attempts_between_a_symmetric_and_a_port_restricted_nat_succeed_in_99_of_100_runs() {
    let nats = [Nat::SymmetricRandom, Nat::PortRestricted];
    let (within, runs) = soak("random and port-restricted", nats, BirthdayPolicy::PortRestricted, RATE_RUNS);
    assert!(within * 100 >= runs.len() * 99, "{within} of {}", runs.len());
    assert!(runs.iter().all(|run| run.tracked <= 2048 + 256 + 100));
}

#[test]
#[ignore = "needs root and ten minutes: cargo xtask test soak"]
fn attempts_between_two_symmetric_nats_succeed_where_both_sequential() {
    let (within, runs) = soak(
        "sequential and sequential",
        [Nat::SymmetricPredictable; 2],
        BirthdayPolicy::Symmetric,
        RATE_RUNS,
    );
    assert!(within * 100 >= runs.len() * 95, "{within} of {}", runs.len());
}

/// Expected success: a port is found in one of 32 attempts where one NAT is predictable, and in one of 1,000 where both are random.
#[test]
#[ignore = "needs root and a quarter of an hour: cargo xtask test soak"]
fn attempts_with_random_ports_stay_within_their_limits() {
    for other in [Nat::SymmetricPredictable, Nat::SymmetricRandom] {
        let name = format!("random and {other:?}");
        let (_, runs) = soak(&name, [Nat::SymmetricRandom, other], BirthdayPolicy::Symmetric, BOUND_RUNS);
        assert!(runs.iter().all(|run| run.tracked <= 2048 + 100), "{name}");
    }
}

//! Random pairs with a relay, over TCP and UDP, to which all happens that happens to nodes: losses, routers and programs that restart,
//! mappings that expire, paths that become black holes, clocks that jump.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fairlead_path::{OwnSide, OwnView, PeerPaths, PeerView, RelayPath, StunAnswer, is_private, order};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::node::Node;
use super::relay::relay_endpoint;
use super::router::{Nat, Router};
use super::{RELAY, SECOND, World, router};

const MILLISECOND: Duration = Duration::from_millis(1);
/// Between two messages of a node.
const INTERVAL: Duration = Duration::from_millis(50);
/// After which what nodes learn of themselves is known to peers by way of the API server.
const PUBLISHED_AFTER: Duration = Duration::from_secs(2);
/// Longest time until both ends of a pair have the path that they keep: at first, and after a direct path was left. Then it is the longest
/// time between attempts that users have set, and one attempt.
const FOUND: Duration = Duration::from_secs(15);
const FOUND_AGAIN: Duration = Duration::from_secs(130);
/// Random worlds of a run.
const SEEDS: u64 = 100;

/// Place of a node in the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// At a public address.
    Open,
    Behind(Nat),
}

const PLACES: [Place; 7] = [
    Place::Open,
    Place::Behind(Nat::FullCone),
    Place::Behind(Nat::AddressRestricted),
    Place::Behind(Nat::PortRestricted),
    Place::Behind(Nat::Symmetric),
    Place::Behind(Nat::SymmetricRandom),
    Place::Behind(Nat::NoUdp),
];

impl Place {
    /// Whether the table of RFC 4787's kinds has a direct path for nodes at two sites.
    fn is_direct(self, other: Self) -> bool {
        let passes_udp = |place| place != Self::Behind(Nat::NoUdp);
        let is_hard = |place| matches!(place, Self::Behind(Nat::Symmetric | Nat::SymmetricRandom));
        let is_strict = |place| is_hard(place) || place == Self::Behind(Nat::PortRestricted);
        passes_udp(self)
            && passes_udp(other)
            && !(is_hard(self) && is_strict(other) || is_hard(other) && is_strict(self))
    }
}

/// Incident that a pair must survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Incident {
    /// The direct path loses everything for so many seconds, in one direction or both.
    BlackHole { seconds: u32, both: bool },
    /// The program of a node restarts, with the clock of its host set back: its WireGuard's initiations are refused.
    ClockBack(usize),
    /// Nothing is sent for so many seconds: mappings may expire.
    Idle(u32),
    /// The link of a node to the relay is cut.
    LinkCut(usize),
    /// A router forgets all mappings.
    Rebind(usize),
    /// The relay restarts, and is away for so many seconds.
    RelayRestart(u32),
    /// The program of a node restarts, and its WireGuard with it, unless that is the kernel's.
    Restart { node: usize, keeps_device: bool },
    /// The host of a node stands still for so many seconds.
    Suspend(usize, u32),
}

impl Incident {
    fn draw(random: &mut SmallRng) -> Self {
        let node = random.random_range(0..2);
        match random.random_range(0..8) {
            0 => Self::BlackHole { seconds: random.random_range(1..20), both: random.random() },
            1 => Self::ClockBack(node),
            2 => Self::Idle(random.random_range(20..150)),
            3 => Self::LinkCut(node),
            4 => Self::Rebind(node),
            5 => Self::RelayRestart(random.random_range(0..15)),
            6 => Self::Restart { node, keeps_device: random.random() },
            _ => Self::Suspend(node, random.random_range(1..20)),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::BlackHole { .. } => "a black hole",
            Self::ClockBack(_) => "a restart with the clock set back",
            Self::Idle(_) => "a pause",
            Self::LinkCut(_) => "the loss of a link",
            Self::Rebind(_) => "a router's restart",
            Self::RelayRestart(_) => "the relay's restart",
            Self::Restart { keeps_device: false, .. } => "a restart",
            Self::Restart { .. } => "an agent's restart",
            Self::Suspend(..) => "a standstill",
        }
    }

    /// The longest time without traffic that it may cost, from its end on, besides round trips.
    fn longest_gap(self) -> Duration {
        match self {
            Self::BlackHole { .. } => 3 * SECOND,
            Self::ClockBack(_) => 12 * SECOND,
            Self::Idle(_) | Self::LinkCut(_) | Self::Rebind(_) => 3 * SECOND,
            Self::RelayRestart(_) => 4 * SECOND,
            Self::Restart { keeps_device: true, .. } | Self::Suspend(..) => 3 * SECOND,
            Self::Restart { .. } => 7 * SECOND,
        }
    }
}

/// Two nodes and what is random of them.
struct Pair {
    seed: u64,
    world: World,
    places: [Place; 2],
    is_one_site: bool,
    random: SmallRng,
    /// When what a node has learned of itself reaches its peer.
    published: [Option<Duration>; 2],
}

impl Pair {
    fn new(seed: u64) -> Self {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut places = [(); 2].map(|()| PLACES[random.random_range(0..PLACES.len())]);
        let is_one_site = places[0] != Place::Open && random.random_range(0..6) == 0;
        if is_one_site {
            places[1] = places[0];
        }
        let mut routers: Vec<Router> = Vec::new();
        let mut own = Vec::new();
        for (site, place) in (1..).zip(places) {
            match place {
                Place::Open => own.push(format!("203.0.113.{}", 50 + site)),
                Place::Behind(_) if is_one_site && site == 2 => own.push("192.168.1.3".to_owned()),
                Place::Behind(nat) => {
                    own.push(format!("192.168.{site}.2"));
                    let mut router = router(nat, site);
                    router.reseed(seed);
                    router.hairpins = random.random();
                    router.preserves_ports = random.random();
                    let lifetimes = [None, Some(20), Some(30), Some(60), Some(180)];
                    router.lifetime =
                        lifetimes[random.random_range(0..lifetimes.len())].map(Duration::from_secs);
                    routers.push(router);
                }
            }
        }
        let mut world = World::without_peers([&own[0], &own[1]], routers);
        for (node, number) in world.nodes.iter_mut().zip(1..) {
            node.reseed(seed * 2 + number);
        }
        world.interval = INTERVAL;
        world.network.random = SmallRng::seed_from_u64(seed);
        world.network.delays.1 = random.random_range(1..150) * MILLISECOND;
        world.network.jitter = random.random_range(0..40) * MILLISECOND;
        world.network.loss = random.random_range(0..30);
        world.network.connection_loss = world.network.loss;
        let passes_udp = random.random_range(0..4) > 0;
        world.start_relay(passes_udp);
        if !passes_udp {
            let (server, now) = (SocketAddr::from(([198, 51, 100, 1], 3478)), world.now);
            world.network.stun = Some(server);
            world.nodes.iter_mut().for_each(|node| node.agent.set_stun_servers(now, &[server]));
        }
        let mut pair = Self { seed, world, places, is_one_site, random, published: [None; 2] };
        (0..2).for_each(|node| pair.publish(node));
        pair
    }

    fn fails(&self, what: &str) -> String {
        let Self { seed, world, places, is_one_site, .. } = self;
        let network = &world.network;
        let routers: Vec<_> = network.routers.iter().map(|it| (it.nat, it.lifetime, it.hairpins)).collect();
        let moves: Vec<_> =
            world.nodes.iter().map(|node| node.endpoints.iter().rev().take(6).collect::<Vec<_>>()).collect();
        format!(
            "seed {seed}: {what}, at {:?}; {places:?}, one site: {is_one_site}, routers {routers:?}, delay {:?} and {:?}, loss {}, \
             endpoints {:?}, moves {moves:?}",
            world.now,
            network.delays.1,
            network.jitter,
            network.loss,
            world.endpoints()
        )
    }

    /// Tells a node what it is, and its peer where it is reached.
    fn publish(&mut self, node: usize) {
        let World { nodes, now, .. } = &mut self.world;
        let views = [0, 1].map(|node| own_side(&nodes[node]));
        let peer = 1 - node;
        nodes[node].agent.set_own_side(*now, views[node].clone());
        let mapped = mapped(&nodes[node]);
        let seen = PeerView { manual: None, host: vec![nodes[node].address], observed: mapped };
        let candidates = order(&views[peer].view, &seen);
        let relay = RelayPath {
            endpoint: relay_endpoint(node),
            is_only: false,
            handshake_timeout: 30 * SECOND,
            direct_retry: 120 * SECOND,
        };
        let key = nodes[node].key;
        let paths = PeerPaths { candidates, relay: Some(relay), ..PeerPaths::default() };
        nodes[peer].upsert(*now, key, paths);
    }

    fn run(&mut self, time: Duration) {
        let end = self.world.now + time;
        while self.world.now < end {
            let step = (end - self.world.now).min(100 * MILLISECOND);
            self.world.run(step);
            for node in 0..2 {
                if std::mem::take(&mut self.world.nodes[node].has_news) {
                    self.published[node] = Some(self.world.now + PUBLISHED_AFTER);
                    let side = own_side(&self.world.nodes[node]);
                    self.world.nodes[node].agent.set_own_side(self.world.now, side);
                }
                if self.published[node].take_if(|at| *at <= self.world.now).is_some() {
                    self.publish(node);
                }
            }
        }
    }

    /// Whether the pair has the path that is expected of it.
    fn is_settled(&self) -> bool {
        let [one, other] = self.world.endpoints();
        let is_relay = |endpoint: SocketAddr| endpoint.ip().is_loopback() || endpoint.ip() == RELAY;
        if self.is_one_site {
            return [one, other] == [self.world.nodes[1].address, self.world.nodes[0].address];
        }
        let is_direct = self.places[0].is_direct(self.places[1]);
        is_relay(one) != is_direct && is_relay(other) != is_direct
    }

    /// Waits until both ends have the path that they keep, and sees that they keep it and do not ask for much.
    fn settle(&mut self, within: Duration) -> Result<(), String> {
        let deadline = self.world.now + within;
        while !self.is_settled() {
            if self.world.now >= deadline {
                return Err(self.fails("the pair has not the path that is expected"));
            }
            self.run(SECOND);
        }
        self.run(5 * SECOND);
        let (began, before) =
            (self.world.now, self.world.nodes.each_ref().map(|node| (node.probes, node.endpoints.len())));
        self.run(20 * SECOND);
        // For a moment a node may be elsewhere: several lost answers in a row make a path fail.
        let deadline = self.world.now + 5 * SECOND;
        while !self.is_settled() {
            if self.world.now >= deadline {
                return Err(self.fails("the path was left again"));
            }
            self.run(100 * MILLISECOND);
        }
        for (node, (probes, moves)) in self.world.nodes.iter().zip(before) {
            // Several lost answers in a row make a path fail, which is then taken up again.
            let most = if self.world.network.loss > 0 { 4 } else { 1 };
            if node.endpoints.len() > moves + most {
                return Err(self.fails(&format!("{} moves in 20 s of peace", node.endpoints.len() - moves)));
            }
            if node.probes - probes > 200 {
                return Err(self.fails(&format!("{} probes in 20 s of peace", node.probes - probes)));
            }
        }
        self.gap("peace", began, 2 * SECOND).map(drop)
    }

    /// The longest time without traffic since then, unless that is too long.
    fn gap(&self, what: &str, since: Duration, longest: Duration) -> Result<Duration, String> {
        let gap = self.world.longest_gap(since);
        let longest = longest + 8 * (self.world.network.delays.1 + self.world.network.jitter);
        if gap > longest {
            Err(self.fails(&format!("{what}: no traffic for {gap:?} since {since:?}")))
        } else {
            Ok(gap)
        }
    }

    fn suffer(&mut self, incident: Incident) -> Result<Gap, String> {
        let moves = self.world.nodes.each_ref().map(|node| node.endpoints.len());
        self.happen(incident);
        let since = self.world.now;
        self.run(15 * SECOND);
        self.world.network.black_holes.clear();
        let gap = self.gap(&format!("{incident:?}"), since, incident.longest_gap())?;
        for (node, before) in self.world.nodes.iter().zip(moves) {
            if node.endpoints.len() > before + 12 {
                return Err(self.fails(&format!("{incident:?}: {} moves", node.endpoints.len() - before)));
            }
            let most = node.most_probes();
            if most > 100 {
                return Err(self.fails(&format!("{incident:?}: {most} probes in a second to one address")));
            }
        }
        self.settle(FOUND_AGAIN).map_err(|error| format!("{error} after {incident:?}"))?;
        Ok((incident.name(), gap))
    }

    /// Lets something happen, until it is over.
    fn happen(&mut self, incident: Incident) {
        match incident {
            Incident::BlackHole { seconds, both } => {
                self.black_hole(both);
                self.run(seconds * SECOND);
            }
            Incident::ClockBack(node) => {
                self.world.nodes[node].reboot();
                self.restarted(node);
            }
            Incident::Idle(seconds) => {
                self.world.sends_data = false;
                self.run(seconds * SECOND);
                self.world.sends_data = true;
            }
            Incident::LinkCut(node) => self.cut(node),
            Incident::Rebind(node) => {
                let ip = self.world.nodes[node].address.ip();
                let routers = &mut self.world.network.routers;
                if let Some(router) = routers.iter_mut().find(|router| router.has_inside(ip)) {
                    router.rebind();
                    let behind = |node: &usize| router.has_inside(self.world.nodes[*node].address.ip());
                    let nodes: Vec<usize> = (0..2).filter(behind).collect();
                    nodes.into_iter().for_each(|node| self.cut(node));
                }
            }
            Incident::RelayRestart(seconds) => {
                let (now, random) = (self.world.now, &mut self.random);
                let relay = self.world.network.relay.as_mut().unwrap();
                // What has worked is tried again at once, and then after a second and more.
                let pause = seconds * SECOND;
                relay.restart(now, pause, || random.random_range(0..300) * MILLISECOND);
                relay.delay_clients(now, pause, || random.random_range(0..2000) * MILLISECOND);
                self.run(pause);
            }
            Incident::Restart { node, keeps_device } => {
                self.world.nodes[node].restart(keeps_device);
                self.restarted(node);
            }
            Incident::Suspend(node, seconds) => {
                self.world.suspended = Some((node, self.world.now + seconds * SECOND));
                self.run(seconds * SECOND);
            }
        }
    }

    fn cut(&mut self, node: usize) {
        let pause = self.random.random_range(0..300) * MILLISECOND + 4 * self.world.network.delays.1;
        self.world.network.relay.as_mut().unwrap().cut(self.world.now, node, pause);
    }

    /// The program of a node is another run of itself.
    fn restarted(&mut self, node: usize) {
        self.world.network.relay.as_mut().unwrap().restarted_client(self.world.now, node);
        (0..2).for_each(|node| self.publish(node));
    }

    /// Between the addresses that packets of the direct path have on the Internet, or on the LAN.
    fn black_hole(&mut self, both: bool) {
        let outer = |node: usize| {
            let ip = self.world.nodes[node].address.ip();
            let site = (!self.is_one_site).then_some(node).and_then(|node| u8::try_from(node + 1).ok());
            let is_nat = self.places[node] != Place::Open;
            site.filter(|_| is_nat).map_or(ip, |site| IpAddr::from([203, 0, 113, site]))
        };
        let (one, other) = (outer(0), outer(1));
        self.world.network.black_holes.insert((one, other));
        if both {
            self.world.network.black_holes.insert((other, one));
        }
    }
}

/// Addresses at which the relay sees a node.
fn mapped(node: &Node) -> Vec<SocketAddr> {
    let mapped = |answer| match answer {
        StunAnswer::Mapped(address) => Some(address),
        _ => None,
    };
    node.agent.stun_answers().into_values().filter_map(mapped).collect()
}

fn own_side(node: &Node) -> OwnSide {
    let ip = node.address.ip();
    let public_ips = mapped(node).iter().map(SocketAddr::ip).collect();
    let prefixes = if is_private(ip) { vec![format!("{ip}/24").parse().unwrap()] } else { Vec::new() };
    let view = OwnView { addresses: vec![ip], public_ips, prefixes, ..OwnView::default() };
    OwnSide { view, host: vec![node.address], ..OwnSide::default() }
}

/// Incident, and the time without traffic after it.
type Gap = (&'static str, Duration);

fn survives(seed: u64) -> Result<Vec<Gap>, String> {
    let mut pair = Pair::new(seed);
    let began = pair.world.now;
    pair.run(10 * SECOND);
    let mut gaps = vec![("start", pair.gap("start", began, 3 * SECOND)?)];
    pair.settle(FOUND)?;
    for _ in 0..2 {
        let incident = Incident::draw(&mut pair.random);
        gaps.push(pair.suffer(incident)?);
    }
    Ok(gaps)
}

/// Runs so many random pairs on all processors.
fn survive(seeds: u64) -> Vec<Result<Vec<Gap>, String>> {
    let next = AtomicU64::new(0);
    let run = || {
        let drawn = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        drawn.take_while(|seed| *seed < seeds).map(survives).collect::<Vec<_>>()
    };
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        running.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

/// `FAIRLEAD_SIMULATION_SEEDS` runs so many instead; `FAIRLEAD_SIMULATION_SEED` runs one alone.
#[test]
fn random_pairs_with_a_relay_have_traffic_and_the_path_expected_whatever_happens() {
    if let Ok(seed) = std::env::var("FAIRLEAD_SIMULATION_SEED") {
        survives(seed.parse().unwrap()).unwrap();
        return;
    }
    let seeds = std::env::var("FAIRLEAD_SIMULATION_SEEDS").map_or(SEEDS, |seeds| seeds.parse().unwrap());
    let (mut failures, mut gaps) = (Vec::new(), BTreeMap::<_, Vec<Duration>>::new());
    for result in survive(seeds) {
        match result {
            Ok(known) => known.into_iter().for_each(|(what, gap)| gaps.entry(what).or_default().push(gap)),
            Err(failure) => failures.push(failure),
        }
    }
    for (what, gaps) in &mut gaps {
        gaps.sort();
        let (median, longest) = (gaps[gaps.len() / 2], gaps[gaps.len() - 1]);
        println!("no traffic after {what}, {} times: median {median:?}, longest {longest:?}", gaps.len());
    }
    assert!(failures.is_empty(), "{} of {seeds} failed:\n{}", failures.len(), failures.join("\n"));
}

//! A node: the agent under test, and a model of its WireGuard device: who is sent to, who answered, and roaming.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use fairlead_keys::{PrivateKey, PublicKey};
use fairlead_path::{
    BIRTHDAY_SOCKETS, Candidate, Config, EndpointReason, Event, Identity, Observation, PathAgent, PeerPaths,
    SocketChange, Source, Transmit, is_private,
};
use fairlead_tunnel::roaming::Roaming;
use x25519_dalek::StaticSecret;

use super::network::{Datagram, Network};

const INITIATION: u8 = 1;
const RESPONSE: u8 = 2;
const KEEPALIVE: u8 = 3;
pub(crate) const DATA: u8 = 4;
/// Unless the agent asks for more.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(25);
/// WireGuard's REKEY_TIMEOUT.
const REKEY_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which data of the relay is kept from the kernel's WireGuard after its endpoint has become a direct one.
const RELAY_HELD: Duration = fairlead_relay::client::HOLD;
/// After which the embedded WireGuard says that nothing is received.
const MISSED_AFTER: Duration = Duration::from_millis(500);

#[derive(Debug, Default)]
struct DevicePeer {
    endpoint: Option<SocketAddr>,
    handshake: Option<Duration>,
    /// The greatest time stamp of an initiation (TAI64N): older ones are refused.
    greatest: u32,
    initiated: Option<Duration>,
    roaming: Roaming,
    /// Time until which the node program keeps data of the relay from the kernel's WireGuard.
    relay_held_until: Duration,
    /// When the first data message was sent that nothing was received after.
    waiting_since: Option<Duration>,
    rx_bytes: u64,
    tx_bytes: u64,
}

pub(crate) struct Node {
    pub(crate) address: SocketAddr,
    pub(crate) key: PublicKey,
    pub(crate) agent: PathAgent,
    /// Number of the data message sent last, and those that arrived, with their time.
    pub(crate) sent: u32,
    pub(crate) arrived: BTreeMap<u32, Duration>,
    /// Each endpoint that was set, and why.
    pub(crate) endpoints: Vec<(Duration, SocketAddr, EndpointReason)>,
    /// Time by which keepalives come later than multiples of their interval.
    pub(crate) keepalive_phase: Duration,
    /// Each interval of keepalives that the path was to have.
    pub(crate) keepalives: Vec<(Duration, Option<Duration>)>,
    /// Each MTU that routes to the peer were to have.
    pub(crate) route_mtus: Vec<(Duration, Option<u32>)>,
    /// Datagrams that were not WireGuard's.
    pub(crate) probes: u64,
    /// Data messages that were sent over the relay as well.
    pub(crate) copies: u64,
    also: BTreeMap<PublicKey, SocketAddr>,
    /// Each endpoint that its WireGuard took from a packet of the peer, in place of another.
    pub(crate) roamed: Vec<(Duration, SocketAddr)>,
    /// Whether the node's WireGuard is the kernel's, which knows nothing of relays.
    pub(crate) is_kernel: bool,
    /// The start of the clock.
    epoch: Instant,
    /// Number of handshakes that were started because the peer asked.
    pub(crate) handshakes_asked: usize,
    /// The ports of the birthday attempt that are open, by number, and those that are kept, by endpoint.
    pub(crate) sockets: Vec<u16>,
    pub(crate) kept: BTreeMap<SocketAddr, u16>,
    opened: u16,
    /// STUN servers have said something new since that was last published.
    pub(crate) has_news: bool,
    number: u8,
    /// Number of restarts of the node's program.
    runs: u8,
    /// Probes of the second that began last, by address, and the most that there were.
    per_second: (Duration, BTreeMap<IpAddr, u64>),
    most: u64,
    /// Time by which the node's clock is ahead of the network's.
    clock: Duration,
    device: BTreeMap<PublicKey, DevicePeer>,
}

impl Node {
    pub(crate) fn new(number: u8, address: SocketAddr) -> Self {
        let private = [number; 32];
        let key = PublicKey(x25519_dalek::PublicKey::from(&StaticSecret::from(private)).to_bytes());
        Self {
            address,
            key,
            agent: agent(number, key, number, number.into()),
            sent: 0,
            arrived: BTreeMap::new(),
            endpoints: Vec::new(),
            keepalive_phase: Duration::ZERO,
            keepalives: Vec::new(),
            route_mtus: Vec::new(),
            probes: 0,
            copies: 0,
            also: BTreeMap::new(),
            roamed: Vec::new(),
            is_kernel: false,
            epoch: Instant::now(),
            handshakes_asked: 0,
            sockets: Vec::new(),
            kept: BTreeMap::new(),
            opened: 0,
            has_news: false,
            number,
            runs: 0,
            per_second: (Duration::ZERO, BTreeMap::new()),
            most: 0,
            clock: Duration::from_secs(3600),
            device: BTreeMap::new(),
        }
    }

    /// Without anything that it knew, and with its clock set back; its peers are to be added again.
    pub(crate) fn reboot(&mut self) {
        self.restart(false);
        self.clock = Duration::ZERO;
    }

    /// Another run of the program; its peers are to be added again. The kernel's WireGuard goes on without it.
    pub(crate) fn restart(&mut self, keeps_device: bool) {
        self.runs += 1;
        self.agent =
            agent(self.number, self.key, self.number.wrapping_add(100 * self.runs), self.number.into());
        self.sockets.clear();
        self.kept.clear();
        self.also.clear();
        if !keeps_device {
            self.device.clear();
        }
    }

    /// With other random numbers; before peers are added.
    pub(crate) fn reseed(&mut self, seed: u64) {
        self.agent = agent(self.number, self.key, self.number, seed);
        self.device.clear();
    }

    pub(crate) fn add_peer(&mut self, now: Duration, peer: PublicKey, candidates: &[SocketAddr]) {
        self.add_peer_with(now, peer, candidates, PeerPaths::default());
    }

    /// The same with a relay or birthday attempts.
    pub(crate) fn add_peer_with(
        &mut self,
        now: Duration,
        peer: PublicKey,
        candidates: &[SocketAddr],
        paths: PeerPaths,
    ) {
        let candidate = |address: &SocketAddr| {
            let source = if is_private(address.ip()) { Source::Host } else { Source::Observed };
            Candidate { address: *address, source }
        };
        let candidates = candidates.iter().map(candidate).collect();
        self.upsert(now, peer, PeerPaths { candidates, ..paths });
    }

    /// The same with these candidates.
    pub(crate) fn upsert(&mut self, now: Duration, peer: PublicKey, paths: PeerPaths) {
        self.device.entry(peer).or_default();
        self.agent.upsert_peer(now, peer, PeerPaths { silence: Some(Duration::from_secs(60)), ..paths });
    }

    /// The most probes to one address in a second.
    pub(crate) fn most_probes(&self) -> u64 {
        self.most
    }

    fn count_probe(&mut self, now: Duration, to: IpAddr) {
        self.probes += 1;
        if now - self.per_second.0 >= Duration::from_secs(1) {
            self.per_second = (now, BTreeMap::new());
        }
        let count = self.per_second.1.entry(to).or_default();
        *count += 1;
        self.most = self.most.max(*count);
    }

    /// Whether a datagram to this address is for this node.
    pub(crate) fn is_at(&self, address: SocketAddr) -> bool {
        let port = address.port();
        let is_open = self.sockets.contains(&port) || self.kept.values().any(|kept| *kept == port);
        address.ip() == self.address.ip() && (port == self.address.port() || is_open)
    }

    /// Source of the packets that WireGuard sends to an endpoint.
    fn source(&self, to: SocketAddr) -> SocketAddr {
        source(self.address, &self.kept, to)
    }

    /// Endpoint to which WireGuard sends packets for a peer.
    pub(crate) fn endpoint(&self, peer: &PublicKey) -> Option<SocketAddr> {
        self.device[peer].endpoint
    }

    /// Whether a birthday attempt with this peer is under way.
    pub(crate) fn birthday_runs(&self, now: Duration, peer: PublicKey) -> bool {
        self.agent.birthday_status(now, &peer).is_some_and(|status| status.is_running)
    }

    pub(crate) fn send_data(&mut self, now: Duration, network: &mut Network) {
        for (key, peer) in &mut self.device {
            let (Some(to), Some(_)) = (peer.endpoint, peer.handshake) else { continue };
            self.sent += 1;
            peer.tx_bytes += 100;
            let payload = [&[DATA, 0, 0, 0][..], &self.sent.to_be_bytes(), &self.key.0].concat();
            let from = source(self.address, &self.kept, to);
            peer.waiting_since.get_or_insert(now);
            let also = self.also.get(key).copied().filter(|also| *also != to && !self.is_kernel);
            if let Some(also) = also {
                self.copies += 1;
                network.send(now, Datagram { from, to: also, payload: payload.clone() });
            }
            network.send(now, Datagram { from, to, payload });
        }
    }

    pub(crate) fn receive(&mut self, now: Duration, datagram: Datagram, network: &mut Network) {
        let Datagram { from, to, payload } = datagram;
        // The second byte of a STUN response is not zero.
        if !matches!(payload[..], [INITIATION | RESPONSE | KEEPALIVE | DATA, 0, ..]) {
            match self.sockets.iter().position(|port| *port == to.port()) {
                Some(socket) => {
                    let socket = u16::try_from(socket).unwrap();
                    self.agent.handle_socket_datagram(now, socket, from, &payload);
                }
                None => self.agent.handle_datagram(now, None, from, &payload),
            }
            return;
        }
        let sender = PublicKey(payload[8..40].try_into().unwrap());
        let Some(peer) = self.device.get_mut(&sender) else { return };
        let is_data = matches!(payload[0], DATA | KEEPALIVE);
        if is_data && (peer.handshake.is_none() || from.ip().is_loopback() && now < peer.relay_held_until) {
            return;
        }
        if payload[0] == INITIATION {
            let stamp = u32::from_be_bytes(payload[4..8].try_into().unwrap());
            if stamp <= peer.greatest {
                return;
            }
            peer.greatest = stamp;
        }
        let number = u32::from_be_bytes(payload[4..8].try_into().unwrap());
        if payload[0] == DATA && self.arrived.contains_key(&number) {
            // A replay.
            return;
        }
        peer.waiting_since = None;
        let at = self.epoch + now;
        let is_newest =
            payload[0] != DATA || self.arrived.last_key_value().is_none_or(|(last, _)| *last < number);
        let counts = is_newest || peer.endpoint == Some(from);
        // The kernel's moves with each packet, and each one that has no session.
        let moves_at_once = self.is_kernel || peer.handshake.is_none();
        let moves = moves_at_once || counts && peer.roaming.moves(peer.endpoint, from, at);
        if moves && peer.endpoint.replace(from).is_some_and(|present| present != from) {
            self.roamed.push((now, from));
        }
        if peer.handshake.is_none() && payload[0] != INITIATION && self.key < sender {
            peer.roaming.hold(at);
        }
        peer.rx_bytes += if payload[0] == KEEPALIVE { 32 } else { 100 };
        match payload[0] {
            DATA => drop(self.arrived.insert(number, now)),
            KEEPALIVE => {}
            INITIATION => {
                peer.handshake = Some(now);
                let payload = [&[RESPONSE, 0, 0, 0, 0, 0, 0, 0][..], &self.key.0].concat();
                network
                    .send(now, Datagram { from: source(self.address, &self.kept, from), to: from, payload });
            }
            _ => peer.handshake = Some(now),
        }
    }

    /// Timers of the agent and of the device, and what the agent wants done.
    pub(crate) fn run(&mut self, now: Duration, network: &mut Network) {
        for (key, peer) in &mut self.device {
            let is_missed = peer.waiting_since.take_if(|since| now - *since >= MISSED_AFTER).is_some();
            if is_missed && !self.is_kernel {
                self.agent.packets_unanswered(now, key);
            }
        }
        if self.agent.poll_timeout().is_some_and(|at| at <= now) {
            self.agent.handle_timeout(now);
        }
        // As the node program does: what is to be sent first.
        while let Some(Transmit { remote, payload, socket, .. }) = self.agent.poll_transmit() {
            self.count_probe(now, remote.ip());
            let port = socket.and_then(|socket| self.sockets.get(usize::from(socket)).copied());
            let from =
                port.map_or_else(|| self.source(remote), |port| SocketAddr::new(self.address.ip(), port));
            network.send(now, Datagram { from, to: remote, payload });
        }
        while let Some(event) = self.agent.poll_event() {
            match event {
                Event::ObservationDue { peer } => {
                    let device = &self.device[&peer];
                    let observation = Observation {
                        endpoint: device.endpoint,
                        handshake_age: device.handshake.map(|at| now - at),
                        rx_bytes: device.rx_bytes,
                        tx_bytes: device.tx_bytes,
                    };
                    self.agent.observe(now, &peer, observation);
                }
                Event::SetEndpoint { peer, endpoint, reason, .. } => {
                    self.endpoints.push((now, endpoint, reason));
                    let device = self.device.get_mut(&peer).unwrap();
                    let before = device.endpoint.replace(endpoint);
                    let was_relayed = before.is_some_and(|before| before.ip().is_loopback());
                    if self.is_kernel && was_relayed && !endpoint.ip().is_loopback() {
                        device.relay_held_until = now + RELAY_HELD;
                    }
                    device.roaming = Roaming::default();
                    if device.handshake.is_some() {
                        device.roaming.configured(endpoint, self.key < peer, self.epoch + now);
                        keep_alive(now, (self.address, &self.kept), &self.key, device, network);
                    } else {
                        initiate(now, self.clock, (self.address, &self.kept), &self.key, device, network);
                    }
                }
                Event::HandshakeDue { peer } => {
                    self.handshakes_asked += 1;
                    let device = self.device.get_mut(&peer).unwrap();
                    initiate(now, self.clock, (self.address, &self.kept), &self.key, device, network);
                }
                Event::SendBothWays { peer, also } => match also {
                    Some(also) => drop(self.also.insert(peer, also)),
                    None => drop(self.also.remove(&peer)),
                },
                Event::Sockets(SocketChange::Close) => self.sockets.clear(),
                Event::Sockets(SocketChange::Keep { remote, socket, .. }) => {
                    self.kept.insert(remote, self.sockets[usize::from(socket)]);
                }
                Event::Sockets(SocketChange::Leave { remote }) => drop(self.kept.remove(&remote)),
                Event::Sockets(SocketChange::Open { count }) => {
                    let first = 10_000 + self.opened * BIRTHDAY_SOCKETS;
                    self.opened += 1;
                    self.sockets = (first..first + count).collect();
                }
                Event::KeepaliveChanged { interval, .. } => self.keepalives.push((now, interval)),
                Event::RouteMtuChanged { mtu, .. } => self.route_mtus.push((now, mtu)),
                Event::RelayPortDue { peer } => network.ask_port(now, self.address, &peer),
                Event::StunAnswersChanged => self.has_news = true,
                Event::ReflexiveAddressesChanged | Event::StateChanged { .. } => {}
            }
        }
        for device in self.device.values_mut() {
            let is_due = device.initiated.is_none_or(|at| now - at >= REKEY_TIMEOUT);
            if device.handshake.is_none() && is_due {
                initiate(now, self.clock, (self.address, &self.kept), &self.key, device, network);
            }
            let asked = self.keepalives.last().and_then(|(_, interval)| *interval);
            let interval = asked.unwrap_or(KEEPALIVE_INTERVAL);
            // Each node has a phase of its own.
            let since = now.checked_sub(self.keepalive_phase);
            if since.is_some_and(|since| since.as_millis().is_multiple_of(interval.as_millis())) {
                keep_alive(now, (self.address, &self.kept), &self.key, device, network);
            }
        }
    }
}

fn source(own: SocketAddr, kept: &BTreeMap<SocketAddr, u16>, to: SocketAddr) -> SocketAddr {
    kept.get(&to).map_or(own, |port| SocketAddr::new(own.ip(), *port))
}

fn agent(number: u8, key: PublicKey, epoch: u8, seed: u64) -> PathAgent {
    let config = Config { attempt: Duration::from_millis(2500), ..Config::default() };
    let mut agent = PathAgent::new(config, seed);
    agent.enable_probes(Identity {
        private_key: PrivateKey([number; 32]),
        public_key: key,
        epoch: [epoch; 16],
    });
    agent.enable_sockets();
    agent
}

fn keep_alive(
    now: Duration,
    (own, kept): (SocketAddr, &BTreeMap<SocketAddr, u16>),
    key: &PublicKey,
    device: &mut DevicePeer,
    network: &mut Network,
) {
    let (Some(to), Some(_)) = (device.endpoint, device.handshake) else { return };
    device.tx_bytes += 32;
    let payload = [&[KEEPALIVE, 0, 0, 0, 0, 0, 0, 0][..], &key.0].concat();
    network.send(now, Datagram { from: source(own, kept, to), to, payload });
}

fn initiate(
    now: Duration,
    clock: Duration,
    (own, kept): (SocketAddr, &BTreeMap<SocketAddr, u16>),
    key: &PublicKey,
    device: &mut DevicePeer,
    network: &mut Network,
) {
    let Some(to) = device.endpoint else { return };
    device.initiated = Some(now);
    device.tx_bytes += 148;
    let stamp = u32::try_from((now + clock).as_millis()).unwrap();
    let payload = [&[INITIATION, 0, 0, 0][..], &stamp.to_be_bytes(), &key.0].concat();
    network.send(now, Datagram { from: source(own, kept, to), to, payload });
}

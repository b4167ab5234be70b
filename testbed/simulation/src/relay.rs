//! The relay, and how nodes reach it. Real: what the relay decides (`fairlead_relay::core`), and the frames of its protocol. Modelled:
//! sockets, TCP (in order, nothing lost, a loss costs time), and when a client connects again.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use fairlead_keys::PublicKey;
use fairlead_path::{RelayPort, RelayStun};
use fairlead_relay::core::{
    Admission, AllocationLimits, Allocations, Limits, LinkId, Output, Relay, StunResponder, Transmit,
};
use fairlead_wire::probe::is_probe;
use fairlead_wire::relay::{AllocatedPort, Frame, MAX_BODY, Registered, parse};

use super::network::Datagram;

const STUN_PORT: u16 = 3478;
const OTHER_PORT: u16 = 3479;
/// Range of the relay's UDP ports for pairs of peers.
const RELAY_PORTS: (u16, u16) = (50_000, 50_099);
/// The loopback port that stands for the first node by way of the relay.
const LOOPBACK_PORT: u16 = 1000;
/// Between pings of a client, and between timers of the relay.
const PING_INTERVAL: Duration = Duration::from_secs(15);
const TIMER_INTERVAL: Duration = Duration::from_secs(1);
/// Bytes that are written at once.
const BUDGET: usize = 16 << 10;
const LIMITS: AllocationLimits = AllocationLimits { per_client: 10, client_rate: None };

/// Loopback endpoint that stands for a node by way of the relay.
pub(crate) fn relay_endpoint(node: usize) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], LOOPBACK_PORT + u16::try_from(node).unwrap()))
}

/// News of the relay for a node.
#[derive(Debug)]
pub(crate) enum News {
    Down,
    Port(PublicKey, RelayPort),
    Stun(RelayStun),
    Up,
}

/// One direction of a connection.
#[derive(Debug, Default)]
struct Stream {
    /// Data that is on its way, with the time of its arrival.
    under_way: VecDeque<(Duration, Vec<u8>)>,
}

impl Stream {
    fn write(&mut self, arrives: Duration, bytes: Vec<u8>) {
        let before = self.under_way.back().map(|(at, _)| *at).unwrap_or_default();
        self.under_way.push_back((arrives.max(before), bytes));
    }

    fn next(&self) -> Option<Duration> {
        self.under_way.front().map(|(at, _)| *at)
    }

    fn read(&mut self, now: Duration) -> Option<Vec<u8>> {
        self.next().filter(|at| *at <= now)?;
        self.under_way.pop_front().map(|(_, bytes)| bytes)
    }
}

#[derive(Debug)]
struct Link {
    id: LinkId,
    up: Stream,
    down: Stream,
}

#[derive(Debug)]
struct Client {
    key: PublicKey,
    address: SocketAddr,
    instance: [u8; 8],
    link: Option<Link>,
    /// When it connects next, while it has no link.
    connects: Duration,
}

/// A relay with its clients.
#[derive(Debug)]
pub(crate) struct RelayHost {
    address: IpAddr,
    passes_udp: bool,
    epoch: Instant,
    core: Relay,
    stun: StunResponder,
    allocations: Allocations,
    opened: u16,
    clients: Vec<Client>,
    news: Vec<(usize, News)>,
    /// Time at which the relay is up again.
    pub(crate) down_until: Duration,
    next_timer: Duration,
    runs: u8,
}

impl RelayHost {
    pub(crate) fn new(address: IpAddr, passes_udp: bool, clients: &[(PublicKey, SocketAddr)]) -> Self {
        let epoch = Instant::now();
        let client = |(number, (key, address)): (usize, &(PublicKey, SocketAddr))| Client {
            key: *key,
            address: *address,
            instance: [u8::try_from(number).unwrap(); 8],
            link: None,
            connects: Duration::ZERO,
        };
        Self {
            address,
            passes_udp,
            epoch,
            core: Relay::new(Limits::default()),
            stun: StunResponder::new([1; 32]),
            allocations: Allocations::new(LIMITS, [2; 32], epoch),
            opened: 0,
            clients: clients.iter().enumerate().map(client).collect(),
            news: Vec::new(),
            down_until: Duration::ZERO,
            next_timer: Duration::ZERO,
            runs: 0,
        }
    }

    fn instant(&self, now: Duration) -> Instant {
        self.epoch + now
    }

    /// Nothing is left of it, and it is back after `pause`. Clients connect again at moments of their own.
    pub(crate) fn restart(&mut self, now: Duration, pause: Duration, mut delay: impl FnMut() -> Duration) {
        self.runs += 1;
        self.core = Relay::new(Limits::default());
        self.stun = StunResponder::new([self.runs; 32]);
        self.allocations = Allocations::new(LIMITS, [self.runs.wrapping_add(100); 32], self.instant(now));
        self.down_until = now + pause;
        for node in 0..self.clients.len() {
            self.cut(now, node, delay());
        }
    }

    /// Clients that found the relay away in `pause` try again at moments of their own.
    pub(crate) fn delay_clients(
        &mut self,
        now: Duration,
        pause: Duration,
        mut delay: impl FnMut() -> Duration,
    ) {
        for client in self.clients.iter_mut().filter(|client| client.connects < now + pause) {
            client.connects = now + pause + delay();
        }
    }

    /// The connection of a client ends; it connects again after `pause`.
    pub(crate) fn cut(&mut self, now: Duration, node: usize, pause: Duration) {
        let client = &mut self.clients[node];
        client.connects = now + pause;
        if let Some(link) = client.link.take() {
            self.core.remove(link.id);
            self.news.push((node, News::Down));
        }
    }

    /// Another run of the node's program.
    pub(crate) fn restarted_client(&mut self, now: Duration, node: usize) {
        self.clients[node].instance[0] = self.clients[node].instance[0].wrapping_add(100);
        self.cut(now, node, Duration::from_millis(100));
    }

    /// The node that a datagram of a host behind this address is from.
    pub(crate) fn client_at(&self, address: SocketAddr) -> Option<usize> {
        self.clients.iter().position(|client| client.address.ip() == address.ip())
    }

    /// WireGuard or the agent sends to a loopback port. `delay` is that of the way to the relay.
    pub(crate) fn send(
        &mut self,
        now: Duration,
        delay: Duration,
        from: SocketAddr,
        to: SocketAddr,
        payload: &[u8],
    ) {
        let (Some(sender), Some(peer)) = (self.client_at(from), peer_of(to)) else { return };
        let Some(peer) = self.clients.get(peer).map(|client| client.key.0) else { return };
        let frame = if is_probe(payload) {
            Frame::Probe { peer, payload }
        } else {
            Frame::Datagram { peer, payload }
        };
        self.write(now, delay, sender, &frame);
    }

    /// A node asks for a UDP port.
    pub(crate) fn ask_port(&mut self, now: Duration, delay: Duration, from: SocketAddr, peer: &PublicKey) {
        if let Some(sender) = self.client_at(from) {
            self.write(now, delay, sender, &Frame::Allocate(peer.0));
        }
    }

    fn write(&mut self, now: Duration, delay: Duration, sender: usize, frame: &Frame<'_>) {
        let Some(link) = &mut self.clients[sender].link else { return };
        let mut bytes = Vec::new();
        frame.encode(&mut bytes).unwrap();
        link.up.write(now + delay, bytes);
    }

    /// Moves what has arrived, and returns what nodes receive from loopback ports. `delay` draws that of a way to or from the relay.
    pub(crate) fn run(&mut self, now: Duration, delay: &mut dyn FnMut() -> Duration) -> Vec<Datagram> {
        if now >= self.down_until {
            self.connect_clients(now);
            self.run_timers(now, delay);
            let instant = self.instant(now);
            for node in 0..self.clients.len() {
                while let Some((id, bytes)) = self.clients[node].read_at_relay(now) {
                    self.core.handle_frame(instant, id, &parse(&bytes, MAX_BODY).unwrap().unwrap().frame);
                    self.allocate(instant);
                }
            }
            self.write_ready(now, instant, delay);
        }
        let mut arrived = Vec::new();
        for node in 0..self.clients.len() {
            while let Some(bytes) = self.clients[node].link.as_mut().and_then(|link| link.down.read(now)) {
                arrived.extend(self.handle_frames(node, &bytes));
            }
        }
        arrived
    }

    /// When [`Self::run`] has something to do.
    pub(crate) fn next(&self, now: Duration) -> Option<Duration> {
        let streams =
            self.clients.iter().flat_map(|client| &client.link).flat_map(|link| [&link.up, &link.down]);
        let arrivals = streams.filter_map(Stream::next);
        let connects =
            self.clients.iter().filter(|client| client.link.is_none()).map(|client| client.connects);
        arrivals.chain(connects.map(|at| at.max(self.down_until))).map(|at| at.max(now)).min()
    }

    fn connect_clients(&mut self, now: Duration) {
        let instant = self.instant(now);
        for (node, client) in self.clients.iter_mut().enumerate() {
            if client.link.is_some() || client.connects > now {
                continue;
            }
            let admission = Admission { key: client.key, instance: client.instance, token: None };
            let id = self.core.register(instant, admission, &Registered { idle_timeout: 60 }).unwrap();
            client.link = Some(Link { id, up: Stream::default(), down: Stream::default() });
            if self.passes_udp {
                let server = self.stun.add_user((STUN_PORT, OTHER_PORT), RELAY_PORTS);
                self.core.offer_stun(id, server);
            }
            self.news.push((node, News::Up));
        }
    }

    fn run_timers(&mut self, now: Duration, delay: &mut dyn FnMut() -> Duration) {
        if now < self.next_timer {
            return;
        }
        self.next_timer = now + TIMER_INTERVAL;
        let instant = self.instant(now);
        self.core.handle_timeout(instant);
        self.allocations.handle_timeout(instant);
        if now.as_secs().is_multiple_of(PING_INTERVAL.as_secs()) {
            for node in 0..self.clients.len() {
                self.write(now, delay(), node, &Frame::Ping([0; 8]));
            }
        }
    }

    /// As `server/relay_ports.rs` of the relay does.
    fn allocate(&mut self, now: Instant) {
        for request in self.core.take_allocation_requests() {
            if request.refusal.is_some() {
                continue;
            }
            let (client, peer) = (&request.client, request.peer);
            let mut token = client.key.0;
            token[0] = token[0].wrapping_add(self.runs);
            let known = self.allocations.join(now, client, peer, token).unwrap();
            let port = known.unwrap_or_else(|| {
                self.opened += 1;
                let port = RELAY_PORTS.0 + self.opened % 100;
                self.allocations.open(now, port, client, peer, token);
                port
            });
            self.core.answer_allocation(request.link, AllocatedPort { peer: peer.0, port, token });
        }
    }

    fn write_ready(&mut self, now: Duration, instant: Instant, delay: &mut dyn FnMut() -> Duration) {
        for id in self.core.take_ready() {
            let mut bytes = Vec::new();
            while self.core.poll_transmit(instant, id, BUDGET, &mut bytes) == Transmit::Frames {
                let links = self.clients.iter_mut().filter_map(|client| client.link.as_mut());
                if let Some(link) = links.into_iter().find(|link| link.id == id) {
                    link.down.write(now + delay(), std::mem::take(&mut bytes));
                }
                bytes.clear();
            }
        }
    }

    /// Handles frames of the relay as a client does; returns the datagrams in them.
    fn handle_frames(&mut self, node: usize, mut bytes: &[u8]) -> Vec<Datagram> {
        let mut arrived = Vec::new();
        while let Some(parsed) = parse(bytes, MAX_BODY).unwrap() {
            bytes = &bytes[parsed.length..];
            match parsed.frame {
                Frame::Allocated(AllocatedPort { peer, port, token }) => {
                    let address = SocketAddr::new(self.address, port);
                    self.news.push((node, News::Port(PublicKey(peer), RelayPort { address, token })));
                }
                Frame::Datagram { peer, payload } | Frame::Probe { peer, payload } => {
                    let sender = self.clients.iter().position(|client| client.key.0 == peer).unwrap();
                    let (from, to) = (relay_endpoint(sender), self.clients[node].address);
                    arrived.push(Datagram { from, to, payload: payload.to_vec() });
                }
                Frame::StunServer(server) => {
                    let stun = RelayStun {
                        server: SocketAddr::new(self.address, server.port),
                        other: SocketAddr::new(self.address, server.other_port),
                        user: server.user,
                        key: server.key,
                        relay_ports: server.relay_ports,
                    };
                    self.news.push((node, News::Stun(stun)));
                }
                Frame::Error { reason, .. } => panic!("the relay ends the link of node {node}: {reason}"),
                _ => {}
            }
        }
        arrived
    }

    /// A datagram from outside arrived at the relay's address: what it sends.
    pub(crate) fn receive(&mut self, now: Duration, datagram: &Datagram) -> Option<Datagram> {
        let Datagram { from, to, payload } = datagram;
        if now < self.down_until || !self.passes_udp {
            return None;
        }
        let instant = self.instant(now);
        if to.port() == STUN_PORT {
            let answer = self.stun.handle_datagram(instant, *from, payload).ok()?;
            let port = if answer.from_other_port { OTHER_PORT } else { STUN_PORT };
            let own = SocketAddr::new(self.address, port);
            return Some(Datagram { from: own, to: *from, payload: answer.payload });
        }
        Some(match self.allocations.handle_datagram(instant, to.port(), *from, payload).ok()? {
            Output::Answer(payload) => Datagram { from: *to, to: *from, payload },
            Output::Forward(there) => Datagram { from: *to, to: there, payload: payload.clone() },
        })
    }

    pub(crate) fn is_at(&self, ip: IpAddr) -> bool {
        ip == self.address
    }

    /// News of the relay since the last call, each with the number of the node that has heard it.
    pub(crate) fn take_news(&mut self) -> Vec<(usize, News)> {
        std::mem::take(&mut self.news)
    }
}

impl Client {
    fn read_at_relay(&mut self, now: Duration) -> Option<(LinkId, Vec<u8>)> {
        let link = self.link.as_mut()?;
        link.up.read(now).map(|bytes| (link.id, bytes))
    }
}

/// The number of the node that a loopback port stands for.
fn peer_of(endpoint: SocketAddr) -> Option<usize> {
    endpoint.port().checked_sub(LOOPBACK_PORT).map(usize::from)
}

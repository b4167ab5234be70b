//! UDP ports of a relay: one for a pair of peers, through which it passes datagrams between two addresses. Without I/O and without a
//! clock.
//!
//! A client asks for the port over its link and gets a token for it. With the token it sends binding requests of STUN (RFC 8489) to
//! the port. The source of a request becomes the client's address once the request has the nonce that was sent to that source: so
//! no client can have datagrams sent to an address where it does not receive. Datagrams pass when both peers have an address, and
//! only between these; the link is not needed for that.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fairlead_keys::PublicKey;
use fairlead_limits::{Rate, TokenBucket};
use fairlead_wire::stun::is_stun;
use fairlead_wire::stun::server::{nonce, parse_request, stale_nonce, success};

use super::links::Admission;

/// Secret with which a client proves that the relay gave it the port.
pub type Token = [u8; 32];

/// Idle time after which a port is closed: it passes nothing, and no client asks for it or binds it.
const IDLE: Duration = Duration::from_secs(120);
/// Period of nonces. Each is valid for one or two periods.
const NONCE_PERIOD: Duration = Duration::from_secs(30);
/// Requests from addresses that are not bound, to one port, a second and at once. Each costs two codes.
const STRANGERS_RATE: Rate = Rate::per_second(200, 400);
/// Bytes that a client may send at once where its rate is limited.
const MIN_BURST: u64 = 128 << 10;

/// Limits for each client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllocationLimits {
    /// Ports that one client may ask for.
    pub per_client: usize,
    /// Bytes of datagrams that one client may send in a second.
    pub client_rate: Option<u64>,
}

/// Reason why a client gets no port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AllocationRefusal {
    /// The client has as many as it may have.
    ClientLimit,
    /// No port is free.
    NoPort,
    /// The peer has no link to this relay, or is the client itself.
    NotRegistered,
    /// The client asks too often.
    RateLimited,
}

impl AllocationRefusal {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::ClientLimit, Self::NoPort, Self::NotRegistered, Self::RateLimited];

    /// The value of the label `reason`.
    pub fn label(self) -> &'static str {
        match self {
            Self::ClientLimit => "client_limit",
            Self::NoPort => "no_port",
            Self::NotRegistered => "not_registered",
            Self::RateLimited => "rate_limited",
        }
    }
}

/// Reason why a datagram at such a port goes nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UdpDrop {
    /// The peer has not bound its address yet.
    PeerNotBound,
    /// The sender exceeded its rate, or strangers sent too many requests.
    RateLimited,
    /// A request without the code of one of the two tokens.
    Unauthenticated,
    /// The source is the address of neither peer.
    UnknownSource,
}

impl UdpDrop {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::PeerNotBound, Self::RateLimited, Self::Unauthenticated, Self::UnknownSource];

    /// The value of the label `reason`.
    pub fn label(self) -> &'static str {
        match self {
            Self::PeerNotBound => "peer_not_bound",
            Self::RateLimited => "rate_limited",
            Self::Unauthenticated => "unauthenticated",
            Self::UnknownSource => "unknown_source",
        }
    }
}

/// Fate of a datagram that is not dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Answer for the source of the datagram.
    Answer(Vec<u8>),
    /// Address to which the datagram goes as it is.
    Forward(SocketAddr),
}

/// Totals since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AllocationCounters {
    /// Datagrams passed on.
    pub datagrams: u64,
    /// Bytes of these datagrams.
    pub bytes: u64,
    /// Addresses that were bound, also again.
    pub bindings: u64,
    refusals: [u64; AllocationRefusal::ALL.len()],
    drops: [u64; UdpDrop::ALL.len()],
}

impl AllocationCounters {
    /// Requests for ports that were refused, by reason.
    pub fn refusals(&self) -> impl Iterator<Item = (AllocationRefusal, u64)> {
        AllocationRefusal::ALL.into_iter().zip(self.refusals)
    }

    /// Datagrams that were dropped, by reason.
    pub fn drops(&self) -> impl Iterator<Item = (UdpDrop, u64)> {
        UdpDrop::ALL.into_iter().zip(self.drops)
    }
}

/// The lower key first.
type Pair = (PublicKey, PublicKey);

/// The ports that a relay has opened.
#[derive(Debug)]
pub struct Allocations {
    limits: AllocationLimits,
    /// Secret from which nonces are made.
    secret: [u8; 32],
    started: Instant,
    pairs: HashMap<Pair, u16>,
    ports: HashMap<u16, Allocation>,
    clients: HashMap<PublicKey, Client>,
    counters: AllocationCounters,
}

#[derive(Debug)]
struct Allocation {
    pair: Pair,
    sides: [Side; 2],
    used: Instant,
    strangers: TokenBucket,
}

/// One peer of a pair.
#[derive(Debug, Default)]
struct Side {
    /// The last registration that asked for the port, and the token it got.
    asked: Option<(Admission, Token)>,
    bound: Option<SocketAddr>,
}

#[derive(Debug)]
struct Client {
    ports: usize,
    bytes: Option<TokenBucket>,
}

impl Allocations {
    /// None yet.
    pub fn new(limits: AllocationLimits, secret: [u8; 32], now: Instant) -> Self {
        Self {
            limits,
            secret,
            started: now,
            pairs: HashMap::new(),
            ports: HashMap::new(),
            clients: HashMap::new(),
            counters: AllocationCounters::default(),
        }
    }

    /// A client asks for the port to a peer: the one there is, with this token from now on, or `None` if one is to be opened for
    /// [`Self::open`]. An address that the client has bound stays.
    ///
    /// # Errors
    /// It gets none.
    pub fn join(
        &mut self,
        now: Instant,
        client: &Admission,
        peer: PublicKey,
        token: Token,
    ) -> Result<Option<u16>, AllocationRefusal> {
        let has_asked = self.side(client.key, peer).is_some_and(|side| side.asked.is_some());
        let count = self.clients.get(&client.key).map_or(0, |client| client.ports);
        if !has_asked && count >= self.limits.per_client {
            return Err(self.refuse(AllocationRefusal::ClientLimit));
        }
        let Some(port) = self.pairs.get(&pair(client.key, peer)).copied() else { return Ok(None) };
        self.ask(now, port, client, token);
        Ok(Some(port))
    }

    /// A port has been opened for a client and a peer, after [`Self::join`].
    pub fn open(&mut self, now: Instant, port: u16, client: &Admission, peer: PublicKey, token: Token) {
        let pair = pair(client.key, peer);
        let strangers = TokenBucket::full(STRANGERS_RATE, now);
        self.pairs.insert(pair, port);
        self.ports.insert(port, Allocation { pair, sides: Default::default(), used: now, strangers });
        self.ask(now, port, client, token);
    }

    fn ask(&mut self, now: Instant, port: u16, client: &Admission, token: Token) {
        let Some(allocation) = self.ports.get_mut(&port) else { return };
        allocation.used = now;
        let [first, second] = &mut allocation.sides;
        let side = if client.key == allocation.pair.0 { first } else { second };
        if side.asked.replace((client.clone(), token)).is_none() {
            let rate = |rate: u64| Rate::per_second(rate, (rate / 5).max(MIN_BURST));
            let bucket = |bytes| TokenBucket::full(rate(bytes), now);
            let new = || Client { ports: 0, bytes: self.limits.client_rate.map(bucket) };
            let client = self.clients.entry(client.key).or_insert_with(new);
            client.ports = client.ports.saturating_add(1);
        }
    }

    fn side(&self, client: PublicKey, peer: PublicKey) -> Option<&Side> {
        let pair = pair(client, peer);
        let allocation = self.ports.get(self.pairs.get(&pair)?)?;
        let [first, second] = &allocation.sides;
        Some(if client == pair.0 { first } else { second })
    }

    /// Counts a refusal.
    pub fn refuse(&mut self, reason: AllocationRefusal) -> AllocationRefusal {
        for (each, count) in AllocationRefusal::ALL.iter().zip(&mut self.counters.refusals) {
            *count = count.wrapping_add(u64::from(*each == reason));
        }
        reason
    }

    /// Handles a datagram that arrived at one of the ports.
    ///
    /// # Errors
    /// It is to be dropped.
    pub fn handle_datagram(
        &mut self,
        now: Instant,
        port: u16,
        source: SocketAddr,
        datagram: &[u8],
    ) -> Result<Output, UdpDrop> {
        let output = if is_stun(datagram) {
            self.bind(now, port, source, datagram).map(Output::Answer)
        } else {
            self.forward(now, port, source, datagram.len()).map(Output::Forward)
        };
        if let Err(reason) = &output {
            for (each, count) in UdpDrop::ALL.iter().zip(&mut self.counters.drops) {
                *count = count.wrapping_add(u64::from(each == reason));
            }
        }
        output
    }

    fn forward(
        &mut self,
        now: Instant,
        port: u16,
        source: SocketAddr,
        length: usize,
    ) -> Result<SocketAddr, UdpDrop> {
        let allocation = self.ports.get_mut(&port).ok_or(UdpDrop::UnknownSource)?;
        let [first, second] = &allocation.sides;
        let (sender, peer) = match Some(source) {
            bound if bound == first.bound => (allocation.pair.0, second),
            bound if bound == second.bound => (allocation.pair.1, first),
            _ => return Err(UdpDrop::UnknownSource),
        };
        let to = peer.bound.ok_or(UdpDrop::PeerNotBound)?;
        let bytes = u64::try_from(length).unwrap_or(u64::MAX);
        let limit = self.clients.get_mut(&sender).and_then(|client| client.bytes.as_mut());
        if limit.is_some_and(|limit| limit.take(now, bytes).is_err()) {
            return Err(UdpDrop::RateLimited);
        }
        allocation.used = now;
        self.counters.datagrams = self.counters.datagrams.wrapping_add(1);
        self.counters.bytes = self.counters.bytes.wrapping_add(bytes);
        Ok(to)
    }

    /// The answer to a request to bind its source.
    fn bind(
        &mut self,
        now: Instant,
        port: u16,
        source: SocketAddr,
        datagram: &[u8],
    ) -> Result<Vec<u8>, UdpDrop> {
        let period = now.saturating_duration_since(self.started).as_secs() / NONCE_PERIOD.as_secs();
        let allocation = self.ports.get_mut(&port).ok_or(UdpDrop::UnknownSource)?;
        let is_known = allocation.sides.iter().any(|side| side.bound == Some(source));
        if !is_known && allocation.strangers.take(now, 1).is_err() {
            return Err(UdpDrop::RateLimited);
        }
        let parsed = parse_request(datagram).ok_or(UdpDrop::Unauthenticated)?;
        let is_of = |side: &Side| side.asked.as_ref().is_some_and(|(_, token)| parsed.is_authentic(token));
        let at = allocation.sides.iter().position(is_of).ok_or(UdpDrop::Unauthenticated)?;
        let [first, second] = &mut allocation.sides;
        let (side, other) = if at == 0 { (first, second) } else { (second, first) };
        if side.bound != Some(source) {
            let is_valid = |period| parsed.request.nonce == Some(nonce(&self.secret, source, period));
            if !is_valid(period) && !period.checked_sub(1).is_some_and(is_valid) {
                return Ok(stale_nonce(parsed.request.transaction, &nonce(&self.secret, source, period)));
            }
            side.bound = Some(source);
            self.counters.bindings = self.counters.bindings.wrapping_add(1);
            if other.bound == Some(source) {
                other.bound = None;
            }
        }
        allocation.used = now;
        Ok(success(parsed.request.transaction, source))
    }

    /// Forgets ports that were idle for too long, and returns them. Call it every few seconds.
    pub fn handle_timeout(&mut self, now: Instant) -> Vec<u16> {
        self.forget(|allocation| now.saturating_duration_since(allocation.used) >= IDLE)
    }

    /// Forgets ports of clients that are not allowed any more, and returns them.
    pub fn retain(&mut self, is_allowed: impl Fn(&Admission) -> bool) -> Vec<u16> {
        self.forget(|allocation| {
            let asked = allocation.sides.iter().filter_map(|side| side.asked.as_ref());
            asked.into_iter().any(|(admission, _)| !is_allowed(admission))
        })
    }

    fn forget(&mut self, is_gone: impl Fn(&Allocation) -> bool) -> Vec<u16> {
        let Self { pairs, ports, clients, .. } = self;
        let gone: Vec<(u16, Allocation)> = ports.extract_if(|_, allocation| is_gone(allocation)).collect();
        for (_, allocation) in &gone {
            pairs.remove(&allocation.pair);
            for (admission, _) in allocation.sides.iter().filter_map(|side| side.asked.as_ref()) {
                if let Some(client) = clients.get_mut(&admission.key) {
                    client.ports = client.ports.saturating_sub(1);
                    if client.ports == 0 {
                        clients.remove(&admission.key);
                    }
                }
            }
        }
        gone.into_iter().map(|(port, _)| port).collect()
    }

    /// Number of ports.
    pub fn len(&self) -> usize {
        self.ports.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ports.is_empty()
    }

    /// Totals since the start.
    pub fn counters(&self) -> AllocationCounters {
        self.counters
    }
}

fn pair(one: PublicKey, other: PublicKey) -> Pair {
    (one.min(other), one.max(other))
}

#[cfg(test)]
mod tests;

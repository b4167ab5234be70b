//! Asks STUN servers (RFC 8489) at which address they see the WireGuard port.
//!
//! A round asks all servers at once and ends with their answers, or after [`ROUND`]. An answer counts if it comes from the
//! server that was asked, within the round, with the transaction of the request. A server that does not answer for some
//! rounds loses its mapping; one that does not answer after the network changed loses it at once.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use fairlead_address::{canonical, is_reachable};
use fairlead_limits::doubled;
use fairlead_wire::stun::{BindingResponse, ErrorCode, TransactionId, binding_request, parse_response};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::datagram::Transmit;

/// The most servers that are asked.
pub const MAX_SERVERS: usize = 8;
/// Times at which requests are sent in a round (RFC 8489, section 6.2.1: 500 ms, then doubling).
pub(crate) const ATTEMPTS: [Duration; 3] =
    [Duration::ZERO, Duration::from_millis(500), Duration::from_millis(1500)];
/// Time that a round waits for answers.
pub(crate) const ROUND: Duration = Duration::from_secs(3);
/// Time between rounds. UDP mappings of common NATs live for 30 s or more, so this also keeps the mapping.
pub(crate) const INTERVAL: std::ops::Range<Duration> = Duration::from_secs(20)..Duration::from_secs(26);
/// Least time between rounds, whatever happens to the network.
pub(crate) const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// While no server answers, the time between rounds doubles this often.
pub(crate) const MAX_DOUBLINGS: u32 = 4;
/// Rounds without an answer after which a mapping is forgotten.
pub(crate) const MAX_MISSED: u8 = 3;

/// Last answer of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StunAnswer {
    /// The server sees the WireGuard port at this address.
    Mapped(SocketAddr),
    /// The server refuses to answer.
    Refused(ErrorCode),
    /// The server names an address that no packet can come from.
    Invalid(SocketAddr),
    /// The server did not answer.
    Missing,
}

impl StunAnswer {
    /// The address at which the server sees the WireGuard port.
    pub(crate) fn mapped(&self) -> Option<SocketAddr> {
        match self {
            Self::Mapped(address) => Some(*address),
            Self::Invalid(_) | Self::Missing | Self::Refused(_) => None,
        }
    }
}

#[derive(Debug, Default)]
struct Server {
    answer: Option<StunAnswer>,
    /// Rounds since the last answer.
    missed: u8,
    /// The request of this round, while its answer is missing.
    pending: Option<TransactionId>,
}

#[derive(Debug)]
pub(crate) struct StunClient {
    servers: BTreeMap<SocketAddr, Server>,
    /// Start of the current round, and how many requests each server was sent.
    round: Option<(Duration, usize)>,
    next_round: Duration,
    /// Time at which the last round may be followed by another at the earliest.
    not_before: Duration,
    /// Rounds in a row that no server answered.
    silent_rounds: u32,
    /// The network changed: what is not confirmed in this round is forgotten.
    unconfirmed: bool,
    transmits: VecDeque<Transmit>,
    changed: bool,
}

impl StunClient {
    pub(crate) fn new() -> Self {
        Self {
            servers: BTreeMap::new(),
            round: None,
            next_round: Duration::ZERO,
            not_before: Duration::ZERO,
            silent_rounds: 0,
            unconfirmed: false,
            transmits: VecDeque::new(),
            changed: false,
        }
    }

    /// Replaces the servers; at most [`MAX_SERVERS`] are asked. New ones are asked at once.
    pub(crate) fn set_servers(&mut self, now: Duration, servers: &[SocketAddr]) {
        let mut before = std::mem::take(&mut self.servers);
        let mut is_new = false;
        for server in servers.iter().map(|server| canonical(*server)).take(MAX_SERVERS) {
            let known = before.remove(&server);
            is_new |= known.is_none() && !self.servers.contains_key(&server);
            self.servers.entry(server).or_insert_with(|| known.unwrap_or_default());
        }
        self.changed |= before.values().any(|server| server.mapped().is_some());
        if is_new {
            self.restart(now);
        }
    }

    /// Links, addresses or routes changed: the mapping may have.
    pub(crate) fn network_changed(&mut self, now: Duration) {
        self.unconfirmed = true;
        self.restart(now);
    }

    fn restart(&mut self, now: Duration) {
        self.round = None;
        self.servers.values_mut().for_each(|server| server.pending = None);
        self.silent_rounds = 0;
        self.next_round = now.max(self.not_before);
    }

    /// Whether the datagram was an answer to a request of this client.
    pub(crate) fn handle_datagram(&mut self, remote: SocketAddr, bytes: &[u8]) -> bool {
        let Ok(BindingResponse { transaction, mapped, .. }) = parse_response(bytes) else { return false };
        let Some(server) = self.servers.get_mut(&canonical(remote)) else { return false };
        if server.pending != Some(transaction) {
            return false;
        }
        server.pending = None;
        server.missed = 0;
        let answer = match mapped.map(canonical) {
            Ok(address) if address.port() == 0 || !is_reachable(address.ip()) => StunAnswer::Invalid(address),
            Ok(address) => StunAnswer::Mapped(address),
            Err(code) => StunAnswer::Refused(code),
        };
        self.changed |= server.answer != Some(answer);
        server.answer = Some(answer);
        true
    }

    pub(crate) fn handle_timeout(&mut self, now: Duration, random: &mut StdRng) {
        if let Some((started, _)) = self.round {
            let is_answered = self.servers.values().all(|server| server.pending.is_none());
            if is_answered || now >= started.saturating_add(ROUND) {
                self.conclude(now, random);
            }
        }
        if self.round.is_none() && !self.servers.is_empty() && now >= self.next_round {
            self.round = Some((now, 0));
            self.not_before = now.saturating_add(MIN_INTERVAL);
            for server in self.servers.values_mut() {
                server.pending = Some(TransactionId(random.random()));
            }
        }
        self.send_due(now);
    }

    /// Sends what is due of the current round; after a late wake-up each server gets one request, not several.
    fn send_due(&mut self, now: Duration) {
        let Some((started, sent)) = &mut self.round else { return };
        let due = ATTEMPTS.iter().filter(|after| now >= started.saturating_add(**after)).count();
        if due <= *sent {
            return;
        }
        *sent = due;
        for (address, server) in &self.servers {
            let Some(transaction) = server.pending else { continue };
            let payload = binding_request(transaction).to_vec();
            self.transmits.push_back(Transmit { local: None, socket: None, remote: *address, payload });
        }
    }

    fn conclude(&mut self, now: Duration, random: &mut StdRng) {
        let max_missed = if std::mem::take(&mut self.unconfirmed) { 1 } else { MAX_MISSED };
        let mut is_silent = true;
        for server in self.servers.values_mut() {
            if server.pending.take().is_none() {
                is_silent = false;
                continue;
            }
            server.missed = server.missed.saturating_add(1);
            if server.answer.is_none() || server.missed >= max_missed {
                self.changed |= server.answer != Some(StunAnswer::Missing);
                server.answer = Some(StunAnswer::Missing);
            }
        }
        self.round = None;
        self.silent_rounds = if is_silent { self.silent_rounds.saturating_add(1) } else { 0 };
        let doublings = self.silent_rounds.saturating_sub(1).min(MAX_DOUBLINGS);
        let interval = doubled(random.random_range(INTERVAL), doublings, Duration::MAX);
        self.next_round = now.saturating_add(interval);
    }

    pub(crate) fn poll_timeout(&self) -> Option<Duration> {
        if self.servers.is_empty() {
            return None;
        }
        let Some((started, sent)) = self.round else { return Some(self.next_round) };
        if self.servers.values().all(|server| server.pending.is_none()) {
            return Some(started);
        }
        Some(started.saturating_add(ATTEMPTS.get(sent).copied().unwrap_or(ROUND)))
    }

    pub(crate) fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmits.pop_front()
    }

    /// Whether an answer changed since the last call.
    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// A server that said over IPv4 where it sees this node.
    pub(crate) fn answering_server(&self) -> Option<SocketAddr> {
        let answers = |(address, server): &(&SocketAddr, &Server)| {
            address.is_ipv4() && server.mapped().is_some_and(|mapped| mapped.is_ipv4())
        };
        self.servers.iter().find(answers).map(|(address, _)| *address)
    }

    /// Last answer of each server; a server that was not asked to the end yet is left out.
    pub(crate) fn answers(&self) -> BTreeMap<SocketAddr, StunAnswer> {
        self.servers.iter().filter_map(|(address, server)| Some((*address, server.answer?))).collect()
    }
}

impl Server {
    fn mapped(&self) -> Option<SocketAddr> {
        self.answer?.mapped()
    }
}

#[cfg(test)]
mod tests;

//! Binds the WireGuard port to UDP ports of the relay (`docs/relay-protocol.md`): one request tells the relay the address of this
//! node, a second one proves with the relay's nonce that it is there. Repeated while the port is in use, which keeps the mapping
//! of the NAT, and tells the relay of a new one.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use fairlead_address::canonical;
use fairlead_keys::PublicKey;
use fairlead_wire::stun::server::AuthenticatedRequest;
use fairlead_wire::stun::{Nonce, TransactionId, parse_response};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::datagram::Transmit;

/// Times at which requests are sent in a round, until one is answered.
const ATTEMPTS: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(200), Duration::from_millis(600), Duration::from_millis(1400)];
/// Time that a round waits for answers. After that the port is taken to be gone.
const ROUND: Duration = Duration::from_secs(3);
/// Time between rounds.
const INTERVAL: Duration = Duration::from_secs(10);
/// Least time between rounds that something else asks for.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Time between questions for a port.
const ASK_INTERVAL: Duration = Duration::from_secs(10);
/// Time for which a port that the path in use does not need is kept.
const UNUSED: Duration = Duration::from_secs(60);

/// A UDP port of the relay for this node and a peer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RelayPort {
    /// Address of the port at the relay.
    pub address: SocketAddr,
    /// The key for the requests that bind this node to it.
    pub token: [u8; 32],
}

impl std::fmt::Debug for RelayPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RelayPort").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Outcome of binding a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The relay passes datagrams of this node.
    Bound(SocketAddr),
    /// The relay does not pass them.
    Lost,
}

#[derive(Debug, Default)]
struct Binding {
    port: Option<RelayPort>,
    /// Time at which the path in use last needed the port.
    needed: Duration,
    /// Time at which the port was asked for.
    asked: Option<Duration>,
    is_bound: bool,
    nonce: Option<Nonce>,
    /// Start of the round that runs, its requests so far, and the last of them.
    round: Option<(Duration, usize, TransactionId)>,
    next_round: Duration,
    /// The earliest that it may be asked for.
    not_before: Duration,
}

/// The ports of all peers.
#[derive(Debug, Default)]
pub(crate) struct Bindings {
    peers: BTreeMap<PublicKey, Binding>,
    due: Option<Duration>,
    transmits: VecDeque<Transmit>,
    outcomes: VecDeque<(PublicKey, Outcome)>,
}

impl Bindings {
    /// Packets to this peer go by way of the relay. Whether the relay is to be asked for a port now, if it may be asked.
    pub(crate) fn need(&mut self, now: Duration, peer: PublicKey, may_ask: bool) -> bool {
        let binding = self.peers.entry(peer).or_default();
        binding.needed = now;
        let is_due = binding.asked.is_none_or(|at| now.saturating_sub(at) >= ASK_INTERVAL);
        let asks = may_ask && binding.port.is_none() && is_due;
        if asks {
            binding.asked = Some(now);
        }
        if self.due.is_none() {
            self.plan();
        }
        asks
    }

    /// The relay has allocated a port. An old one is forgotten.
    pub(crate) fn insert(&mut self, now: Duration, peer: PublicKey, port: RelayPort) {
        let Some(binding) = self.peers.get_mut(&peer) else { return };
        let is_other = binding.port.is_some_and(|known| known.address != port.address);
        if is_other && std::mem::take(&mut binding.is_bound) {
            self.outcomes.push_back((peer, Outcome::Lost));
        }
        let address = canonical(port.address);
        let asked = binding.asked;
        let port = Some(RelayPort { address, ..port });
        *binding = Binding {
            port,
            asked,
            needed: now,
            is_bound: binding.is_bound,
            next_round: now,
            ..Binding::default()
        };
        self.plan();
    }

    pub(crate) fn remove(&mut self, peer: &PublicKey) {
        self.peers.remove(peer);
        self.plan();
    }

    /// The address of this node may be another: all are bound again.
    pub(crate) fn renew_all(&mut self, now: Duration) {
        for binding in self.peers.values_mut() {
            binding.renew(now);
        }
        self.plan();
    }

    /// The path to one peer does not answer: its port is bound again.
    pub(crate) fn renew(&mut self, now: Duration, peer: &PublicKey) {
        if let Some(binding) = self.peers.get_mut(peer) {
            binding.renew(now);
            self.plan();
        }
    }

    /// Whether the datagram was an answer to a request of this machine.
    pub(crate) fn handle_datagram(&mut self, now: Duration, remote: SocketAddr, bytes: &[u8]) -> bool {
        let Ok(response) = parse_response(bytes) else { return false };
        let remote = canonical(remote);
        let is_answered = |binding: &Binding| {
            let transaction = binding.round.map(|(_, _, transaction)| transaction);
            transaction == Some(response.transaction)
                && binding.port.is_some_and(|port| port.address == remote)
        };
        let mut peers = self.peers.iter_mut();
        let Some((peer, binding)) = peers.find(|(_, binding)| is_answered(binding)) else { return false };
        match (response.mapped, response.nonce) {
            (Ok(_), _) => {
                binding.round = None;
                binding.next_round = now.saturating_add(INTERVAL);
                if !std::mem::replace(&mut binding.is_bound, true) {
                    self.outcomes.push_back((*peer, Outcome::Bound(remote)));
                }
            }
            // The request is repeated with it at once, and not more often than a round allows.
            (Err(_), Some(nonce)) if binding.nonce != Some(nonce) => {
                binding.nonce = Some(nonce);
                binding.send_now(now);
            }
            (Err(_), _) => {}
        }
        self.plan();
        true
    }

    pub(crate) fn handle_timeout(&mut self, now: Duration, random: &mut StdRng) {
        if self.due.is_none_or(|due| due > now) {
            return;
        }
        let Self { peers, transmits, outcomes, .. } = self;
        peers.retain(|_, binding| {
            let is_needed = now.saturating_sub(binding.needed) < UNUSED;
            is_needed || binding.is_bound
        });
        for (peer, binding) in peers {
            let is_unused = now.saturating_sub(binding.needed) >= UNUSED;
            let is_silent = binding.round.is_some_and(|(began, ..)| now >= began.saturating_add(ROUND));
            if is_unused || is_silent {
                binding.port = None;
                binding.round = None;
                binding.nonce = None;
                if std::mem::take(&mut binding.is_bound) {
                    outcomes.push_back((*peer, Outcome::Lost));
                }
            }
            transmits.extend(binding.next_request(now, random));
        }
        self.plan();
    }

    fn plan(&mut self) {
        self.due = self.peers.values().filter_map(Binding::due).min();
    }

    pub(crate) fn poll_timeout(&self) -> Option<Duration> {
        self.due
    }

    pub(crate) fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmits.pop_front()
    }

    /// Takes the next outcome: a port that was bound or lost since the last call.
    pub(crate) fn poll_outcome(&mut self) -> Option<(PublicKey, Outcome)> {
        self.outcomes.pop_front()
    }
}

impl Binding {
    fn renew(&mut self, now: Duration) {
        if self.round.is_none() {
            self.next_round = now.max(self.not_before).min(self.next_round);
        }
    }

    /// Makes the next request of the round due now.
    fn send_now(&mut self, now: Duration) {
        if let Some((began, sent, _)) = &mut self.round {
            *began = (*began).min(now.saturating_sub(ATTEMPTS.get(*sent).copied().unwrap_or_default()));
        }
    }

    fn next_request(&mut self, now: Duration, random: &mut StdRng) -> Option<Transmit> {
        let RelayPort { address, token } = self.port?;
        if self.round.is_none() && now >= self.next_round {
            self.round = Some((now, 0, TransactionId([0; 12])));
            self.not_before = now.saturating_add(MIN_INTERVAL);
        }
        let (began, sent, transaction) = self.round.as_mut()?;
        if now < began.saturating_add(*ATTEMPTS.get(*sent)?) {
            return None;
        }
        *sent = sent.saturating_add(1);
        *transaction = TransactionId(random.random());
        let transaction = *transaction;
        let nonce = self.nonce;
        let request = AuthenticatedRequest { transaction, change_port: false, user: None, nonce };
        Some(Transmit { local: None, socket: None, remote: address, payload: request.encode(&token) })
    }

    fn due(&self) -> Option<Duration> {
        let unused = self.needed.saturating_add(UNUSED);
        let next = self.port.map(|_| match self.round {
            Some((began, sent, _)) => began.saturating_add(ATTEMPTS.get(sent).copied().unwrap_or(ROUND)),
            None => self.next_round,
        });
        Some(next.map_or(unused, |next| next.min(unused)))
    }
}

#[cfg(test)]
mod tests;

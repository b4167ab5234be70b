//! Birthday attempts: a direct path between a node behind a symmetric NAT and one behind a port-restricted NAT.
//!
//! The symmetric NAT gives each socket another external port, which the peer cannot learn. So the node behind it opens
//! [`SOCKETS`] sockets and sends from each to the peer's known endpoint; the peer sends to random ports of the NAT's address until
//! one of its requests comes in by a mapping (the birthday paradox: 256 of 64,512 ports are open, so 2,048 requests miss all of
//! them once in 3,400 attempts). Both begin together, told by requests over the relay, and go on only while the other one says
//! that it takes part. The port is used when three requests were answered over it. Rules: `docs/path-protocol.md`.
//!
//! Between two symmetric NATs (only where that is enabled) both nodes try ports. A random port of one meets a random port of the other
//! once in 64,512², so this succeeds where NATs give out ports in a sequence, which both nodes first measure: `ports`.
//!
//! A node makes one attempt at a time. What its sockets do is done by the shell: [`Action`].

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use fairlead_keys::PublicKey;
use fairlead_wire::probe::{PortSequence, TransactionId};
use fairlead_wire::stun;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::rotation::EndpointReason;

mod attempt;
mod both_symmetric;
mod confirming;
mod following;
mod kept;
mod limits;
mod listening;
mod measuring;
mod ports;
mod record;
mod searching;

pub use limits::SOCKETS;
pub use record::{BirthdayOutcome, BirthdayPolicy, BirthdaySide, BirthdayStatus, birthday_side};

use attempt::{Attempt, Stage};
use kept::Kept;
use limits::{MAX_ATTEMPT, MAX_SILENCE};
use listening::Listening;
use measuring::PeerPorts;
use record::Record;
use searching::Searching;

/// Time between requests to the peer to take part, and between messages to it that the attempt goes on.
const ASK_INTERVAL: Duration = Duration::from_millis(300);
const TELL_INTERVAL: Duration = Duration::from_millis(500);
/// Requests that a node may send in attempts within a period: routers keep a mapping for each request for 30 s or longer.
const BUDGET: u32 = 20_480;
const BUDGET_PERIOD: Duration = Duration::from_secs(300);

/// Something for the agent to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Tell the peer over the relay that this node takes part.
    Ask { peer: PublicKey, transaction: TransactionId, ports: Option<PortSequence> },
    /// Close the sockets but those that are kept.
    Close,
    /// The path of this endpoint works.
    Found { peer: PublicKey, address: SocketAddr },
    /// Send to this endpoint from this socket from now on.
    Keep { peer: PublicKey, remote: SocketAddr, socket: u16 },
    /// Send to this endpoint from the WireGuard port again.
    Leave { remote: SocketAddr },
    /// Ask a STUN server from one of the sockets.
    Measure { server: SocketAddr, socket: u16, transaction: stun::TransactionId },
    /// Open so many sockets.
    Open(u16),
    /// Send a request, from one of the sockets or from the WireGuard port.
    Request { peer: PublicKey, to: SocketAddr, socket: Option<u16>, transaction: TransactionId },
}

/// Requests over the relay whose answers are waited for.
const MAX_ASKED: usize = 8;

/// The birthday attempts of one node.
#[derive(Debug)]
pub(crate) struct Birthdays {
    random: StdRng,
    /// The device can open sockets.
    has_sockets: bool,
    /// A STUN server that answers.
    stun_server: Option<SocketAddr>,
    /// Ports that the NAT of this network gave to mappings, one after the other.
    measured: Option<Vec<u16>>,
    attempt: Option<Attempt>,
    peers: BTreeMap<PublicKey, Record>,
    kept: BTreeMap<PublicKey, Kept>,
    /// Sockets of an earlier program by endpoint, and until when a peer has to use each.
    adopted: BTreeMap<SocketAddr, Duration>,
    /// Start of the period, and what was sent in it.
    spent: (Duration, u32),
    outcomes: BTreeMap<BirthdayOutcome, u64>,
    actions: VecDeque<Action>,
}

impl Birthdays {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            random: StdRng::seed_from_u64(seed),
            has_sockets: false,
            stun_server: None,
            measured: None,
            attempt: None,
            peers: BTreeMap::new(),
            kept: BTreeMap::new(),
            adopted: BTreeMap::new(),
            spent: (Duration::ZERO, 0),
            outcomes: BTreeMap::new(),
            actions: VecDeque::new(),
        }
    }

    /// The device can open sockets beside its port.
    pub(crate) fn enable_sockets(&mut self) {
        self.has_sockets = true;
    }

    /// Sets which part this node takes in attempts with a peer; `None` for none. Another part clears what failed before. Between two
    /// symmetric NATs the node that `leads` chooses the port.
    pub(crate) fn set_side(&mut self, peer: PublicKey, side: Option<BirthdaySide>, leads: bool) {
        let known = self.peers.get(&peer).map(|record| record.side);
        if known == side {
            return;
        }
        match side {
            Some(side) => drop(self.peers.insert(peer, Record::new(side, leads))),
            None => drop(self.peers.remove(&peer)),
        }
        self.abandon(&peer);
    }

    pub(crate) fn remove_peer(&mut self, peer: &PublicKey) {
        self.peers.remove(peer);
        self.abandon(peer);
        self.leave(peer);
    }

    /// The network of this host changed: what failed before may work now.
    pub(crate) fn network_changed(&mut self) {
        self.measured = None;
        self.peers.values_mut().for_each(|record| record.network_changed());
    }

    /// The peers with which this node may begin an attempt at `now`.
    pub(crate) fn startable(&self, now: Duration) -> Vec<PublicKey> {
        if self.attempt.is_some() || !self.has_sockets {
            return Vec::new();
        }
        let may_start = |(key, record): &(&PublicKey, &Record)| {
            record.side != BirthdaySide::PortRestricted && record.next <= now && !self.kept.contains_key(key)
        };
        self.peers.iter().filter(may_start).map(|(key, _)| *key).collect()
    }

    /// Asks a peer of [`Self::startable`] for an attempt to reach it at `target`. Whether nothing speaks against it.
    pub(crate) fn start(&mut self, now: Duration, peer: PublicKey, target: SocketAddr) -> bool {
        let Some(side) = self.peers.get(&peer).map(|record| record.side) else { return false };
        if side == BirthdaySide::BothSymmetric {
            return self.attempt.is_none() && self.measure(now, peer, target, PeerPorts::NotTold);
        }
        if self.attempt.is_some() || !self.has_budget(now, SOCKETS.into()) {
            return false;
        }
        self.attempt = Some(Attempt::new(now, peer, side, target, Stage::Asking));
        true
    }

    /// The peer says over the relay that it takes part, and which ports its NAT gives out next. `target` is where it is known to be.
    pub(crate) fn handle_ask(
        &mut self,
        now: Duration,
        peer: PublicKey,
        target: Option<SocketAddr>,
        ports: Option<PortSequence>,
    ) {
        if let Some(attempt) = &mut self.attempt {
            if attempt.peer != peer {
                return;
            }
            match &mut attempt.stage {
                Stage::Asking if attempt.side == BirthdaySide::BothSymmetric => self.try_ports(now, ports),
                Stage::Asking => {
                    attempt.stage = Stage::Listening(Listening::new(now));
                    self.actions.push_back(Action::Open(SOCKETS));
                }
                Stage::Following(following) => following.hear(now),
                Stage::Listening(_) => {}
                Stage::Measuring(measuring) => measuring.their = PeerPorts::Told(ports),
                Stage::Searching(searching) => {
                    searching.hear(now);
                    if attempt.next_ask.is_none() {
                        self.ask();
                    }
                }
            }
            return;
        }
        let record = self.peers.get(&peer).copied().filter(|record| record.accepts <= now);
        match (record.map(|record| record.side), target) {
            (Some(BirthdaySide::BothSymmetric), Some(target)) if self.has_sockets => {
                self.measure(now, peer, target, PeerPorts::Told(ports));
            }
            (Some(side @ BirthdaySide::PortRestricted), Some(target))
                if self.has_budget(now, ports::MAX_REQUESTS) =>
            {
                let ports = ports::random_ports(&mut self.random);
                let stage = Stage::Searching(Searching::new(now, target.ip(), ports));
                self.attempt =
                    Some(Attempt { next_ask: None, ..Attempt::new(now, peer, side, target, stage) });
                self.ask();
            }
            _ => {}
        }
    }

    /// Takes a direct request of the peer that came in by a socket, or by the WireGuard port. Whether it belongs to the attempt.
    pub(crate) fn handle_request(
        &mut self,
        now: Duration,
        peer: &PublicKey,
        from: SocketAddr,
        socket: Option<u16>,
    ) -> bool {
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| attempt.peer == *peer) else {
            return false;
        };
        let is_of_target = from.ip() == attempt.target.ip();
        let random = &mut self.random;
        let asked = match (&mut attempt.stage, socket) {
            (Stage::Following(following), None) if is_of_target => {
                following.reached.handle_request(from, random)
            }
            (Stage::Listening(listening), Some(socket)) if from == attempt.target => {
                listening.reached.handle_request(socket, random)
            }
            (Stage::Searching(searching), None) if is_of_target => (attempt.side
                == BirthdaySide::BothSymmetric)
                .then(|| searching.handle_request(now, from, random))
                .flatten(),
            _ => return false,
        };
        if let Some(transaction) = asked {
            self.actions.push_back(Action::Request { peer: *peer, to: from, socket, transaction });
        }
        true
    }

    /// Takes an answer of the peer. Whether it answers a request of the attempt.
    pub(crate) fn handle_answer(
        &mut self,
        now: Duration,
        peer: &PublicKey,
        from: SocketAddr,
        socket: Option<u16>,
        transaction: TransactionId,
    ) -> bool {
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| attempt.peer == *peer) else {
            return false;
        };
        if let Some(at) = attempt.asked.iter().position(|asked| *asked == transaction) {
            attempt.asked.remove(at);
            return true;
        }
        let peer = *peer;
        match (&mut attempt.stage, socket) {
            (Stage::Following(following), None) => {
                let Some(heard) = following.reached.handle_answer(from, transaction) else { return false };
                if heard.is_confirmed {
                    self.found(now, peer, from);
                }
                true
            }
            (Stage::Listening(listening), Some(socket)) => {
                let Some(heard) = listening.reached.handle_answer(socket, transaction) else { return false };
                if heard.is_chosen {
                    self.actions.push_back(Action::Keep { peer, remote: from, socket });
                }
                if heard.is_confirmed {
                    self.kept.insert(peer, Kept { remote: from, unused_since: None });
                    self.found(now, peer, from);
                }
                true
            }
            (Stage::Searching(searching), None) => {
                let Some(is_confirmed) = searching.handle_answer(now, from, transaction) else {
                    return false;
                };
                if is_confirmed {
                    self.found(now, peer, from);
                }
                true
            }
            _ => false,
        }
    }

    /// The shell could not open the sockets.
    pub(crate) fn sockets_refused(&mut self, now: Duration) {
        let has_opened =
            |attempt: &Attempt| matches!(attempt.stage, Stage::Listening(_) | Stage::Measuring(_));
        if self.attempt.as_ref().is_some_and(has_opened) {
            self.finish(now, BirthdayOutcome::NoSockets);
        }
    }

    /// Sends what is due.
    pub(crate) fn handle_timeout(&mut self, now: Duration) {
        self.leave_unclaimed(now);
        let Some(attempt) = &mut self.attempt else { return };
        let peer = attempt.peer;
        let elapsed = now.saturating_sub(attempt.began);
        let mut end = None;
        let mut is_measured = false;
        let queued = self.actions.len();
        match &mut attempt.stage {
            Stage::Asking => end = (elapsed >= MAX_SILENCE).then_some(BirthdayOutcome::PeerSilent),
            Stage::Following(following) => {
                for to in following.due(now) {
                    let transaction = TransactionId(self.random.random());
                    self.actions.push_back(Action::Request { peer, to, socket: None, transaction });
                }
                end = following.end(now);
            }
            Stage::Listening(listening) => {
                for (socket, transaction) in listening.due(now, &mut self.random) {
                    let to = attempt.target;
                    let socket = Some(socket);
                    self.actions.push_back(Action::Request { peer, to, socket, transaction });
                }
                end = (elapsed >= MAX_ATTEMPT).then_some(BirthdayOutcome::NoPortFound);
            }
            Stage::Measuring(measuring) => {
                for (socket, server, transaction) in measuring.due(now, &mut self.random) {
                    self.actions.push_back(Action::Measure { server, socket, transaction });
                }
                is_measured = measuring.is_over(now);
            }
            Stage::Searching(searching) => {
                for (to, transaction) in searching.due(now, &mut self.random) {
                    self.actions.push_back(Action::Request { peer, to, socket: None, transaction });
                }
                end = searching.end(now);
            }
        }
        let requests = u32::try_from(self.actions.len().saturating_sub(queued)).unwrap_or(u32::MAX);
        let spent = self.spent(now);
        *spent = spent.saturating_add(requests);
        match end {
            Some(outcome) => self.finish(now, outcome),
            None if is_measured => self.conclude_measuring(now),
            None => {}
        }
        self.ask_if_due(now);
    }

    fn ask_if_due(&mut self, now: Duration) {
        let Some(attempt) = self.attempt.as_mut().filter(|it| it.next_ask.is_some_and(|at| at <= now)) else {
            return;
        };
        let is_asking = matches!(attempt.stage, Stage::Asking);
        let interval = if is_asking { ASK_INTERVAL } else { TELL_INTERVAL };
        attempt.next_ask = Some(now.saturating_add(interval));
        self.ask();
    }

    /// Time at which to call [`Self::handle_timeout`].
    pub(crate) fn poll_timeout(&self) -> Option<Duration> {
        self.next_of_attempt().into_iter().chain(self.next_unclaimed()).min()
    }

    fn next_of_attempt(&self) -> Option<Duration> {
        let attempt = self.attempt.as_ref()?;
        let stage = match &attempt.stage {
            Stage::Asking => attempt.began.saturating_add(MAX_SILENCE),
            Stage::Following(following) => following.next(),
            Stage::Listening(listening) => {
                let end = attempt.began.saturating_add(MAX_ATTEMPT);
                listening.next().map_or(end, |next| next.min(end))
            }
            Stage::Measuring(measuring) => measuring.next(),
            Stage::Searching(searching) => searching.next(),
        };
        Some(attempt.next_ask.map_or(stage, |ask| ask.min(stage)))
    }

    /// Takes the next action.
    pub(crate) fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Reason for this endpoint if an attempt has found it.
    pub(crate) fn reason(&self, peer: &PublicKey, endpoint: SocketAddr) -> Option<EndpointReason> {
        let found = self.peers.get(peer).and_then(|record| record.found);
        (found == Some(endpoint) || self.kept(peer) == Some(endpoint))
            .then_some(EndpointReason::BirthdayAttack)
    }

    /// Status of the attempts with a peer; `None` while there was none.
    pub(crate) fn status(&self, now: Duration, peer: &PublicKey) -> Option<BirthdayStatus> {
        let record = self.peers.get(peer)?;
        let is_running = self.attempt.as_ref().is_some_and(|attempt| attempt.peer == *peer);
        let last = record.last.or(is_running.then_some(BirthdayOutcome::NoPortFound))?;
        Some(BirthdayStatus {
            last,
            attempts: record.attempts,
            is_running,
            next: record.next.checked_sub(now),
        })
    }

    /// Number of attempts by outcome.
    pub(crate) fn outcomes(&self) -> &BTreeMap<BirthdayOutcome, u64> {
        &self.outcomes
    }

    fn ask(&mut self) {
        let Some(attempt) = &mut self.attempt else { return };
        let transaction = TransactionId(self.random.random());
        if attempt.asked.len() >= MAX_ASKED {
            attempt.asked.pop_front();
        }
        attempt.asked.push_back(transaction);
        let peer = attempt.peer;
        let ports = attempt.ports;
        self.actions.push_back(Action::Ask { peer, transaction, ports });
    }

    fn found(&mut self, now: Duration, peer: PublicKey, address: SocketAddr) {
        self.finish(now, BirthdayOutcome::Found);
        if let Some(record) = self.peers.get_mut(&peer) {
            record.found = Some(address);
        }
        self.actions.push_back(Action::Found { peer, address });
    }

    fn finish(&mut self, now: Duration, outcome: BirthdayOutcome) {
        let Some(attempt) = self.attempt.take() else { return };
        self.close_sockets(&attempt, outcome == BirthdayOutcome::Found);
        let count = self.outcomes.entry(outcome).or_default();
        *count = count.saturating_add(1);
        if let Some(record) = self.peers.get_mut(&attempt.peer) {
            record.conclude(now, outcome, &mut self.random);
        }
    }

    /// Ends the attempt with this peer without a verdict.
    fn abandon(&mut self, peer: &PublicKey) {
        if let Some(attempt) = self.attempt.take_if(|attempt| attempt.peer == *peer) {
            self.close_sockets(&attempt, false);
        }
    }

    fn close_sockets(&mut self, attempt: &Attempt, is_found: bool) {
        match &attempt.stage {
            Stage::Listening(listening) => {
                if !is_found && listening.reached.has_chosen() {
                    self.actions.push_back(Action::Leave { remote: attempt.target });
                }
                self.actions.push_back(Action::Close);
            }
            Stage::Measuring(_) => self.actions.push_back(Action::Close),
            Stage::Asking | Stage::Following(_) | Stage::Searching(_) => {}
        }
    }

    /// Whether the budget has room for an attempt that sends so many requests at most.
    fn has_budget(&mut self, now: Duration, requests: u32) -> bool {
        self.spent(now).saturating_add(requests) <= BUDGET
    }

    /// Requests that attempts have sent in the current period.
    fn spent(&mut self, now: Duration) -> &mut u32 {
        if now.saturating_sub(self.spent.0) >= BUDGET_PERIOD {
            self.spent = (now, 0);
        }
        &mut self.spent.1
    }
}

#[cfg(test)]
mod tests;

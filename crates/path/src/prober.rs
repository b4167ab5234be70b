//! The strategy for a peer that answers probes: which of its candidates work now, and which one WireGuard is to use.
//!
//! A candidate works when a request of this node was answered over it; nothing else counts, least of all a request of the
//! peer. While there is no session, or its path has failed, the best candidate that works is selected. A live session
//! is moved to a better path only by the controlling node, the one with the lower public key (as in ICE, RFC 8445, 6.1.1): its
//! packets make the other one's WireGuard roam, so that both use one path and neither moves it back.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fairlead_address::Nat64Prefix;
use fairlead_wire::probe::TransactionId;
use rand::RngExt;
use rand::rngs::StdRng;

use crate::candidates::{Candidate, MAX_CANDIDATES};
use crate::relay_path::{RelayPath, RelayPortRange};
use crate::rotation::EndpointReason;

mod birthday;
mod checks;
mod doubt;
mod full_size;
mod handshake;
mod idle_test;
mod nat64;
mod path;
mod path_mtu;
mod ping;
mod refusals;
mod relay_port;
mod rounds;
mod signalled;

pub use ping::{CandidateStatus, PingOutcome};
pub(crate) use refusals::Hint;

use doubt::Doubt;
use handshake::Handshakes;
use idle_test::IdleTests;
use path::{ANSWER_TIMEOUT, Origin, Path};
use path_mtu::PathMtu;
use ping::Ping;

/// How long after traffic the path in use is checked.
const ACTIVE: Duration = Duration::from_secs(60);
/// Bytes between two observations that are no traffic: a handshake and keepalives.
const IDLE_BYTES: u64 = 300;
/// Addresses that only requests of the peer came from; the oldest makes room.
const MAX_REFLEXIVE: usize = 4;
/// Least time between two moves of a live session.
const MIN_MOVE_INTERVAL: Duration = Duration::from_secs(5);

/// A request to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) to: SocketAddr,
    pub(crate) transaction: TransactionId,
    /// Asks the peer to try its paths as well.
    pub(crate) starts_round: bool,
    /// Asks the peer to start a handshake.
    pub(crate) wants_handshake: bool,
    /// The path has answered lately.
    pub(crate) is_proven: bool,
    /// It goes over the relay in a round: it carries this node's own candidates.
    pub(crate) signals: bool,
    /// Its least length in bytes.
    pub(crate) length: usize,
}

/// What the WireGuard device says of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Session {
    /// A session is alive.
    pub(crate) is_up: bool,
    pub(crate) endpoint: Option<SocketAddr>,
    pub(crate) rx_bytes: u64,
    pub(crate) tx_bytes: u64,
}

/// The paths to one peer.
#[derive(Debug, Default)]
pub(crate) struct Prober {
    is_controlling: bool,
    paths: Vec<Path>,
    session: Session,
    /// What WireGuard uses, as observed or selected last.
    current: Option<SocketAddr>,
    active_until: Option<Duration>,
    /// When the session was first seen up.
    up_since: Option<Duration>,
    /// A candidate came while the session was idle.
    has_untried: bool,
    /// Rounds in a row that changed nothing.
    rounds: u32,
    next_round: Option<Duration>,
    /// When the path in use is checked next, and whether an answer is missing since the last check.
    check: Option<(Duration, bool)>,
    missed: u8,
    /// When a message that packets do not reach the peer last counted.
    refused: Option<Duration>,
    /// When an answer was late, now or the last time.
    failing_since: Option<Duration>,
    doubt: Doubt,
    moved: Option<Duration>,
    /// That was from one kind of path to a better one, such as from a relay to a direct path.
    has_climbed: bool,
    relay: Option<RelayPath>,
    relay_ports: Option<RelayPortRange>,
    nat64: Arc<[Nat64Prefix]>,
    /// Length of the longest datagram of WireGuard.
    full_length: Option<usize>,
    path_mtu: PathMtu,
    /// When all paths were last tried.
    round_began: Option<Duration>,
    /// When they are tried next because the peer has done so.
    joined_round: Option<Duration>,
    /// The last round was one that the peer asked for: it is not asked back.
    is_joined: bool,
    handshakes: Handshakes,
    /// `None` until there is something to test.
    idle_tests: Option<Box<IdleTests>>,
    /// The last one.
    ping: Option<Box<Ping>>,
}

impl Prober {
    pub(crate) fn new(is_controlling: bool) -> Self {
        Self { is_controlling, ..Self::default() }
    }

    /// Whether this node has the lower key, after one of the two has another.
    pub(crate) fn set_controlling(&mut self, is_controlling: bool) {
        self.is_controlling = is_controlling;
    }

    /// Sets the way by a relay; to be followed by [`Self::set_candidates`].
    pub(crate) fn set_relay(&mut self, relay: Option<RelayPath>) {
        self.relay = relay;
    }

    /// Replaces the candidates, best first. New ones are tried at once, or with the next traffic of an idle session.
    pub(crate) fn set_candidates(&mut self, now: Duration, candidates: &[Candidate]) {
        let mut before = std::mem::take(&mut self.paths);
        let tries_now = !self.is_idle(now) || self.is_relay_only();
        let mut is_new = false;
        let is_direct = |candidate: &&Candidate| !self.is_port_of_relay(candidate.address);
        let candidates: Vec<Candidate> =
            candidates.iter().take(MAX_CANDIDATES).filter(is_direct).copied().collect();
        for candidate in &candidates {
            let known = before.iter().position(|path| path.candidate.address == candidate.address);
            let mut path = known.map_or_else(
                || {
                    is_new = true;
                    let attempt = tries_now.then_some((now, 0));
                    Path { attempt, ..Path::new(*candidate, now) }
                },
                |known| before.swap_remove(known),
            );
            path.candidate = *candidate;
            path.origin = Origin::Published;
            self.paths.push(path);
        }
        let is_relay_only = self.is_relay_only();
        let keeps = |path: &Path| {
            let is_in_use = Some(path.candidate.address) == self.current;
            let is_other = path.origin != Origin::Published || is_in_use;
            path.is_relay_port() || (!is_relay_only && !path.is_relay() && is_other)
        };
        self.paths.extend(before.into_iter().filter(keeps).map(Path::withdrawn));
        if is_new && !tries_now {
            self.has_untried = true;
        } else if is_new {
            self.rounds = 0;
            self.plan_round(now);
            if !self.works_directly(now) {
                // The NAT of the peer may let in only what the peer has sent to.
                self.is_joined = false;
                self.try_relay(now);
            }
        }
    }

    /// The network of this host changed: everything is tried again.
    pub(crate) fn network_changed(&mut self, now: Duration) {
        self.rounds = 0;
        self.forget_full_size();
        self.forget_idle_tests();
        self.start_round(now);
    }

    /// The link to the relay is up now, or lost: what went by way of it goes nowhere.
    pub(crate) fn relay_changed(&mut self, now: Duration, is_up: bool) {
        if is_up {
            // A direct path that is in use needs the relay only when it fails.
            if !self.session.is_up || self.current_path().is_none_or(Path::is_relay) {
                self.try_relay(now);
            }
            return;
        }
        let current = self.current;
        let mut has_failed = false;
        for path in self.paths.iter_mut().filter(|path| path.is_relay() && !path.is_relay_port()) {
            has_failed |= current == Some(path.candidate.address);
            (path.answered, path.attempt) = (None, None);
        }
        if has_failed {
            self.fail_current(now);
        }
    }

    /// Takes the state of the device.
    pub(crate) fn observe(&mut self, now: Duration, session: Session) {
        let before = std::mem::replace(&mut self.session, session);
        let moved = |now: u64, before: u64| now.saturating_sub(before) > IDLE_BYTES;
        if moved(session.rx_bytes, before.rx_bytes) || moved(session.tx_bytes, before.tx_bytes) {
            self.active_until = Some(now.saturating_add(ACTIVE));
        }
        if session.is_up != before.is_up {
            self.up_since = session.is_up.then_some(now);
        }
        if session.endpoint != self.current {
            self.current = session.endpoint;
            self.missed = 0;
            self.check = None;
            let is_unknown = |address: &SocketAddr| self.may_use(*address) && self.path(*address).is_none();
            if let Some(address) = session.endpoint.filter(is_unknown) {
                self.add_reflexive(now, address);
            }
        }
        if session.is_up != before.is_up {
            self.rounds = 0;
            if session.is_up { self.plan_round(now) } else { self.start_round(now) }
        }
        self.expire_signalled(now);
        self.use_traffic(now);
        self.observe_idle(now, session.rx_bytes > before.rx_bytes);
    }

    /// Takes an authenticated request of the peer. Its source is tried unless a direct path of no worse kind is in use and works, or it
    /// belongs to one link only: a source address is easily forged. A request by way of the relay may ask for more: that all paths are tried
    /// now. While packets are relayed this is done although a direct path works here: it may not work there.
    pub(crate) fn handle_request(&mut self, now: Duration, from: SocketAddr, starts_round: bool) {
        self.yield_idle_test(now);
        if starts_round && self.is_relay(from) {
            self.check_for_peer(now);
            if self.needs_round(now) {
                self.join_round(now);
                return;
            }
        }
        let working =
            self.current_path().filter(|path| !path.is_relay() && path.is_fresh(now)).map(Path::kind);
        let may_use = self.may_use(from);
        match self.paths.iter_mut().find(|path| path.candidate.address == from) {
            Some(path)
                if path.attempt.is_none()
                    && !path.is_fresh(now)
                    && working.is_none_or(|working| path.kind() < working) =>
            {
                path.attempt = Some((now, 0));
            }
            Some(_) => {}
            None if may_use => self.add_reflexive(now, from),
            None => {}
        }
    }

    fn is_relay_only(&self) -> bool {
        self.relay.is_some_and(|relay| relay.is_only)
    }

    pub(crate) fn works_directly(&self, now: Duration) -> bool {
        self.paths.iter().any(|path| !path.is_relay() && path.is_fresh(now))
    }

    /// Takes an authenticated answer. Whether it answers a request of this node.
    pub(crate) fn handle_answer(
        &mut self,
        now: Duration,
        from: SocketAddr,
        transaction: TransactionId,
    ) -> bool {
        if self.handle_search_answer(now, from, transaction) {
            return true;
        }
        let Some(path) = self.paths.iter_mut().find(|path| path.candidate.address == from) else {
            return false;
        };
        let Some(at) = path.pending.iter().position(|(pending, _)| *pending == transaction) else {
            return false;
        };
        let (_, sent) = path.pending.swap_remove(at);
        let round_trip = now.saturating_sub(sent);
        if round_trip > ANSWER_TIMEOUT {
            return false;
        }
        if let Some(ping) = &mut self.ping {
            ping.take_answer(from, sent, round_trip);
        }
        // Smoothed as TCP does it (RFC 6298, section 2).
        let smoothed =
            path.round_trip().map_or(round_trip, |known| (known.saturating_mul(7) + round_trip) / 8);
        path.answered = Some((smoothed, now));
        path.attempt = None;
        path.has_failed = false;
        path.full_size.handle_answer(transaction);
        if self.full_length.is_some() {
            path.plan_full_size(now);
        }
        if self.current == Some(from) {
            self.missed = 0;
            self.check = None;
            self.doubt.end();
            self.plan_check(now);
        }
        true
    }

    /// The requests to send now.
    pub(crate) fn handle_timeout(&mut self, now: Duration, random: &mut StdRng) -> Vec<Probe> {
        self.use_doubt(now);
        self.run_idle_test(now);
        if self.next_round.is_some_and(|at| at <= now) {
            self.next_round = None;
            if !self.session.is_up || self.is_active(now) {
                self.start_round(now);
            }
        }
        if self.joined_round.is_some_and(|at| at <= now) {
            self.joined_round = None;
            if self.needs_round(now) {
                self.start_joined_round(now);
            }
        }
        let mut requests = Vec::new();
        if self.check.is_some_and(|(at, _)| at <= now) {
            requests.extend(self.check_current(now).map(|address| (address, false, 0)));
        }
        let asked = self.take_handshake_request(now);
        requests.extend(asked.map(|address| (address, false, 0)));
        for path in &mut self.paths {
            let address = path.candidate.address;
            if path.attempt_is_due(now) && !requests.iter().any(|(checked, ..)| *checked == address) {
                requests.push((address, path.is_relay(), 0));
            }
        }
        requests.extend(self.full_size_requests(now).into_iter().map(|(to, length)| (to, false, length)));
        let mut probes = Vec::with_capacity(requests.len());
        for (to, signals, length) in requests {
            let transaction = TransactionId(random.random());
            if let Some(path) = self.paths.iter_mut().find(|path| path.candidate.address == to) {
                // A port of the relay is at no address that the peer names.
                let is_proven = path.is_fresh(now) || path.is_relay_port();
                path.add_pending(now, transaction);
                if length > 0 {
                    path.full_size.add_pending(transaction);
                }
                if let Some(ping) = &mut self.ping {
                    ping.add_request(to);
                }
                let wants_handshake = asked == Some(to) && length == 0;
                let starts_round = signals && !self.is_joined;
                probes.push(Probe {
                    to,
                    transaction,
                    starts_round,
                    wants_handshake,
                    is_proven,
                    signals,
                    length,
                });
            }
        }
        self.search_mtu(now, random, &mut probes);
        probes
    }

    /// The path to use from now on, if it is another one.
    pub(crate) fn select(&mut self, now: Duration) -> Option<(Candidate, EndpointReason)> {
        let fresh = || self.paths.iter().filter(|path| path.is_fresh(now));
        let current = self.current_path().filter(|path| !path.has_failed);
        let (best, reason) = match current.filter(|_| self.session.is_up) {
            Some(current) if self.is_controlling => {
                let is_free = |path: &&Path| self.may_move(now, current, path);
                let better = fresh().filter(|path| path.is_better_than(current)).filter(is_free);
                let fastest = better.min_by_key(|path| (path.tier(), path.round_trip()));
                (fastest, EndpointReason::BetterPath)
            }
            Some(_) => return None,
            None if self.session.is_up => {
                // What made it fail may have ended others as well that have not been asked since.
                let is_doubtful =
                    |path: &Path| self.failing_since.is_some_and(|at| !path.has_answered_since(at));
                let best = fresh().min_by_key(|path| (is_doubtful(path), path.rank()));
                (best, EndpointReason::PathFailed)
            }
            None => (fresh().min_by_key(|path| path.rank()), EndpointReason::ProbeAnswered),
        };
        let best = best?;
        let candidate = best.candidate;
        let climbs = current.is_some_and(|current| best.tier() < current.tier());
        if self.current == Some(candidate.address) {
            return None;
        }
        self.current = Some(candidate.address);
        if self.session.is_up {
            self.moved = Some(now);
            self.has_climbed = climbs;
        }
        self.missed = 0;
        self.check = None;
        self.doubt.leave(now);
        self.plan_check(now);
        Some((candidate, reason))
    }

    /// Whether an answer has lately proved that the path in use works.
    pub(crate) fn works(&self, now: Duration) -> bool {
        self.current_path().is_some_and(|path| path.is_fresh(now))
    }

    /// The round-trip time over the path in use, at its last answer.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        self.current_path().and_then(Path::round_trip)
    }

    /// When to call [`Self::handle_timeout`].
    pub(crate) fn poll_timeout(&self) -> Option<Duration> {
        let attempts = self.paths.iter().filter_map(Path::next_request);
        let tests = self.paths.iter().filter_map(|path| path.full_size.next());
        attempts
            .chain(tests)
            .chain(self.next_round)
            .chain(self.joined_round)
            .chain(self.check.map(|(at, _)| at))
            .chain(self.handshakes.due)
            .chain(self.doubt.next())
            .chain(self.path_mtu.next())
            .chain(self.idle_tests.as_deref().and_then(IdleTests::next))
            .min()
    }

    fn path(&self, address: SocketAddr) -> Option<&Path> {
        self.paths.iter().find(|path| path.candidate.address == address)
    }

    fn current_path(&self) -> Option<&Path> {
        self.path(self.current?)
    }

    fn is_active(&self, now: Duration) -> bool {
        self.session.is_up && self.active_until.is_some_and(|until| now < until)
    }

    /// Whether there is a session that is neither new nor in use: it is left in peace.
    fn is_idle(&self, now: Duration) -> bool {
        let is_new = self.up_since.is_none_or(|since| now.saturating_sub(since) < ACTIVE);
        self.session.is_up && !is_new && !self.is_active(now)
    }

    /// Whether the last move is long enough ago, or was one to a better kind of path, as this one is.
    fn may_move(&self, now: Duration, current: &Path, other: &Path) -> bool {
        let climbs = self.has_climbed && other.tier() < current.tier();
        climbs || self.moved.is_none_or(|at| now.saturating_sub(at) >= MIN_MOVE_INTERVAL)
    }

    fn add_reflexive(&mut self, now: Duration, address: SocketAddr) {
        let is_reflexive = |path: &Path| path.origin == Origin::Request;
        let reflexive = self.paths.iter().filter(|path| is_reflexive(path)).count();
        if reflexive >= MAX_REFLEXIVE {
            let current = self.current;
            let oldest = self
                .paths
                .iter()
                .position(|path| is_reflexive(path) && Some(path.candidate.address) != current);
            if let Some(oldest) = oldest {
                self.paths.remove(oldest);
            }
        }
        let candidate = Candidate { address, source: self.source_of(address) };
        self.paths.push(Path { origin: Origin::Request, ..Path::new(candidate, now) });
    }
}

#[cfg(test)]
mod tests;

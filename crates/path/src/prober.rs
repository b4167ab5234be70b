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
use crate::relay_path::RelayPath;
use crate::rotation::EndpointReason;

mod attempt;
mod birthday;
mod both_ways;
mod candidate_status;
mod checks;
mod doubt;
mod full_size;
mod handshake_requests;
mod handshakes;
mod idle_test;
mod keepalives;
mod long_datagrams;
mod moves;
mod mtu_search;
mod network;
mod path;
mod path_in_use;
mod path_mtu;
mod paths;
mod ping;
mod probe;
mod refusals;
mod relay_port;
mod rounds;
mod signalled;
mod traffic;

pub use candidate_status::CandidateStatus;
pub use ping::PingOutcome;
pub(crate) use probe::Probe;
pub(crate) use refusals::Hint;
pub(crate) use traffic::Session;

use checks::Checks;
use doubt::Doubt;
use handshakes::Handshakes;
use idle_test::IdleTests;
use moves::Moves;
use network::Network;
use path::{ANSWER_TIMEOUT, Origin, Path};
use path_mtu::PathMtu;
use paths::Paths;
use ping::Ping;
use rounds::Rounds;
use traffic::Traffic;

/// The paths to one peer.
#[derive(Debug, Default)]
pub(crate) struct Prober {
    is_controlling: bool,
    network: Network,
    paths: Paths,
    traffic: Traffic,
    moves: Moves,
    rounds: Rounds,
    checks: Checks,
    doubt: Doubt,
    /// Length of the longest datagram of WireGuard.
    full_length: Option<usize>,
    path_mtu: PathMtu,
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
        self.network.relay = relay;
    }

    /// Sets the prefixes of the NAT64 of this node's network.
    pub(crate) fn set_nat64(&mut self, prefixes: &Arc<[Nat64Prefix]>) {
        self.network.nat64 = Arc::clone(prefixes);
    }

    /// Replaces the candidates, best first. New ones are tried at once, or with the next traffic of an idle session.
    pub(crate) fn set_candidates(&mut self, now: Duration, candidates: &[Candidate]) {
        let mut before = std::mem::take(&mut self.paths.all);
        let tries_now = !self.traffic.is_idle(now) || self.network.is_relay_only();
        let mut is_new = false;
        let is_direct = |candidate: &&Candidate| !self.network.is_port_of_relay(candidate.address);
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
            self.paths.all.push(path);
        }
        let is_relay_only = self.network.is_relay_only();
        let current = self.paths.current;
        let keeps = |path: &Path| {
            let is_in_use = Some(path.candidate.address) == current;
            let is_other = path.origin != Origin::Published || is_in_use;
            path.is_relay_port() || (!is_relay_only && !path.is_relay() && is_other)
        };
        self.paths.all.extend(before.into_iter().filter(keeps).map(Path::withdrawn));
        if is_new && !tries_now {
            self.rounds.has_untried = true;
        } else if is_new {
            self.rounds.in_vain = 0;
            self.plan_round(now);
            if !self.works_directly(now) {
                // The NAT of the peer may let in only what the peer has sent to.
                self.rounds.is_joined = false;
                self.paths.ask_relay(now);
            }
        }
    }

    /// The network of this host changed: everything is tried again.
    pub(crate) fn network_changed(&mut self, now: Duration) {
        self.rounds.in_vain = 0;
        self.forget_full_size();
        self.forget_idle_tests();
        self.start_round(now);
    }

    /// The link to the relay is up now, or lost: what went by way of it goes nowhere.
    pub(crate) fn relay_changed(&mut self, now: Duration, is_up: bool) {
        if is_up {
            // A direct path that is in use needs the relay only when it fails.
            if !self.traffic.session.is_up || self.paths.in_use().is_none_or(Path::is_relay) {
                self.paths.ask_relay(now);
            }
            return;
        }
        let current = self.paths.current;
        let mut has_failed = false;
        for path in self.paths.iter_mut().filter(|path| path.is_relay() && !path.is_relay_port()) {
            has_failed |= current == Some(path.candidate.address);
            path.answered = None;
            path.attempt = None;
        }
        if has_failed {
            self.fail_current(now);
        }
    }

    /// Takes the state of the device.
    pub(crate) fn observe(&mut self, now: Duration, session: Session) {
        let before = self.traffic.observe(now, session);
        if session.endpoint != self.paths.current {
            self.paths.current = session.endpoint;
            self.checks.clear();
            let is_unknown =
                |address: &SocketAddr| self.network.may_use(*address) && self.paths.to(*address).is_none();
            if let Some(address) = session.endpoint.filter(is_unknown) {
                self.add_reflexive(now, address);
            }
        }
        if session.is_up != before.is_up {
            self.rounds.in_vain = 0;
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
        if starts_round && self.paths.is_relay(from) {
            self.check_for_peer(now);
            if self.needs_round(now) {
                self.join_round(now);
                return;
            }
        }
        let working =
            self.paths.in_use().filter(|path| !path.is_relay() && path.is_fresh(now)).map(Path::kind);
        let may_use = self.network.may_use(from);
        match self.paths.to_mut(from) {
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

    pub(crate) fn works_directly(&self, now: Duration) -> bool {
        self.paths.works_directly(now)
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
        let Some(path) = self.paths.to_mut(from) else { return false };
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
        if self.paths.current == Some(from) {
            self.checks.clear();
            self.doubt.end();
            self.plan_check(now);
        }
        true
    }

    /// The requests to send now.
    pub(crate) fn handle_timeout(&mut self, now: Duration, random: &mut StdRng) -> Vec<Probe> {
        self.use_doubt(now);
        self.run_idle_test(now);
        if self.rounds.next.is_some_and(|at| at <= now) {
            self.rounds.next = None;
            if !self.traffic.session.is_up || self.traffic.is_active(now) {
                self.start_round(now);
            }
        }
        if self.rounds.joins.is_some_and(|at| at <= now) {
            self.rounds.joins = None;
            if self.needs_round(now) {
                self.start_joined_round(now);
            }
        }
        let mut requests = Vec::new();
        if self.checks.due.is_some_and(|(at, _)| at <= now) {
            requests.extend(self.check_current(now).map(|address| (address, false, 0)));
        }
        let asked = self.take_handshake_request(now);
        requests.extend(asked.map(|address| (address, false, 0)));
        for path in self.paths.iter_mut() {
            let address = path.candidate.address;
            if path.attempt_is_due(now) && !requests.iter().any(|(checked, ..)| *checked == address) {
                requests.push((address, path.is_relay(), 0));
            }
        }
        requests.extend(self.full_size_requests(now).into_iter().map(|(to, length)| (to, false, length)));
        let mut probes = Vec::with_capacity(requests.len());
        for (to, signals, length) in requests {
            let transaction = TransactionId(random.random());
            if let Some(path) = self.paths.to_mut(to) {
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
                let starts_round = signals && !self.rounds.is_joined;
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
        let current = self.paths.in_use().filter(|path| !path.has_failed);
        let (best, reason) = match current.filter(|_| self.traffic.session.is_up) {
            Some(current) if self.is_controlling => {
                let is_free = |path: &&Path| {
                    self.moves.may_move(now, path.candidate.address, path.tier() < current.tier())
                };
                let better = fresh().filter(|path| path.is_better_than(current)).filter(is_free);
                let fastest = better.min_by_key(|path| (path.tier(), path.round_trip()));
                (fastest, EndpointReason::BetterPath)
            }
            Some(_) => return None,
            None if self.traffic.session.is_up => {
                // What made it fail may have ended others as well that have not been asked since.
                let is_doubtful =
                    |path: &Path| self.checks.failing_since.is_some_and(|at| !path.has_answered_since(at));
                let best = fresh().min_by_key(|path| (is_doubtful(path), path.rank()));
                (best, EndpointReason::PathFailed)
            }
            None => (fresh().min_by_key(|path| path.rank()), EndpointReason::ProbeAnswered),
        };
        let best = best?;
        let candidate = best.candidate;
        let climbs = current.is_some_and(|current| best.tier() < current.tier());
        if self.paths.current == Some(candidate.address) {
            return None;
        }
        self.paths.current = Some(candidate.address);
        if self.traffic.session.is_up {
            self.moves.add(now, climbs);
        }
        self.checks.clear();
        self.doubt.leave(now);
        self.plan_check(now);
        Some((candidate, reason))
    }

    /// Whether an answer has lately proved that the path in use works.
    pub(crate) fn works(&self, now: Duration) -> bool {
        self.paths.in_use().is_some_and(|path| path.is_fresh(now))
    }

    /// The round-trip time over the path in use, at its last answer.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        self.paths.in_use().and_then(Path::round_trip)
    }

    /// Time at which to call [`Self::handle_timeout`].
    pub(crate) fn poll_timeout(&self) -> Option<Duration> {
        let attempts = self.paths.iter().filter_map(Path::next_request);
        let tests = self.paths.iter().filter_map(|path| path.full_size.next());
        attempts
            .chain(tests)
            .chain(self.rounds.next)
            .chain(self.rounds.joins)
            .chain(self.checks.due.map(|(at, _)| at))
            .chain(self.handshakes.due)
            .chain(self.doubt.next())
            .chain(self.path_mtu.next())
            .chain(self.idle_tests.as_deref().and_then(IdleTests::next))
            .min()
    }

    fn add_reflexive(&mut self, now: Duration, address: SocketAddr) {
        let candidate = Candidate { address, source: self.network.source_of(address) };
        self.paths.add_reflexive(now, candidate);
    }

    fn needs_round(&self, now: Duration) -> bool {
        self.uses_relay() || !self.works_directly(now)
    }

    /// The peer tries all its paths. This node does so now, or when its own last round is long enough ago.
    fn join_round(&mut self, now: Duration) {
        if self.rounds.join(now) {
            self.start_joined_round(now);
        }
    }

    /// The peer is not asked back, unless this node is about to ask for a reason of its own: what the peer has sent so far may have
    /// come too early.
    fn start_joined_round(&mut self, now: Duration) {
        let is_asking =
            !self.rounds.is_joined && self.paths.iter().any(|path| path.is_relay() && path.attempt.is_some());
        self.start_round(now);
        self.rounds.is_joined = !is_asking;
    }

    fn start_round(&mut self, now: Duration) {
        self.rounds.start(now, &mut self.paths, self.traffic.session.is_up);
        self.plan_round(now);
    }

    fn plan_round(&mut self, now: Duration) {
        self.rounds.plan(now, &self.paths, &self.traffic, self.network.relay);
    }
}

#[cfg(test)]
mod tests;

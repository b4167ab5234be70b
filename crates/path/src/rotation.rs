//! The strategy for a peer that does not answer probes: rotate through its candidates until a WireGuard handshake
//! completes, as KubeSpan does.
//!
//! The caller observes the device, then polls; it sets the endpoint that [`Rotation::poll`] returns at once, with a
//! forced handshake if the device can do that. It observes and polls again at [`Rotation::next_wakeup`].
//!
//! The rotation never changes the endpoint of a live session: a peer that connected to us, or roamed, keeps its
//! endpoint.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use fairlead_address::canonical;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::candidates::{Candidate, Source};
use crate::relay_path::RelayPortRange;

mod attempts;
mod liveness;
mod status;

pub use attempts::EndpointReason;
use attempts::{Attempt, Attempts};
pub use liveness::Observation;
use liveness::{Liveness, Loss};
pub use status::{Reason, State, Status};

/// Durations of a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Duration of the attempt at each candidate in the first rounds. WireGuard sends a handshake at most every 5 s and up to a third of a
    /// second (`REKEY_TIMEOUT` and jitter): a shorter attempt may pass without a handshake, unless the caller forces one whenever it sets
    /// an endpoint.
    pub attempt: Duration,
    /// Duration of each attempt after those rounds, before it grows; a peer that stays away for a day costs next to nothing. It is
    /// stretched by up to a half, differently each round: two nodes that rotate at the same pace might otherwise never try each other at
    /// the same time.
    pub slow_attempt: Duration,
    /// The most that [`Self::slow_attempt`] grows to: a twentieth of the time since the rotation began.
    pub max_attempt: Duration,
    /// Rounds through all candidates before the rotation slows down and the peer is [`State::Down`].
    pub fast_rounds: u32,
    /// The handshake age that ends a session: WireGuard's `REJECT_AFTER_TIME` and a margin.
    pub session_lifetime: Duration,
    /// The time without an answer to more than keepalives that ends a session. A peer that is alive answers with a
    /// keepalive within 10 s (`KEEPALIVE_TIMEOUT`). If only that keepalive was lost, nothing breaks: the first candidate
    /// tried is the endpoint in use.
    pub unanswered: Duration,
    /// Duration of the attempt at a peer by way of its relay, before its candidates, if it has not been reached yet; zero for none. What a
    /// relay cannot pass on at once is held there, whereas an initiation to a candidate that does not work costs 5 s (`REKEY_TIMEOUT`). So
    /// this is of use unless the caller forces handshakes.
    pub relay_attempt: Duration,
    /// Differs between nodes and between peers: the stretching is drawn from it.
    pub seed: u64,
}

impl Default for Config {
    /// 5.5 s for two rounds, 15 s afterwards, 60 s after 20 minutes; a session ends after 195 s without a handshake, or 12 s without an answer.
    fn default() -> Self {
        Self {
            attempt: Duration::from_millis(5500),
            slow_attempt: Duration::from_secs(15),
            max_attempt: Duration::from_secs(60),
            fast_rounds: 2,
            session_lifetime: Duration::from_secs(195),
            unanswered: Duration::from_secs(12),
            relay_attempt: Duration::ZERO,
            seed: 0,
        }
    }
}

/// The rotation of one peer.
#[derive(Debug, Clone)]
pub(crate) struct Rotation {
    config: Config,
    /// The candidate that is a relay, and how long all others are tried before it.
    relay: Option<(SocketAddr, Duration)>,
    relay_ports: Option<RelayPortRange>,
    candidates: Vec<Candidate>,
    /// The endpoint of the last live session.
    last_good: Option<Candidate>,
    liveness: Liveness,
    up: bool,
    lost: Option<Loss>,
    attempts: Attempts,
}

impl Rotation {
    /// A peer without candidates that need not send keepalives.
    pub(crate) fn new(config: Config) -> Self {
        Self {
            config,
            candidates: Vec::new(),
            relay: None,
            relay_ports: None,
            last_good: None,
            liveness: Liveness::default(),
            up: false,
            lost: None,
            attempts: Attempts::default(),
        }
    }

    /// Sets the time without a packet that ends a session.
    pub(crate) fn set_silence(&mut self, silence: Option<Duration>) {
        self.liveness.silence = silence;
    }

    /// Sets which candidate is a relay, and how long all others are tried at most before it.
    pub(crate) fn set_relay(&mut self, relay: Option<(SocketAddr, Duration)>) {
        self.relay = relay;
    }

    /// Sets which endpoints are UDP ports of the relay.
    pub(crate) fn set_relay_ports(&mut self, ports: Option<RelayPortRange>) {
        self.relay_ports = ports;
    }

    /// Replaces the candidates, best first. While the peer is not up, an untried candidate that now ranks above the
    /// one being tried is tried at once, and so is any new one when all others have failed: to open two NATs, both
    /// sides must begin together.
    pub(crate) fn set_candidates(&mut self, now: Duration, candidates: Vec<Candidate>) {
        let mut seen = BTreeSet::new();
        let candidates: Vec<Candidate> = candidates
            .into_iter()
            .map(canonical_candidate)
            .filter(|candidate| seen.insert(candidate.address))
            .collect();
        let before = std::mem::replace(&mut self.candidates, candidates);
        self.attempts.urgent = self.attempts.urgent.filter(|urgent| seen.contains(urgent));
        let attempt = self.attempts.current.filter(|attempt| !attempt.is_before);
        if let Some(attempt) = attempt.filter(|_| !self.is_alive(now)) {
            let promoted = self.promoted_candidate(&before, attempt.candidate.address);
            self.attempts.urgent = self.attempts.urgent.or(promoted);
        }
    }

    fn promoted_candidate(&self, before: &[Candidate], current: SocketAddr) -> Option<SocketAddr> {
        let rank = |list: &[Candidate], address| list.iter().position(|c| c.address == address);
        let current_before = rank(before, current);
        let current_now = rank(&self.candidates, current);
        let untried = self.candidates.iter().filter(|candidate| !self.attempts.contain(candidate.address));
        let is_promoted = |candidate: &&Candidate| {
            let rank_before = rank(before, candidate.address);
            let rank_now = rank(&self.candidates, candidate.address);
            // A candidate that already ranked above keeps its place in the rotation.
            let rose = rank_before.is_none_or(|rank| current_before.is_some_and(|current| rank > current));
            let above = current_now.is_none_or(|current| rank_now < Some(current));
            rose && (above || (rank_before.is_none() && self.attempts.round > 0))
        };
        untried.into_iter().find(is_promoted).map(|candidate| candidate.address)
    }

    /// Takes the device's state of the peer.
    pub(crate) fn observe(&mut self, now: Duration, observation: Observation) {
        let observation = Observation { endpoint: observation.endpoint.map(canonical), ..observation };
        let before = self.liveness.device.and_then(|device| device.endpoint);
        let received = self.liveness.observe(now, observation);
        self.update_roamed(now, observation.endpoint, before, received);
        self.update_state(now);
    }

    /// An authenticated packet came from an endpoint other than the one being tried. The device already uses it: it gets
    /// an attempt of its own, once a round, without being set.
    fn update_roamed(
        &mut self,
        now: Duration,
        endpoint: Option<SocketAddr>,
        before: Option<SocketAddr>,
        received: bool,
    ) {
        let (Some(attempt), Some(endpoint)) = (self.attempts.current, endpoint) else { return };
        let moved = before != Some(endpoint);
        let elsewhere = endpoint != attempt.candidate.address && (moved || received);
        if elsewhere && !self.attempts.contain_in_this_round(endpoint) {
            self.attempts.record(endpoint);
            let candidate = self.candidate_at(endpoint);
            self.attempts.current = Some(Attempt { candidate, since: now, is_before: false, ..attempt });
        }
    }

    fn update_state(&mut self, now: Duration) {
        let alive = self.is_alive(now);
        if alive {
            if let Some(endpoint) = self.liveness.device.and_then(|device| device.endpoint) {
                self.last_good = Some(self.candidate_at(endpoint));
            }
            self.lost = None;
            self.attempts = Attempts::default();
        } else if self.up {
            self.lost = Some(self.loss(now));
            self.attempts = Attempts::default();
        }
        self.up = alive;
    }

    /// The endpoint to set now, if any. `None` before the first observation.
    pub(crate) fn poll(&mut self, now: Duration) -> Option<SocketAddr> {
        self.liveness.device?;
        self.update_state(now);
        if self.up {
            return None;
        }
        if let (Some((relay, timeout)), Some(began)) = (self.relay, self.attempts.began)
            && now.saturating_sub(began) >= timeout
            && !self.attempts.contain(relay)
        {
            self.attempts.urgent = Some(relay);
        }
        let due = self.attempts.current.is_none_or(|attempt| now >= self.deadline(&attempt));
        if !due && self.attempts.urgent.is_none() {
            return None;
        }
        let before = self.relay_before_candidates();
        let is_before = before.is_some();
        let next = before.or_else(|| self.next_candidate());
        self.attempts.began.get_or_insert(now);
        let attempt = next.map(|(candidate, reason)| Attempt { candidate, reason, since: now, is_before });
        self.attempts.current = attempt;
        let address = attempt?.candidate.address;
        if !is_before {
            self.attempts.record(address);
        }
        Some(address)
    }

    /// The relay, when the rotation is about to begin and knows nothing that has ever worked.
    fn relay_before_candidates(&self) -> Option<(Candidate, EndpointReason)> {
        let is_new =
            self.attempts.began.is_none() && self.last_good.is_none() && !self.config.relay_attempt.is_zero();
        let (relay, _) = self.relay.filter(|_| is_new)?;
        Some((self.candidate_at(relay), EndpointReason::NextCandidate))
    }

    /// The candidate being tried.
    pub(crate) fn attempt(&self) -> Option<&Attempt> {
        self.attempts.current.as_ref()
    }

    fn next_candidate(&mut self) -> Option<(Candidate, EndpointReason)> {
        let urgent = self.attempts.urgent.take();
        if let Some(urgent) = self.candidates.iter().find(|candidate| Some(candidate.address) == urgent) {
            return Some((*urgent, EndpointReason::NewCandidate));
        }
        let untried = |this: &Self| {
            let is_untried = |candidate: &Candidate| !this.attempts.contain_in_this_round(candidate.address);
            let candidate = this.ordered_candidates().into_iter().find(is_untried)?;
            let is_last_good = this.last_good.is_some_and(|last| last.address == candidate.address);
            let reason = if is_last_good { EndpointReason::LastGood } else { EndpointReason::NextCandidate };
            Some((candidate, reason))
        };
        if let Some(candidate) = untried(self) {
            return Some(candidate);
        }
        if self.ordered_candidates().is_empty() {
            return None;
        }
        self.attempts.round = self.attempts.round.saturating_add(1);
        untried(self)
    }

    /// The last good endpoint, then the other candidates in order. A last good endpoint that is no candidate any more
    /// (a mapping of a NAT) is only tried in the fast rounds, or when there is nothing else.
    fn ordered_candidates(&self) -> Vec<Candidate> {
        let last_good = self.last_good.filter(|last| {
            self.candidates.is_empty()
                || self.attempts.round < self.config.fast_rounds
                || self.candidates.iter().any(|candidate| candidate.address == last.address)
        });
        let first = last_good.map(|last| last.address);
        let rest = self.candidates.iter().filter(|candidate| Some(candidate.address) != first);
        first.map(|address| self.candidate_at(address)).into_iter().chain(rest.copied()).collect()
    }

    fn candidate_at(&self, address: SocketAddr) -> Candidate {
        if self.relay_ports.is_some_and(|ports| ports.contains(address)) {
            return Candidate { address, source: Source::Relay };
        }
        let candidate = self.candidates.iter().find(|candidate| candidate.address == address);
        let known = candidate.or(self.last_good.as_ref().filter(|last| last.address == address));
        known.copied().unwrap_or(Candidate { address, source: Source::Roamed })
    }

    fn deadline(&self, attempt: &Attempt) -> Duration {
        let window = if attempt.is_before {
            self.config.relay_attempt
        } else if self.attempts.round < self.config.fast_rounds {
            self.config.attempt
        } else {
            let mut random = SmallRng::seed_from_u64(self.config.seed ^ u64::from(self.attempts.round));
            let away = attempt.since.saturating_sub(self.attempts.began.unwrap_or(attempt.since));
            let slow = (away / 20).min(self.config.max_attempt).max(self.config.slow_attempt);
            slow.saturating_mul(random.random_range(256..384)) / 256
        };
        attempt.since.saturating_add(window)
    }

    fn loss(&self, now: Duration) -> Loss {
        if self.is_expired(now) { Loss::Expired } else { Loss::Silent }
    }

    /// Whether the session is over without a new handshake.
    pub(crate) fn is_expired(&self, now: Duration) -> bool {
        self.liveness.is_expired(now, &self.config)
    }

    fn is_alive(&self, now: Duration) -> bool {
        !self.is_expired(now) && !self.liveness.is_silent(now, &self.config)
    }

    /// Time at which to observe and poll next, if nothing happens before. `None` when only an observation or a candidate can
    /// change anything: before the first observation, or without any candidate.
    pub(crate) fn next_wakeup(&self, now: Duration) -> Option<Duration> {
        self.liveness.device?;
        if self.is_alive(now) {
            // One tick later than the last moment of the session.
            let tick = Duration::from_millis(1);
            return self.liveness.ends(&self.config).map(|at| at.saturating_add(tick));
        }
        if self.ordered_candidates().is_empty() {
            return None;
        }
        let attempt = self.attempts.current.filter(|_| self.attempts.urgent.is_none());
        let end = attempt.map_or(now, |attempt| self.deadline(&attempt));
        Some(end.max(now))
    }
}

fn canonical_candidate(candidate: Candidate) -> Candidate {
    Candidate { address: canonical(candidate.address), ..candidate }
}

#[cfg(test)]
mod tests;

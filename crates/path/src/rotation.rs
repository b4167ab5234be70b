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

mod status;

pub use status::{Reason, State, Status};

/// Durations of a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// How long each candidate is tried in the first rounds. WireGuard sends a handshake at most every 5 s and up to a
    /// third of a second (`REKEY_TIMEOUT` and jitter): a shorter attempt may pass without a handshake, unless the caller
    /// forces one whenever it sets an endpoint.
    pub attempt: Duration,
    /// How long each is tried after that, at first; a peer that stays away for a day costs next to nothing. It is stretched
    /// by up to a half, differently each round: two nodes that rotate at the same pace might otherwise never try each other
    /// at the same time.
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
    /// How long a peer that has not been reached yet is tried by way of its relay before its candidates; zero for not at all. What a relay
    /// cannot pass on at once is held there, whereas an initiation to a candidate that does not work costs 5 s (`REKEY_TIMEOUT`). So
    /// this is of use unless the caller forces handshakes.
    pub relay_attempt: Duration,
    /// Differs between nodes and between peers: the stretching is drawn from it.
    pub seed: u64,
}

/// Sent bytes that need no answer: two persistent keepalives of 32 bytes each.
const MAX_UNANSWERED_BYTES: u64 = 64;

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

/// The WireGuard device's state of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Observation {
    /// Where packets go now.
    pub endpoint: Option<SocketAddr>,
    /// Time since the last completed handshake.
    pub handshake_age: Option<Duration>,
    /// Bytes received from the peer, authenticated, since it was added to the device.
    pub rx_bytes: u64,
    /// Bytes sent to the peer since then.
    pub tx_bytes: u64,
}

/// Why an endpoint is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndpointReason {
    /// A live session moves there: it answers probes faster, or is configured or inside this site.
    BetterPath,
    /// A birthday attempt has found it.
    BirthdayAttack,
    /// The last live session used it.
    LastGood,
    /// It has just appeared, or risen above the candidate being tried.
    NewCandidate,
    /// The rotation has reached it.
    NextCandidate,
    /// It answers probes, and the path of the live session stopped to.
    PathFailed,
    /// It answers probes, and there is no live session.
    ProbeAnswered,
}

impl EndpointReason {
    /// All of them, for metrics that name each.
    pub const ALL: [Self; 7] = [
        Self::BetterPath,
        Self::BirthdayAttack,
        Self::LastGood,
        Self::NewCandidate,
        Self::NextCandidate,
        Self::PathFailed,
        Self::ProbeAnswered,
    ];

    /// The reason as one CamelCase word.
    pub fn name(self) -> &'static str {
        match self {
            Self::BetterPath => "BetterPath",
            Self::BirthdayAttack => "BirthdayAttack",
            Self::LastGood => "LastGood",
            Self::NewCandidate => "NewCandidate",
            Self::NextCandidate => "NextCandidate",
            Self::PathFailed => "PathFailed",
            Self::ProbeAnswered => "ProbeAnswered",
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Attempt {
    pub(crate) candidate: Candidate,
    pub(crate) reason: EndpointReason,
    since: Duration,
    /// By way of the relay, before the first round.
    is_before: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    Expired,
    Silent,
}

/// The rotation of one peer.
#[derive(Debug, Clone)]
pub(crate) struct Rotation {
    config: Config,
    /// See [`crate::PeerPaths::silence`].
    silence: Option<Duration>,
    /// The candidate that is a relay, and how long all others are tried before it.
    relay: Option<(SocketAddr, Duration)>,
    relay_ports: Option<RelayPortRange>,
    candidates: Vec<Candidate>,
    /// The endpoint of the last live session.
    last_good: Option<Candidate>,
    /// The last observation; nothing is decided before the first.
    device: Option<Observation>,
    handshake: Option<Duration>,
    /// When the peer's last packet was observed.
    received: Option<Duration>,
    /// The device's count of sent bytes at that time.
    sent_when_received: u64,
    /// When an answer to more than keepalives became outstanding.
    unanswered_since: Option<Duration>,
    up: bool,
    lost: Option<Loss>,
    attempt: Option<Attempt>,
    /// When the first attempt began.
    began: Option<Duration>,
    /// To be tried before all others: it has just appeared.
    urgent: Option<SocketAddr>,
    round: u32,
    /// What was tried since the rotation began, with the round of the last attempt. A list: there are few, for each of
    /// thousands of peers.
    tried: Vec<(SocketAddr, u32)>,
}

impl Rotation {
    /// A peer without candidates that need not send keepalives.
    pub(crate) fn new(config: Config) -> Self {
        Self {
            config,
            candidates: Vec::new(),
            silence: None,
            relay: None,
            relay_ports: None,
            last_good: None,
            device: None,
            handshake: None,
            received: None,
            sent_when_received: 0,
            unanswered_since: None,
            up: false,
            lost: None,
            attempt: None,
            began: None,
            urgent: None,
            round: 0,
            tried: Vec::new(),
        }
    }

    /// Sets the time without a packet that ends a session.
    pub(crate) fn set_silence(&mut self, silence: Option<Duration>) {
        self.silence = silence;
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
        self.urgent = self.urgent.filter(|urgent| seen.contains(urgent));
        let attempt = self.attempt.filter(|attempt| !attempt.is_before);
        if let Some(attempt) = attempt.filter(|_| !self.is_alive(now)) {
            self.urgent = self.urgent.or(self.promoted_candidate(&before, attempt.candidate.address));
        }
    }

    fn promoted_candidate(&self, before: &[Candidate], current: SocketAddr) -> Option<SocketAddr> {
        let rank = |list: &[Candidate], address| list.iter().position(|c| c.address == address);
        let (current_before, current_now) = (rank(before, current), rank(&self.candidates, current));
        let untried = self.candidates.iter().filter(|candidate| !self.was_tried(candidate.address));
        let is_promoted = |candidate: &&Candidate| {
            let rank_before = rank(before, candidate.address);
            let rank_now = rank(&self.candidates, candidate.address);
            // A candidate that already ranked above keeps its place in the rotation.
            let rose = rank_before.is_none_or(|rank| current_before.is_some_and(|current| rank > current));
            let above = current_now.is_none_or(|current| rank_now < Some(current));
            rose && (above || (rank_before.is_none() && self.round > 0))
        };
        untried.into_iter().find(is_promoted).map(|candidate| candidate.address)
    }

    /// Takes the device's state of the peer.
    pub(crate) fn observe(&mut self, now: Duration, observation: Observation) {
        let observation = Observation { endpoint: observation.endpoint.map(canonical), ..observation };
        let handshake = observation.handshake_age.map(|age| now.saturating_sub(age));
        // Ages are rounded: the same handshake may seem to move by a second.
        let newer = handshake > self.handshake.map(|known| known.saturating_add(Duration::from_secs(2)));
        // A recreated device counts from zero.
        let received = match self.device {
            Some(before) if observation.rx_bytes < before.rx_bytes => observation.rx_bytes > 0,
            Some(before) => observation.rx_bytes > before.rx_bytes,
            // The first observation shows a session of another process: it counts as alive.
            None => handshake.is_some(),
        };
        if received || newer {
            self.received = Some(now);
        }
        self.update_unanswered(now, observation.tx_bytes, received || newer);
        if newer || handshake.is_none() {
            self.handshake = handshake;
        }
        self.update_roamed(now, &observation, received);
        self.device = Some(observation);
        self.update_state(now);
    }

    fn update_unanswered(&mut self, now: Duration, sent: u64, received: bool) {
        // A recreated device counts from zero.
        if received || sent < self.sent_when_received {
            self.sent_when_received = sent;
            self.unanswered_since = None;
        } else if sent.saturating_sub(self.sent_when_received) > MAX_UNANSWERED_BYTES {
            self.unanswered_since.get_or_insert(now);
        }
    }

    /// An authenticated packet came from an endpoint other than the one being tried. The device already uses it: it gets
    /// an attempt of its own, once a round, without being set.
    fn update_roamed(&mut self, now: Duration, observation: &Observation, received: bool) {
        let (Some(attempt), Some(endpoint)) = (self.attempt, observation.endpoint) else { return };
        let moved = self.device.is_none_or(|before| before.endpoint != Some(endpoint));
        let elsewhere = endpoint != attempt.candidate.address && (moved || received);
        if elsewhere && !self.was_tried_this_round(endpoint) {
            self.record_attempt(endpoint);
            let candidate = self.candidate_at(endpoint);
            self.attempt = Some(Attempt { candidate, since: now, is_before: false, ..attempt });
        }
    }

    fn update_state(&mut self, now: Duration) {
        let alive = self.is_alive(now);
        if alive {
            if let Some(endpoint) = self.device.and_then(|device| device.endpoint) {
                self.last_good = Some(self.candidate_at(endpoint));
            }
            self.lost = None;
            self.restart();
        } else if self.up {
            self.lost = Some(self.loss(now));
            self.restart();
        }
        self.up = alive;
    }

    fn restart(&mut self) {
        self.attempt = None;
        self.began = None;
        self.urgent = None;
        self.round = 0;
        self.tried.clear();
    }

    /// The endpoint to set now, if any. `None` before the first observation.
    pub(crate) fn poll(&mut self, now: Duration) -> Option<SocketAddr> {
        self.device?;
        self.update_state(now);
        if self.up {
            return None;
        }
        if let (Some((relay, timeout)), Some(began)) = (self.relay, self.began)
            && now.saturating_sub(began) >= timeout
            && !self.was_tried(relay)
        {
            self.urgent = Some(relay);
        }
        let due = self.attempt.is_none_or(|attempt| now >= self.deadline(&attempt));
        if !due && self.urgent.is_none() {
            return None;
        }
        let before = self.relay_before_candidates();
        let is_before = before.is_some();
        let next = before.or_else(|| self.next_candidate());
        self.began.get_or_insert(now);
        self.attempt = next.map(|(candidate, reason)| Attempt { candidate, reason, since: now, is_before });
        let address = self.attempt?.candidate.address;
        if !is_before {
            self.record_attempt(address);
        }
        Some(address)
    }

    /// The relay, when the rotation is about to begin and knows nothing that has ever worked.
    fn relay_before_candidates(&self) -> Option<(Candidate, EndpointReason)> {
        let is_new = self.began.is_none() && self.last_good.is_none() && !self.config.relay_attempt.is_zero();
        let (relay, _) = self.relay.filter(|_| is_new)?;
        Some((self.candidate_at(relay), EndpointReason::NextCandidate))
    }

    fn record_attempt(&mut self, address: SocketAddr) {
        match self.tried.iter_mut().find(|(tried, _)| *tried == address) {
            Some((_, round)) => *round = self.round,
            None => self.tried.push((address, self.round)),
        }
    }

    fn was_tried(&self, address: SocketAddr) -> bool {
        self.tried.iter().any(|(tried, _)| *tried == address)
    }

    fn was_tried_this_round(&self, address: SocketAddr) -> bool {
        self.tried.contains(&(address, self.round))
    }

    /// The candidate being tried.
    pub(crate) fn attempt(&self) -> Option<&Attempt> {
        self.attempt.as_ref()
    }

    fn next_candidate(&mut self) -> Option<(Candidate, EndpointReason)> {
        let urgent = self.urgent.take();
        if let Some(urgent) = self.candidates.iter().find(|candidate| Some(candidate.address) == urgent) {
            return Some((*urgent, EndpointReason::NewCandidate));
        }
        let untried = |this: &Self| {
            let is_untried = |candidate: &Candidate| !this.was_tried_this_round(candidate.address);
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
        self.round = self.round.saturating_add(1);
        untried(self)
    }

    /// The last good endpoint, then the other candidates in order. A last good endpoint that is no candidate any more
    /// (a mapping of a NAT) is only tried in the fast rounds, or when there is nothing else.
    fn ordered_candidates(&self) -> Vec<Candidate> {
        let last_good = self.last_good.filter(|last| {
            self.candidates.is_empty()
                || self.round < self.config.fast_rounds
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
        } else if self.round < self.config.fast_rounds {
            self.config.attempt
        } else {
            let mut random = SmallRng::seed_from_u64(self.config.seed ^ u64::from(self.round));
            let away = attempt.since.saturating_sub(self.began.unwrap_or(attempt.since));
            let slow = (away / 20).min(self.config.max_attempt).max(self.config.slow_attempt);
            slow.saturating_mul(random.random_range(256..384)) / 256
        };
        attempt.since.saturating_add(window)
    }

    fn loss(&self, now: Duration) -> Loss {
        if self.is_expired(now) { Loss::Expired } else { Loss::Silent }
    }

    /// A peer that sends no keepalives has nothing to shake hands for while nothing is sent.
    pub(crate) fn is_expired(&self, now: Duration) -> bool {
        let is_old = |at| self.silence.is_some() && now.saturating_sub(at) > self.config.session_lifetime;
        self.handshake.is_none_or(is_old)
    }

    fn is_silent(&self, now: Duration) -> bool {
        let longer = |since: Option<Duration>, limit| since.is_some_and(|at| now.saturating_sub(at) > limit);
        longer(self.unanswered_since, self.config.unanswered)
            || self.silence.is_some_and(|limit| self.received.is_none() || longer(self.received, limit))
    }

    fn is_alive(&self, now: Duration) -> bool {
        !self.is_expired(now) && !self.is_silent(now)
    }

    /// When to observe and poll next, if nothing happens before. `None` when only an observation or a candidate can
    /// change anything: before the first observation, or without any candidate.
    pub(crate) fn next_wakeup(&self, now: Duration) -> Option<Duration> {
        self.device?;
        if self.is_alive(now) {
            // One tick later than the last moment of the session.
            let tick = Duration::from_millis(1);
            let expires = self.handshake.filter(|_| self.silence.is_some());
            let expires = expires.map(|at| at.saturating_add(self.config.session_lifetime));
            let silent = self.received.zip(self.silence).map(|(at, limit)| at.saturating_add(limit));
            let unanswered = self.unanswered_since.map(|at| at.saturating_add(self.config.unanswered));
            let first = expires.into_iter().chain(silent).chain(unanswered).min();
            return first.map(|at| at.saturating_add(tick));
        }
        if self.ordered_candidates().is_empty() {
            return None;
        }
        let end =
            self.attempt.filter(|_| self.urgent.is_none()).map_or(now, |attempt| self.deadline(&attempt));
        Some(end.max(now))
    }
}

fn canonical_candidate(candidate: Candidate) -> Candidate {
    Candidate { address: canonical(candidate.address), ..candidate }
}

#[cfg(test)]
mod tests;

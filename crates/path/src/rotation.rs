//! One peer: which endpoint to set, when, and why it is not up.
//!
//! The caller observes the device (about once a second while [`State::Up`] is not reached, rarer afterwards), then
//! polls; whatever [`Rotation::poll`] returns is to be set as the peer's endpoint at once, with a handshake forced if
//! the device can. It sleeps until [`Rotation::next_wakeup`] and observes again before it polls.
//!
//! What is never done: touch the endpoint of a live session. A peer that came to us first, or moved, stays where it is.

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use crate::addresses::canonical;
use crate::candidates::{Candidate, Source};

/// Durations of a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// How long each candidate is tried in the first rounds. WireGuard sends a handshake at most every 5 s and up to a
    /// third of a second (`REKEY_TIMEOUT` and jitter): with less, some candidates would see none, unless the caller
    /// forces one whenever it sets an endpoint.
    pub attempt: Duration,
    /// How long each is tried after that. It is stretched by up to a half, differently each round: two nodes that
    /// rotate at the same pace might otherwise never try each other at the same time.
    pub slow_attempt: Duration,
    /// Rounds through all candidates before slowing down and calling the peer down.
    pub fast_rounds: u32,
    /// How old a handshake may be before the session is dead: WireGuard's `REJECT_AFTER_TIME` and a margin.
    pub session_lifetime: Duration,
    /// How long nothing may come from the peer before the session is dead. `None` for peers that send no keepalives.
    pub silence: Option<Duration>,
    /// How long more than keepalives may go to the peer without anything coming back before the session is dead.
    /// A living peer answers with a keepalive within 10 s if it has nothing else to send (`KEEPALIVE_TIMEOUT`). Should
    /// just that one get lost, no harm is done: the first endpoint to be tried is the one in use.
    pub unanswered: Duration,
    /// Any number, different on each node and for each peer: what the stretching is drawn from.
    pub seed: u64,
}

/// Bytes that are no question: two persistent keepalives (32 bytes each), which nobody answers.
const KEEPALIVES: u64 = 64;

impl Default for Config {
    /// 5.5 s for two rounds, 15 s afterwards; dead after 195 s without handshake, 60 s without a packet (two keepalives
    /// of 25 s and a margin), or 12 s without an answer.
    fn default() -> Self {
        Self {
            attempt: Duration::from_millis(5500),
            slow_attempt: Duration::from_secs(15),
            fast_rounds: 2,
            session_lifetime: Duration::from_secs(195),
            silence: Some(Duration::from_secs(60)),
            unanswered: Duration::from_secs(12),
            seed: 0,
        }
    }
}

/// What the device says of the peer.
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

/// The endpoint that worked last. Worth keeping across restarts: see [`Rotation::new`].
pub type Worked = Candidate;

/// How a peer is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// A session is alive.
    Up,
    /// Endpoints are being tried.
    Connecting,
    /// There is nothing to try, or everything has been tried [`Config::fast_rounds`] times; it goes on slowly.
    Down,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Up => "up",
            Self::Connecting => "connecting",
            Self::Down => "down",
        })
    }
}

/// For users: `fairlead status`, Events, the peer resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// How it is doing.
    pub state: State,
    /// Where packets go now.
    pub endpoint: Option<SocketAddr>,
    /// Where that endpoint comes from.
    pub source: Option<Source>,
    /// A sentence that says why.
    pub reason: String,
}

#[derive(Debug, Clone, Copy)]
struct Attempt {
    candidate: Candidate,
    since: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    Silence,
    Expired,
}

/// The state machine of one peer.
#[derive(Debug, Clone)]
pub struct Rotation {
    config: Config,
    candidates: Vec<Candidate>,
    worked: Option<Worked>,
    /// What the device said last; nothing is decided before it has spoken.
    device: Option<Observation>,
    handshake: Option<Duration>,
    heard: Option<Duration>,
    /// What had been sent when the peer was last heard.
    sent_when_heard: u64,
    /// Since when more than keepalives waits for an answer.
    asking: Option<Duration>,
    up: bool,
    lost: Option<Loss>,
    attempt: Option<Attempt>,
    /// To be tried before anything else: just appeared.
    urgent: Option<SocketAddr>,
    round: u32,
    tried_this_round: BTreeSet<SocketAddr>,
    tried: BTreeSet<SocketAddr>,
}

impl Rotation {
    /// A peer nothing is known of but, perhaps, where it was reached before ([`Self::worked`] of an earlier run).
    pub fn new(config: Config, worked: Option<Worked>) -> Self {
        Self {
            config,
            candidates: Vec::new(),
            worked: worked.map(|worked| Candidate { address: canonical(worked.address), ..worked }),
            device: None,
            handshake: None,
            heard: None,
            sent_when_heard: 0,
            asking: None,
            up: false,
            lost: None,
            attempt: None,
            urgent: None,
            round: 0,
            tried_this_round: BTreeSet::new(),
            tried: BTreeSet::new(),
        }
    }

    /// Replaces the candidates, best first. While the peer is not up, one that was never tried and has now come to
    /// stand above the one being tried is tried at once, and so is any new one when all others have failed: to open
    /// two NATs, both sides must begin together.
    pub fn set_candidates(&mut self, now: Duration, candidates: Vec<Candidate>) {
        let mut seen = BTreeSet::new();
        let candidates: Vec<Candidate> = candidates
            .into_iter()
            .map(|candidate| Candidate { address: canonical(candidate.address), ..candidate })
            .filter(|candidate| seen.insert(candidate.address))
            .collect();
        let before = std::mem::replace(&mut self.candidates, candidates);
        self.urgent = self.urgent.filter(|urgent| seen.contains(urgent));
        if let Some(attempt) = self.attempt.filter(|_| !self.is_alive(now)) {
            self.urgent = self.urgent.or(self.overtaking(&before, attempt.candidate.address));
        }
    }

    fn overtaking(&self, before: &[Candidate], current: SocketAddr) -> Option<SocketAddr> {
        let place = |list: &[Candidate], address| list.iter().position(|c| c.address == address);
        let (current_before, current_now) = (place(before, current), place(&self.candidates, current));
        let untried = self.candidates.iter().filter(|candidate| !self.tried.contains(&candidate.address));
        let overtakes = |candidate: &&Candidate| {
            let was = place(before, candidate.address);
            let is = place(&self.candidates, candidate.address);
            // One that stood above before had its chance to be tried first and waits for its turn.
            let rose = was.is_none_or(|was| current_before.is_some_and(|current| was > current));
            let above = current_now.is_none_or(|current| is < Some(current));
            rose && (above || (was.is_none() && self.round > 0))
        };
        untried.into_iter().find(overtakes).map(|candidate| candidate.address)
    }

    /// Takes note of what the device says.
    pub fn observe(&mut self, now: Duration, observation: Observation) {
        let observation = Observation { endpoint: observation.endpoint.map(canonical), ..observation };
        let handshake = observation.handshake_age.map(|age| now.saturating_sub(age));
        // Ages are rounded: the same handshake may seem to move by a second.
        let newer = handshake > self.handshake.map(|known| known.saturating_add(Duration::from_secs(2)));
        // A device made anew counts from zero.
        let received = match self.device {
            Some(before) if observation.rx_bytes < before.rx_bytes => observation.rx_bytes > 0,
            Some(before) => observation.rx_bytes > before.rx_bytes,
            // First sight of a session that others made: it gets the benefit of the doubt.
            None => handshake.is_some(),
        };
        if received || newer {
            self.heard = Some(now);
        }
        self.note_questions(now, observation.tx_bytes, received || newer);
        if newer || handshake.is_none() {
            self.handshake = handshake;
        }
        self.note_roaming(now, &observation, received);
        self.device = Some(observation);
        self.settle(now);
    }

    fn note_questions(&mut self, now: Duration, sent: u64, heard: bool) {
        // A device made anew counts from zero.
        if heard || sent < self.sent_when_heard {
            self.sent_when_heard = sent;
            self.asking = None;
        } else if sent.saturating_sub(self.sent_when_heard) > KEEPALIVES {
            self.asking.get_or_insert(now);
        }
    }

    /// An authenticated packet came from an endpoint that is not the one being tried: it deserves a window of its own,
    /// once a round, without being set, because it is set.
    fn note_roaming(&mut self, now: Duration, observation: &Observation, received: bool) {
        let (Some(attempt), Some(endpoint)) = (self.attempt, observation.endpoint) else { return };
        let moved = self.device.is_none_or(|before| before.endpoint != Some(endpoint));
        let elsewhere = endpoint != attempt.candidate.address && (moved || received);
        if elsewhere && self.tried_this_round.insert(endpoint) {
            self.tried.insert(endpoint);
            self.attempt = Some(Attempt { candidate: self.named(endpoint), since: now });
        }
    }

    /// Follows the session up and down.
    fn settle(&mut self, now: Duration) {
        let alive = self.is_alive(now);
        if alive {
            if let Some(endpoint) = self.device.and_then(|device| device.endpoint) {
                self.worked = Some(self.named(endpoint));
            }
            self.lost = None;
            self.start_over();
        } else if self.up {
            self.lost = Some(if self.is_expired(now) { Loss::Expired } else { Loss::Silence });
            self.start_over();
        }
        self.up = alive;
    }

    fn start_over(&mut self) {
        self.attempt = None;
        self.urgent = None;
        self.round = 0;
        self.tried_this_round.clear();
        self.tried.clear();
    }

    /// The endpoint to set now, if any. Nothing before the first observation.
    pub fn poll(&mut self, now: Duration) -> Option<SocketAddr> {
        self.device?;
        self.settle(now);
        if self.up {
            return None;
        }
        let due = self.attempt.is_none_or(|attempt| now >= self.ends(&attempt));
        if !due && self.urgent.is_none() {
            return None;
        }
        let next = self.next();
        self.attempt = next.map(|candidate| Attempt { candidate, since: now });
        let address = next?.address;
        self.tried_this_round.insert(address);
        self.tried.insert(address);
        Some(address)
    }

    fn next(&mut self) -> Option<Candidate> {
        let urgent = self.urgent.take();
        if let Some(urgent) = self.candidates.iter().find(|candidate| Some(candidate.address) == urgent) {
            return Some(*urgent);
        }
        let untried = |this: &Self| {
            this.turns().into_iter().find(|candidate| !this.tried_this_round.contains(&candidate.address))
        };
        if let Some(candidate) = untried(self) {
            return Some(candidate);
        }
        if self.turns().is_empty() {
            return None;
        }
        self.tried_this_round.clear();
        self.round = self.round.saturating_add(1);
        untried(self)
    }

    /// What worked last, then the rest in order. An endpoint that worked but is not named any more (a mapping of a
    /// NAT) is only tried in the fast rounds, or when there is nothing else.
    fn turns(&self) -> Vec<Candidate> {
        let worked = self.worked.filter(|worked| {
            self.candidates.is_empty()
                || self.round < self.config.fast_rounds
                || self.candidates.iter().any(|candidate| candidate.address == worked.address)
        });
        let first = worked.map(|worked| worked.address);
        let rest = self.candidates.iter().filter(|candidate| Some(candidate.address) != first);
        worked.map(|worked| self.named(worked.address)).into_iter().chain(rest.copied()).collect()
    }

    fn named(&self, address: SocketAddr) -> Candidate {
        let named = self.candidates.iter().find(|candidate| candidate.address == address);
        let known = named.or(self.worked.as_ref().filter(|worked| worked.address == address));
        known.copied().unwrap_or(Candidate { address, source: Source::Roamed })
    }

    fn ends(&self, attempt: &Attempt) -> Duration {
        let window = if self.round < self.config.fast_rounds {
            self.config.attempt
        } else {
            let draw = mix(self.config.seed ^ u64::from(self.round)) % 128;
            self.config.slow_attempt.saturating_mul(u32::try_from(draw).unwrap_or(0).saturating_add(256))
                / 256
        };
        attempt.since.saturating_add(window)
    }

    fn is_expired(&self, now: Duration) -> bool {
        self.handshake.is_none_or(|at| now.saturating_sub(at) > self.config.session_lifetime)
    }

    fn is_silent(&self, now: Duration) -> bool {
        let longer = |since: Option<Duration>, limit| since.is_some_and(|at| now.saturating_sub(at) > limit);
        longer(self.asking, self.config.unanswered)
            || self.config.silence.is_some_and(|limit| self.heard.is_none() || longer(self.heard, limit))
    }

    fn is_alive(&self, now: Duration) -> bool {
        !self.is_expired(now) && !self.is_silent(now)
    }

    /// When to observe and poll next, if nothing happens before. `None` when only news can change anything: before the
    /// first observation, or without any candidate.
    pub fn next_wakeup(&self, now: Duration) -> Option<Duration> {
        self.device?;
        if self.is_alive(now) {
            // One tick later than the last moment that is still good.
            let tick = Duration::from_millis(1);
            let expires = self.handshake.map(|at| at.saturating_add(self.config.session_lifetime));
            let silent = self.heard.zip(self.config.silence).map(|(at, limit)| at.saturating_add(limit));
            let given_up = self.asking.map(|at| at.saturating_add(self.config.unanswered));
            let first = expires.into_iter().chain(silent).chain(given_up).min();
            return first.map(|at| at.saturating_add(tick));
        }
        if self.turns().is_empty() {
            return None;
        }
        let end = self.attempt.filter(|_| self.urgent.is_none()).map_or(now, |attempt| self.ends(&attempt));
        Some(end.max(now))
    }

    /// The endpoint that worked last, to be kept and given to [`Self::new`] after a restart.
    pub fn worked(&self) -> Option<Worked> {
        self.worked
    }

    /// How the peer is doing, for users.
    pub fn status(&self, now: Duration) -> Status {
        let device = self.device.and_then(|device| device.endpoint);
        if self.is_alive(now) {
            let age = self.handshake.map_or(Duration::ZERO, |at| now.saturating_sub(at)).as_secs();
            let via = device.map_or_else(String::new, |endpoint| format!(" over {}", self.named(endpoint)));
            let source = device.map(|endpoint| self.named(endpoint).source);
            return Status {
                state: State::Up,
                endpoint: device,
                source,
                reason: format!("handshake {age} s ago{via}"),
            };
        }
        let trying = self.attempt.map(|attempt| attempt.candidate);
        let shown = trying.or(device.map(|endpoint| self.named(endpoint)));
        let exhausted = self.round >= self.config.fast_rounds || self.turns().is_empty();
        Status {
            state: if exhausted { State::Down } else { State::Connecting },
            endpoint: shown.map(|candidate| candidate.address),
            source: shown.map(|candidate| candidate.source),
            reason: self.reason(now, trying),
        }
    }

    fn reason(&self, now: Duration, trying: Option<Candidate>) -> String {
        let mut parts = Vec::new();
        // The loss may have happened since the last poll.
        let lost =
            self.lost.or(self.up.then(|| if self.is_expired(now) { Loss::Expired } else { Loss::Silence }));
        match (lost, self.heard, self.handshake) {
            (Some(Loss::Silence), Some(heard), _) => {
                parts.push(format!("no packet for {} s", now.saturating_sub(heard).as_secs()));
            }
            (Some(_), _, Some(at)) => {
                parts.push(format!("no handshake for {} s", now.saturating_sub(at).as_secs()));
            }
            (Some(_), ..) => parts.push("its session is gone".to_owned()),
            (None, ..) => {}
        }
        let failed = self.tried.len().saturating_sub(usize::from(self.round == 0 && trying.is_some()));
        let endpoints = if failed == 1 { "endpoint" } else { "endpoints" };
        if failed > 0 {
            parts.push(format!("tried {failed} {endpoints}, no handshake yet"));
        }
        match trying {
            Some(candidate) => parts.push(format!("trying {candidate}")),
            None if self.device.is_none() => {
                parts.push("the WireGuard device has not been read yet".to_owned())
            }
            None if self.turns().is_empty() => parts.push(
                "no candidate endpoint known: the node has published none and no peer has seen it".to_owned(),
            ),
            None => parts.push("about to try its endpoints".to_owned()),
        }
        parts.join("; ")
    }
}

/// Scrambles a number (the finalizer of splitmix64).
fn mix(number: u64) -> u64 {
    let mut x = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests;

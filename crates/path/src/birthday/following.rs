//! Behind one of two symmetric NATs, the node that does not choose: it tries ports, which opens its own, and the peer finds one of them.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::BirthdayOutcome;
use super::confirming::Confirming;
use super::limits::{LAST_ANSWER, MAX_ATTEMPT, MAX_SILENCE};
use super::ports::Volley;

/// The requests of this node, and where the peer has reached it.
#[derive(Debug)]
pub(super) struct Following {
    since: Duration,
    volley: Volley,
    pub(super) reached: Confirming<SocketAddr>,
    /// Time at which the peer last said that it takes part.
    heard: Duration,
}

impl Following {
    pub(super) fn new(now: Duration, ip: IpAddr, ports: Vec<u16>) -> Self {
        Self { since: now, volley: Volley::new(now, ip, ports), reached: Confirming::new(), heard: now }
    }

    /// The peer takes part.
    pub(super) fn hear(&mut self, now: Duration) {
        self.heard = now;
    }

    /// The endpoints to ask now; no answer is waited for.
    pub(super) fn due(&mut self, now: Duration) -> Vec<SocketAddr> {
        if self.is_silent(now) || self.reached.has_chosen() {
            self.volley.pause(now);
            return Vec::new();
        }
        self.volley.due(now)
    }

    /// Time at which something is due next.
    pub(super) fn next(&self) -> Duration {
        let next = self.volley.next();
        if self.volley.is_over() { next.saturating_add(LAST_ANSWER).max(self.next_end()) } else { next }
    }

    /// Outcome of the attempt; `None` while it goes on.
    pub(super) fn end(&self, now: Duration) -> Option<BirthdayOutcome> {
        if now >= self.since.saturating_add(MAX_ATTEMPT) {
            return Some(BirthdayOutcome::NoPortFound);
        }
        if self.reached.has_chosen() {
            return None;
        }
        let has_ended = self.volley.is_over() && now >= self.next();
        let is_silent = !self.volley.is_over() && self.is_silent(now);
        has_ended.then_some(BirthdayOutcome::NoPortFound).or(is_silent.then_some(BirthdayOutcome::PeerSilent))
    }

    /// A port that is chosen is waited for until the end.
    fn next_end(&self) -> Duration {
        if self.reached.has_chosen() { self.since.saturating_add(MAX_ATTEMPT) } else { Duration::ZERO }
    }

    fn is_silent(&self, now: Duration) -> bool {
        now.saturating_sub(self.heard) > MAX_SILENCE
    }
}

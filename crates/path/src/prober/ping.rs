//! Pings: an operator wants to know what the paths answer now.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// Answers of the paths since a ping began.
#[derive(Debug)]
pub(super) struct Ping {
    began: Duration,
    /// Round-trip time of the first answer.
    answers: BTreeMap<SocketAddr, Duration>,
    /// Number of requests to each address.
    asked: BTreeMap<SocketAddr, u32>,
}

/// Answer of a candidate to a ping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PingOutcome {
    /// The candidate answered after this time.
    Answered(Duration),
    /// The limits on what this node sends have allowed no request so far.
    HeldBack,
    /// The candidate has not answered so far.
    Unanswered,
}

impl Ping {
    pub(super) fn new(now: Duration) -> Self {
        Self { began: now, answers: BTreeMap::new(), asked: BTreeMap::new() }
    }

    /// A request is about to be sent.
    pub(super) fn add_request(&mut self, to: SocketAddr) {
        let asked = self.asked.entry(to).or_default();
        *asked = asked.saturating_add(1);
    }

    /// A request was not sent after all.
    pub(super) fn remove_request(&mut self, to: SocketAddr) {
        if let Some(asked) = self.asked.get_mut(&to) {
            *asked = asked.saturating_sub(1);
        }
    }

    /// Takes an answer to a request that was sent at `sent`.
    pub(super) fn take_answer(&mut self, from: SocketAddr, sent: Duration, round_trip: Duration) {
        if sent >= self.began {
            self.answers.entry(from).or_insert(round_trip);
        }
    }

    pub(super) fn outcome(&self, address: SocketAddr) -> PingOutcome {
        match self.answers.get(&address) {
            Some(round_trip) => PingOutcome::Answered(*round_trip),
            None if self.asked.get(&address).is_some_and(|asked| *asked > 0) => PingOutcome::Unanswered,
            None => PingOutcome::HeldBack,
        }
    }
}

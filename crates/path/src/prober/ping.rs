//! Asks all paths now because an operator wants to know, and remembers what they answer.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::Prober;
use super::path::Path;
use crate::candidates::Candidate;

/// What the paths have answered since it began.
#[derive(Debug)]
pub(super) struct Ping {
    began: Duration,
    /// Round-trip time of the first answer.
    answers: BTreeMap<SocketAddr, Duration>,
    /// What was asked, and how often.
    asked: BTreeMap<SocketAddr, u32>,
}

/// A candidate of a peer, and what is known of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CandidateStatus {
    /// Where it leads, and where it comes from.
    pub candidate: Candidate,
    /// WireGuard sends to it.
    pub is_in_use: bool,
    /// An answer has lately proved that it works.
    pub works: bool,
    /// It passes short datagrams and loses those that are as long as WireGuard's.
    pub loses_long: bool,
    /// What became of the last [`crate::PathAgent::ping`]; `None` without one.
    pub ping: Option<PingOutcome>,
}

/// What a candidate answered to a ping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PingOutcome {
    /// It answered after this time.
    Answered(Duration),
    /// The limits on what this node sends have allowed no request so far.
    HeldBack,
    /// It has not answered so far.
    Unanswered,
}

impl Prober {
    /// Asks every path from now on, as if it were new.
    pub(crate) fn ping(&mut self, now: Duration) {
        self.ping = Some(Box::new(Ping { began: now, answers: BTreeMap::new(), asked: BTreeMap::new() }));
        // The peer is asked to try its paths as well: its NAT may let in only what it has sent to.
        self.is_joined = false;
        self.paths.iter_mut().for_each(|path| path.attempt = Some((now, 0)));
    }

    /// The limits held back a request.
    pub(crate) fn held_back(&mut self, to: SocketAddr) {
        if let Some(asked) = self.ping.as_mut().and_then(|ping| ping.asked.get_mut(&to)) {
            *asked = asked.saturating_sub(1);
        }
    }

    /// All paths, as they are at `now`.
    pub(crate) fn candidates(&self, now: Duration) -> Vec<CandidateStatus> {
        let status = |path: &Path| {
            let Path { candidate, .. } = *path;
            CandidateStatus {
                candidate,
                is_in_use: self.current == Some(candidate.address),
                works: path.is_fresh(now),
                loses_long: path.full_size.is_lost,
                ping: self.ping.as_ref().map(|ping| ping.outcome(candidate.address)),
            }
        };
        self.paths.iter().map(status).collect()
    }
}

impl Ping {
    /// A request is about to be sent.
    pub(super) fn add_request(&mut self, to: SocketAddr) {
        let asked = self.asked.entry(to).or_default();
        *asked = asked.saturating_add(1);
    }

    /// Takes an answer to a request that was sent at `sent`.
    pub(super) fn take_answer(&mut self, from: SocketAddr, sent: Duration, round_trip: Duration) {
        if sent >= self.began {
            self.answers.entry(from).or_insert(round_trip);
        }
    }

    fn outcome(&self, address: SocketAddr) -> PingOutcome {
        match self.answers.get(&address) {
            Some(round_trip) => PingOutcome::Answered(*round_trip),
            None if self.asked.get(&address).is_some_and(|asked| *asked > 0) => PingOutcome::Unanswered,
            None => PingOutcome::HeldBack,
        }
    }
}

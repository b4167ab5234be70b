//! One way to a peer: when it is asked, what it answered, and how it compares with others.

use std::time::Duration;

use fairlead_address::is_private;
use fairlead_wire::probe::TransactionId;

use super::attempt::ATTEMPT;
use super::full_size::{Due, FullSize};
use crate::candidates::{Candidate, Source};

/// Longest time to wait for an answer.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which an answer proves that a candidate works.
const FRESH: Duration = Duration::from_secs(10);
/// Requests per candidate whose answers are waited for.
const MAX_PENDING: usize = 8;
/// Least gain in round-trip time that makes another path better: a third, and this much.
const MIN_GAIN: Duration = Duration::from_millis(5);

/// Origin of an endpoint of the peer: who names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// The plan, from what is published; or the relay.
    Published,
    /// Only the source address of a request.
    Request,
    /// The peer itself, in requests over the relay; until this time.
    Signalled(Duration),
}

/// A candidate, or an address that requests of the peer came from.
#[derive(Debug, Clone)]
pub(super) struct Path {
    pub(super) candidate: Candidate,
    pub(super) origin: Origin,
    /// Start of the attempt that runs, and how many of its requests were due.
    pub(super) attempt: Option<(Duration, usize)>,
    pub(super) pending: Vec<(TransactionId, Duration)>,
    /// The smoothed round-trip time, and when the last answer came.
    pub(super) answered: Option<(Duration, Duration)>,
    /// Whether the path was in use and stopped answering.
    pub(super) has_failed: bool,
    pub(super) full_size: FullSize,
}

impl Path {
    pub(super) fn is_relay(&self) -> bool {
        self.candidate.source == Source::Relay
    }

    /// Whether it leads to the relay over UDP.
    pub(super) fn is_relay_port(&self) -> bool {
        self.is_relay() && !self.candidate.address.ip().is_loopback()
    }

    pub(super) fn new(candidate: Candidate, now: Duration) -> Self {
        Self {
            candidate,
            origin: Origin::Published,
            attempt: Some((now, 0)),
            pending: Vec::new(),
            answered: None,
            has_failed: false,
            full_size: FullSize::default(),
        }
    }

    /// The path as it is once the plan does not name it any more.
    pub(super) fn withdrawn(self) -> Self {
        let origin = match self.origin {
            Origin::Published if !self.is_relay() => Origin::Request,
            origin => origin,
        };
        Self { origin, ..self }
    }

    pub(super) fn is_fresh(&self, now: Duration) -> bool {
        self.answered.is_some_and(|(_, at)| now.saturating_sub(at) <= FRESH)
    }

    pub(super) fn has_answered_since(&self, time: Duration) -> bool {
        self.answered.is_some_and(|(_, at)| at >= time)
    }

    pub(super) fn next_request(&self) -> Option<Duration> {
        let (started, sent) = self.attempt?;
        Some(started.saturating_add(*ATTEMPT.get(sent)?))
    }

    /// Takes what is due of the attempt; after a late wake-up this is one request, not several.
    pub(super) fn attempt_is_due(&mut self, now: Duration) -> bool {
        let Some((started, sent)) = self.attempt else { return false };
        let due = ATTEMPT.iter().filter(|after| now >= started.saturating_add(**after)).count();
        self.attempt = (due < ATTEMPT.len()).then_some((started, due));
        due > sent
    }

    pub(super) fn add_pending(&mut self, now: Duration, transaction: TransactionId) {
        self.pending.retain(|(_, sent)| now.saturating_sub(*sent) <= ANSWER_TIMEOUT);
        if self.pending.len() >= MAX_PENDING {
            self.pending.remove(0);
        }
        self.pending.push((transaction, now));
    }

    /// Whether datagrams keep their length on this path: what goes over TCP has no length of its own.
    fn has_full_size(&self) -> bool {
        !self.is_relay() || self.is_relay_port()
    }

    /// A request over this path was answered: it is time to test its length if the last test is long ago.
    pub(super) fn plan_full_size(&mut self, now: Duration) {
        if self.has_full_size() {
            self.full_size.plan(now);
        }
    }

    /// Packets of the session stay unanswered: they may be the long ones.
    pub(super) fn doubt_full_size(&mut self, now: Duration) {
        if self.has_full_size() {
            self.full_size.doubt(now);
        }
    }

    /// Takes what is due of the test of its length.
    pub(super) fn full_size_due(&mut self, now: Duration) -> Due {
        let answered = self.answered.map(|(_, at)| at);
        self.full_size.take_due(now, answered)
    }

    /// Configured, then inside one site, then any other, then through a NAT64, then by way of a relay: over UDP, then over TCP.
    /// Last what loses long datagrams.
    pub(super) fn tier(&self) -> u8 {
        match self.candidate.source {
            _ if self.full_size.is_lost => 6,
            Source::Manual => 0,
            Source::Nat64 => 3,
            Source::Relay if self.is_relay_port() => 4,
            Source::Relay => 5,
            _ if is_private(self.candidate.address.ip()) => 1,
            _ => 2,
        }
    }

    /// The lower the better, whatever the round-trip times. IPv4 comes before IPv6, whatever their speed: nodes without IPv6 learn the endpoint of a node behind a
    /// NAT from those that see it over IPv4.
    pub(super) fn kind(&self) -> (u8, bool) {
        (self.tier(), self.is_ipv6())
    }

    /// The lower the better.
    pub(super) fn rank(&self) -> (u8, bool, Option<Duration>) {
        let (tier, is_ipv6) = self.kind();
        (tier, is_ipv6, self.round_trip())
    }

    pub(super) fn is_ipv6(&self) -> bool {
        self.candidate.address.is_ipv6()
    }

    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.answered.map(|(round_trip, _)| round_trip)
    }

    pub(super) fn is_better_than(&self, current: &Self) -> bool {
        let (Some((ours, _)), Some((theirs, _))) = (self.answered, current.answered) else { return false };
        match self.tier().cmp(&current.tier()) {
            std::cmp::Ordering::Less => true,
            std::cmp::Ordering::Equal if self.is_ipv6() != current.is_ipv6() => current.is_ipv6(),
            std::cmp::Ordering::Equal => ours.saturating_add(MIN_GAIN.max(theirs / 3)) < theirs,
            std::cmp::Ordering::Greater => false,
        }
    }
}

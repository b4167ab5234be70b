//! Behind the symmetric NAT: many sockets, each with a mapping of its own to the peer's endpoint.

use std::time::Duration;

use fairlead_wire::probe::TransactionId;
use rand::RngExt;
use rand::rngs::StdRng;

use super::confirming::Confirming;
use super::limits::{MAX_AT_ONCE, PACE, RATE, SOCKETS, paced};

/// The sockets of an attempt.
#[derive(Debug)]
pub(super) struct Listening {
    since: Duration,
    sent: u16,
    /// Time at which requests were last sent.
    ran: Duration,
    /// The sockets that the peer has reached.
    pub(super) reached: Confirming<u16>,
}

impl Listening {
    pub(super) fn new(now: Duration) -> Self {
        Self { since: now, sent: 0, ran: now, reached: Confirming::new() }
    }

    /// The sockets from which a request opens the mapping now; the peer's NAT drops most of these, so no answer is waited for.
    pub(super) fn due(&mut self, now: Duration, random: &mut StdRng) -> Vec<(u16, TransactionId)> {
        let due = paced(now.saturating_sub(self.since)).saturating_sub(self.sent.into()).min(MAX_AT_ONCE);
        let first = self.sent;
        let last = first.saturating_add(u16::try_from(due).unwrap_or(SOCKETS)).min(SOCKETS);
        self.sent = last;
        self.ran = now;
        (first..last).map(|socket| (socket, TransactionId(random.random()))).collect()
    }

    pub(super) fn next(&self) -> Option<Duration> {
        let before = Duration::from_millis(u64::from(self.sent).saturating_mul(1000) / u64::from(RATE));
        (self.sent < SOCKETS).then(|| self.since.saturating_add(before).max(self.ran.saturating_add(PACE)))
    }
}

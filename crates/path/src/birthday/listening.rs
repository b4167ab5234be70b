//! Behind the symmetric NAT: many sockets, each with a mapping of its own to the peer's endpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fairlead_wire::probe::TransactionId;
use rand::RngExt;
use rand::rngs::StdRng;

use super::{CONFIRMATIONS, MAX_AT_ONCE, PACE, SOCKETS, paced};

/// Requests over one socket that the peer has reached: the peer sends as many, unless it means to make this node send more.
const MAX_REQUESTS: u8 = 10;

/// What came in by one socket.
#[derive(Debug, Default)]
struct Heard {
    requests: u8,
    answers: u8,
    pending: BTreeSet<TransactionId>,
}

/// What an answer means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Verdict {
    /// The peer has chosen this socket: it is to be kept.
    pub(super) is_chosen: bool,
    /// It is to be used.
    pub(super) is_confirmed: bool,
}

/// The sockets of an attempt.
#[derive(Debug)]
pub(super) struct Listening {
    since: Duration,
    sent: u16,
    /// When requests were last sent.
    ran: Duration,
    heard: BTreeMap<u16, Heard>,
    chosen: Option<u16>,
}

impl Listening {
    pub(super) fn new(now: Duration) -> Self {
        Self { since: now, sent: 0, ran: now, heard: BTreeMap::new(), chosen: None }
    }

    pub(super) fn has_chosen(&self) -> bool {
        self.chosen.is_some()
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
        let before =
            Duration::from_millis(u64::from(self.sent).saturating_mul(1000) / u64::from(super::RATE));
        (self.sent < SOCKETS).then(|| self.since.saturating_add(before).max(self.ran.saturating_add(PACE)))
    }

    /// The peer has reached a socket: it is asked back.
    pub(super) fn handle_request(&mut self, socket: u16, random: &mut StdRng) -> Option<TransactionId> {
        if socket >= SOCKETS {
            return None;
        }
        let heard = self.heard.entry(socket).or_default();
        heard.requests = heard.requests.saturating_add(1);
        (heard.requests <= MAX_REQUESTS).then(|| {
            let transaction = TransactionId(random.random());
            heard.pending.insert(transaction);
            transaction
        })
    }

    /// The peer tries each port once, and asks again only by the one that it has chosen.
    pub(super) fn handle_answer(&mut self, socket: u16, transaction: TransactionId) -> Option<Verdict> {
        let heard = self.heard.get_mut(&socket)?;
        if !heard.pending.remove(&transaction) {
            return None;
        }
        heard.answers = heard.answers.saturating_add(1);
        let was_chosen = self.chosen == Some(socket);
        let is_chosen = heard.requests >= 2 && !was_chosen;
        if is_chosen {
            self.chosen = Some(socket);
        }
        let is_confirmed = heard.answers >= CONFIRMATIONS && (is_chosen || was_chosen);
        Some(Verdict { is_chosen, is_confirmed })
    }
}

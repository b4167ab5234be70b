//! The node that does not choose: it asks back wherever the peer has reached it, until the peer keeps to one way.

use std::collections::{BTreeMap, BTreeSet};

use fairlead_wire::probe::TransactionId;
use rand::RngExt;
use rand::rngs::StdRng;

use super::limits::CONFIRMATIONS;

/// Requests over one way on which the peer has reached this node: the peer sends as many, unless it means to make this node send more.
const MAX_REQUESTS: u8 = 10;
/// Most ways that are remembered.
const MAX_WAYS: usize = 256;

/// Messages that came in on one way.
#[derive(Debug, Default)]
struct Heard {
    requests: u8,
    answers: u8,
    pending: BTreeSet<TransactionId>,
}

/// Consequence of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Verdict {
    /// The peer has chosen this way.
    pub(super) is_chosen: bool,
    /// The way is to be used.
    pub(super) is_confirmed: bool,
}

/// Ways on which the peer has reached this node: by its sockets, or by endpoints of the peer.
#[derive(Debug)]
pub(super) struct Confirming<Route> {
    heard: BTreeMap<Route, Heard>,
    chosen: Option<Route>,
}

impl<Route: Copy + Ord> Confirming<Route> {
    pub(super) fn new() -> Self {
        Self { heard: BTreeMap::new(), chosen: None }
    }

    pub(super) fn has_chosen(&self) -> bool {
        self.chosen.is_some()
    }

    /// The peer has reached this node: it is asked back.
    pub(super) fn handle_request(&mut self, way: Route, random: &mut StdRng) -> Option<TransactionId> {
        if self.heard.len() >= MAX_WAYS && !self.heard.contains_key(&way) {
            return None;
        }
        let heard = self.heard.entry(way).or_default();
        heard.requests = heard.requests.saturating_add(1);
        (heard.requests <= MAX_REQUESTS).then(|| {
            let transaction = TransactionId(random.random());
            heard.pending.insert(transaction);
            transaction
        })
    }

    /// The peer tries each port once, and asks again only on the way that it has chosen.
    pub(super) fn handle_answer(&mut self, way: Route, transaction: TransactionId) -> Option<Verdict> {
        let heard = self.heard.get_mut(&way)?;
        if !heard.pending.remove(&transaction) {
            return None;
        }
        heard.answers = heard.answers.saturating_add(1);
        let was_chosen = self.chosen == Some(way);
        let is_chosen = heard.requests >= 2 && !was_chosen;
        if is_chosen {
            self.chosen = Some(way);
        }
        let is_confirmed = heard.answers >= CONFIRMATIONS && (is_chosen || was_chosen);
        Some(Verdict { is_chosen, is_confirmed })
    }
}

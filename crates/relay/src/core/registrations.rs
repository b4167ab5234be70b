//! The links of one key: the newest receives, older ones end soon.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::LinkId;

/// How long an older link of a key stays after a newer one has registered.
const DRAIN_TIME: Duration = Duration::from_secs(5);
/// Older links of a key; one more ends the oldest at once.
const MAX_DRAINING: usize = 2;
/// More changes than this within [`CHANGE_WINDOW`] mean that several programs have the key.
const MAX_CHANGES: usize = 3;
const CHANGE_WINDOW: Duration = Duration::from_secs(60);

/// The links of one key.
#[derive(Debug, Default)]
pub(super) struct Registrations {
    newest: Option<(LinkId, [u8; 8])>,
    /// Older ones and when they end, the newest of them last.
    draining: VecDeque<(LinkId, [u8; 8], Instant)>,
    /// When a link replaced one of another instance; at most one more than [`MAX_CHANGES`].
    changes: VecDeque<Instant>,
}

/// What a registration brings about.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// Another run of the client, or another client, was replaced.
    pub(super) changed: bool,
    /// Links of the key that have to be told that it is in use more than once.
    pub(super) duplicates: Vec<LinkId>,
    /// A link that ends at once.
    pub(super) ended: Option<LinkId>,
}

impl Registrations {
    /// The link that receives.
    pub(super) fn receiver(&self) -> Option<LinkId> {
        self.newest.map(|(link, _)| link)
    }

    pub(super) fn add(&mut self, now: Instant, link: LinkId, instance: [u8; 8]) -> Outcome {
        let mut outcome = Outcome::default();
        if let Some((older, of)) = self.newest.replace((link, instance)) {
            let end = now.checked_add(DRAIN_TIME).unwrap_or(now);
            self.draining.push_back((older, of, end));
            outcome.changed = of != instance;
        }
        if self.draining.len() > MAX_DRAINING {
            outcome.ended = self.draining.pop_front().map(|(link, ..)| link);
        }
        if outcome.changed && self.count_change(now) > MAX_CHANGES {
            outcome.duplicates = self.links().collect();
        }
        outcome
    }

    fn count_change(&mut self, now: Instant) -> usize {
        self.forget(now);
        if self.changes.len() > MAX_CHANGES {
            self.changes.pop_front();
        }
        self.changes.push_back(now);
        self.changes.len()
    }

    fn forget(&mut self, now: Instant) {
        self.changes.retain(|at| now.saturating_duration_since(*at) < CHANGE_WINDOW);
    }

    /// Removes a link. If it received, the newest of the others does from now on.
    pub(super) fn remove(&mut self, link: LinkId) {
        self.draining.retain(|(draining, ..)| *draining != link);
        if self.receiver() == Some(link) {
            self.newest = self.draining.pop_back().map(|(link, instance, _)| (link, instance));
        }
    }

    /// Links that have drained.
    pub(super) fn drained(&self, now: Instant) -> impl Iterator<Item = LinkId> {
        self.draining.iter().filter(move |(_, _, end)| *end <= now).map(|(link, ..)| *link)
    }

    fn links(&self) -> impl Iterator<Item = LinkId> {
        let draining = self.draining.iter().map(|(link, ..)| *link);
        draining.chain(self.newest.map(|(link, _)| link))
    }

    /// Whether there is nothing left to remember.
    pub(super) fn is_obsolete(&mut self, now: Instant) -> bool {
        self.forget(now);
        self.newest.is_none() && self.changes.is_empty()
    }
}

//! The links of one key, here and at other replicas: the newest receives, older ones end soon.
//!
//! A stand-by link receives while there is no other one, and becomes the newest when its client says so. It neither replaces a link
//! nor is replaced by one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::links::{LinkId, ReplicaLinkId, Stamp};

/// Time for which an older link of a key stays after a newer one has registered.
const DRAIN_TIME: Duration = Duration::from_secs(5);
/// Older links of a key; one more ends the oldest at once.
const MAX_DRAINING: usize = 2;
/// Stand-by links of a key; one more ends the oldest at once.
const MAX_STANDBY: usize = 2;
/// More changes than this within [`CHANGE_WINDOW`] mean that several programs have the key.
const MAX_CHANGES: usize = 3;
const CHANGE_WINDOW: Duration = Duration::from_secs(60);

/// The links of one key.
#[derive(Debug, Default)]
pub(super) struct Registrations {
    /// The link here that receives: newer than all of `remote`.
    newest: Option<Registration<LinkId>>,
    /// Older ones and when they end, the newest of them last.
    draining: VecDeque<(Registration<LinkId>, Instant)>,
    /// Stand-by links here, the newest last.
    standby: VecDeque<Registration<LinkId>>,
    /// Registrations that other replicas announce, once for each connection to one.
    remote: Vec<Registration<ReplicaLinkId>>,
    /// Times at which a link replaced one of another instance; at most one more than [`MAX_CHANGES`].
    changes: VecDeque<Instant>,
}

/// A registration, at this replica or at the one behind a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Registration<L> {
    pub(super) link: L,
    pub(super) instance: [u8; 8],
    pub(super) stamp: Stamp,
    pub(super) is_standby: bool,
}

/// Receiver of the datagrams for a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Receiver {
    /// To a client.
    Link(LinkId),
    /// To another replica.
    Replica(ReplicaLinkId),
}

/// Effects of a registration.
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
    /// Receiver of datagrams from clients; `None` if the key has no link.
    pub(super) fn receiver(&self) -> Option<Receiver> {
        let here = |here: &Registration<LinkId>| Receiver::Link(here.link);
        let there = |there: &Registration<ReplicaLinkId>| Receiver::Replica(there.link);
        let newest = self.newest.as_ref().map(here).or_else(|| self.newest_remote().map(there));
        let standby = || self.standby.back().map(here).or_else(|| self.newest_of(true).map(there));
        newest.or_else(standby)
    }

    /// The newest registration here, also one that drains or stands by. What other replicas pass on goes there and no further.
    pub(super) fn local(&self) -> Option<&Registration<LinkId>> {
        let draining = || self.draining.back().map(|(registration, _)| registration);
        self.newest.as_ref().or_else(draining).or_else(|| self.standby.back())
    }

    fn newest_remote(&self) -> Option<&Registration<ReplicaLinkId>> {
        self.newest_of(false)
    }

    fn newest_of(&self, is_standby: bool) -> Option<&Registration<ReplicaLinkId>> {
        let remote = self.remote.iter().filter(|remote| remote.is_standby == is_standby);
        remote.max_by_key(|remote| (remote.stamp, remote.link))
    }

    /// The run of the client that receives, unless its link stands by.
    fn instance(&self) -> Option<[u8; 8]> {
        let here = self.newest.map(|newest| newest.instance);
        here.or_else(|| self.newest_remote().map(|remote| remote.instance))
    }

    /// Adds a link of this replica: the newest of all, unless it stands by.
    pub(super) fn add(&mut self, now: Instant, registration: Registration<LinkId>) -> Outcome {
        if registration.is_standby {
            self.standby.push_back(registration);
            let is_full = self.standby.len() > MAX_STANDBY;
            let ended = if is_full { self.standby.pop_front().map(|older| older.link) } else { None };
            return Outcome { ended, ..Outcome::default() };
        }
        let of = self.instance();
        if let Some(older) = self.newest.replace(registration) {
            self.drain(now, older);
        }
        self.outcome(now, of.is_some_and(|of| of != registration.instance))
    }

    /// A link that stands by becomes the newest of all. `None` if it does not stand by.
    pub(super) fn activate(&mut self, now: Instant, link: LinkId, stamp: Stamp) -> Option<Outcome> {
        let place = self.standby.iter().position(|standby| standby.link == link)?;
        let standby = self.standby.remove(place)?;
        Some(self.add(now, Registration { stamp, is_standby: false, ..standby }))
    }

    /// Another replica announces a registration. An older one here drains.
    pub(super) fn announce(&mut self, now: Instant, remote: Registration<ReplicaLinkId>) -> Outcome {
        let before = self.instance();
        self.remote.retain(|known| known.link != remote.link);
        self.remote.push(remote);
        if !remote.is_standby
            && let Some(older) = self.newest.take_if(|newest| newest.stamp < remote.stamp)
        {
            self.drain(now, older);
        }
        // It may be older than the one that it replaces.
        self.promote();
        // Also where both are at other replicas: the next one may come here.
        let changed = before.is_some_and(|before| self.instance().is_some_and(|now| now != before));
        self.outcome(now, changed)
    }

    /// The replica behind this connection has no link of the key any more, or the connection has ended.
    pub(super) fn withdraw(&mut self, link: ReplicaLinkId) {
        self.remote.retain(|remote| remote.link != link);
        self.promote();
    }

    fn drain(&mut self, now: Instant, older: Registration<LinkId>) {
        self.draining.push_back((older, now.checked_add(DRAIN_TIME).unwrap_or(now)));
    }

    fn outcome(&mut self, now: Instant, changed: bool) -> Outcome {
        let is_full = self.draining.len() > MAX_DRAINING;
        let ended = if is_full { self.draining.pop_front().map(|(older, _)| older.link) } else { None };
        let is_duplicate = changed && self.count_change(now) > MAX_CHANGES;
        let duplicates = if is_duplicate { self.links().collect() } else { Vec::new() };
        Outcome { changed, duplicates, ended }
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
        self.draining.retain(|(draining, _)| draining.link != link);
        self.standby.retain(|standby| standby.link != link);
        self.newest.take_if(|newest| newest.link == link);
        self.promote();
    }

    /// Without a newer one, the newest of those that drain stays.
    fn promote(&mut self) {
        let newest_remote = self.newest_remote().map(|remote| remote.stamp);
        if self.newest.is_none()
            && let Some((draining, _)) = self.draining.back()
            && Some(draining.stamp) > newest_remote
        {
            self.newest = self.draining.pop_back().map(|(registration, _)| registration);
        }
    }

    /// Links that have drained.
    pub(super) fn drained(&self, now: Instant) -> impl Iterator<Item = LinkId> {
        self.draining.iter().filter(move |(_, end)| *end <= now).map(|(draining, _)| draining.link)
    }

    fn links(&self) -> impl Iterator<Item = LinkId> {
        let draining = self.draining.iter().map(|(draining, _)| draining.link);
        let standby = self.standby.iter().map(|standby| standby.link);
        draining.chain(standby).chain(self.newest.map(|newest| newest.link))
    }

    /// Whether there is nothing left to remember.
    pub(super) fn is_obsolete(&mut self, now: Instant) -> bool {
        self.forget(now);
        self.local().is_none() && self.remote.is_empty() && self.changes.is_empty()
    }
}

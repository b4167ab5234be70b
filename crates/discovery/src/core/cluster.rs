//! One cluster: its affiliates, and the order in which they changed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_wire::discovery::server;
use prost::bytes::Bytes;

use super::frames::{self, Frame, Frames, Known};
use super::{Refusal, SharedAffiliate, Source, Stored, Update, WatchId};

/// Size of the affiliates in a message, in bytes, beyond which no more are added: gRPC clients accept 4 MiB.
const BATCH: usize = 1 << 16;
/// Bytes of protobuf around an affiliate and each of its endpoints, at most.
const FRAMING: usize = 16;
/// Removed affiliates that are kept without a look at who needs them.
const PRUNE: usize = 64;

/// Not among what replicas share, as far as is known. Revisions begin with 1.
const UNLISTED: i64 = 0;
/// Was shared in another history of the store.
const ORPHAN: i64 = -1;

#[derive(Debug, Default)]
pub(super) struct Cluster {
    affiliates: HashMap<Arc<str>, Affiliate>,
    /// Removed affiliates that some watch has to be told of.
    removed: HashMap<Arc<str>, Removed>,
    /// Last change of each affiliate, present or removed, by number.
    changes: BTreeMap<u64, Arc<str>>,
    /// The number of the last change.
    last: u64,
    prune_at: usize,
    frames: Frames,
    pub(super) watches: BTreeSet<WatchId>,
}

#[derive(Debug, Clone)]
struct Affiliate {
    data: Bytes,
    endpoints: Vec<Endpoint>,
    expires: Instant,
    /// Time of the entry of the affiliate in `Discovery::expiries`.
    queued: Instant,
    /// The change that made it known to watches.
    created: u64,
    changed: u64,
    source: Source,
    /// The revision at which replicas share this, or one of the two below.
    revision: i64,
}

#[derive(Debug, Clone)]
struct Endpoint {
    sealed: Bytes,
    expires: Instant,
}

#[derive(Debug)]
struct Removed {
    created: u64,
    changed: u64,
    removal: Removal,
}

/// Way in which an affiliate was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Removal {
    Deleted,
    Expired,
}

/// Effect of an update.
#[derive(Debug)]
pub(super) struct Applied {
    pub(super) affiliate: Arc<str>,
    /// Time of the entry in `Discovery::expiries` until now; `None` if the affiliate is new.
    pub(super) queued: Option<Instant>,
    /// Time of the entry from now on.
    pub(super) expires: Instant,
    /// Whether watches have to be told.
    pub(super) has_changed: bool,
}

/// Effect of the passing of time on an affiliate.
#[derive(Debug)]
pub(super) struct Expired {
    /// Endpoints that are gone.
    pub(super) endpoints: usize,
    /// Time to look again; `None` if the affiliate has to go.
    pub(super) next: Option<Instant>,
}

/// Affiliate that was removed.
#[derive(Debug)]
pub(super) struct Gone {
    pub(super) affiliate: Arc<str>,
    pub(super) queued: Instant,
    pub(super) source: Source,
}

/// Changes of one kind, for one message.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) affiliates: Vec<server::Affiliate>,
    /// Way in which all of them were removed; `None` if they are present.
    pub(super) removal: Option<Removal>,
    /// The number of the last change that it tells.
    pub(super) until: u64,
    /// Whether nothing more is to be told.
    pub(super) is_complete: bool,
}

impl Cluster {
    pub(super) fn has(&self, affiliate: &str) -> bool {
        self.affiliates.contains_key(affiliate)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = &Arc<str>> {
        self.affiliates.keys()
    }

    pub(super) fn watch_ids(&self) -> Vec<WatchId> {
        self.watches.iter().copied().collect()
    }

    pub(super) fn affiliates(&self) -> usize {
        self.affiliates.len()
    }

    pub(super) fn endpoints(&self) -> usize {
        self.affiliates.values().map(|affiliate| affiliate.endpoints.len()).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.affiliates.is_empty() && self.watches.is_empty()
    }

    pub(super) fn list(&self) -> Vec<server::Affiliate> {
        self.affiliates.iter().map(|(id, affiliate)| affiliate.message(id)).collect()
    }

    pub(super) fn stored(&self, cluster: &Arc<str>, now: Instant) -> impl Iterator<Item = Stored> {
        self.affiliates.iter().map(move |(id, affiliate)| affiliate.stored(cluster, id, now))
    }

    pub(super) fn update(
        &mut self,
        source: Source,
        update: &Update,
        now: Instant,
        max_endpoints: usize,
    ) -> Result<Applied, Refusal> {
        let expires = now.checked_add(update.ttl).unwrap_or(now);
        let merge = |affiliate: &mut Affiliate| affiliate.merge(update, expires, max_endpoints);
        self.change(source, &update.affiliate, expires, merge)
    }

    /// Affiliate that an update would result in, and the revision of the one that is stored.
    pub(super) fn merged(
        &self,
        source: Source,
        update: &Update,
        now: Instant,
        max_endpoints: usize,
    ) -> Result<(SharedAffiliate, i64), Refusal> {
        let expires = now.checked_add(update.ttl).unwrap_or(now);
        let known = self.affiliates.get_key_value(update.affiliate.as_str());
        let id = known.map_or_else(|| Arc::from(update.affiliate.as_str()), |(id, _)| Arc::clone(id));
        let known = known.map(|(_, affiliate)| affiliate.clone());
        let mut affiliate = known.unwrap_or_else(|| Affiliate::new(source, expires, 0));
        affiliate.endpoints.retain(|endpoint| endpoint.expires > now);
        affiliate.merge(update, expires, max_endpoints)?;
        let stored = affiliate.stored(&Arc::from(update.cluster.as_str()), &id, now);
        Ok((SharedAffiliate { stored, source: affiliate.source }, affiliate.revision.max(UNLISTED)))
    }

    /// Replaces an affiliate by what replicas share, and says who had created it here.
    pub(super) fn adopt(
        &mut self,
        shared: &SharedAffiliate,
        revision: i64,
        now: Instant,
    ) -> Result<(Applied, Option<Source>), Refusal> {
        let at = |ttl: Duration| now.checked_add(ttl).unwrap_or(now);
        let expires = at(shared.stored.ttl);
        let before = self.affiliates.get(&shared.stored.affiliate).map(|affiliate| affiliate.source);
        let replace = |affiliate: &mut Affiliate| Ok(affiliate.replace(shared, revision, at));
        let applied = self.change(shared.source, &shared.stored.affiliate, expires, replace)?;
        Ok((applied, before))
    }

    /// The revision at which replicas share an affiliate, and when that expires.
    pub(super) fn shared(&self, affiliate: &str) -> Option<(i64, Instant)> {
        self.affiliates.get(affiliate).map(|affiliate| (affiliate.revision, affiliate.expires))
    }

    /// Marks an affiliate as an orphan: the store has nothing of it, and nothing of before will come.
    pub(super) fn orphan(&mut self, affiliate: &str) {
        if let Some(affiliate) = self.affiliates.get_mut(affiliate) {
            affiliate.revision = ORPHAN;
        }
    }

    /// Begins a list of everything that replicas share: until it names them, affiliates are unlisted.
    pub(super) fn begin_listing(&mut self) {
        let shared = self.affiliates.values_mut().filter(|affiliate| affiliate.revision != ORPHAN);
        shared.for_each(|affiliate| affiliate.revision = UNLISTED);
    }

    /// Affiliates that were shared before, and have not been listed since.
    pub(super) fn unlisted(&self) -> Vec<Arc<str>> {
        let unlisted = self.affiliates.iter().filter(|(_, affiliate)| affiliate.revision == UNLISTED);
        unlisted.map(|(id, _)| Arc::clone(id)).collect()
    }

    /// Has `merge` change an affiliate, which says whether watches have to be told. One that it refuses stays as it was.
    fn change(
        &mut self,
        source: Source,
        id: &str,
        expires: Instant,
        merge: impl FnOnce(&mut Affiliate) -> Result<bool, Refusal>,
    ) -> Result<Applied, Refusal> {
        let next = self.last.saturating_add(1);
        let removed = self.removed.get(id);
        let (id, mut affiliate, queued) = match self.affiliates.remove_entry(id) {
            Some((id, affiliate)) => {
                let queued = affiliate.queued;
                (id, affiliate, Some(queued))
            }
            None => {
                let created = removed.map_or(next, |removed| removed.created);
                (Arc::from(id), Affiliate::new(source, expires, created), None)
            }
        };
        let merged = merge(&mut affiliate);
        let has_changed = merged.unwrap_or(false) || queued.is_none();
        if has_changed && merged.is_ok() {
            self.forget_change(affiliate.changed);
            if let Some(removed) = self.removed.remove(&id) {
                self.forget_change(removed.changed);
            }
            self.last = next;
            affiliate.changed = next;
            self.changes.insert(next, Arc::clone(&id));
        }
        affiliate.queued = affiliate.next_expiry();
        let expires = affiliate.queued;
        if queued.is_some() || merged.is_ok() {
            self.affiliates.insert(Arc::clone(&id), affiliate);
        }
        merged.map(|_| Applied { affiliate: id, queued, expires, has_changed })
    }

    /// Removes endpoints whose time is over. `None` for an affiliate that is not there.
    pub(super) fn expire(&mut self, id: &Arc<str>, now: Instant) -> Option<Expired> {
        let affiliate = self.affiliates.get_mut(id)?;
        let before = affiliate.endpoints.len();
        affiliate.endpoints.retain(|endpoint| endpoint.expires > now);
        let endpoints = before.saturating_sub(affiliate.endpoints.len());
        if affiliate.expires <= now {
            return Some(Expired { endpoints, next: None });
        }
        if endpoints > 0 {
            self.changes.remove(&affiliate.changed);
            self.frames.forget(affiliate.changed);
            self.last = self.last.saturating_add(1);
            affiliate.changed = self.last;
            self.changes.insert(self.last, Arc::clone(id));
        }
        affiliate.queued = affiliate.next_expiry();
        Some(Expired { endpoints, next: Some(affiliate.queued) })
    }

    pub(super) fn remove(&mut self, affiliate: &str, removal: Removal) -> Option<Gone> {
        let (id, affiliate) = self.affiliates.remove_entry(affiliate)?;
        self.forget_change(affiliate.changed);
        self.last = self.last.saturating_add(1);
        if !self.watches.is_empty() {
            let removed = Removed { created: affiliate.created, changed: self.last, removal };
            self.changes.insert(self.last, Arc::clone(&id));
            self.removed.insert(Arc::clone(&id), removed);
        }
        Some(Gone { affiliate: id, queued: affiliate.queued, source: affiliate.source })
    }

    /// Whether it is time to [`Cluster::prune`].
    pub(super) fn is_prunable(&self) -> bool {
        self.removed.len() > self.prune_at.max(PRUNE)
    }

    /// Forgets removed affiliates that no watch, by the last change it knows, has to be told of. How many are left.
    pub(super) fn prune(&mut self, known: &BTreeSet<u64>) -> usize {
        let changes = &mut self.changes;
        let frames = &mut self.frames;
        self.removed.retain(|_, removed| {
            let is_needed = known.range(removed.created..removed.changed).next().is_some();
            if !is_needed {
                changes.remove(&removed.changed);
                frames.forget(removed.changed);
            }
            is_needed
        });
        self.prune_at = self.removed.len().saturating_mul(2);
        self.removed.len()
    }

    /// A change is not the last one of its affiliate any more.
    fn forget_change(&mut self, number: u64) {
        self.changes.remove(&number);
        self.frames.forget(number);
    }

    /// See [`Frames::age`].
    pub(super) fn age_frames(&mut self) {
        self.frames.age();
    }

    /// The next message for watches that know this, which is made once for all of them. `None` if they know everything; those that
    /// are still told what there was when they began are told that this was all.
    pub(super) fn frame(&mut self, known: Known) -> Option<Frame> {
        let (_, in_snapshot) = known;
        if known.0 >= self.last && !in_snapshot {
            return None;
        }
        if let Some(frame) = self.frames.get(known, self.last) {
            return Some(frame);
        }
        let batch = match self.changes_since(known.0) {
            Some(batch) => batch,
            None if in_snapshot => Batch { until: self.last, is_complete: true, ..Default::default() },
            None => return None,
        };
        let message = server::WatchResponse {
            affiliates: batch.affiliates,
            deleted: batch.removal.is_some(),
            snapshot_continues: in_snapshot && !batch.is_complete,
            expired: batch.removal == Some(Removal::Expired),
        };
        let bytes = frames::encode(&message);
        let last = self.last;
        let frame = Frame { bytes, until: batch.until, is_complete: batch.is_complete, last };
        self.frames.keep(known, frame.clone());
        Some(frame)
    }

    /// The next changes of one kind after one that a watch knows. The first message of a watch must have affiliates that are
    /// there, or none.
    fn changes_since(&self, known: u64) -> Option<Batch> {
        let mut batch: Option<Batch> = None;
        let mut size = 0_usize;
        for (number, id) in self.changes.range((Bound::Excluded(known), Bound::Unbounded)) {
            let (message, removal) = match (self.affiliates.get(id), self.removed.get(id)) {
                (Some(affiliate), _) => (affiliate.message(id), None),
                // What came and went in between is not told.
                (None, Some(removed)) if removed.created > known => continue,
                (None, Some(removed)) => {
                    let message = server::Affiliate { id: (**id).to_owned(), ..Default::default() };
                    (message, Some(removed.removal))
                }
                (None, None) => continue,
            };
            size = size.saturating_add(length(&message));
            let batch = batch.get_or_insert_with(|| Batch { removal, ..Default::default() });
            if batch.removal != removal || (size > BATCH && !batch.affiliates.is_empty()) {
                return Some(Batch { is_complete: false, ..std::mem::take(batch) });
            }
            batch.affiliates.push(message);
            batch.until = *number;
        }
        // What follows need not be told.
        batch.map(|batch| Batch { until: self.last, is_complete: true, ..batch })
    }

    pub(super) fn last_change(&self) -> u64 {
        self.last
    }
}

impl Affiliate {
    fn new(source: Source, expires: Instant, created: u64) -> Self {
        Self {
            data: Bytes::new(),
            endpoints: Vec::new(),
            expires,
            queued: expires,
            created,
            changed: 0,
            source,
            revision: UNLISTED,
        }
    }

    fn stored(&self, cluster: &Arc<str>, id: &Arc<str>, now: Instant) -> Stored {
        let left = |at: Instant| at.saturating_duration_since(now);
        let endpoints = self.endpoints.iter();
        Stored {
            cluster: Arc::clone(cluster),
            affiliate: Arc::clone(id),
            data: self.data.clone(),
            ttl: left(self.expires),
            endpoints: endpoints.map(|one| (one.sealed.clone(), left(one.expires))).collect(),
        }
    }

    /// Whether anything is new. Data sets how long the affiliate lives, endpoints may only extend it.
    fn merge(&mut self, update: &Update, expires: Instant, max_endpoints: usize) -> Result<bool, Refusal> {
        let new: BTreeSet<&Bytes> = update
            .endpoints
            .iter()
            .filter(|new| !self.endpoints.iter().any(|known| known.sealed == *new))
            .collect();
        if self.endpoints.len().saturating_add(new.len()) > max_endpoints {
            return Err(Refusal::Endpoints);
        }
        for known in &mut self.endpoints {
            if update.endpoints.contains(&known.sealed) {
                known.expires = known.expires.max(expires);
            }
        }
        let has_new = !new.is_empty();
        let mut add = |sealed: &Bytes| {
            // A copy: the request's buffer is longer.
            let sealed = Bytes::copy_from_slice(sealed);
            self.endpoints.push(Endpoint { sealed, expires });
        };
        // In the order of the request, which is that of the client's preference.
        let mut left = new;
        update.endpoints.iter().filter(|endpoint| left.remove(endpoint)).for_each(&mut add);
        let Some(data) = &update.data else {
            self.expires = self.expires.max(expires);
            return Ok(has_new);
        };
        self.expires = expires;
        let is_other = self.data != *data;
        if is_other {
            self.data = Bytes::copy_from_slice(data);
        }
        Ok(is_other || has_new)
    }

    /// Whether anything is new.
    fn replace(&mut self, shared: &SharedAffiliate, revision: i64, at: impl Fn(Duration) -> Instant) -> bool {
        let Stored { data, ttl, endpoints, .. } = &shared.stored;
        let known = self.endpoints.iter().map(|known| &known.sealed);
        let is_other = self.data != *data || !known.eq(endpoints.iter().map(|(sealed, _)| sealed));
        // Copies of what is new: the buffer of a message of etcd is longer.
        if self.data != *data {
            self.data = Bytes::copy_from_slice(data);
        }
        let replaced = endpoints.iter().map(|(sealed, ttl)| {
            let known = self.endpoints.iter().find(|known| known.sealed == *sealed);
            let sealed = known.map_or_else(|| Bytes::copy_from_slice(sealed), |known| known.sealed.clone());
            Endpoint { sealed, expires: at(*ttl) }
        });
        self.endpoints = replaced.collect();
        (self.expires, self.source, self.revision) = (at(*ttl), shared.source, revision);
        is_other
    }

    fn next_expiry(&self) -> Instant {
        self.endpoints.iter().map(|endpoint| endpoint.expires).fold(self.expires, Instant::min)
    }

    fn message(&self, id: &str) -> server::Affiliate {
        server::Affiliate {
            id: id.to_owned(),
            data: self.data.clone(),
            endpoints: self.endpoints.iter().map(|endpoint| endpoint.sealed.clone()).collect(),
        }
    }
}

/// About what a message takes.
fn length(affiliate: &server::Affiliate) -> usize {
    let endpoints: usize =
        affiliate.endpoints.iter().map(|endpoint| endpoint.len().saturating_add(FRAMING)).sum();
    [affiliate.id.len(), affiliate.data.len(), FRAMING].into_iter().fold(endpoints, usize::saturating_add)
}

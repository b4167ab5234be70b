//! Replicas that share what they store: what each writes, and what it makes of what others have written.
//!
//! Every write to the store has a revision, and a watch tells of all writes in their order. What is here has the revision at which
//! it was written; a write is made only if the store still has that one (compare and swap), so two replicas that change an
//! affiliate at the same time lose nothing. What a replica has written it stores at once, without waiting for its watch; revisions
//! say which of both is newer.
//!
//! A deletion is told by the watch, or by a list of the same history. Otherwise the absence of an affiliate from the store removes
//! nothing: one that was emptied, or restored from a backup, is filled again by its clients, and until then everything is here.
//! While the store is away no client can renew anything, so nothing expires.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cluster::{Cluster, Removal};
use super::shared_store::Hold;
use super::{Discovery, Proposal, Refusal, SharedAffiliate, Source, Stored, Update};

/// Longest time after an outage of the store in which nothing expires. Clients try again within 30 s.
const MAX_GRACE: Duration = Duration::from_secs(60);
/// Factor by which replicas that accept at the same time may exceed a limit together. More is not read from the store.
const OVERSHOOT: usize = 2;

impl Discovery {
    /// Computes the affiliate that an update results in. Nothing is stored.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn propose(&self, source: Source, update: &Update, now: Instant) -> Result<Proposal, Refusal> {
        self.check_update(source, update)?;
        let none = Cluster::default();
        let cluster = self.clusters.get(update.cluster.as_str()).unwrap_or(&none);
        let (affiliate, replaces) = cluster.merged(source, update, now, self.limits.endpoints)?;
        Ok(Proposal { affiliate, replaces, epoch: self.replica.epoch })
    }

    /// Stores what was proposed and has been written at this revision, unless the watch has told of it, or will.
    pub fn complete(&mut self, proposal: &Proposal, revision: i64, now: Instant) {
        self.counters.updates = self.counters.updates.saturating_add(1);
        if proposal.epoch == self.replica.epoch && revision > self.replica.position {
            // What was acceptable when it was proposed may not be any more; then the store has more than this replica.
            let _ = self.adopt(&proposal.affiliate, revision, now);
        }
    }

    /// Stores what some replica has written at this revision, unless something newer is here.
    ///
    /// # Errors
    /// It is not acceptable, see [`Refusal`]: what the store has is checked as what clients send. Nothing changes.
    pub fn adopt(&mut self, affiliate: &SharedAffiliate, revision: i64, now: Instant) -> Result<(), Refusal> {
        let stored = &affiliate.stored;
        let is_new = self.check_shared(stored)?;
        if self.known_revision(&stored.cluster, &stored.affiliate) >= revision {
            return Ok(());
        }
        // Its time ended while it was in the store. What is here is replaced, and then ends.
        if is_new && stored.ttl.is_zero() {
            return Ok(());
        }
        let name = self.name_of(&stored.cluster);
        let cluster = self.clusters.entry(Arc::clone(&name)).or_default();
        let (applied, before) = cluster.adopt(affiliate, revision, now)?;
        self.finish(&name, Ok(applied))?;
        if is_new || before != Some(affiliate.source) {
            before.into_iter().for_each(|before| self.sources.uncount_affiliate(before));
            self.sources.count_affiliate(affiliate.source, now, &self.limits);
        }
        Ok(())
    }

    /// Some replica has deleted an affiliate at this revision, or its time in the store is over.
    pub fn forget(&mut self, cluster: &str, affiliate: &str, revision: i64, now: Instant) {
        let Some((name, here)) = self.clusters.get_key_value(cluster) else { return };
        let Some((_, expires)) = here.shared(affiliate).filter(|(known, _)| *known < revision) else {
            return;
        };
        let name = Arc::clone(name);
        // The store keeps everything longer than it lives: it was deleted.
        if expires > now {
            self.remove(&name, affiliate, Removal::Deleted);
            self.counters.deleted = self.counters.deleted.saturating_add(1);
        } else if let Some(here) = self.clusters.get_mut(&name) {
            here.orphan(affiliate);
        }
    }

    /// The store is listed from its beginning: revisions from before are not compared with those from now on.
    pub fn begin_listing(&mut self) {
        self.replica.epoch = self.replica.epoch.wrapping_add(1);
        self.replica.position = 0;
        self.clusters.values_mut().for_each(Cluster::begin_listing);
    }

    /// Everything was listed, as of this revision. In the history that was watched before, what is not in the list was deleted; in
    /// another one that says nothing.
    pub fn end_listing(&mut self, revision: i64, is_same_history: bool, now: Instant) {
        let names: Vec<Arc<str>> = self.clusters.keys().cloned().collect();
        for name in names {
            for affiliate in self.clusters.get(&name).map(Cluster::unlisted).unwrap_or_default() {
                if is_same_history {
                    self.forget(&name, &affiliate, revision, now);
                } else if let Some(cluster) = self.clusters.get_mut(&name) {
                    cluster.orphan(&affiliate);
                }
            }
        }
        self.advance(revision);
    }

    /// The watch has told of everything up to this revision.
    pub fn advance(&mut self, revision: i64) {
        self.replica.position = self.replica.position.max(revision);
    }

    /// The last revision that the watch has told of; 0 before the first list has ended.
    pub fn position(&self) -> i64 {
        self.replica.position
    }

    /// The store is away: nothing expires.
    pub fn hold_expiries(&mut self, now: Instant) {
        if !matches!(self.replica.hold, Hold::Since(_)) {
            self.replica.hold = Hold::Since(now);
        }
    }

    /// The store is back. Clients get as much time to renew what they have as it was away, up to a minute.
    pub fn release_expiries(&mut self, now: Instant) {
        if let Hold::Since(since) = self.replica.hold {
            let grace = now.saturating_duration_since(since).min(MAX_GRACE);
            self.replica.hold = now.checked_add(grace).map_or(Hold::No, Hold::Until);
        }
    }

    fn known_revision(&self, cluster: &str, affiliate: &str) -> i64 {
        self.clusters.get(cluster).and_then(|here| here.shared(affiliate)).map_or(0, |(known, _)| known)
    }

    /// Whether the affiliate is new.
    fn check_shared(&self, stored: &Stored) -> Result<bool, Refusal> {
        self.check_cluster(&stored.cluster)?;
        let longest = stored.endpoints.iter().map(|(_, ttl)| *ttl).fold(stored.ttl, Duration::max);
        self.limits.check_update(&Update {
            cluster: String::new(),
            affiliate: (*stored.affiliate).to_owned(),
            data: Some(stored.data.clone()),
            endpoints: stored.endpoints.iter().map(|(sealed, _)| sealed.clone()).collect(),
            ttl: longest,
        })?;
        self.check_affiliate(&stored.cluster, &stored.affiliate)?;
        let here = self.clusters.get(&stored.cluster);
        if here.is_some_and(|here| here.has(&stored.affiliate)) {
            return Ok(false);
        }
        if here.is_none() && self.clusters.len() >= self.limits.clusters.saturating_mul(OVERSHOOT) {
            return Err(Refusal::Clusters);
        }
        if here.map_or(0, Cluster::affiliates) >= self.limits.affiliates.saturating_mul(OVERSHOOT) {
            return Err(Refusal::Affiliates);
        }
        if self.expiries.len() >= self.limits.affiliates_in_all.saturating_mul(OVERSHOOT) {
            return Err(Refusal::ServerAffiliates);
        }
        Ok(true)
    }
}

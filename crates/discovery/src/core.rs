//! Core of a discovery server: the affiliates it stores, and the messages to its watches. No I/O; time is an argument.
//!
//! Each change gets the next number of its cluster; of an affiliate only the last change counts. A watch remembers the number up to
//! which it has been told: however slow it is, it costs one number, and its next message has the latest state.
//!
//! Replicas of a server share what they store through etcd, which numbers its changes, too (revisions). An update is then first
//! [proposed](Discovery::propose), written under the condition that nothing else was written meanwhile, and stored when that is
//! [complete](Discovery::complete) or when the watch of etcd [tells of it](Discovery::adopt).

mod admission;
mod admission_list;
mod affiliate;
mod cluster;
mod frames;
mod limits;
mod replica;
mod shared_store;
mod sources;
#[cfg(test)]
mod tests;
mod watch;
mod watches;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_wire::discovery::server::Affiliate;

use cluster::{Applied, Cluster, Removal};
use shared_store::Replica;
use sources::Sources;
use watch::Watch;

pub use admission_list::{AdmissionList, InvalidLine};
pub use affiliate::{SharedAffiliate, Stored, Update};
pub use limits::{Limits, Refusal};
pub use shared_store::Proposal;
pub use sources::Source;
pub use watch::{Notification, WatchId};

/// Everything that a server stores.
#[derive(Debug)]
pub struct Discovery {
    limits: Limits,
    /// Without a list everything is accepted.
    admission: Option<AdmissionList>,
    clusters: HashMap<Arc<str>, Cluster>,
    sources: Sources,
    watches: HashMap<WatchId, Watch>,
    next_watch: u64,
    /// Watches that wait and have something to tell now.
    ready: Vec<WatchId>,
    /// One entry for each affiliate: the first time at which it or one of its endpoints may expire.
    expiries: BTreeSet<(Instant, Arc<str>, Arc<str>)>,
    replica: Replica,
    counters: Counters,
}

/// Events since the server started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Affiliates that a client deleted.
    pub deleted: u64,
    /// Affiliates whose time to live ended.
    pub expired: u64,
    /// Endpoints whose time to live ended before that of their affiliate.
    pub expired_endpoints: u64,
    /// Messages to watches.
    pub notifications: u64,
    /// Updates that were accepted.
    pub updates: u64,
    /// Watches that were ended because they read nothing while too many affiliates were deleted.
    pub watches_ended: u64,
}

/// Counts of clusters, affiliates, endpoints and watches at present.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Clusters with affiliates or watches.
    pub clusters: usize,
    /// Affiliates.
    pub affiliates: usize,
    /// Endpoints of affiliates.
    pub endpoints: usize,
    /// Watches.
    pub watches: usize,
}

impl Discovery {
    /// Stores nothing yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            admission: None,
            clusters: HashMap::new(),
            sources: Sources::default(),
            watches: HashMap::new(),
            next_watch: 0,
            ready: Vec::new(),
            expiries: BTreeSet::new(),
            replica: Replica::default(),
            counters: Counters::default(),
        }
    }

    /// Time that a request of a caller has to wait for its turn.
    ///
    /// # Errors
    /// It would wait too long.
    pub fn admit(&mut self, source: Source, now: Instant) -> Result<Duration, Refusal> {
        self.sources.admit(source, now, &self.limits)
    }

    /// Stores what a client publishes. Nothing of an update that is refused is stored.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn update(&mut self, source: Source, update: &Update, now: Instant) -> Result<(), Refusal> {
        let is_new = self.check_update(source, update)?;
        let name = self.name_of(&update.cluster);
        let cluster = self.clusters.entry(Arc::clone(&name)).or_default();
        let applied = cluster.update(source, update, now, self.limits.endpoints);
        self.finish(&name, applied)?;
        if is_new {
            self.sources.count_affiliate(source, now, &self.limits);
        }
        self.counters.updates = self.counters.updates.saturating_add(1);
        Ok(())
    }

    /// Whether the affiliate is new.
    fn check_update(&self, source: Source, update: &Update) -> Result<bool, Refusal> {
        self.check_cluster(&update.cluster)?;
        self.limits.check_update(update)?;
        self.check_affiliate(&update.cluster, &update.affiliate)?;
        let known = self.clusters.get(update.cluster.as_str());
        if known.is_some_and(|cluster| cluster.has(&update.affiliate)) {
            return Ok(false);
        }
        if known.is_none() && self.clusters.len() >= self.limits.clusters {
            return Err(Refusal::Clusters);
        }
        if known.map_or(0, Cluster::affiliates) >= self.limits.affiliates {
            return Err(Refusal::Affiliates);
        }
        if self.expiries.len() >= self.limits.affiliates_in_all {
            return Err(Refusal::ServerAffiliates);
        }
        if self.sources.affiliates(source) >= self.limits.affiliates_per_source {
            return Err(Refusal::SourceAffiliates);
        }
        Ok(true)
    }

    fn name_of(&self, cluster: &str) -> Arc<str> {
        let known = self.clusters.get_key_value(cluster);
        known.map_or_else(|| Arc::from(cluster), |(name, _)| Arc::clone(name))
    }

    /// Queues the expiry of a changed affiliate and wakes its watches, or forgets the cluster that nothing was stored in.
    fn finish(&mut self, name: &Arc<str>, applied: Result<Applied, Refusal>) -> Result<(), Refusal> {
        let applied = match applied {
            Ok(applied) => applied,
            Err(refusal) => {
                self.forget_if_empty(name);
                return Err(refusal);
            }
        };
        if let Some(queued) = applied.queued {
            self.expiries.remove(&(queued, Arc::clone(name), Arc::clone(&applied.affiliate)));
        }
        self.expiries.insert((applied.expires, Arc::clone(name), applied.affiliate));
        if applied.has_changed {
            self.wake(name);
        }
        Ok(())
    }

    /// Removes an affiliate, if it is there.
    ///
    /// # Errors
    /// An identifier is none.
    pub fn delete(&mut self, cluster: &str, affiliate: &str) -> Result<(), Refusal> {
        self.check_ids(cluster, affiliate)?;
        if let Some((name, _)) = self.clusters.get_key_value(cluster) {
            let name = Arc::clone(name);
            if self.remove(&name, affiliate, Removal::Deleted) {
                self.counters.deleted = self.counters.deleted.saturating_add(1);
            }
        }
        Ok(())
    }

    /// Whether a deletion of this affiliate is accepted.
    ///
    /// # Errors
    /// An identifier is none.
    pub fn check_ids(&self, cluster: &str, affiliate: &str) -> Result<(), Refusal> {
        self.check_cluster(cluster)?;
        self.limits.check_affiliate_id(affiliate)
    }

    /// All affiliates of a cluster. One that is not known is empty, and stays unknown.
    ///
    /// # Errors
    /// The identifier is none.
    pub fn list(&self, cluster: &str) -> Result<Vec<Affiliate>, Refusal> {
        self.check_cluster(cluster)?;
        Ok(self.clusters.get(cluster).map(Cluster::list).unwrap_or_default())
    }

    /// The first time at which something expires.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.expiries.first().map(|(at, ..)| *at)
    }

    /// Removes what has expired, and callers that have nothing here.
    pub fn handle_timeout(&mut self, now: Instant) {
        while !self.replica.holds_expiries(now)
            && let Some((at, cluster, affiliate)) = self.expiries.pop_first()
        {
            if at > now {
                self.expiries.insert((at, cluster, affiliate));
                break;
            }
            self.expire(cluster, affiliate, now);
        }
        self.sources.forget_idle(now);
        self.clusters.values_mut().for_each(Cluster::age_frames);
    }

    /// Affiliates that are stored, each with the rest of its time to live.
    pub fn stored(&self, now: Instant) -> Vec<Stored> {
        let clusters = self.clusters.iter();
        clusters.flat_map(|(name, cluster)| cluster.stored(name, now)).collect()
    }

    /// Stores what was kept on disk; what is refused is left out. The number of affiliates that were restored.
    pub fn restore(&mut self, stored: &[Stored], now: Instant) -> usize {
        stored.iter().filter(|stored| self.restore_one(stored, now)).count()
    }

    fn restore_one(&mut self, stored: &Stored, now: Instant) -> bool {
        let mut accept = |data, endpoints, ttl| {
            let cluster = (*stored.cluster).to_owned();
            let affiliate = (*stored.affiliate).to_owned();
            let update = Update { cluster, affiliate, data, endpoints, ttl };
            // No caller is charged for it.
            self.update(Source::unknown(), &update, now).is_ok()
        };
        // The data last: it sets how long the affiliate lives, endpoints only extend that.
        let mut is_accepted = false;
        for (endpoint, ttl) in &stored.endpoints {
            is_accepted |= accept(None, vec![endpoint.clone()], *ttl);
        }
        let data = Some(stored.data.clone()).filter(|data| !data.is_empty());
        data.map_or(is_accepted, |data| accept(Some(data), Vec::new(), stored.ttl))
    }

    /// Events since the server started.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Counts of clusters, affiliates, endpoints and watches at present.
    pub fn totals(&self) -> Totals {
        Totals {
            clusters: self.clusters.len(),
            affiliates: self.expiries.len(),
            endpoints: self.clusters.values().map(Cluster::endpoints).sum(),
            watches: self.watches.len(),
        }
    }

    fn expire(&mut self, name: Arc<str>, affiliate: Arc<str>, now: Instant) {
        let Some(cluster) = self.clusters.get_mut(&name) else { return };
        let Some(outcome) = cluster.expire(&affiliate, now) else { return };
        let endpoints = u64::try_from(outcome.endpoints).unwrap_or(u64::MAX);
        match outcome.next {
            Some(next) => {
                self.counters.expired_endpoints = self.counters.expired_endpoints.saturating_add(endpoints);
                self.expiries.insert((next, Arc::clone(&name), affiliate));
                if endpoints > 0 {
                    self.wake(&name);
                }
            }
            None => {
                self.counters.expired = self.counters.expired.saturating_add(1);
                self.remove(&name, &affiliate, Removal::Expired);
            }
        }
    }

    fn remove(&mut self, name: &Arc<str>, affiliate: &str, removal: Removal) -> bool {
        let Some(cluster) = self.clusters.get_mut(name) else { return false };
        let Some(removed) = cluster.remove(affiliate, removal) else { return false };
        self.expiries.remove(&(removed.queued, Arc::clone(name), removed.affiliate));
        self.sources.uncount_affiliate(removed.source);
        self.prune(name);
        self.wake(name);
        self.forget_if_empty(name);
        true
    }

    fn forget_if_empty(&mut self, name: &Arc<str>) {
        if self.clusters.get(name).is_some_and(Cluster::is_empty) {
            self.clusters.remove(name);
        }
    }
}

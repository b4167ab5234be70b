//! Watches, and the next message to each.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use prost::bytes::Bytes;

use super::cluster::Cluster;
use super::watch::Watch;
use super::{Discovery, Notification, Refusal, Source, WatchId, frames};

impl Discovery {
    /// Begins a watch. Its first message has all affiliates of the cluster, or says that more of them follow.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn watch(&mut self, source: Source, cluster: &str, now: Instant) -> Result<WatchId, Refusal> {
        self.check_cluster(cluster)?;
        let known = self.clusters.get_key_value(cluster).map(|(name, _)| Arc::clone(name));
        if known.is_none() && self.clusters.len() >= self.limits.clusters {
            return Err(Refusal::Clusters);
        }
        if self.watches.len() >= self.limits.watches {
            return Err(Refusal::Watches);
        }
        self.sources.count_watch(source, now, &self.limits)?;
        let name = known.unwrap_or_else(|| Arc::from(cluster));
        let id = WatchId(self.next_watch);
        self.next_watch = self.next_watch.wrapping_add(1);
        self.clusters.entry(Arc::clone(&name)).or_default().watches.insert(id);
        let watch = Watch { cluster: name, source, known: 0, in_snapshot: true, is_waiting: false };
        self.watches.insert(id, watch);
        Ok(id)
    }

    /// Ends a watch.
    pub fn unwatch(&mut self, id: WatchId) {
        let Some(watch) = self.watches.remove(&id) else { return };
        self.sources.uncount_watch(watch.source);
        if let Some(cluster) = self.clusters.get_mut(&watch.cluster) {
            cluster.watches.remove(&id);
            if cluster.watches.is_empty() {
                cluster.prune(&BTreeSet::new());
            }
        }
        self.forget_if_empty(&watch.cluster);
    }

    /// Next message to a watch: the latest state of what has changed since its last one. As [`Discovery::poll_frame`].
    pub fn poll_watch(&mut self, id: WatchId) -> Notification {
        match self.poll_frame(id) {
            Notification::Nothing => Notification::Nothing,
            Notification::Message(frame) => Notification::Message(frames::decode(&frame)),
            Notification::Ended => Notification::Ended,
        }
    }

    /// Next message to a watch, length-prefixed as in gRPC. Watches that get the same message share its bytes.
    pub fn poll_frame(&mut self, id: WatchId) -> Notification<Bytes> {
        let Some(watch) = self.watches.get_mut(&id) else { return Notification::Ended };
        let Some(cluster) = self.clusters.get_mut(&watch.cluster) else { return Notification::Ended };
        let Some(frame) = cluster.frame((watch.known, watch.in_snapshot)) else {
            watch.known = cluster.last_change();
            watch.is_waiting = true;
            return Notification::Nothing;
        };
        watch.known = frame.until;
        watch.in_snapshot = watch.in_snapshot && !frame.is_complete;
        self.counters.notifications = self.counters.notifications.saturating_add(1);
        Notification::Message(frame.bytes)
    }

    /// Watches that waited and have something to be told, or have ended, since the last call.
    pub fn take_ready(&mut self) -> Vec<WatchId> {
        std::mem::take(&mut self.ready)
    }

    pub(super) fn wake(&mut self, name: &Arc<str>) {
        let Some(cluster) = self.clusters.get(name) else { return };
        for id in &cluster.watches {
            if let Some(watch) = self.watches.get_mut(id).filter(|watch| watch.is_waiting) {
                watch.is_waiting = false;
                self.ready.push(*id);
            }
        }
    }

    /// Removed affiliates are kept for watches that know them. A watch that reads nothing while as many are deleted as two full
    /// clusters have would keep more and more.
    pub(super) fn prune(&mut self, name: &Arc<str>) {
        while let Some(cluster) = self.clusters.get_mut(name).filter(|cluster| cluster.is_prunable()) {
            let known = |cluster: &Cluster, watches: &std::collections::HashMap<WatchId, Watch>| {
                let of = |id: &WatchId| watches.get(id).map(|watch| (watch.known, *id));
                cluster.watches.iter().filter_map(of).collect::<BTreeSet<_>>()
            };
            let all = known(cluster, &self.watches);
            let left = cluster.prune(&all.iter().map(|(known, _)| *known).collect());
            if left <= self.limits.affiliates.saturating_mul(2) {
                break;
            }
            let Some((_, slowest)) = all.first().copied() else { break };
            self.unwatch(slowest);
            self.ready.push(slowest);
            self.counters.watches_ended = self.counters.watches_ended.saturating_add(1);
        }
    }
}

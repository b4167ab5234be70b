//! Admission of clusters and affiliates, if the server's operator lists them.

use std::sync::Arc;

use super::cluster::{Cluster, Removal};
use super::{AdmissionList, Discovery, Refusal, WatchId};

impl Discovery {
    /// From now on accepts what is listed, and nothing else. What is stored and not accepted is deleted, as if a client had done so;
    /// watches of clusters that are not accepted end.
    pub fn set_admission(&mut self, list: AdmissionList) {
        let refused: Vec<(Arc<str>, Vec<Arc<str>>)> = self
            .clusters
            .iter()
            .map(|(name, cluster)| {
                let ids = cluster.ids().filter(|id| !list.accepts(name, id)).cloned().collect();
                (Arc::clone(name), ids)
            })
            .collect();
        for (name, affiliates) in refused {
            for affiliate in affiliates {
                if self.remove(&name, &affiliate, Removal::Deleted) {
                    self.counters.deleted = self.counters.deleted.saturating_add(1);
                }
            }
            if !list.accepts_cluster(&name) {
                self.end_watches(&name);
            }
        }
        self.admission = Some(list);
    }

    fn end_watches(&mut self, name: &Arc<str>) {
        let watches: Vec<WatchId> =
            self.clusters.get(name).map(Cluster::watch_ids).into_iter().flatten().collect();
        for watch in watches {
            self.unwatch(watch);
            self.ready.push(watch);
        }
    }

    pub(super) fn check_cluster(&self, cluster: &str) -> Result<(), Refusal> {
        self.limits.check_cluster_id(cluster)?;
        match &self.admission {
            Some(list) if !list.accepts_cluster(cluster) => Err(Refusal::NotListed),
            _ => Ok(()),
        }
    }

    pub(super) fn check_affiliate(&self, cluster: &str, affiliate: &str) -> Result<(), Refusal> {
        match &self.admission {
            Some(list) if !list.accepts(cluster, affiliate) => Err(Refusal::NotListed),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::time::{Duration, Instant};

    use super::super::{Limits, Notification, Source, Update};
    use super::*;

    fn list(text: &str) -> AdmissionList {
        AdmissionList::parse(text).unwrap()
    }

    #[test]
    fn only_what_is_listed_is_accepted_and_what_is_removed_is_deleted_at_once() {
        let mut discovery = Discovery::new(Limits::default());
        let (source, now) = (Source::of(IpAddr::from([192, 0, 2, 1])), Instant::now());
        let update = |cluster: &str, affiliate: &str| Update {
            cluster: cluster.to_owned(),
            affiliate: affiliate.to_owned(),
            ttl: Duration::from_secs(60),
            ..Update::default()
        };
        discovery.update(source, &update("other", "a"), now).unwrap();
        let other = discovery.watch(source, "other", now).unwrap();
        discovery.set_admission(list("# nodes\nc a\nc b\n\nopen *\n"));
        assert_eq!(discovery.poll_watch(other), Notification::Ended);
        assert_eq!(discovery.take_ready(), [other]);
        assert_eq!(discovery.totals().clusters, 0);
        for (cluster, affiliate, expected) in [
            ("c", "a", Ok(())),
            ("c", "b", Ok(())),
            ("c", "made up", Err(Refusal::NotListed)),
            ("open", "anything", Ok(())),
            ("other", "a", Err(Refusal::NotListed)),
        ] {
            assert_eq!(discovery.update(source, &update(cluster, affiliate), now), expected);
        }
        assert_eq!(discovery.list("other"), Err(Refusal::NotListed));
        assert_eq!(discovery.watch(source, "other", now), Err(Refusal::NotListed));
        assert_eq!(discovery.delete("other", "a"), Err(Refusal::NotListed));

        let watch = discovery.watch(source, "c", now).unwrap();
        assert!(matches!(discovery.poll_watch(watch), Notification::Message(message) if !message.deleted));
        assert_eq!(discovery.poll_watch(watch), Notification::Nothing);
        discovery.set_admission(list("c a\nopen *"));
        assert_eq!(discovery.take_ready(), [watch]);
        let Notification::Message(told) = discovery.poll_watch(watch) else { panic!("nothing is told") };
        assert!(told.deleted && !told.expired && told.affiliates[0].id == "b", "{told:?}");
        assert_eq!(discovery.update(source, &update("c", "b"), now), Err(Refusal::NotListed));
    }
}

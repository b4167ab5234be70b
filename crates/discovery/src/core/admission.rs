//! Which clusters and affiliates a server accepts, if its operator lists them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fairlead_wire::discovery::MAX_ID;

use super::cluster::{Cluster, Removal};
use super::{Discovery, Refusal, WatchId};

/// Clusters, and those of their affiliates that may be published.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdmissionList(BTreeMap<String, Affiliates>);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Affiliates {
    all: bool,
    listed: BTreeSet<String>,
}

/// A line of the list cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {text:?} is not the ID of a cluster and that of an affiliate, or *")]
pub struct InvalidLine {
    line: usize,
    text: String,
}

impl AdmissionList {
    /// Reads lines with the ID of a cluster and that of an affiliate, or `*` for all of its affiliates. Empty lines and those that
    /// begin with `#` do not count.
    ///
    /// # Errors
    /// See [`InvalidLine`].
    pub fn parse(text: &str) -> Result<Self, InvalidLine> {
        let mut list = Self::default();
        let lines = text.lines().map(str::trim).zip(1..);
        for (text, line) in lines.filter(|(text, _)| !text.is_empty() && !text.starts_with('#')) {
            let mut words = text.split_whitespace();
            let (Some(cluster), Some(affiliate), None) = (words.next(), words.next(), words.next()) else {
                return Err(InvalidLine { line, text: text.to_owned() });
            };
            if cluster.len() > MAX_ID || affiliate.len() > MAX_ID {
                return Err(InvalidLine { line, text: text.to_owned() });
            }
            let affiliates = list.0.entry(cluster.to_owned()).or_default();
            match affiliate {
                "*" => affiliates.all = true,
                _ => {
                    affiliates.listed.insert(affiliate.to_owned());
                }
            }
        }
        Ok(list)
    }

    fn accepts_cluster(&self, cluster: &str) -> bool {
        self.0.contains_key(cluster)
    }

    fn accepts(&self, cluster: &str, affiliate: &str) -> bool {
        let affiliates = self.0.get(cluster);
        affiliates.is_some_and(|affiliates| affiliates.all || affiliates.listed.contains(affiliate))
    }
}

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

    #[test]
    fn a_line_that_means_nothing_is_named() {
        for text in ["c", "c a b", &format!("{} a", "c".repeat(257))] {
            let error = AdmissionList::parse(&format!("c a\n{text}")).unwrap_err();
            assert!(error.to_string().starts_with("line 2: "), "{error}");
        }
        assert_eq!(list(""), AdmissionList::default());
    }
}

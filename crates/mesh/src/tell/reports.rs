//! Reports of the mesh on their way to the status, metrics and the publisher.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use fairlead_keys::PublicKey;
use fairlead_members::departures::Session;
use fairlead_members::provenance::DiscoveryStatus;
use tokio::sync::watch;

use super::metrics::MeshMetrics;
use crate::apply::report::Report;
use crate::model::problem::MeshFailure;

/// State of the mesh for the publisher.
#[derive(Debug, Clone, Default)]
pub(crate) enum Publication {
    /// This node is in the mesh.
    Member(Arc<Report>),
    /// The last WireKubeMesh was deleted.
    Left,
    /// This node is kept from the mesh.
    Outside(MeshFailure),
    /// There was no report yet.
    #[default]
    Unknown,
}

/// The mesh as of the last step.
#[derive(Debug, Default, Clone)]
pub struct Snapshot {
    /// Report of the last good step.
    pub report: Option<Arc<Report>>,
    /// Reason why the last reconciliation failed, or why there was none.
    pub failure: Option<MeshFailure>,
    /// Time since which `failure` has been for the same reason.
    pub failing_since: Option<Instant>,
    /// Reason why other nodes do not see this node's state.
    pub unpublished: Option<String>,
}

/// Distribution of reports to status, metrics and the publisher.
pub(crate) struct Reports {
    node: String,
    snapshot: Mutex<Snapshot>,
    metrics: Option<MeshMetrics>,
    /// Whether peers have metrics of their own.
    per_peer: bool,
    published: watch::Sender<Publication>,
}

impl Reports {
    pub(crate) fn new(node: &str, metrics: Option<MeshMetrics>, per_peer: bool) -> Self {
        let published = watch::Sender::default();
        Self { node: node.to_owned(), snapshot: Mutex::default(), metrics, per_peer, published }
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        self.lock().clone()
    }

    /// Session with a member as of the last step.
    pub(crate) fn session(&self, key: &PublicKey) -> Session {
        let report = self.lock().report.clone();
        report.map_or(Session::Unknown, |report| report.session(key, SystemTime::now()))
    }

    fn lock(&self) -> MutexGuard<'_, Snapshot> {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sees each report that would publish something else than the one before.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Publication> {
        self.published.subscribe()
    }

    /// The API server takes what this node publishes, or refuses it for this reason.
    pub(crate) fn published(&self, refusal: Option<String>) {
        self.lock().unpublished = refusal;
    }

    pub(crate) fn fail(&self, failure: MeshFailure) {
        if let Some(metrics) = &self.metrics
            && failure != MeshFailure::NoMesh
        {
            metrics.failed();
        }
        if matches!(failure, MeshFailure::NumbersTaken(_)) {
            let outside = Publication::Outside(failure.clone());
            self.published.send_if_modified(|last| {
                let is_known = matches!(last, Publication::Outside(known) if *known == failure);
                *last = outside;
                !is_known
            });
        }
        let mut snapshot = self.lock();
        let lasts = snapshot.failure.as_ref().is_some_and(|known| known.reason() == failure.reason());
        snapshot.failing_since = snapshot.failing_since.filter(|_| lasts).or_else(|| Some(Instant::now()));
        snapshot.failure = Some(failure);
    }

    /// Reports that there is no mesh on this node any more.
    pub(crate) fn disable(&self) {
        if let Some(metrics) = &self.metrics {
            metrics.clear();
        }
        *self.lock() = Snapshot { failure: Some(MeshFailure::NoMesh), ..Snapshot::default() };
        self.published.send_replace(Publication::Left);
    }

    pub(crate) fn discovery(&self, status: &DiscoveryStatus) {
        if let Some(metrics) = &self.metrics {
            metrics.update_discovery(status);
        }
    }

    pub(crate) fn clear_failure(&self) {
        self.lock().failure = None;
    }

    pub(crate) fn update(&self, report: Report) {
        let report = Arc::new(report);
        if let Some(metrics) = &self.metrics {
            metrics.update(&self.node, &report, self.per_peer);
        }
        let is_outside = {
            let mut snapshot = self.lock();
            snapshot.report = Some(Arc::clone(&report));
            matches!(snapshot.failure, Some(MeshFailure::NumbersTaken(_)))
        };
        if is_outside {
            return;
        }
        self.published.send_if_modified(|last| {
            let differs = match &*last {
                Publication::Member(last) => !last.publishes_the_same(&report),
                Publication::Left | Publication::Outside(_) | Publication::Unknown => true,
            };
            // The publisher reads the latest counters whenever it writes.
            *last = Publication::Member(report);
            differs
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn it_is_known_since_when_a_reason_has_lasted() {
        let reports = Reports::new("self", None, false);
        let since = |failure| {
            std::thread::sleep(Duration::from_millis(2));
            reports.fail(failure);
            reports.snapshot().failing_since.unwrap()
        };
        let forbidden = |words: &str| MeshFailure::Forbidden(words.to_owned());
        let first = since(forbidden("peers"));
        assert_eq!(since(forbidden("meshes")), first, "in other words");
        let other = since(MeshFailure::NodeNotFound("self".to_owned()));
        assert!(other > first);
        reports.clear_failure();
        let again = since(MeshFailure::NodeNotFound("self".to_owned()));
        assert!(again > other, "there was none in between");
        reports.disable();
        assert!(since(MeshFailure::NoMesh) > again);
    }
}

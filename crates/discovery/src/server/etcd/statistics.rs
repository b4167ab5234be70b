//! Statistics of etcd for metrics.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::value::Rejection;

/// Shortest time between two log lines about keys that are left out for the same reason.
const LOG_INTERVAL: Duration = Duration::from_secs(600);

/// The numbers of a moment.
#[derive(Debug, Clone, Default)]
pub struct EtcdSnapshot {
    /// Whether this replica is connected and has read everything.
    pub is_connected: bool,
    /// The last revision that the watch has told of.
    pub revision: i64,
    /// Sessions that ended.
    pub lost: u64,
    /// Times that everything was listed.
    pub lists: u64,
    /// Writes that etcd accepted.
    pub writes: u64,
    /// Writes that were made again, because another replica had changed the same affiliate.
    pub conflicts: u64,
    /// Writes that failed, which clients were told.
    pub failed_writes: u64,
    /// Keys that were left out, by reason.
    pub rejections: Vec<(&'static str, u64)>,
}

/// Counters.
#[derive(Debug, Default)]
pub(super) struct Statistics {
    pub(super) lost: AtomicU64,
    pub(super) lists: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) conflicts: AtomicU64,
    pub(super) failed_writes: AtomicU64,
    rejections: [AtomicU64; Rejection::LABELS.len()],
}

impl Statistics {
    pub(super) fn reject(&self, rejection: Rejection) {
        let counts = Rejection::LABELS.iter().zip(&self.rejections);
        counts.filter(|(label, _)| **label == rejection.label()).for_each(|(_, count)| add(count));
    }

    pub(super) fn snapshot(&self, is_connected: bool, revision: i64) -> EtcdSnapshot {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        EtcdSnapshot {
            is_connected,
            revision,
            lost: read(&self.lost),
            lists: read(&self.lists),
            writes: read(&self.writes),
            conflicts: read(&self.conflicts),
            failed_writes: read(&self.failed_writes),
            rejections: Rejection::LABELS.into_iter().zip(self.rejections.iter().map(read)).collect(),
        }
    }
}

pub(super) fn add(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}

/// Limits log lines about keys that are left out: anything may be in etcd as often as it likes.
#[derive(Debug, Default)]
pub(super) struct Throttle(HashMap<&'static str, Instant>);

impl Throttle {
    pub(super) fn permits(&mut self, rejection: Rejection, now: Instant) -> bool {
        let last = self.0.get(rejection.label());
        if last.is_some_and(|last| now.saturating_duration_since(*last) < LOG_INTERVAL) {
            return false;
        }
        self.0.insert(rejection.label(), now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_logged_once_in_ten_minutes() {
        let (mut throttle, now) = (Throttle::default(), Instant::now());
        assert!(throttle.permits(Rejection::Key, now));
        assert!(throttle.permits(Rejection::Value, now));
        assert!(!throttle.permits(Rejection::Key, now + Duration::from_secs(599)));
        assert!(throttle.permits(Rejection::Key, now + Duration::from_secs(600)));
    }
}

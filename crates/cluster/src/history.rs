//! Notices that etcd was restored from a backup: the resource version goes back, or far ahead where the operator had it
//! raised, so that watches of before end (`etcdutl snapshot restore --bump-revision`; 1,000,000,000 is advised).

use std::fmt::Debug;
use std::time::{Duration, Instant};

use kube::api::ListParams;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::timeout;

/// How long the API server may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// More revisions in a second than etcd can write.
const REVISIONS_PER_SECOND: u64 = 100_000;

/// The latest resource version that was seen, and when.
#[derive(Debug, Default)]
pub struct History {
    latest: Option<(Instant, u64)>,
}

impl History {
    /// Takes note of the resource version of a list that was read from etcd, and says whether etcd cannot have come to it
    /// from the last one.
    pub fn is_restored(&mut self, now: Instant, version: u64) -> bool {
        let Some((then, before)) = self.latest.replace((now, version)) else { return false };
        let seconds = now.saturating_duration_since(then).as_secs().saturating_add(1);
        version < before || version.saturating_sub(before) > seconds.saturating_mul(REVISIONS_PER_SECOND)
    }
}

/// Reads the resource version every `interval`, forever, and counts in `restorations` how often it went back.
pub async fn follow<K>(api: Api<K>, interval: Duration, restorations: watch::Sender<u64>)
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    let mut history = History::default();
    // Without a resource version in the request, the answer is as recent as etcd.
    let parameters = ListParams::default().limit(1);
    loop {
        let list = api.list_metadata(&parameters);
        let version = timeout(TIMEOUT, list).await.ok().and_then(Result::ok);
        let version = version.and_then(|list| list.metadata.resource_version?.parse().ok());
        if version.is_some_and(|version| history.is_restored(Instant::now(), version)) {
            tracing::warn!("etcd was restored from a backup");
            restorations.send_modify(|count| *count = count.saturating_add(1));
        }
        tokio::time::sleep(interval).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_back_or_far_ahead_is_a_restored_backup_and_counts_once() {
        let (mut history, start) = (History::default(), Instant::now());
        let steps = [
            (0, 10),
            (5, 10),
            (10, 25),
            (15, 24),
            (20, 24),
            (25, 30),
            (30, 1_000_000_020),
            (35, 1_000_000_021),
        ];
        let restored =
            steps.map(|(second, version)| history.is_restored(start + Duration::from_secs(second), version));
        assert_eq!(restored, [false, false, false, true, false, false, true, false]);
        let next_day = start + Duration::from_secs(86_400);
        assert!(!history.is_restored(next_day, 5_000_000_000), "much may happen while nothing is read");
    }
}

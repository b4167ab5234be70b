//! Notices that the API server has gone back in time: etcd was restored from a backup.
//!
//! A watch that was begun before goes on as if nothing had happened, and shows nothing until the resource version has
//! caught up, which can take days. Kubernetes's own advice is to restart all clients.

use std::fmt::Debug;
use std::time::Duration;

use kube::api::ListParams;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::timeout;

/// How long the API server may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The latest resource version that was seen.
#[derive(Debug, Default)]
pub struct History {
    latest: u64,
}

impl History {
    /// Takes note of the resource version of a list that was read from etcd, and says whether it is older than the last.
    pub fn goes_back(&mut self, version: u64) -> bool {
        let before = std::mem::replace(&mut self.latest, version);
        version < before
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
        if version.is_some_and(|version| history.goes_back(version)) {
            tracing::warn!("the API server has gone back in time: etcd was restored from a backup");
            restorations.send_modify(|count| *count = count.saturating_add(1));
        }
        tokio::time::sleep(interval).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lower_version_is_an_older_state_and_each_step_back_counts_once() {
        let mut history = History::default();
        let steps = [10, 10, 25, 24, 24, 30].map(|version| history.goes_back(version));
        assert_eq!(steps, [false, false, false, true, false, false]);
    }
}

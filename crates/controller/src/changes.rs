//! Signals that run a task again which keeps objects current, made from objects of some kinds.

use std::time::Duration;

use futures::FutureExt as _;
use futures::future::select_all;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// Signals of the watch caches that a task reads.
pub(crate) struct Changes<const KINDS: usize> {
    pub(crate) watches: [watch::Receiver<u64>; KINDS],
    /// Interval without a change, for writes that failed.
    pub(crate) resync: Duration,
    /// Changes are collected this long after the first.
    pub(crate) debounce: Duration,
}

impl<const KINDS: usize> Changes<KINDS> {
    /// Resolves when the task is to run again.
    pub(crate) async fn next(&mut self) {
        let changed = select_all(self.watches.iter_mut().map(|watch| watch.changed().boxed()));
        let _ = timeout(self.resync, changed).await;
        sleep(self.debounce).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_runs_after_a_change_of_any_kind_or_the_interval() {
        let ((first, one), (second, two)) = (watch::channel(0), watch::channel(0));
        let (never, soon) = (Duration::from_secs(3600), Duration::from_millis(1));
        let mut changes = Changes { watches: [one, two], resync: never, debounce: soon };
        for sender in [&first, &second] {
            sender.send_replace(1);
            changes.next().await;
            assert!(timeout(10 * soon, changes.next()).await.is_err(), "one change, one run");
        }
        changes.resync = soon;
        changes.next().await;
    }
}

//! Serializes the CNI operations of one container; operations of different containers run in parallel.
//!
//! A DEL that overtakes an ADD of the same container would leave its link behind. An ADD keeps its guard while it waits
//! for a block: only operations of the same container wait for it, as they must.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Mutex as ContainerLock, OwnedMutexGuard};

/// One lock per container ID.
#[derive(Debug, Default)]
pub struct ContainerLocks(Mutex<HashMap<String, Arc<ContainerLock<()>>>>);

/// Holds the lock of one container until it is dropped.
#[derive(Debug)]
pub struct Guard {
    _guard: OwnedMutexGuard<()>,
}

impl ContainerLocks {
    /// Waits for the lock of a container.
    pub async fn lock(&self, container: &str) -> Guard {
        Guard { _guard: self.of(container).lock_owned().await }
    }

    /// The lock of a container if it is free.
    pub fn try_lock(&self, container: &str) -> Option<Guard> {
        self.of(container).try_lock_owned().ok().map(|guard| Guard { _guard: guard })
    }

    fn of(&self, container: &str) -> Arc<ContainerLock<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Neither held nor waited for.
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        Arc::clone(locks.entry(container.to_owned()).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn operations_of_one_container_wait_and_others_do_not() {
        let locks = ContainerLocks::default();
        let first = locks.lock("a").await;
        let mut second = Box::pin(locks.lock("a"));
        assert!(futures::poll!(&mut second).is_pending());
        assert!(locks.try_lock("a").is_none());
        assert!(locks.try_lock("c").is_some());
        let other = locks.lock("b").await;
        drop(first);
        assert!(futures::poll!(&mut second).is_ready());
        drop(other);
    }

    #[tokio::test]
    async fn locks_of_finished_containers_are_removed() {
        let locks = ContainerLocks::default();
        for id in 0..100 {
            drop(locks.lock(&id.to_string()).await);
        }
        drop(locks.lock("last").await);
        assert_eq!(locks.0.lock().unwrap().len(), 1);
    }
}

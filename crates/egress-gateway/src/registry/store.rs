//! The registry as tasks share it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::Registry;

/// The registry, and a watch of its version.
pub(crate) struct Store {
    registry: Mutex<Registry>,
    version: watch::Sender<u64>,
}

impl Store {
    pub(crate) fn new(registry: Registry) -> Self {
        Self { version: watch::Sender::new(registry.version()), registry: Mutex::new(registry) }
    }

    /// Works on the registry, and wakes the tasks that follow its changes.
    pub(crate) fn update<T>(&self, work: impl FnOnce(&mut Registry) -> T) -> T {
        let mut registry = self.locked();
        let result = work(&mut registry);
        let version = registry.version();
        drop(registry);
        self.version.send_if_modified(|known| {
            let is_new = *known < version;
            *known = version.max(*known);
            is_new
        });
        result
    }

    /// Reads the registry; wakes no task.
    pub(crate) fn read<T>(&self, work: impl FnOnce(&Registry) -> T) -> T {
        work(&self.locked())
    }

    fn locked(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The version of the registry.
    pub(crate) fn version(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }
}

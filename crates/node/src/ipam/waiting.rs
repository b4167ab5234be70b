//! How many pods wait for a block.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A pod among those that wait for a block of a pool, until it is dropped.
pub(super) struct Waiting<'a> {
    all: &'a Mutex<BTreeMap<String, usize>>,
    pool: String,
}

impl<'a> Waiting<'a> {
    /// One more.
    pub(super) fn enter(all: &'a Mutex<BTreeMap<String, usize>>, pool: &str) -> Self {
        let waiting = Self { all, pool: pool.to_owned() };
        let mut counts = waiting.counts();
        let pods = counts.entry(pool.to_owned()).or_default();
        *pods = pods.saturating_add(1);
        drop(counts);
        waiting
    }

    /// How many wait, this one included.
    pub(super) fn pods(&self) -> usize {
        self.counts().get(&self.pool).copied().unwrap_or(1)
    }

    fn counts(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut counts = self.counts();
        if let Some(pods) = counts.get_mut(&self.pool) {
            *pods = pods.saturating_sub(1);
            if *pods == 0 {
                counts.remove(&self.pool);
            }
        }
    }
}

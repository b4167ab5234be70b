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
        let mut counts = lock(all);
        let pods = counts.entry(pool.to_owned()).or_default();
        *pods = pods.saturating_add(1);
        drop(counts);
        waiting
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut counts = lock(self.all);
        if let Some(pods) = counts.get_mut(&self.pool) {
            *pods = pods.saturating_sub(1);
            if *pods == 0 {
                counts.remove(&self.pool);
            }
        }
    }
}

/// How many wait for a block of a pool.
pub(super) fn pods(all: &Mutex<BTreeMap<String, usize>>, pool: &str) -> usize {
    lock(all).get(pool).copied().unwrap_or_default()
}

fn lock(all: &Mutex<BTreeMap<String, usize>>) -> MutexGuard<'_, BTreeMap<String, usize>> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

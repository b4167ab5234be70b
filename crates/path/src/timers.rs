//! An ordered queue of timers, one per key: a wake costs O(log n) for each timer that is due, and nothing for the
//! others.

use std::collections::BTreeSet;
use std::time::Duration;

#[derive(Debug)]
pub(crate) struct TimerQueue<K>(BTreeSet<(Duration, K)>);

impl<K> Default for TimerQueue<K> {
    fn default() -> Self {
        Self(BTreeSet::new())
    }
}

impl<K: Ord + Copy> TimerQueue<K> {
    /// Moves the timer of `key` from `*current`, where its owner keeps it, to `next`.
    pub(crate) fn reschedule(&mut self, key: K, current: &mut Option<Duration>, next: Option<Duration>) {
        if *current == next {
            return;
        }
        if let Some(at) = current.take() {
            self.0.remove(&(at, key));
        }
        if let Some(at) = next {
            self.0.insert((at, key));
        }
        *current = next;
    }

    /// Number of timers.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The earliest timer.
    pub(crate) fn next(&self) -> Option<Duration> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Removes the earliest timer if it is due at `now`, and returns its key.
    pub(crate) fn pop_due(&mut self, now: Duration) -> Option<K> {
        let (at, _) = self.0.first()?;
        if *at > now {
            return None;
        }
        self.0.pop_first().map(|(_, key)| key)
    }
}

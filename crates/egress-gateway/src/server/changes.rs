//! Limit of the changes of one Node's clients. The data path makes and deletes a link for each, and the clients of all Nodes wait for it: a
//! faulty or compromised node program gets no more of its time than that.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fairlead_limits::{Rate, SourceBuckets};

use crate::registry::MAX_PER_NODE;

/// Clients that may change at once: as many as a Node can have, gone and new. Then one in [`INTERVAL`].
const RATE: Rate = Rate::one_each(INTERVAL, 2 * MAX_PER_NODE as u64);
/// kubelet starts fewer pods.
const INTERVAL: Duration = Duration::from_millis(50);

/// Changes that each Node has used up.
#[derive(Debug)]
pub(super) struct Changes(Mutex<SourceBuckets<String>>);

impl Default for Changes {
    fn default() -> Self {
        // Only Nodes of the cluster have a token.
        Self(Mutex::new(SourceBuckets::new(RATE, usize::MAX)))
    }
}

impl Changes {
    /// Counts so many changes of a Node, and says how long to wait before they are made.
    pub(super) fn pause(&self, node: &str, changes: usize, now: Instant) -> Duration {
        let mut nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.forget_full(now);
        nodes.charge(node.to_owned(), now, u64::try_from(changes).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BURST: Duration = INTERVAL.saturating_mul(2 * MAX_PER_NODE as u32);

    #[test]
    fn a_node_whose_clients_change_all_the_time_waits_and_no_other_does() {
        let (changes, mut now) = (Changes::default(), Instant::now());
        assert_eq!(changes.pause("hostile", MAX_PER_NODE, now), Duration::ZERO);
        assert_eq!(changes.pause("hostile", MAX_PER_NODE, now), Duration::ZERO);
        let pause = changes.pause("hostile", MAX_PER_NODE, now);
        assert_eq!(pause, INTERVAL * MAX_PER_NODE as u32);
        assert_eq!(changes.pause("other", MAX_PER_NODE, now), Duration::ZERO);
        now += pause;
        assert_eq!(changes.pause("hostile", 1, now), INTERVAL);
        now += BURST + INTERVAL;
        assert_eq!(changes.pause("hostile", 0, now), Duration::ZERO);
        assert!(changes.0.lock().unwrap().is_empty(), "a Node at rest takes no memory");
    }
}

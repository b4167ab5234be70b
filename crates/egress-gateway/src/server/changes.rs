//! How fast the clients of one Node may change. The data path makes and deletes a link for each, and the clients of all Nodes wait for it: a
//! faulty or compromised node program gets no more of its time than that.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::registry::MAX_PER_NODE;

/// Clients that may change at once: as many as a Node can have, gone and new.
const BURST: Duration = INTERVAL.saturating_mul(2 * MAX_PER_NODE as u32);
/// Then one in this time. kubelet starts fewer pods.
const INTERVAL: Duration = Duration::from_millis(50);

/// What each Node has used up.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// When each will have its whole burst again.
    whole_at: Mutex<BTreeMap<String, Instant>>,
}

impl Changes {
    /// Counts so many changes of a Node, and says how long to wait before they are made.
    pub(super) fn pause(&self, node: &str, changes: usize, now: Instant) -> Duration {
        let mut nodes = self.whole_at.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.retain(|_, whole_at| *whole_at > now);
        let cost = INTERVAL.saturating_mul(u32::try_from(changes).unwrap_or(u32::MAX));
        let before = nodes.get(node).copied().unwrap_or(now);
        let whole_at = before.checked_add(cost).unwrap_or(before);
        if whole_at > now {
            nodes.insert(node.to_owned(), whole_at);
        }
        whole_at.saturating_duration_since(now).saturating_sub(BURST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(changes.whole_at.lock().unwrap().is_empty(), "a Node at rest takes no memory");
    }
}

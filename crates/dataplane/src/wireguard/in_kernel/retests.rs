//! Times of the tests of the way past WireGuard that is in use, and of the better one, which may work by now.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

/// Time between two tests while nothing changes; up to half of it is added, so that nodes do not test together.
const INTERVAL: Duration = Duration::from_secs(600);
/// Least time between two tests after other programs have changed nftables: a firewall may have come or gone. Some change it all the time.
const MIN_INTERVAL: Duration = Duration::from_secs(30);

/// Time and findings of the last test.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Retests {
    last: Option<Last>,
}

#[derive(Debug, Clone, Copy)]
struct Last {
    at: Instant,
    /// The generation of nftables, if it could be read.
    generation: Option<u32>,
    interval: Duration,
}

impl Retests {
    /// There was a test. `random` is any number.
    pub(super) fn record(&mut self, at: Instant, generation: Option<u32>, random: u64) {
        let half = u64::try_from(INTERVAL.as_millis() / 2).unwrap_or(1).max(1);
        let added = random.checked_rem(half).unwrap_or_default();
        let interval = INTERVAL.saturating_add(Duration::from_millis(added));
        self.last = Some(Last { at, generation, interval });
    }

    /// Whether there was a test, and it is time for another one in this generation of nftables.
    pub(super) fn is_due(&self, now: Instant, generation: Option<u32>) -> bool {
        self.last.is_some_and(|last| {
            let age = now.saturating_duration_since(last.at);
            let is_changed = generation != last.generation;
            age >= last.interval || (is_changed && age >= MIN_INTERVAL)
        })
    }
}

/// Any number.
pub(super) fn random() -> u64 {
    RandomState::new().hash_one(0_u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_nftables_brings_the_next_test_forward_and_seldom() {
        let start = Instant::now();
        let after = |seconds: u64| start + Duration::from_secs(seconds);
        let mut retests = Retests::default();
        assert!(!retests.is_due(after(10_000), Some(1)), "there was none");
        retests.record(start, Some(7), 0);
        for (seconds, generation, is_due) in
            [(29, 8, false), (30, 8, true), (30, 7, false), (599, 7, false), (600, 7, true)]
        {
            assert_eq!(retests.is_due(after(seconds), Some(generation)), is_due, "{seconds} {generation}");
        }
        assert!(retests.is_due(after(30), None) && !retests.is_due(after(29), None));
        retests.record(start, Some(7), u64::MAX);
        assert!(retests.is_due(after(900), Some(7)));
    }
}

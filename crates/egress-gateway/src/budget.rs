//! How often one address may have a token reviewed, so that a flood of bad tokens neither loads the API server nor keeps others out.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Reviews that an address may have at once.
const BURST: u32 = 5;
/// Then one in this time.
const INTERVAL: Duration = Duration::from_secs(5);
/// Addresses that are remembered. Others are refused until one of these has its whole burst again: more have asked within
/// [`INTERVAL`] times [`BURST`] than a cluster has nodes.
const MAX_SOURCES: usize = 16_384;

/// What each address has used up.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    /// When each will have its whole burst again.
    whole_at: HashMap<IpAddr, Instant>,
}

impl Budget {
    /// Whether one more review of a token from this address is permitted now; it counts if so.
    pub(crate) fn take(&mut self, source: IpAddr, now: Instant) -> bool {
        if self.whole_at.len() >= MAX_SOURCES && !self.whole_at.contains_key(&source) {
            self.whole_at.retain(|_, whole_at| *whole_at > now);
            if self.whole_at.len() >= MAX_SOURCES {
                return false;
            }
        }
        let whole_at = self.whole_at.entry(source).or_insert(now);
        let next = (*whole_at).max(now) + INTERVAL;
        if next.saturating_duration_since(now) > INTERVAL * BURST {
            return false;
        }
        *whole_at = next;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_uses_up_its_own_budget_only() {
        let (mut budget, start) = (Budget::default(), Instant::now());
        let [a, b] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
        let taken = |budget: &mut Budget, source, now| (0..20).filter(|_| budget.take(source, now)).count();
        assert_eq!((taken(&mut budget, a, start), taken(&mut budget, b, start)), (5, 5));
        assert_eq!(taken(&mut budget, a, start + INTERVAL * 2), 2);
        assert_eq!(taken(&mut budget, a, start + INTERVAL * 60), 5);
    }

    #[test]
    fn it_remembers_a_bounded_number_of_addresses() {
        let (mut budget, start) = (Budget::default(), Instant::now());
        let source = |number: usize| IpAddr::from((number as u32).to_be_bytes());
        assert!((0..MAX_SOURCES).all(|number| budget.take(source(number), start)));
        assert!(!budget.take(source(MAX_SOURCES), start) && budget.take(source(0), start));
        assert!(budget.take(source(MAX_SOURCES), start + INTERVAL * 3));
    }
}

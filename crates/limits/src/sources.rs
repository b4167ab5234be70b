//! A token bucket for each source, in bounded memory.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use crate::bucket::{Rate, TokenBucket};

/// Token buckets of sources. Only those that are not full are remembered.
#[derive(Debug)]
pub struct SourceBuckets<S> {
    rate: Rate,
    max: usize,
    full_at: HashMap<S, Instant>,
}

impl<S: Eq + Hash> SourceBuckets<S> {
    /// Buckets with this rate for each source, of which at most `max` are remembered. While as many are not full again, others are
    /// refused.
    pub fn new(rate: Rate, max: usize) -> Self {
        Self { rate, max, full_at: HashMap::new() }
    }

    /// Tokens of a source for so many units, taken if there are as many.
    ///
    /// # Errors
    /// There are too few, or too many sources are remembered; the time until there may be enough.
    pub fn take(&mut self, source: S, now: Instant, units: u64) -> Result<(), Duration> {
        let mut bucket = self.bucket(&source, now)?;
        bucket.take(now, units)?;
        self.full_at.insert(source, bucket.full_at());
        Ok(())
    }

    /// Tokens of a source for so many units, taken also if there are too few. Returns how long to wait before the units may be used.
    pub fn charge(&mut self, source: S, now: Instant, units: u64) -> Duration {
        let mut bucket = match self.bucket(&source, now) {
            Ok(bucket) => bucket,
            Err(wait) => return wait,
        };
        let wait = bucket.charge(now, units);
        if !bucket.is_full(now) {
            self.full_at.insert(source, bucket.full_at());
        }
        wait
    }

    /// Forgets sources whose buckets are full again: as if they had never come.
    pub fn forget_full(&mut self, now: Instant) {
        self.full_at.retain(|_, full_at| *full_at > now);
    }

    /// Whether no source is remembered.
    pub fn is_empty(&self) -> bool {
        self.full_at.is_empty()
    }

    fn bucket(&mut self, source: &S, now: Instant) -> Result<TokenBucket, Duration> {
        if let Some(full_at) = self.full_at.get(source) {
            return Ok(TokenBucket::full_again_at(self.rate, *full_at));
        }
        if self.full_at.len() >= self.max {
            self.forget_full(now);
            if self.full_at.len() >= self.max {
                let first = self.full_at.values().min().copied().unwrap_or(now);
                return Err(first.saturating_duration_since(now));
            }
        }
        Ok(TokenBucket::full(self.rate, now))
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(5);
    const MAX_SOURCES: usize = 64;

    fn buckets() -> SourceBuckets<IpAddr> {
        SourceBuckets::new(Rate::one_each(INTERVAL, 5), MAX_SOURCES)
    }

    #[test]
    fn one_address_uses_up_its_own_budget_only() {
        let (mut budget, start) = (buckets(), Instant::now());
        let [a, b] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
        let taken = |budget: &mut SourceBuckets<IpAddr>, source, now| {
            (0..20).filter(|_| budget.take(source, now, 1).is_ok()).count()
        };
        assert_eq!((taken(&mut budget, a, start), taken(&mut budget, b, start)), (5, 5));
        assert_eq!(taken(&mut budget, a, start + INTERVAL * 2), 2);
        assert_eq!(taken(&mut budget, a, start + INTERVAL * 60), 5);
    }

    #[test]
    fn it_remembers_a_bounded_number_of_addresses() {
        let (mut budget, start) = (buckets(), Instant::now());
        let source = |number: usize| IpAddr::from((number as u32).to_be_bytes());
        assert!((0..MAX_SOURCES).all(|number| budget.take(source(number), start, 1).is_ok()));
        assert_eq!(budget.take(source(MAX_SOURCES), start, 1), Err(INTERVAL));
        assert_eq!(budget.charge(source(MAX_SOURCES), start, 1), INTERVAL);
        assert_eq!(budget.take(source(0), start, 1), Ok(()));
        assert_eq!(budget.take(source(MAX_SOURCES), start + INTERVAL * 3, 1), Ok(()));
    }

    #[test]
    fn what_is_charged_beyond_the_burst_waits_and_is_forgotten_once_it_is_gained() {
        let (mut budget, start) = (buckets(), Instant::now());
        let a = IpAddr::from([10, 0, 0, 1]);
        assert_eq!(budget.charge(a, start, 0), Duration::ZERO);
        assert!(budget.is_empty());
        assert_eq!([5, 2].map(|units| budget.charge(a, start, units)), [Duration::ZERO, INTERVAL * 2]);
        budget.forget_full(start + INTERVAL * 6);
        assert!(!budget.is_empty());
        budget.forget_full(start + INTERVAL * 7);
        assert!(budget.is_empty());
    }
}

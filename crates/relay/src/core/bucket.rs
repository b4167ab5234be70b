//! A token bucket: a rate with a burst.

use std::time::{Duration, Instant};

/// Grants units at a rate, and a burst after a pause.
#[derive(Debug, Clone, Copy)]
pub(super) struct TokenBucket {
    /// Units a second.
    rate: u64,
    burst: u64,
    tokens: u64,
    /// When `tokens` was right.
    updated: Instant,
}

impl TokenBucket {
    pub(super) fn new(rate: u64, burst: u64, now: Instant) -> Self {
        Self { rate, burst, tokens: burst, updated: now }
    }

    /// Takes `units` if there are as many.
    pub(super) fn take(&mut self, now: Instant, units: u64) -> bool {
        self.refill(now);
        let left = self.tokens.checked_sub(units);
        self.tokens = left.unwrap_or(self.tokens);
        left.is_some()
    }

    /// Time advances only by whole units, so that no fraction is lost.
    fn refill(&mut self, now: Instant) {
        let nanos = now.saturating_duration_since(self.updated).as_nanos();
        let units = nanos.saturating_mul(self.rate.into()) / 1_000_000_000;
        if units >= u128::from(self.burst.saturating_sub(self.tokens)) {
            (self.tokens, self.updated) = (self.burst, self.updated.max(now));
        } else if units > 0 {
            // Less than the burst, and the rate is not zero.
            self.tokens = self.tokens.saturating_add(u64::try_from(units).unwrap_or(u64::MAX));
            let nanos = units.saturating_mul(1_000_000_000) / u128::from(self.rate.max(1));
            self.updated = self
                .updated
                .checked_add(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
                .unwrap_or(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(bucket: &mut TokenBucket, now: Instant) -> usize {
        (0..1000).filter(|_| bucket.take(now, 1)).count()
    }

    #[test]
    fn it_grants_a_burst_and_then_the_rate() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(10, 20, start);
        assert_eq!(taken(&mut bucket, start), 20);
        let sum: usize = (1..=1000).map(|n| taken(&mut bucket, start + Duration::from_millis(n))).sum();
        assert_eq!(sum, 10, "no fraction is lost between small steps");
        assert_eq!(taken(&mut bucket, start + Duration::from_secs(3600)), 20);
    }

    #[test]
    fn a_clock_that_stands_still_or_goes_back_grants_nothing() {
        let start = Instant::now() + Duration::from_secs(10);
        let mut bucket = TokenBucket::new(10, 1, start);
        assert_eq!(taken(&mut bucket, start), 1);
        assert_eq!(taken(&mut bucket, start - Duration::from_secs(5)), 0);
        assert_eq!(taken(&mut bucket, start + Duration::from_millis(100)), 1);
    }
}

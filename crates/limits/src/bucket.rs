//! A token bucket: a rate with a burst. Kept as one moment, that at which the bucket is full again (the theoretical arrival time
//! of the generic cell rate algorithm, ITU-T I.371), so that no fraction is lost and one that is full need not be remembered.

use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);

/// Point in time: an [`Instant`], or the time since one.
pub trait Moment: Copy + Ord {
    /// Time since an earlier moment; zero if it is later.
    fn since(self, earlier: Self) -> Duration;

    /// The moment after this time; this one if the clock has none.
    #[must_use]
    fn after(self, time: Duration) -> Self;
}

impl Moment for Duration {
    fn since(self, earlier: Self) -> Duration {
        self.saturating_sub(earlier)
    }

    fn after(self, time: Duration) -> Self {
        self.saturating_add(time)
    }
}

impl Moment for Instant {
    fn since(self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }

    fn after(self, time: Duration) -> Self {
        self.checked_add(time).unwrap_or(self)
    }
}

/// Units per time, and how many at once after a rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    units: u64,
    period: Duration,
    burst: u64,
}

impl Rate {
    /// Rate of so many units a second, at least one.
    pub const fn per_second(units: u64, burst: u64) -> Self {
        Self { units, period: SECOND, burst }
    }

    /// Rate of one unit in each interval.
    pub const fn one_each(interval: Duration, burst: u64) -> Self {
        Self { units: 1, period: interval, burst }
    }

    /// Time in which so many units are gained.
    fn time(self, units: u64) -> Duration {
        let nanos = self.period.as_nanos().saturating_mul(units.into()) / u128::from(self.units.max(1));
        Duration::from_nanos(nanos.try_into().unwrap_or(u64::MAX))
    }
}

/// Bucket of tokens that fills at a [`Rate`].
#[derive(Debug, Clone, Copy)]
pub struct TokenBucket<T = Instant> {
    rate: Rate,
    full_at: T,
}

impl<T: Moment> TokenBucket<T> {
    /// Bucket with all of its tokens.
    pub fn full(rate: Rate, now: T) -> Self {
        Self { rate, full_at: now }
    }

    /// Bucket that is full again at this moment.
    pub(crate) fn full_again_at(rate: Rate, full_at: T) -> Self {
        Self { rate, full_at }
    }

    /// Tokens for so many units, taken if there are as many.
    ///
    /// # Errors
    /// There are too few; the time until there are enough.
    pub fn take(&mut self, now: T, units: u64) -> Result<(), Duration> {
        let wait = self.wait(now, units);
        if !wait.is_zero() {
            return Err(wait);
        }
        self.charge(now, units);
        Ok(())
    }

    /// Tokens for so many units, taken also if there are too few. Returns how long to wait before the units may be used.
    pub fn charge(&mut self, now: T, units: u64) -> Duration {
        let wait = self.wait(now, units);
        self.full_at = self.full_at.max(now).after(self.rate.time(units));
        wait
    }

    /// Time until there are tokens for so many units. More than the burst are never there at once.
    pub fn wait(&self, now: T, units: u64) -> Duration {
        let missing = self.full_at.since(now).saturating_add(self.rate.time(units));
        missing.saturating_sub(self.rate.time(self.rate.burst))
    }

    /// Whether no token is missing, as if none had ever been taken.
    pub fn is_full(&self, now: T) -> bool {
        self.full_at <= now
    }

    pub(crate) fn full_at(&self) -> T {
        self.full_at
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn taken(bucket: &mut TokenBucket, now: Instant) -> usize {
        (0..1000).filter(|_| bucket.take(now, 1).is_ok()).count()
    }

    #[test]
    fn it_grants_a_burst_and_then_the_rate() {
        let start = Instant::now();
        let mut bucket = TokenBucket::full(Rate::per_second(10, 20), start);
        assert_eq!(taken(&mut bucket, start), 20);
        let sum: usize = (1..=1000).map(|n| taken(&mut bucket, start + Duration::from_millis(n))).sum();
        assert_eq!(sum, 10, "no fraction is lost between small steps");
        assert_eq!(taken(&mut bucket, start + Duration::from_secs(3600)), 20);
    }

    #[test]
    fn a_clock_that_stands_still_or_goes_back_grants_nothing() {
        let start = Instant::now() + Duration::from_secs(10);
        let mut bucket = TokenBucket::full(Rate::per_second(10, 1), start);
        assert_eq!(taken(&mut bucket, start), 1);
        assert_eq!(taken(&mut bucket, start - Duration::from_secs(5)), 0);
        assert_eq!(taken(&mut bucket, start + Duration::from_millis(100)), 1);
    }

    #[test]
    fn a_flood_is_read_slowly_and_others_at_once() {
        let start = Instant::now();
        let (mut pace, mut now) = (TokenBucket::full(Rate::per_second(100, 100), start), start);
        for _ in 0..1000 {
            now += pace.charge(now, 1);
        }
        assert!(now - start >= 9 * SECOND && now - start <= 10 * SECOND, "{:?}", now - start);
        assert_eq!(pace.charge(now + SECOND, 99), Duration::ZERO);
    }

    proptest! {
        #[test]
        fn whatever_is_asked_no_more_is_granted_and_a_wait_is_long_enough(
            per_second in 1_u64..2_000_000_000,
            burst in 1_u64..1_000_000,
            asked in proptest::collection::vec((0_u64..3_000_000, 1_u64..2_000), 1..100),
        ) {
            let mut bucket = TokenBucket::full(Rate::per_second(per_second, burst), Duration::ZERO);
            let (mut now, mut granted) = (Duration::ZERO, 0_u64);
            for (micros, units) in asked {
                let units = units.min(burst);
                now += Duration::from_micros(micros);
                if let Err(wait) = bucket.take(now, units) {
                    now += wait;
                    prop_assert_eq!(bucket.take(now, units), Ok(()));
                }
                granted += units;
                // Each time that is taken is rounded to nanoseconds.
                let most = (now.as_nanos() + 101) * u128::from(per_second) / 1_000_000_000 + u128::from(burst);
                prop_assert!(u128::from(granted) <= most, "{granted} of {most}");
            }
        }
    }
}

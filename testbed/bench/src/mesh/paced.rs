//! Figures of watches, as numbers that one process tells another.

use std::collections::BTreeMap;
use std::fmt;

use crate::statistics::percentile;

const NANOSECONDS_PER_MILLISECOND: f64 = 1e6;

/// Changes at a rate. Times until watches saw them are milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Paced {
    pub(super) changes: f64,
    /// Number of changes that watches saw, counted for each watch.
    pub(super) seen: f64,
    /// Changes that watches lack, or saw more than once.
    pub(super) missing: f64,
    /// Milliseconds until a watch saw a change, over all changes and watches.
    pub(super) p50: f64,
    pub(super) p99: f64,
    /// Milliseconds until the last watch saw a change: the median, and the longest, over all changes.
    pub(super) last_p50: f64,
    pub(super) last_max: f64,
    pub(super) seconds: f64,
    /// CPU time of the load.
    pub(super) cpu_seconds: f64,
}

/// Changes as fast as the server answers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Saturated {
    pub(super) updates: f64,
    pub(super) seconds: f64,
    /// Changes that watches saw meanwhile. A watch that is behind sees only the latest of an affiliate.
    pub(super) deliveries: f64,
    /// Messages that they came in.
    pub(super) messages: f64,
    /// Seconds until all watches had the last change of their cluster.
    pub(super) drain_seconds: f64,
    /// Watches that never had it.
    pub(super) behind: f64,
    /// CPU time of the load.
    pub(super) cpu_seconds: f64,
}

impl Paced {
    /// Figures from the times at which changes were made and seen, in nanoseconds.
    pub(super) fn new(
        samples: &[(u64, u64)],
        changes: usize,
        missing: u64,
        seconds: f64,
        cpu_seconds: f64,
    ) -> Self {
        let mut last = BTreeMap::new();
        let mut delays = Vec::with_capacity(samples.len());
        for (made, seen) in samples {
            let delay = seen.saturating_sub(*made) as f64 / NANOSECONDS_PER_MILLISECOND;
            delays.push(delay);
            let longest: &mut f64 = last.entry(*made).or_default();
            *longest = longest.max(delay);
        }
        let last: Vec<f64> = last.into_values().collect();
        let of = |samples: &[f64], share| percentile(samples, share).unwrap_or(f64::NAN);
        Self {
            changes: changes as f64,
            seen: samples.len() as f64,
            missing: missing as f64,
            p50: of(&delays, 0.5),
            p99: of(&delays, 0.99),
            last_p50: of(&last, 0.5),
            last_max: of(&last, 1.0),
            seconds,
            cpu_seconds,
        }
    }
}

impl fmt::Display for Paced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { changes, seen, missing, p50, p99, last_p50, last_max, seconds, cpu_seconds } = self;
        write!(f, "{changes} {seen} {missing} {p50} {p99} {last_p50} {last_max} {seconds} {cpu_seconds}")
    }
}

impl From<[f64; 9]> for Paced {
    fn from(numbers: [f64; 9]) -> Self {
        let [changes, seen, missing, p50, p99, last_p50, last_max, seconds, cpu_seconds] = numbers;
        Self { changes, seen, missing, p50, p99, last_p50, last_max, seconds, cpu_seconds }
    }
}

impl fmt::Display for Saturated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { updates, seconds, deliveries, messages, drain_seconds, behind, cpu_seconds } = self;
        write!(f, "{updates} {seconds} {deliveries} {messages} {drain_seconds} {behind} {cpu_seconds}")
    }
}

impl From<[f64; 7]> for Saturated {
    fn from(numbers: [f64; 7]) -> Self {
        let [updates, seconds, deliveries, messages, drain_seconds, behind, cpu_seconds] = numbers;
        Self { updates, seconds, deliveries, messages, drain_seconds, behind, cpu_seconds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_watch_counts_for_each_change() {
        let ms = 1_000_000;
        let samples = [(0, ms), (0, 5 * ms), (10 * ms, 12 * ms), (10 * ms, 11 * ms)];
        let paced = Paced::new(&samples, 2, 0, 1.0, 0.5);
        assert_eq!((paced.p50, paced.p99, paced.last_p50, paced.last_max), (1.0, 5.0, 2.0, 5.0));
        let numbers = paced.to_string();
        let numbers: Vec<f64> = numbers.split(' ').map(|word| word.parse().unwrap()).collect();
        assert_eq!(Paced::from(<[f64; 9]>::try_from(numbers).unwrap()), paced);
    }
}

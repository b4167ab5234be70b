//! When a client connects again.

use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);
/// A connection that lasted this long was good: the next failure begins with `FIRST`.
const GOOD: Duration = Duration::from_secs(60);

/// Pauses between attempts: 1 s, doubled up to 30 s, each between a half and the whole of it, so that the clients of a server
/// that failed do not all come at once. Without a clock and without randomness of its own.
#[derive(Debug, Clone, Default)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// The pause before the next attempt; `random` is anything from 0 to `u32::MAX`. `connected` is when the connection that
    /// has ended was made, if there was one.
    pub(super) fn next(&mut self, now: Instant, connected: Option<Instant>, random: u32) -> Duration {
        if connected.is_some_and(|at| now.saturating_duration_since(at) >= GOOD) {
            self.failures = 0;
        }
        let whole = FIRST.saturating_mul(1_u32.checked_shl(self.failures).unwrap_or(u32::MAX)).min(LONGEST);
        self.failures = self.failures.saturating_add(1).min(16);
        let half = whole / 2;
        half.saturating_add(half.mul_f64(f64::from(random) / f64::from(u32::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(backoff: &mut Backoff, random: u32) -> Vec<f64> {
        let now = Instant::now();
        (0..8).map(|_| backoff.next(now, None, random).as_secs_f64()).collect()
    }

    #[test]
    fn pauses_grow_from_one_second_to_thirty_with_jitter() {
        let most = seconds(&mut Backoff::default(), u32::MAX);
        assert_eq!(most, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]);
        let least = seconds(&mut Backoff::default(), 0);
        assert_eq!(least, most.iter().map(|pause| pause / 2.0).collect::<Vec<_>>());
    }

    #[test]
    fn a_good_connection_begins_anew() {
        let (mut backoff, now) = (Backoff::default(), Instant::now());
        seconds(&mut backoff, 0);
        let later = now + GOOD;
        assert_eq!(backoff.next(later, Some(later), u32::MAX), LONGEST, "it lasted no time");
        assert_eq!(backoff.next(later, Some(now), u32::MAX), FIRST);
    }
}

//! Pauses before something that failed is tried again.

use std::time::Duration;

/// The first attempt after a connection that worked comes within this time: a thousand clients of a server that restarts are
/// spread over it.
const AT_ONCE: Duration = Duration::from_millis(300);
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);
/// A connection that lasted this long worked.
const WORKED: Duration = Duration::from_secs(10);
/// A connection that lasted this long was good, also if the server ended it: the next pause is [`FIRST`].
const GOOD: Duration = Duration::from_secs(60);

/// Pauses between attempts, doubled from the first to the longest. Randomness is anything from 0 to `u32::MAX`.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    failures: u32,
}

/// Pauses of a client between connections: 1 s, doubled up to 30 s.
impl Default for Backoff {
    fn default() -> Self {
        Self::up_to(LONGEST)
    }
}

impl Backoff {
    /// Pauses from one to another.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, failures: 0 }
    }

    /// Pauses of a client, up to this one.
    pub const fn up_to(longest: Duration) -> Self {
        Self::new(FIRST, longest)
    }

    /// Pause after an attempt that failed, between a half and the whole of it, so that clients of a server that failed do not all come
    /// at once.
    pub fn next(&mut self, random: u32) -> Duration {
        let half = self.next_whole() / 2;
        half.saturating_add(part(half, random))
    }

    /// Pause after an attempt that failed, for one that has no others beside it.
    pub fn next_whole(&mut self) -> Duration {
        let whole = doubled(self.first, self.failures, self.longest);
        self.failures = self.failures.saturating_add(1);
        whole
    }

    /// Pause after a connection that was lost, which had lasted so long.
    pub fn lost(&mut self, lasted: Duration, random: u32) -> Duration {
        if lasted < WORKED {
            return self.next(random);
        }
        self.failures = 0;
        part(AT_ONCE, random)
    }

    /// Pause after a connection that the server ended with an error.
    pub fn refused(&mut self, lasted: Duration, random: u32) -> Duration {
        if lasted >= GOOD {
            self.failures = 0;
        }
        self.next(random)
    }

    /// Pause that the server itself asked for. The attempt after that begins with the first.
    pub fn asked(&mut self, reconnect_after: Duration) -> Duration {
        self.failures = 0;
        reconnect_after.min(self.longest)
    }

    /// Begins with the first pause again.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

/// Pause that doubles so often, up to the longest.
pub fn doubled(first: Duration, times: u32, longest: Duration) -> Duration {
    first.saturating_mul(1_u32.checked_shl(times).unwrap_or(u32::MAX)).min(longest)
}

/// Random part of a duration; `random` is anything from 0 to `u32::MAX`.
pub fn part(whole: Duration, random: u32) -> Duration {
    whole.mul_f64(f64::from(random) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn seconds(backoff: &mut Backoff, random: u32) -> Vec<f64> {
        (0..8).map(|_| backoff.next(random).as_secs_f64()).collect()
    }

    #[test]
    fn pauses_grow_from_one_second_to_thirty_with_jitter() {
        let most = seconds(&mut Backoff::default(), u32::MAX);
        assert_eq!(most, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]);
        let least = seconds(&mut Backoff::default(), 0);
        assert_eq!(least, most.iter().map(|pause| pause / 2.0).collect::<Vec<_>>());
        assert_eq!(seconds(&mut Backoff::up_to(4 * SECOND), u32::MAX)[..4], [1.0, 2.0, 4.0, 4.0]);
    }

    #[test]
    fn however_often_it_fails_the_pause_is_bounded() {
        let mut backoff = Backoff::new(Duration::from_millis(200), 10 * SECOND);
        let whole: Vec<u128> = (0..100).map(|_| backoff.next_whole().as_millis()).collect();
        assert_eq!(whole[..7], [200, 400, 800, 1600, 3200, 6400, 10_000]);
        assert_eq!((whole[99], doubled(SECOND, u32::MAX, Duration::MAX)), (10_000, SECOND * u32::MAX));
    }

    #[test]
    fn a_connection_that_worked_is_replaced_at_once_and_thousands_are_spread() {
        let mut backoff = Backoff::default();
        seconds(&mut backoff, 0);
        assert_eq!(backoff.lost(9 * SECOND, u32::MAX), LONGEST, "it did not work");
        assert_eq!(backoff.lost(10 * SECOND, u32::MAX), AT_ONCE);
        assert_eq!(backoff.next(u32::MAX), FIRST, "and if that fails");
        let pauses: Vec<Duration> = (0..1000_u32)
            .map(|number| Backoff::default().lost(60 * SECOND, number.wrapping_mul(0x9e37_79b9)))
            .collect();
        let most = (0..10).map(|tenth| {
            let of_tenth = |pause: &&Duration| pause.as_millis() / 30 == tenth;
            pauses.iter().filter(of_tenth).count()
        });
        assert!(most.max() < Some(150), "a tenth of the time has about a tenth of them");
    }

    #[test]
    fn a_server_that_refuses_or_asks_is_obeyed() {
        let mut backoff = Backoff::default();
        seconds(&mut backoff, 0);
        assert_eq!(
            backoff.refused(59 * SECOND, u32::MAX),
            LONGEST,
            "as two programs with one key do to each other"
        );
        assert_eq!(backoff.refused(GOOD, u32::MAX), FIRST);
        seconds(&mut backoff, 0);
        assert_eq!(backoff.asked(Duration::from_millis(700)), Duration::from_millis(700));
        assert_eq!(backoff.next(u32::MAX), FIRST);
    }
}

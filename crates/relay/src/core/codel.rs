//! CoDel (RFC 8289): which datagrams of a queue are dropped so that it does not stay long. Pure: time is an argument.

use std::time::{Duration, Instant};

/// Wait that is accepted for all datagrams: more than the kernel takes to send at 10 Mbit/s what is given to it at once.
const TARGET: Duration = Duration::from_millis(20);
/// Time for which the wait may be longer: the round-trip time of most flows.
const INTERVAL: Duration = Duration::from_millis(100);
/// A queue that is not longer is never too long (MAXPACKET of the RFC).
const SHORT: usize = 1600;
/// Intervals after the last drops within which new ones begin nearly as fast as those ended.
const MEMORY: u32 = 16;

/// The state for one queue.
#[derive(Debug, Default)]
pub(super) struct Codel {
    /// Start of the time in which each datagram has waited too long.
    above_since: Option<Instant>,
    drops: Option<Drops>,
    last: Option<Drops>,
}

/// A time in which datagrams are dropped, in intervals that become shorter.
#[derive(Debug, Clone, Copy)]
struct Drops {
    count: u32,
    next: Instant,
}

impl Codel {
    /// Whether a datagram that is taken after it has `waited` is dropped; `behind` are the bytes that wait behind it.
    pub(super) fn drops(&mut self, now: Instant, waited: Duration, behind: usize) -> bool {
        if !self.is_too_long(now, waited, behind) {
            self.last = self.drops.take().or(self.last);
            return false;
        }
        let drops = match self.drops {
            Some(drops) if now < drops.next => return false,
            Some(Drops { count, next }) => {
                let count = count.saturating_add(1);
                Drops { count, next: next + interval(count) }
            }
            None => {
                let is_recent = |last: &Drops| now.saturating_duration_since(last.next) < INTERVAL * MEMORY;
                let count = self.last.filter(is_recent).map_or(1, |last| last.count.saturating_sub(2).max(1));
                Drops { count, next: now + interval(count) }
            }
        };
        self.drops = Some(drops);
        true
    }

    fn is_too_long(&mut self, now: Instant, waited: Duration, behind: usize) -> bool {
        if waited < TARGET || behind <= SHORT {
            self.above_since = None;
            return false;
        }
        let since = *self.above_since.get_or_insert(now);
        now.saturating_duration_since(since) >= INTERVAL
    }
}

/// Time until the next drop: a TCP flow slows down with the square root of what it loses.
fn interval(count: u32) -> Duration {
    INTERVAL.div_f64(f64::from(count.max(1)).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: usize = 100_000;

    /// Number of datagrams that are dropped when one is taken in each millisecond of the given time.
    fn dropped(
        codel: &mut Codel,
        from: Instant,
        milliseconds: u64,
        waited: Duration,
        behind: usize,
    ) -> usize {
        let times = (0..milliseconds).map(|number| from + Duration::from_millis(number));
        times.filter(|now| codel.drops(*now, waited, behind)).count()
    }

    #[test]
    fn datagrams_are_dropped_more_and_more_often_while_all_of_them_wait_too_long() {
        let (mut codel, start) = (Codel::default(), Instant::now());
        assert_eq!(dropped(&mut codel, start, 100, TARGET, LONG), 0, "a burst");
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        // After 100, 200, 271, 328 and 378 ms.
        assert_eq!(dropped(&mut codel, at(100), 300, TARGET, LONG), 5);
        let in_a_second = dropped(&mut codel, at(400), 1000, TARGET, LONG);
        assert!(in_a_second > 25, "{in_a_second}");
        assert!(!codel.drops(at(1400), TARGET / 2, LONG), "one that did not wait too long");
        assert_eq!(dropped(&mut codel, at(1401), 99, TARGET, LONG), 0);
        // It goes on almost where it was, if that is not long ago.
        assert!(dropped(&mut codel, at(1501), 100, TARGET, LONG) > 3);
        assert!(!codel.drops(at(1700), Duration::ZERO, LONG));
        assert_eq!(dropped(&mut codel, at(10_000), 150, TARGET, LONG), 1);
    }

    #[test]
    fn the_last_datagrams_of_a_queue_are_not_dropped() {
        let mut codel = Codel::default();
        assert_eq!(dropped(&mut codel, Instant::now(), 1000, INTERVAL, SHORT), 0);
    }
}

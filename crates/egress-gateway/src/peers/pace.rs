//! How fast a member is read: a faulty or compromised one gets no more of this gateway's time than that.

use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);

/// Counts in seconds.
#[derive(Debug)]
pub(super) struct Pace {
    per_second: u32,
    since: Option<Instant>,
    count: u32,
}

impl Pace {
    /// So many units in a second.
    pub(super) fn new(per_second: u32) -> Self {
        Self { per_second, since: None, count: 0 }
    }

    /// How long to wait after so many before the next is read.
    pub(super) fn pause(&mut self, units: u32, now: Instant) -> Duration {
        let since = *self.since.get_or_insert(now);
        let elapsed = now.saturating_duration_since(since);
        if elapsed >= SECOND {
            (self.since, self.count) = (Some(now), units);
            return Duration::ZERO;
        }
        self.count = self.count.saturating_add(units);
        if self.count > self.per_second { SECOND.saturating_sub(elapsed) } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_read_slowly_and_others_at_once() {
        let (mut pace, start) = (Pace::new(100), Instant::now());
        let mut now = start;
        for _ in 0..1000 {
            now += pace.pause(1, now);
        }
        assert!(now - start >= 9 * SECOND && now - start <= 10 * SECOND, "{:?}", now - start);
        assert_eq!(pace.pause(99, now + SECOND), Duration::ZERO);
    }
}

//! Budget for writes of this node's WireKubePeer, without I/O: each write is read by all nodes of the mesh.
//!
//! A token bucket: the first changes after a quiet time are written at once, and then one for each [`INTERVAL`]. What peers need to
//! reach this node may use all of it; what only tells operators how things are leaves some for that, and waits longer. A node that has just
//! joined has used it up: some more are kept for what loses packets while it waits.

use std::time::{Duration, Instant};

/// Time between writes that go on for long.
pub const INTERVAL: Duration = Duration::from_secs(10);
/// Writes that a quiet node may make at once.
const BURST: u32 = 6;
/// Writes among these that are kept for [`Urgency::Essential`].
const RESERVE: u32 = 3;
/// Writes beside these, for [`Urgency::Critical`] alone.
const SPARE: u32 = 2;

/// Urgency of a write, by those who wait for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// Operators: the state of connections, counters, reasons, problems.
    Status,
    /// Peers: who this node is, where it is reached, and where it sees others.
    Essential,
    /// Peers that lose packets until they read it: another key, another endpoint, or that a Peer has come to this entry node.
    Critical,
}

/// The writes that this node may make.
#[derive(Debug, Clone, Copy)]
pub struct WriteBudget {
    left: u32,
    /// Writes left of [`SPARE`].
    spare: u32,
    /// Time at which the last write was gained.
    filled: Instant,
}

impl WriteBudget {
    /// Budget of a program that starts at `now`.
    pub fn new(now: Instant) -> Self {
        Self { left: BURST, spare: SPARE, filled: now }
    }

    /// Takes one write.
    ///
    /// # Errors
    /// There is none for this; the time until there is.
    pub fn take(&mut self, now: Instant, urgency: Urgency) -> Result<(), Duration> {
        self.fill(now);
        let least = match urgency {
            Urgency::Essential | Urgency::Critical => 1,
            Urgency::Status => RESERVE.saturating_add(1),
        };
        match least.checked_sub(self.left).filter(|missing| *missing > 0) {
            None => {
                self.left = self.left.saturating_sub(1);
                Ok(())
            }
            Some(_) if urgency == Urgency::Critical && self.spare > 0 => {
                self.spare = self.spare.saturating_sub(1);
                Ok(())
            }
            Some(missing) => {
                let gained = now.saturating_duration_since(self.filled);
                Err(INTERVAL.saturating_mul(missing).saturating_sub(gained))
            }
        }
    }

    fn fill(&mut self, now: Instant) {
        while (self.left < BURST || self.spare < SPARE)
            && let Some(next) = self.filled.checked_add(INTERVAL).filter(|next| *next <= now)
        {
            // The spare ones last, so that nothing else waits for them.
            let gaining = if self.left < BURST { &mut self.left } else { &mut self.spare };
            *gaining = gaining.saturating_add(1);
            self.filled = next;
        }
        if self.left >= BURST && self.spare >= SPARE {
            self.filled = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_quiet_node_writes_at_once_and_then_once_per_interval() {
        let start = Instant::now();
        let mut budget = WriteBudget::new(start);
        for _ in RESERVE..BURST {
            assert_eq!(budget.take(start, Urgency::Status), Ok(()));
        }
        assert_eq!(budget.take(start, Urgency::Status), Err(INTERVAL));
        for _ in 0..RESERVE {
            assert_eq!(budget.take(start, Urgency::Essential), Ok(()));
        }
        let later = start + INTERVAL / 4;
        assert_eq!(budget.take(later, Urgency::Essential), Err(INTERVAL * 3 / 4));
        assert_eq!(budget.take(later, Urgency::Status), Err(INTERVAL * 15 / 4));
        assert_eq!(budget.take(start + INTERVAL, Urgency::Essential), Ok(()));
        assert_eq!(budget.take(start + INTERVAL, Urgency::Essential), Err(INTERVAL));
        let rested = start + 100 * INTERVAL;
        let writes = (0..100).filter(|_| budget.take(rested, Urgency::Essential).is_ok()).count();
        assert_eq!(writes, BURST as usize, "no more than that is saved up");
    }

    #[test]
    fn a_node_that_has_just_joined_tells_another_endpoint_at_once_and_that_costs_nothing_else() {
        let start = Instant::now();
        let mut budget = WriteBudget::new(start);
        for _ in 0..BURST {
            assert_eq!(budget.take(start, Urgency::Essential), Ok(()));
        }
        for _ in 0..SPARE {
            assert_eq!(budget.take(start, Urgency::Critical), Ok(()));
            assert_eq!(budget.take(start, Urgency::Essential), Err(INTERVAL));
        }
        assert_eq!(budget.take(start, Urgency::Critical), Err(INTERVAL));
        assert_eq!(budget.take(start + INTERVAL, Urgency::Essential), Ok(()));
        // What is spare comes back after all else.
        let rested = start + INTERVAL * (1 + BURST + SPARE);
        let critical = (0..100).filter(|_| budget.take(rested, Urgency::Critical).is_ok()).count();
        assert_eq!(critical, (BURST + SPARE) as usize);
    }

    proptest! {
        #[test]
        fn whatever_is_asked_writes_are_bounded_and_what_waits_is_written_when_it_was_told(
            asked in proptest::collection::vec((0_u64..30_000, 0_u8..3), 1..200),
        ) {
            let start = Instant::now();
            let (mut budget, mut now, mut written) = (WriteBudget::new(start), start, 0_u32);
            for (pause, urgency) in asked {
                let urgencies = [Urgency::Status, Urgency::Essential, Urgency::Critical];
                let urgency = urgencies[usize::from(urgency)];
                now += Duration::from_millis(pause);
                if let Err(wait) = budget.take(now, urgency) {
                    prop_assert!(wait > Duration::ZERO && wait <= INTERVAL * (RESERVE + 1), "{wait:?}");
                    prop_assert!(urgency == Urgency::Status || wait <= INTERVAL, "{wait:?}");
                    now += wait;
                    prop_assert_eq!(budget.take(now, urgency), Ok(()));
                }
                written += 1;
                let most = BURST + SPARE + u32::try_from((now - start).as_secs() / INTERVAL.as_secs()).unwrap();
                prop_assert!(written <= most, "{written} of {most}");
            }
        }
    }
}

//! Checks of the path in use: requests while packets flow, which come more often once an answer is missing.

use std::time::Duration;

/// Time between requests over the path in use, and between their repetitions once an answer is missing.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
const CHECK_RETRY: Duration = Duration::from_millis(200);
/// Longest wait for the answer that shows whether the path in use still works.
const MAX_CHECK_TIMEOUT: Duration = Duration::from_secs(1);
/// Missing answers in a row after which the path in use has failed.
const MAX_MISSED: u8 = 3;
/// The path in use is not checked because of unanswered packets, or for the peer, for so long after it has answered.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(400);

/// The next check, and what became of the last ones.
#[derive(Debug, Default)]
pub(super) struct Checks {
    /// Time at which the path in use is checked next, and whether an answer is missing since the last check.
    pub(super) due: Option<(Duration, bool)>,
    /// Answers in a row that are missing.
    pub(super) missed: u8,
    /// Time at which a message that packets do not reach the peer last counted.
    pub(super) refused: Option<Duration>,
    /// Time at which an answer was late, now or the last time.
    pub(super) failing_since: Option<Duration>,
}

impl Checks {
    /// The path in use has answered, or is another one now.
    pub(super) fn clear(&mut self) {
        self.missed = 0;
        self.due = None;
    }

    /// Plans one, unless there is one; `answered` is when the path in use did so last.
    pub(super) fn plan(&mut self, now: Duration, answered: Option<Duration>) {
        let due = answered.map_or(now, |at| at.saturating_add(CHECK_INTERVAL));
        self.due.get_or_insert((due.max(now), false));
    }

    /// Moves the next check to now, or to the end of the time in which the last answer says enough.
    pub(super) fn hasten(&mut self, now: Duration, answered: Option<Duration>) {
        let soonest = answered.map_or(now, |at| at.saturating_add(MIN_CHECK_INTERVAL).max(now));
        if let Some((due, false)) = self.due {
            self.due = Some((due.min(soonest), false));
        }
    }

    /// Whether an answer is missing.
    pub(super) fn awaits_answer(&self) -> bool {
        self.due.is_some_and(|(_, is_outstanding)| is_outstanding)
    }

    /// The answer to the last one did not come.
    pub(super) fn miss(&mut self) {
        self.missed = self.missed.saturating_add(1);
    }

    /// Whether so many answers are missing that the path in use has failed.
    pub(super) fn have_failed(&self) -> bool {
        self.missed >= MAX_MISSED
    }

    /// Time to wait for the answer to a request that is sent now; `is_repeated` if the one before is missing.
    pub(super) fn timeout(&self, is_repeated: bool, round_trip: Duration) -> Duration {
        let longest = match (is_repeated, self.missed.saturating_add(1) >= MAX_MISSED) {
            (false, _) => round_trip.saturating_mul(3),
            // The last repetition has time for an answer as well.
            (true, true) => round_trip.saturating_mul(3) / 2,
            (true, false) => CHECK_RETRY,
        };
        longest.clamp(CHECK_RETRY, MAX_CHECK_TIMEOUT)
    }
}

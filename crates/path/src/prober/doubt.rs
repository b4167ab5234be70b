//! Doubt about the path in use: from the first answer that is late until the path has answered, or has failed and was left.

use std::time::Duration;

/// The answer to a check is late after twice the round-trip time, but not before this.
const MIN_WAIT: Duration = Duration::from_millis(50);
/// Longest time in which packets are sent both ways, until a path in use has answered.
const LONGEST: Duration = Duration::from_secs(2);
/// The same once the path was left: until the device uses the other one.
const LEAVING: Duration = Duration::from_millis(500);

/// Doubt about the path in use.
#[derive(Debug, Default)]
pub(super) struct Doubt {
    /// Time at which the answer to the last check is late.
    late_at: Option<Duration>,
    /// Until when packets go over the relay as well.
    until: Option<Duration>,
    /// The path was left since.
    has_left: bool,
}

impl Doubt {
    /// Time at which something is due.
    pub(super) fn next(&self) -> Option<Duration> {
        self.late_at.into_iter().chain(self.until).min()
    }

    /// A check is sent; `timeout` after that it is missed.
    pub(super) fn await_answer(&mut self, now: Duration, round_trip: Duration, timeout: Duration) {
        let wait = round_trip.saturating_mul(2).max(MIN_WAIT).min(timeout);
        self.late_at = Some(now.saturating_add(wait));
    }

    /// Ends what has lasted long enough. Whether the answer to the last check is late since now, if it is still missing.
    pub(super) fn expire(&mut self, now: Duration) -> bool {
        self.until.take_if(|until| *until <= now);
        self.late_at.take_if(|at| *at <= now).is_some()
    }

    /// Packets are sent both ways from now on.
    pub(super) fn begin(&mut self, now: Duration) {
        *self = Self { until: Some(now.saturating_add(LONGEST)), ..Self::default() };
    }

    /// Whether packets are sent both ways.
    pub(super) fn lasts(&self, now: Duration) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// The path in use has answered.
    pub(super) fn end(&mut self) {
        self.late_at = None;
        // What the other path answers says nothing of when the device uses it.
        self.until.take_if(|_| !self.has_left);
    }

    /// Another path is used from now on.
    pub(super) fn leave(&mut self, now: Duration) {
        let soon = now.saturating_add(LEAVING);
        *self = Self { late_at: None, until: self.until.map(|until| until.min(soon)), has_left: true };
    }
}

//! Whether the path in use still works: it is asked while packets flow, and more often once an answer is missing.

use std::net::SocketAddr;
use std::time::Duration;

use super::{ACTIVE, Prober};

/// Time between requests over the path in use, and between their repetitions once an answer is missing.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
const CHECK_RETRY: Duration = Duration::from_millis(200);
/// Longest wait for the answer that shows whether the path in use still works.
const MAX_CHECK_TIMEOUT: Duration = Duration::from_secs(1);
/// Missing answers in a row after which the path in use has failed.
const MAX_MISSED: u8 = 3;
/// The path in use is not checked because of unanswered packets, or for the peer, for so long after it has answered.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(400);

impl Prober {
    /// This node has sent packets to the peer and received none since, for long enough to ask whether the path still works.
    pub(crate) fn packets_unanswered(&mut self, now: Duration) {
        if !self.session.is_up {
            return;
        }
        self.active_until = Some(now.saturating_add(ACTIVE));
        self.use_traffic(now);
        self.doubt_full_size(now);
        self.check_soon(now);
    }

    /// Moves the next check to now, or to the end of the time in which the last answer says enough.
    pub(super) fn check_soon(&mut self, now: Duration) {
        let answered = self.current_path().and_then(|path| path.answered).map(|(_, at)| at);
        let soonest = answered.map_or(now, |at| at.saturating_add(MIN_CHECK_INTERVAL).max(now));
        if let Some((due, false)) = self.check {
            self.check = Some((due.min(soonest), false));
        }
    }

    /// Does what waits for traffic.
    pub(super) fn use_traffic(&mut self, now: Duration) {
        if self.has_untried && self.is_active(now) {
            self.rounds = 0;
            self.start_round(now);
        }
        self.plan_check(now);
    }

    /// Starts and ends the checks of the path in use with the traffic. A peer that never answered is not checked.
    pub(super) fn plan_check(&mut self, now: Duration) {
        let speaks = self.paths.iter().any(|path| path.answered.is_some());
        if !self.is_active(now) || !speaks {
            self.check = None;
            return;
        }
        if self.next_round.is_none() {
            self.plan_round(now);
        }
        let last = self.current_path().and_then(|path| path.answered).map(|(_, at)| at);
        let due = last.map_or(now, |at| at.saturating_add(CHECK_INTERVAL));
        if self.check.is_none() && self.current_path().is_some_and(|path| !path.has_failed) {
            self.check = Some((due.max(now), false));
        }
    }

    /// The path in use does not work any more: all are tried.
    pub(super) fn fail_current(&mut self, now: Duration) {
        let current = self.current;
        let in_use = self.paths.iter_mut().filter(|path| Some(path.candidate.address) == current);
        in_use.for_each(|path| (path.has_failed, path.answered) = (true, None));
        self.missed = 0;
        self.rounds = 0;
        self.start_round(now);
    }

    /// So that its answer is there when the path in use has failed, and that the peer tries its paths as well.
    pub(super) fn try_relay(&mut self, now: Duration) {
        let relays = self.paths.iter_mut().filter(|path| path.is_relay() && path.attempt.is_none());
        relays.for_each(|path| path.attempt = Some((now, 0)));
    }

    /// Whether an answer is missing.
    pub(super) fn awaits_check(&self) -> bool {
        self.check.is_some_and(|(_, is_outstanding)| is_outstanding)
    }

    /// A check is due: the one before may be unanswered.
    pub(super) fn check_current(&mut self, now: Duration) -> Option<SocketAddr> {
        let (_, is_outstanding) = self.check.take()?;
        if !self.is_active(now) {
            return None;
        }
        let current = self.current?;
        if is_outstanding {
            self.missed = self.missed.saturating_add(1);
        }
        if self.missed >= MAX_MISSED {
            self.fail_current(now);
            return None;
        }
        let round_trip = self.path(current)?.round_trip().unwrap_or_default();
        let longest = match (is_outstanding, self.missed.saturating_add(1) >= MAX_MISSED) {
            (false, _) => round_trip.saturating_mul(3),
            // The last repetition has time for an answer as well.
            (true, true) => round_trip.saturating_mul(3) / 2,
            (true, false) => CHECK_RETRY,
        };
        let timeout = longest.clamp(CHECK_RETRY, MAX_CHECK_TIMEOUT);
        if !is_outstanding {
            self.await_check(now, timeout);
        }
        self.check = Some((now.saturating_add(timeout), true));
        Some(current)
    }
}

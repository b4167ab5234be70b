//! Whether the path in use still works: it is asked while packets flow, and more often once an answer is missing.

use std::net::SocketAddr;
use std::time::Duration;

use super::Prober;

impl Prober {
    /// This node has sent packets to the peer and received none since, for long enough to ask whether the path still works.
    pub(crate) fn packets_unanswered(&mut self, now: Duration) {
        if !self.traffic.session.is_up {
            return;
        }
        self.traffic.continues(now);
        self.use_traffic(now);
        self.doubt_full_size(now);
        self.check_soon(now);
    }

    /// Moves the next check to now, or to the end of the time in which the last answer says enough.
    pub(super) fn check_soon(&mut self, now: Duration) {
        self.checks.hasten(now, self.last_answer());
    }

    /// Does what waits for traffic.
    pub(super) fn use_traffic(&mut self, now: Duration) {
        if self.rounds.has_untried && self.traffic.is_active(now) {
            self.rounds.in_vain = 0;
            self.start_round(now);
        }
        self.plan_check(now);
    }

    /// Starts and ends the checks of the path in use with the traffic. A peer that never answered is not checked.
    pub(super) fn plan_check(&mut self, now: Duration) {
        let speaks = self.paths.iter().any(|path| path.answered.is_some());
        if !self.traffic.is_active(now) || !speaks {
            self.checks.due = None;
            return;
        }
        if self.rounds.next.is_none() {
            self.plan_round(now);
        }
        if self.paths.in_use().is_some_and(|path| !path.has_failed) {
            self.checks.plan(now, self.last_answer());
        }
    }

    /// Time at which the path in use last answered.
    fn last_answer(&self) -> Option<Duration> {
        self.paths.in_use().and_then(|path| path.answered).map(|(_, at)| at)
    }

    /// The path in use does not work any more: all are tried.
    pub(super) fn fail_current(&mut self, now: Duration) {
        for path in self.paths.in_use_mut() {
            path.has_failed = true;
            path.answered = None;
        }
        self.checks.missed = 0;
        self.rounds.in_vain = 0;
        self.start_round(now);
    }

    /// A check is due: the one before may be unanswered.
    pub(super) fn check_current(&mut self, now: Duration) -> Option<SocketAddr> {
        let (_, is_outstanding) = self.checks.due.take()?;
        if !self.traffic.is_active(now) {
            return None;
        }
        let current = self.paths.current?;
        if is_outstanding {
            self.checks.miss();
        }
        if self.checks.have_failed() {
            self.fail_current(now);
            return None;
        }
        let round_trip = self.paths.to(current)?.round_trip().unwrap_or_default();
        let timeout = self.checks.timeout(is_outstanding, round_trip);
        if !is_outstanding {
            self.doubt.await_answer(now, round_trip, timeout);
        }
        self.checks.due = Some((now.saturating_add(timeout), true));
        Some(current)
    }
}

//! Whether what the Egress has probed answers. Pure; `probes` asks.
//!
//! A gateway begins healthy. So many probes in a row without any answer as the Egress says make it unhealthy, and as many with one make
//! it healthy again. What this program could not do counts for nothing: neither the time in which it was stalled, nor probes that could not be sent.

use std::time::{Duration, Instant};

use fairlead_egress::options::HealthCheck;

/// Outcome of a probe of all targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// One target at least has answered.
    Answered,
    /// No target has answered.
    Silent,
    /// No target could be asked.
    Impossible,
}

impl Outcome {
    pub(crate) const ALL: [Self; 3] = [Self::Answered, Self::Impossible, Self::Silent];

    /// Name of the outcome in metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Impossible => "impossible",
            Self::Silent => "silent",
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Health {
    is_unhealthy: bool,
    silent: u32,
    answered: u32,
}

impl Health {
    pub(crate) fn is_healthy(&self) -> bool {
        !self.is_unhealthy
    }

    /// Other targets, or none: what was counted says nothing of them. What is said stays until they have been probed, unless nothing is
    /// probed any more.
    pub(crate) fn restart(&mut self, check: Option<&HealthCheck>) {
        let is_unhealthy = self.is_unhealthy && check.is_some();
        *self = Self { is_unhealthy, ..Self::default() };
    }

    /// Takes what came of a probe that took so long. Returns whether what is said of the gateway has changed.
    pub(crate) fn observe(&mut self, check: &HealthCheck, took: Duration, outcome: Outcome) -> bool {
        let is_stalled = took > check.interval.saturating_add(check.interval / 2);
        match outcome {
            Outcome::Answered => {
                self.silent = 0;
                self.answered = self.answered.saturating_add(1);
                self.turn(self.answered, check.threshold, false)
            }
            Outcome::Silent if !is_stalled => {
                self.answered = 0;
                self.silent = self.silent.saturating_add(1);
                self.turn(self.silent, check.threshold, true)
            }
            Outcome::Silent | Outcome::Impossible => false,
        }
    }

    fn turn(&mut self, count: u32, threshold: u32, to_unhealthy: bool) -> bool {
        let turns = count >= threshold && self.is_unhealthy != to_unhealthy;
        self.is_unhealthy ^= turns;
        turns
    }
}

/// Longest time in which a TCP connection to a target is made: the interval of probes, at most 5 s.
pub(crate) fn connect_timeout(check: &HealthCheck) -> Duration {
    check.interval.min(Duration::from_secs(5))
}

/// Time when the next probe is due.
pub(crate) fn next(started: Instant, check: &HealthCheck) -> Instant {
    started.checked_add(check.interval).unwrap_or(started)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn check(threshold: u32) -> HealthCheck {
        let targets = ["192.0.2.1".parse().unwrap()].into();
        HealthCheck { targets, interval: SECOND, threshold }
    }

    fn healthy(health: &mut Health, outcomes: &[Outcome]) -> Vec<bool> {
        let seen = outcomes.iter().map(|outcome| {
            health.observe(&check(3), SECOND, *outcome);
            health.is_healthy()
        });
        seen.collect()
    }

    #[test]
    fn the_threshold_counts_both_ways() {
        use Outcome::{Answered as A, Silent as S};
        let mut health = Health::default();
        assert_eq!(healthy(&mut health, &[S, S, A, S, S, S]), [true, true, true, true, true, false]);
        assert_eq!(healthy(&mut health, &[A, A, S, A, A, A]), [false, false, false, false, false, true]);
    }

    #[test]
    fn what_the_program_could_not_do_counts_for_nothing() {
        let mut health = Health::default();
        for _ in 0..10 {
            assert!(!health.observe(&check(3), 2 * SECOND, Outcome::Silent), "it was stalled");
            assert!(!health.observe(&check(3), SECOND, Outcome::Impossible));
        }
        assert_eq!(healthy(&mut health, &[Outcome::Silent; 3]), [true, true, false]);
        assert!(health.observe(&check(1), 9 * SECOND, Outcome::Answered), "an answer is one at any time");
    }

    #[test]
    fn other_targets_are_counted_anew_and_none_is_healthy() {
        let mut health = Health::default();
        assert!(!healthy(&mut health, &[Outcome::Silent; 3])[2]);
        health.restart(Some(&check(3)));
        assert_eq!(healthy(&mut health, &[Outcome::Answered; 3]), [false, false, true]);
        assert!(!healthy(&mut health, &[Outcome::Silent; 3])[2]);
        health.restart(None);
        assert!(health.is_healthy());
    }

    proptest! {
        #[test]
        fn it_turns_only_after_as_many_in_a_row(outcomes in prop::collection::vec(any::<bool>(), 0..60), threshold in 1u32..5) {
            let mut health = Health::default();
            let length = threshold as usize;
            for at in 0..outcomes.len() {
                let outcome = if outcomes[at] { Outcome::Answered } else { Outcome::Silent };
                let before = health.is_healthy();
                let turned = health.observe(&check(threshold), SECOND, outcome);
                prop_assert_eq!(turned, before != health.is_healthy());
                let last = at.checked_sub(length - 1).map(|first| &outcomes[first..=at]);
                let all_differ = last.is_some_and(|last| last.iter().all(|answered| *answered != before));
                prop_assert_eq!(turned, all_differ);
            }
        }
    }
}

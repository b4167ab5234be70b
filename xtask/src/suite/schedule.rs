//! Runs jobs concurrently, as many as the processors have time for.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;

use super::jobs::Job;

/// Jobs that run, and those that wait for their turn.
struct State {
    /// Indices of jobs that have not begun, in their order.
    waiting: Vec<usize>,
    /// Processors in use, in hundredths.
    used: u32,
    running: usize,
    /// A job that runs alone is under way.
    alone: bool,
}

impl State {
    /// The first job that may begin now: its share fits, or nothing else runs.
    fn next(&mut self, jobs: &[Job<'_>], capacity: u32) -> Option<usize> {
        if self.alone {
            return None;
        }
        let may_begin = |index: &usize| {
            jobs.get(*index).is_some_and(|job| {
                self.running == 0 || !job.alone && self.used.saturating_add(job.share) <= capacity
            })
        };
        let at = self.waiting.iter().position(may_begin)?;
        let index = self.waiting.remove(at);
        if let Some(job) = jobs.get(index) {
            self.used = self.used.saturating_add(job.share);
            self.alone = job.alone;
        }
        self.running += 1;
        Some(index)
    }

    fn ended(&mut self, job: &Job<'_>) {
        self.used = self.used.saturating_sub(job.share);
        self.running = self.running.saturating_sub(1);
        self.alone = false;
    }
}

/// Runs all jobs, at most `capacity` hundredths of a processor at once; what each came to, in their order.
pub(crate) fn run<T: Send>(
    jobs: &[Job<'_>],
    capacity: u32,
    run_one: impl Fn(&Job<'_>) -> T + Sync,
) -> Vec<T> {
    let state = Mutex::new(State { waiting: (0..jobs.len()).collect(), used: 0, running: 0, alone: false });
    let changed = Condvar::new();
    let outcomes: Vec<Mutex<Option<T>>> = jobs.iter().map(|_| Mutex::new(None)).collect();
    thread::scope(|scope| {
        let mut locked = state.lock().unwrap_or_else(PoisonError::into_inner);
        while !locked.waiting.is_empty() {
            let Some(index) = locked.next(jobs, capacity) else {
                locked = changed.wait(locked).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let (Some(job), Some(slot)) = (jobs.get(index), outcomes.get(index)) else { continue };
            let (state, changed, run_one) = (&state, &changed, &run_one);
            scope.spawn(move || {
                let outcome = run_one(job);
                *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
                state.lock().unwrap_or_else(PoisonError::into_inner).ended(job);
                changed.notify_all();
            });
        }
    });
    // A panic of a job has failed this program already.
    outcomes
        .into_iter()
        .filter_map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::suite::executables::Executable;
    use crate::suite::rings::RINGS;

    /// Runs jobs of these shares; the most that ran at once, and the order in which they began.
    fn run_shares(shares: &[(u32, bool)], capacity: u32) -> (u32, Vec<u32>, Vec<u32>) {
        let executable = Executable {
            package: "p".to_owned(),
            directory: "/".into(),
            path: "/".into(),
            is_integration: false,
        };
        let job = |&(share, alone): &(u32, bool)| Job {
            ring: &RINGS[0],
            executable: &executable,
            module: None,
            tests: Vec::new(),
            seconds: 1.0,
            share,
            alone,
            limit: RINGS[0].limit,
        };
        let jobs: Vec<Job<'_>> = shares.iter().map(job).collect();
        let (used, most, began) = (AtomicU32::new(0), AtomicU32::new(0), Mutex::new(Vec::new()));
        let outcomes = run(&jobs, capacity, |job| {
            began.lock().unwrap().push(job.share);
            let now = used.fetch_add(job.share, Ordering::SeqCst) + job.share;
            most.fetch_max(now, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(30));
            used.fetch_sub(job.share, Ordering::SeqCst);
            job.share
        });
        (most.into_inner(), began.into_inner().unwrap(), outcomes)
    }

    #[test]
    fn no_more_runs_at_once_than_fits_and_outcomes_keep_their_order() {
        let shares = [(100, false), (150, false), (20, false), (30, false), (90, false)];
        let (most, began, outcomes) = run_shares(&shares, 200);
        assert!(most <= 200, "{most}");
        let mut first = began[..3].to_vec();
        first.sort_unstable();
        assert_eq!(first, [20, 30, 100], "what fits goes before what does not");
        assert_eq!(outcomes, [100, 150, 20, 30, 90]);
    }

    #[test]
    fn a_job_larger_than_the_machine_runs_and_one_that_measures_runs_alone() {
        assert_eq!(run_shares(&[(500, false), (500, false)], 200).0, 500);
        assert_eq!(run_shares(&[(10, true), (10, false), (10, true)], 200).0, 10);
    }
}

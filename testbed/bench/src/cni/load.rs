//! Concurrent calls, each timed.

use std::fmt;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use crate::report::milliseconds;
use crate::statistics::percentile;

/// Result of a load: the time of each call, and of all.
#[derive(Debug)]
pub(crate) struct Load {
    /// Duration of each call in milliseconds.
    pub(crate) milliseconds: Vec<f64>,
    /// Time from the first start to the last end.
    elapsed: Duration,
}

impl Load {
    /// Makes calls number 0 to `calls` from `parallel` threads that start together; each thread makes one call after
    /// the other.
    ///
    /// # Errors
    /// A call failed.
    pub(crate) fn run(
        parallel: usize,
        calls: usize,
        call: impl Fn(usize) -> Result<()> + Sync,
    ) -> Result<Self> {
        let (next, barrier) = (AtomicUsize::new(0), Barrier::new(parallel.saturating_add(1)));
        let worker = || -> Result<Vec<f64>> {
            barrier.wait();
            let mut times = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= calls {
                    return Ok(times);
                }
                let start = Instant::now();
                call(number)?;
                times.push(milliseconds(start.elapsed()));
            }
        };
        thread::scope(|scope| {
            let workers: Vec<_> = (0..parallel)
                .map(|_| thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, worker))
                .collect::<std::io::Result<_>>()
                .context("cannot start threads")?;
            barrier.wait();
            let start = Instant::now();
            let mut times = Vec::with_capacity(calls);
            for worker in workers {
                times.extend(worker.join().map_err(|_| anyhow!("a thread panicked"))??);
            }
            Ok(Self { milliseconds: times, elapsed: start.elapsed() })
        })
    }

    pub(crate) fn pods_per_second(&self) -> f64 {
        self.milliseconds.len() as f64 / self.elapsed.as_secs_f64()
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |share| percentile(&self.milliseconds, share).unwrap_or(f64::NAN);
        write!(f, "p50 {:.1} ms, p99 {:.1} ms, {:.0}/s", at(0.5), at(0.99), self.pods_per_second())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn every_call_is_made_once() {
        let made = Mutex::new(BTreeSet::new());
        let load = Load::run(7, 100, |number| {
            assert!(made.lock().unwrap().insert(number));
            Ok(())
        })
        .unwrap();
        assert_eq!(load.milliseconds.len(), 100);
        assert_eq!(made.into_inner().unwrap(), (0..100).collect());
        assert!(load.pods_per_second() > 0.0);
    }

    #[test]
    fn a_call_that_fails_ends_it() {
        let error = Load::run(3, 10, |number| if number == 4 { Err(anyhow!("no")) } else { Ok(()) });
        assert_eq!(error.unwrap_err().to_string(), "no");
    }
}

//! When what runs: a change is reconciled at once, a sweep every few seconds, and timers of paths wake only the paths.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_path::State;
use tokio::time::{sleep, sleep_until};

use super::Reports;
use super::inputs::{InputReader, Inputs};
use super::kernel::Kernel;
use super::problem::MeshFailure;
use super::reconciler::Mesh;
use super::report::Report;

/// Least pause between two steps, so that a storm of changes costs one step, not thousands.
const MIN_PAUSE: Duration = Duration::from_millis(50);
/// How often the kernel is compared without a change: links, addresses and other programs change it too.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// The same while a peer is not up, which may come from this host's links.
const SWEEP_INTERVAL_WHILE_DOWN: Duration = Duration::from_secs(2);
/// Longest pause after a failure, and that while there is nothing to reconcile.
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// Pause after the first failure: a predecessor that is ending releases port and device a moment later.
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Why a step is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wake {
    Change,
    Paths,
    Sweep,
}

/// What a step does.
enum Work {
    Reconcile(Arc<Inputs>),
    WakePaths,
}

/// Runs the mesh until `stop` resolves. The device stays as it is.
pub(super) async fn run<K: Kernel>(
    mut reader: InputReader,
    mut mesh: Mesh<K>,
    reports: Arc<Reports>,
    stop: impl Future<Output = ()>,
) -> Mesh<K> {
    let mut stop = pin!(stop);
    let mut schedule = Schedule { inputs: None, failures: 0, sweep_at: Instant::now() };
    let mut wake = Wake::Sweep;
    loop {
        if let Some(work) = schedule.work(wake, &mut reader, &reports) {
            let (back, outcome) = step(mesh, work).await;
            mesh = back;
            schedule.conclude(wake, outcome, &reports);
        }
        sleep(MIN_PAUSE).await;
        wake = tokio::select! {
            wake = schedule.next(&mut reader, mesh.poll_timeout()) => wake,
            () = &mut stop => return mesh,
        };
    }
}

/// One step on a thread that may block.
async fn step<K: Kernel>(mut mesh: Mesh<K>, work: Work) -> (Mesh<K>, Result<Option<Report>, MeshFailure>) {
    let work = tokio::task::spawn_blocking(move || {
        let outcome = match work {
            Work::Reconcile(inputs) => mesh.reconcile(&inputs, Instant::now()).map(Some),
            Work::WakePaths => mesh.wake_paths(Instant::now()),
        };
        (mesh, outcome)
    });
    match work.await {
        Ok(done) => done,
        // The mesh is gone with the panic; the program ends with its reason, and the kernel keeps what it has.
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// When the next step is due.
struct Schedule {
    /// What was reconciled last; `None` while there is nothing to reconcile.
    inputs: Option<Arc<Inputs>>,
    /// Failures in a row.
    failures: u32,
    sweep_at: Instant,
}

impl Schedule {
    async fn next(&self, reader: &mut InputReader, paths: Option<Instant>) -> Wake {
        // Without inputs the paths rest too.
        let paths = paths.filter(|_| self.inputs.is_some());
        let paths_due = async {
            match paths {
                Some(at) => sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = reader.changed() => Wake::Change,
            () = sleep_until(self.sweep_at.into()) => Wake::Sweep,
            () = paths_due => Wake::Paths,
        }
    }

    /// What to do; `None` if nothing changed, or there is no mesh.
    fn work(&mut self, wake: Wake, reader: &mut InputReader, reports: &Reports) -> Option<Work> {
        match (wake, &self.inputs) {
            (Wake::Paths, _) => return Some(Work::WakePaths),
            (Wake::Sweep, Some(inputs)) => return Some(Work::Reconcile(Arc::clone(inputs))),
            (Wake::Change, _) | (Wake::Sweep, None) => {}
        }
        match reader.read() {
            // Nodes write to their objects all the time; most of it concerns no other node.
            Ok(inputs) if self.failures == 0 && self.inputs.as_deref() == Some(&inputs) => None,
            Ok(inputs) => {
                let inputs = Arc::new(inputs);
                self.inputs = Some(Arc::clone(&inputs));
                Some(Work::Reconcile(inputs))
            }
            Err(failure) => {
                self.inputs = None;
                self.sweep_at = Instant::now() + MAX_RETRY_INTERVAL;
                reports.fail(failure);
                None
            }
        }
    }

    fn conclude(&mut self, wake: Wake, outcome: Result<Option<Report>, MeshFailure>, reports: &Reports) {
        match outcome {
            Ok(report) => {
                if wake != Wake::Paths {
                    self.failures = 0;
                    self.sweep_at = Instant::now() + SWEEP_INTERVAL;
                    reports.clear_failure();
                }
                let Some(report) = report else { return };
                if report.peers.iter().any(|peer| peer.path.state != State::Up) {
                    self.sweep_at = self.sweep_at.min(Instant::now() + SWEEP_INTERVAL_WHILE_DOWN);
                }
                reports.update(report);
            }
            Err(failure) => {
                self.failures = self.failures.saturating_add(1);
                self.sweep_at = Instant::now() + retry_interval(self.failures);
                tracing::warn!(reason = failure.reason(), error = %failure, "cannot reconcile the mesh");
                reports.fail(failure);
            }
        }
    }
}

/// The pause doubles with every failure in a row.
fn retry_interval(failures: u32) -> Duration {
    let doubled = 2_u32.saturating_pow(failures.saturating_sub(1));
    MIN_RETRY_INTERVAL.saturating_mul(doubled).min(MAX_RETRY_INTERVAL)
}

#[cfg(test)]
mod tests;

//! Schedule of the mesh: a change is reconciled at once, a sweep comes every few seconds, and timers of paths wake only the paths.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_dataplane::kernel_watch::KernelChanges;
use fairlead_limits::doubled;
use tokio::time::{sleep, sleep_until};

use super::apply::gateways;
use super::apply::kernel::Kernel;
use super::apply::path_port::{PathPort, PortThread};
use super::apply::reconciler::Mesh;
use super::apply::report::Report;
use super::gather::reader::InputReader;
use super::model::inputs::Inputs;
use super::model::problem::MeshFailure;
use super::tell::reports::Reports;

/// Least pause between two steps, so that a storm of changes costs one step, not thousands.
const MIN_PAUSE: Duration = Duration::from_millis(50);
/// Least pause before the paths are woken, also while a reconciliation rests: an endpoint that answers probes is set at once.
const MIN_PATHS_PAUSE: Duration = Duration::from_millis(5);
/// Largest share of one processor for reconciliation and for timers of paths while they never rest, as a divisor: the pause
/// is that many times as long as the step took.
const RECONCILIATION_PAUSE: u32 = 4;
const PATHS_PAUSE: u32 = 400;
/// The most these pauses grow to. With thousands of peers that do not answer, one timer or another is always due.
const MAX_PAUSE: Duration = Duration::from_millis(500);
const MAX_PATHS_PAUSE: Duration = Duration::from_secs(5);
/// Pause between two reads of the device of an entry node, for Peers that may come to it, as a multiple of the time that a read takes, and
/// its bounds: a Peer that comes is to be answered within a second or two.
const ENTRIES_PAUSE: u32 = 20;
const MIN_ENTRIES_PAUSE: Duration = Duration::from_millis(250);
const MAX_ENTRIES_PAUSE: Duration = Duration::from_secs(1);
/// Interval at which the kernel is compared without a change. Changes that wake nothing (of another program's nftables tables, elements of
/// our sets, addresses of the device) are put right within this time, or, where a comparison takes long, within that many times as long,
/// up to a bound.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
const SWEEP_PAUSE: u32 = 250;
const MAX_SWEEP_INTERVAL: Duration = Duration::from_secs(15);
/// Longest pause after a failure, and that while there is nothing to reconcile.
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// Pause after the first failure: a predecessor that is ending releases port and device a moment later.
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Cause of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wake {
    Change,
    /// Time to look whether a Peer has come to this entry node.
    Entries,
    /// Time to ask whether gateways forward.
    Gateways,
    /// The paths need something done; an observation of the device only if it is time for one.
    Paths,
    Sweep,
}

/// Work of a step.
enum Work {
    Disable,
    Reconcile(Arc<Inputs>),
    WatchEntries,
    WatchGateways,
    WakePaths { may_observe: bool },
}

/// Runs the mesh until `stop` resolves. The device stays as it is.
pub(crate) async fn run<K: Kernel>(
    mut reader: InputReader,
    mut kernel: KernelChanges,
    mut mesh: Mesh<K>,
    reports: Arc<Reports>,
    stop: impl Future<Output = ()>,
) -> Mesh<K> {
    let mut stop = pin!(stop);
    let port = mesh.path_port();
    let mut serving = match PortThread::start(Arc::clone(&port)) {
        Ok(serving) => serving,
        Err(error) => {
            // The end of this task ends the program.
            tracing::error!(%error, "cannot start the thread that serves the paths");
            return mesh;
        }
    };
    let mut schedule = Schedule::new(Instant::now());
    let mut wake = Wake::Sweep;
    loop {
        let began = Instant::now();
        if let Some(work) = schedule.work(wake, &mut reader, &reports) {
            let disables = matches!(work, Work::Disable);
            let (back, outcome) = step(mesh, work).await;
            mesh = back;
            schedule.is_disabled = disables && outcome.is_ok();
            schedule.conclude(wake, outcome, began.elapsed(), &reports);
            if mesh.is_outdated() {
                schedule.sweep_at = Instant::now();
            }
            schedule.watch_entries(mesh.is_standby(), began.elapsed());
            schedule.watch_gateways(mesh.has_gateways());
            if schedule.is_disabled {
                tracing::info!("there is no WireKubeMesh; removed the mesh from this node");
                reports.disable();
            }
        }
        schedule.rest(wake, began.elapsed());
        sleep(MIN_PATHS_PAUSE).await;
        wake = tokio::select! {
            wake = schedule.next(&mut reader, &mut kernel, &port) => wake,
            // It ends the program with its reason.
            panic = serving.panicked() => std::panic::resume_unwind(panic),
            () = &mut stop => return mesh,
        };
    }
}

/// One step on a thread that may block.
async fn step<K: Kernel>(mut mesh: Mesh<K>, work: Work) -> (Mesh<K>, Result<Option<Report>, MeshFailure>) {
    let work = tokio::task::spawn_blocking(move || {
        let outcome = match work {
            Work::Disable => mesh.disable().map(|()| None),
            Work::WatchEntries => mesh.watch_entries(Instant::now()).map(|()| None),
            Work::WatchGateways => {
                mesh.watch_gateways(Instant::now());
                Ok(None)
            }
            Work::Reconcile(inputs) => mesh.reconcile(&inputs, Instant::now()).map(Some),
            Work::WakePaths { may_observe } => mesh.wake_paths(may_observe, Instant::now()),
        };
        (mesh, outcome)
    });
    match work.await {
        Ok(done) => done,
        // The mesh is gone with the panic; the program ends with its reason, and the kernel keeps what it has.
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Times at which steps are due.
struct Schedule {
    /// Inputs of the last reconciliation; `None` while there is nothing to reconcile.
    inputs: Option<Arc<Inputs>>,
    /// The kernel has nothing of the mesh.
    is_disabled: bool,
    /// Failures in a row.
    failures: u32,
    sweep_at: Instant,
    /// Earliest time of the next reconciliation.
    reconcile_at: Instant,
    /// Earliest time at which the device is read for the paths again.
    paths_at: Instant,
    /// Time at which the device is read for Peers that may come to this node; `None` where none may.
    entries_at: Option<Instant>,
    /// Time at which gateways are asked; `None` where there are none.
    gateways_at: Option<Instant>,
}

impl Schedule {
    fn new(now: Instant) -> Self {
        Self {
            inputs: None,
            is_disabled: false,
            failures: 0,
            sweep_at: now,
            reconcile_at: now,
            paths_at: now,
            entries_at: None,
            gateways_at: None,
        }
    }

    /// Puts the next step of the same kind off. Timers of paths hold up no change, and a reconciliation no endpoint.
    fn rest(&mut self, wake: Wake, took: Duration) {
        let now = Instant::now();
        match wake {
            // [`Self::watch_entries`] and [`Self::watch_gateways`] put them off.
            Wake::Entries | Wake::Gateways => {}
            Wake::Paths => {
                let next = now + took.saturating_mul(PATHS_PAUSE).min(MAX_PATHS_PAUSE);
                self.paths_at = self.paths_at.max(next);
            }
            Wake::Change | Wake::Sweep => {
                let pause = took.saturating_mul(RECONCILIATION_PAUSE).clamp(MIN_PAUSE, MAX_PAUSE);
                self.reconcile_at = now + pause;
            }
        }
    }

    /// Schedules the next read for Peers that may come to this node, if any may. The step before took `took`.
    fn watch_entries(&mut self, may_come: bool, took: Duration) {
        let pause = took.saturating_mul(ENTRIES_PAUSE).clamp(MIN_ENTRIES_PAUSE, MAX_ENTRIES_PAUSE);
        let next = self.entries_at.filter(|at| *at > Instant::now());
        self.entries_at = may_come.then(|| next.unwrap_or_else(|| Instant::now() + pause));
    }

    /// Schedules the next question to gateways, if there are any.
    fn watch_gateways(&mut self, are_there: bool) {
        let next = self.gateways_at.filter(|at| *at > Instant::now());
        self.gateways_at = are_there.then(|| next.unwrap_or_else(|| Instant::now() + gateways::INTERVAL));
    }

    async fn next(&self, reader: &mut InputReader, kernel: &mut KernelChanges, port: &PathPort) -> Wake {
        let paths_due = async {
            // Without inputs the paths rest too.
            match self.inputs {
                Some(_) => port.due(self.paths_at).await,
                None => std::future::pending().await,
            }
        };
        let reconcile = async {
            sleep_until(self.reconcile_at.into()).await;
            tokio::select! {
                () = reader.changed() => Wake::Change,
                () = kernel.changed() => Wake::Sweep,
                () = sleep_until(self.sweep_at.into()) => Wake::Sweep,
            }
        };
        let due = async |at: Option<Instant>| match at {
            Some(at) => sleep_until(at.into()).await,
            None => std::future::pending().await,
        };
        tokio::select! {
            wake = reconcile => wake,
            () = paths_due => Wake::Paths,
            () = due(self.entries_at) => Wake::Entries,
            () = due(self.gateways_at) => Wake::Gateways,
        }
    }

    /// Work that is due; `None` if nothing changed, or there is still no mesh.
    fn work(&mut self, wake: Wake, reader: &mut InputReader, reports: &Reports) -> Option<Work> {
        match (wake, &self.inputs) {
            (Wake::Paths, _) => {
                return Some(Work::WakePaths { may_observe: Instant::now() >= self.paths_at });
            }
            (Wake::Entries, _) => return Some(Work::WatchEntries),
            (Wake::Gateways, _) => return Some(Work::WatchGateways),
            (Wake::Sweep, Some(inputs)) => return Some(Work::Reconcile(Arc::clone(inputs))),
            (Wake::Change, _) | (Wake::Sweep, None) => {}
        }
        match reader.read(Instant::now()) {
            // Nodes write to their objects all the time; most of it concerns no other node.
            Ok(inputs) if self.failures == 0 && self.inputs.as_deref() == Some(&inputs) => None,
            Ok(inputs) => {
                let inputs = Arc::new(inputs);
                reader.keep(&inputs);
                self.inputs = Some(Arc::clone(&inputs));
                Some(Work::Reconcile(inputs))
            }
            Err(failure) => {
                self.inputs = None;
                self.sweep_at = Instant::now() + MAX_RETRY_INTERVAL;
                // An API server that is starting does not know the resource yet: that says nothing.
                let disables =
                    failure == MeshFailure::NoMesh && reader.has_meshes_listed() && !self.is_disabled;
                reports.fail(failure);
                if disables {
                    reader.forget();
                }
                disables.then_some(Work::Disable)
            }
        }
    }

    fn conclude(
        &mut self,
        wake: Wake,
        outcome: Result<Option<Report>, MeshFailure>,
        took: Duration,
        reports: &Reports,
    ) {
        match outcome {
            Ok(report) => {
                if !matches!(wake, Wake::Entries | Wake::Gateways | Wake::Paths) && !self.is_disabled {
                    self.failures = 0;
                    let pause = took.saturating_mul(SWEEP_PAUSE).clamp(SWEEP_INTERVAL, MAX_SWEEP_INTERVAL);
                    self.sweep_at = Instant::now() + pause;
                    reports.clear_failure();
                }
                if let Some(report) = report {
                    reports.update(report);
                }
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
    doubled(MIN_RETRY_INTERVAL, failures.saturating_sub(1), MAX_RETRY_INTERVAL)
}

#[cfg(test)]
mod tests;

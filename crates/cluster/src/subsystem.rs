//! A program as named subsystems: each owns its tasks, says whether it is ready, and is stopped in a given order.
//!
//! A task runs until its subsystem is stopped. One that returns, fails or panics before that takes the program down with the
//! reason ([`Supervisor::run_until`]): a program that keeps running without one of its parts looks healthy and is not. `/healthz`
//! and `/readyz` answer as those of the API server do (Kubernetes, "API health endpoints").

use std::any::Any;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::{self, Display, Write as _};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt as _;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Owns the subsystems of a program. Dropped, it aborts every task.
#[derive(Default)]
pub struct Supervisor {
    subsystems: BTreeMap<&'static str, Subsystem>,
    health: Health,
    failure: watch::Sender<Option<Failure>>,
}

impl Supervisor {
    /// The subsystem of this name; it begins without a task.
    pub fn subsystem(&mut self, name: &'static str) -> &mut Subsystem {
        self.subsystems.entry(name).or_insert_with(|| {
            self.health.update(name, |_| {});
            Subsystem {
                name,
                tasks: JoinSet::new(),
                stop: CancellationToken::new(),
                health: self.health.clone(),
                failure: self.failure.clone(),
            }
        })
    }

    /// The health of all subsystems, for [`crate::http::probes`].
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Waits for `stop`, or for the first task that ends before.
    ///
    /// # Errors
    /// A task ended.
    pub async fn run_until<T>(&self, stop: impl Future<Output = T>) -> Result<T, Failure> {
        let mut failure = self.failure.subscribe();
        let failed = async {
            // The guard does not live across a wait, so that other tasks can do this.
            let found = failure.wait_for(Option::is_some).await.ok().and_then(|found| found.clone());
            match found {
                Some(failure) => failure,
                // Only without a sender, and `self` has one.
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            failure = failed => Err(failure),
            stopped = stop => Ok(stopped),
        }
    }

    /// Stops one subsystem and waits for its tasks; what still runs after `limit` is aborted. One that is not there is
    /// stopped.
    pub async fn stop(&mut self, name: &str, limit: Duration) {
        let Some(mut subsystem) = self.subsystems.remove(name) else { return };
        subsystem.stop.cancel();
        let ended = async { while subsystem.tasks.join_next().await.is_some() {} };
        if timeout(limit, ended).await.is_err() {
            tracing::warn!(subsystem = name, "still busy after {} s: aborted", limit.as_secs());
            subsystem.tasks.shutdown().await;
        }
        self.health.remove(name);
    }

    /// Stops the subsystems in this order, each after the one before has ended, and those it does not name last.
    pub async fn shutdown(mut self, order: &[&str], limit: Duration) {
        for name in order {
            self.stop(name, limit).await;
        }
        for name in self.subsystems.keys().copied().collect::<Vec<_>>() {
            self.stop(name, limit).await;
        }
    }
}

/// One part of a program and its tasks.
pub struct Subsystem {
    name: &'static str,
    tasks: JoinSet<()>,
    stop: CancellationToken,
    health: Health,
    failure: watch::Sender<Option<Failure>>,
}

impl Subsystem {
    /// Starts a task that is dropped where it waits when the subsystem is stopped.
    pub fn spawn<T: TaskOutput>(
        &mut self,
        task: &'static str,
        work: impl Future<Output = T> + Send + 'static,
    ) {
        let stop = self.stop.clone();
        let work = async move { stop.run_until_cancelled(work).await.map(TaskOutput::reason) };
        self.supervise(task, work);
    }

    /// Starts a task that ends by itself when the token it gets is cancelled, within the limit of the stop.
    pub fn spawn_graceful<T: TaskOutput, F>(
        &mut self,
        task: &'static str,
        work: impl FnOnce(CancellationToken) -> F,
    ) where
        F: Future<Output = T> + Send + 'static,
    {
        let work = work(self.stop.clone());
        self.supervise(task, async move { Some(work.await.reason()) });
    }

    /// Has `/readyz` ask `readiness`. A subsystem without one is ready as long as its tasks run.
    pub fn readiness(&self, readiness: Arc<dyn Readiness>) {
        self.health.update(self.name, |status| status.readiness = Some(readiness));
    }

    fn supervise(
        &mut self,
        task: &'static str,
        work: impl Future<Output = Option<EndReason>> + Send + 'static,
    ) {
        let subsystem = self.name;
        let stop = self.stop.clone();
        let health = self.health.clone();
        let first = self.failure.clone();
        self.tasks.spawn(async move {
            // What the task left half-changed is not used again: the program ends.
            let reason = match AssertUnwindSafe(work).catch_unwind().await {
                Ok(None) => return,
                Ok(Some(reason)) => reason,
                Err(panic) => EndReason::Panicked(panic_message(panic.as_ref())),
            };
            let failure = Failure { subsystem, task, reason };
            if stop.is_cancelled() {
                if failure.reason != EndReason::Returned {
                    tracing::warn!(%failure, "while stopping");
                }
                return;
            }
            tracing::error!(%failure, "the program ends");
            health.update(subsystem, |status| {
                status.failure.get_or_insert_with(|| failure.clone());
            });
            first.send_if_modified(|first| first.is_none() && first.replace(failure).is_none());
        });
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// Output of a task: `()`, never, or a result.
pub trait TaskOutput {
    /// Reason for which the task ended.
    fn reason(self) -> EndReason;
}

impl TaskOutput for () {
    fn reason(self) -> EndReason {
        EndReason::Returned
    }
}

impl TaskOutput for Infallible {
    fn reason(self) -> EndReason {
        match self {}
    }
}

impl<E: Display> TaskOutput for Result<(), E> {
    fn reason(self) -> EndReason {
        match self {
            Ok(()) => EndReason::Returned,
            Err(error) => EndReason::Failed(format!("{error:#}")),
        }
    }
}

/// Reason for which a task ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndReason {
    /// With this error.
    Failed(String),
    /// With this message.
    Panicked(String),
    /// Without an error.
    Returned,
}

/// A task that ended before its subsystem was stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Name of the subsystem.
    pub subsystem: &'static str,
    /// Name of the task.
    pub task: &'static str,
    /// Reason for which it ended.
    pub reason: EndReason,
}

impl Failure {
    fn within_subsystem(&self) -> String {
        match &self.reason {
            EndReason::Failed(error) => format!("task {} failed: {error}", self.task),
            EndReason::Panicked(message) => format!("task {} panicked: {message}", self.task),
            EndReason::Returned => format!("task {} ended early", self.task),
        }
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "subsystem {}: {}", self.subsystem, self.within_subsystem())
    }
}

impl std::error::Error for Failure {}

/// Readiness of a subsystem, as `/readyz` answers it.
pub trait Readiness: Send + Sync {
    /// Reason why it is not ready; `None` when it is.
    fn not_ready(&self) -> Option<String>;
}

/// Liveness and readiness of all subsystems.
#[derive(Clone, Default)]
pub struct Health(Arc<Mutex<BTreeMap<&'static str, Status>>>);

#[derive(Clone, Default)]
struct Status {
    failure: Option<Failure>,
    readiness: Option<Arc<dyn Readiness>>,
}

impl Status {
    fn not_alive(&self) -> Option<String> {
        self.failure.as_ref().map(Failure::within_subsystem)
    }

    fn not_ready(&self) -> Option<String> {
        self.not_alive().or_else(|| self.readiness.as_ref()?.not_ready())
    }
}

impl Health {
    /// Whether every task runs.
    pub fn liveness(&self) -> Report {
        self.report("healthz", Status::not_alive)
    }

    /// Whether every task runs and every subsystem is ready.
    pub fn readiness(&self) -> Report {
        self.report("readyz", Status::not_ready)
    }

    fn report(&self, endpoint: &'static str, check: impl Fn(&Status) -> Option<String>) -> Report {
        let statuses = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let checks = statuses.iter().map(|(name, status)| (*name, check(status))).collect();
        Report { endpoint, checks }
    }

    fn update(&self, name: &'static str, change: impl FnOnce(&mut Status)) {
        change(self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default());
    }

    fn remove(&self, name: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }
}

/// The answer of one endpoint: each subsystem, with the reason of its failure if there is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    endpoint: &'static str,
    checks: Vec<(&'static str, Option<String>)>,
}

impl Report {
    /// Whether no check failed.
    pub fn is_ok(&self) -> bool {
        self.checks.iter().all(|(_, failure)| failure.is_none())
    }

    /// `ok`, or one line per failed check; with `verbose` one line per check (Kubernetes, `healthz.go`).
    pub fn text(&self, verbose: bool) -> String {
        let ok = self.is_ok();
        if ok && !verbose {
            return "ok".to_owned();
        }
        let mut text = String::new();
        for (name, failure) in &self.checks {
            // Writing to a string cannot fail.
            let _ = match failure {
                Some(reason) => writeln!(text, "[-]{name} failed: {reason}"),
                None if verbose => writeln!(text, "[+]{name} ok"),
                None => Ok(()),
            };
        }
        let _ = writeln!(text, "{} check {}", self.endpoint, if ok { "passed" } else { "failed" });
        text
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const LIMIT: Duration = Duration::from_millis(50);

    async fn blocks() {
        panic!("index {} of 3", 7);
    }

    async fn failure(supervisor: &Supervisor) -> String {
        let waited = supervisor.run_until(std::future::pending::<()>()).await;
        waited.unwrap_err().to_string()
    }

    #[tokio::test]
    async fn a_task_that_panics_ends_the_program_and_is_named() {
        let mut supervisor = Supervisor::default();
        supervisor.subsystem("cni").spawn("server", std::future::pending::<()>());
        supervisor.subsystem("ipam").spawn("blocks", blocks());
        assert_eq!(failure(&supervisor).await, "subsystem ipam: task blocks panicked: index 7 of 3");
        for report in [supervisor.health().liveness(), supervisor.health().readiness()] {
            let (endpoint, failed) = (report.endpoint, "[-]ipam failed: task blocks panicked: index 7 of 3");
            assert_eq!(report.text(false), format!("{failed}\n{endpoint} check failed\n"));
            assert_eq!(report.text(true), format!("[+]cni ok\n{failed}\n{endpoint} check failed\n"));
        }
    }

    #[tokio::test]
    async fn a_task_that_returns_or_fails_ends_the_program_and_the_first_is_the_reason() {
        let mut supervisor = Supervisor::default();
        supervisor.subsystem("ipam").spawn("blocks", async {});
        assert_eq!(failure(&supervisor).await, "subsystem ipam: task blocks ended early");
        supervisor.subsystem("cni").spawn_graceful("server", |_| async { Err::<(), _>("address in use") });
        while supervisor.health().liveness().text(true).contains("[+]") {
            tokio::task::yield_now().await;
        }
        assert!(supervisor.health().liveness().text(false).contains("server failed: address in use"));
        assert_eq!(failure(&supervisor).await, "subsystem ipam: task blocks ended early");
    }

    #[tokio::test]
    async fn what_runs_is_alive_and_ready_once_it_says_so() {
        #[derive(Default)]
        struct Lists(AtomicBool);
        impl Readiness for Lists {
            fn not_ready(&self) -> Option<String> {
                (!self.0.load(Ordering::Relaxed)).then(|| "waiting for the list of Nodes".to_owned())
            }
        }
        let (mut supervisor, lists) = (Supervisor::default(), Arc::new(Lists::default()));
        let subsystem = supervisor.subsystem("caches");
        subsystem.spawn("nodes", std::future::pending::<Infallible>());
        subsystem.readiness(Arc::<Lists>::clone(&lists));
        let health = supervisor.health();
        assert!(health.liveness().is_ok() && !health.readiness().is_ok());
        assert!(
            health.readiness().text(false).starts_with("[-]caches failed: waiting for the list of Nodes\n")
        );
        lists.0.store(true, Ordering::Relaxed);
        assert_eq!(health.readiness().text(false), "ok");
        assert_eq!(health.readiness().text(true), "[+]caches ok\nreadyz check passed\n");
        assert_eq!(supervisor.run_until(async { 7 }).await, Ok(7));
    }

    #[tokio::test]
    async fn subsystems_stop_one_after_the_other_and_an_end_that_was_asked_for_is_no_failure() {
        let (ended, mut order) = tokio::sync::mpsc::unbounded_channel();
        let mut supervisor = Supervisor::default();
        for name in ["caches", "cni", "mesh"] {
            let ended = ended.clone();
            supervisor.subsystem(name).spawn_graceful("work", move |stop| async move {
                stop.cancelled().await;
                tokio::task::yield_now().await;
                ended.send(name).unwrap();
            });
        }
        supervisor.subsystem("ipam").spawn("blocks", std::future::pending::<()>());
        let health = supervisor.health();
        supervisor.shutdown(&["mesh", "cni", "ipam", "routes"], LIMIT).await;
        drop(ended);
        let mut seen = Vec::new();
        while let Some(name) = order.recv().await {
            seen.push(name);
        }
        assert_eq!(seen, ["mesh", "cni", "caches"]);
        assert_eq!(health.liveness().text(true), "healthz check passed\n");
    }

    #[tokio::test]
    async fn a_subsystem_that_does_not_end_is_aborted_and_may_begin_again() {
        let mut supervisor = Supervisor::default();
        let held = Arc::new(());
        let task = Arc::clone(&held);
        supervisor.subsystem("leader").spawn_graceful("work", |_| async move {
            std::future::pending::<()>().await;
            drop(task);
        });
        supervisor.stop("leader", LIMIT).await;
        assert_eq!(Arc::strong_count(&held), 1);
        supervisor.subsystem("leader").spawn("work", std::future::pending::<()>());
        assert!(supervisor.health().liveness().text(true).contains("[+]leader ok"));
    }
}

//! Keeps the data path as the registry and the Egress say: after each change of them, after changes of the kernel by others, and by a
//! slow sweep.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fairlead_cluster::subsystem::Readiness;
use fairlead_netlink::route::{Change, Subscription};
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::metrics::{Metrics, Snapshot};
use crate::plane::{self, HostFault, Plane, PlaneSettings};
use crate::shared::{InPlace, Shared};

/// How often that is compared which the kernel does not report: filters and nftables, each by a short question.
const LOOK: Duration = Duration::from_millis(300);
/// How often everything is compared.
const SWEEP: Duration = Duration::from_secs(10);
/// Pause after a failure.
const RETRY: Duration = Duration::from_millis(500);
/// How long changes by others are gathered.
const DEBOUNCE: Duration = Duration::from_millis(50);

/// Why the data path is not ready.
#[derive(Debug, Default)]
pub(crate) struct Status(Mutex<Option<String>>);

impl Status {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Some("the data path has not been applied yet".to_owned())))
    }

    fn set(&self, reason: Option<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = reason;
    }
}

impl Readiness for Status {
    fn not_ready(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Wakes the data path when another program changes links, routes or rules. One notification waits at a time; it stands for all.
pub(crate) async fn watch_kernel(changed: mpsc::Sender<()>) -> anyhow::Result<()> {
    #[expect(
        deprecated,
        reason = "unsound only for types that do not own their descriptor; `register` is unsafe"
    )]
    let mut socket = AsyncFd::try_new(Subscription::open()?)?;
    loop {
        let mut ready = socket.readable_mut().await?;
        let changes = match ready.get_inner_mut().changes() {
            Err(fairlead_netlink::Error::Malformed { .. }) => vec![Change::Missed],
            changes => changes?,
        };
        ready.clear_ready();
        if !changes.is_empty() {
            // Full means that it is awake already.
            let _ = changed.try_send(());
        }
    }
}

/// The task.
pub(crate) struct DataPath {
    shared: Arc<Shared>,
    settings: PlaneSettings,
    status: Arc<Status>,
    metrics: Metrics,
    /// Taken along into the threads that talk to the kernel.
    plane: Option<Plane>,
    faults: Vec<HostFault>,
}

impl DataPath {
    pub(crate) fn new(
        shared: Arc<Shared>,
        settings: PlaneSettings,
        status: Arc<Status>,
        metrics: Metrics,
    ) -> Self {
        Self { shared, settings, status, metrics, plane: None, faults: Vec::new() }
    }

    /// Never returns. `is_known` becomes true when the cluster's objects have been read.
    pub(crate) async fn run(mut self, mut is_known: watch::Receiver<bool>, mut kernel: mpsc::Receiver<()>) {
        if is_known.wait_for(|is_known| *is_known).await.is_err() {
            return std::future::pending().await;
        }
        let (mut version, mut destinations) = (self.shared.version(), self.shared.destinations());
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            version.mark_unchanged();
            destinations.mark_unchanged();
            if !self.apply().await {
                tokio::time::sleep(RETRY).await;
                continue;
            }
            let swept = Instant::now();
            loop {
                tokio::select! {
                    _ = version.changed() => break,
                    _ = destinations.changed() => break,
                    Some(()) = kernel.recv() => {
                        tokio::time::sleep(DEBOUNCE).await;
                        break;
                    }
                    _ = look.tick() => {
                        let is_in_place = self.look().await;
                        if !is_in_place || swept.elapsed() >= SWEEP {
                            break;
                        }
                    }
                }
            }
        }
    }

    /// Applies what is desired; whether that succeeded.
    async fn apply(&mut self) -> bool {
        let (version, desired) = self.shared.desired();
        let (settings, plane) = (self.settings.clone(), self.plane.take());
        let work = move || {
            let faults = plane::prepare_host(&settings);
            let mut plane = match plane.map_or_else(|| Plane::open(settings), Ok) {
                Ok(plane) => plane,
                Err(error) => return (None, faults, Err(error)),
            };
            let applied = plane.apply(&desired);
            (Some(plane), faults, applied)
        };
        // A panic inside ends the program, as one here would.
        let (plane, faults, applied) = match tokio::task::spawn_blocking(work).await {
            Ok(done) => done,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        self.plane = plane;
        self.report(faults);
        match applied {
            Ok(applied) => {
                self.metrics.applied(Some(applied.changes));
                if applied.changes > 0 {
                    tracing::debug!(changes = applied.changes, "changed the data path");
                }
                for (client, reason) in &applied.refused {
                    tracing::warn!(%client, reason, "a client has no tunnel");
                }
                let reasons: Vec<String> = self.faults.iter().map(ToString::to_string).collect();
                self.status.set((!reasons.is_empty()).then(|| reasons.join("; ")));
                self.shared
                    .set_in_place(InPlace { version: Some(version), refused: Arc::new(applied.refused) });
                true
            }
            Err(error) => {
                self.metrics.applied(None);
                tracing::error!(%error, "cannot bring the data path to what it should be; trying again");
                self.status.set(Some(format!("DataPathRefused: {error}")));
                // Half of a change may be done; a new one reads everything again.
                false
            }
        }
    }

    fn report(&mut self, faults: Vec<HostFault>) {
        for fault in faults.iter().filter(|fault| !self.faults.contains(fault)) {
            tracing::error!(reason = %fault, "this gateway cannot forward");
        }
        self.faults = faults;
    }

    /// Whether what the kernel does not report is in place. Reads what metrics show as well.
    async fn look(&mut self) -> bool {
        let Some(mut plane) = self.plane.take() else { return false };
        let work = move || {
            let is_in_place = plane.is_in_place();
            let read = plane.counters().and_then(|counters| Ok((counters, plane.traffic()?)));
            (plane, is_in_place, read, connections())
        };
        let (plane, is_in_place, read, connections) = match tokio::task::spawn_blocking(work).await {
            Ok(done) => done,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        self.plane = Some(plane);
        match read {
            Ok((counters, traffic)) => {
                let mut snapshot = Snapshot { counters, traffic, connections, ..Snapshot::default() };
                self.count(&mut snapshot);
                self.metrics.set(snapshot);
            }
            Err(error) => tracing::debug!(%error, "cannot read counters"),
        }
        is_in_place.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot compare the data path");
            false
        })
    }

    fn count(&self, snapshot: &mut Snapshot) {
        snapshot.streams = self.shared.streams() as u64;
        self.shared.registry(|registry| {
            let mut pods = BTreeMap::<&str, std::collections::BTreeSet<&str>>::new();
            for owner in registry.owners().values() {
                pods.entry(&owner.node).or_default().insert(&owner.client.uid);
            }
            snapshot.clients =
                pods.into_iter().map(|(node, pods)| (node.to_owned(), pods.len() as u64)).collect();
            snapshot.adopted = registry.adopted().len() as u64;
        });
    }
}

/// Tracked connections of this namespace, and the limit; `None` where connection tracking is not there.
pub(crate) fn connections() -> Option<(u64, u64)> {
    let read = |name: &str| {
        let text = std::fs::read_to_string(format!("/proc/sys/net/netfilter/nf_conntrack_{name}")).ok()?;
        text.trim().parse().ok()
    };
    Some((read("count")?, read("max")?))
}

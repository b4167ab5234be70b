//! Keeps the data path as the registry and the Egress say: after each change of them, after changes of the kernel by others, and by a
//! slow sweep.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fairlead_cluster::subsystem::Readiness;
use fairlead_dataplane::egress_gateway::SourceTable;
use fairlead_fou::ClientTraffic;
use fairlead_netlink::conntrack::{self, Statistics};
use fairlead_netlink::route::{Change, Subscription};
use fairlead_wire::egress::State;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::clients::Registered;
use crate::cluster::Cluster;
use crate::condition::Conditions;
use crate::exhaustion::Exhaustion;
use crate::metrics::{Metrics, Snapshot};
use crate::plane::{self, Desired, HostFault, Plane, PlaneSettings};
use crate::registry::store::Store;
use crate::server::{ClockError, Streams};
use crate::source_addresses::holds::announced::Announced;

/// Interval at which filters and nftables are compared, of which the kernel reports no changes: each takes a short question.
const LOOK: Duration = Duration::from_millis(300);
/// Looks from one that also reads clients and connections to the next: 6 s.
const SLOW: u32 = 20;
/// With more tracked connections than this, they are not listed, which would take memory: 16 MiB.
const MAX_LISTED: u64 = 65_536;
/// Interval at which everything is compared.
const SWEEP: Duration = Duration::from_secs(10);
/// Pause after a failure.
const RETRY: Duration = Duration::from_millis(500);
/// Time in which changes by others are gathered.
const DEBOUNCE: Duration = Duration::from_millis(50);

/// State of the data path in the kernel.
#[derive(Debug, Clone, Default)]
pub(crate) struct InPlace {
    /// The version of the registry that is in place; `None` before the first time.
    pub(crate) version: Option<u64>,
    /// Packets of clients to the outside are dropped there ([`Sources::standby`]).
    pub(crate) standby: bool,
    /// Clients whose tunnel the kernel refuses.
    pub(crate) refused: Arc<BTreeMap<IpAddr, String>>,
}

/// Reason why the data path is not ready; none if it is.
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

/// Inputs that decide what the data path should be.
pub(crate) struct Inputs {
    pub(crate) store: Arc<Store>,
    pub(crate) cluster: Cluster,
    pub(crate) announced: Announced,
}

/// Other state that metrics show, and the metrics.
pub(crate) struct Shown {
    pub(crate) conditions: Arc<Conditions>,
    pub(crate) streams: Arc<Streams>,
    pub(crate) clock_error: Arc<ClockError>,
    pub(crate) metrics: Metrics,
}

/// The task.
pub(crate) struct DataPath {
    inputs: Inputs,
    shown: Shown,
    in_place: watch::Sender<InPlace>,
    settings: PlaneSettings,
    table: SourceTable,
    status: Arc<Status>,
    /// Taken along into the threads that talk to the kernel.
    plane: Option<Plane>,
    faults: Vec<HostFault>,
    looks: u32,
    exhaustion: Exhaustion,
    /// Traffic and connections that were read last.
    last: Slow,
    /// Clients for metrics, made of `last` and of this version of the registry.
    registered: Option<(u64, Arc<Registered>)>,
}

/// State that takes longer to read, for metrics alone.
#[derive(Debug, Clone, Default)]
struct Slow {
    traffic: BTreeMap<IpAddr, ClientTraffic>,
    /// Number of connections of each source; `None` where there are too many.
    by_source: Option<BTreeMap<IpAddr, usize>>,
    statistics: Option<Statistics>,
}

impl Inputs {
    /// Desired state of the data path, and the version of the registry that it is made from.
    fn desired(&self) -> (u64, Desired) {
        let destinations = BTreeMap::clone(&self.cluster.destinations.borrow());
        let max_connections = self.cluster.options.borrow().max_connections;
        let sources = self.announced.sources.borrow().clone();
        let (version, clients) = self.store.read(|registry| (registry.version(), registry.addresses()));
        (version, Desired { clients, destinations, max_connections, sources })
    }
}

impl DataPath {
    pub(crate) fn new(
        inputs: Inputs,
        shown: Shown,
        in_place: watch::Sender<InPlace>,
        settings: PlaneSettings,
        table: SourceTable,
        status: Arc<Status>,
    ) -> Self {
        Self {
            inputs,
            shown,
            in_place,
            settings,
            table,
            status,
            plane: None,
            faults: Vec::new(),
            looks: 0,
            exhaustion: Exhaustion::default(),
            last: Slow::default(),
            registered: None,
        }
    }

    /// Never returns. It begins when the cluster's objects have been read.
    pub(crate) async fn run(mut self, mut kernel: mpsc::Receiver<()>) {
        let Cluster { mut destinations, mut options, mut is_known, .. } = self.inputs.cluster.clone();
        if is_known.wait_for(|is_known| *is_known).await.is_err() {
            return std::future::pending().await;
        }
        let mut version = self.inputs.store.version();
        let mut sources = self.inputs.announced.sources.clone();
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            version.mark_unchanged();
            destinations.mark_unchanged();
            options.mark_unchanged();
            sources.mark_unchanged();
            if !self.apply().await {
                tokio::time::sleep(RETRY).await;
                continue;
            }
            let swept = Instant::now();
            loop {
                tokio::select! {
                    _ = version.changed() => break,
                    _ = destinations.changed() => break,
                    _ = options.changed() => break,
                    _ = sources.changed() => break,
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
        let (version, desired) = self.inputs.desired();
        let standby = desired.sources.as_ref().is_some_and(|sources| sources.standby);
        let settings = self.settings.clone();
        let plane = self.plane.take();
        let table = self.table.clone();
        let work = move || {
            let faults = plane::prepare_host(&settings);
            let mut plane = match plane.map_or_else(|| Plane::open(settings, table), Ok) {
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
                self.shown.metrics.applied(Some(applied.changes));
                if applied.changes > 0 {
                    tracing::debug!(changes = applied.changes, "changed the data path");
                }
                for (client, reason) in &applied.refused {
                    tracing::warn!(%client, reason, "a client has no tunnel");
                }
                let reasons: Vec<String> = self.faults.iter().map(ToString::to_string).collect();
                self.status.set((!reasons.is_empty()).then(|| reasons.join("; ")));
                let refused = Arc::new(applied.refused);
                self.in_place.send_replace(InPlace { version: Some(version), standby, refused });
                true
            }
            Err(error) => {
                self.shown.metrics.applied(None);
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
        let is_slow = self.looks.is_multiple_of(SLOW);
        self.looks = self.looks.wrapping_add(1);
        let copies = is_slow.then(|| self.inputs.announced.floating().not_held);
        let work = move || {
            let is_in_place = plane.is_in_place();
            let read = plane.counters().and_then(|counters| Ok((counters, plane.traffic()?)));
            let slow = copies.map(|copies| Slow::read(&plane, &copies));
            (plane, is_in_place, read, connections(), slow)
        };
        let (plane, is_in_place, read, connections, slow) = match tokio::task::spawn_blocking(work).await {
            Ok(done) => done,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        self.plane = Some(plane);
        if let Some(slow) = slow {
            self.take_slow(slow, connections);
        }
        match read {
            Ok((counters, traffic)) => {
                let mut snapshot = Snapshot { counters, traffic, connections, ..Snapshot::default() };
                self.count(&mut snapshot);
                self.shown.metrics.set(snapshot);
            }
            Err(error) => tracing::debug!(%error, "cannot read counters"),
        }
        is_in_place.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot compare the data path");
            false
        })
    }

    /// Says what is used up, and keeps the rest for metrics.
    fn take_slow(&mut self, slow: Slow, connections: Option<(u64, u64)>) {
        let statistics = slow.statistics.unwrap_or_default();
        let exhausted = self.exhaustion.observe(Instant::now().into_std(), statistics, connections);
        if let Some((exhausted, packets)) = exhausted {
            let (reason, advice) = exhausted.reason_and_advice();
            tracing::warn!(reason, packets, advice, "new connections of clients fail");
        }
        self.last = slow;
        self.registered = None;
    }

    fn count(&mut self, snapshot: &mut Snapshot) {
        snapshot.streams = self.shown.streams.count() as u64;
        snapshot.statistics = self.last.statistics;
        snapshot.is_draining = *self.shown.conditions.state().borrow() == State::Draining;
        snapshot.clock_error = self.shown.clock_error.seconds();
        let Slow { traffic, by_source, .. } = &self.last;
        let former = self.registered.take();
        let registered = self.inputs.store.read(|registry| match former {
            Some((version, registered)) if version == registry.version() => (version, registered),
            _ => {
                let registered = Registered::of(registry, traffic, by_source.as_ref());
                (registry.version(), Arc::new(registered))
            }
        });
        snapshot.registered = Arc::clone(&registered.1);
        self.registered = Some(registered);
    }
}

impl Slow {
    /// Reads the state. Parts that cannot be read are left out. Connections that are translated to one of the addresses `copies` are
    /// those of another gateway.
    fn read(plane: &Plane, copies: &BTreeSet<IpAddr>) -> Self {
        let of = |error: &dyn std::fmt::Display| tracing::debug!(%error, "cannot read what metrics show");
        let is_listed = connections().is_some_and(|(count, _)| count <= MAX_LISTED);
        let by_source = is_listed.then(|| conntrack::connections_by_source(copies));
        Self {
            traffic: plane.client_traffic().inspect_err(|error| of(error)).unwrap_or_default(),
            by_source: by_source.and_then(|found| found.inspect_err(|error| of(error)).ok()),
            statistics: conntrack::statistics().inspect_err(|error| of(error)).ok(),
        }
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

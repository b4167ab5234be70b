//! The paths' side of the WireGuard port: a thread takes datagrams that are no WireGuard messages and runs the timers of
//! [`PathAgent`], so that a probe is answered at once, whatever the mesh reconciles and the program does meanwhile.
//!
//! Work that only the mesh can do (read the device, set an endpoint, plan anew) is left in [`Due`] and wakes it.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use fairlead_dataplane::wireguard::{PathDatagram, PathSocket, PathSocketHealth, PathSocketStats};
use fairlead_keys::PublicKey;
use fairlead_path::history::{Observed, PathChange, PathHistory};
use fairlead_path::{
    BirthdayOutcome, BirthdayStatus, Candidate, CandidateStatus, EndpointReason, Event, PathAgent,
    ProbeCounts, Source, Transmit,
};
use fairlead_relay::client::LinkQueue;
use prometheus_client::metrics::histogram::Histogram;
use readable::{readiness, register};
use refusals::Refusals;
use tokio::io::unix::AsyncFd;
use tokio::runtime;
use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, sleep_until};

mod readable;
mod refusals;
mod sockets;

/// Datagrams handled at once; the socket queues no more.
const MAX_DATAGRAMS: usize = 256;
/// Least time between two runs for datagrams: any host may send them, and a limit on runs is one on what they cost.
const MIN_PAUSE: Duration = Duration::from_millis(2);

/// Work that the paths leave to the mesh.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Due {
    /// A peer needs an observation of the device.
    pub(crate) observation: bool,
    /// STUN servers or peers see this node elsewhere than before.
    pub(crate) own_addresses_changed: bool,
    /// The path to a peer passes other packets than before.
    pub(crate) route_mtu_changed: bool,
    /// Keepalives to a peer have to come more often, or no more.
    pub(crate) keepalive_changed: bool,
    /// Endpoints to be set.
    pub(crate) endpoints: BTreeMap<PublicKey, SocketAddr>,
    /// Peers to start a handshake with.
    pub(crate) handshakes: BTreeSet<PublicKey>,
}

/// Urgency of the work that is due for the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Urgency {
    /// Nothing is to be done.
    None,
    /// Work for the time at which the mesh may read the device again.
    Observation,
    /// Work that is due at once.
    Now,
}

impl Due {
    fn urgency(&self) -> Urgency {
        let Self { observation, own_addresses_changed, endpoints, handshakes, .. } = self;
        let is_changed = *own_addresses_changed || self.route_mtu_changed || self.keepalive_changed;
        let is_urgent = is_changed || !endpoints.is_empty() || !handshakes.is_empty();
        match (is_urgent, *observation) {
            (true, _) => Urgency::Now,
            (false, true) => Urgency::Observation,
            (false, false) => Urgency::None,
        }
    }
}

/// Counters of this node's paths, since the start of the program.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PathCounters {
    /// Number of times an endpoint was set, by reason.
    pub changes: BTreeMap<EndpointReason, u64>,
    /// Probes that were sent, received and dropped.
    pub probes: ProbeCounts,
    /// Birthday attempts, by what became of them.
    pub birthday_attempts: BTreeMap<BirthdayOutcome, u64>,
    /// Counters of the path socket.
    pub socket: PathSocketStats,
}

/// The paths of this node, shared by the mesh and the thread of the port.
pub struct PathPort {
    started: Instant,
    shared: Mutex<Shared>,
    /// Wakes the thread: timers or the socket may be others.
    changed: Notify,
    /// Wakes the mesh: [`Shared::due`] is not empty.
    due: Notify,
}

struct Shared {
    agent: PathAgent,
    socket: Option<Arc<dyn PathSocket>>,
    /// Errors that routers and hosts report for packets from the port.
    refusals: Refusals,
    /// Counts the changes of the socket, and of where refusals are read.
    generation: u64,
    due: Due,
    /// Number of times an endpoint was set, by reason.
    changes: BTreeMap<EndpointReason, u64>,
    history: PathHistory,
    time_to_direct: Histogram,
    /// The link to the relay.
    relay: LinkQueue,
    /// The sockets of a birthday attempt could not be opened.
    is_sockets_refused: bool,
}

/// Keeps a socket attached to its port; dropping it closes the socket.
pub(crate) struct AttachedSocket(Arc<PathPort>);

impl Drop for AttachedSocket {
    fn drop(&mut self) {
        self.0.replace_socket(None);
    }
}

/// The thread that serves a port until this is dropped.
pub(crate) struct PortThread {
    thread: Option<JoinHandle<()>>,
    /// Dropping it stops the thread.
    stop: Option<oneshot::Sender<()>>,
    ended: oneshot::Receiver<()>,
}

impl PortThread {
    /// Starts it, with a runtime of its own: a worker of the program's may be busy for long.
    ///
    /// # Errors
    /// The process may have no more threads or descriptors.
    pub(crate) fn start(port: Arc<PathPort>) -> io::Result<Self> {
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        let (alive, ended) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        let thread = thread::Builder::new().name("path-port".to_owned()).spawn(move || {
            let _alive: oneshot::Sender<()> = alive;
            runtime.block_on(async {
                tokio::select! {
                    _ = stopped => {}
                    () = port.serve() => {}
                }
            });
        })?;
        Ok(Self { thread: Some(thread), stop: Some(stop), ended })
    }

    /// Resolves only when the thread has panicked, with the panic's payload.
    pub(crate) async fn panicked(&mut self) -> Box<dyn Any + Send> {
        let _ = (&mut self.ended).await;
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(panic)) => panic,
            Some(Ok(())) | None => std::future::pending().await,
        }
    }
}

impl Drop for PortThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        // It waits for nothing but its runtime.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

impl PathPort {
    /// Creates a port without a socket. The agent counts time from `now`; `time_to_direct` gets the time to the first direct path to each
    /// peer.
    pub(crate) fn new(
        agent: PathAgent,
        time_to_direct: Histogram,
        relay: LinkQueue,
        now: Instant,
    ) -> Arc<Self> {
        let shared = Mutex::new(Shared {
            agent,
            socket: None,
            refusals: Refusals::default(),
            generation: 0,
            due: Due::default(),
            changes: BTreeMap::new(),
            history: PathHistory::default(),
            time_to_direct,
            relay,
            is_sockets_refused: false,
        });
        Arc::new(Self { started: now, shared, changed: Notify::new(), due: Notify::new() })
    }

    /// The agent's time.
    pub(crate) fn since(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.started)
    }

    /// Lets the agent use the socket until the result is dropped.
    pub(crate) fn attach(self: &Arc<Self>, socket: Box<dyn PathSocket>) -> AttachedSocket {
        self.replace_socket(Some(Arc::from(socket)));
        AttachedSocket(Arc::clone(self))
    }

    fn replace_socket(&self, socket: Option<Arc<dyn PathSocket>>) {
        let mut shared = self.lock();
        shared.socket = socket;
        shared.generation = shared.generation.wrapping_add(1);
        shared.adopt_sockets(self.since(Instant::now()));
        self.changed.notify_one();
    }

    /// Replaces the agent. What the socket keeps for endpoints of peers stays.
    pub(crate) fn replace_agent(&self, now: Instant, agent: PathAgent) {
        let mut shared = self.lock();
        shared.agent = agent;
        shared.adopt_sockets(self.since(now));
        self.changed.notify_one();
    }

    /// Mends what other programs changed of the socket's surroundings, and says where it works; `None` without a socket.
    pub(crate) fn maintain_socket(&self) -> Option<PathSocketHealth> {
        let socket = self.lock().socket.clone()?;
        Some(socket.maintain())
    }

    /// Asks the agent something.
    pub(crate) fn read_agent<T>(&self, question: impl FnOnce(&PathAgent) -> T) -> T {
        question(&self.lock().agent)
    }

    /// Counters since the start; those of the socket since the device was opened.
    pub(crate) fn counters(&self) -> PathCounters {
        let shared = self.lock();
        PathCounters {
            changes: shared.changes.clone(),
            probes: shared.agent.probe_counts(),
            birthday_attempts: shared.agent.birthday_outcomes().clone(),
            socket: shared.socket.as_deref().map(PathSocket::stats).unwrap_or_default(),
        }
    }

    /// Keeps the history of these peers, and of no others.
    pub(crate) fn set_peers<T>(&self, now: Instant, peers: &BTreeMap<PublicKey, T>) {
        self.lock().history.set_peers(now, peers);
    }

    /// The device was read; `source` says where an endpoint comes from.
    pub(crate) fn observed(
        &self,
        now: Instant,
        peers: impl Iterator<Item = (PublicKey, Observed)>,
        source: impl Fn(&PathAgent, &PublicKey, SocketAddr) -> Source,
    ) {
        let times = (SystemTime::now(), now);
        let mut guard = self.lock();
        let Shared { agent, history, time_to_direct, .. } = &mut *guard;
        for (key, observed) in peers {
            let took = history.observed(&key, times, observed, |address| source(agent, &key, address));
            took.iter().for_each(|took| time_to_direct.observe(took.as_secs_f64()));
        }
    }

    /// Asks all candidates of a peer now; [`Self::candidates`] has what they answer. Whether the port and the peer allow that.
    pub fn ping(&self, key: &PublicKey) -> bool {
        let since = self.since(Instant::now());
        self.lock().socket.is_some() && self.with_agent(|agent| agent.ping(since, key))
    }

    /// The endpoints of a peer that are probed, and what they answer; empty where no probes can be sent.
    pub fn candidates(&self, key: &PublicKey, now: Instant) -> Vec<CandidateStatus> {
        let since = self.since(now);
        self.read_agent(|agent| agent.candidates(since, key))
    }

    /// State of the birthday attempts with a peer; `None` if there was none.
    pub fn birthday_status(&self, key: &PublicKey, now: Instant) -> Option<BirthdayStatus> {
        let since = self.since(now);
        self.read_agent(|agent| agent.birthday_status(since, key))
    }

    /// The last changes of the path to a peer, the oldest first.
    pub fn path_changes(&self, key: &PublicKey) -> Vec<PathChange> {
        self.lock().history.of(key)
    }

    /// Uses the agent, and sends what it wants sent.
    pub(crate) fn with_agent<T>(&self, work: impl FnOnce(&mut PathAgent) -> T) -> T {
        let mut shared = self.lock();
        let done = work(&mut shared.agent);
        self.conclude(&mut shared);
        self.changed.notify_one();
        done
    }

    /// Sends what the agent wants sent, and wakes the mesh if it has more to do than it was woken for before.
    fn conclude(&self, shared: &mut Shared) {
        let before = shared.due.urgency();
        shared.conclude();
        if shared.due.urgency() != before {
            self.due.notify_one();
        }
    }

    /// Handles the datagrams that wait and the timers that are due. Whether there may be more datagrams.
    pub(crate) fn run_due(&self, now: Instant) -> bool {
        let since = self.since(now);
        let mut guard = self.lock();
        let shared = &mut *guard;
        let mut handled = 0;
        while handled < MAX_DATAGRAMS
            && let Some(datagram) = shared.socket.as_deref().and_then(PathSocket::try_receive)
        {
            let PathDatagram { local, remote, socket, payload } = datagram;
            match socket {
                Some(socket) => shared.agent.handle_socket_datagram(since, socket, remote, &payload),
                None => shared.agent.handle_datagram(since, local, remote, &payload),
            }
            handled = handled.saturating_add(1);
        }
        for peer in shared.socket.as_deref().map(PathSocket::take_unanswered).unwrap_or_default() {
            shared.agent.packets_unanswered(since, &peer);
        }
        let has_refusals = shared.refusals.hand_to(&mut shared.agent, since);
        if shared.agent.poll_timeout().is_some_and(|at| at <= since) {
            shared.agent.handle_timeout(since);
        }
        self.conclude(shared);
        if std::mem::take(&mut shared.is_sockets_refused) {
            shared.agent.sockets_refused(since);
            self.conclude(shared);
        }
        handled == MAX_DATAGRAMS || has_refusals
    }

    /// Time of the next call of [`Self::run_due`]; `None` without peers and STUN servers.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.started.checked_add(self.lock().agent.poll_timeout()?)
    }

    /// Takes what the mesh has to do; observations only if it can make one now.
    pub(crate) fn take_due(&self, may_observe: bool) -> Due {
        let mut shared = self.lock();
        let observation = std::mem::take(&mut shared.due.observation);
        let due = std::mem::take(&mut shared.due);
        shared.due.observation = observation && !may_observe;
        Due { observation: observation && may_observe, ..due }
    }

    /// Takes the endpoints to set, and nothing else.
    pub(crate) fn take_endpoints(&self) -> BTreeMap<PublicKey, SocketAddr> {
        std::mem::take(&mut self.lock().due.endpoints)
    }

    /// Resolves when the mesh has something to do. Observations alone are put off until `observe_at`.
    pub(crate) async fn due(&self, observe_at: Instant) {
        loop {
            let notified = self.due.notified();
            let urgency = self.lock().due.urgency();
            match urgency {
                Urgency::Now => return,
                Urgency::Observation => {
                    tokio::select! {
                        () = sleep_until(observe_at.into()) => return,
                        () = notified => {}
                    }
                }
                Urgency::None => notified.await,
            }
        }
    }

    /// Serves the port; never returns.
    async fn serve(&self) {
        loop {
            let generation = self.lock().generation;
            let readable = self.descriptor();
            let refused = self.refusals_descriptor();
            while self.lock().generation == generation {
                self.serve_next(readable.as_ref(), refused.as_ref()).await;
            }
        }
    }

    /// Waits for what is next and handles it.
    async fn serve_next(&self, readable: Option<&AsyncFd<OwnedFd>>, refused: Option<&AsyncFd<OwnedFd>>) {
        let timeout = self.poll_timeout();
        let timer = async {
            match timeout {
                Some(at) => sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        let ready = tokio::select! {
            () = timer => None,
            () = self.changed.notified() => None,
            ready = readiness(readable) => ready,
            ready = readiness(refused) => ready,
        };
        let has_more = self.run_due(Instant::now());
        if let Some(mut ready) = ready {
            if !has_more {
                ready.clear_ready();
            }
            sleep(MIN_PAUSE).await;
        }
    }

    /// Readable while datagrams wait; of its own, so that the socket can be closed at any time.
    fn descriptor(&self) -> Option<AsyncFd<OwnedFd>> {
        let shared = self.lock();
        register(shared.socket.as_ref()?.as_fd())
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Sends what the agent wants sent, and keeps what it wants done. What cannot be sent now is sent again by the timers of the
    /// agent, as if the network had lost it.
    fn conclude(&mut self) {
        while let Some(transmit) = self.agent.poll_transmit() {
            let Some(socket) = &self.socket else { continue };
            let Transmit { local, socket: extra, remote, payload } = &transmit;
            let sent = match extra {
                Some(extra) => socket.send_from_socket(*extra, *remote, payload),
                None => socket.send(*local, *remote, payload),
            };
            if let Err(error) = sent {
                tracing::debug!(remote = %transmit.remote, %error, "cannot send from the WireGuard port");
            }
        }
        while let Some(event) = self.agent.poll_event() {
            match event {
                Event::HandshakeDue { peer } => {
                    tracing::info!(
                        %peer,
                        "starting a handshake: the peer's own are not answered, as when its clock was set back"
                    );
                    self.due.handshakes.insert(peer);
                }
                Event::KeepaliveChanged { peer, interval } => {
                    tracing::info!(%peer, ?interval, "keepalives to a peer have to come as often as this to keep its path open");
                    self.due.keepalive_changed = true;
                }
                Event::ObservationDue { .. } => self.due.observation = true,
                Event::SetEndpoint { peer, endpoint, source, reason } => {
                    tracing::debug!(%peer, %endpoint, %source, ?reason, "trying endpoint");
                    self.due.endpoints.insert(peer, endpoint);
                    let changes = self.changes.entry(reason).or_default();
                    *changes = changes.saturating_add(1);
                    let times = (SystemTime::now(), Instant::now());
                    let to = Candidate { address: endpoint, source };
                    let took = self.history.endpoint_set(&peer, times, to, reason);
                    took.iter().for_each(|took| self.time_to_direct.observe(took.as_secs_f64()));
                }
                Event::RouteMtuChanged { peer, mtu } => {
                    tracing::info!(%peer, mtu, "the path to a peer passes other packets than before");
                    self.due.route_mtu_changed = true;
                }
                Event::SendBothWays { peer, also } => {
                    tracing::debug!(%peer, also = ?also, "the path in use is in doubt, or no more");
                    self.socket.iter().for_each(|socket| socket.send_both_ways(&peer, also));
                }
                Event::Sockets(change) => self.change_sockets(change),
                Event::RelayPortDue { peer } => self.relay.ask_port(&peer),
                Event::StunAnswersChanged => {
                    tracing::debug!(answers = ?self.agent.stun_answers(), "STUN servers answered");
                    self.due.own_addresses_changed = true;
                }
                Event::ReflexiveAddressesChanged => {
                    self.due.own_addresses_changed = true;
                }
                Event::StateChanged { peer, from, to, reason } => {
                    tracing::debug!(%peer, %from, %to, reason = reason.name(), "the path changed its state");
                }
            }
        }
    }
}

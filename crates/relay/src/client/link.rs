//! Stays connected to a relay, and passes datagrams both ways: over one link, or over two while a relay that ends is replaced.

use std::collections::VecDeque;
use std::future::pending;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_api::wireguard::PublicKey;
use fairlead_wire::relay::{Frame, Notice, StunServer};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, sleep_until, timeout};

use super::liveness::{Action, Liveness};
use super::{Backoff, ConnectError, Connection, Receiver, Sender, Settings, connect};
use crate::core::{Class, Counters, Outbox, QueueLimits};

/// What waits for the relay: as in the relay itself.
const QUEUE: QueueLimits =
    QueueLimits { time: Duration::from_millis(100), bytes: 1 << 20, probe_bytes: 64 << 10 };
/// Bytes written at once: as many as the kernel holds unsent, so that probes do not wait behind more.
const BUDGET: usize = 16 << 10;
/// Allocated ports that wait to be taken.
const MAX_PORTS: usize = 1024;
/// How long a write may take.
const WRITE_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a link that was replaced still receives: the relay passes it nothing new.
const REPLACED: Duration = Duration::from_secs(5);
/// How long the relay's word that another program has this key is repeated to the user.
const DUPLICATE: Duration = Duration::from_secs(120);

/// The state of the link, for users.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LinkStatus {
    /// Whether the relay passes datagrams.
    pub is_up: bool,
    /// Why the link is not up.
    pub error: Option<String>,
    /// Since when it is not up.
    pub down_since: Option<Instant>,
    /// Round-trip time to the relay, of the last ping.
    pub round_trip: Option<Duration>,
    /// Where the relay answers STUN requests of this client, if it does.
    pub stun: Option<(IpAddr, StunServer)>,
    /// Until when another program is taken to use this node's key.
    pub duplicate_until: Option<Instant>,
}

/// A UDP port of the relay for this client and a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelayPort {
    /// The peer.
    pub peer: PublicKey,
    /// Where the port is.
    pub address: SocketAddr,
    /// The key for requests that bind this client's address to it.
    pub token: [u8; 32],
}

/// What was passed since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinkCounters {
    /// Bytes of datagrams given to the relay.
    pub sent_bytes: u64,
    /// Bytes of datagrams that came from it.
    pub received_bytes: u64,
    /// Datagrams that were dropped: there was no link, or they waited too long.
    pub dropped: u64,
}

/// Takes what the relay passes to this node: the peer and the datagram.
pub type Receive = dyn Fn(PublicKey, &[u8]) + Send + Sync;

/// Where datagrams for peers are queued. Clones are one queue.
#[derive(Clone)]
pub struct LinkQueue(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// There is something to write.
    filled: Notify,
    /// UDP ports that the relay has allocated, until they are taken.
    ports: Mutex<VecDeque<RelayPort>>,
    allocated: Notify,
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
}

#[derive(Default)]
struct State {
    outbox: Outbox,
    counters: Counters,
    /// The link that writes; the others only receive.
    writer: Option<u64>,
    unsent: u64,
}

impl Default for LinkQueue {
    fn default() -> Self {
        Self(Arc::new(Shared {
            state: Mutex::default(),
            filled: Notify::new(),
            ports: Mutex::default(),
            allocated: Notify::new(),
            sent_bytes: AtomicU64::new(0),
            received_bytes: AtomicU64::new(0),
        }))
    }
}

impl LinkQueue {
    /// Queues a datagram for a peer, without waiting. It is dropped while there is no link; late and excess ones are dropped oldest
    /// first, and probes overtake the rest.
    pub fn send(&self, peer: &PublicKey, is_probe: bool, payload: &[u8]) {
        let (frame, class) = match is_probe {
            true => (Frame::Probe { peer: peer.0, payload }, Class::Probe),
            false => (Frame::Datagram { peer: peer.0, payload }, Class::Datagram),
        };
        let mut bytes = Vec::new();
        let mut state = self.0.lock();
        if state.writer.is_none() || frame.encode(&mut bytes).is_err() {
            state.unsent = state.unsent.saturating_add(1);
            return;
        }
        let State { outbox, counters, .. } = &mut *state;
        outbox.push(Instant::now(), class, bytes.into(), &QUEUE, counters);
        drop(state);
        let length = u64::try_from(payload.len()).unwrap_or(u64::MAX);
        self.0.sent_bytes.fetch_add(length, Ordering::Relaxed);
        self.0.filled.notify_one();
    }

    /// Asks for a UDP port through which the relay passes datagrams to a peer. It may not answer.
    pub fn ask_port(&self, peer: &PublicKey) {
        let mut state = self.0.lock();
        if state.writer.is_some() && state.outbox.push_control(&Frame::Allocate(peer.0)) {
            drop(state);
            self.0.filled.notify_one();
        }
    }

    /// Waits for the next port that the relay has allocated. Nothing is lost if it is dropped while it waits.
    pub async fn allocated(&self) -> RelayPort {
        loop {
            let allocated = self.0.allocated.notified();
            if let Some(port) = lock(&self.0.ports).pop_front() {
                return port;
            }
            allocated.await;
        }
    }

    /// What was passed since the start.
    pub fn counters(&self) -> LinkCounters {
        let state = self.0.lock();
        let late: u64 = state.counters.drops().map(|(_, count)| count).sum();
        LinkCounters {
            sent_bytes: self.0.sent_bytes.load(Ordering::Relaxed),
            received_bytes: self.0.received_bytes.load(Ordering::Relaxed),
            dropped: state.unsent.saturating_add(late),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on this link writes. What waits is not of this link: it has waited long enough.
    fn start_writer(&self, link: u64) {
        let mut state = self.lock();
        state.writer = Some(link);
        state.outbox.clear();
        drop(state);
        // The link that wrote before may wait.
        self.filled.notify_waiters();
    }

    fn stop_writer(&self, link: u64) {
        let mut state = self.lock();
        if state.writer == Some(link) {
            state.writer = None;
            state.outbox.clear();
        }
    }

    /// The frames to write; `None` if another link writes.
    fn take(&self, link: u64, out: &mut Vec<u8>) -> Option<()> {
        let mut state = self.lock();
        if state.writer != Some(link) {
            return None;
        }
        let State { outbox, counters, .. } = &mut *state;
        outbox.pop_into(Instant::now(), &QUEUE, BUDGET, out, counters);
        Some(())
    }
}

/// Stays connected to the relay of `settings`; never returns. Dropping it ends all links.
pub async fn keep_connected(
    settings: Settings,
    queue: LinkQueue,
    receive: Arc<Receive>,
    status: watch::Sender<LinkStatus>,
) {
    let (report, mut reports) = mpsc::channel(16);
    let mut links =
        Links { settings, queue, receive, status, report, tasks: JoinSet::new(), newest: None, number: 0 };
    let mut backoff = Backoff::default();
    let mut connect_at = Some(Instant::now());
    let mut connected_at = None;
    loop {
        let due = async {
            match connect_at {
                Some(at) => sleep_until(at.into()).await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = due => match links.connect().await {
                Ok(()) => (connect_at, connected_at) = (None, Some(Instant::now())),
                Err(error) => {
                    links.failed(&error);
                    let pause = backoff.next(Instant::now(), connected_at.take(), random());
                    connect_at = Some(Instant::now() + pause);
                }
            },
            Some(Report { link, what }) = reports.recv() => match what {
                What::Draining(after) if links.is_newest(link) => {
                    connect_at = Some(Instant::now() + backoff.asked(after));
                }
                What::Ended(error) if links.is_newest(link) => {
                    links.ended(&error);
                    let pause = backoff.next(Instant::now(), connected_at.take(), random());
                    connect_at = Some(connect_at.unwrap_or(Instant::now() + pause));
                }
                What::Draining(_) | What::Ended(_) => {}
            },
        }
        while links.tasks.try_join_next().is_some() {}
    }
}

/// Anything, also where the system has no random bytes: it only spreads attempts.
fn random() -> u32 {
    crate::random::bytes().map(u32::from_ne_bytes).unwrap_or_default()
}

struct Report {
    link: u64,
    what: What,
}

enum What {
    /// The relay ends; connect again after this time.
    Draining(Duration),
    Ended(String),
}

/// The links of one client: one, or the newest and those it replaced.
struct Links {
    settings: Settings,
    queue: LinkQueue,
    receive: Arc<Receive>,
    status: watch::Sender<LinkStatus>,
    report: mpsc::Sender<Report>,
    /// Aborted when this is dropped.
    tasks: JoinSet<()>,
    newest: Option<(u64, AbortHandle)>,
    number: u64,
}

impl Links {
    fn is_newest(&self, link: u64) -> bool {
        self.newest.as_ref().is_some_and(|(newest, _)| *newest == link)
    }

    /// Connects; the link before stays for a while, because datagrams are on their way to it.
    async fn connect(&mut self) -> Result<(), ConnectError> {
        let connection = connect(&self.settings).await?;
        self.number = self.number.saturating_add(1);
        let link = Link {
            number: self.number,
            address: connection.address(),
            shared: Arc::clone(&self.queue.0),
            receive: Arc::clone(&self.receive),
            status: self.status.clone(),
            report: self.report.clone(),
        };
        self.queue.0.start_writer(link.number);
        let task = self.tasks.spawn(link.run(connection));
        if let Some((_, replaced)) = self.newest.replace((self.number, task)) {
            self.tasks.spawn(async move {
                sleep(REPLACED).await;
                replaced.abort();
            });
        }
        self.status.send_modify(|status| {
            (status.is_up, status.error, status.down_since) = (true, None, None);
        });
        tracing::info!(relay = %self.settings.endpoint, "connected to the relay");
        Ok(())
    }

    fn failed(&self, error: &ConnectError) {
        // A link that is to be replaced may still work.
        if self.newest.is_none() {
            self.down(error.to_string());
        }
        tracing::debug!(relay = %self.settings.endpoint, %error, "cannot connect to the relay");
    }

    fn ended(&mut self, error: &str) {
        self.newest = None;
        self.down(error.to_owned());
        tracing::info!(relay = %self.settings.endpoint, error, "the connection to the relay ended");
    }

    fn down(&self, error: String) {
        self.status.send_if_modified(|status| {
            let differs = status.is_up || status.error.as_ref() != Some(&error);
            (status.is_up, status.error, status.round_trip) = (false, Some(error), None);
            status.down_since.get_or_insert_with(Instant::now);
            differs
        });
    }
}

/// One registered connection.
struct Link {
    number: u64,
    address: Option<IpAddr>,
    shared: Arc<Shared>,
    receive: Arc<Receive>,
    status: watch::Sender<LinkStatus>,
    report: mpsc::Sender<Report>,
}

impl Link {
    async fn run(self, connection: Connection) {
        let (sender, receiver) = connection.split();
        let liveness = Mutex::new(Liveness::new(Instant::now()));
        let pongs = Mutex::new(Vec::new());
        let error = tokio::select! {
            error = self.read(receiver, &liveness, &pongs) => error,
            error = self.write(sender, &liveness, &pongs) => error,
        };
        self.shared.stop_writer(self.number);
        let report = Report { link: self.number, what: What::Ended(error) };
        drop(self.report.send(report).await);
    }

    /// Writes what is queued, pings, and answers to pings, until the link ends; returns why.
    async fn write(
        &self,
        mut sender: Sender,
        liveness: &Mutex<Liveness>,
        pongs: &Mutex<Vec<[u8; 8]>>,
    ) -> String {
        let mut out = Vec::new();
        loop {
            let filled = self.shared.filled.notified();
            out.clear();
            let is_writer = self.shared.take(self.number, &mut out).is_some();
            if !out.is_empty() {
                lock(liveness).sent(Instant::now());
            }
            for pong in std::mem::take(&mut *lock(pongs)) {
                let _ = Frame::Pong(pong).encode(&mut out);
            }
            let wait = match lock(liveness).poll(Instant::now()) {
                Action::End => return "the relay does not answer".to_owned(),
                Action::Ping => {
                    let _ = Frame::Ping(self.number.to_be_bytes()).encode(&mut out);
                    Instant::now()
                }
                Action::Wait(until) => until,
            };
            if !out.is_empty() {
                match timeout(WRITE_TIMEOUT, sender.send(&out)).await {
                    Ok(Ok(())) => continue,
                    Ok(Err(error)) => return error.to_string(),
                    Err(_) => return "the relay does not read".to_owned(),
                }
            }
            tokio::select! {
                () = filled, if is_writer => {}
                () = sleep_until(wait.into()) => {}
            }
        }
    }

    async fn read(
        &self,
        mut receiver: Receiver,
        liveness: &Mutex<Liveness>,
        pongs: &Mutex<Vec<[u8; 8]>>,
    ) -> String {
        loop {
            let handled = receiver.receive(|frame| self.handle(frame, liveness, pongs)).await;
            match handled {
                Ok(None) => {}
                Ok(Some(What::Ended(error))) => return error,
                Ok(Some(what)) => {
                    drop(self.report.send(Report { link: self.number, what }).await);
                }
                Err(error) => return error.to_string(),
            }
        }
    }

    fn handle(
        &self,
        frame: &Frame<'_>,
        liveness: &Mutex<Liveness>,
        pongs: &Mutex<Vec<[u8; 8]>>,
    ) -> Option<What> {
        let now = Instant::now();
        lock(liveness).received(now);
        match frame {
            Frame::Datagram { peer, payload } | Frame::Probe { peer, payload } => {
                let length = u64::try_from(payload.len()).unwrap_or(u64::MAX);
                self.shared.received_bytes.fetch_add(length, Ordering::Relaxed);
                (self.receive)(PublicKey(*peer), payload);
            }
            Frame::Ping(data) => {
                let mut pongs = lock(pongs);
                if pongs.is_empty() {
                    pongs.push(*data);
                    self.shared.filled.notify_waiters();
                }
            }
            Frame::Pong(_) => {
                let round_trip = lock(liveness).answered(now);
                if round_trip.is_some() {
                    self.status.send_modify(|status| status.round_trip = round_trip);
                }
            }
            Frame::Draining { reconnect_after, .. } => {
                return Some(What::Draining(Duration::from_millis((*reconnect_after).into())));
            }
            Frame::Notice(Notice::DuplicateKey) => {
                self.status.send_modify(|status| status.duplicate_until = Some(now + DUPLICATE));
            }
            Frame::Allocated(allocated) => {
                let port = self.address.map(|address| RelayPort {
                    peer: PublicKey(allocated.peer),
                    address: SocketAddr::new(address, allocated.port),
                    token: allocated.token,
                });
                let mut ports = lock(&self.shared.ports);
                if ports.len() < MAX_PORTS {
                    ports.extend(port);
                    self.shared.allocated.notify_one();
                }
            }
            Frame::StunServer(server) => {
                let stun = self.address.map(|address| (address, *server));
                self.status.send_modify(|status| status.stun = stun);
            }
            Frame::Error { reason, .. } => return Some(What::Ended(format!("the relay ended it: {reason}"))),
            _ => {}
        }
        None
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

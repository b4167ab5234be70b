//! The relay as a server: connections, TLS, registrations. What is passed on and what ends is decided in [`crate::core`].
//!
//! One lock guards the core. It is held for the frames of one read or one write, never while a task waits.

mod batch;
mod handshakes;
mod link;
mod register;
mod relay_ports;
mod replica_tls;
mod replicas;
mod statistics;
mod udp;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use fairlead_tls::{Certificate, accept, listen};
use fairlead_wire::relay::{ALPN, ErrorReason};
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tokio_rustls::TlsAcceptor;

use crate::access::Authorizer;
use crate::core::{AllocationLimits, Limits, LinkId, Relay, ReplicaLinkId};
use crate::proof::{NoSecret, RelayKey};
use crate::{NOT_SENT, USER_TIMEOUT};
use handshakes::{Handshake, Handshakes};
use relay_ports::RelayPorts;
use replicas::Replicas;
use statistics::Statistics;
use udp::StunPorts;

pub use fairlead_tls::{CertificateError, CertificateFiles};
pub(crate) use register::EXPORTER_LABEL;
pub use replica_tls::ReplicaTlsError;
pub use replicas::ReplicaSettings;
pub use statistics::{Rejection, Snapshot};

/// How often timers of links are looked at.
const TICK: Duration = Duration::from_secs(1);
/// How often the lists of keys and tokens are read again: a removed client's links close within 5 s.
const ACCESS_INTERVAL: Duration = Duration::from_secs(2);
/// How often the certificate is read again.
const CERTIFICATE_INTERVAL: Duration = Duration::from_secs(10);
/// Connections that have not registered yet, in all and of one address or network (/64) of IPv6: nodes may share it, behind a NAT or
/// on a link.
const HANDSHAKES: usize = 1024;
const HANDSHAKES_PER_SOURCE: usize = 128;

/// How a relay is to run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Address for clients.
    pub listen: SocketAddr,
    /// Address for STUN requests, which has a second port after it; `None` answers none.
    pub stun: Option<SocketAddr>,
    /// UDP ports of that address for pairs of peers, and what a client may use of them.
    pub relay_ports: Option<(RangeInclusive<u16>, AllocationLimits)>,
    /// The certificate; without it the relay speaks WebSocket without TLS, for a proxy that terminates TLS.
    pub certificate: Option<CertificateFiles>,
    /// Other replicas of this relay; needs a certificate.
    pub replicas: Option<ReplicaSettings>,
    /// Names by which clients know this relay. A relay without a certificate needs one.
    pub names: Vec<String>,
    /// What clients may use.
    pub limits: Limits,
    /// How long links stay when the relay ends.
    pub drain: Duration,
}

/// Why a relay cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// See [`CertificateError`].
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// The cryptography library fails.
    #[error("cannot make a key for registrations: {0}")]
    Key(#[from] NoSecret),
    /// The address cannot be used.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// A registration could be one for another relay.
    #[error("a relay without a certificate needs a name: the one in its clients' endpoint")]
    NoName,
    /// The system gives no random bytes.
    #[error(transparent)]
    Random(#[from] io::Error),
    /// See [`ReplicaTlsError`].
    #[error(transparent)]
    Replicas(#[from] ReplicaTlsError),
    /// The TLS library refuses the configuration.
    #[error("cannot configure TLS: {0}")]
    Tls(#[from] rustls::Error),
}

/// A relay that listens.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    shared: Arc<Shared>,
    certificate: Option<Arc<Certificate>>,
    drain: Duration,
}

/// What all connections share.
struct Shared {
    access: Arc<dyn Authorizer>,
    handshakes: Arc<Handshakes>,
    tls: Option<TlsAcceptor>,
    names: Vec<String>,
    replica: [u8; 16],
    key: RelayKey,
    idle: Duration,
    stun: Option<StunPorts>,
    relay_ports: Option<RelayPorts>,
    replicas: Option<Replicas>,
    statistics: Statistics,
    links: Mutex<Links>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("names", &self.names).finish_non_exhaustive()
    }
}

/// Links, and what wakes the task that writes to each.
#[derive(Debug)]
struct Links {
    relay: Relay,
    wakers: HashMap<LinkId, Arc<Notify>>,
    replica_wakers: HashMap<ReplicaLinkId, Arc<Notify>>,
}

impl Links {
    /// Wakes those that have something to write.
    fn wake(&mut self) {
        for id in self.relay.take_ready() {
            if let Some(waker) = self.wakers.get(&id) {
                waker.notify_one();
            }
        }
        for id in self.relay.take_ready_replicas() {
            if let Some(waker) = self.replica_wakers.get(&id) {
                waker.notify_one();
            }
        }
    }
}

impl Shared {
    fn links(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self, id: LinkId, reason: ErrorReason) {
        let mut links = self.links();
        links.relay.close(id, reason);
        links.wake();
    }
}

/// Reads a relay while it runs.
#[derive(Debug, Clone)]
pub struct Observer(Arc<Shared>);

impl Observer {
    /// The numbers of this moment.
    pub fn snapshot(&self) -> Snapshot {
        let statistics = &self.0.statistics;
        let counts = statistics.rejections.iter().map(|count| count.load(Ordering::Relaxed));
        let (allocations, relay_ports) =
            self.0.relay_ports.as_ref().map(RelayPorts::counters).unwrap_or_default();
        let links = self.0.links();
        Snapshot {
            allocations,
            relay_ports,
            counters: *links.relay.counters(),
            forwarding: *links.relay.forwarding(),
            replicas: links.relay.replicas(),
            links: links.relay.links(),
            connections: statistics.connections.load(Ordering::Relaxed),
            rejections: Rejection::ALL.into_iter().zip(counts).collect(),
            stun: self.0.stun.as_ref().map(StunPorts::counters).unwrap_or_default(),
        }
    }
}

impl Server {
    /// Listens. Clients wait until [`Server::run`].
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn bind(settings: Settings, access: Arc<dyn Authorizer>) -> Result<Self, StartError> {
        let certificate = settings.certificate.map(Certificate::read).transpose()?;
        if certificate.is_none() && settings.names.is_empty() {
            return Err(StartError::NoName);
        }
        // TLS 1.3 only: the exporters of older versions do not bind a registration to its connection (RFC 9266, section 4.2).
        let config = certificate
            .as_ref()
            .map(|certificate| certificate.server_config(&[&rustls::version::TLS13], &[ALPN, b"http/1.1"]));
        let config = config.transpose()?;
        let address = settings.listen;
        let listener = listen(address).map_err(|error| StartError::Listen { address, error })?;
        let secret = crate::random::bytes()?;
        let stun = settings.stun.map(|address| StunPorts::bind(address, secret)).transpose();
        let stun = stun.map_err(|(address, error)| StartError::Listen { address, error })?;
        let relay_ports = settings.stun.zip(settings.relay_ports);
        let relay_ports =
            relay_ports.map(|(address, (range, limits))| RelayPorts::new(address.ip(), range, limits));
        let replicas = settings.replicas.map(|replicas| Replicas::bind(replicas, certificate.as_ref()));
        let replica = crate::random::bytes()?;
        let since_1970 = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let relay = Relay::new(settings.limits).identified(replica, Instant::now(), since_1970);
        let links = Links { relay, wakers: HashMap::new(), replica_wakers: HashMap::new() };
        let shared = Shared {
            access,
            handshakes: Handshakes::new(HANDSHAKES, HANDSHAKES_PER_SOURCE),
            tls: config.map(|config| TlsAcceptor::from(Arc::new(config))),
            names: settings.names,
            replica,
            key: RelayKey::generate()?,
            idle: settings.limits.idle,
            stun,
            relay_ports: relay_ports.transpose()?,
            replicas: replicas.transpose()?,
            statistics: Statistics::default(),
            links: Mutex::new(links),
        };
        Ok(Self { listener, shared: Arc::new(shared), certificate, drain: settings.drain })
    }

    /// The address it listens on.
    ///
    /// # Errors
    /// The socket does not say.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The address for other replicas, if there is one.
    ///
    /// # Errors
    /// The socket does not say.
    pub fn replica_address(&self) -> io::Result<Option<SocketAddr>> {
        self.shared.replicas.as_ref().map(Replicas::local_address).transpose()
    }

    /// For metrics.
    pub fn observer(&self) -> Observer {
        Observer(Arc::clone(&self.shared))
    }

    /// Serves clients until `stop` resolves, then tells them, and ends when they are gone or the time to drain is over.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let Self { listener, shared, certificate, drain } = self;
        let mut connections = JoinSet::new();
        let mut replicas = std::pin::pin!(replicas::serve(&shared));
        tokio::select! {
            () = &mut replicas => {}
            () = accept_all(&listener, &shared, &mut connections) => {}
            () = maintain(&shared, certificate.as_deref()) => {}
            () = answer_stun(&shared) => {}
            () = stop => {}
        }
        drop(listener);
        // Clients that have gone to other replicas still reach those that are here.
        tokio::select! {
            () = &mut replicas => {}
            () = drain_links(&shared, drain, &mut connections) => {}
        }
        connections.shutdown().await;
    }
}

async fn accept_all(listener: &TcpListener, shared: &Arc<Shared>, connections: &mut JoinSet<()>) {
    loop {
        tokio::select! {
            (stream, source) = accept(listener) => {
                shared.statistics.connections.fetch_add(1, Ordering::Relaxed);
                if let Err(error) = configure(&stream) {
                    tracing::debug!(%source, %error, "cannot configure a connection");
                    continue;
                }
                let handshake = Handshake::begin(&shared.handshakes, source.ip());
                connections.spawn(link::serve(Arc::clone(shared), stream, source, handshake));
            },
            Some(ended) = connections.join_next() => report(ended),
        }
    }
}

async fn answer_stun(shared: &Shared) {
    match &shared.stun {
        Some(ports) => ports.serve().await,
        None => std::future::pending().await,
    }
}

/// A panic ends only its connection.
fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a connection's task failed");
    }
}

fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_tcp_notsent_lowat(NOT_SENT)?;
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))
}

/// Timers, and files that change.
async fn maintain(shared: &Shared, certificate: Option<&Certificate>) {
    let mut tick = interval(TICK);
    let mut access = interval(ACCESS_INTERVAL);
    let mut reload = interval(CERTIFICATE_INTERVAL);
    for timer in [&mut tick, &mut access, &mut reload] {
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    }
    loop {
        tokio::select! {
            _ = tick.tick() => {
                let mut links = shared.links();
                links.relay.handle_timeout(Instant::now());
                links.wake();
                drop(links);
                if let Some(ports) = &shared.relay_ports {
                    ports.handle_timeout();
                }
            }
            _ = access.tick() => {
                if shared.access.refresh() {
                    tracing::info!("who may use the relay has changed");
                    let mut links = shared.links();
                    links.relay.retain(|admission| shared.access.is_allowed(admission));
                    links.wake();
                    drop(links);
                    if let Some(ports) = &shared.relay_ports {
                        ports.retain(|admission| shared.access.is_allowed(admission));
                    }
                }
            }
            _ = reload.tick() => {
                if let Some(replicas) = &shared.replicas {
                    replicas.refresh();
                }
                if let Some(certificate) = certificate {
                    certificate.refresh_and_log();
                }
            }
        }
    }
}

async fn drain_links(shared: &Shared, limit: Duration, connections: &mut JoinSet<()>) {
    let count = {
        let mut links = shared.links();
        links.relay.drain(limit);
        links.wake();
        links.relay.links()
    };
    tracing::info!(links = count, "draining");
    let mut check = interval(Duration::from_millis(50));
    let gone = async {
        while shared.links().relay.links() > 0 {
            tokio::select! {
                _ = check.tick() => {}
                Some(ended) = connections.join_next() => report(ended),
            }
        }
    };
    // What is left when the time is over ends with the program.
    let _ = tokio::time::timeout(limit, gone).await;
}

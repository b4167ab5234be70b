//! The relay as a server: connections, TLS, registrations. What is passed on and what ends is decided in [`crate::core`].
//!
//! One lock guards the core. It is held for the frames of one read or one write, never while a task waits.

mod batch;
mod connections;
mod handshakes;
mod link;
mod register;
mod relay_ports;
mod replica_port;
mod replica_tls;
mod replicas;
mod settings;
mod state;
mod statistics;
mod udp;

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use fairlead_transport::{Certificate, listen};
use fairlead_wire::relay::ALPN;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tokio_rustls::TlsAcceptor;

use crate::access::Authorizer;
use crate::core::Relay;
use crate::proof::RelayKey;
use connections::{configure, report};
use handshakes::{Handshake, Handshakes};
use relay_ports::RelayPorts;
use replica_port::Replicas;
use state::{Links, Shared};
use statistics::Statistics;
use udp::StunPorts;

pub use fairlead_transport::{CertificateError, CertificateFiles};
pub(crate) use register::EXPORTER_LABEL;
pub use replica_tls::ReplicaTlsError;
pub use settings::{ReplicaSettings, Settings, StartError};
pub use statistics::{Rejection, Snapshot};

/// Interval at which timers of links are checked.
const TICK: Duration = Duration::from_secs(1);
/// Interval at which the lists of keys and tokens are read again: a removed client's links close within 5 s.
const ACCESS_INTERVAL: Duration = Duration::from_secs(2);
/// Interval at which the certificate is read again.
const CERTIFICATE_INTERVAL: Duration = Duration::from_secs(10);
/// Connections that have not registered yet, in all and of one address or network (/64) of IPv6: nodes may share it, behind a NAT or
/// on a link.
const HANDSHAKES: usize = 1024;
const HANDSHAKES_PER_SOURCE: usize = 128;

/// A relay that listens.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    shared: Arc<Shared>,
    certificate: Option<Arc<Certificate>>,
    drain: Duration,
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

    /// Handle that reads the state of the relay for metrics.
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
            never = accept_all(&listener, &shared, &mut connections) => match never {},
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

async fn accept_all(
    listener: &TcpListener,
    shared: &Arc<Shared>,
    connections: &mut JoinSet<()>,
) -> Infallible {
    let serve = |stream, source: SocketAddr| {
        shared.statistics.connections.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = configure(&stream) {
            tracing::debug!(%source, %error, "cannot configure a connection");
            return None;
        }
        let handshake = Handshake::begin(&shared.handshakes, source.ip());
        Some(link::serve(Arc::clone(shared), stream, source, handshake))
    };
    // Handshakes and links have limits of their own.
    fairlead_transport::accept_all(listener, connections, || usize::MAX, serve).await
}

async fn answer_stun(shared: &Shared) {
    match &shared.stun {
        Some(ports) => ports.serve().await,
        None => std::future::pending().await,
    }
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

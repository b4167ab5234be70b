//! The discovery server: connections, TLS, gRPC, snapshots, state shared through etcd. What is stored, told and refused is decided in
//! [`crate::core`].
//!
//! One lock guards the core. It is held for one request or one message, never while a task waits.

mod admission;
mod connections;
mod etcd;
mod service;
mod settings;
mod snapshot;
mod state;
mod statistics;
mod watching;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fairlead_limits::ConnectionTable;
use fairlead_transport::{Certificate, listen};
use fairlead_wire::discovery::server::cluster_server::ClusterServer;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::core::Discovery;
use admission::AdmissionFile;
use etcd::Etcd;
use service::Service;
use snapshot::SnapshotFile;
use state::{Shared, State};
use statistics::Statistics;
use watching::Watching;

pub use admission::AdmissionError;
pub use etcd::{
    EtcdAuthorityError, EtcdEndpoint, EtcdSettings, EtcdSnapshot, InvalidEtcdEndpoint, Rejection,
};
pub use fairlead_transport::{CertificateError, CertificateFiles};
pub use settings::{Settings, StartError};
pub use snapshot::SnapshotError;
pub use statistics::{Method, Snapshot};

/// Interval at which expiries are looked at.
const TICK: Duration = Duration::from_secs(1);
/// Interval at which the list of clusters and affiliates is read again: what is removed from it is gone within 5 s.
const ADMISSION_INTERVAL: Duration = Duration::from_secs(2);
/// Interval at which the certificate is read again.
const CERTIFICATE_INTERVAL: Duration = Duration::from_secs(10);
/// Longest request: an update with all that the protocol permits is shorter than 6 KiB.
const MAX_REQUEST: usize = 64 << 10;
/// Requests of one connection at a time.
const MAX_STREAMS: u32 = 256;
const MAX_HEADERS: u32 = 16 << 10;
/// A connection whose other end does not answer is closed.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Time for requests to finish when the server ends.
const FINISH: Duration = Duration::from_secs(2);

/// A discovery server that listens.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    shared: Arc<Shared>,
    tls: Option<Arc<rustls::ServerConfig>>,
    certificate: Option<Arc<Certificate>>,
    admission: Option<AdmissionFile>,
    snapshot: Option<(SnapshotFile, Duration)>,
}

/// Reads a server while it runs.
#[derive(Debug, Clone)]
pub struct Observer(Arc<Shared>);

impl Observer {
    /// The numbers of this moment.
    pub fn snapshot(&self) -> Snapshot {
        let (counters, totals, revision) = {
            let state = self.0.state();
            (*state.discovery.counters(), state.discovery.totals(), state.discovery.position())
        };
        let statistics = &self.0.statistics;
        Snapshot {
            counters,
            totals,
            connections: self.0.connections.open(),
            rejected_connections: self.0.connections.rejected(),
            requests: statistics.requests(),
            refusals: statistics.refusals(),
            snapshots: statistics.snapshots.load(Ordering::Relaxed),
            failed_snapshots: statistics.failed_snapshots.load(Ordering::Relaxed),
            etcd: self.0.etcd.as_ref().map(|etcd| etcd.snapshot(revision)).unwrap_or_default(),
        }
    }

    /// Reason why the server should not get requests now; always `None` without etcd.
    pub fn not_ready(&self) -> Option<String> {
        self.0.etcd.as_ref().and_then(Etcd::not_ready)
    }
}

impl Server {
    /// Listens, and reads what was stored before. Clients wait until [`Server::run`].
    ///
    /// # Errors
    /// See [`StartError`]. A snapshot that cannot be read is only logged: clients publish again.
    pub fn bind(settings: Settings) -> Result<Self, StartError> {
        let certificate = settings.certificate.map(Certificate::read).transpose()?;
        let versions = [&rustls::version::TLS13, &rustls::version::TLS12];
        let config = certificate.as_ref().map(|certificate| certificate.server_config(&versions, &[b"h2"]));
        let tls = config.transpose()?.map(Arc::new);
        let address = settings.listen;
        let listener = listen(address).map_err(|error| StartError::Listen { address, error })?;
        let mut discovery = Discovery::new(settings.limits);
        let admission = settings.admission.map(AdmissionFile::read).transpose()?;
        if let Some(list) = &admission {
            discovery.set_admission(list.current());
        }
        let etcd = settings.etcd.map(|etcd| Etcd::new(etcd, settings.limits.ttl)).transpose()?;
        let snapshot = settings.snapshot.filter(|_| etcd.is_none());
        let snapshot = snapshot.map(|(path, interval)| (SnapshotFile::new(path), interval));
        if let Some((file, _)) = &snapshot {
            file.restore(&mut discovery);
        }
        let (total, per_source) = settings.connections;
        let shared = Shared {
            state: Mutex::new(State { discovery, wakers: HashMap::new() }),
            connections: ConnectionTable::new(total, per_source),
            statistics: Statistics::default(),
            etcd,
            trusted_proxies: settings.trusted_proxies,
            reports_client_address: settings.reports_client_address,
            redirect: settings.redirect,
            stopping: CancellationToken::new(),
        };
        Ok(Self { listener, shared: Arc::new(shared), tls, certificate, admission, snapshot })
    }

    /// The address it listens on.
    ///
    /// # Errors
    /// The socket does not say.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// For metrics.
    pub fn observer(&self) -> Observer {
        Observer(Arc::clone(&self.shared))
    }

    /// Serves clients until `stop` resolves, then ends watches, finishes requests, and writes a last snapshot.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let Self { listener, shared, tls, certificate, admission, snapshot } = self;
        let tls = tls.map(TlsAcceptor::from);
        let (ready, incoming) = mpsc::channel(64);
        let service = ClusterServer::new(Service(Arc::clone(&shared))).max_decoding_message_size(MAX_REQUEST);
        let service = Watching(service);
        let stopping = shared.stopping.clone();
        let serve = tonic::transport::Server::builder()
            .max_concurrent_streams(MAX_STREAMS)
            .http2_max_header_list_size(MAX_HEADERS)
            .http2_keepalive_interval(Some(PING_INTERVAL))
            .http2_keepalive_timeout(Some(PING_TIMEOUT))
            .add_service(service)
            .serve_with_incoming_shutdown(ReceiverStream::new(incoming), stopping.cancelled_owned());
        let mut serve = std::pin::pin!(serve);
        tokio::select! {
            ended = &mut serve => report(ended),
            never = connections::accept_all(&listener, tls.as_ref(), &shared, ready) => match never {},
            () = maintain(&shared, certificate.as_deref(), admission) => {}
            () = save_regularly(&shared, snapshot.as_ref()) => {}
            () = share(&shared) => {}
            () = stop => {
                shared.stopping.cancel();
                shared.end_watches();
                if let Ok(ended) = tokio::time::timeout(FINISH, serve).await {
                    report(ended);
                }
            }
        }
        drop(listener);
        if let Some((file, _)) = &snapshot {
            save(&shared, file).await;
        }
    }
}

fn report(ended: Result<(), tonic::transport::Error>) {
    if let Err(error) = ended {
        tracing::error!(%error, "the gRPC server failed");
    }
}

/// Expiries, and files that change.
async fn maintain(shared: &Shared, certificate: Option<&Certificate>, mut admission: Option<AdmissionFile>) {
    let mut tick = interval(TICK);
    let mut listed = interval(ADMISSION_INTERVAL);
    let mut reload = interval(CERTIFICATE_INTERVAL);
    for timer in [&mut tick, &mut listed, &mut reload] {
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    }
    loop {
        tokio::select! {
            _ = tick.tick() => {
                let mut state = shared.state();
                state.discovery.handle_timeout(Instant::now());
                state.wake();
            }
            _ = listed.tick() => {
                if let Some(list) = admission.as_mut().and_then(AdmissionFile::refresh) {
                    tracing::info!("the list of clusters and affiliates has changed");
                    let mut state = shared.state();
                    state.discovery.set_admission(list);
                    state.wake();
                    shared.etcd.iter().for_each(Etcd::relist);
                }
            }
            _ = reload.tick() => if let Some(certificate) = certificate {
                certificate.refresh_and_log();
            },
        }
    }
}

/// Keeps what is stored as etcd has it.
async fn share(shared: &Shared) {
    match &shared.etcd {
        Some(etcd) => etcd::run(etcd, shared).await,
        None => std::future::pending().await,
    }
}

async fn save_regularly(shared: &Shared, snapshot: Option<&(SnapshotFile, Duration)>) {
    let Some((file, period)) = snapshot else { return std::future::pending().await };
    let mut timer = interval(*period);
    timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick is at once.
    timer.tick().await;
    loop {
        timer.tick().await;
        save(shared, file).await;
    }
}

async fn save(shared: &Shared, file: &SnapshotFile) {
    let stored = shared.state().discovery.stored(Instant::now());
    let count = match file.save(stored).await {
        Ok(()) => &shared.statistics.snapshots,
        Err(error) => {
            tracing::warn!(%error, "cannot write a snapshot; clients would have to publish again after a restart");
            &shared.statistics.failed_snapshots
        }
    };
    count.fetch_add(1, Ordering::Relaxed);
}

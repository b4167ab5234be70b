//! State that replicas share through etcd.
//!
//! [`session`] keeps the core as etcd has it: it lists everything once, then watches. [`update`](Etcd::update) and
//! [`delete`](Etcd::delete) write what clients publish. Both go through the core, which decides what is newer.
//!
//! While etcd cannot be reached, requests that only read are answered from memory, and those that write get `Unavailable`: what a
//! client was told to be stored is stored for all replicas.

mod adoption;
mod connect;
mod key;
mod lease;
mod session;
mod settings;
mod statistics;
mod value;
mod write;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_transport::Certificate;
use fairlead_wire::etcd::kv_client::KvClient;
use fairlead_wire::etcd::lease_client::LeaseClient;
use tokio::sync::Notify;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Status};

use super::settings::StartError;
use connect::Credentials;
use key::Keys;
use lease::Leases;
use statistics::{Statistics, Throttle};

pub use connect::{EtcdAuthorityError, EtcdEndpoint, InvalidEtcdEndpoint};
pub use settings::EtcdSettings;
pub use statistics::EtcdSnapshot;
pub use value::Rejection;

pub(super) use session::run;
pub(super) use write::WriteError;

/// Longest request to etcd.
const REQUEST: Duration = Duration::from_secs(5);

/// State of etcd as far as it is known, and the way to it.
#[derive(Debug)]
pub(super) struct Etcd {
    members: Vec<EtcdEndpoint>,
    credentials: Credentials,
    keys: Keys,
    /// Longest time to live of an affiliate.
    ttl: Duration,
    leases: Mutex<Leases>,
    connection: Mutex<Connection>,
    /// Has the session end and list everything again.
    relist: Notify,
    /// Has the session get another lease.
    renew: Notify,
    statistics: Statistics,
    throttle: Mutex<Throttle>,
}

/// State of the connection to etcd.
#[derive(Debug)]
enum Connection {
    /// Everything is read, and the watch tells of what changes.
    Live(Box<Live>),
    /// No connection: the reason, and whether everything was read before.
    Lost { reason: String, was_read: bool },
}

/// Clients and lease that a write needs.
#[derive(Debug, Clone)]
struct Live {
    keys: KvClient<Member>,
    leases: LeaseClient<Member>,
    lease: OwnLease,
}

/// A lease of this replica.
#[derive(Debug, Clone, Copy)]
struct OwnLease {
    id: i64,
    granted: Instant,
}

/// Has a member without a leader refuse requests, which it would leave waiting (etcd, `rpctypes.MetadataRequireLeaderKey`).
#[derive(Debug, Clone, Copy)]
struct RequireLeader;

type Member = InterceptedService<Channel, RequireLeader>;

impl Interceptor for RequireLeader {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert("hasleader", tonic::metadata::MetadataValue::from_static("true"));
        Ok(request)
    }
}

impl Etcd {
    /// Connects to nothing yet.
    pub(super) fn new(settings: EtcdSettings, ttl: Duration) -> Result<Self, StartError> {
        let certificate = settings.certificate.map(Certificate::read).transpose()?;
        let credentials = Credentials { authorities: settings.authorities, certificate };
        if settings.endpoints.iter().any(EtcdEndpoint::has_tls) {
            credentials.roots()?;
        }
        Ok(Self {
            members: settings.endpoints,
            credentials,
            keys: Keys::new(&settings.prefix),
            ttl,
            leases: Mutex::default(),
            connection: Mutex::new(Connection::Lost {
                reason: "not connected yet".to_owned(),
                was_read: false,
            }),
            relist: Notify::new(),
            renew: Notify::new(),
            statistics: Statistics::default(),
            throttle: Mutex::default(),
        })
    }

    /// Reason why this replica should not get requests now; `None` while it is connected to etcd.
    pub(super) fn not_ready(&self) -> Option<String> {
        match &*lock(&self.connection) {
            Connection::Live(_) => None,
            Connection::Lost { reason, .. } => Some(format!("etcd: {reason}")),
        }
    }

    /// Reason why requests that only read cannot be answered: etcd was never read. `None` if it was.
    pub(super) fn not_read(&self) -> Option<String> {
        match &*lock(&self.connection) {
            Connection::Lost { reason, was_read: false } => {
                Some(format!("this replica has not read etcd yet: {reason}"))
            }
            Connection::Live(_) | Connection::Lost { .. } => None,
        }
    }

    /// Whether a session that failed before everything was read may have failed for want of a client certificate: by the connection, not by
    /// an answer.
    fn may_lack_certificate(&self, member: &EtcdEndpoint, status: &Status) -> bool {
        let is_of_connection = std::error::Error::source(status).is_some();
        is_of_connection && member.has_tls() && self.credentials.certificate.is_none() && !self.is_connected()
    }

    /// Reads all of etcd again, after a change of what is accepted: keys left out before may be accepted now.
    pub(super) fn relist(&self) {
        self.relist.notify_one();
    }

    pub(super) fn snapshot(&self, position: i64) -> EtcdSnapshot {
        self.statistics.snapshot(self.is_connected(), position)
    }

    fn is_connected(&self) -> bool {
        matches!(*lock(&self.connection), Connection::Live(_))
    }

    fn live(&self) -> Result<Live, String> {
        match &*lock(&self.connection) {
            Connection::Live(live) => Ok((**live).clone()),
            Connection::Lost { reason, .. } => Err(reason.clone()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Text of etcd's answer, or of the reason why there is none.
fn in_words(status: &Status) -> String {
    match std::error::Error::source(status) {
        Some(cause) => format!("{}: {}", status.message(), chain(cause)),
        None => format!("{}: {}", status.code(), status.message()),
    }
}

/// An error and its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn random() -> u32 {
    let mut bytes = [0; 4];
    // Without random bytes replicas try again at the same time.
    let _ = aws_lc_rs::rand::fill(&mut bytes);
    u32::from_ne_bytes(bytes)
}

/// Runs a request to etcd within its time.
async fn within<T>(request: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    match tokio::time::timeout(REQUEST, request).await {
        Ok(answer) => answer,
        Err(_) => Err(Status::deadline_exceeded("etcd does not answer")),
    }
}

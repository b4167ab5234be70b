//! Settings of a relay, and why it cannot start with them.

use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use fairlead_transport::{CertificateError, CertificateFiles};

use super::replica_tls::ReplicaTlsError;
use crate::core::{AllocationLimits, Limits};
use crate::proof::NoSecret;

/// Settings of a relay.
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
    /// Limits of clients.
    pub limits: Limits,
    /// Time that links stay when the relay ends.
    pub drain: Duration,
}

/// Settings by which replicas of a relay find and know each other.
#[derive(Debug, Clone)]
pub struct ReplicaSettings {
    /// Address for other replicas.
    pub listen: SocketAddr,
    /// Replicas, as host:port. A name may have the addresses of several replicas, and of this one.
    pub peers: Vec<String>,
    /// The authorities that certify the relay, in PEM.
    pub authorities: PathBuf,
    /// The name in the relay's certificate.
    pub name: String,
}

/// Reason why a relay cannot start.
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
        /// Cause of the failure.
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

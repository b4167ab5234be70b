//! Settings of a discovery server, and reasons why it cannot start with them.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use fairlead_transport::{CertificateError, CertificateFiles};
use ipnet::IpNet;

use super::admission::AdmissionError;
use super::etcd::{EtcdAuthorityError, EtcdSettings};
use crate::core::Limits;

/// Settings of a discovery server.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Address for clients.
    pub listen: SocketAddr,
    /// The certificate; without it the server speaks HTTP/2 without TLS, for a proxy that terminates TLS.
    pub certificate: Option<CertificateFiles>,
    /// Proxies whose `X-Real-IP` or `X-Forwarded-For` says where a request comes from; no other's is believed.
    pub trusted_proxies: Vec<IpNet>,
    /// Whether clients are told their address.
    pub reports_client_address: bool,
    /// Host and port of the server that clients are to use instead.
    pub redirect: Option<String>,
    /// The list of clusters and affiliates that are accepted; without it all are.
    pub admission: Option<PathBuf>,
    /// File in which affiliates survive a restart, and how often it is written.
    pub snapshot: Option<(PathBuf, Duration)>,
    /// The etcd that replicas of this server share what is stored through; then there are no snapshots.
    pub etcd: Option<EtcdSettings>,
    /// Limits of clusters and callers.
    pub limits: Limits,
    /// Connections, in all and of one address.
    pub connections: (usize, usize),
}

impl Settings {
    /// Without TLS, files and proxies, for this many connections in all and of one address.
    pub fn new(listen: SocketAddr, connections: (usize, usize)) -> Self {
        Self {
            listen,
            certificate: None,
            trusted_proxies: Vec::new(),
            reports_client_address: true,
            redirect: None,
            admission: None,
            snapshot: None,
            etcd: None,
            limits: Limits::default(),
            connections,
        }
    }
}

/// Reason why a discovery server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// See [`AdmissionError`].
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// See [`CertificateError`].
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// See [`EtcdAuthorityError`].
    #[error(transparent)]
    EtcdAuthority(#[from] EtcdAuthorityError),
    /// The address cannot be used.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Cause of the failure.
        error: io::Error,
    },
    /// The TLS library refuses the configuration.
    #[error("cannot configure TLS: {0}")]
    Tls(#[from] rustls::Error),
}

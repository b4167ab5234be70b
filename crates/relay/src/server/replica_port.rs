//! Port of a relay for its other replicas: who may connect, and what is known of those that do.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use fairlead_transport::Certificate;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::handshakes::Handshakes;
use super::replica_tls::{ReplicaTlsError, ReplicaTrust};
use super::settings::{ReplicaSettings, StartError};

/// Connections that have not said who they are.
const HANDSHAKES: usize = 64;
const HANDSHAKES_PER_SOURCE: usize = 16;

/// State that connections to other replicas share.
pub(super) struct Replicas {
    pub(super) listener: TcpListener,
    pub(super) peers: Vec<String>,
    pub(super) certificate: Arc<Certificate>,
    pub(super) trust: Arc<ReplicaTrust>,
    pub(super) acceptor: TlsAcceptor,
    pub(super) handshakes: Arc<Handshakes>,
    /// Replicas that this one has dialed: a second address of one is of no use.
    pub(super) dialed: Mutex<BTreeSet<[u8; 16]>>,
}

impl Replicas {
    /// # Errors
    /// See [`StartError`].
    pub(super) fn bind(
        settings: ReplicaSettings,
        certificate: Option<&Arc<Certificate>>,
    ) -> Result<Self, StartError> {
        let certificate = Arc::clone(certificate.ok_or(ReplicaTlsError::NoCertificate)?);
        let trust = ReplicaTrust::read(settings.authorities, &settings.name)?;
        let config = trust.server_config(&certificate).map_err(ReplicaTlsError::from)?;
        let address = settings.listen;
        let listener =
            fairlead_transport::listen(address).map_err(|error| StartError::Listen { address, error })?;
        Ok(Self {
            listener,
            peers: settings.peers,
            certificate,
            trust,
            acceptor: TlsAcceptor::from(Arc::new(config)),
            handshakes: Handshakes::new(HANDSHAKES, HANDSHAKES_PER_SOURCE),
            dialed: Mutex::default(),
        })
    }

    /// Reads the authorities again.
    pub(super) fn refresh(&self) {
        match self.trust.refresh() {
            Ok(true) => tracing::info!("the authorities of replicas have changed"),
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, "the authorities read before stay in use"),
        }
    }

    pub(super) fn local_address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

//! Mutual TLS between replicas. Each presents the relay's certificate, and asks the other for one of the same name by the same
//! authorities: who has its key is the relay for clients, too. So replicas need no secret and no certificate besides.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use fairlead_transport::Certificate;
use fairlead_wire::relay::replica::REPLICA_ALPN;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerifier as _};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig, SignatureScheme, version,
};

use crate::client::trust;

/// Reason why replicas cannot authenticate each other.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaTlsError {
    /// The file with the authorities cannot be used.
    #[error("cannot read authorities of replicas from {path}: {error}", path = path.display())]
    Authorities {
        /// The file.
        path: PathBuf,
        /// Cause of the failure.
        error: io::Error,
    },
    /// The name cannot be in a certificate.
    #[error("{0:?} is neither a DNS name nor an address")]
    Name(String),
    /// There is no certificate to present.
    #[error("replicas authenticate each other with the relay's certificate, and this relay has none")]
    NoCertificate,
    /// The TLS library refuses the configuration.
    #[error("cannot configure TLS between replicas: {0}")]
    Tls(#[from] Error),
}

/// Trust of a replica in others: the authorities and the name of their certificates.
#[derive(Debug)]
pub(super) struct ReplicaTrust {
    path: PathBuf,
    name: ServerName<'static>,
    provider: Arc<CryptoProvider>,
    current: RwLock<Current>,
}

#[derive(Debug)]
struct Current {
    pem: Vec<u8>,
    verifier: Arc<WebPkiServerVerifier>,
}

impl ReplicaTrust {
    pub(super) fn read(path: PathBuf, name: &str) -> Result<Arc<Self>, ReplicaTlsError> {
        let invalid = || ReplicaTlsError::Name(name.to_owned());
        let name = ServerName::try_from(name.to_owned()).map_err(|_| invalid())?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let current = RwLock::new(Current::read(&path, &provider)?);
        Ok(Arc::new(Self { path, name, provider, current }))
    }

    /// Reads the file again; whether it has changed. Until it is good, what was read before stays in use.
    pub(super) fn refresh(&self) -> Result<bool, ReplicaTlsError> {
        let read = Current::read(&self.path, &self.provider)?;
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        let has_changed = read.pem != current.pem;
        *current = read;
        Ok(has_changed)
    }

    fn verifier(&self) -> Arc<WebPkiServerVerifier> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner).verifier)
    }

    pub(super) fn name(&self) -> ServerName<'static> {
        self.name.clone()
    }

    /// Configuration for connections that other replicas make.
    pub(super) fn server_config(self: &Arc<Self>, own: &Arc<Certificate>) -> Result<ServerConfig, Error> {
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&version::TLS13])?
            .with_client_cert_verifier(Arc::<Self>::clone(self))
            .with_cert_resolver(Arc::<Certificate>::clone(own));
        config.alpn_protocols = vec![REPLICA_ALPN.to_vec()];
        Ok(config)
    }

    /// Configuration for a connection to another replica.
    pub(super) fn client_config(&self, own: &Arc<Certificate>) -> Result<ClientConfig, Error> {
        let mut config = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&version::TLS13])?
            .with_webpki_verifier(self.verifier())
            .with_client_cert_resolver(Arc::<Certificate>::clone(own));
        config.alpn_protocols = vec![REPLICA_ALPN.to_vec()];
        Ok(config)
    }
}

impl Current {
    fn read(path: &Path, provider: &Arc<CryptoProvider>) -> Result<Self, ReplicaTlsError> {
        let unusable = |error| ReplicaTlsError::Authorities { path: path.to_owned(), error };
        let pem = std::fs::read(path).map_err(unusable)?;
        let roots = Arc::new(trust(&pem).map_err(unusable)?);
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(provider)).build();
        let verifier = verifier.map_err(|error| unusable(io::Error::other(error)))?;
        Ok(Self { pem, verifier })
    }
}

/// The other end has the certificate of a server, the relay, and is asked for it in either direction. So it is verified as one:
/// chain, validity and name.
impl ClientCertVerifier for ReplicaTrust {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verifier().verify_server_cert(certificate, intermediates, &self.name, &[], now)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier().verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier().verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier().supported_verify_schemes()
    }
}

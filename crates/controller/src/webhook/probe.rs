//! Readiness of the webhook: a TLS handshake with ourselves, which must end in the certificate we mean to serve.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::certificates::{provider, server_name};
use super::server::Served;

/// Pause between handshakes while all is well.
const LOOK: Duration = Duration::from_secs(10);
/// Pause while it is not.
const AGAIN: Duration = Duration::from_millis(500);
/// Time for one handshake.
const PATIENCE: Duration = Duration::from_secs(3);

/// Why the webhook is not ready.
#[derive(Debug)]
pub(super) struct Readiness(Mutex<Option<String>>);

impl Default for Readiness {
    fn default() -> Self {
        Self(Mutex::new(Some("the webhook has not started yet".to_owned())))
    }
}

impl Readiness {
    /// Nothing when it is ready.
    pub(super) fn reason(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, reason: Option<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = reason;
    }
}

/// Tries for ever.
pub(super) async fn run(address: SocketAddr, served: Arc<Served>, readiness: Arc<Readiness>) {
    loop {
        let reason = look(reachable(address), &served, Timestamp::now()).await.err();
        let pause = if reason.is_none() { LOOK } else { AGAIN };
        readiness.set(reason);
        tokio::time::sleep(pause).await;
    }
}

/// The address a client on this machine uses: the one listened on, or loopback for all of them.
fn reachable(address: SocketAddr) -> SocketAddr {
    match address.ip().is_unspecified() {
        true => SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), address.port()),
        false => address,
    }
}

async fn look(address: SocketAddr, served: &Served, now: Timestamp) -> Result<(), String> {
    let (certified, ends) = served.current().ok_or("the webhook has no certificate yet")?;
    if ends <= now {
        return Err(format!("the webhook's certificate ended at {ends}"));
    }
    let expected = certified.end_entity_cert().map_err(|error| error.to_string())?.clone().into_owned();
    let failed =
        |error: &dyn std::fmt::Display| format!("no TLS handshake with the webhook at {address}: {error}");
    let verifier = Arc::new(Expect { expected, provider: provider() });
    let config = ClientConfig::builder_with_provider(Arc::new(provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(&error))?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    let name = ServerName::try_from(server_name()).map_err(|error| failed(&error))?;
    let handshake = async {
        let stream = TcpStream::connect(address).await?;
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    };
    match timeout(PATIENCE, handshake).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(failed(&error)),
        Err(_) => Err(failed(&"it took too long")),
    }
}

/// Accepts one certificate and no other: whose authority signed it is the API server's business.
#[derive(Debug)]
struct Expect {
    expected: CertificateDer<'static>,
    provider: CryptoProvider,
}

impl ServerCertVerifier for Expect {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match *end_entity == self.expected {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, cert, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

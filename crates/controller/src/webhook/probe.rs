//! Readiness of the webhook: a TLS handshake with the own port, which must present the current certificate.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fairlead_cluster::subsystem::Readiness;
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

/// Interval of handshakes while they succeed.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Interval of handshakes while they fail.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Time for one handshake.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Why the last handshake failed; `None` if it succeeded.
#[derive(Debug)]
pub(super) struct Handshake(Mutex<Option<String>>);

impl Default for Handshake {
    fn default() -> Self {
        Self(Mutex::new(Some("the webhook has not started yet".to_owned())))
    }
}

impl Readiness for Handshake {
    fn not_ready(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Repeats the handshake forever.
pub(super) async fn run(address: SocketAddr, served: Arc<Served>, last: Arc<Handshake>) {
    loop {
        let reason = handshake(reachable(address), &served, Timestamp::now()).await.err();
        let pause = if reason.is_none() { POLL_INTERVAL } else { RETRY_INTERVAL };
        *last.0.lock().unwrap_or_else(PoisonError::into_inner) = reason;
        tokio::time::sleep(pause).await;
    }
}

/// The address for a client on this machine: the listening one, or loopback if that is unspecified.
fn reachable(address: SocketAddr) -> SocketAddr {
    match address.ip().is_unspecified() {
        true => SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), address.port()),
        false => address,
    }
}

async fn handshake(address: SocketAddr, served: &Served, now: Timestamp) -> Result<(), String> {
    let (certified, ends) = served.current().ok_or("the webhook has no certificate yet")?;
    if ends <= now {
        return Err(format!("the webhook's certificate expired at {ends}"));
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
    let connect = async {
        let stream = TcpStream::connect(address).await?;
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    };
    match timeout(TIMEOUT, connect).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(failed(&error)),
        Err(_) => Err(failed(&"it timed out")),
    }
}

/// Accepts exactly one certificate. Its authority is verified by API servers.
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

//! TLS 1.3 between gateways, where both ends have a certificate that they have made themselves.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use fairlead_egress::registration::PublicKeyHash;
use fairlead_transport::{AnyCertificate, public_key_info};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use crate::certificate::{OwnCertificate, key_hash};

/// Name of the protocol inside of TLS, which both ends must speak (ALPN, RFC 7301).
const PROTOCOL: &[u8] = b"fairlead-egress-peers/1";

/// The certificate of this gateway, which nothing but this process ever has.
#[derive(Clone)]
pub struct Identity {
    acceptor: TlsAcceptor,
    connector: TlsConnector,
    /// Hash of the public key, by which other gateways know this one.
    pub key: PublicKeyHash,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Identity").finish_non_exhaustive()
    }
}

impl Identity {
    /// Makes a key and a certificate.
    ///
    /// # Errors
    /// The cryptography library fails.
    pub fn generate() -> anyhow::Result<Self> {
        let own = OwnCertificate::generate()?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let any = Arc::new(AnyCertificate(Arc::clone(&provider)));
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(Arc::clone(&any) as _)
            .with_single_cert(vec![own.certificate.clone()], own.private())?;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(any)
            .with_client_auth_cert(vec![own.certificate.clone()], own.private())?;
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        // A resumed session would be without certificates.
        server.send_tls13_tickets = 0;
        client.resumption = rustls::client::Resumption::disabled();
        let acceptor = TlsAcceptor::from(Arc::new(server));
        let connector = Arc::new(client).into();
        Ok(Self { acceptor, connector, key: own.hash })
    }

    /// The handshake of one that was dialed.
    ///
    /// # Errors
    /// It failed.
    pub(super) async fn accept(
        &self,
        stream: TcpStream,
    ) -> io::Result<(TlsStream<TcpStream>, PublicKeyHash)> {
        let stream = self.acceptor.accept(stream).await?;
        let key = key_of(stream.get_ref().1.peer_certificates())?;
        Ok((stream.into(), key))
    }

    /// The handshake of the one that has dialed.
    ///
    /// # Errors
    /// It failed.
    pub(super) async fn connect(
        &self,
        stream: TcpStream,
        address: IpAddr,
    ) -> io::Result<(TlsStream<TcpStream>, PublicKeyHash)> {
        let stream = self.connector.connect(ServerName::from(address), stream).await?;
        let key = key_of(stream.get_ref().1.peer_certificates())?;
        Ok((stream.into(), key))
    }
}

fn key_of(certificates: Option<&[CertificateDer<'_>]>) -> io::Result<PublicKeyHash> {
    let certificate = certificates.unwrap_or_default().first();
    let certificate = certificate.ok_or_else(|| io::Error::other("the other end has no certificate"))?;
    let key = public_key_info(certificate).map_err(io::Error::other)?;
    Ok(key_hash(&key))
}

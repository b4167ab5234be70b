//! A connection to a gateway: TCP, TLS 1.3, HTTP/2.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fairlead_address::DualStackAddrs;
use fairlead_egress::registration::PublicKeyHash;
use fairlead_transport::{AnyCertificate, public_key_info};
use hyper_util::rt::TokioIo;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{IpAddr as TlsAddress, ServerName};
use rustls::{ClientConfig, version};
use sha2::{Digest as _, Sha256};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint, Uri};

use super::session::Ended;

/// Longest TCP connection, TLS handshake and beginning of HTTP/2, together.
pub(super) const CONNECT: Duration = Duration::from_secs(3);
/// A connection whose other end does not answer is closed. Where the gateway's node is gone, this finds it.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// Most bytes that a gateway may send before they are read: HTTP/2 windows, and headers.
const WINDOW: u32 = 128 << 10;
const MAX_HEADERS: u32 = 16 << 10;

/// A channel over one connection, and the key that the gateway has proven to have.
pub(super) struct Link {
    pub(super) channel: Channel,
    pub(super) key: PublicKeyHash,
}

/// Connects to the first address that answers.
///
/// # Errors
/// None does: what failed, of the last one; `Refused` only if nothing listens at any.
pub(super) async fn connect(addresses: DualStackAddrs, port: u16) -> Result<Link, Ended> {
    let dialed =
        fairlead_transport::dial(addresses.iter().map(|address| SocketAddr::new(address, port)), 0, |_| {
            Ok(())
        });
    let stream = dialed.await.map_err(|error| match error.kind() {
        io::ErrorKind::ConnectionRefused => Ended::Refused(port),
        _ => Ended::Unreachable(format!("cannot reach TCP port {port} of {addresses}: {error}")),
    })?;
    let (stream, key) =
        secure(stream).await.map_err(|error| Ended::Unreachable(format!("TLS failed: {error}")))?;
    let channel = channel(stream).await;
    let channel = channel.map_err(|error| Ended::Unreachable(format!("HTTP/2 failed: {error}")))?;
    Ok(Link { channel, key })
}

async fn secure(stream: TcpStream) -> io::Result<(TlsStream<TcpStream>, PublicKeyHash)> {
    let address = stream.peer_addr()?.ip();
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&version::TLS13])
        .map_err(io::Error::other)?
        .dangerous()
        // The token is for its key, and of no use to a server that does not have that.
        .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    // A resumed session would be without a certificate.
    config.resumption = rustls::client::Resumption::disabled();
    let name = ServerName::IpAddress(TlsAddress::from(address));
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let certificate =
        certificates.first().ok_or_else(|| io::Error::other("the gateway has no certificate"))?;
    let key = public_key_info(certificate).map_err(io::Error::other)?;
    Ok((stream, Sha256::digest(key).into()))
}

/// The channel never connects by itself: another connection could lead to another key.
async fn channel(stream: TlsStream<TcpStream>) -> Result<Channel, tonic::transport::Error> {
    let once = Arc::new(Mutex::new(Some(TokioIo::new(stream))));
    let connector = tower::service_fn(move |_: Uri| {
        let stream = once.lock().unwrap_or_else(PoisonError::into_inner).take();
        async move { stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)) }
    });
    Endpoint::from_static("https://egress-gateway")
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .http2_max_header_list_size(MAX_HEADERS)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await
}

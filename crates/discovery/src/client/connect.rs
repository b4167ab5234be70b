//! A connection to a discovery server: TCP, an HTTP proxy on the way, TLS.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use fairlead_transport::Stream;
use fairlead_transport::proxy::{InvalidProxy, Proxy, ProxyError};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::lookup_host;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint, Uri};

use super::{ServerEndpoint, Settings};

/// A connection whose other end does not answer is closed. Servers refuse a ping more often than every 10 s.
const PING_INTERVAL: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Reason why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("cannot reach {0}: {1}")]
    Io(String, io::Error),
    #[error("{0:?} is neither a DNS name nor an address")]
    Name(String),
    #[error(transparent)]
    InvalidProxy(#[from] InvalidProxy),
    #[error(transparent)]
    Proxy(#[from] ProxyError),
    #[error("TLS with {0} failed: {1}")]
    Tls(String, io::Error),
    #[error("cannot configure TLS: {0}")]
    TlsConfiguration(#[from] rustls::Error),
}

/// A channel over one connection.
pub(super) async fn channel(
    settings: &Settings,
    server: &ServerEndpoint,
) -> Result<Channel, Box<dyn std::error::Error + Send + Sync>> {
    let uri: Uri = server.to_string().parse()?;
    let connector = tower::service_fn({
        let settings = settings.clone();
        let server = server.clone();
        move |_: Uri| {
            let settings = settings.clone();
            let server = server.clone();
            async move { connect(&settings, &server).await.map(TokioIo::new) }
        }
    });
    let endpoint = Endpoint::from(uri)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true);
    Ok(endpoint.connect_with_connector(connector).await?)
}

async fn connect(settings: &Settings, server: &ServerEndpoint) -> Result<Box<dyn Stream>, ConnectError> {
    let proxy = match server.tls {
        true => Proxy::from_environment(&server.host, |name| (settings.environment)(name))?,
        false => None,
    };
    let (host, port) = match &proxy {
        Some(proxy) => (proxy.host.as_str(), proxy.port),
        None => (server.host.as_str(), server.port),
    };
    let dialed =
        async { fairlead_transport::dial(lookup_host((host, port)).await?, settings.mark, |_| Ok(())).await }
            .await;
    let mut stream = dialed.map_err(|error| ConnectError::Io(format!("{host}:{port}"), error))?;
    if let Some(proxy) = &proxy {
        proxy.tunnel(&mut stream, &server.authority()).await?;
    }
    if !server.tls {
        return Ok(Box::new(stream));
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(Arc::clone(&settings.roots))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let name = ServerName::try_from(server.host.clone());
    let name = name.map_err(|_| ConnectError::Name(server.host.clone()))?;
    let secured = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
    Ok(Box::new(secured.map_err(|error| ConnectError::Tls(server.authority(), error))?))
}

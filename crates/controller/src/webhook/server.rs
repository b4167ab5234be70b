//! HTTPS for the API server. A new certificate is used by the next connection; nothing restarts.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use jiff::Timestamp;
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use super::certificates::{Pair, Unusable, provider};
use super::metrics::WebhookMetrics;

/// Concurrent connections. API servers keep a few; further clients wait, so that they cannot exhaust memory.
const MAX_CONNECTIONS: usize = 128;
/// Time for a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for the head of a request, and for an idle connection: longer than in API servers (90 s), so that they close it
/// first.
const IDLE_TIMEOUT: Duration = Duration::from_secs(150);
/// Pause before a failed bind or accept is retried.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// The certificate that is served now.
pub(super) struct Served {
    now: ArcSwapOption<(Arc<CertifiedKey>, Timestamp)>,
    metrics: WebhookMetrics,
}

impl Served {
    /// Without a certificate: handshakes fail.
    pub(super) fn new(metrics: WebhookMetrics) -> Self {
        Self { now: ArcSwapOption::empty(), metrics }
    }

    /// Serves this certificate on new connections.
    ///
    /// # Errors
    /// It is unusable; the previous one is still served.
    pub(super) fn replace(&self, pair: &Pair) -> Result<(), Unusable> {
        let certified = pair.certified()?;
        if self.current().is_none_or(|(present, _)| present.cert != certified.cert) {
            self.now.store(Some(Arc::new((Arc::new(certified), pair.ends))));
            self.metrics.certificate_expires(pair.ends);
            tracing::info!(until = %pair.ends, "the webhook serves a new certificate");
        }
        Ok(())
    }

    /// The certificate and when it ends.
    pub(super) fn current(&self) -> Option<(Arc<CertifiedKey>, Timestamp)> {
        self.now.load().as_deref().cloned()
    }
}

impl fmt::Debug for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Served").finish_non_exhaustive()
    }
}

impl ResolvesServerCert for Served {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.current().map(|(certified, _)| certified)
    }
}

/// Serves forever. While the port is in use, the replica is not ready and retries.
///
/// # Errors
/// The cryptography library refuses the TLS configuration.
pub(super) async fn run(
    address: SocketAddr,
    served: Arc<Served>,
    routes: Router,
) -> Result<(), rustls::Error> {
    let acceptor = TlsAcceptor::from(Arc::new(config(served)?));
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) => {
                tracing::error!(%address, %error, "cannot listen for the webhook; does another program use this port?");
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    };
    accept(&listener, &acceptor, &routes).await;
    Ok(())
}

fn config(served: Arc<Served>) -> Result<ServerConfig, rustls::Error> {
    let builder =
        ServerConfig::builder_with_provider(Arc::new(provider())).with_safe_default_protocol_versions()?;
    let mut config = builder.with_no_client_auth().with_cert_resolver(served);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

async fn accept(listener: &TcpListener, acceptor: &TlsAcceptor, routes: &Router) {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        match accepted {
            Ok((stream, _)) => {
                let (acceptor, routes) = (acceptor.clone(), routes.clone());
                connections.spawn(async move {
                    let _permit = permit;
                    serve(stream, acceptor, routes).await;
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to the webhook");
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }
}

async fn serve(stream: TcpStream, acceptor: TlsAcceptor, routes: Router) {
    let stream = match timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::debug!(%error, "a TLS handshake with the webhook failed"),
        Err(_) => return tracing::debug!("a TLS handshake with the webhook timed out"),
    };
    let mut http = hyper::server::conn::http1::Builder::new();
    let http = http.timer(TokioTimer::new()).header_read_timeout(IDLE_TIMEOUT);
    let served = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes)).await;
    if let Err(error) = served {
        tracing::debug!(%error, "a connection to the webhook failed");
    }
}

//! A server for clients without credentials: connections, headers, bodies and answers are limited in number, size and time.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse, Response};
use fairlead_limits::{ConnectionTable, Counted, network};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};
use tower::ServiceExt as _;

use super::sources::Source;

/// Pause before a port that is in use is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Time for a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Size of request headers, and of the read buffer of a connection.
const MAX_HEADERS: usize = 16 << 10;

/// Limits of what clients of a port use.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Open connections.
    pub connections: usize,
    /// Open connections of one address, or network (/64) of IPv6.
    pub per_source: usize,
    /// Time for the headers of a request, and for a connection without one.
    pub idle: Duration,
    /// Time for the body of a request and the answer to it.
    pub request: Duration,
    /// Size of a body in bytes.
    pub body: usize,
}

impl Limits {
    /// Metrics and health: short requests without a body, from one kubelet and a few Prometheus servers.
    pub const PROBES: Self = Self {
        connections: 64,
        per_source: 16,
        idle: Duration::from_secs(30),
        request: Duration::from_secs(10),
        body: 0,
    };
}

/// Transport below HTTP: [`Plain`] TCP or TLS.
pub trait Transport: Clone + Send + Sync + 'static {
    /// The connection of a client.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send;

    /// Performs the handshake.
    fn accept(&self, stream: TcpStream) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

/// TCP without encryption.
#[derive(Debug, Clone, Copy)]
pub struct Plain;

impl Transport for Plain {
    type Stream = TcpStream;

    async fn accept(&self, stream: TcpStream) -> io::Result<TcpStream> {
        Ok(stream)
    }
}

impl Transport for tokio_rustls::TlsAcceptor {
    type Stream = tokio_rustls::server::TlsStream<TcpStream>;

    async fn accept(&self, stream: TcpStream) -> io::Result<Self::Stream> {
        tokio_rustls::TlsAcceptor::accept(self, stream).await
    }
}

/// Serves `routes` forever. A port that is in use is logged and tried again; pods start without it.
pub async fn serve(
    what: &'static str,
    address: SocketAddr,
    limits: Limits,
    transport: impl Transport,
    routes: Router,
) -> Infallible {
    let listener = listen(what, address).await;
    accept_all(what, &listener, limits, transport, routes).await
}

/// A predecessor that is ending releases its port a moment later.
async fn listen(what: &'static str, address: SocketAddr) -> TcpListener {
    let mut reported = false;
    loop {
        match bind(address, TcpListener::bind).await {
            Ok(listener) => return listener,
            Err(error) if reported => tracing::debug!(what, %address, %error, "still cannot listen"),
            Err(error) => {
                tracing::error!(what, %address, %error, "cannot listen; is another program on this port?");
                reported = true;
            }
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// On a kernel without IPv6 (`ipv6.disable=1`), "every address" is every IPv4 address.
async fn bind<L, F>(address: SocketAddr, bind: impl Fn(SocketAddr) -> F) -> io::Result<L>
where
    F: Future<Output = io::Result<L>>,
{
    match bind(address).await {
        Err(error) if address.is_ipv6() && address.ip().is_unspecified() && lacks_ipv6(&error) => {
            bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port()))).await
        }
        other => other,
    }
}

/// socket(2): "The implementation does not support the specified address family". bind(2) fails with the other where IPv6 is
/// switched off for every link.
fn lacks_ipv6(error: &io::Error) -> bool {
    /// `EAFNOSUPPORT` (`asm-generic/errno.h`), which [`io::ErrorKind`] does not have.
    const ADDRESS_FAMILY_NOT_SUPPORTED: i32 = 97;
    error.raw_os_error() == Some(ADDRESS_FAMILY_NOT_SUPPORTED)
        || error.kind() == io::ErrorKind::AddrNotAvailable
}

type Connections = ConnectionTable<IpAddr, DropGuard>;

async fn accept_all(
    what: &'static str,
    listener: &TcpListener,
    limits: Limits,
    transport: impl Transport,
    routes: Router,
) -> Infallible {
    let connections = Connections::new(limits.connections, limits.per_source);
    let routes = routes.layer(DefaultBodyLimit::max(limits.body));
    // What was closed to make room ends before much more is accepted.
    let max_tasks = || connections.open().saturating_add(limits.per_source);
    let serve = |stream, client: SocketAddr| {
        let (counted, closed) = count(&connections, client.ip());
        let source = Source(client.ip().to_canonical());
        let served = serve_connection(stream, source, limits, transport.clone(), routes.clone());
        Some(async move {
            let _counted = counted;
            match closed.run_until_cancelled(served).await {
                Some(Ok(())) => {}
                Some(Err(error)) => tracing::debug!(what, %client, error, "a connection failed"),
                None => tracing::debug!(what, %client, "closed a connection: there are too many"),
            }
        })
    };
    fairlead_transport::accept_all(listener, &mut JoinSet::new(), max_tasks, serve).await
}

/// Counts a connection; the token is cancelled when it has to make room for a newer one.
fn count(connections: &Arc<Connections>, client: IpAddr) -> (Counted<IpAddr, DropGuard>, CancellationToken) {
    let closed = CancellationToken::new();
    (connections.displace(network(client), closed.clone().drop_guard()), closed)
}

async fn serve_connection(
    stream: TcpStream,
    source: Source,
    limits: Limits,
    transport: impl Transport,
    routes: Router,
) -> Result<(), String> {
    let stream = fairlead_transport::handshake(HANDSHAKE_TIMEOUT, transport.accept(stream)).await;
    let stream = stream.map_err(|error| error.to_string())?;
    let answer = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(source);
        answer(routes.clone(), limits.request, request)
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    let http = http.timer(TokioTimer::new()).header_read_timeout(limits.idle).max_buf_size(MAX_HEADERS);
    http.serve_connection(TokioIo::new(stream), answer).await.map_err(|error| error.to_string())
}

async fn answer(routes: Router, limit: Duration, request: Request<Incoming>) -> Result<Response, Infallible> {
    match timeout(limit, routes.oneshot(request)).await {
        Ok(answered) => answered,
        Err(_) => Ok(StatusCode::REQUEST_TIMEOUT.into_response()),
    }
}

#[cfg(test)]
mod tests;

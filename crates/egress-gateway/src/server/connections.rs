//! TLS connections of node programs: how many, of which address, and how long without an accepted token.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use fairlead_limits::{ConnectionTable, Counted, network};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Sleep, sleep};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

/// Longest TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Longest time without an accepted token.
const STRANGER: Duration = Duration::from_secs(15);
/// Connections in all: one for each node program, and those of strangers.
const MAX_CONNECTIONS: usize = 8192;
/// Connections of one address.
const MAX_PER_SOURCE: usize = 16;
/// Connections of a network of IPv6 (/64), in which one host has all addresses it likes, and others may be nodes as well.
const MAX_PER_NETWORK: usize = 2048;

/// Source of a connection.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) address: IpAddr,
    /// Whether a token was accepted. Without one the connection ends.
    pub(crate) is_known: Arc<AtomicBool>,
}

/// All connections, by address and by network.
struct Connections {
    addresses: Arc<ConnectionTable<IpAddr>>,
    networks: Arc<ConnectionTable<IpAddr>>,
}

impl Default for Connections {
    fn default() -> Self {
        let addresses = ConnectionTable::new(MAX_CONNECTIONS, MAX_PER_SOURCE);
        Self { addresses, networks: ConnectionTable::new(MAX_CONNECTIONS, MAX_PER_NETWORK) }
    }
}

impl Connections {
    fn admit(&self, source: IpAddr) -> Option<[Counted<IpAddr>; 2]> {
        let network = self.networks.admit(network(source), ())?;
        Some([self.addresses.admit(source.to_canonical(), ())?, network])
    }
}

/// A connection that is ready for HTTP/2.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Box<TlsStream<TcpStream>>,
    caller: Caller,
    /// Until it must be known.
    deadline: Pin<Box<Sleep>>,
    _counted: [Counted<IpAddr>; 2],
}

/// Accepts connections; their handshakes run beside each other.
pub(crate) async fn accept_all(
    listener: &TcpListener,
    tls: &TlsAcceptor,
    ready: mpsc::Sender<io::Result<Connection>>,
) -> Infallible {
    let connections = Connections::default();
    let serve = |stream, source: SocketAddr| {
        let counted = connections.admit(source.ip())?;
        Some(handshake(stream, source, counted, tls.clone(), ready.clone()))
    };
    // What is not admitted is closed.
    fairlead_transport::accept_all(listener, &mut JoinSet::new(), || usize::MAX, serve).await
}

async fn handshake(
    stream: TcpStream,
    source: SocketAddr,
    counted: [Counted<IpAddr>; 2],
    tls: TlsAcceptor,
    ready: mpsc::Sender<io::Result<Connection>>,
) {
    if let Err(error) = stream.set_nodelay(true) {
        return tracing::debug!(%source, %error, "cannot configure a connection");
    }
    let stream = match fairlead_transport::handshake(HANDSHAKE, tls.accept(stream)).await {
        Ok(stream) => Box::new(stream),
        Err(error) => return tracing::debug!(%source, %error, "a TLS handshake failed"),
    };
    let caller = Caller { address: source.ip().to_canonical(), is_known: Arc::default() };
    let deadline = Box::pin(sleep(STRANGER));
    // It fails only when the server ends.
    let _ = ready.send(Ok(Connection { stream, caller, deadline, _counted: counted })).await;
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.caller.is_known.load(Ordering::Relaxed) && this.deadline.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut this.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(network: u16, host: usize) -> IpAddr {
        [0x2001, 0xdb8, 0, network, 0, 0, 0, u16::try_from(host).unwrap()].into()
    }

    #[test]
    fn clients_of_one_network_of_ipv6_keep_out_only_each_other() {
        let connections = Connections::default();
        let other = connections.admit(address(2, 0));
        let of_network: Vec<_> =
            (0..MAX_PER_NETWORK + 129).filter_map(|host| connections.admit(address(1, host))).collect();
        assert_eq!((other.is_some(), of_network.len()), (true, MAX_PER_NETWORK));
        assert!(connections.admit(address(2, 0)).is_some() && connections.admit(address(3, 0)).is_some());
        let of_host: Vec<_> = (0..129).filter_map(|_| connections.admit(address(4, 0))).collect();
        assert_eq!(of_host.len(), MAX_PER_SOURCE);
        assert!(connections.admit(address(4, 1)).is_some(), "another node on the same link");
    }
}

//! Connections: how many, of which address, with or without TLS.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use fairlead_limits::{ConnectionTable, Counted};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use super::state::Shared;
use crate::core::Source;

/// Longest TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Bytes of a connection that are written at once.
const BUFFER: usize = 32 << 10;
/// Fewer bytes than this wait for others.
const FEW: usize = 8 << 10;

/// Origin of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Caller {
    pub(super) ip: IpAddr,
    /// The number of the connection.
    pub(super) connection: u64,
}

/// A connection that is ready for HTTP/2.
///
/// Each watch is a task of its own, and the first that has a message wakes the task that writes. So that others' messages go with it,
/// what is written waits until the tasks that are ready by then have run.
#[derive(Debug)]
pub(super) struct Connection {
    stream: Stream,
    caller: Caller,
    /// Bytes to be written; without memory while it is empty.
    buffer: Vec<u8>,
    /// Number of bytes of `buffer` that are written.
    written: usize,
    /// Whether other tasks have had their turn since it was empty.
    has_waited: bool,
    _counted: Counted<Source>,
}

#[derive(Debug)]
enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Accepts connections; their handshakes run beside each other.
pub(super) async fn accept_all(
    listener: &TcpListener,
    tls: Option<&TlsAcceptor>,
    shared: &Shared,
    ready: mpsc::Sender<io::Result<Connection>>,
) -> Infallible {
    let mut number: u64 = 0;
    let serve = |stream, source: SocketAddr| {
        let counted = (number, admit(&shared.connections, source.ip())?);
        number = number.wrapping_add(1);
        Some(handshake(stream, source, counted, tls.cloned(), ready.clone()))
    };
    // What is not admitted is closed.
    fairlead_transport::accept_all(listener, &mut JoinSet::new(), || usize::MAX, serve).await
}

/// Counts a connection, by the network of its client; `None` at a limit.
fn admit(connections: &Arc<ConnectionTable<Source>>, client: IpAddr) -> Option<Counted<Source>> {
    connections.admit(Source::of(client), ())
}

async fn handshake(
    stream: TcpStream,
    source: SocketAddr,
    counted: (u64, Counted<Source>),
    tls: Option<TlsAcceptor>,
    ready: mpsc::Sender<io::Result<Connection>>,
) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%source, %error, "cannot configure a connection");
        return;
    }
    let stream = match tls {
        None => Stream::Plain(stream),
        Some(tls) => match fairlead_transport::handshake(HANDSHAKE, tls.accept(stream)).await {
            Ok(stream) => Stream::Tls(Box::new(stream)),
            Err(error) => return tracing::debug!(%source, %error, "a TLS handshake failed"),
        },
    };
    let (number, counted) = counted;
    let caller = Caller { ip: source.ip().to_canonical(), connection: number };
    let connection =
        Connection { stream, caller, buffer: Vec::new(), written: 0, has_waited: false, _counted: counted };
    // It fails only when the server ends.
    let _ = ready.send(Ok(connection)).await;
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Stream::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl Connection {
    /// Writes all that is in the buffer.
    fn poll_buffer(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some(bytes) = self.buffer.get(self.written..).filter(|bytes| !bytes.is_empty()) {
            let length = ready!(self.stream.poll_write(context, bytes))?;
            if length == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.written = self.written.saturating_add(length);
        }
        (self.buffer, self.written, self.has_waited) = (Vec::new(), 0, false);
        Poll::Ready(Ok(()))
    }
}

impl Stream {
    fn poll_write(&mut self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let connection = self.get_mut();
        if connection.buffer.len() >= BUFFER {
            ready!(connection.poll_buffer(context))?;
        }
        let room = BUFFER.saturating_sub(connection.buffer.len());
        let bytes = bytes.get(..room).unwrap_or(bytes);
        connection.buffer.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let connection = self.get_mut();
        let is_small = (1..FEW).contains(&connection.buffer.len());
        if is_small && !connection.has_waited {
            connection.has_waited = true;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        ready!(connection.poll_buffer(context))?;
        connection.stream.poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let connection = self.get_mut();
        ready!(connection.poll_buffer(context))?;
        connection.stream.poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_of_one_network_of_ipv6_take_only_their_own_share() {
        let connections = ConnectionTable::new(1000, 128);
        let of = |network, host| admit(&connections, [0x2001, 0xdb8, 0, network, 0, 0, 0, host].into());
        let flood: Vec<_> = (0..129).map(|host| of(1, host)).collect();
        let admitted: Vec<bool> = flood.iter().map(Option::is_some).collect();
        let but_the_last: Vec<bool> = (0..129).map(|number| number < 128).collect();
        assert_eq!(admitted, but_the_last);
        assert!(of(2, 1).is_some());
    }
}

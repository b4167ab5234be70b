//! TCP connections: listeners of servers, and how clients reach them.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, SockRef, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Connections the kernel holds until they are accepted.
const BACKLOG: i32 = 1024;
/// Pause after the process had no descriptor left for a new connection.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Longest attempt to connect to one of the addresses of a name.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(3);

/// Bytes of a connection in both directions, with or without TLS.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Listens on an address. `[::]` is every address of the host, IPv4 included, also on a kernel without IPv6 (`ipv6.disable=1`).
///
/// # Errors
/// The address cannot be used.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match listen_on(address) {
        Err(_) if address.is_ipv6() && address.ip().is_unspecified() => {
            listen_on(SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port())))
        }
        result => result,
    }
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    TcpListener::from_std(socket.into())
}

/// Accepts connections and runs what `serve` makes of each as one of `tasks`; what it makes nothing of is closed. While there are as
/// many tasks as `max_tasks` says, connections wait in the queue of the kernel. A task that panics ends only its connection.
///
/// It can be cancelled without losing a connection; the tasks go on.
pub async fn accept_all<T: Future<Output = ()> + Send + 'static>(
    listener: &TcpListener,
    tasks: &mut JoinSet<()>,
    max_tasks: impl Fn() -> usize,
    mut serve: impl FnMut(TcpStream, SocketAddr) -> Option<T>,
) -> Infallible {
    loop {
        tokio::select! {
            (stream, source) = accept(listener), if tasks.len() < max_tasks().max(1) => {
                if let Some(task) = serve(stream, source) {
                    tasks.spawn(task);
                }
            },
            Some(ended) = tasks.join_next() => if let Err(error) = ended {
                tracing::error!(%error, "a connection's task failed");
            },
        }
    }
}

/// The result of a TLS handshake that takes no longer than `limit`.
///
/// # Errors
/// Errors of the handshake; `TimedOut` after the limit.
pub async fn handshake<T>(limit: Duration, handshake: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let timed_out = |_| io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake timed out");
    timeout(limit, handshake).await.map_err(timed_out)?
}

/// The next connection and where it comes from. It can be cancelled without losing one.
async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) => {
                let address = listener.local_addr().ok();
                tracing::warn!(?address, %error, "cannot accept connections");
                sleep(ACCEPT_RETRY_INTERVAL).await;
            }
        }
    }
}

/// Connects to the first of these addresses that answers within 3 s. Sockets get the firewall `mark` (0: none), then what
/// `configure` sets.
///
/// # Errors
/// None of them answers: the failure of the last one. There is no address: `NotFound`.
pub async fn dial(
    addresses: impl IntoIterator<Item = SocketAddr>,
    mark: u32,
    configure: impl Fn(SockRef<'_>) -> io::Result<()>,
) -> io::Result<TcpStream> {
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        let connected = async {
            let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
            if mark != 0 {
                SockRef::from(&socket).set_mark(mark)?;
            }
            socket.set_nodelay(true)?;
            configure(SockRef::from(&socket))?;
            socket.connect(address).await
        };
        match timeout(ADDRESS_TIMEOUT, connected).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => failure = error,
            Err(_) => failure = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_address_that_answers_is_used() {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let closed = listen("127.0.0.1:0".parse().unwrap()).unwrap().local_addr().unwrap();
        let (stream, accepted) =
            tokio::join!(dial([closed, address], 0, |socket| socket.set_keepalive(true)), accept(&listener));
        let stream = stream.unwrap();
        assert_eq!(stream.local_addr().unwrap(), accepted.1);
        assert!(stream.nodelay().unwrap() && SockRef::from(&stream).keepalive().unwrap());
    }

    #[tokio::test]
    async fn connections_beyond_the_most_tasks_wait_and_a_panic_ends_one() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let mut tasks = JoinSet::new();
        let mut number = 0_u8;
        let serve = |mut stream: TcpStream, _| {
            number += 1;
            let number = number;
            (number != 1).then_some(async move {
                assert_ne!(number, 2, "the task of the second connection panics");
                stream.write_all(&[number]).await.unwrap();
                let _ = stream.read_u8().await;
            })
        };
        let clients = async {
            let mut clients = Vec::new();
            for _ in 0..4 {
                clients.push(dial([address], 0, |_| Ok(())).await.unwrap());
            }
            let [closed, panicked, third, fourth] = clients.as_mut_slice() else { unreachable!() };
            assert!(closed.read_u8().await.is_err() && panicked.read_u8().await.is_err());
            assert_eq!(third.read_u8().await.unwrap(), 3);
            assert!(timeout(Duration::from_millis(50), fourth.read_u8()).await.is_err());
            third.shutdown().await.unwrap();
            assert_eq!(fourth.read_u8().await.unwrap(), 4);
        };
        tokio::select! {
            never = accept_all(&listener, &mut tasks, || 1, serve) => match never {},
            () = clients => {}
        }
    }

    #[tokio::test]
    async fn a_handshake_without_an_end_times_out() {
        let endless = handshake::<()>(Duration::from_millis(1), std::future::pending()).await.unwrap_err();
        assert_eq!(endless.kind(), io::ErrorKind::TimedOut);
        let failed = handshake::<()>(Duration::MAX, async { Err(io::ErrorKind::InvalidData.into()) }).await;
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[tokio::test]
    async fn why_no_address_answers_is_said() {
        let closed = listen("127.0.0.1:0".parse().unwrap()).unwrap().local_addr().unwrap();
        let refused = dial([closed], 0, |_| Ok(())).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        let none = dial([], 0, |_| Ok(())).await.unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::NotFound);
    }

    #[tokio::test]
    async fn every_address_is_that_of_ipv4_too() {
        let listener = listen("[::]:0".parse().unwrap()).unwrap();
        let port = listener.local_addr().unwrap().port();
        dial([SocketAddr::from((Ipv4Addr::LOCALHOST, port))], 0, |_| Ok(())).await.unwrap();
    }
}

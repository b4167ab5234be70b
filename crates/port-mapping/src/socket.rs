//! Sockets that reach the gateway of a [`Request`], and an exchange of datagrams.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::ops::ControlFlow;
use std::time::Duration;

use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tokio::net::{TcpSocket, TcpStream, UdpSocket};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::Request;

/// Times at which a request is sent, from the beginning on, and the longest time that its answer is awaited.
const SENT_AT: [Duration; 3] = [Duration::ZERO, Duration::from_millis(250), Duration::from_millis(500)];
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// Most datagrams that are read in search of the answer.
const MAX_ANSWERS: usize = 64;
/// Longest message of PCP (RFC 6887, section 7); of SSDP what fits into one packet.
pub(crate) const MAX_DATAGRAM: usize = 1500;
/// Hops of a search (UPnP Device Architecture 1.1, section 1.3.2).
const SEARCH_TTL: u32 = 2;
/// UDP port on which gateways announce that they have restarted (RFC 6886, section 3.2.1; RFC 6887, section 14.1).
const ANNOUNCEMENT_PORT: u16 = 5350;

/// An unconnected UDP socket on the gateway's link.
pub(crate) fn search(request: &Request) -> io::Result<UdpSocket> {
    let socket = open(request, Type::DGRAM, Protocol::UDP)?;
    socket.set_multicast_ttl_v4(SEARCH_TTL)?;
    UdpSocket::from_std(socket.into())
}

/// A UDP socket to a port of the gateway, which receives from nowhere else.
pub(crate) async fn udp(request: &Request, port: u16) -> io::Result<UdpSocket> {
    let socket = UdpSocket::from_std(open(request, Type::DGRAM, Protocol::UDP)?.into())?;
    let to = match request.gateway {
        IpAddr::V4(gateway) => SocketAddr::from((gateway, port)),
        IpAddr::V6(gateway) => SocketAddrV6::new(gateway, port, 0, request.link_index).into(),
    };
    socket.connect(to).await?;
    Ok(socket)
}

/// A connection to a server on the gateway's link.
pub(crate) async fn tcp(request: &Request, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = open(request, Type::STREAM, Protocol::TCP)?;
    TcpSocket::from_std_stream(socket.into()).connect(to).await
}

fn open(request: &Request, kind: Type, protocol: Protocol) -> io::Result<Socket> {
    let (domain, any) = match request.gateway {
        IpAddr::V4(_) => (Domain::IPV4, IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        IpAddr::V6(_) => (Domain::IPV6, IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
    };
    let socket = Socket::new(domain, kind, Some(protocol))?;
    socket.set_nonblocking(true)?;
    socket.bind_device(Some(request.link.as_bytes()))?;
    if request.mark != 0 {
        socket.set_mark(request.mark)?;
    }
    socket.bind(&SockAddr::from(SocketAddr::new(request.source.unwrap_or(any), 0)))?;
    Ok(socket)
}

/// Receives what gateways announce. Other programs may listen there too.
pub(crate) fn announcements(request: &Request) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_nonblocking(true)?;
    socket.set_reuse_address(true)?;
    socket.bind_device(Some(request.link.as_bytes()))?;
    socket.bind(&SockAddr::from(SocketAddr::from((Ipv4Addr::UNSPECIFIED, ANNOUNCEMENT_PORT))))?;
    UdpSocket::from_std(socket.into())
}

/// Sends `message` until `read` takes an answer; `None` if there is none in time, or nothing listens.
pub(crate) async fn exchange<T>(
    socket: &UdpSocket,
    message: &[u8],
    mut read: impl FnMut(&[u8]) -> ControlFlow<T>,
) -> Option<T> {
    let began = Instant::now();
    let send = async {
        for after in SENT_AT {
            sleep_until(began + after).await;
            // What a full queue or a missing route drops is sent again.
            drop(socket.send(message).await);
        }
        std::future::pending::<()>().await;
    };
    let receive = async {
        let mut buffer = [0; MAX_DATAGRAM];
        for _ in 0..MAX_ANSWERS {
            // An ICMP error: nothing listens there.
            let length = socket.recv(&mut buffer).await.ok()?;
            if let ControlFlow::Break(answer) = read(buffer.get(..length).unwrap_or_default()) {
                return Some(answer);
            }
        }
        None
    };
    tokio::select! {
        () = send => None,
        answer = timeout_at(began + ANSWER_WITHIN, receive) => answer.ok().flatten(),
    }
}

//! The UDP ports of a relay: STUN.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_address::canonical;
use fairlead_wire::relay::StunServer;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;

use crate::core::{StunCounters, StunResponder};

/// The longest datagram that is read; a longer one is no request.
const MAX_REQUEST: usize = 2048;
/// Pause after a read that failed.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Two ports that answer STUN requests.
#[derive(Debug)]
pub(super) struct StunPorts {
    socket: UdpSocket,
    other: UdpSocket,
    ports: (u16, u16),
    responder: Mutex<StunResponder>,
}

impl StunPorts {
    /// Binds the ports at `address` and the number after it; both are free ones if `address` has none.
    ///
    /// # Errors
    /// The address that cannot be used, and why.
    pub(super) fn bind(address: SocketAddr, secret: [u8; 32]) -> Result<Self, (SocketAddr, io::Error)> {
        let next = if address.port() == 0 { Some(0) } else { address.port().checked_add(1) };
        let next = next.ok_or_else(|| (address, io::Error::other("the port after it is needed, too")))?;
        let other = SocketAddr::new(address.ip(), next);
        let bound = |address| {
            let socket = bind(address).map_err(|error| (address, error))?;
            let port = socket.local_addr().map_err(|error| (address, error))?.port();
            Ok((socket, port))
        };
        let (socket, port) = bound(address)?;
        let (other, other_port) = bound(other)?;
        let responder = Mutex::new(StunResponder::new(secret));
        Ok(Self { socket, other, ports: (port, other_port), responder })
    }

    /// Adds a user, and returns the ports and credentials that the client has to know.
    pub(super) fn add_user(&self, relay_ports: (u16, u16)) -> StunServer {
        self.responder().add_user(self.ports, relay_ports)
    }

    pub(super) fn counters(&self) -> StunCounters {
        self.responder().counters()
    }

    /// Answers requests; never returns. Nothing is read from the second port: who sends there wants no test.
    pub(super) async fn serve(&self) {
        let mut buffer = [0; MAX_REQUEST];
        loop {
            let (length, source) = match self.socket.recv_from(&mut buffer).await {
                Ok(received) => received,
                // An ICMP error of an earlier answer.
                Err(error) => {
                    tracing::trace!(%error, "cannot read a STUN request");
                    tokio::time::sleep(RETRY_INTERVAL).await;
                    continue;
                }
            };
            let request = buffer.get(..length).unwrap_or_default();
            let answer = self.responder().handle_datagram(Instant::now(), canonical(source), request);
            let Ok(answer) = answer else { continue };
            let socket = if answer.from_other_port { &self.other } else { &self.socket };
            // What the kernel has no room for is lost, as on the way.
            drop(socket.try_send_to(&answer.payload, source));
        }
    }

    fn responder(&self) -> MutexGuard<'_, StunResponder> {
        self.responder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// On a kernel without IPv6 (`ipv6.disable=1`), "every address" is every IPv4 address.
pub(super) fn bind(address: SocketAddr) -> io::Result<UdpSocket> {
    match bind_to(address) {
        Err(_) if address.is_ipv6() && address.ip().is_unspecified() => {
            bind_to(SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port())))
        }
        result => result,
    }
}

fn bind_to(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&address.into())?;
    socket.set_nonblocking(true)?;
    UdpSocket::from_std(socket.into())
}

//! UDP ports beside that of a WireGuard which is not this process's: a birthday attempt opens many, and the one that a peer
//! reaches stays reserved, while the kernel is told to use it for WireGuard's packets.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use crate::extra_sockets::{ExtraSockets, ReadySocket};
use crate::path_socket::PathDatagram;
use crate::udp::{MAX_DATAGRAM, Received, Receiver};

/// The ports, IPv4 only: there is no such NAT for IPv6. Its descriptor is readable while datagrams wait.
pub struct ReservedPorts {
    sockets: ExtraSockets,
    receiver: Mutex<Receiver>,
}

impl ReservedPorts {
    /// None are open.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self { sockets: ExtraSockets::new()?, receiver: Mutex::new(Receiver::new(MAX_DATAGRAM)) })
    }

    /// Opens the ports of an attempt, numbered from zero, at most 256; those of the last attempt are closed. The kernel
    /// chooses them. All that is sent carries `mark`.
    ///
    /// # Errors
    /// The process has no descriptors or ports left.
    pub fn open(&self, count: u16, mark: u32) -> io::Result<()> {
        self.sockets.open(count, mark)
    }

    /// Sends from a port of the attempt.
    ///
    /// # Errors
    /// `NotConnected` if it is not open; the kernel's error otherwise.
    pub fn send(&self, number: u16, remote: SocketAddr, payload: &[u8]) -> io::Result<()> {
        self.sockets.send(number, remote, payload)
    }

    /// The next datagram that a port of the attempt has received.
    pub fn try_receive(&self) -> Option<PathDatagram> {
        let mut receiver = self.receiver.lock().unwrap_or_else(PoisonError::into_inner);
        for ReadySocket { socket, number, .. } in self.sockets.ready() {
            if let Ok(Some(Received { path, bytes, .. })) = receiver.receive(socket.as_fd())
                && number.is_some()
            {
                return Some(PathDatagram {
                    local: path.local,
                    remote: path.remote,
                    socket: number,
                    payload: bytes.to_vec(),
                });
            }
        }
        None
    }

    /// Reserves a port of the attempt for an endpoint, instead of any other one, and returns it.
    ///
    /// # Errors
    /// It is not open, or too many are reserved.
    pub fn keep(&self, number: u16, remote: SocketAddr) -> io::Result<u16> {
        self.sockets.keep(number, remote)?;
        let port = self.sockets.kept(&remote).and_then(|socket| socket.local_addr().ok()?.as_socket());
        port.map(|address| address.port()).ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
    }

    /// Reserves a port that an earlier process had reserved for an endpoint.
    ///
    /// # Errors
    /// Another program has it, or too many are reserved.
    pub fn reserve(&self, port: u16, remote: SocketAddr, mark: u32) -> io::Result<()> {
        self.sockets.reserve(port, remote, mark)?;
        self.silence(remote);
        Ok(())
    }

    /// Nothing is received any more at what is reserved for an endpoint: the kernel leads its datagrams elsewhere, and what others
    /// send is of no use.
    pub fn silence(&self, remote: SocketAddr) {
        if let Some(socket) = self.sockets.kept(&remote) {
            // Without the filter, what comes in is read and dropped.
            let _ = socket.attach_filter(&[crate::raw_port::reject()]);
        }
    }

    /// The number that the port for an endpoint has in the attempt; `None` once that has ended.
    pub fn number_of(&self, remote: SocketAddr) -> Option<u16> {
        self.sockets.number_of(remote)
    }

    /// Closes what is reserved for an endpoint.
    pub fn leave(&self, remote: SocketAddr) {
        self.sockets.leave(remote);
    }

    /// Ends the attempt: closes its ports but those that are reserved.
    pub fn close(&self) {
        self.sockets.close();
    }

    /// Closes all.
    pub fn close_all(&self) {
        self.sockets.close_all();
    }
}

impl AsFd for ReservedPorts {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.sockets.descriptor()
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn a_port_that_is_kept_stays_reserved_and_receives_nothing_more() {
        let ports = ReservedPorts::new().unwrap();
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        let remote = peer.local_addr().unwrap();
        ports.open(4, 0).unwrap();
        ports.send(2, remote, b"a request").unwrap();
        let (_, from) = peer.recv_from(&mut [0; 16]).unwrap();
        let own = ("127.0.0.1", from.port());
        peer.send_to(b"its answer", own).unwrap();
        let answer = ports.try_receive().unwrap();
        assert_eq!(
            (answer.socket, answer.remote, &answer.payload[..]),
            (Some(2), remote, &b"its answer"[..])
        );
        assert_eq!((ports.keep(2, remote).unwrap(), ports.number_of(remote)), (from.port(), Some(2)));
        ports.silence(remote);
        ports.close();
        assert_eq!(ports.number_of(remote), None);
        peer.send_to(b"more", own).unwrap();
        assert!(ports.sockets.ready().is_empty() && ports.try_receive().is_none());
        let taken = || UdpSocket::bind(("0.0.0.0", from.port()));
        assert!(taken().is_err(), "another program could take it");
        ports.leave(remote);
        drop(taken().unwrap());

        ports.reserve(from.port(), remote, 0).unwrap();
        assert!(taken().is_err() && ports.reserve(from.port(), "192.0.2.1:7".parse().unwrap(), 0).is_err());
        ports.close_all();
        drop(taken().unwrap());
    }
}

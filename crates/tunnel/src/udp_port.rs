//! A UDP port of both address families, for what is no part of the tunnel.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use crate::path_socket::PathDatagram;
use crate::udp::{MAX_DATAGRAM, Path, Received, Receiver, Sockets};

/// The two sockets of one UDP port. Its descriptor is readable while datagrams wait.
pub struct UdpPort {
    sockets: Sockets,
    receiver: Mutex<Receiver>,
    readable: Epoll,
}

impl UdpPort {
    /// Opens `port` in both families, IPv6 only where the kernel has it. Port zero takes any free one. All that is sent
    /// carries `mark`.
    ///
    /// # Errors
    /// The port is in use, marks are not allowed, or the process has no descriptor left.
    pub fn open(port: u16, mark: u32) -> io::Result<Self> {
        let sockets = Sockets::open(port, mark).map_err(io::Error::other)?;
        let readable = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for descriptor in sockets.descriptors() {
            readable.add(descriptor, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        }
        Ok(Self { sockets, receiver: Mutex::new(Receiver::new(MAX_DATAGRAM)), readable })
    }

    /// The number of the port.
    pub fn port(&self) -> u16 {
        self.sockets.port()
    }

    /// Sends without waiting. The kernel chooses the source address if `local` is `None`.
    ///
    /// # Errors
    /// `WouldBlock` while the socket is full; the kernel's error otherwise.
    pub fn send(&self, local: Option<IpAddr>, remote: SocketAddr, payload: &[u8]) -> io::Result<()> {
        self.sockets.send(&Path { local, ..Path::to(remote) }, payload)
    }

    /// As [`Self::send`], with a checksum that the kernel computes before the packet passes any hook of nftables: hooks
    /// that change the packet have to repair it, as in a packet from another host.
    ///
    /// # Errors
    /// The same as from [`Self::send`].
    pub fn send_with_checksum(&self, remote: SocketAddr, payload: &[u8]) -> io::Result<()> {
        self.sockets.send_with_checksum(&Path::to(remote), payload)
    }

    /// The next datagram, if one waits.
    pub fn try_receive(&self) -> Option<PathDatagram> {
        let mut receiver = self.receiver.lock().unwrap_or_else(PoisonError::into_inner);
        for descriptor in self.sockets.descriptors() {
            // An error is that of a datagram sent earlier (ICMP), and reading it removes it.
            while let Some(received) = not_blocking(receiver.receive(descriptor)) {
                if let Ok(Some(Received { path, bytes, .. })) = received {
                    let Path { local, remote } = path;
                    return Some(PathDatagram { local, remote, socket: None, payload: bytes.to_vec() });
                }
            }
        }
        None
    }
}

impl AsFd for UdpPort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.0.as_fd()
    }
}

/// `None` if nothing waits.
fn not_blocking<T>(received: io::Result<T>) -> Option<io::Result<T>> {
    let is_empty = matches!(&received, Err(error) if error.kind() == io::ErrorKind::WouldBlock);
    (!is_empty).then_some(received)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use testbed_netns::in_namespace;

    use super::*;

    fn is_readable(port: &UdpPort, timeout: PollTimeout) -> bool {
        poll(&mut [PollFd::new(port.as_fd(), PollFlags::POLLIN)], timeout).unwrap() == 1
    }

    #[test]
    fn both_families_are_received_and_make_the_descriptor_readable() {
        in_namespace(|| {
            let port = UdpPort::open(0, 0).unwrap();
            assert!(port.try_receive().is_none() && !is_readable(&port, PollTimeout::ZERO));
            for own in ["127.0.0.1", "::1"] {
                let own: IpAddr = own.parse().unwrap();
                let other = UdpSocket::bind((own, 0)).unwrap();
                other.send_to(b"question", (own, port.port())).unwrap();
                assert!(is_readable(&port, PollTimeout::from(10_000_u16)));
                let question = port.try_receive().unwrap();
                assert_eq!((question.local, question.remote), (Some(own), other.local_addr().unwrap()));
                assert!(port.try_receive().is_none() && !is_readable(&port, PollTimeout::ZERO));
                let mut answer = [0; 16];
                for send in 0..2 {
                    match send {
                        0 => port.send(Some(own), question.remote, b"answer").unwrap(),
                        _ => port.send_with_checksum(question.remote, b"answer").unwrap(),
                    }
                    let (length, from) = other.recv_from(&mut answer).unwrap();
                    assert_eq!((&answer[..length], from), (&b"answer"[..], (own, port.port()).into()));
                }
            }
        });
    }
}

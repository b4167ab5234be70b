//! ICMP messages of hosts and routers about datagrams that this host has sent from a UDP port and that were not delivered.
//!
//! Raw sockets beside the port, and not the error queue of its own sockets (`IP_RECVERR`): with it, each message makes the next
//! sending or receiving on the socket fail, and the kernel's WireGuard has no socket that another program could read. Anyone can forge
//! such a message who knows both ports; it is a hint, no more.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use nix::libc;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use crate::raw_port::{accept, instruction, reject};
use crate::udp::Receiver;

/// "Destination unreachable" (RFC 792, RFC 4443). That a packet is too big is something else, and in IPv4 the code 4 of the former.
const UNREACHABLE: u32 = 3;
const UNREACHABLE_V6: u32 = 1;
const FRAGMENTATION_NEEDED: u8 = 4;
/// The header of these messages, which the packet that was not delivered follows.
const HEADER: usize = 8;
/// Bytes of the IPv4 header without options, which a UDP socket sends only if it was told to, and of the IPv6 header.
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;
const PROTOCOL_UDP: u8 = 17;
/// Messages that are read in a row where none says anything: anyone may send such.
const MAX_MESSAGES: usize = 64;
/// Bytes that are read of a message: more than is needed.
const LONGEST: usize = 256;

/// Reads the messages of one UDP port. Its descriptor is readable while any waits.
pub struct IcmpErrors {
    port: u16,
    v4: Socket,
    v6: Option<Socket>,
    receiver: Mutex<Receiver>,
    readable: Epoll,
}

impl IcmpErrors {
    /// Opens raw sockets in the namespace of the calling thread, IPv6 only where the kernel has it, for what was sent from `port`.
    ///
    /// # Errors
    /// Raw sockets are not allowed, or the process has no descriptor left.
    pub fn open(port: u16) -> io::Result<Self> {
        let v4 = open(Domain::IPV4, Protocol::ICMPV4, port)?;
        let v6 = match open(Domain::IPV6, Protocol::ICMPV6, port) {
            Ok(socket) => Some(socket),
            Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => None,
            Err(error) => return Err(error),
        };
        let readable = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for socket in std::iter::once(&v4).chain(&v6) {
            readable.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        }
        Ok(Self { port, v4, v6, receiver: Mutex::new(Receiver::new(LONGEST)), readable })
    }

    /// The next destination that a message says a datagram did not reach; `None` if no message waits, or after many that say nothing: more
    /// of those may wait.
    pub fn try_receive(&self) -> Option<SocketAddr> {
        let mut receiver = self.receiver.lock().unwrap_or_else(PoisonError::into_inner);
        for socket in std::iter::once(&self.v4).chain(&self.v6) {
            for _ in 0..MAX_MESSAGES {
                match receiver.receive_start(socket.as_fd()) {
                    Ok((Some(from), packet)) => match parse(from.is_ipv4(), self.port, packet) {
                        Some(remote) => return Some(remote),
                        None => continue,
                    },
                    Ok((None, _)) => continue,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(_) => break,
                }
            }
        }
        None
    }
}

impl AsFd for IcmpErrors {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.0.as_fd()
    }
}

fn open(domain: Domain, protocol: Protocol, port: u16) -> io::Result<Socket> {
    let socket = Socket::new(domain, Type::RAW, Some(protocol))?;
    socket.set_nonblocking(true)?;
    socket.attach_filter(&filter(domain, port))?;
    // What came before the filter was there.
    while socket.recv(&mut []).is_ok() {}
    Ok(socket)
}

/// The filter (classic BPF): of thousands of messages a second for other programs none wakes this one. It is given IPv4 packets from their
/// header on, and of IPv6 packets what follows their headers.
fn filter(domain: Domain, port: u16) -> Vec<SockFilter> {
    let statement = |code: u32, k: u32| instruction(code, 0, 0, k);
    let (kind, inner, header) = match domain {
        // X is the length of the IPv4 header, or zero.
        Domain::IPV4 => (UNREACHABLE, IPV4_HEADER, libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH),
        _ => (UNREACHABLE_V6, IPV6_HEADER, libc::BPF_LDX | libc::BPF_W | libc::BPF_IMM),
    };
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let source_port = u32::try_from(HEADER.saturating_add(inner)).unwrap_or_default();
    vec![
        statement(header, 0),
        statement(libc::BPF_LD | libc::BPF_B | libc::BPF_IND, 0),
        instruction(equal, 0, 3, kind),
        statement(libc::BPF_LD | libc::BPF_H | libc::BPF_IND, source_port),
        instruction(equal, 0, 1, u32::from(port)),
        accept(),
        reject(),
    ]
}

/// Destination of the datagram from `port` that a message is about. A raw socket gives a packet with its IPv4 header, or what follows the
/// headers of IPv6.
fn parse(is_ipv4: bool, port: u16, packet: &[u8]) -> Option<SocketAddr> {
    let message =
        if is_ipv4 { packet.get(usize::from(packet.first()? & 0xf).checked_mul(4)?..)? } else { packet };
    let ([kind, code, ..], inner) = message.split_first_chunk::<HEADER>()?;
    let (ip, protocol, udp): (IpAddr, u8, &[u8]) = if is_ipv4 {
        let (header, udp) = inner.split_first_chunk::<IPV4_HEADER>()?;
        let is_known = u32::from(*kind) == UNREACHABLE && *code != FRAGMENTATION_NEEDED && header[0] == 0x45;
        let [.., a, b, c, d] = *header;
        (Ipv4Addr::from([a, b, c, d]).into(), is_known.then_some(header[9])?, udp)
    } else {
        let (header, udp) = inner.split_first_chunk::<IPV6_HEADER>()?;
        let is_known = u32::from(*kind) == UNREACHABLE_V6 && header[0] >> 4 == 6;
        let destination: [u8; 16] = *header.last_chunk()?;
        (Ipv6Addr::from(destination).into(), is_known.then_some(header[6])?, udp)
    };
    let [source_high, source_low, high, low] = *udp.first_chunk()?;
    let is_of_port = protocol == PROTOCOL_UDP && u16::from_be_bytes([source_high, source_low]) == port;
    is_of_port.then(|| SocketAddr::new(ip, u16::from_be_bytes([high, low])))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use testbed_netns::{in_namespace, sh};

    use super::*;
    use crate::UdpPort;

    fn next(errors: &IcmpErrors) -> SocketAddr {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(remote) = errors.try_receive() {
                return remote;
            }
            assert!(Instant::now() < deadline, "nothing is received");
            poll(&mut [PollFd::new(errors.as_fd(), PollFlags::POLLIN)], PollTimeout::from(1000_u16)).unwrap();
        }
    }

    /// Real ones: the kernel refuses what goes to a port without a socket, and a firewall what it likes.
    #[test]
    fn what_was_sent_from_the_port_and_refused_is_named_and_its_sockets_go_on() {
        in_namespace(|| {
            let [port, other] = [UdpPort::open(0, 0).unwrap(), UdpPort::open(0, 0).unwrap()];
            let errors = IcmpErrors::open(port.port()).unwrap();
            sh("nft add table inet t; nft add chain inet t c '{ type filter hook output priority 0; }'; \
                nft add rule inet t c udp dport 7 reject with icmpx admin-prohibited");
            for own in ["127.0.0.1", "::1"] {
                let own: IpAddr = own.parse().unwrap();
                for closed in [1, 9] {
                    let closed = SocketAddr::new(own, closed);
                    other.send(None, closed, b"of another port").unwrap();
                    port.send(None, closed, b"refused").unwrap();
                    assert_eq!(next(&errors), closed);
                }
                // A firewall of this host: the sender hears of it either way.
                let _ = port.send(None, SocketAddr::new(own, 7), b"refused");
                assert_eq!(next(&errors), SocketAddr::new(own, 7));
                assert_eq!(errors.try_receive(), None);
                // Nothing of this fails on the port itself.
                for _ in 0..2 {
                    port.send(None, SocketAddr::new(own, other.port()), b"hello").unwrap();
                }
                other.send(None, SocketAddr::new(own, port.port()), b"hello").unwrap();
                let deadline = Instant::now() + Duration::from_secs(10);
                while port.try_receive().is_none() {
                    assert!(Instant::now() < deadline);
                }
            }
        });
    }

    const PORT: u16 = 51820;

    fn message(kind: u8, code: u8, source: u16) -> Vec<u8> {
        let mut inner = [0; IPV4_HEADER];
        (inner[0], inner[9]) = (0x45, PROTOCOL_UDP);
        inner[16..].copy_from_slice(&[192, 0, 2, 1]);
        let ports = [source.to_be_bytes(), 7_u16.to_be_bytes()].concat();
        [&[0x45][..], &[0; 19], &[kind, code, 0, 0, 0, 0, 0, 0], &inner, &ports, &[0; 4]].concat()
    }

    #[test]
    fn only_what_was_not_delivered_counts() {
        let parse = |bytes: &[u8]| super::parse(true, PORT, bytes);
        assert_eq!(parse(&message(3, 3, PORT)), Some("192.0.2.1:7".parse().unwrap()));
        for other in [message(3, 4, PORT), message(11, 0, PORT), message(0, 3, PORT), message(3, 3, 7)] {
            assert_eq!(parse(&other), None, "too big, time exceeded, an echo, of another port");
        }
        let whole = message(3, 3, PORT);
        assert!((0..whole.len() - 4).all(|length| parse(&whole[..length]).is_none()));
    }

    proptest::proptest! {
        #[test]
        fn any_message_is_parsed_or_refused(packet: Vec<u8>, is_ipv4: bool) {
            let _ = super::parse(is_ipv4, PORT, &packet);
        }
    }
}

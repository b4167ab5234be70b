//! A UDP port that another socket of this host owns: copies of some of what it receives, and datagrams that leave from it.
//!
//! The kernel copies each UDP datagram of the host for such a socket, and then asks the socket's filter whether it wants it.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use nix::libc;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, SockFilter, Socket, Type};

use crate::path_socket::PathDatagram;
use crate::udp::{self, MAX_DATAGRAM, Path, Received, Receiver};

/// The UDP header (RFC 768).
const HEADER: usize = 8;
const DESTINATION_PORT: u32 = 2;
/// `IPPROTO_UDP`
const PROTOCOL_UDP: u16 = 17;

/// Four bytes of a payload, in network byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Word {
    /// Offset in the payload, in bytes.
    pub offset: u8,
    /// Mask of the bits that count.
    pub mask: u32,
    /// Value of these bits.
    pub value: u32,
}

/// Raw sockets of both address families. Their descriptor is readable while datagrams wait.
pub struct RawPort {
    port: u16,
    v4: Sockets,
    v6: Option<Sockets>,
    receiver: Mutex<Receiver>,
    readable: Epoll,
}

/// Sockets of one address family.
struct Sockets {
    raw: Socket,
    /// Ordinary UDP socket, to ask which source address the kernel chooses.
    asked: Mutex<Socket>,
}

impl RawPort {
    /// Opens them in the namespace of the calling thread, IPv6 only where the kernel has it. They receive datagrams to `port`
    /// whose payload has all words of one of `patterns`, and send from `port` with `mark`.
    ///
    /// # Errors
    /// Raw sockets or marks are not allowed, or the process has no descriptor left.
    pub fn open(port: u16, mark: u32, patterns: &[&[Word]]) -> io::Result<Self> {
        let open = |domain| open(domain, mark, &filter(domain, port, patterns));
        let v4 = open(Domain::IPV4)?;
        setsockopt(&v4.raw, sockopt::Ipv4PacketInfo, &true)?;
        udp::allow_fragments(&v4.raw)?;
        let v6 = match open(Domain::IPV6) {
            Ok(socket) => Some(socket),
            Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => None,
            Err(error) => return Err(error),
        };
        if let Some(v6) = &v6 {
            setsockopt(&v6.raw, sockopt::Ipv6RecvPacketInfo, &true)?;
        }
        let readable = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for sockets in std::iter::once(&v4).chain(&v6) {
            readable.add(&sockets.raw, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        }
        let receiver = Mutex::new(Receiver::new(MAX_DATAGRAM));
        Ok(Self { port, v4, v6, receiver, readable })
    }

    /// Sends without waiting. The kernel chooses the source address if `local` is `None`.
    ///
    /// # Errors
    /// `WouldBlock` while the socket is full; the kernel's error otherwise.
    pub fn send(&self, local: Option<IpAddr>, remote: SocketAddr, payload: &[u8]) -> io::Result<()> {
        let Path { remote, .. } = Path::to(remote);
        let sockets = match remote {
            SocketAddr::V4(_) => &self.v4,
            SocketAddr::V6(_) => self.v6.as_ref().ok_or(Errno::EAFNOSUPPORT)?,
        };
        // The checksum covers it.
        let local = local.map_or_else(|| sockets.source_towards(remote), Ok)?;
        let datagram = datagram(SocketAddr::new(local, self.port), remote, payload).ok_or(Errno::EMSGSIZE)?;
        // The port of a raw socket's address is the protocol.
        let path = Path { remote: SocketAddr::new(remote.ip(), 0), local: Some(local) };
        udp::send_from(&sockets.raw, &path, &datagram)
    }

    /// The next datagram, if one waits. Its checksum was not compared: what a host of the same machine sends need not have one
    /// yet.
    pub fn try_receive(&self) -> Option<PathDatagram> {
        let mut receiver = self.receiver.lock().unwrap_or_else(PoisonError::into_inner);
        for Sockets { raw, .. } in std::iter::once(&self.v4).chain(&self.v6) {
            loop {
                match receiver.receive(raw.as_fd()) {
                    Ok(Some(Received { path, bytes, .. })) => match parse(&path, bytes) {
                        Some(datagram) => return Some(datagram),
                        None => continue,
                    },
                    Ok(None) => continue,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    // That of a datagram sent earlier (ICMP); reading it removes it.
                    Err(_) => continue,
                }
            }
        }
        None
    }
}

impl AsFd for RawPort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.0.as_fd()
    }
}

impl Sockets {
    #[expect(unsafe_code, reason = "socket2 cannot make an address without a family")]
    fn source_towards(&self, remote: SocketAddr) -> io::Result<IpAddr> {
        let storage = SockAddrStorage::zeroed();
        let length = storage.size_of();
        // SAFETY: an address whose bytes are all zero is a valid one of the family AF_UNSPEC, of any length.
        let none = unsafe { SockAddr::new(storage, length) };
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        // Without that it would keep the source address of the last time.
        asked.connect(&none)?;
        asked.connect(&remote.into())?;
        let address = asked.local_addr()?.as_socket();
        Ok(address.ok_or(io::ErrorKind::AddrNotAvailable)?.ip())
    }
}

fn open(domain: Domain, mark: u32, filter: &[SockFilter]) -> io::Result<Sockets> {
    let raw = Socket::new(domain, Type::RAW, Some(Protocol::UDP))?;
    raw.set_nonblocking(true)?;
    raw.attach_filter(filter)?;
    // What came before the filter was there.
    while raw.recv(&mut []).is_ok() {}
    let asked = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
    raw.set_mark(mark)?;
    asked.set_mark(mark)?;
    Ok(Sockets { raw, asked: Mutex::new(asked) })
}

/// The filter (classic BPF). It is given IPv4 packets from their header on, and of IPv6 packets only what follows their headers.
fn filter(domain: Domain, port: u16, patterns: &[&[Word]]) -> Vec<SockFilter> {
    let statement = |code: u32, k: u32| instruction(code, 0, 0, k);
    // X is the length of the IPv4 header, or zero.
    let header = match domain {
        Domain::IPV4 => statement(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH, 0),
        _ => statement(libc::BPF_LDX | libc::BPF_W | libc::BPF_IMM, 0),
    };
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let mut program = vec![
        header,
        statement(libc::BPF_LD | libc::BPF_H | libc::BPF_IND, DESTINATION_PORT),
        instruction(equal, 1, 0, u32::from(port)),
        reject(),
    ];
    for pattern in patterns {
        for (number, word) in pattern.iter().enumerate() {
            // Three instructions for each word, and the one that accepts.
            let left = pattern.len().saturating_sub(number).saturating_sub(1);
            let to_next = u8::try_from(left.saturating_mul(3).saturating_add(1)).unwrap_or(u8::MAX);
            let offset = u32::from(word.offset).saturating_add(HEADER as u32);
            program.extend([
                statement(libc::BPF_LD | libc::BPF_W | libc::BPF_IND, offset),
                statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, word.mask),
                instruction(equal, 0, to_next, word.value),
            ]);
        }
        program.push(accept());
    }
    program.push(reject());
    program
}

/// Takes the whole packet.
pub(crate) fn accept() -> SockFilter {
    instruction(libc::BPF_RET | libc::BPF_K, 0, 0, u32::MAX)
}

/// The whole of a filter that wants nothing.
pub(crate) fn reject() -> SockFilter {
    instruction(libc::BPF_RET | libc::BPF_K, 0, 0, 0)
}

pub(crate) fn instruction(code: u32, if_true: u8, if_false: u8, k: u32) -> SockFilter {
    SockFilter::new(u16::try_from(code).unwrap_or_default(), if_true, if_false, k)
}

/// Reads what a raw socket gives: a packet with its IPv4 header, or what follows the headers of IPv6.
fn parse(path: &Path, packet: &[u8]) -> Option<PathDatagram> {
    let udp = match path.remote {
        SocketAddr::V4(_) => packet.get(usize::from(packet.first()? & 0xf).checked_mul(4)?..)?,
        SocketAddr::V6(_) => packet,
    };
    let header: &[u8; HEADER] = udp.first_chunk()?;
    let [source_high, source_low, _, _, length_high, length_low, _, _] = *header;
    let length = usize::from(u16::from_be_bytes([length_high, length_low]));
    Some(PathDatagram {
        socket: None,
        local: path.local,
        remote: SocketAddr::new(path.remote.ip(), u16::from_be_bytes([source_high, source_low])),
        payload: udp.get(HEADER..length)?.to_vec(),
    })
}

/// A UDP header with its checksum, and the payload; `None` if it is too long.
fn datagram(local: SocketAddr, remote: SocketAddr, payload: &[u8]) -> Option<Vec<u8>> {
    let length = u16::try_from(payload.len().checked_add(HEADER)?).ok()?;
    let from = local.port().to_be_bytes();
    let to = remote.port().to_be_bytes();
    let mut datagram = [&from[..], &to, &length.to_be_bytes(), &[0; 2], payload].concat();
    let pseudo_header = [octets(local.ip()), octets(remote.ip())].concat();
    let sum = [PROTOCOL_UDP, length]
        .into_iter()
        .chain(words(&pseudo_header))
        .chain(words(&datagram))
        .fold(0_u64, |sum, word| sum.saturating_add(word.into()));
    // Zero says that there is none.
    let checksum = match !fold(sum) {
        0 => u16::MAX,
        checksum => checksum,
    };
    datagram.get_mut(6..HEADER)?.copy_from_slice(&checksum.to_be_bytes());
    Some(datagram)
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// Words of 16 bits, the last one filled with zeros (RFC 1071).
fn words(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.chunks(2).map(|pair| {
        let [high, low] = [0, 1].map(|index| pair.get(index).copied().unwrap_or_default());
        u16::from_be_bytes([high, low])
    })
}

/// The sum in one's complement.
fn fold(sum: u64) -> u16 {
    let [high, low] = [sum >> 16, sum & 0xffff];
    match (high, u16::try_from(low)) {
        (0, Ok(low)) => low,
        _ => fold(high.saturating_add(low)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use testbed_netns::in_namespace;

    use super::*;
    use crate::UdpPort;

    const MARK: u32 = 0x20;
    const HELLO: &[Word] = &[Word { offset: 0, mask: u32::MAX, value: u32::from_be_bytes(*b"Helo") }];
    const LATE: &[Word] = &[
        Word { offset: 0, mask: 0xff00_ff00, value: 0x4100_4200 },
        Word { offset: 4, mask: u32::MAX, value: u32::from_be_bytes(*b"late") },
    ];

    fn next(mut receive: impl FnMut() -> Option<PathDatagram>) -> PathDatagram {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(datagram) = receive() {
                return datagram;
            }
            assert!(Instant::now() < deadline, "nothing is received");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn it_sends_from_the_port_of_another_socket_and_receives_what_it_wants() {
        in_namespace(|| {
            let owner = UdpPort::open(0, 0).unwrap();
            let raw = RawPort::open(owner.port(), MARK, &[HELLO, LATE]).unwrap();
            let peer = UdpPort::open(0, 0).unwrap();
            for own in ["127.0.0.1", "::1"] {
                let own: IpAddr = own.parse().unwrap();
                let [to_owner, to_peer] = [owner.port(), peer.port()].map(|port| SocketAddr::new(own, port));
                for payload in [&b""[..], b"odd", b"even", &[0xff; 3001]] {
                    raw.send(None, to_peer, payload).unwrap();
                    let received = next(|| peer.try_receive());
                    assert_eq!((received.remote, &received.payload[..]), (to_owner, payload));
                }
                let wanted = [&b"Helo"[..], b"Helo to you", b"A.B.late", b"AxBylate and more"];
                let others = [&b"Hel"[..], b"hello", b"A.B.", b"A.B.soon", b"B.A.late", b""];
                for payload in others.iter().chain(&wanted) {
                    peer.send(None, to_owner, payload).unwrap();
                    assert_eq!(next(|| owner.try_receive()).payload, *payload, "its owner has all of them");
                }
                // To another port.
                peer.send(None, to_peer, wanted[0]).unwrap();
                assert_eq!(next(|| peer.try_receive()).payload, wanted[0]);
                for payload in wanted {
                    let received = next(|| raw.try_receive());
                    assert_eq!((received.remote, received.local), (to_peer, Some(own)));
                    assert_eq!(received.payload, payload);
                }
                assert_eq!(raw.try_receive(), None);
            }
            let wrong = testbed_netns::sh("awk '/InCsumErrors/ && $2 > 0' /proc/net/snmp6");
            assert_eq!(wrong, "", "wrong checksums");
        });
    }

    #[test]
    fn checksums_are_those_of_rfc_768() {
        let [from, to] = ["192.0.2.1:51820", "192.0.2.2:7"].map(|address| address.parse().unwrap());
        for payload in [&b""[..], b"odd", b"even", &[0xff; 9]] {
            let datagram = datagram(from, to, payload).unwrap();
            let addresses = [octets(from.ip()), octets(to.ip())].concat();
            let length = u16::try_from(datagram.len()).unwrap();
            let all = [PROTOCOL_UDP, length].into_iter().chain(words(&addresses)).chain(words(&datagram));
            assert_eq!(fold(all.map(u64::from).sum()), u16::MAX, "{payload:?}");
        }
        assert!(datagram(from, to, &[0; 65_528]).is_none());
    }

    proptest::proptest! {
        #[test]
        fn any_packet_is_parsed_or_refused(packet: Vec<u8>, is_v4: bool) {
            let remote = if is_v4 { "192.0.2.1:0" } else { "[2001:db8::1]:0" };
            let _ = parse(&Path::to(remote.parse().unwrap()), &packet);
        }
    }
}

//! The two UDP sockets of a device: IPv4 and IPv6 on one port.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg, setsockopt, sockopt,
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::Error;

/// Enough for a burst of a few thousand datagrams; the memory is the kernel's, and only while they wait.
const SOCKET_BUFFER: usize = 4 << 20;
/// Attempts to find a port that is free in both families, for port zero.
const MAX_PORT_ATTEMPTS: usize = 16;
/// The longest IP packet.
pub(crate) const MAX_DATAGRAM: usize = 65_535;

/// Where a datagram goes, or came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Path {
    pub(crate) remote: SocketAddr,
    /// Our address on this path, so that an answer leaves from the address that was asked.
    pub(crate) local: Option<IpAddr>,
}

impl Path {
    /// A path to a configured endpoint: the kernel chooses our address.
    pub(crate) fn to(endpoint: SocketAddr) -> Self {
        Self { remote: canonical(endpoint), local: None }
    }
}

/// An IPv4-mapped address belongs to the IPv4 socket.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(v4) => SocketAddr::new(v4.into(), address.port()),
        IpAddr::V6(_) => address,
    }
}

/// The sockets of one port.
pub(crate) struct Sockets {
    v4: Socket,
    v6: Option<Socket>,
    port: u16,
}

impl Sockets {
    /// Opens `port` for both families; IPv6 is left out if the kernel has none. Port zero takes any free port.
    pub(crate) fn open(port: u16, mark: u32) -> Result<Self, Error> {
        let mut attempt = 1;
        loop {
            match Self::open_once(port, mark) {
                Err(Error::Listen { source, .. })
                    if port == 0
                        && source.kind() == io::ErrorKind::AddrInUse
                        && attempt < MAX_PORT_ATTEMPTS =>
                {
                    attempt += 1;
                }
                result => return result,
            }
        }
    }

    /// The sockets of another process, IPv4 first, as it opened them.
    pub(crate) fn adopt(descriptors: Vec<OwnedFd>, port: u16, mark: u32) -> Result<Self, Error> {
        let mut sockets = descriptors.into_iter().map(Socket::from);
        let missing = || Error::Listen { port, family: "IPv4", source: io::ErrorKind::NotFound.into() };
        let sockets = Self { v4: sockets.next().ok_or_else(missing)?, v6: sockets.next(), port };
        sockets.set_mark(mark)?;
        Ok(sockets)
    }

    fn open_once(port: u16, mark: u32) -> Result<Self, Error> {
        let refused = |family| move |source| Error::Listen { port, family, source };
        let v4 = open_v4(port).map_err(refused("IPv4"))?;
        let port = local_port(&v4).map_err(refused("IPv4"))?;
        let v6 = match open_v6(port) {
            Ok(socket) => Some(socket),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL)) => {
                None
            }
            Err(error) => return Err(refused("IPv6")(error)),
        };
        let sockets = Self { v4, v6, port };
        if mark != 0 {
            sockets.set_mark(mark)?;
        }
        Ok(sockets)
    }

    /// The port both sockets are bound to.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// `SO_MARK` of everything sent from now on.
    pub(crate) fn set_mark(&self, mark: u32) -> Result<(), Error> {
        self.each()
            .try_for_each(|socket| socket.set_mark(mark))
            .map_err(|source| Error::Mark { mark, source })
    }

    /// `SO_MARK` of what is sent; zero if the kernel does not tell.
    pub(crate) fn mark(&self) -> u32 {
        self.v4.mark().unwrap_or_default()
    }

    /// The sockets there are, IPv4 first.
    pub(crate) fn each(&self) -> impl Iterator<Item = &Socket> {
        std::iter::once(&self.v4).chain(&self.v6)
    }

    /// Sends one datagram. `WouldBlock` means: try again when the socket is writable.
    pub(crate) fn send(&self, path: &Path, datagram: &[u8]) -> io::Result<()> {
        send_from(self.towards(path)?, path, datagram)
    }

    /// Sends one datagram whose checksum the kernel computes before the packet passes any hook of nftables, as if the
    /// network card could not: of a datagram that is sent in parts it never leaves that to the card.
    pub(crate) fn send_with_checksum(&self, path: &Path, datagram: &[u8]) -> io::Result<()> {
        let socket = self.towards(path)?;
        send_with_flags(socket, path, datagram, MsgFlags::from_bits_retain(libc::MSG_MORE))?;
        send_from(socket, path, &[])
    }

    fn towards(&self, path: &Path) -> io::Result<&Socket> {
        match path.remote {
            SocketAddr::V4(_) => Ok(&self.v4),
            SocketAddr::V6(_) => Ok(self.v6.as_ref().ok_or(Errno::EAFNOSUPPORT)?),
        }
    }
}

fn open_v4(port: u16) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?;
    allow_fragments(&socket)?;
    prepare(&socket)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into())?;
    Ok(socket)
}

/// A socket beside the port, with the kernel's own buffers; the kernel chooses a port for zero.
pub(crate) fn open_extra(port: u16, mark: u32) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    allow_fragments(&socket)?;
    socket.set_nonblocking(true)?;
    if mark != 0 {
        socket.set_mark(mark)?;
    }
    socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into())?;
    Ok(socket)
}

/// Gives a socket the buffers of the port. It works with others too.
pub(crate) fn enlarge(socket: &Socket) {
    let _ = prepare(socket);
}

fn open_v6(port: u16) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV6, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_only_v6(true)?;
    setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)?;
    prepare(&socket)?;
    socket.bind(&SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)).into())?;
    Ok(socket)
}

fn prepare(socket: &Socket) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    // Without CAP_NET_ADMIN over the first user namespace only the system-wide limit can be had.
    if setsockopt(socket, sockopt::RcvBufForce, &SOCKET_BUFFER).is_err() {
        socket.set_recv_buffer_size(SOCKET_BUFFER)?;
    }
    if setsockopt(socket, sockopt::SndBufForce, &SOCKET_BUFFER).is_err() {
        socket.set_send_buffer_size(SOCKET_BUFFER)?;
    }
    Ok(())
}

/// Clears "don't fragment", as the kernel's WireGuard does: the inner MTU is the caller's choice, and a tunnel whose
/// packets vanish on a narrow path without ICMP would be worse than fragments.
#[expect(unsafe_code, reason = "nix has no wrapper for IP_MTU_DISCOVER")]
pub(crate) fn allow_fragments(socket: &Socket) -> io::Result<()> {
    let value: libc::c_int = libc::IP_PMTUDISC_DONT;
    // SAFETY: the descriptor is open for the duration of the call, and the kernel reads exactly the
    // `size_of::<c_int>()` bytes of `value`, which outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_MTU_DISCOVER,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    Errno::result(result)?;
    Ok(())
}

fn local_port(socket: &Socket) -> io::Result<u16> {
    let address = socket.local_addr()?.as_socket();
    address
        .map(|address| address.port())
        .ok_or_else(|| io::Error::other("the socket has no internet address"))
}

/// Sends one datagram without waiting.
pub(crate) fn send_from(socket: &Socket, path: &Path, datagram: &[u8]) -> io::Result<()> {
    send_with_flags(socket, path, datagram, MsgFlags::empty())
}

fn send_with_flags(socket: &Socket, path: &Path, datagram: &[u8], flags: MsgFlags) -> io::Result<()> {
    let buffers = [IoSlice::new(datagram)];
    let remote = SockaddrStorage::from(path.remote);
    let send = |control: &[ControlMessage<'_>]| {
        sendmsg(socket.as_raw_fd(), &buffers, control, flags | MsgFlags::MSG_DONTWAIT, Some(&remote))
    };
    match path.local {
        Some(IpAddr::V4(local)) => {
            let address = libc::in_addr { s_addr: u32::from_ne_bytes(local.octets()) };
            let info = libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: address, ipi_addr: address };
            send(&[ControlMessage::Ipv4PacketInfo(&info)])
        }
        Some(IpAddr::V6(local)) => {
            let info =
                libc::in6_pktinfo { ipi6_addr: libc::in6_addr { s6_addr: local.octets() }, ipi6_ifindex: 0 };
            send(&[ControlMessage::Ipv6PacketInfo(&info)])
        }
        None => send(&[]),
    }?;
    Ok(())
}

/// Receives datagrams; owns the buffers so that the loop allocates nothing.
pub(crate) struct Receiver {
    buffer: Vec<u8>,
    control: Vec<u8>,
}

impl Receiver {
    /// `buffer` bytes is the longest datagram that arrives whole; longer ones are dropped.
    pub(crate) fn new(buffer: usize) -> Self {
        Self { buffer: vec![0; buffer], control: nix::cmsg_space!(libc::in_pktinfo, libc::in6_pktinfo) }
    }

    /// The beginning of the next packet that waits, as long as the buffer at most, and its sender if it has a usable one.
    pub(crate) fn receive_start(
        &mut self,
        socket: BorrowedFd<'_>,
    ) -> io::Result<(Option<SocketAddr>, &[u8])> {
        let (from, length) = {
            let mut buffers = [IoSliceMut::new(&mut self.buffer)];
            let flags = MsgFlags::MSG_DONTWAIT;
            let message = recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut buffers, None, flags)?;
            (message.address.as_ref().and_then(remote_address), message.bytes)
        };
        Ok((from, self.buffer.get(..length).unwrap_or_default()))
    }

    /// The next datagram that waits, with its path; `None` inside for one without a usable sender, or truncated.
    pub(crate) fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<Option<(Path, &[u8])>> {
        let (path, length) = {
            let mut buffers = [IoSliceMut::new(&mut self.buffer)];
            let message = recvmsg::<SockaddrStorage>(
                socket.as_raw_fd(),
                &mut buffers,
                Some(&mut self.control),
                MsgFlags::MSG_DONTWAIT,
            )?;
            let local = message.cmsgs().ok().and_then(|mut all| all.find_map(|info| local_address(&info)));
            let whole = !message.flags.contains(MsgFlags::MSG_TRUNC);
            let remote = message.address.as_ref().and_then(remote_address).filter(|_| whole);
            (remote.map(|remote| Path { remote, local }), message.bytes)
        };
        Ok(path.and_then(|path| Some((path, self.buffer.get(..length)?))))
    }
}

fn local_address(message: &ControlMessageOwned) -> Option<IpAddr> {
    match message {
        ControlMessageOwned::Ipv4PacketInfo(info) => {
            Some(Ipv4Addr::from(info.ipi_spec_dst.s_addr.to_ne_bytes()).into())
        }
        ControlMessageOwned::Ipv6PacketInfo(info) => Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).into()),
        _ => None,
    }
}

fn remote_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| SocketAddr::from(*v4));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| SocketAddr::from(*v6)))
}

impl Sockets {
    /// The descriptors to poll, IPv4 first.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.each().map(|socket| socket.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_port_is_the_same_for_both_families_and_answers_leave_from_where_questions_arrived() {
        let sockets = Sockets::open(0, 0).unwrap();
        assert_ne!(sockets.port(), 0);
        let asker = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        asker.send_to(b"question", ("127.0.0.7", sockets.port())).unwrap();

        let mut receiver = Receiver::new(1500);
        let fd = sockets.descriptors().next().unwrap();
        nix::poll::poll(&mut [nix::poll::PollFd::new(fd, nix::poll::PollFlags::POLLIN)], 10_000_u16).unwrap();
        let (path, datagram) = receiver.receive(fd).unwrap().unwrap();
        assert_eq!(datagram, b"question");
        assert_eq!(path.local, Some("127.0.0.7".parse().unwrap()));
        sockets.send(&path, b"answer").unwrap();

        let mut answer = [0; 16];
        let (length, from) = asker.recv_from(&mut answer).unwrap();
        assert_eq!(&answer[..length], b"answer");
        assert_eq!(from.ip(), path.local.unwrap());
    }

    #[test]
    fn a_port_in_use_is_named() {
        let holder = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        let port = holder.local_addr().unwrap().port();
        let error = Sockets::open(port, 0).err().unwrap();
        assert!(error.to_string().contains(&port.to_string()), "{error}");
    }

    #[test]
    fn mapped_endpoints_use_the_ipv4_socket() {
        assert_eq!(Path::to("[::ffff:192.0.2.1]:5".parse().unwrap()).remote, "192.0.2.1:5".parse().unwrap());
    }
}

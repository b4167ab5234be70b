//! The two UDP sockets of a device: IPv4 and IPv6 on one port.
//!
//! Several datagrams of one length go to the kernel in one system call, and come from it so (`UDP_SEGMENT` and `UDP_GRO` of
//! `include/uapi/linux/udp.h`), where it can: they pass most of its network stack as one packet.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use fairlead_transport::udp_runs;
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg, setsockopt, sockopt,
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::Error;
use crate::ecn::Ecn;

/// Enough for a burst of a few thousand datagrams; the memory is the kernel's, and only while they wait.
const SOCKET_BUFFER: usize = 4 << 20;
/// Attempts to find a port that is free in both families, for port zero.
const MAX_PORT_ATTEMPTS: usize = 16;
/// The longest IP packet.
pub(crate) const MAX_DATAGRAM: usize = 65_535;

/// Path of a datagram, sent or received: remote address and local one.
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
    /// The kernel cuts batches.
    sends_batches: bool,
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
        let v4 = sockets.next().ok_or_else(missing)?;
        let sends_batches = udp_runs::are_cut(&v4);
        let sockets = Self { v4, v6: sockets.next(), port, sends_batches };
        // The other process still sends by them, and has set its mark.
        if mark != 0 {
            sockets.set_mark(mark)?;
        }
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
        let sends_batches = udp_runs::are_cut(&v4);
        let sockets = Self { v4, v6, port, sends_batches };
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

    /// Lets the kernel join datagrams that arrive one after the other, where it can, and tell their ECN fields. [`Receiver::receive`]
    /// must read them all then, and no other process.
    pub(crate) fn join_received(&self) {
        let _ = self.v4.set_recv_tos_v4(true);
        self.v6.iter().for_each(|socket| drop(socket.set_recv_tclass_v6(true)));
        for socket in self.each() {
            // Before Linux 5.0 they come one by one.
            let _ = setsockopt(socket, sockopt::UdpGroSegment, &true);
        }
    }

    /// Sends a batch: all datagrams but the last are `length` bytes long. `WouldBlock` means: try again when the socket is writable;
    /// nothing was sent then, or, where the kernel cannot cut datagrams from a batch, perhaps the first of them.
    pub(crate) fn send_batch(&self, path: &Path, bytes: &[u8], length: usize, ecn: Ecn) -> io::Result<()> {
        let socket = self.towards(path)?;
        let segment = u16::try_from(length).ok().filter(|length| bytes.len() > usize::from(*length));
        if self.sends_batches || segment.is_none() {
            match send_with(socket, path, bytes, segment, ecn) {
                Err(error) if segment.is_some() && udp_runs::go_singly(&error) => {}
                result => return result,
            }
        }
        let mut datagrams = bytes.chunks(length.max(1));
        datagrams.try_for_each(|datagram| send_with(socket, path, datagram, None, ecn))
    }

    /// Sends one datagram whose checksum the kernel computes before the packet passes any hook of nftables, as if the
    /// network card could not: of a datagram that is sent in parts it never leaves that to the card.
    pub(crate) fn send_with_checksum(&self, path: &Path, datagram: &[u8]) -> io::Result<()> {
        let socket = self.towards(path)?;
        send_with_control(socket, path, datagram, MsgFlags::from_bits_retain(libc::MSG_MORE), &[])?;
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
    send_with(socket, path, datagram, None, Ecn::NOT_CAPABLE)
}

/// Sends datagrams without waiting: one, or as many as `segment` bytes make of them.
pub(crate) fn send_with(
    socket: &Socket,
    path: &Path,
    bytes: &[u8],
    segment: Option<u16>,
    ecn: Ecn,
) -> io::Result<()> {
    let traffic_class = ecn.traffic_class();
    let wide = i32::from(traffic_class);
    let mut control: Vec<ControlMessage<'_>> = segment.iter().map(ControlMessage::UdpGsoSegments).collect();
    if ecn != Ecn::NOT_CAPABLE {
        control.push(match path.remote {
            SocketAddr::V4(_) => ControlMessage::Ipv4Tos(&traffic_class),
            SocketAddr::V6(_) => ControlMessage::Ipv6TClass(&wide),
        });
    }
    send_with_control(socket, path, bytes, MsgFlags::empty(), &control)
}

fn send_with_control(
    socket: &Socket,
    path: &Path,
    bytes: &[u8],
    flags: MsgFlags,
    control: &[ControlMessage<'_>],
) -> io::Result<()> {
    let buffers = [IoSlice::new(bytes)];
    let remote = SockaddrStorage::from(path.remote);
    let send = |source: Option<ControlMessage<'_>>| {
        let control: Vec<ControlMessage<'_>> = control.iter().copied().chain(source).collect();
        sendmsg(socket.as_raw_fd(), &buffers, &control, flags | MsgFlags::MSG_DONTWAIT, Some(&remote))
    };
    match path.local {
        Some(IpAddr::V4(local)) => {
            let address = libc::in_addr { s_addr: u32::from_ne_bytes(local.octets()) };
            let info = libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: address, ipi_addr: address };
            send(Some(ControlMessage::Ipv4PacketInfo(&info)))
        }
        Some(IpAddr::V6(local)) => {
            let info =
                libc::in6_pktinfo { ipi6_addr: libc::in6_addr { s6_addr: local.octets() }, ipi6_ifindex: 0 };
            send(Some(ControlMessage::Ipv6PacketInfo(&info)))
        }
        None => send(None),
    }?;
    Ok(())
}

/// Datagrams that one system call received: of one sender, all of one length but the last, which may be shorter.
pub(crate) struct Received<'a> {
    pub(crate) path: Path,
    /// ECN field of the IP headers; the same in all.
    pub(crate) ecn: Ecn,
    /// All datagrams, one behind the other; several only where [`Sockets::join_received`] was called.
    pub(crate) bytes: &'a mut [u8],
    /// The length of each but the last one.
    pub(crate) length: usize,
}

impl<'a> Received<'a> {
    /// Datagrams of which each but the last is `length` bytes long, and of whose IP headers nothing is known.
    pub(crate) fn of(path: Path, length: usize, bytes: &'a mut [u8]) -> Self {
        Self { path, ecn: Ecn::NOT_CAPABLE, bytes, length: length.max(1) }
    }
}

/// Receives datagrams into a buffer that is used again, until [`Self::exchange`] gives it away for another one.
pub(crate) struct Receiver {
    buffer: Vec<u8>,
    control: Vec<u8>,
}

impl Receiver {
    /// `buffer` bytes is the longest datagram that arrives whole; longer ones are dropped.
    pub(crate) fn new(buffer: usize) -> Self {
        Self {
            buffer: vec![0; buffer],
            control: nix::cmsg_space!(libc::in_pktinfo, libc::in6_pktinfo, i32, i32),
        }
    }

    /// Gives away the buffer with what was received last. It goes on with the other one, which gets the same length.
    pub(crate) fn exchange(&mut self, other: &mut Vec<u8>) {
        other.resize(self.buffer.len(), 0);
        std::mem::swap(&mut self.buffer, other);
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

    /// The next datagrams that wait, with their path; `None` inside for one without a usable sender, or truncated.
    pub(crate) fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<Option<Received<'_>>> {
        let (path, ecn, total, length) = {
            let mut buffers = [IoSliceMut::new(&mut self.buffer)];
            let message = recvmsg::<SockaddrStorage>(
                socket.as_raw_fd(),
                &mut buffers,
                Some(&mut self.control),
                MsgFlags::MSG_DONTWAIT,
            )?;
            let mut local = None;
            let mut length = message.bytes;
            let mut ecn = Ecn::NOT_CAPABLE;
            for information in message.cmsgs().into_iter().flatten() {
                match information {
                    ControlMessageOwned::UdpGroSegments(segment) => {
                        length = usize::try_from(segment).ok().filter(|length| *length > 0).unwrap_or(length);
                    }
                    ControlMessageOwned::Ipv4Tos(class) => ecn = Ecn::of(class),
                    ControlMessageOwned::Ipv6TClass(class) => ecn = u8::try_from(class).map_or(ecn, Ecn::of),
                    other => local = local.or(local_address(&other)),
                }
            }
            let whole = !message.flags.contains(MsgFlags::MSG_TRUNC);
            let remote = message.address.as_ref().and_then(remote_address).filter(|_| whole);
            (remote.map(|remote| Path { remote, local }), ecn, message.bytes, length)
        };
        let bytes = self.buffer.get_mut(..total).unwrap_or_default();
        Ok(path.map(|path| Received { path, ecn, bytes, length: length.max(1) }))
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
mod tests;

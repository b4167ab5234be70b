//! A UDP port on the loopback interface through which WireGuard reaches peers by way of a relay.
//!
//! Each peer has an address of 127.64.0.0/10, all on one port. To WireGuard it is an endpoint like any other, the kernel's
//! WireGuard or one inside a process: what it sends there goes to the relay, and what the relay passes on comes from there.
//! Linux has all of 127.0.0.0/8 on the loopback interface, so nothing is configured.

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_keys::PublicKey;
use fairlead_wire::probe::is_probe;
use nix::libc::{in_addr, in_pktinfo};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg, sendmsg, setsockopt, sockopt,
};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::LinkQueue;

/// The first address of the network, and how many peers fit into it.
const NETWORK: Ipv4Addr = Ipv4Addr::new(127, 64, 0, 0);
const ADDRESSES: u32 = 1 << 22;
/// Bytes that wait in each direction.
const BUFFER: usize = 1 << 20;
/// The longest datagram.
const MAX_DATAGRAM: usize = 65_535;
/// The first byte of WireGuard's data messages (WireGuard paper, section 5.4.6).
const MESSAGE_DATA: u8 = 4;
/// Datagrams taken in one go.
const BATCH: usize = 64;

/// The port.
#[derive(Debug)]
pub struct LoopbackPort {
    socket: Socket,
    port: u16,
    wireguard: AtomicU16,
    peers: Mutex<Peers>,
}

/// Duration of [`LoopbackPort::hold`]: until packets of the peer that were on their way have arrived.
pub const HOLD: Duration = Duration::from_millis(500);

#[derive(Debug, Default)]
struct Peers {
    /// End of the time in which data of a peer is dropped.
    held: HashMap<PublicKey, Instant>,
    addresses: HashMap<PublicKey, Ipv4Addr>,
    keys: HashMap<Ipv4Addr, PublicKey>,
    next: u32,
}

impl LoopbackPort {
    /// Opens a port that the kernel chooses. Only programs of this host reach it.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn open() -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
        socket.set_nonblocking(true)?;
        // WireGuard sends as much at once as a connection does. Without CAP_NET_ADMIN the system may allow less.
        if setsockopt(&socket, sockopt::RcvBufForce, &BUFFER).is_err() {
            drop(socket.set_recv_buffer_size(BUFFER));
        }
        drop(socket.set_send_buffer_size(BUFFER));
        setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?;
        // The address cannot be a network. What arrives at other interfaces is not for this socket.
        socket.bind_device(Some(b"lo"))?;
        socket.bind(&SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0).into())?;
        let port = socket.local_addr()?.as_socket().map(|address| address.port());
        let port = port.ok_or_else(|| io::Error::other("the socket has no internet address"))?;
        Ok(Self { socket, port, wireguard: AtomicU16::new(0), peers: Mutex::default() })
    }

    /// Sets the port of WireGuard. Datagrams from other ports are dropped.
    pub fn set_wireguard_port(&self, port: u16) {
        self.wireguard.store(port, Ordering::Relaxed);
    }

    /// The endpoint that stands for a peer by way of the relay: the same as long as the peer is kept. `None` if all are taken.
    pub fn endpoint(&self, peer: &PublicKey) -> Option<SocketAddr> {
        let mut peers = self.peers();
        let address = match peers.addresses.get(peer) {
            Some(address) => *address,
            None => peers.add(*peer)?,
        };
        Some(SocketAddr::new(address.into(), self.port))
    }

    /// Forgets the other peers.
    pub fn retain(&self, is_kept: impl Fn(&PublicKey) -> bool) {
        let mut peers = self.peers();
        peers.addresses.retain(|key, _| is_kept(key));
        peers.keys.retain(|_, key| is_kept(key));
        peers.held.retain(|key, _| is_kept(key));
    }

    /// Drops data of a peer for [`HOLD`]. The kernel's WireGuard sends to where the last packet came from: where both nodes do that, and
    /// packets are on their way all the time, none of them could leave the relay for a direct path.
    pub fn hold(&self, peer: &PublicKey, now: Instant) {
        if let Some(until) = now.checked_add(HOLD) {
            self.peers().held.insert(*peer, until);
        }
    }

    /// Whether an endpoint stands for a peer by way of the relay.
    pub fn is_relayed(&self, endpoint: SocketAddr) -> bool {
        is_relayed(endpoint)
    }

    /// Gives WireGuard a datagram that the relay passed on. Those of unknown peers are dropped, as are those for which the kernel
    /// has no room.
    pub fn deliver(&self, peer: &PublicKey, payload: &[u8]) {
        let Some(source) = self.source(peer, payload) else { return };
        let wireguard = self.wireguard.load(Ordering::Relaxed);
        if wireguard == 0 {
            return;
        }
        if let Err(error) = self.send(source, SocketAddrV4::new(Ipv4Addr::LOCALHOST, wireguard), payload) {
            tracing::trace!(%error, "cannot pass a datagram of the relay to WireGuard");
        }
    }

    /// The address that stands for a peer, unless the datagram is data that is held.
    fn source(&self, peer: &PublicKey, payload: &[u8]) -> Option<Ipv4Addr> {
        let mut peers = self.peers();
        if let Some(until) = peers.held.get(peer) {
            if Instant::now() >= *until {
                peers.held.remove(peer);
            } else if payload.first() == Some(&MESSAGE_DATA) {
                return None;
            }
        }
        peers.addresses.get(peer).copied()
    }

    fn send(&self, source: Ipv4Addr, destination: SocketAddrV4, payload: &[u8]) -> io::Result<()> {
        let address = in_addr { s_addr: u32::from_ne_bytes(source.octets()) };
        let info = in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: address, ipi_addr: address };
        let control = [ControlMessage::Ipv4PacketInfo(&info)];
        let buffers = [IoSlice::new(payload)];
        let flags = MsgFlags::MSG_DONTWAIT;
        sendmsg(self.socket.as_raw_fd(), &buffers, &control, flags, Some(&SockaddrIn::from(destination)))?;
        Ok(())
    }

    /// Takes what WireGuard sends to peers, and queues it for the relay; never returns unless the socket fails.
    ///
    /// # Errors
    /// The socket fails.
    pub async fn forward(&self, queue: &LinkQueue) -> io::Result<()> {
        #[expect(
            deprecated,
            reason = "unsound only for types that do not own or borrow their descriptor; `register` is unsafe"
        )]
        let readable = AsyncFd::with_interest(self.socket.as_fd(), Interest::READABLE)?;
        let mut receiver = Receiver::new();
        loop {
            let mut ready = readable.readable().await?;
            for _ in 0..BATCH {
                match receiver.receive(self.socket.as_fd()) {
                    Ok(received) => self.queue(received, queue),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        ready.clear_ready();
                        break;
                    }
                    // An ICMP error of an earlier datagram, or an interruption.
                    Err(error) => tracing::trace!(%error, "cannot read from the loopback port"),
                }
            }
            tokio::task::yield_now().await;
        }
    }

    fn queue(&self, Received { from, to, payload }: Received<'_>, queue: &LinkQueue) {
        let is_wireguard = from.is_some_and(|from| from.port() == self.wireguard.load(Ordering::Relaxed));
        let peer = to.filter(|_| is_wireguard).and_then(|to| self.peers().keys.get(&to).copied());
        if let Some(peer) = peer {
            queue.send(&peer, is_probe(payload), payload);
        }
    }

    fn peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether an endpoint stands for a peer by way of a relay, also one of an earlier program.
pub fn is_relayed(endpoint: SocketAddr) -> bool {
    match endpoint {
        SocketAddr::V4(v4) => v4.ip().to_bits() & !(ADDRESSES - 1) == NETWORK.to_bits(),
        SocketAddr::V6(_) => false,
    }
}

impl Peers {
    fn add(&mut self, peer: PublicKey) -> Option<Ipv4Addr> {
        // Not the first: some programs take an address that ends with zeros for a network.
        let mut numbers = (0..ADDRESSES).map(|ahead| self.next.wrapping_add(ahead) % ADDRESSES);
        let free = |number: &u32| *number != 0 && !self.keys.contains_key(&address(*number));
        let number = numbers.find(free)?;
        self.next = number.wrapping_add(1);
        self.addresses.insert(peer, address(number));
        self.keys.insert(address(number), peer);
        Some(address(number))
    }
}

fn address(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(NETWORK.to_bits() | number)
}

/// A datagram of a program on this host.
struct Received<'a> {
    from: Option<SocketAddrV4>,
    to: Option<Ipv4Addr>,
    payload: &'a [u8],
}

/// Owns the buffers for one datagram.
struct Receiver {
    buffer: Vec<u8>,
    control: Vec<u8>,
}

impl Receiver {
    fn new() -> Self {
        Self { buffer: vec![0; MAX_DATAGRAM], control: nix::cmsg_space!(in_pktinfo) }
    }

    /// The next datagram: its source, the address it was sent to, and its payload.
    fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<Received<'_>> {
        let (from, to, length) = {
            let mut buffers = [IoSliceMut::new(&mut self.buffer)];
            let message = recvmsg::<SockaddrIn>(
                socket.as_raw_fd(),
                &mut buffers,
                Some(&mut self.control),
                MsgFlags::MSG_DONTWAIT,
            )?;
            let to = message.cmsgs().ok().and_then(|mut all| all.find_map(|info| destination(&info)));
            (message.address.map(SocketAddrV4::from), to, message.bytes)
        };
        Ok(Received { from, to, payload: self.buffer.get(..length).unwrap_or_default() })
    }
}

fn destination(message: &ControlMessageOwned) -> Option<Ipv4Addr> {
    match message {
        ControlMessageOwned::Ipv4PacketInfo(info) => Some(Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn key(number: u8) -> PublicKey {
        PublicKey([number; 32])
    }

    #[test]
    fn peers_have_addresses_of_their_own_and_keep_them() {
        let port = LoopbackPort::open().unwrap();
        let endpoints: Vec<SocketAddr> =
            (0..200).map(|number| port.endpoint(&key(number)).unwrap()).collect();
        assert_eq!(endpoints.iter().collect::<BTreeSet<_>>().len(), 200);
        assert!(endpoints.iter().all(|endpoint| port.is_relayed(*endpoint)));
        assert_eq!(port.endpoint(&key(7)), Some(endpoints[7]));
        port.retain(|kept| *kept == key(7));
        let new = port.endpoint(&key(8)).unwrap();
        assert!(!endpoints.contains(&new), "an address is not used again at once");
        assert_eq!(port.endpoint(&key(7)), Some(endpoints[7]));
        let others = ["127.0.0.1:1", "127.128.0.1:1", "127.63.255.255:1", "192.0.2.1:1", "[::1]:1"];
        assert!(others.iter().all(|other| !is_relayed(other.parse().unwrap())));
    }

    #[tokio::test]
    async fn what_the_relay_passes_on_comes_from_the_address_of_the_peer() {
        let wireguard = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let port = LoopbackPort::open().unwrap();
        let endpoint = port.endpoint(&key(1)).unwrap();
        port.deliver(&key(1), b"before the port is known");
        port.set_wireguard_port(wireguard.local_addr().unwrap().port());
        port.deliver(&key(2), b"of a stranger");
        port.deliver(&key(1), b"of a peer");
        let mut buffer = [0; 100];
        let (length, from) = wireguard.recv_from(&mut buffer).await.unwrap();
        assert_eq!((&buffer[..length], from), (b"of a peer".as_slice(), endpoint));
    }
    #[tokio::test]
    async fn while_a_peer_is_held_its_handshakes_and_probes_pass_and_its_data_does_not() {
        let wireguard = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let port = LoopbackPort::open().unwrap();
        [1, 2].iter().for_each(|number| assert!(port.endpoint(&key(*number)).is_some()));
        port.set_wireguard_port(wireguard.local_addr().unwrap().port());
        port.hold(&key(1), Instant::now());
        port.deliver(&key(1), &[MESSAGE_DATA, 0]);
        port.deliver(&key(1), &[1, 0]);
        port.deliver(&key(2), &[MESSAGE_DATA, 2]);
        let long_ago = Instant::now().checked_sub(HOLD).unwrap();
        port.hold(&key(1), long_ago);
        port.deliver(&key(1), &[MESSAGE_DATA, 3]);
        let mut buffer = [0; 100];
        for expected in [[1, 0], [MESSAGE_DATA, 2], [MESSAGE_DATA, 3]] {
            let (length, _) = wireguard.recv_from(&mut buffer).await.unwrap();
            assert_eq!(buffer[..length], expected);
        }
    }
}

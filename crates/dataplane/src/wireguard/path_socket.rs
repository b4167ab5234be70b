//! The way to the WireGuard port for datagrams that are no WireGuard messages.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use fairlead_address::IpFamily;
use fairlead_keys::PublicKey;
use fairlead_tunnel::{PathDatagram, PathSocketStats};

/// Sends and receives datagrams that are no WireGuard messages on the WireGuard port: probes, STUN. Its descriptor is
/// readable while datagrams wait. The queue is bounded; what it drops is counted.
pub trait PathSocket: AsFd + Send + Sync {
    /// Sends from the WireGuard port with the device's mark, without waiting. The kernel chooses the source address if
    /// `local` is `None`.
    ///
    /// # Errors
    /// `NotConnected` as long as the device has no port, `WouldBlock` while the socket is full; the kernel's error
    /// otherwise.
    fn send(&self, local: Option<IpAddr>, remote: SocketAddr, payload: &[u8]) -> io::Result<()>;

    /// The next datagram, if one waits.
    fn try_receive(&self) -> Option<PathDatagram>;

    /// The peers that were sent packets, and from which nothing has come for half a second, since the last call; none where the
    /// implementation does not know (the kernel's). They make the descriptor readable as well.
    fn take_unanswered(&self) -> BTreeSet<PublicKey> {
        BTreeSet::new()
    }

    /// From now on sends WireGuard's packets for a peer to this endpoint as well, or no more. Without effect where the
    /// implementation cannot do it (the kernel's).
    fn send_both_ways(&self, _peer: &PublicKey, _also: Option<SocketAddr>) {}

    /// Opens sockets beside the port for a birthday attempt, numbered from zero, in place of those of the last attempt. What they
    /// receive has their number.
    ///
    /// # Errors
    /// `Unsupported` where none could be kept; the process has no descriptors or ports left.
    fn open_sockets(&self, _count: u16) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Sends from such a socket.
    ///
    /// # Errors
    /// The socket is not open, or the kernel refuses.
    fn send_from_socket(&self, _socket: u16, _remote: SocketAddr, _payload: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Keeps such a socket for an endpoint: whatever goes there goes from it, WireGuard's packets too.
    ///
    /// # Errors
    /// The socket is not open, or too many are kept.
    fn keep_socket(&self, _socket: u16, _remote: SocketAddr) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The endpoints for which a socket is kept, also by an earlier process.
    fn kept_endpoints(&self) -> Vec<SocketAddr> {
        Vec::new()
    }

    /// Closes the socket that is kept for an endpoint.
    fn leave_socket(&self, _remote: SocketAddr) {}

    /// Closes the sockets of the attempt but those that are kept.
    fn close_sockets(&self) {}

    /// The device's counters of such datagrams.
    fn stats(&self) -> PathSocketStats;

    /// Mends what other programs changed of the way between the port and the socket, and says where it works. To be called now
    /// and then; it sends nothing if nothing changed.
    fn maintain(&self) -> PathSocketHealth {
        let access = PortAccess::Shared;
        PathSocketHealth { access, families: IpFamily::BOTH.to_vec(), failures: Vec::new() }
    }
}

/// Method by which a [`PathSocket`] shares the port of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PortAccess {
    /// A port of its own, which rules of nftables join to that of the kernel's WireGuard.
    Nftables,
    /// Raw sockets, which the kernel copies each UDP datagram for.
    RawSocket,
    /// The embedded device's own sockets.
    Shared,
}

impl PortAccess {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Nftables, Self::RawSocket, Self::Shared];

    /// Name in status and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nftables => "nftables",
            Self::RawSocket => "raw-socket",
            Self::Shared => "shared",
        }
    }
}

/// Address families in which a [`PathSocket`] works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathSocketHealth {
    /// Method by which it shares WireGuard's port.
    pub access: PortAccess,
    /// Families in which it works.
    pub families: Vec<IpFamily>,
    /// Families that this host has and in which it does not work.
    pub failures: Vec<PathSocketFailure>,
}

/// Reason why a [`PathSocket`] does not work in an address family that this host has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathSocketFailure {
    /// The family.
    pub family: IpFamily,
    /// Reason, for users.
    pub reason: String,
}

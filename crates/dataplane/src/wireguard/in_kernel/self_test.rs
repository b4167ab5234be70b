//! Tests whether datagrams of this host to its own WireGuard port come back to the path socket.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use fairlead_address::IpFamily;
use fairlead_tunnel::{RawPort, UdpPort};
use fairlead_wire::{probe, stun};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::super::PathDatagram;

/// Most tests of a family, and the time in which each datagram of a test has to come back.
const ATTEMPTS: usize = 3;
const TEST_TIMEOUT: Duration = Duration::from_millis(100);

/// Outcome of the test of a family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// This host does not have the family.
    Absent,
    Failed(String),
    Works,
}

impl Outcome {
    pub(super) fn is_failure(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
}

/// One of both ways past WireGuard.
#[derive(Clone, Copy)]
pub(super) enum Sender<'a> {
    Raw(&'a RawPort),
    Table(&'a UdpPort),
}

impl Sender<'_> {
    fn send(self, remote: SocketAddr, payload: &[u8]) -> io::Result<()> {
        match self {
            Self::Raw(raw) => raw.send(None, remote, payload),
            Self::Table(socket) => socket.send_with_checksum(remote, payload),
        }
    }

    fn try_receive(self) -> Option<PathDatagram> {
        match self {
            Self::Raw(raw) => raw.try_receive(),
            Self::Table(socket) => socket.try_receive(),
        }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        match self {
            Self::Raw(raw) => raw.as_fd(),
            Self::Table(socket) => socket.as_fd(),
        }
    }
}

/// Whether each family works. What else arrives meanwhile is added to `others`.
pub(super) fn test(sender: Sender<'_>, wireguard: u16, others: &mut Vec<PathDatagram>) -> [Outcome; 2] {
    IpFamily::BOTH.map(|family| test_family(sender, family, wireguard, others))
}

/// Number of families that work.
pub(super) fn works(outcomes: &[Outcome; 2]) -> usize {
    outcomes.iter().filter(|outcome| **outcome == Outcome::Works).count()
}

/// Sends a probe and a STUN response to this host's own WireGuard port. Both must come back here, from that port.
fn test_family(
    sender: Sender<'_>,
    family: IpFamily,
    wireguard: u16,
    others: &mut Vec<PathDatagram>,
) -> Outcome {
    let loopback: IpAddr = match family {
        IpFamily::V4 => Ipv4Addr::LOCALHOST.into(),
        IpFamily::V6 => Ipv6Addr::LOCALHOST.into(),
    };
    let wireguard = SocketAddr::new(loopback, wireguard);
    let mut failure = String::new();
    for _ in 0..ATTEMPTS {
        let missing =
            ["a probe", "a STUN response"].into_iter().zip(test_datagrams()).find_map(|(what, datagram)| {
                match sender.send(wireguard, &datagram) {
                    Err(error) => Some(Err(error)),
                    Ok(()) if returns(sender, wireguard, &datagram, others) => None,
                    Ok(()) => Some(Ok(what)),
                }
            });
        failure = match missing {
            None => return Outcome::Works,
            Some(Err(error)) if is_absent(&error) => return Outcome::Absent,
            Some(Err(error)) => format!("cannot send to {wireguard}: {error}"),
            Some(Ok(what)) => format!(
                "{what} sent to {wireguard} does not reach this program: does a firewall drop UDP from this host to itself?"
            ),
        };
    }
    Outcome::Failed(failure)
}

fn returns(
    sender: Sender<'_>,
    wireguard: SocketAddr,
    datagram: &[u8],
    others: &mut Vec<PathDatagram>,
) -> bool {
    let deadline = Instant::now().checked_add(TEST_TIMEOUT);
    loop {
        while let Some(received) = sender.try_receive() {
            if received.remote == wireguard && received.payload == datagram {
                return true;
            }
            // A late datagram of a test is none of the network's.
            if received.remote != wireguard {
                others.push(received);
            }
        }
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now())).unwrap_or_default();
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        let mut descriptors = [PollFd::new(sender.descriptor(), PollFlags::POLLIN)];
        if left.is_zero() || poll(&mut descriptors, timeout).is_err() {
            return false;
        }
    }
}

/// Datagrams that both rules of the table let through; each time others, so that no late one counts.
fn test_datagrams() -> [Vec<u8>; 2] {
    let token = RandomState::new().hash_one(0_u8).to_be_bytes();
    let response = [&[1, 1, 0, 0], &stun::MAGIC_COOKIE[..], &token, &[0; 4]].concat();
    [[&probe::MAGIC[..], &token].concat(), response]
}

/// Whether this host has no address of the family.
fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL | libc::ENETUNREACH | libc::EHOSTUNREACH)
    )
}

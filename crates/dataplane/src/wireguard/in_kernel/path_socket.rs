//! The path socket of the kernel's WireGuard: an ordinary UDP port, which [`path_table`](super::path_table) joins to the port of
//! WireGuard.
//!
//! Other programs flush nftables. Before each datagram the socket makes sure that the table is there, or the datagram would
//! leave from the wrong port; [`PathSocket::maintain`] compares all of it.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_address::IpFamily;
use fairlead_api::names::{MARK_FROM_WIREGUARD, NFT_TABLE_PATH_SOCKET};
use fairlead_netlink::{self as netlink, Family, Socket, nftables};
use fairlead_tunnel::UdpPort;
use fairlead_wire::{probe, stun};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::super::{PathDatagram, PathSocket, PathSocketFailure, PathSocketHealth, PathSocketStats};
use super::path_table::{Ports, path_socket_port, table};
use crate::nft_table::{self, Applied};

/// How often a family is tested, and how long each test waits for its datagrams.
const ATTEMPTS: usize = 3;
const TEST_TIMEOUT: Duration = Duration::from_millis(100);
/// Time between tests of a family that failed.
const TEST_INTERVAL: Duration = Duration::from_secs(60);

/// What a device keeps of its path socket, whether it is open or not.
pub(super) struct PathPort {
    socket: UdpPort,
    received: AtomicU64,
    state: Mutex<State>,
}

struct State {
    netlink: Socket,
    is_open: bool,
    /// WireGuard's port; zero before it has one.
    wireguard: u16,
    /// The generation of nftables in which the table was in place.
    generation: Option<u32>,
    /// What each family was found to do, and when.
    tested: Option<(Instant, [Outcome; 2])>,
    /// Why the table is not in place.
    refusal: Option<String>,
}

/// Outcome of the test of a family.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    /// This host does not have the family.
    Absent,
    Failed(String),
    Works,
}

impl PathPort {
    /// Opens the sockets in the namespace of the calling thread, at the port of an earlier process if that is free. Nothing
    /// is joined before the path socket is opened.
    ///
    /// # Errors
    /// The kernel has no nftables, or the process has no descriptor left.
    pub(super) fn new() -> netlink::Result<Self> {
        let mut netlink = Socket::open(Family::Netfilter)?;
        let present = nftables::read(&mut netlink, NFT_TABLE_PATH_SOCKET)?;
        let earlier = present.as_ref().and_then(path_socket_port);
        let open = |port| UdpPort::open(port, MARK_FROM_WIREGUARD);
        let socket = earlier.map_or_else(|| open(0), |port| open(port).or_else(|_| open(0)));
        let socket = socket.map_err(|error| netlink::Error::Invalid {
            what: "open the path socket".to_owned(),
            reason: error.to_string(),
        })?;
        let state =
            State { netlink, is_open: false, wireguard: 0, generation: None, tested: None, refusal: None };
        Ok(Self { socket, received: AtomicU64::new(0), state: Mutex::new(state) })
    }

    /// Opens the path socket; `None` while it is open.
    pub(super) fn open(self: &Arc<Self>, wireguard: u16) -> Option<KernelPathSocket> {
        if std::mem::replace(&mut self.lock().is_open, true) {
            return None;
        }
        self.set_wireguard_port(wireguard);
        Some(KernelPathSocket(Arc::clone(self)))
    }

    /// WireGuard listens at this port from now on.
    pub(super) fn set_wireguard_port(&self, port: u16) {
        let mut state = self.lock();
        if state.wireguard != port {
            state.wireguard = port;
            state.generation = None;
            state.tested = None;
        }
        if state.is_open {
            self.join(&mut state);
        }
    }

    /// Removes the table: the device is removed.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn remove(&self) -> netlink::Result<()> {
        nft_table::remove_on(&mut self.lock().netlink, NFT_TABLE_PATH_SOCKET)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings the table to what it should be, and tests both families if it was another one.
    fn join(&self, state: &mut State) {
        let ports = Ports { wireguard: state.wireguard, path_socket: self.socket.port() };
        if ports.wireguard == 0 {
            return;
        }
        let is_due = |(at, outcomes): &(Instant, [Outcome; 2])| {
            let has_failed = outcomes.iter().any(|outcome| matches!(outcome, Outcome::Failed(_)));
            has_failed && at.elapsed() >= TEST_INTERVAL
        };
        match state.apply(ports) {
            Ok(applied) => {
                state.refusal = None;
                if applied != Applied::Unchanged || state.tested.as_ref().is_none_or(is_due) {
                    state.tested =
                        Some((Instant::now(), IpFamily::BOTH.map(|family| self.test(family, ports))));
                }
            }
            Err(error) => state.refusal = Some(error.to_string()),
        }
    }

    /// Sends a probe and a STUN response to this host's own WireGuard port. Both must come back here, from that port. What
    /// arrives meanwhile is lost, as the network may lose it.
    fn test(&self, family: IpFamily, ports: Ports) -> Outcome {
        let loopback: IpAddr = match family {
            IpFamily::V4 => Ipv4Addr::LOCALHOST.into(),
            IpFamily::V6 => Ipv6Addr::LOCALHOST.into(),
        };
        let wireguard = SocketAddr::new(loopback, ports.wireguard);
        let mut failure = String::new();
        for _ in 0..ATTEMPTS {
            let missing = ["a probe", "a STUN response"].into_iter().zip(test_datagrams()).find_map(
                |(what, datagram)| match self.socket.send_with_checksum(wireguard, &datagram) {
                    Err(error) => Some(Err(error)),
                    Ok(()) if self.returns(wireguard, &datagram) => None,
                    Ok(()) => Some(Ok(what)),
                },
            );
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

    fn returns(&self, wireguard: SocketAddr, datagram: &[u8]) -> bool {
        let deadline = Instant::now().checked_add(TEST_TIMEOUT);
        loop {
            while let Some(received) = self.socket.try_receive() {
                if received.remote == wireguard && received.payload == datagram {
                    return true;
                }
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now())).unwrap_or_default();
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
            let mut descriptors = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            if left.is_zero() || poll(&mut descriptors, timeout).is_err() {
                return false;
            }
        }
    }
}

impl State {
    /// Reads the table only if other programs have changed nftables since it was last in place.
    fn apply(&mut self, ports: Ports) -> netlink::Result<Applied> {
        let generation = nftables::generation(&mut self.netlink)?;
        if self.generation == Some(generation) {
            return Ok(Applied::Unchanged);
        }
        self.generation = None;
        let applied = nft_table::apply_on(&mut self.netlink, &table(ports))?;
        // A transaction of our own made another one, and only then the table was read in none.
        self.generation = (applied == Applied::Unchanged).then_some(generation);
        Ok(applied)
    }

    /// Whether a datagram sent now leaves from the WireGuard port, as far as a short request can tell.
    fn is_joined(&mut self) -> netlink::Result<bool> {
        let generation = nftables::generation(&mut self.netlink)?;
        Ok(self.generation == Some(generation) || nftables::exists(&mut self.netlink, NFT_TABLE_PATH_SOCKET)?)
    }

    fn outcome(&self, family: IpFamily) -> Option<&Outcome> {
        let (_, outcomes) = self.tested.as_ref()?;
        IpFamily::BOTH.iter().zip(outcomes).find(|(it, _)| **it == family).map(|(_, outcome)| outcome)
    }
}

/// The path socket while it is open.
pub(super) struct KernelPathSocket(Arc<PathPort>);

impl PathSocket for KernelPathSocket {
    fn send(&self, local: Option<IpAddr>, remote: SocketAddr, payload: &[u8]) -> io::Result<()> {
        let PathPort { socket, .. } = &*self.0;
        let mut state = self.0.lock();
        if state.wireguard == 0 {
            return Err(io::ErrorKind::NotConnected.into());
        }
        if !state.is_joined().map_err(io::Error::other)? {
            self.0.join(&mut state);
        }
        if let Some(refusal) = &state.refusal {
            return Err(io::Error::other(refusal.clone()));
        }
        let family = IpFamily::of(remote.ip().to_canonical());
        match state.outcome(family) {
            Some(Outcome::Works) => socket.send(local, remote, payload),
            _ => Err(io::Error::new(io::ErrorKind::Unsupported, format!("no path socket in {family}"))),
        }
    }

    fn try_receive(&self) -> Option<PathDatagram> {
        // A test that runs must receive what it has sent.
        let _idle = self.0.lock();
        let datagram = self.0.socket.try_receive()?;
        self.0.received.fetch_add(1, Ordering::Relaxed);
        Some(datagram)
    }

    fn stats(&self) -> PathSocketStats {
        PathSocketStats { queued: self.0.received.load(Ordering::Relaxed), ..PathSocketStats::default() }
    }

    fn maintain(&self) -> PathSocketHealth {
        let mut state = self.0.lock();
        self.0.join(&mut state);
        let mut health = PathSocketHealth { families: Vec::new(), failures: Vec::new() };
        for family in IpFamily::BOTH {
            match (&state.refusal, state.outcome(family)) {
                (Some(reason), _) | (None, Some(Outcome::Failed(reason))) => {
                    health.failures.push(PathSocketFailure { family, reason: reason.clone() });
                }
                (None, Some(Outcome::Works)) => health.families.push(family),
                (None, Some(Outcome::Absent) | None) => {}
            }
        }
        health
    }
}

impl AsFd for KernelPathSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.socket.as_fd()
    }
}

impl Drop for KernelPathSocket {
    /// The table stays, for the next process.
    fn drop(&mut self) {
        self.0.lock().is_open = false;
    }
}

/// What both rules of the table let through; each time others, so that no late one counts.
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

#[cfg(test)]
mod tests;

//! The path socket of the kernel's WireGuard: an ordinary UDP port, which [`path_table`](super::path_table) joins to the port of
//! WireGuard.
//!
//! Other programs flush nftables. Before each datagram the socket makes sure that the table is there, or the datagram would
//! leave from the wrong port; [`PathSocket::maintain`] compares all of it.
//!
//! Where the table cannot be made, or a test finds that nothing comes through it (a firewall behind it knows WireGuard's port
//! alone), raw sockets take its place if they work in more address families: [`fall_back`](PathPort::fall_back).

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
use fairlead_tunnel::{RawPort, UdpPort, Word};
use fairlead_wire::{probe, stun};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use super::super::{
    PathDatagram, PathSocket, PathSocketFailure, PathSocketHealth, PathSocketStats, PortAccess,
};
use super::path_table::{Ports, STUN_RESPONSE, STUN_RESPONSE_MASK, path_socket_port, table};
use crate::nft_table::{self, Applied};

/// How often a family is tested, and how long each test waits for its datagrams.
const ATTEMPTS: usize = 3;
const TEST_TIMEOUT: Duration = Duration::from_millis(100);
/// Time between tests of a family that failed.
const TEST_INTERVAL: Duration = Duration::from_secs(60);
/// Time between attempts with raw sockets where neither way works in all families: each interrupts the other way.
const FALL_BACK_INTERVAL: Duration = Duration::from_secs(600);

/// What raw sockets receive: probes and STUN responses, as the table's rules.
const PROBE: &[Word] = &[Word { offset: 0, mask: u32::MAX, value: u32::from_be_bytes(probe::MAGIC) }];
const STUN: &[Word] = &[
    Word { offset: 0, mask: upper(STUN_RESPONSE_MASK), value: upper(STUN_RESPONSE) },
    Word { offset: 4, mask: u32::MAX, value: u32::from_be_bytes(stun::MAGIC_COOKIE) },
];

const fn upper([first, second]: [u8; 2]) -> u32 {
    u32::from_be_bytes([first, second, 0, 0])
}

/// What a device keeps of its path socket, whether it is open or not.
pub(super) struct PathPort {
    socket: UdpPort,
    /// Readable while datagrams wait, at this socket or at raw ones.
    readable: Epoll,
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
    /// In use instead of the table.
    raw: Option<RawPort>,
    /// When raw sockets were last tried.
    fell_back: Option<Instant>,
}

/// Outcome of the test of a family.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    /// This host does not have the family.
    Absent,
    Failed(String),
    Works,
}

impl Outcome {
    fn is_failure(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
}

/// One of both ways past WireGuard.
#[derive(Clone, Copy)]
enum Way<'a> {
    Raw(&'a RawPort),
    Table(&'a UdpPort),
}

impl Way<'_> {
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
        let refused = |error: io::Error| netlink::Error::Invalid {
            what: "open the path socket".to_owned(),
            reason: error.to_string(),
        };
        let socket = socket.map_err(refused)?;
        let readable = readable(&socket).map_err(refused)?;
        let state = State {
            netlink,
            is_open: false,
            wireguard: 0,
            generation: None,
            tested: None,
            refusal: None,
            raw: None,
            fell_back: None,
        };
        Ok(Self { socket, readable, received: AtomicU64::new(0), state: Mutex::new(state) })
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
            state.begin_anew();
            state.fell_back = None;
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

    /// Makes sure that one of both ways is open, and that it works.
    fn join(&self, state: &mut State) {
        let ports = Ports { wireguard: state.wireguard, path_socket: self.socket.port() };
        if ports.wireguard == 0 {
            return;
        }
        if let Some(raw) = &state.raw {
            if !state.is_test_due() {
                return;
            }
            let outcomes = test(Way::Raw(raw), ports.wireguard);
            if !outcomes.iter().any(Outcome::is_failure) {
                state.tested = Some((Instant::now(), outcomes));
                return;
            }
            state.begin_anew();
        }
        self.join_by_table(state, ports);
        let is_complete = state.refusal.is_none() && !state.has_failed();
        let was_tried = state.fell_back.is_some_and(|at| at.elapsed() < FALL_BACK_INTERVAL);
        if !is_complete && !was_tried {
            self.fall_back(state, ports);
        }
    }

    /// Brings the table to what it should be, and tests both families if it was another one.
    fn join_by_table(&self, state: &mut State, ports: Ports) {
        match state.apply(ports) {
            Ok(applied) => {
                state.refusal = None;
                if applied != Applied::Unchanged || state.is_test_due() {
                    let outcomes = test(Way::Table(&self.socket), ports.wireguard);
                    state.tested = Some((Instant::now(), outcomes));
                }
            }
            Err(error) => state.refusal = Some(error.to_string()),
        }
    }

    /// Raw sockets instead of the table, if they work in more families. They are opened in the namespace of the calling thread.
    fn fall_back(&self, state: &mut State, ports: Ports) {
        state.fell_back = Some(Instant::now());
        let raw = match RawPort::open(ports.wireguard, MARK_FROM_WIREGUARD, &[PROBE, STUN]) {
            Ok(raw) => raw,
            Err(error) => return tracing::warn!(%error, "cannot open raw sockets for path probes"),
        };
        // Its rules come before raw sockets. Where it cannot be removed, the test says whether it is there.
        if let Err(error) = nft_table::remove_on(&mut state.netlink, NFT_TABLE_PATH_SOCKET) {
            tracing::debug!(%error, "cannot remove the table of the path socket");
        }
        let outcomes = test(Way::Raw(&raw), ports.wireguard);
        if works(&outcomes) > state.works() && self.readable.add(&raw, readable_event()).is_ok() {
            let reason = state.failure().unwrap_or_default();
            tracing::warn!(reason, "raw sockets take the place of nftables for path probes");
            state.refusal = None;
            state.generation = None;
            state.tested = Some((Instant::now(), outcomes));
            state.raw = Some(raw);
        } else if state.refusal.is_none() {
            let outcome = state.apply(ports);
            state.refusal = outcome.err().map(|error| error.to_string());
        }
    }
}

/// Whether each family works. What arrives meanwhile is lost, as the network may lose it.
fn test(way: Way<'_>, wireguard: u16) -> [Outcome; 2] {
    IpFamily::BOTH.map(|family| test_family(way, family, wireguard))
}

/// In how many families.
fn works(outcomes: &[Outcome; 2]) -> usize {
    outcomes.iter().filter(|outcome| **outcome == Outcome::Works).count()
}

/// Sends a probe and a STUN response to this host's own WireGuard port. Both must come back here, from that port.
fn test_family(way: Way<'_>, family: IpFamily, wireguard: u16) -> Outcome {
    let loopback: IpAddr = match family {
        IpFamily::V4 => Ipv4Addr::LOCALHOST.into(),
        IpFamily::V6 => Ipv6Addr::LOCALHOST.into(),
    };
    let wireguard = SocketAddr::new(loopback, wireguard);
    let mut failure = String::new();
    for _ in 0..ATTEMPTS {
        let missing =
            ["a probe", "a STUN response"].into_iter().zip(test_datagrams()).find_map(|(what, datagram)| {
                match way.send(wireguard, &datagram) {
                    Err(error) => Some(Err(error)),
                    Ok(()) if returns(way, wireguard, &datagram) => None,
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

fn returns(way: Way<'_>, wireguard: SocketAddr, datagram: &[u8]) -> bool {
    let deadline = Instant::now().checked_add(TEST_TIMEOUT);
    loop {
        while let Some(received) = way.try_receive() {
            if received.remote == wireguard && received.payload == datagram {
                return true;
            }
        }
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now())).unwrap_or_default();
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        let mut descriptors = [PollFd::new(way.descriptor(), PollFlags::POLLIN)];
        if left.is_zero() || poll(&mut descriptors, timeout).is_err() {
            return false;
        }
    }
}

impl State {
    /// Forgets which way works.
    fn begin_anew(&mut self) {
        self.raw = None;
        self.generation = None;
        self.tested = None;
    }

    fn is_test_due(&self) -> bool {
        self.tested.as_ref().is_none_or(|(at, _)| self.has_failed() && at.elapsed() >= TEST_INTERVAL)
    }

    fn has_failed(&self) -> bool {
        self.tested.as_ref().is_some_and(|(_, outcomes)| outcomes.iter().any(Outcome::is_failure))
    }

    /// In how many families.
    fn works(&self) -> usize {
        let tested = self.tested.as_ref().filter(|_| self.refusal.is_none());
        tested.map_or(0, |(_, outcomes)| works(outcomes))
    }

    /// What does not work.
    fn failure(&self) -> Option<&str> {
        let failed =
            self.tested.iter().flat_map(|(_, outcomes)| outcomes).find_map(|outcome| match outcome {
                Outcome::Failed(reason) => Some(reason.as_str()),
                Outcome::Absent | Outcome::Works => None,
            });
        self.refusal.as_deref().or(failed)
    }

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
        if state.raw.is_none() && !state.is_joined().map_err(io::Error::other)? {
            self.0.join(&mut state);
        }
        if let Some(refusal) = &state.refusal {
            return Err(io::Error::other(refusal.clone()));
        }
        let family = IpFamily::of(remote.ip().to_canonical());
        match state.outcome(family) {
            Some(Outcome::Works) => match &state.raw {
                Some(raw) => raw.send(local, remote, payload),
                None => socket.send(local, remote, payload),
            },
            _ => Err(io::Error::new(io::ErrorKind::Unsupported, format!("no path socket in {family}"))),
        }
    }

    fn try_receive(&self) -> Option<PathDatagram> {
        // A test that runs must receive what it has sent.
        let state = self.0.lock();
        let datagram = match &state.raw {
            // Nothing that waits there is of use, and it would keep the descriptor readable.
            Some(raw) => {
                while self.0.socket.try_receive().is_some() {}
                raw.try_receive()
            }
            None => self.0.socket.try_receive(),
        }?;
        self.0.received.fetch_add(1, Ordering::Relaxed);
        Some(datagram)
    }

    fn stats(&self) -> PathSocketStats {
        PathSocketStats { queued: self.0.received.load(Ordering::Relaxed), ..PathSocketStats::default() }
    }

    fn maintain(&self) -> PathSocketHealth {
        let mut state = self.0.lock();
        self.0.join(&mut state);
        let access = if state.raw.is_some() { PortAccess::RawSocket } else { PortAccess::Nftables };
        let mut health = PathSocketHealth { access, families: Vec::new(), failures: Vec::new() };
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
        self.0.readable.0.as_fd()
    }
}

impl Drop for KernelPathSocket {
    /// The table stays, for the next process. Raw sockets cost something for each packet.
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.is_open = false;
        if state.raw.is_some() {
            state.begin_anew();
            state.fell_back = None;
        }
    }
}

fn readable(socket: &UdpPort) -> io::Result<Epoll> {
    let readable = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    readable.add(socket, readable_event())?;
    Ok(readable)
}

fn readable_event() -> EpollEvent {
    EpollEvent::new(EpollFlags::EPOLLIN, 0)
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

//! The path socket of the kernel's WireGuard: an ordinary UDP port, which [`path_table`](super::path_table) joins to the port of
//! WireGuard.
//!
//! Other programs flush nftables. Before each datagram the socket makes sure that the table is there, or the datagram would
//! leave from the wrong port; [`PathSocket::maintain`] compares all of it.
//!
//! If the table cannot be made, or a test finds that nothing comes through it (a firewall behind it knows WireGuard's port
//! alone), raw sockets take its place if they work in more address families: `switching`. The way in use is tested now and then,
//! and soon after other programs have changed nftables.
//!
//! Ports of birthday attempts are in `pins`.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_address::IpFamily;
use fairlead_api::names::{MARK_FROM_WIREGUARD, NFT_TABLE_PATH_SOCKET};
use fairlead_netlink::nftables::EndpointMap;
use fairlead_netlink::{self as netlink, Family, Socket, nftables};
use fairlead_tunnel::{RawPort, ReservedPorts, UdpPort};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use super::super::{
    PathDatagram, PathSocket, PathSocketFailure, PathSocketHealth, PathSocketStats, PortAccess,
};
use super::path_table::{Joined, Ports, path_socket_port, table};
use super::retests::{self, Retests};
use super::self_test::{Outcome, Sender, test, works};
use crate::nft_table::{self, Applied};

mod backlog;
mod pins;
mod switching;

use backlog::Backlog;

/// Time between tests of a family that failed.
const TEST_INTERVAL: Duration = Duration::from_secs(60);
/// State of a device's path socket, whether it is open or not.
pub(super) struct PathPort {
    socket: UdpPort,
    /// The ports of a birthday attempt, and those that are pinned.
    reserved: ReservedPorts,
    /// Readable while datagrams wait, at these sockets, at raw ones or in the backlog.
    readable: Epoll,
    received: AtomicU64,
    state: Mutex<State>,
}

struct State {
    netlink: Socket,
    is_open: bool,
    /// WireGuard's port; zero before it has one.
    wireguard: u16,
    /// The generation of nftables in which the table was in place, and what it joined.
    generation: Option<(u32, Joined)>,
    /// Time and outcomes of the last test, by family.
    tested: Option<(Instant, [Outcome; 2])>,
    /// Reason why the table is not in place.
    refusal: Option<String>,
    /// In use instead of the table.
    raw: Option<RawPort>,
    /// Time at which raw sockets were last tried.
    fell_back: Option<Instant>,
    retests: Retests,
    /// The table is tested while raw sockets are in use.
    is_in_trial: bool,
    /// The port for each endpoint that is pinned.
    pins: EndpointMap,
    backlog: Backlog,
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
        let reserved = ReservedPorts::new().map_err(refused)?;
        let pins = present.as_ref().map(|present| pins::adopt(present, &reserved)).unwrap_or_default();
        let backlog = Backlog::new().map_err(refused)?;
        let readable = readable([socket.as_fd(), reserved.as_fd(), backlog.as_fd()]).map_err(refused)?;
        let state = State {
            netlink,
            is_open: false,
            wireguard: 0,
            generation: None,
            tested: None,
            refusal: None,
            raw: None,
            fell_back: None,
            retests: Retests::default(),
            is_in_trial: false,
            pins,
            backlog,
        };
        Ok(Self { socket, reserved, readable, received: AtomicU64::new(0), state: Mutex::new(state) })
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
        let mut state = self.lock();
        state.pins.clear();
        self.reserved.close_all();
        nft_table::remove_on(&mut state.netlink, NFT_TABLE_PATH_SOCKET)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes sure that one of both ways is open, and that it works.
    fn join(&self, state: &mut State) {
        let ports = self.ports(state);
        if ports.wireguard == 0 || state.is_in_trial {
            return;
        }
        if state.raw.is_some() {
            state.apply_pins(ports);
            if !state.is_test_due() || !state.test_raw(ports) {
                return;
            }
            state.begin_anew();
        }
        self.join_by_table(state, ports);
        let is_complete = state.refusal.is_none() && !state.has_failed();
        let was_tried = state.fell_back.is_some_and(|at| at.elapsed() < switching::FALL_BACK_INTERVAL);
        if !is_complete && !was_tried {
            self.fall_back(state, ports);
        }
    }

    fn ports(&self, state: &State) -> Ports {
        Ports { wireguard: state.wireguard, path_socket: self.socket.port() }
    }

    /// Brings the table to what it should be, and tests both families if it was another one, or it is time to.
    fn join_by_table(&self, state: &mut State, ports: Ports) {
        let applied = match state.apply(ports) {
            Ok(applied) => applied,
            Err(error) => return state.refusal = Some(error.to_string()),
        };
        state.refusal = None;
        // It is that in which the table is in place, or unknown after a change of our own.
        let generation = nftables::generation(&mut state.netlink).ok();
        let is_due = state.is_test_due() || state.retests.is_due(Instant::now(), generation);
        if applied == Applied::Rebuilt || is_due {
            let mut others = Vec::new();
            let outcomes = test(Sender::Table(&self.socket), ports.wireguard, &mut others);
            state.conclude_test(outcomes, generation, others);
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

    /// Whether raw sockets fail where they have worked.
    fn test_raw(&mut self, ports: Ports) -> bool {
        let Some(raw) = &self.raw else { return false };
        let mut others = Vec::new();
        let outcomes = test(Sender::Raw(raw), ports.wireguard, &mut others);
        let has_failed = outcomes.iter().any(Outcome::is_failure);
        self.backlog.extend(others);
        if !has_failed {
            self.tested = Some((Instant::now(), outcomes));
        }
        has_failed
    }

    /// `others` arrived meanwhile.
    fn conclude_test(&mut self, outcomes: [Outcome; 2], generation: Option<u32>, others: Vec<PathDatagram>) {
        let now = Instant::now();
        self.tested = Some((now, outcomes));
        self.retests.record(now, generation, retests::random());
        self.backlog.extend(others);
    }

    fn has_failed(&self) -> bool {
        self.tested.as_ref().is_some_and(|(_, outcomes)| outcomes.iter().any(Outcome::is_failure))
    }

    /// Number of families that work.
    fn works(&self) -> usize {
        let tested = self.tested.as_ref().filter(|_| self.refusal.is_none());
        tested.map_or(0, |(_, outcomes)| works(outcomes))
    }

    /// Reason why the path socket does not work: the kernel's refusal of the table, or the first family that failed its test.
    fn failure(&self) -> Option<&str> {
        let failed =
            self.tested.iter().flat_map(|(_, outcomes)| outcomes).find_map(|outcome| match outcome {
                Outcome::Failed(reason) => Some(reason.as_str()),
                Outcome::Absent | Outcome::Works => None,
            });
        self.refusal.as_deref().or(failed)
    }

    /// Brings the table to what the way in use needs. Reads it only if other programs have changed nftables since it was last in
    /// place.
    fn apply(&mut self, ports: Ports) -> netlink::Result<Applied> {
        let joined = if self.raw.is_some() { Joined::None } else { Joined::All };
        self.apply_as(ports, joined)
    }

    /// Makes the pins again where raw sockets do without a table.
    fn apply_pins(&mut self, ports: Ports) {
        if !self.pins.is_empty()
            && let Err(error) = self.apply(ports)
        {
            tracing::debug!(%error, "cannot pin ports in nftables");
        }
    }

    fn apply_as(&mut self, ports: Ports, joined: Joined) -> netlink::Result<Applied> {
        let generation = nftables::generation(&mut self.netlink)?;
        if self.generation == Some((generation, joined)) {
            return Ok(Applied::Unchanged);
        }
        self.generation = None;
        let wanted = table(ports, joined, &self.pins);
        if wanted.chains.is_empty() {
            nft_table::remove_on(&mut self.netlink, NFT_TABLE_PATH_SOCKET)?;
            return Ok(Applied::Unchanged);
        }
        let applied = nft_table::apply_on(&mut self.netlink, &wanted)?;
        // A transaction of our own made another one, and only then the table was read in none.
        self.generation = (applied == Applied::Unchanged).then_some((generation, joined));
        Ok(applied)
    }

    /// Whether a datagram sent now leaves from the WireGuard port, as far as a short request can tell.
    fn is_joined(&mut self) -> netlink::Result<bool> {
        if self.raw.is_some() && self.pins.is_empty() {
            return Ok(true);
        }
        let generation = nftables::generation(&mut self.netlink)?;
        Ok(self.generation.is_some_and(|(known, _)| known == generation)
            || nftables::exists(&mut self.netlink, NFT_TABLE_PATH_SOCKET)?)
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
            Some(Outcome::Works) => match &state.raw {
                Some(raw) => raw.send(local, remote, payload),
                None => socket.send(local, remote, payload),
            },
            _ => Err(io::Error::new(io::ErrorKind::Unsupported, format!("no path socket in {family}"))),
        }
    }

    fn try_receive(&self) -> Option<PathDatagram> {
        // A test that runs must receive what it has sent.
        let mut state = self.0.lock();
        let by_port = state.backlog.pop().or_else(|| match &state.raw {
            Some(raw) => {
                // Nothing that waits there is of use, and it would keep the descriptor readable.
                while !state.is_in_trial && self.0.socket.try_receive().is_some() {}
                raw.try_receive()
            }
            None => self.0.socket.try_receive(),
        });
        drop(state);
        let datagram = by_port
            .map(|datagram| PathDatagram { socket: self.0.reserved.number_of(datagram.remote), ..datagram })
            .or_else(|| self.0.reserved.try_receive())?;
        self.0.received.fetch_add(1, Ordering::Relaxed);
        Some(datagram)
    }

    fn stats(&self) -> PathSocketStats {
        PathSocketStats { queued: self.0.received.load(Ordering::Relaxed), ..PathSocketStats::default() }
    }

    fn open_sockets(&self, count: u16) -> io::Result<()> {
        self.0.open_attempt(count)
    }

    fn send_from_socket(&self, socket: u16, remote: SocketAddr, payload: &[u8]) -> io::Result<()> {
        self.0.reserved.send(socket, remote, payload)
    }

    fn keep_socket(&self, socket: u16, remote: SocketAddr) -> io::Result<()> {
        self.0.pin(socket, remote)
    }

    fn kept_endpoints(&self) -> Vec<SocketAddr> {
        self.0.lock().pins.keys().map(|remote| SocketAddr::V4(*remote)).collect()
    }

    fn leave_socket(&self, remote: SocketAddr) {
        self.0.unpin(remote);
    }

    fn close_sockets(&self) {
        self.0.reserved.close();
    }

    fn maintain(&self) -> PathSocketHealth {
        self.0.return_to_table();
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
        self.0.reserved.close();
        if state.raw.is_some() {
            state.begin_anew();
            state.fell_back = None;
        }
    }
}

fn readable(descriptors: [BorrowedFd<'_>; 3]) -> io::Result<Epoll> {
    let readable = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    descriptors.iter().try_for_each(|descriptor| readable.add(descriptor, readable_event()))?;
    Ok(readable)
}

fn readable_event() -> EpollEvent {
    EpollEvent::new(EpollFlags::EPOLLIN, 0)
}

#[cfg(test)]
mod tests;

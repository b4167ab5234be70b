//! Datagrams on the WireGuard port that are no WireGuard messages: probes, STUN.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fairlead_keys::PublicKey;
use socket2::Socket;

use crate::engine::Copies;
use crate::extra_sockets::{ExtraSockets, ReadySocket};
use crate::udp::{self, Path, Sockets};

/// Datagrams that wait for the reader.
const MAX_QUEUED: usize = 256;
/// Bytes of all datagrams that wait for the reader.
const MAX_QUEUED_BYTES: usize = 256 << 10;

/// A received datagram.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathDatagram {
    /// The address it was sent to; `None` if the kernel did not tell.
    pub local: Option<IpAddr>,
    /// Address of the sender.
    pub remote: SocketAddr,
    /// The socket of the birthday attempt that received it, by number; `None` for the WireGuard port.
    pub socket: Option<u16>,
    /// UDP payload.
    pub payload: Vec<u8>,
}

/// Counters of the datagrams of a device that are no WireGuard messages, and of its packets that go both ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PathSocketStats {
    /// Queued for the reader.
    pub queued: u64,
    /// Dropped: no [`PathSocket`] was open.
    pub dropped_without_reader: u64,
    /// Dropped: the queue was full.
    pub dropped_queue_full: u64,
    /// Packets of WireGuard that were sent both ways ([`PathSocket::send_both_ways`]).
    pub sent_both_ways: u64,
    /// Packets that were sent one way only, because too many were to go both ways.
    pub held_back: u64,
}

/// Sends and receives datagrams on the WireGuard port of a device, past WireGuard. Its descriptor is readable while
/// datagrams wait or peers have not answered. Dropping it closes the queue.
pub struct PathSocket {
    port: Arc<PathPort>,
    readable: UnixStream,
}

impl PathSocket {
    /// Sends from the WireGuard port with the device's mark, without waiting. The kernel chooses the source address if
    /// `local` is `None`.
    ///
    /// # Errors
    /// `NotConnected` as long as the device has no port, `WouldBlock` while the socket is full; the kernel's error
    /// otherwise.
    pub fn send(&self, local: Option<IpAddr>, remote: SocketAddr, payload: &[u8]) -> io::Result<()> {
        let path = Path { local, ..Path::to(remote) };
        if let Some(kept) = self.port.kept(&path.remote) {
            return udp::send_from(&kept, &Path::to(remote), payload);
        }
        let sockets = self.port.lock().sockets.clone().ok_or(io::ErrorKind::NotConnected)?;
        sockets.send(&path, payload)
    }

    /// Opens `count` sockets beside the WireGuard port for a birthday attempt, at most 256 and IPv4 only, numbered from zero. Those of
    /// the last attempt are closed.
    ///
    /// # Errors
    /// `NotConnected` as long as the device has no port; the process has no descriptors or ports left.
    pub fn open_sockets(&self, count: u16) -> io::Result<()> {
        let sockets = self.port.lock().sockets.clone().ok_or(io::ErrorKind::NotConnected)?;
        self.port.extra()?.open(count, sockets.mark())
    }

    /// Sends from a socket of the attempt.
    ///
    /// # Errors
    /// `NotConnected` if it is not open; the kernel's error otherwise.
    pub fn send_from_socket(&self, socket: u16, remote: SocketAddr, payload: &[u8]) -> io::Result<()> {
        self.port.extra()?.send(socket, remote, payload)
    }

    /// Keeps a socket of the attempt for an endpoint: whatever goes there goes from it, and what it receives from there is received
    /// as if by the WireGuard port.
    ///
    /// # Errors
    /// There is no such socket, or too many are kept.
    pub fn keep_socket(&self, socket: u16, remote: SocketAddr) -> io::Result<()> {
        self.port.extra()?.keep(socket, Path::to(remote).remote)
    }

    /// The endpoints for which sockets are kept, also by an earlier reader or process.
    pub fn kept_endpoints(&self) -> Vec<SocketAddr> {
        let kept = self.port.kept_sockets(usize::MAX);
        kept.into_iter().map(|(remote, _)| remote.into()).collect()
    }

    /// Closes the socket that is kept for an endpoint.
    pub fn leave_socket(&self, remote: SocketAddr) {
        self.port.with_extra(|extra| extra.leave(Path::to(remote).remote));
    }

    /// Ends the attempt: closes its sockets but those that are kept.
    pub fn close_sockets(&self) {
        self.port.with_extra(ExtraSockets::close);
    }

    /// The next datagram, if one waits.
    pub fn try_receive(&self) -> Option<PathDatagram> {
        let mut state = self.port.lock();
        let reader = state.reader.as_mut()?;
        let datagram = reader.queue.pop_front()?;
        reader.bytes = reader.bytes.saturating_sub(datagram.payload.len());
        self.settle(reader);
        Some(datagram)
    }

    /// The peers that were sent packets, and from which nothing has come for half a second, since the last call. Their path may
    /// be broken; or they have nothing to say.
    pub fn take_unanswered(&self) -> BTreeSet<PublicKey> {
        let mut state = self.port.lock();
        let Some(reader) = state.reader.as_mut() else { return BTreeSet::new() };
        let unanswered = std::mem::take(&mut reader.unanswered);
        if !unanswered.is_empty() {
            self.settle(reader);
        }
        unanswered
    }

    /// From now on sends the data messages for a peer to this endpoint as well, within limits on their bytes, or no more. What
    /// comes from there does not move the peer's endpoint meanwhile.
    pub fn send_both_ways(&self, peer: &PublicKey, also: Option<SocketAddr>) {
        let mut state = self.port.lock();
        match also {
            Some(remote) => drop(state.both_ways.insert(*peer, remote)),
            None => drop(state.both_ways.remove(peer)),
        }
        self.port.both_ways_changed.store(true, Ordering::Release);
    }

    /// Makes the descriptor unreadable once nothing waits.
    fn settle(&self, reader: &Reader) {
        if reader.is_empty() {
            // The one byte that made it readable.
            let _ = (&self.readable).read(&mut [0; 1]);
        }
    }

    /// The device's counters since its start.
    pub fn stats(&self) -> PathSocketStats {
        self.port.lock().stats
    }
}

impl AsFd for PathSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}

impl Drop for PathSocket {
    fn drop(&mut self) {
        let mut state = self.port.lock();
        state.reader = None;
        state.both_ways.clear();
        self.port.both_ways_changed.store(true, Ordering::Release);
        drop(state);
        // Those that are kept are the device's: its next reader is told of them, or the process that takes over.
        self.port.with_extra(ExtraSockets::close);
    }
}

/// State that the packet loop and the reader share. The lock is never held during I/O that waits.
#[derive(Default)]
pub(crate) struct PathPort {
    state: Mutex<State>,
    /// [`State::both_ways`] is another one than was taken last.
    both_ways_changed: AtomicBool,
    /// `None` in a process without descriptors.
    extra: Option<ExtraSockets>,
}

#[derive(Default)]
struct State {
    sockets: Option<Arc<Sockets>>,
    reader: Option<Reader>,
    /// Addresses to which packets for a peer go as well; as many peers as the device has at most.
    both_ways: BTreeMap<PublicKey, SocketAddr>,
    stats: PathSocketStats,
}

struct Reader {
    queue: VecDeque<PathDatagram>,
    bytes: usize,
    /// Peers with unanswered packets, which the reader was not told of yet; as many as the device has at most.
    unanswered: BTreeSet<PublicKey>,
    wake: UnixStream,
}

impl Reader {
    fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.unanswered.is_empty()
    }

    /// Makes the descriptor readable unless something waits already.
    fn wake(&mut self) {
        if self.is_empty() {
            let _ = self.wake.write(&[0]);
        }
    }
}

impl PathPort {
    pub(crate) fn new() -> Self {
        Self { extra: ExtraSockets::new().ok(), ..Self::default() }
    }

    /// The socket that is kept for an endpoint.
    pub(crate) fn kept(&self, remote: &SocketAddr) -> Option<Arc<Socket>> {
        self.extra.as_ref().and_then(|extra| extra.kept(remote))
    }

    /// The sockets that are kept, at most so many, by their endpoints.
    pub(crate) fn kept_sockets(&self, most: usize) -> Vec<(SocketAddrV4, Arc<Socket>)> {
        self.extra.as_ref().map(|extra| extra.all_kept(most)).unwrap_or_default()
    }

    /// Keeps what another process kept.
    pub(crate) fn adopt_sockets(&self, kept: Vec<(SocketAddrV4, OwnedFd)>) {
        for (remote, socket) in kept {
            if let Err(error) = self.extra().and_then(|extra| extra.adopt(remote, socket.into())) {
                tracing::warn!(%remote, %error, "cannot keep a socket of the old process");
            }
        }
    }

    /// Readable while datagrams wait on sockets beside the port.
    pub(crate) fn extra_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.extra.as_ref().map(ExtraSockets::descriptor)
    }

    /// The sockets beside the port on which datagrams wait.
    pub(crate) fn ready(&self) -> Vec<ReadySocket> {
        self.extra.as_ref().map(ExtraSockets::ready).unwrap_or_default()
    }

    fn extra(&self) -> io::Result<&ExtraSockets> {
        self.extra.as_ref().ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    fn with_extra(&self, act: impl FnOnce(&ExtraSockets)) {
        if let Some(extra) = &self.extra {
            act(extra);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the reading end; `None` while there is one.
    pub(crate) fn open(self: &Arc<Self>) -> io::Result<Option<PathSocket>> {
        let (wake, readable) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        readable.set_nonblocking(true)?;
        let mut state = self.lock();
        if state.reader.is_some() {
            return Ok(None);
        }
        state.reader = Some(Reader { queue: VecDeque::new(), bytes: 0, unanswered: BTreeSet::new(), wake });
        drop(state);
        Ok(Some(PathSocket { port: Arc::clone(self), readable }))
    }

    /// The device's sockets were opened, or replaced.
    pub(crate) fn set_sockets(&self, sockets: &Arc<Sockets>) {
        self.set_mark(sockets.mark());
        self.lock().sockets = Some(Arc::clone(sockets));
    }

    /// Sets the mark of packets from the extra sockets. Open ones get it at once, or are opened again with the next attempt.
    pub(crate) fn set_mark(&self, mark: u32) {
        self.with_extra(|extra| drop(extra.set_mark(mark)));
    }

    /// Queues a datagram for the reader, or counts and drops it. `socket` received it, unless it was the port.
    pub(crate) fn push(&self, path: Path, socket: Option<u16>, payload: &[u8]) {
        let mut state = self.lock();
        let State { reader, stats, .. } = &mut *state;
        let Some(reader) = reader else {
            stats.dropped_without_reader = stats.dropped_without_reader.saturating_add(1);
            return;
        };
        let bytes = reader.bytes.saturating_add(payload.len());
        if reader.queue.len() >= MAX_QUEUED || bytes > MAX_QUEUED_BYTES {
            stats.dropped_queue_full = stats.dropped_queue_full.saturating_add(1);
            return;
        }
        reader.wake();
        stats.queued = stats.queued.saturating_add(1);
        reader.bytes = bytes;
        reader.queue.push_back(PathDatagram {
            local: path.local,
            remote: path.remote,
            socket,
            payload: payload.to_vec(),
        });
    }

    /// Tells the reader of peers that have not answered.
    pub(crate) fn push_unanswered(&self, peers: Vec<PublicKey>) {
        if peers.is_empty() {
            return;
        }
        if let Some(reader) = &mut self.lock().reader {
            reader.wake();
            reader.unanswered.extend(peers);
        }
    }

    /// Addresses to which packets for a peer go as well, by peer; `None` if they have not changed since the last call.
    pub(crate) fn take_both_ways(&self) -> Option<BTreeMap<PublicKey, SocketAddr>> {
        let is_changed = self.both_ways_changed.swap(false, Ordering::Acquire);
        is_changed.then(|| self.lock().both_ways.clone())
    }

    /// Adds to the counters.
    pub(crate) fn count_copies(&self, copies: Copies) {
        if copies != Copies::default() {
            let stats = &mut self.lock().stats;
            stats.sent_both_ways = stats.sent_both_ways.saturating_add(copies.sent);
            stats.held_back = stats.held_back.saturating_add(copies.held_back);
        }
    }

    /// The counters since the start.
    pub(crate) fn stats(&self) -> PathSocketStats {
        self.lock().stats
    }
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn path() -> Path {
        Path::to("192.0.2.1:7".parse().unwrap())
    }

    fn is_readable(socket: &PathSocket) -> bool {
        poll(&mut [PollFd::new(socket.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO).unwrap() == 1
    }

    #[test]
    fn datagrams_without_a_reader_are_counted() {
        let port = Arc::new(PathPort::default());
        port.push(path(), None, b"early");
        let socket = port.open().unwrap().unwrap();
        assert!(port.open().unwrap().is_none(), "one reader at a time");
        assert_eq!((socket.try_receive(), is_readable(&socket)), (None, false));
        port.push(path(), None, b"heard");
        assert_eq!(socket.try_receive().unwrap().payload, b"heard");
        port.push(path(), None, b"left behind");
        drop(socket);
        port.push(path(), None, b"late");
        let expected = PathSocketStats { queued: 2, dropped_without_reader: 2, ..PathSocketStats::default() };
        assert_eq!(port.stats(), expected);
        let next = port.open().unwrap().unwrap();
        assert_eq!((next.try_receive(), is_readable(&next)), (None, false), "the queue went with its reader");
    }

    #[test]
    fn the_queue_is_bounded_in_datagrams_and_in_bytes_and_counts_what_it_drops() {
        let port = Arc::new(PathPort::default());
        let socket = port.open().unwrap().unwrap();
        (0..=MAX_QUEUED).for_each(|number| port.push(path(), None, &number.to_be_bytes()));
        assert_eq!(port.stats().dropped_queue_full, 1);
        for number in 0..MAX_QUEUED {
            assert!(is_readable(&socket));
            assert_eq!(socket.try_receive().unwrap().payload, number.to_be_bytes());
        }
        assert!(!is_readable(&socket) && socket.try_receive().is_none());
        for _ in 0..5 {
            port.push(path(), None, &vec![0; 60_000]);
        }
        assert_eq!(port.stats().dropped_queue_full, 2);
        assert_eq!(std::iter::from_fn(|| socket.try_receive()).count(), 4);
        port.push(path(), None, b"room again");
        assert!(is_readable(&socket));
    }

    #[test]
    fn peers_that_have_not_answered_wake_the_reader_once() {
        let port = Arc::new(PathPort::default());
        port.push_unanswered(vec![PublicKey([1; 32])]);
        let socket = port.open().unwrap().unwrap();
        port.push_unanswered(Vec::new());
        assert!(!is_readable(&socket));
        port.push_unanswered(vec![PublicKey([1; 32]), PublicKey([2; 32])]);
        port.push(path(), None, b"both");
        port.push_unanswered(vec![PublicKey([1; 32])]);
        assert!(socket.try_receive().is_some() && is_readable(&socket));
        assert_eq!(socket.take_unanswered().len(), 2);
        assert!(!is_readable(&socket) && socket.take_unanswered().is_empty());
    }

    #[test]
    fn sending_needs_a_port() {
        let socket = Arc::new(PathPort::default()).open().unwrap().unwrap();
        let error = socket.send(None, "192.0.2.1:7".parse().unwrap(), b"x").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotConnected);
    }
}

//! The new process's side.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddrV4;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path as FilePath;
use std::time::{Duration, Instant};

use fairlead_keys::PublicKey;

use super::frame::{self, Frame, Offer, PeerSnapshot};
use super::link::{Link, MAX_MESSAGE_LENGTH, Received};
use crate::udp::Path;

/// Longest time to wait for the offer of the old process: its loop sends it at once.
const OFFER_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time for handshakes: then the new process reads the TUN without those peers that have not answered. A peer that does not answer
/// now was perhaps reachable for the old process, but will not be much longer.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of messages that wait until the connection has room: with the kernel's defaults it holds ten (`net.unix.max_dgram_qlen`).
const MAX_WAITING: usize = 8 << 20;
/// Time without a datagram of an old session after which the old process may end.
const DRAIN_TIME: Duration = Duration::from_secs(1);
/// Longest time in which the old process decrypts what still comes. A peer that is itself handed over encrypts with its old sessions until
/// it has one with each of its peers, or [`HANDSHAKE_TIMEOUT`] has passed there.
const MAX_DRAIN_TIME: Duration = Duration::from_secs(10);

/// A takeover in progress.
pub(crate) struct Takeover {
    link: Link,
    /// Messages that the connection had no room for, in order, and their bytes.
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: usize,
    takes_datagrams: bool,
    port: u16,
    sockets: Vec<OwnedFd>,
    /// Sockets that are kept for peers, by their endpoints.
    kept: Vec<(SocketAddrV4, OwnedFd)>,
    /// Peers with which the old process has sessions.
    peers: Vec<PeerSnapshot>,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The old process does everything.
    Connected,
    /// This process reads the sockets, the old one the TUN.
    Handshaking { until: Instant },
    /// This process reads both, and the old one decrypts what comes of its sessions: `until` then, or later, but no later than `latest`.
    Draining { until: Instant, latest: Instant },
}

impl Takeover {
    /// Connects to the process that hands over at `path` and returns its TUN, and whether that has headers, with the takeover; `None` if
    /// none listens.
    ///
    /// # Errors
    /// It does not answer, or with another version.
    pub(crate) fn connect(path: &FilePath) -> io::Result<Option<((OwnedFd, bool), Self)>> {
        let link = match Link::connect(path, OFFER_TIMEOUT) {
            Ok(link) => link,
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let mut buffer = vec![0; MAX_MESSAGE_LENGTH];
        let Received::Message(length, descriptors) = link.receive(&mut buffer)? else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "the offer has another version");
        let Some(Frame::Offer(Offer { port, has_header, takes_datagrams, kept, peers })) =
            frame::read(buffer.get(..length).unwrap_or_default())
        else {
            return Err(invalid());
        };
        link.set_nonblocking()?;
        let mut sockets = descriptors;
        let others = sockets.len().checked_sub(kept.len()).ok_or_else(invalid)?;
        let kept = kept.into_iter().zip(sockets.split_off(others)).collect();
        let mut descriptors = sockets.into_iter();
        let tun = descriptors.next().ok_or_else(invalid)?;
        let takeover = Self {
            link,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            takes_datagrams,
            port,
            sockets: descriptors.collect(),
            kept,
            peers,
            phase: Phase::Connected,
        };
        Ok(Some(((tun, has_header), takeover)))
    }

    /// The peers with which the old process has sessions.
    pub(crate) fn peers(&self) -> &[PeerSnapshot] {
        &self.peers
    }

    /// The sockets that the old process has kept for peers.
    pub(crate) fn take_kept(&mut self) -> Vec<(SocketAddrV4, OwnedFd)> {
        std::mem::take(&mut self.kept)
    }

    /// Whether this process reads the sockets.
    pub(crate) fn reads_network(&self) -> bool {
        self.phase != Phase::Connected
    }

    /// Readable when the old process has gone: it sends nothing after its offer.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
    }

    /// Whether messages wait until the connection has room.
    pub(crate) fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether this process reads the TUN.
    pub(crate) fn reads_tunnel(&self) -> bool {
        matches!(self.phase, Phase::Draining { .. })
    }

    /// The old process's sockets, if they have this port.
    pub(crate) fn take_sockets(&mut self, port: u16) -> Option<Vec<OwnedFd>> {
        // Another port may be refused, and this one asked for then.
        (port == self.port && !self.sockets.is_empty()).then(|| std::mem::take(&mut self.sockets))
    }

    /// Sockets are open: `taken` if they are the old process's.
    ///
    /// # Errors
    /// The old process has gone.
    pub(crate) fn sockets_opened(&mut self, taken: bool, now: Instant) -> io::Result<()> {
        if self.phase != Phase::Connected {
            return Ok(());
        }
        if taken {
            self.send(&Frame::TakeNetwork)?;
            self.phase = Phase::Handshaking { until: later(now, HANDSHAKE_TIMEOUT) };
            return Ok(());
        }
        // On another port the old process's sessions are useless, and so are its sockets.
        self.sockets.clear();
        self.take_tunnel(now)
    }

    /// Enters the next phase when it is due; false when the takeover is complete. `is_ready` tells whether a peer has a
    /// session, or needs none.
    ///
    /// # Errors
    /// The old process has gone.
    pub(crate) fn advance(
        &mut self,
        now: Instant,
        is_ready: impl Fn(&PublicKey) -> bool,
    ) -> io::Result<bool> {
        match self.phase {
            Phase::Handshaking { until }
                if now >= until || self.peers.iter().all(|peer| is_ready(&peer.key)) =>
            {
                self.take_tunnel(now)?;
            }
            Phase::Draining { until, .. } => return Ok(now < until),
            Phase::Connected | Phase::Handshaking { .. } => {}
        }
        Ok(true)
    }

    fn take_tunnel(&mut self, now: Instant) -> io::Result<()> {
        self.send(&Frame::TakeTunnel)?;
        self.phase = Phase::Draining { until: later(now, DRAIN_TIME), latest: later(now, MAX_DRAIN_TIME) };
        Ok(())
    }

    /// Forwards datagrams of other sessions to the old process; all but the last are `length` bytes long. Those that come when too many
    /// wait are lost.
    ///
    /// # Errors
    /// It has gone.
    pub(crate) fn forward(
        &mut self,
        path: Path,
        length: usize,
        datagrams: &[u8],
        now: Instant,
    ) -> io::Result<()> {
        if let Phase::Draining { until, latest } = &mut self.phase {
            *until = later(now, DRAIN_TIME).min(*latest);
        }
        if self.waiting_bytes.saturating_add(datagrams.len()) > MAX_WAITING {
            return Ok(());
        }
        match u16::try_from(length) {
            Ok(length) if self.takes_datagrams && datagrams.len() > usize::from(length) => {
                self.send(&Frame::Datagrams(path, length, datagrams))
            }
            _ => {
                let mut each = datagrams.chunks(length.max(1));
                each.try_for_each(|datagram| self.send(&Frame::Datagram(path, datagram)))
            }
        }
    }

    /// Sends a message, now or, behind those that wait, when there is room.
    fn send(&mut self, frame: &Frame<'_>) -> io::Result<()> {
        let mut message = Vec::new();
        frame.write(&mut message);
        self.waiting_bytes = self.waiting_bytes.saturating_add(message.len());
        self.waiting.push_back(message);
        self.flush()
    }

    /// Sends what waits, as far as there is room.
    ///
    /// # Errors
    /// The old process has gone.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        while let Some(message) = self.waiting.front() {
            match self.link.send(message, &[]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                result => result?,
            }
            self.waiting_bytes = self.waiting_bytes.saturating_sub(message.len());
            self.waiting.pop_front();
        }
        Ok(())
    }
}

fn later(now: Instant, by: Duration) -> Instant {
    now.checked_add(by).unwrap_or(now)
}

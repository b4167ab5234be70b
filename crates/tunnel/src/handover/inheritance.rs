//! The new process's side.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path as FilePath;
use std::time::{Duration, Instant};

use fairlead_api::wireguard::PublicKey;

use super::frame::{self, Acquaintance, Frame, Welcome};
use super::link::{LONGEST, Link, Received};
use crate::udp::Path;

/// How long the old process may take to answer: its loop does so at once.
const GREETING: Duration = Duration::from_secs(2);
/// How long handshakes may take before the TUN is taken without them. A peer that does not answer now was perhaps reached
/// by the old process, but will not be much longer.
const HANDSHAKES: Duration = Duration::from_secs(5);
/// How long datagrams of old sessions may be on their way.
const LINGER: Duration = Duration::from_secs(1);

/// What is left to be taken over from the old process.
pub(crate) struct Inheritance {
    link: Link,
    port: u16,
    sockets: Vec<OwnedFd>,
    /// Those that the old process has sessions with.
    peers: Vec<Acquaintance>,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The old process does everything.
    Arriving,
    /// The sockets are ours, the TUN is the old one's.
    Greeting { until: Instant },
    /// Both are ours.
    Leaving { until: Instant },
}

impl Inheritance {
    /// Asks whoever retires at `path` for the TUN and the rest; `None` when nobody does.
    ///
    /// # Errors
    /// It does not answer, or not in words of this version.
    pub(crate) fn ask(path: &FilePath) -> io::Result<Option<(OwnedFd, Self)>> {
        let link = match Link::connect(path, GREETING) {
            Ok(link) => link,
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let mut buffer = vec![0; LONGEST];
        let Received::Message(length, descriptors) = link.receive(&mut buffer)? else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let strange = || io::Error::new(io::ErrorKind::InvalidData, "a greeting of another version");
        let Some(Frame::Welcome(Welcome { port, peers })) =
            frame::read(buffer.get(..length).unwrap_or_default())
        else {
            return Err(strange());
        };
        link.stop_waiting()?;
        let mut descriptors = descriptors.into_iter();
        let tun = descriptors.next().ok_or_else(strange)?;
        Ok(Some((tun, Self { link, port, sockets: descriptors.collect(), peers, phase: Phase::Arriving })))
    }

    /// Peers that the old process has sessions with.
    pub(crate) fn peers(&self) -> &[Acquaintance] {
        &self.peers
    }

    /// Readable when the old process has gone: it says nothing any more.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
    }

    /// Whether the TUN is ours to read.
    pub(crate) fn reads_tunnel(&self) -> bool {
        matches!(self.phase, Phase::Leaving { .. })
    }

    /// The sockets, if they have this port.
    pub(crate) fn take_sockets(&mut self, port: u16) -> Option<Vec<OwnedFd>> {
        let sockets = std::mem::take(&mut self.sockets);
        (port == self.port && !sockets.is_empty()).then_some(sockets)
    }

    /// Sockets are open: `inherited` if they were the old process's.
    ///
    /// # Errors
    /// The old process has gone.
    pub(crate) fn arrive(&mut self, inherited: bool, now: Instant) -> io::Result<()> {
        if self.phase != Phase::Arriving {
            return Ok(());
        }
        if inherited {
            self.link.send(&Frame::TakeNetwork, &[])?;
            self.phase = Phase::Greeting { until: later(now, HANDSHAKES) };
            return Ok(());
        }
        // With another port nothing that the old process agreed on is worth anything.
        self.take_tunnel(now)
    }

    /// Moves on when it is time to; false when everything is ours. `is_settled` says of a peer that there is a session,
    /// or that none is wanted.
    ///
    /// # Errors
    /// The old process has gone.
    pub(crate) fn step(&mut self, now: Instant, is_settled: impl Fn(&PublicKey) -> bool) -> io::Result<bool> {
        match self.phase {
            Phase::Greeting { until }
                if now >= until || self.peers.iter().all(|peer| is_settled(&peer.key)) =>
            {
                self.take_tunnel(now)?;
            }
            Phase::Leaving { until } => return Ok(now < until),
            Phase::Arriving | Phase::Greeting { .. } => {}
        }
        Ok(true)
    }

    fn take_tunnel(&mut self, now: Instant) -> io::Result<()> {
        self.link.send(&Frame::TakeTunnel, &[])?;
        self.phase = Phase::Leaving { until: later(now, LINGER) };
        Ok(())
    }

    /// Gives the old process a datagram of a session that is not ours.
    ///
    /// # Errors
    /// It has gone. That it does not keep up is none: the datagram is lost.
    pub(crate) fn pass_on(&self, path: Path, datagram: &[u8]) -> io::Result<()> {
        match self.link.send(&Frame::Datagram(path, datagram), &[]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            other => other,
        }
    }
}

fn later(now: Instant, by: Duration) -> Instant {
    now.checked_add(by).unwrap_or(now)
}

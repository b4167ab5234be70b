//! The packet loop's part of a hand-over.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fairlead_wireguard::Now;

use super::packets::{MAX_READS, write_packets};
use super::{Flow, Pump};
use crate::Error;
use crate::handover::{HandoverServer, MAX_KEPT, Offer, Request, Takeover};
use crate::tun::Tun;
use crate::udp::{Received, Sockets};

/// Time between checks whether the next phase of a takeover is due.
const PHASE_INTERVAL: Duration = Duration::from_millis(250);

/// The other process that works on the same interface during a hand-over.
pub(super) enum Handover {
    None,
    /// This process hands over.
    Server(HandoverServer),
    /// This process takes over.
    Takeover(Takeover),
}

impl Handover {
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::None => None,
            Self::Server(server) => Some(server.descriptor()),
            Self::Takeover(takeover) => Some(takeover.descriptor()),
        }
    }

    /// Whether something waits until the connection to the other process has room.
    pub(super) fn waits(&self) -> bool {
        match self {
            Self::None | Self::Server(_) => false,
            Self::Takeover(takeover) => takeover.waits(),
        }
    }

    /// Time between checks whether the next phase is due; `None` if only a message begins it.
    pub(super) fn poll_interval(&self) -> Option<Duration> {
        match self {
            Self::None | Self::Server(_) => None,
            Self::Takeover(_) => Some(PHASE_INTERVAL),
        }
    }

    /// Whether this process reads the TUN.
    pub(super) fn reads_tunnel(&self) -> bool {
        match self {
            Self::None => true,
            Self::Server(server) => server.reads_tunnel(),
            Self::Takeover(takeover) => takeover.reads_tunnel(),
        }
    }

    /// Whether this process reads the sockets.
    pub(super) fn reads_network(&self) -> bool {
        match self {
            Self::None => true,
            Self::Server(server) => server.reads_network(),
            Self::Takeover(takeover) => takeover.reads_network(),
        }
    }
}

impl Pump {
    /// Opens the port: with the sockets of the old process if they have it.
    pub(super) fn open_port(&mut self, port: u16, mark: u32) -> Result<(), Error> {
        let taken = match &mut self.handover {
            Handover::Takeover(takeover) => takeover.take_sockets(port),
            Handover::None | Handover::Server(_) => None,
        };
        let took_sockets = taken.is_some();
        let sockets = Arc::new(match taken {
            Some(descriptors) => Sockets::adopt(descriptors, port, mark)?,
            None => Sockets::open(port, mark)?,
        });
        self.path_port.set_sockets(&sockets);
        if !took_sockets {
            sockets.join_received();
        }
        self.sockets = Some(sockets);
        if let Handover::Takeover(takeover) = &mut self.handover
            && let Err(error) = takeover.sockets_opened(took_sockets, self.clock.now().instant)
        {
            self.abandon_takeover(&error);
        }
        Ok(())
    }

    pub(super) fn serve_handover(&mut self, path: PathBuf) -> Result<(), Error> {
        let server = HandoverServer::listen(&path).map_err(|source| Error::Handover { path, source })?;
        self.handover = Handover::Server(server);
        Ok(())
    }

    /// Continues without the old process.
    fn abandon_takeover(&mut self, error: &io::Error) {
        tracing::warn!(
            interface = %self.name, %error, "the old process ended before the hand-over finished: continuing alone"
        );
        self.continue_alone();
    }

    /// No other process reads the sockets from now on: one that does not expect joined datagrams could not read them.
    fn continue_alone(&mut self) {
        self.handover = Handover::None;
        if let Some(sockets) = &self.sockets {
            sockets.join_received();
        }
    }

    /// Enters the next phase of a takeover when it is due.
    pub(super) fn advance_takeover(&mut self, now: Now) {
        let Handover::Takeover(takeover) = &mut self.handover else { return };
        // The port may be set before all else; the peers are known with the key, and none is ready before.
        let is_configured = self.engine.private_key().is_some();
        let is_ready = |key: &_| is_configured && !self.engine.awaits_session(key, now.instant);
        match takeover.flush().and_then(|()| takeover.advance(now.instant, is_ready)) {
            Ok(true) => {}
            Ok(false) => {
                tracing::info!(interface = %self.name, "the hand-over from the old process is complete");
                // A peer that is configured from now on may have moved since.
                self.engine.set_peer_snapshots(&[]);
                self.continue_alone();
            }
            Err(error) => self.abandon_takeover(&error),
        }
    }

    /// Reads from the connection to the other process.
    pub(super) fn poll_handover(&mut self, now: Now) -> Flow {
        match &mut self.handover {
            Handover::None => {}
            // The old process sends nothing after its offer: it has gone.
            Handover::Takeover(_) => self.abandon_takeover(&io::ErrorKind::ConnectionReset.into()),
            Handover::Server(server) => {
                for _ in 0..MAX_READS {
                    match server.next_request() {
                        Some(Request::Connected) => {
                            let sockets = self.sockets.as_deref();
                            let port = sockets.map_or(0, Sockets::port);
                            let has_header = self.tun.as_ref().is_some_and(|tun| tun.offloads().has_header());
                            let tun = self.tun.iter().map(Tun::as_fd);
                            let mut descriptors: Vec<_> =
                                tun.chain(sockets.into_iter().flat_map(Sockets::descriptors)).collect();
                            let beside = self.path_port.kept_sockets(MAX_KEPT);
                            descriptors.extend(beside.iter().map(|(_, socket)| socket.as_fd()));
                            let kept = beside.iter().map(|(remote, _)| *remote).collect();
                            let peers = self.engine.peer_snapshots(now.instant);
                            let offer = Offer { port, has_header, takes_datagrams: true, kept, peers };
                            server.send_offer(offer, &descriptors);
                        }
                        Some(Request::Datagrams(path, length, datagrams)) => {
                            let mut bytes = datagrams.to_vec();
                            let mut received = Received::of(path, length, &mut bytes);
                            self.engine.receive(&mut received, now, &mut self.out, &mut self.packets);
                            write_packets(self.tun.as_ref(), &mut self.merger, &mut self.packets, &mut bytes);
                        }
                        Some(Request::Finished) => return Flow::End,
                        None => break,
                    }
                }
            }
        }
        Flow::Continue
    }
}

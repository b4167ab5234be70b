//! Behind one of two symmetric NATs: which ports the NAT gives to new mappings, as a STUN server sees them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use fairlead_wire::probe::PortSequence;
use fairlead_wire::stun::TransactionId;
use rand::RngExt;
use rand::rngs::StdRng;

use super::limits::PACE;
use super::ports::predict;

/// Sockets that ask, each of which gets a mapping of its own.
pub(super) const SOCKETS: u16 = 8;
/// Time to wait for answers.
const WAIT: Duration = Duration::from_millis(600);

/// The requests to a STUN server.
#[derive(Debug)]
pub(super) struct Measuring {
    since: Duration,
    /// `None` where no server answers: then nothing can be predicted.
    server: Option<SocketAddr>,
    has_sent: bool,
    pending: BTreeMap<TransactionId, u16>,
    /// The port of each socket's mapping.
    observed: BTreeMap<u16, u16>,
    pub(super) their: PeerPorts,
}

/// Ports that the peer's NAT gives out next, as the peer has told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PeerPorts {
    /// The peer has told nothing yet.
    NotTold,
    /// `None` if they follow no sequence.
    Told(Option<PortSequence>),
}

impl Measuring {
    pub(super) fn new(now: Duration, server: Option<SocketAddr>, their: PeerPorts) -> Self {
        Self {
            since: now,
            server,
            has_sent: false,
            pending: BTreeMap::new(),
            observed: BTreeMap::new(),
            their,
        }
    }

    /// The requests to send now: socket, server and transaction. They leave in the order of the sockets.
    pub(super) fn due(
        &mut self,
        now: Duration,
        random: &mut StdRng,
    ) -> Vec<(u16, SocketAddr, TransactionId)> {
        let Some(server) = self.server.filter(|_| !self.has_sent && now >= self.next()) else {
            return Vec::new();
        };
        self.has_sent = true;
        let sent: Vec<_> =
            (0..SOCKETS).map(|socket| (socket, server, TransactionId(random.random()))).collect();
        self.pending = sent.iter().map(|(socket, _, transaction)| (*transaction, *socket)).collect();
        sent
    }

    /// Takes an answer that names the mapping of a socket. Whether it was asked for.
    pub(super) fn handle_answer(
        &mut self,
        socket: u16,
        from: SocketAddr,
        transaction: TransactionId,
        mapped: Option<SocketAddr>,
    ) -> bool {
        if self.server != Some(from) || self.pending.get(&transaction) != Some(&socket) {
            return false;
        }
        self.pending.remove(&transaction);
        self.observed.extend(mapped.map(|mapped| (socket, mapped.port())));
        true
    }

    /// Time at which something is due next. The shell opens the sockets after it has sent what waits, so they are used a moment later.
    pub(super) fn next(&self) -> Duration {
        let is_waiting = self.has_sent && !self.pending.is_empty();
        self.since.saturating_add(if is_waiting { WAIT } else { PACE })
    }

    /// No more answers are waited for.
    pub(super) fn is_over(&self, now: Duration) -> bool {
        self.server.is_none() || (self.has_sent && now >= self.next())
    }

    /// Ports that the NAT gives out next; `None` if they cannot be predicted.
    pub(super) fn prediction(&self) -> Option<PortSequence> {
        predict(&self.ports())
    }

    /// Ports of the mappings, in the order in which they were made.
    pub(super) fn ports(&self) -> Vec<u16> {
        self.observed.values().copied().collect()
    }
}

//! The attempt that runs, and how far it is.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use fairlead_keys::PublicKey;
use fairlead_wire::probe::{PortSequence, TransactionId};

use super::following::Following;
use super::listening::Listening;
use super::measuring::Measuring;
use super::record::BirthdaySide;
use super::searching::Searching;

/// The attempt that runs.
#[derive(Debug)]
pub(super) struct Attempt {
    pub(super) peer: PublicKey,
    pub(super) side: BirthdaySide,
    /// Ports that this node's NAT gives out next, as the peer is told; `None` if they cannot be predicted.
    pub(super) ports: Option<PortSequence>,
    /// The peer's endpoint, or the address of its NAT.
    pub(super) target: SocketAddr,
    pub(super) began: Duration,
    /// Time at which the peer is told next.
    pub(super) next_ask: Option<Duration>,
    /// Requests over the relay whose answers are waited for; the oldest make room.
    pub(super) asked: VecDeque<TransactionId>,
    pub(super) stage: Stage,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// The peer has not said yet that it takes part.
    Asking,
    /// Behind one of two symmetric NATs: ports are tried, and the peer chooses one.
    Following(Following),
    /// Behind the symmetric NAT: the sockets are open.
    Listening(Listening),
    /// Behind one of two symmetric NATs: a STUN server is asked which ports come next.
    Measuring(Measuring),
    /// Behind the port-restricted NAT, or one of two symmetric ones: ports are tried, and this node chooses one.
    Searching(Searching),
}

impl Attempt {
    /// The peer is told at once.
    pub(super) fn new(
        now: Duration,
        peer: PublicKey,
        side: BirthdaySide,
        target: SocketAddr,
        stage: Stage,
    ) -> Self {
        let next_ask = Some(now);
        let asked = VecDeque::new();
        Self { peer, side, ports: None, target, began: now, next_ask, asked, stage }
    }
}

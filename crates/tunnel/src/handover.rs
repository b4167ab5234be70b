//! Handing a running device to another process without losing a packet: for upgrades.
//!
//! The protocol library does not export session keys, so the new process establishes sessions of its own, and until it
//! has them both processes work. The old one listens ([`HandoverServer`]); the new one connects ([`Takeover`]) and
//! receives the TUN, the sockets, also those that are kept for peers, and the peers' endpoints. It reads the sockets first, initiates a handshake with each
//! peer, and forwards datagrams of sessions that are not its own; the old process decrypts them, and keeps encrypting the
//! packets of the TUN. When each peer has a new session the new process reads the TUN too. It closes the connection
//! when no datagram of the old process's sessions has come for a second: peers that are handed over at the same time still send some.
//!
//! If the new process ends before the hand-over finished, the old one does everything again; if the old one ends, the
//! new one continues alone.

mod frame;
mod link;
mod server;
mod takeover;

pub(crate) use frame::{Offer, PeerSnapshot};
pub(crate) use link::MAX_KEPT;
pub(crate) use server::{HandoverServer, Request};
pub(crate) use takeover::Takeover;

/// See [`crate::parse_handover_message`].
pub(crate) fn parse(bytes: &[u8]) -> Option<String> {
    frame::read(bytes).map(|frame| format!("{frame:?}"))
}

//! Handing a running device to another process without losing a packet: for upgrades.
//!
//! Session keys cannot leave the protocol library, so the new process makes sessions of its own, and until it has them
//! both work. The old process listens ([`Retirement`]), the new one connects ([`Inheritance`]) and gets the TUN, the
//! sockets and the peers' addresses. It reads the sockets first, shakes hands with all peers, and passes on datagrams of
//! sessions that are not its own; the old one decrypts them, and goes on encrypting what comes from the TUN. When every
//! peer has a new session the new process reads the TUN too, and a moment later lets the old one go.
//!
//! If the new process dies half-way, the old one does everything again; if the old one does, the new one goes on alone.

mod frame;
mod inheritance;
mod link;
mod retirement;

pub(crate) use frame::{Acquaintance, Welcome};
pub(crate) use inheritance::Inheritance;
pub(crate) use retirement::{Retirement, Work};

/// See [`crate::understand_handover_message`].
pub(crate) fn understand(bytes: &[u8]) -> Option<String> {
    frame::read(bytes).map(|frame| format!("{frame:?}"))
}

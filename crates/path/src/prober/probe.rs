//! Requests of a prober.

use std::net::SocketAddr;

use fairlead_wire::probe::TransactionId;

/// A request to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) to: SocketAddr,
    pub(crate) transaction: TransactionId,
    /// Asks the peer to try its paths as well.
    pub(crate) starts_round: bool,
    /// Asks the peer to start a handshake.
    pub(crate) wants_handshake: bool,
    /// The path has answered lately.
    pub(crate) is_proven: bool,
    /// Whether the probe goes over the relay in a round: it carries this node's own candidates.
    pub(crate) signals: bool,
    /// Least length in bytes.
    pub(crate) length: usize,
}

//! Connections by number, and what their clients have proved.

use fairlead_keys::PublicKey;

/// A registered connection. Numbers are never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub(super) u64);

/// Identity that a client has proved, and the token for which it is let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    /// Public key of the client.
    pub key: PublicKey,
    /// The run of the client.
    pub instance: [u8; 8],
    /// SHA-256 of the token it showed, if the relay asks for one.
    pub token: Option<[u8; 32]>,
}

/// Next step of the shell that writes to a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transmit {
    /// Nothing more, ever: close the connection.
    Close,
    /// Write the frames that were appended.
    Frames,
    /// Nothing until [`Relay::take_ready`](super::Relay::take_ready) names the link.
    Nothing,
}

/// A connection to another replica. Numbers are never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaLinkId(pub(super) u64);

/// Orders the registrations of one key at all replicas: the clock of the replica, then its ID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stamp {
    pub(super) clock: u64,
    pub(super) replica: [u8; 16],
}

//! What is to be sent.

use std::net::{IpAddr, SocketAddr};

/// A datagram to be sent from the WireGuard port, or from a socket of a birthday attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transmit {
    /// Its source address; the kernel chooses one when `None`.
    pub local: Option<IpAddr>,
    /// The socket of the birthday attempt, if it is to be one.
    pub socket: Option<u16>,
    /// Its destination.
    pub remote: SocketAddr,
    /// Its payload.
    pub payload: Vec<u8>,
}

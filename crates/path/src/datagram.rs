//! Datagrams on their way between the machines and the sockets of the shell.

use std::net::{IpAddr, SocketAddr};

/// A datagram to be sent from the WireGuard port, or from a socket of a birthday attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transmit {
    /// Source address; the kernel chooses one when `None`.
    pub local: Option<IpAddr>,
    /// The socket of the birthday attempt, if it is to be one.
    pub socket: Option<u16>,
    /// Destination address and port.
    pub remote: SocketAddr,
    /// UDP payload.
    pub payload: Vec<u8>,
}

/// Local end at which a datagram came in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    /// The address it was sent to, if the socket told.
    pub(crate) local: Option<IpAddr>,
    /// The socket of the birthday attempt, if it was one.
    pub(crate) socket: Option<u16>,
}

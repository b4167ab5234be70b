//! A relay as a way to a peer: its loopback port, and its UDP ports.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Path to a peer by way of a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelayPath {
    /// Address that stands for the peer: datagrams sent there go to the relay.
    pub endpoint: SocketAddr,
    /// Nothing else is used.
    pub is_only: bool,
    /// Time for which a peer that does not answer probes is tried directly, before it is tried by way of the relay.
    pub handshake_timeout: Duration,
    /// Longest time between attempts to find a direct path while traffic is relayed.
    pub direct_retry: Duration,
}

/// The UDP ports that a relay may allocate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelayPortRange {
    /// The relay's address.
    pub ip: IpAddr,
    /// The first port.
    pub first: u16,
    /// The last port.
    pub last: u16,
}

impl RelayPortRange {
    /// Whether an endpoint is one of the ports.
    pub fn contains(&self, endpoint: SocketAddr) -> bool {
        endpoint.ip().to_canonical() == self.ip && (self.first..=self.last).contains(&endpoint.port())
    }
}

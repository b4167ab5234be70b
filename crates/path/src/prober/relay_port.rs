//! The relay's UDP port as a path: better than its loopback port, by which datagrams go over TCP.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::{Path, Prober};
use crate::candidates::{Candidate, Source};

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

impl Prober {
    /// Sets which endpoints are ports of the relay: none of them is a direct path.
    pub(crate) fn set_relay_ports(&mut self, ports: Option<RelayPortRange>) {
        self.relay_ports = ports;
        let is_port = |address| ports.is_some_and(|ports| ports.contains(address));
        self.paths.retain(|path| path.is_relay() || !is_port(path.candidate.address));
    }

    pub(super) fn is_port_of_relay(&self, endpoint: SocketAddr) -> bool {
        self.relay_ports.is_some_and(|ports| ports.contains(endpoint))
    }

    /// The relay passes datagrams between this port of it and the peer, or does so no more.
    pub(crate) fn set_relay_port(&mut self, now: Duration, address: Option<SocketAddr>) {
        let before = self.paths.iter().find(|path| path.is_relay_port()).map(|path| path.candidate.address);
        if before == address {
            return;
        }
        if before.is_some() && before == self.current {
            self.fail_current(now);
        }
        self.paths.retain(|path| !path.is_relay_port() && Some(path.candidate.address) != address);
        if let Some(address) = address {
            self.paths.push(Path::new(Candidate { address, source: Source::Relay }, now));
        }
    }

    /// Whether packets to the peer go by way of the relay.
    pub(crate) fn uses_relay(&self) -> bool {
        let is_port = self.current.is_some_and(|endpoint| self.is_port_of_relay(endpoint));
        self.session.is_up && (is_port || self.current_path().is_some_and(Path::is_relay))
    }

    /// Whether the path in use has left the last request unanswered.
    pub(crate) fn misses_answers(&self) -> bool {
        self.missed > 0
    }
}

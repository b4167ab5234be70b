//! The relay's UDP port as a path: better than its loopback port, by which datagrams go over TCP.

use std::net::SocketAddr;
use std::time::Duration;

use super::{Path, Prober};
use crate::candidates::{Candidate, Source};
use crate::relay_path::RelayPortRange;

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

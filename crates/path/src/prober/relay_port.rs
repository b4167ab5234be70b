//! The relay's UDP port as a path: better than its loopback port, by which datagrams go over TCP.

use std::net::SocketAddr;
use std::time::Duration;

use super::Prober;
use super::path::Path;
use crate::candidates::{Candidate, Source};
use crate::relay_path::RelayPortRange;

impl Prober {
    /// Sets which endpoints are ports of the relay: none of them is a direct path.
    pub(crate) fn set_relay_ports(&mut self, ports: Option<RelayPortRange>) {
        self.network.relay_ports = ports;
        let is_port = |address| ports.is_some_and(|ports| ports.contains(address));
        self.paths.all.retain(|path| path.is_relay() || !is_port(path.candidate.address));
    }

    /// The relay passes datagrams between this port of it and the peer, or does so no more.
    pub(crate) fn set_relay_port(&mut self, now: Duration, address: Option<SocketAddr>) {
        let before = self.paths.iter().find(|path| path.is_relay_port()).map(|path| path.candidate.address);
        if before == address {
            return;
        }
        if before.is_some() && before == self.paths.current {
            self.fail_current(now);
        }
        self.paths.all.retain(|path| !path.is_relay_port() && Some(path.candidate.address) != address);
        if let Some(address) = address {
            self.paths.all.push(Path::new(Candidate { address, source: Source::Relay }, now));
        }
    }

    /// Whether packets to the peer go by way of the relay.
    pub(crate) fn uses_relay(&self) -> bool {
        let is_port = self.paths.current.is_some_and(|endpoint| self.network.is_port_of_relay(endpoint));
        self.traffic.session.is_up && (is_port || self.paths.in_use().is_some_and(Path::is_relay))
    }

    /// Whether the path in use has left the last request unanswered.
    pub(crate) fn misses_answers(&self) -> bool {
        self.checks.missed > 0
    }
}

//! Network of this node, by which it is decided which endpoints may be used: its relay, and its NAT64.

use std::net::SocketAddr;
use std::sync::Arc;

use fairlead_address::{Nat64Prefix, is_reachable, without_nat64};

use crate::candidates::Source;
use crate::relay_path::{RelayPath, RelayPortRange};

/// Relay and NAT64 of this node's network.
#[derive(Debug, Default)]
pub(super) struct Network {
    pub(super) relay: Option<RelayPath>,
    pub(super) relay_ports: Option<RelayPortRange>,
    pub(super) nat64: Arc<[Nat64Prefix]>,
}

impl Network {
    pub(super) fn is_relay_only(&self) -> bool {
        self.relay.is_some_and(|relay| relay.is_only)
    }

    pub(super) fn is_port_of_relay(&self, endpoint: SocketAddr) -> bool {
        self.relay_ports.is_some_and(|ports| ports.contains(endpoint))
    }

    /// Whether an endpoint that no source names may be used. What a NAT64 makes of it must be reachable too.
    pub(super) fn may_use(&self, endpoint: SocketAddr) -> bool {
        let original = without_nat64(&self.nat64, endpoint);
        let is_reachable = is_reachable(endpoint.ip()) && is_reachable(original.ip());
        is_reachable && !self.is_port_of_relay(endpoint) && !self.is_relay_only()
    }

    /// Source of an endpoint that no source names.
    pub(super) fn source_of(&self, endpoint: SocketAddr) -> Source {
        if without_nat64(&self.nat64, endpoint) == endpoint { Source::Roamed } else { Source::Nat64 }
    }
}

//! Endpoints that no source names, and those of a NAT64 among them.

use std::net::SocketAddr;
use std::sync::Arc;

use fairlead_address::{Nat64Prefix, is_reachable, without_nat64};

use super::Prober;
use crate::candidates::Source;

impl Prober {
    /// Sets the prefixes of the NAT64 of this node's network.
    pub(crate) fn set_nat64(&mut self, prefixes: &Arc<[Nat64Prefix]>) {
        self.nat64 = Arc::clone(prefixes);
    }

    /// Whether an endpoint that no source names may be used. What a NAT64 makes of it must be reachable too.
    pub(super) fn may_use(&self, endpoint: SocketAddr) -> bool {
        let original = without_nat64(&self.nat64, endpoint);
        let is_reachable = is_reachable(endpoint.ip()) && is_reachable(original.ip());
        is_reachable && !self.is_port_of_relay(endpoint) && !self.is_relay_only()
    }

    pub(super) fn source_of(&self, endpoint: SocketAddr) -> Source {
        if without_nat64(&self.nat64, endpoint) == endpoint { Source::Roamed } else { Source::Nat64 }
    }
}

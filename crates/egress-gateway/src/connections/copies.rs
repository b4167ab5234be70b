//! Connections of the kernel that are copies of other gateways' connections (`sync`). Pure.

use std::collections::BTreeSet;
use std::net::IpAddr;

use fairlead_netlink::conntrack::Flow;

use crate::source_addresses::holds::announced::Floating;

/// Addresses that the connections of other gateways are translated to.
#[derive(Debug, Default)]
pub(super) struct Copies(BTreeSet<IpAddr>);

/// Change of the source addresses that the gateway holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// The gateway has taken an address, with its connections.
    Taken,
    /// Others have addresses that it held, or that are new.
    Left,
}

impl Copies {
    /// The addresses.
    pub(super) fn addresses(&self) -> &BTreeSet<IpAddr> {
        &self.0
    }

    /// Whether it is a connection of another gateway.
    pub(super) fn has(&self, flow: &Flow) -> bool {
        self.0.contains(&flow.reply.destination)
    }

    /// The gateway holds these addresses now. An address that has left the Egress meanwhile stays until [`Self::keep`]: its copies are
    /// deleted after that. `None` if nothing has changed.
    pub(super) fn follow(&mut self, floating: &Floating) -> Option<Change> {
        let before = self.0.len();
        self.0.retain(|address| !floating.held.contains(address));
        let is_any_taken = self.0.len() < before;
        let left = self.0.len();
        self.0.extend(&floating.not_held);
        match (is_any_taken, self.0.len() > left) {
            (true, _) => Some(Change::Taken),
            (false, true) => Some(Change::Left),
            (false, false) => None,
        }
    }

    /// Forgets addresses that have left the Egress and of which the kernel has no connection: it has these.
    pub(super) fn keep(&mut self, flows: &[Flow], floating: &Floating) {
        let used: BTreeSet<IpAddr> = flows.iter().map(|flow| flow.reply.destination).collect();
        self.0.retain(|address| used.contains(address) || floating.not_held.contains(address));
    }
}

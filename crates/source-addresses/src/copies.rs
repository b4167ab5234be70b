//! Copies of tracked connections: the gateway that holds a source address tells all others which connections are translated to it, so that
//! these go on at the one that takes the address.
//!
//! * [`outgoing`]: the holder's part, from notifications of its kernel to messages.
//! * [`incoming`]: that of the others, from messages to changes of their kernels, with all that is checked.
//! * [`copied`]: what of a connection is copied.
//!
//! Connections of TCP are copied from their third packet until both ends have closed them, those of UDP and ICMP from their first packet.
//! Messages say of each connection only the last. A full copy follows each connection between gateways, each message that a member could
//! not take, and comes every minute; after it, a member deletes what was not in it.

pub mod copied;
pub mod incoming;
pub mod outgoing;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::IpAddr;

/// A slot of source addresses, as the hold protocol sees it: copies go by it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Slot {
    /// Addresses of the slot, of `status.sourceAddresses`: at most one of each family.
    pub addresses: Vec<IpAddr>,
    /// The greatest term that this gateway knows of.
    pub term: u64,
    /// The pod that the Lease names in this term.
    pub holder: Option<String>,
    /// Whether this gateway holds it.
    pub is_held: bool,
}

/// All slots, by their numbers.
pub type Slots = BTreeMap<u32, Slot>;

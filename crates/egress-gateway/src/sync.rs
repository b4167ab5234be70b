//! Copies of tracked connections: the gateway that holds a source address tells all others which connections are translated to it, so that
//! these go on at the one that takes the address.
//!
//! * [`outgoing`]: the holder's part, from notifications of its kernel to messages. [`incoming`]: that of the others, from messages to changes
//!   of their kernels, with all that is checked. Both without I/O. [`copied`]: what of a connection is copied. [`worker`]: the task, with its I/O.
//!
//! Connections of TCP are copied from their third packet until both ends have closed them, those of UDP and ICMP from their first packet.
//! Messages are sent every [`INTERVAL`](worker::INTERVAL) and say of each connection only the last. A full copy follows each connection
//! between gateways, each message that a member could not take, and comes every minute; after it, a member deletes what was not in it.

pub mod copied;
pub mod incoming;
mod kernel;
mod metrics;
pub mod outgoing;
pub(crate) mod start;
#[cfg(test)]
mod tests;
pub mod worker;

pub use incoming::Addresses;
pub use metrics::SyncMetrics;
pub use worker::Copier;

//! The relay: it passes WireGuard packets, which it cannot read, between nodes that do not reach each other.
//!
//! * [`core`] decides, without I/O: which connection gets a datagram, what is dropped, who is told what.
//! * [`proof`] shows that a client has the private key of the WireGuard key it registers.
//! * [`server`] does the I/O of a relay; [`access`] says who may use it; [`metrics`] says what it did.
//! * [`client`] connects and registers.
//! * [`websocket`] is a codec, for networks that let nothing else through.
//!
//! Frames are those of `fairlead_wire::relay`; `docs/relay-protocol.md` describes them. Not here: Kubernetes.

pub mod access;
pub mod client;
pub mod core;
pub mod metrics;
pub mod proof;
mod random;
pub mod server;
mod stream;
pub mod websocket;

use std::time::Duration;

pub use stream::StreamError;

/// Bytes that the kernel holds for the other end and has not sent: what waits longer waits where the newest can overtake it.
const NOT_SENT: u32 = 16 << 10;
/// Time for which sent bytes may be unacknowledged before the kernel ends a connection.
const USER_TIMEOUT: Duration = Duration::from_secs(10);

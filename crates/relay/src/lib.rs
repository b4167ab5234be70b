//! The relay: it passes WireGuard packets, which it cannot read, between nodes that do not reach each other.
//!
//! [`core`] decides, without I/O: which connection gets a datagram, what is dropped, who is told what. [`proof`] shows that a
//! client has the private key of the WireGuard key it registers. Frames are those of `fairlead_wire::relay`;
//! `docs/relay-protocol.md` describes them.
//!
//! Not here: Kubernetes. Who may use a relay is for the caller to say.

pub mod core;
pub mod proof;

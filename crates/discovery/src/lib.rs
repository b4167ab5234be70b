//! The Sidero discovery protocol: nodes find each other through a server that cannot read what they say.
//!
//! * [`core`] decides, without I/O: what is stored, when it expires, what each watch gets next, and what is refused.
//! * [`client`] publishes a node and watches the others.
//! * [`server`] does the I/O of a discovery server; [`metrics`] says what it did.
//!
//! Messages and encryption are those of `fairlead_wire::discovery`. Callers of a server are not authenticated: the identifier
//! of a cluster is all they need, so everything is limited and nothing they send is believed. `docs/discovery.md` is for
//! operators. Not here: Kubernetes, and what a node does with the members it finds.

pub mod client;
pub mod core;
pub mod metrics;
pub mod server;

//! The per-node program: CNI server, node IPAM and mesh agent.
//!
//! It is a thin shell around pure parts. `fairlead-ipam` decides addresses, `fairlead-topology` peers and prefixes,
//! `fairlead-path` endpoints; `fairlead-dataplane` brings the kernel to what they say. Data comes from the API server
//! (watches of `fairlead-cluster`), from the kernel (pods of before a restart) and over a UNIX socket from the CNI plugin and
//! the command line ([`fairlead_pods::cni`], [`status`]). It goes to the kernel and to this node's own objects, nothing else's.
//!
//! Where nodes share a network and want no mesh, [`routes`] keeps plain routes to the others' blocks instead of [`fairlead_mesh`].
//!
//! Nothing is torn down on exit: the kernel keeps forwarding, and the next start adopts what is there. An API server
//! that is away stops only what needs a new decision of the controller.
//!
//! Pods that use egress gateways are kept by [`fairlead_egress_client`].

pub mod lifecycle;
pub mod metrics;
mod program;
pub mod routes;
pub mod status;

pub use fairlead_dataplane::routing_ids;
pub use fairlead_egress_client::EgressSwitches;
pub use lifecycle::cleanup::Cleanup;
pub use lifecycle::settings::{Access, Settings, WireGuardChoice};
pub use lifecycle::standalone::Standalone;
pub use program::run;

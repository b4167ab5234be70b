//! Disagreements of kernel, blocks and pods about addresses, with advice.
//!
//! [`node`] compares everything one node knows; [`cluster`] compares what the API server has of all nodes. Both only
//! read. Each disagreement is a [`Finding`] that a person can act on.

mod cluster;
mod finding;
mod node;
mod shared;
mod view;

pub use cluster::cluster;
pub use finding::{Finding, Severity};
pub use node::node;
pub use view::{ClusterView, KnownBlock, KnownPod, KnownPool, NodeView, Owner, PodLink, Reservation};

#[cfg(test)]
mod tests;

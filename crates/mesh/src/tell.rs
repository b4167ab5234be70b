//! Says how the mesh does: to other nodes, operators and metrics.

pub(crate) mod local_node;
pub mod metrics;
pub(crate) mod observers;
pub mod publish;
pub(crate) mod publisher;
pub(crate) mod reports;
pub mod write_budget;

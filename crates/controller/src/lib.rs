//! The controller program: the leader grants address blocks and maintains pools, and every replica validates pools.
//!
//! Replicas elect a leader by a Lease. The leader reads AddressPools, AddressBlocks, BlockRequests and Nodes from watches,
//! lets `fairlead-ipam` decide, and writes AddressBlocks, conditions and finalizers. Without it everything that runs goes
//! on: nodes keep their blocks, and only a node without a free address waits for the next leader.
//!
//! Every replica serves the admission webhook, whether it leads or not.
//!
//! Not here: the egress controllers.

mod election;
mod grants;
mod leader;
mod lease;
mod mesh;
#[cfg(test)]
mod metrics_tests;
mod orphans;
mod pool_status;
mod pools;
mod program;
mod stores;
mod webhook;

pub use program::{Settings, run};
pub use webhook::{Policy as CertificatePolicy, Settings as WebhookSettings};

//! The controller program: one leader grants address blocks and looks after pools, and all copies judge new pools.
//!
//! Several copies may run; a Lease elects the one that works. It reads AddressPools, AddressBlocks, BlockRequests and
//! Nodes from watches, lets `fairlead-ipam` decide, and writes AddressBlocks, conditions and finalizers. Losing it
//! stops nothing that runs: nodes keep what they have, and only a node without a free address waits for the next
//! leader.
//!
//! Every copy serves the admission webhook, whether it is elected or not.
//!
//! Not here: the egress controllers.

mod grants;
mod mesh;
mod metrics;
mod orphans;
mod pool_status;
mod pools;
mod program;
mod webhook;

pub use program::{Settings, run};
pub use webhook::{Policy as CertificatePolicy, Settings as WebhookSettings};

//! The controller program: one leader grants address blocks and looks after pools.
//!
//! Several copies may run; a Lease elects the one that works. It reads AddressPools, AddressBlocks, BlockRequests and
//! Nodes from watches, lets `fairlead-ipam` decide, and writes AddressBlocks, conditions and finalizers. Losing it
//! stops nothing that runs: nodes keep what they have, and only a node without a free address waits for the next
//! leader.
//!
//! Not here: admission webhooks and the egress controllers, which will stand beside [`grants`] and [`pools`].

pub mod grants;
pub mod mesh;
mod metrics;
pub mod orphans;
pub mod pools;
mod program;

pub use program::{Settings, run};

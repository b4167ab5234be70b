//! The controller program: the leader grants address blocks and maintains pools.
//!
//! Replicas elect a leader by a Lease. The leader reads AddressPools, AddressBlocks, BlockRequests and Nodes from watches,
//! lets `fairlead-ipam` decide, and writes AddressBlocks, conditions and finalizers. Without it everything that runs goes
//! on: nodes keep their blocks, and only a node without a free address waits for the next leader.
//!
//! Not here: the egress controllers; what is valid, which the API server decides by itself (`deploy/crds`, `deploy/policy`).

mod changes;
mod deleted_peers;
mod discovery;
mod election;
mod grants;
mod granularity;
mod known_blocks;
mod leader;
mod lease;
mod mesh;
mod mesh_addresses;
#[cfg(test)]
mod metrics_tests;
mod not_implemented;
mod orphans;
mod peer_facts;
mod pool_status;
mod pools;
mod program;
mod relay;
mod stores;
mod work_queue;

pub use program::{Settings, run};

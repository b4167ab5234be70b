//! The controller program: the leader grants address blocks and maintains pools.
//!
//! Replicas elect a leader by a Lease. The leader reads AddressPools, AddressBlocks, BlockRequests and Nodes from watches,
//! lets `fairlead-ipam` decide, and writes AddressBlocks, conditions and finalizers. Without it everything that runs goes
//! on: nodes keep their blocks, and only a node without a free address waits for the next leader.
//!
//! [`egress`] is another program, with its own Lease: it runs the gateways of Egresses.
//!
//! Not here: what is valid, which the API server decides by itself (`deploy/crds`, `deploy/policy`).

mod changes;
mod deleted_peers;
mod discovery;
pub mod egress;
mod election;
mod grants;
mod granularity;
mod known_blocks;
mod leader;
mod leadership;
mod lease;
mod mesh;
mod mesh_addresses;
mod network_policies;
mod network_unavailable;
mod orphans;
mod peer_facts;
mod pool_status;
mod pools;
mod program;
mod relay;
mod replica;
mod stores;
mod stray_peers;
#[cfg(test)]
mod tests;
mod used_ranges;
mod without_effect;
mod work_queue;

pub use program::{Settings, run};

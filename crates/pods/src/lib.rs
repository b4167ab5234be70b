//! Pods of this node: CNI operations, their addresses, and the network that keeps them connected.
//!
//! * [`cni`]: ADD, DEL, CHECK, GC and STATUS for the plugin, as stages of an attachment.
//! * [`ipam`]: addresses of this node, and the requests for blocks of them.
//! * [`pod_network`]: keeps running pods connected while other programs change the network.
//! * [`inventory`]: what of that `fairlead ipam` shows, compares and frees.
//! * [`container_locks`]: one operation per container.
//!
//! Requests come from the plugin over the node program's socket, pools, blocks and pods from watch caches, pods of before a
//! restart from the kernel. `fairlead-ipam` decides addresses and `fairlead-dataplane` brings links and routes to the kernel; of
//! the cluster only BlockRequests and this node's AddressBlocks are written.
//!
//! It does not know egress gateways or the mesh: their crates and the node program hand it what it asks of them
//! ([`cni::EgressStages`], [`cni::MeshStatus`]).

pub mod cni;
pub mod container_locks;
pub mod inventory;
pub mod ipam;
pub mod pod_network;
mod small_file;
mod ttl_cell;

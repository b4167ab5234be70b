//! The main job, end to end, on one machine: pods on nodes in different networks reach each other.
//!
//! [`World`] puts real parts together as a user would: a lab Internet in network namespaces ([`topology`]), a real
//! Kubernetes API server in the cloud site, `deploy/` applied to it, `fairlead controller` and one `fairlead node` per
//! host with the ServiceAccounts and rights of `deploy/rbac`, and pods attached by the CNI plugin ([`pod`]). [`probe`]
//! then tries every pair. The demo prints what came out; the tests of this crate break things in the same world.
//!
//! Nothing here is part of the product, and nothing of the product is linked: its programs are run as processes.

pub mod cni;
pub mod judge;
pub mod nat_matrix;
pub mod node;
pub mod objects;
pub mod probe;
pub mod proxies;
pub mod report;
pub mod servers;
pub mod times;
pub mod topology;
pub mod vm_node;
pub mod vm_pings;
pub mod world;

pub use world::World;

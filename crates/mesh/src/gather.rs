//! Inputs of the mesh: the objects of the cluster, the keys of this node, and the network that it is in.

pub mod identity;
pub(crate) mod key_rotation;
pub mod keys;
pub(crate) mod nat64;
pub(crate) mod network;
pub(crate) mod reader;

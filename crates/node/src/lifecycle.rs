//! Start and end of the node program: settings, the lock of the only instance, the watch caches, the socket, and what is handed
//! to a successor or cleared at the end.

mod adopt;
pub(crate) mod api_server;
pub mod cleanup;
pub(crate) mod early_mesh;
pub(crate) mod handover;
pub(crate) mod instance_lock;
mod mesh_of_pods;
mod node;
mod server;
pub(crate) mod settings;
pub(crate) mod shutdown;
pub(crate) mod standalone;
pub(crate) mod watches;

pub(crate) use node::Node;

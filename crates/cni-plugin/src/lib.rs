//! The pure part of `fairlead-cni`, the executable a container runtime calls for every pod.
//!
//! A runtime speaks the CNI protocol: environment variables and a JSON configuration in, one JSON object out. Installed
//! as `/opt/cni/bin/coil` (existing network configurations name the type `coil`), the plugin validates its input, calls
//! the node program over a UNIX socket, and answers in the version that the configuration's `cniVersion` requests.
//!
//! It allocates no address and touches no kernel object: the node program (`crates/node`) does. It knows nothing of
//! Kubernetes but the keys in `CNI_ARGS`.
//!
//! Input is parsed by [`mod@env`] and [`netconf`] and becomes a [`request`]; the answer that [`daemon`] receives becomes a
//! [`result`] or a [`failure`]. Only [`daemon`], [`pending`] and [`attached`] do I/O; `main.rs` reads, calls and prints.
//! Everything else is pure.
//!
//! The specification: <https://github.com/containernetworking/cni/blob/main/SPEC.md>, versions in [`version`].

pub mod args;
pub mod attached;
pub mod daemon;
pub mod env;
pub mod failure;
pub mod netconf;
pub mod pending;
pub mod repeatable;
pub mod request;
pub mod result;
pub mod version;

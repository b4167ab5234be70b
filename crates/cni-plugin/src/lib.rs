//! The pure part of `fairlead-cni`, the executable a container runtime calls for every pod.
//!
//! A runtime speaks the CNI protocol: environment variables and a JSON configuration in, one JSON object out. Installed
//! as `/opt/cni/bin/coil` (existing network configurations name the type `coil`), the plugin checks what it was given,
//! asks the node program over a UNIX socket, and answers in the protocol version the configuration asks for.
//!
//! It decides nothing about addresses or links and touches no kernel object: that is the node program's work
//! (`crates/node`). It knows nothing of Kubernetes beyond the names in `CNI_ARGS`.
//!
//! Data comes in through [`mod@env`] and [`netconf`], becomes a [`request`], and what [`daemon`] brings back becomes a
//! [`result`] or a [`failure`]. Only [`daemon`] and [`pending`] do I/O; `main.rs` reads, calls and prints. Everything
//! else is pure.
//!
//! The specification: <https://github.com/containernetworking/cni/blob/main/SPEC.md>, versions in [`version`].

pub mod args;
pub mod daemon;
pub mod env;
pub mod failure;
pub mod netconf;
pub mod pending;
pub mod request;
pub mod result;
pub mod version;

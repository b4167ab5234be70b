//! Commands of operators that ask the API server, or the node program of this machine by its socket, and those that work on files alone.
//!
//! Each command is a module with a function `run`, which prints its answer and returns the exit code; its arguments are in [`arguments`].
//! Modules that all commands share: [`api`] asks the API server, [`query`] the node program, [`output`] prints.
//!
//! * `status`, `graph`, `ipam`, `netcheck`, `ping`, `key`: the mesh and the addresses, of a node or of the cluster.
//! * `egress`: Egresses, their gateways and client pods, and which way packets of a pod take.
//! * `peer`, `showconf`: Peers outside of the cluster, and configurations of WireGuard.
//! * `connectivity`, `install`, `uninstall`: test pods; the CNI plugin of a node; the end of Fairlead in a cluster.
//!
//! Nothing here changes the kernel or opens a tunnel, so neither netlink nor BPF is linked. The programs of a cluster, `cleanup` and
//! `connect` are in the crate `fairlead`, which has the tree of all commands.

pub mod api;
pub mod arguments;
pub mod connectivity;
pub mod egress;
pub mod graph;
pub mod install;
pub mod ipam;
pub mod key;
pub mod netcheck;
mod netconf;
pub mod output;
pub mod peer;
pub mod ping;
pub mod proxy;
pub mod query;
pub mod showconf;
pub mod status;
pub mod uninstall;

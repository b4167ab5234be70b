//! Real Kubernetes nodes on one machine: kubelet, containerd and kube-proxy, for tests on what users really run.
//!
//! A [`Cluster`] is a lab of networks (`testbed-lab`), a real control plane (`testbed-kube`) beside its first node or on all, and nodes
//! that each have network, mount, process, host name, IPC and control-group namespaces of their own. Pods are real:
//! containerd and runc start them from images, kubelet probes them, kube-proxy (nftables) serves their Services. Only
//! the kernel is shared.
//!
//! Nothing is pulled: images are archives that the caller names. Nothing stays: when a cluster is dropped, panics or is
//! killed, processes, namespaces, control groups and files go with it.
//!
//! Needs root and Debian's containerd, runc and containernetworking-plugins.

mod cgroups;
mod cluster;
mod control_plane;
mod files;
pub mod install;
mod janitor;
pub mod machine;
mod node;
mod relay;
pub mod topology;

pub use cluster::Cluster;
pub use node::Node;

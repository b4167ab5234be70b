//! Errors of the links of pods.

use std::io;
use std::path::PathBuf;

use crate::uplink::SysctlError;

/// Error of making, removing or listing the links of pods.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The pod already has an interface of that name, and it is not one of ours.
    #[error("interface {ifname} already exists in network namespace {}; another plugin may have made it", .netns.display())]
    InterfaceExists {
        /// Name of the interface.
        ifname: String,
        /// File of the namespace.
        netns: PathBuf,
    },
    /// Something asked for cannot be.
    #[error("{field} {value:?} {reason}")]
    Invalid {
        /// Part of the request.
        field: &'static str,
        /// Value of that part.
        value: String,
        /// Reason, which follows the value in the text.
        reason: &'static str,
    },
    /// The kernel refused.
    #[error("pod interface {ifname} of container {container_id}: {source}")]
    Kernel {
        /// The runtime's name for the sandbox.
        container_id: String,
        /// Name of the interface.
        ifname: String,
        /// The kernel's error, with the request.
        source: fairlead_netlink::Error,
    },
    /// Links or routes could not be read.
    #[error("cannot find out which pods are on this node: {0}")]
    List(#[source] fairlead_netlink::Error),
    /// The namespace is missing or is none.
    #[error("network namespace {} of container {container_id} cannot be used: {reason}", .path.display())]
    Netns {
        /// The runtime's name for the sandbox.
        container_id: String,
        /// File of the namespace.
        path: PathBuf,
        /// Error of the system for that file.
        reason: io::Error,
    },
    /// A switch of the link could not be set.
    #[error("pod interface {ifname} of container {container_id}: {source}")]
    Sysctl {
        /// The runtime's name for the sandbox.
        container_id: String,
        /// Name of the interface.
        ifname: String,
        /// Error of the setting, with its file.
        source: SysctlError,
    },
}

/// A result of work on pods.
pub type Result<T> = std::result::Result<T, Error>;

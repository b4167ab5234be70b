//! A source address of an Egress on the node of the gateway that holds it: as it is decided, and as the kernel gets it.

use std::net::IpAddr;

/// A source address, and the gateway pod that holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    /// The address.
    pub address: IpAddr,
    /// The address of the pod, of the same family.
    pub pod: IpAddr,
    /// Index of the link that leads to the pod.
    pub link: u32,
}

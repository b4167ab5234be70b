//! The link of a pod in the kernel of a node.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A pod's link with its alias, and its routes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Link {
    pub(crate) pool: String,
    pub(crate) ipv4: Option<Ipv4Addr>,
    pub(crate) ipv6: Option<Ipv6Addr>,
}

impl Link {
    pub(crate) fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        self.ipv4.map(IpAddr::V4).into_iter().chain(self.ipv6.map(IpAddr::V6))
    }
}

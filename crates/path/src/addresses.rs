//! Classes of addresses.

use std::net::{IpAddr, SocketAddr};

/// The endpoint with an IPv4-mapped address as IPv4, without flow label and scope, for comparison.
pub(crate) fn canonical(endpoint: SocketAddr) -> SocketAddr {
    SocketAddr::new(endpoint.ip().to_canonical(), endpoint.port())
}

/// Whether another host can have the address: not loopback, link-local, multicast, unspecified, reserved.
pub(crate) fn is_reachable(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(ip) => {
            let [first, ..] = ip.octets();
            !(first == 0 || first >= 240 || ip.is_loopback() || ip.is_link_local() || ip.is_multicast())
        }
        IpAddr::V6(ip) => {
            !(ip.is_unspecified() || ip.is_loopback() || ip.is_unicast_link_local() || ip.is_multicast())
        }
    }
}

/// Whether the address is only valid within a site: RFC 1918, RFC 6598 (shared by carriers), RFC 4193.
pub fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(ip) => {
            let [first, second, ..] = ip.octets();
            ip.is_private() || (first == 100 && (64..128).contains(&second))
        }
        IpAddr::V6(ip) => ip.is_unique_local(),
    }
}

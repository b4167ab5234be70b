//! The Foo-over-UDP links of a client pod.

use std::net::IpAddr;

use fairlead_address::IpFamily;
use fairlead_api::fou::{link_name, overhead};
use fairlead_api::names::{FOU_TTL, IPV6_MIN_MTU};

/// Least MTU of a network of IPv4 (RFC 791, section 3.2).
const IPV4_MIN_MTU: u32 = 68;

/// UDP source port of what a tunnel sends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SourcePort {
    /// Computed from the flow inside.
    Auto,
    /// The port of the Service.
    #[default]
    Fixed,
}

/// A tunnel of IPv4 in IPv4 (kind `ipip`) or of IPv6 in IPv6 (kind `ip6tnl`), in UDP packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Link {
    /// Name of the link, derived from the remote address.
    pub(super) name: String,
    /// The pod's address.
    pub(super) local: IpAddr,
    /// The ClusterIP of the Service, of the same family.
    pub(super) remote: IpAddr,
    /// Time to live, or hop limit, of outer packets.
    pub(super) ttl: u8,
    /// UDP source port; 0 has it computed from the flow inside.
    pub(super) source_port: u16,
    /// UDP destination port.
    pub(super) destination_port: u16,
    /// MTU of inner packets in bytes.
    pub(super) mtu: u32,
}

impl Link {
    pub(super) fn new(local: IpAddr, remote: IpAddr, port: u16, source: SourcePort, mtu: u32) -> Self {
        let source_port = match source {
            SourcePort::Auto => 0,
            SourcePort::Fixed => port,
        };
        let name = link_name(remote);
        Self { name, local, remote, ttl: FOU_TTL, source_port, destination_port: port, mtu }
    }
}

/// The MTU of inner packets where that of outer ones is `outer`.
///
/// # Errors
/// The least outer MTU, if this one is less.
pub(super) fn inner_mtu(family: IpFamily, outer: u32) -> Result<u32, u32> {
    let minimum = match family {
        IpFamily::V4 => IPV4_MIN_MTU,
        IpFamily::V6 => IPV6_MIN_MTU,
    };
    let overhead = overhead(family);
    let inner = outer.checked_sub(overhead).filter(|inner| *inner >= minimum);
    inner.ok_or(minimum.saturating_add(overhead))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_coil() {
        for (address, name) in [
            ("10.68.12.49", "fou4_0a440c31"),
            ("10.68.124.145", "fou4_0a447c91"),
            // `printf ADDRESS | xxd -r -p | sha1sum`
            ("fd04::1", "fou6_2b9c56e7"),
            ("::", "fou6_e129f27c"),
            ("2001:db8:1234:5678:9abc:def0:1357:2468", "fou6_9ca3a17f"),
            ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fou6_52e0e9d4"),
        ] {
            assert_eq!(link_name(address.parse().unwrap()), name);
        }
    }

    #[test]
    fn the_inner_mtu_leaves_room_for_the_outer_headers() {
        assert_eq!((inner_mtu(IpFamily::V4, 1500), inner_mtu(IpFamily::V6, 1500)), (Ok(1472), Ok(1452)));
        assert_eq!((inner_mtu(IpFamily::V6, 1328), inner_mtu(IpFamily::V6, 1327)), (Ok(1280), Err(1328)));
        assert_eq!((inner_mtu(IpFamily::V4, 96), inner_mtu(IpFamily::V4, 95)), (Ok(68), Err(96)));
        assert_eq!(inner_mtu(IpFamily::V4, 0), Err(96));
    }
}

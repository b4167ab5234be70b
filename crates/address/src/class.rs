//! Special-purpose addresses (RFC 6890) and what they cannot be used for.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::prefix::{PrefixSet, overlap};

/// Canonical form of an endpoint: with an IPv4-mapped address as IPv4, without flow label and scope, so that equal means equal.
pub fn canonical(endpoint: SocketAddr) -> SocketAddr {
    SocketAddr::new(endpoint.ip().to_canonical(), endpoint.port())
}

/// Whether a packet to the address can arrive at another host: not loopback, link-local, multicast, unspecified or
/// reserved. IPv4-mapped addresses count as the IPv4 address they hold.
pub fn is_reachable(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(ip) => {
            let [first, ..] = ip.octets();
            !(first == 0 || first >= 240 || ip.is_loopback() || ip.is_link_local() || ip.is_multicast())
        }
        IpAddr::V6(ip) => {
            !(ip.is_unspecified() || ip.is_loopback() || ip.is_unicast_link_local() || ip.is_multicast())
        }
    }
}

/// Whether the address means something only within a site: RFC 1918, RFC 6598 (shared by carriers), RFC 4193.
/// IPv4-mapped addresses count as the IPv4 address they hold.
pub fn is_private(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(ip) => {
            let [first, second, ..] = ip.octets();
            ip.is_private() || (first == 100 && (64..128).contains(&second))
        }
        IpAddr::V6(ip) => ip.is_unique_local(),
    }
}

/// Reason why a mesh cannot carry a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnusablePrefix {
    /// `0.0.0.0/0` or `::/0`: it would draw all traffic of all nodes.
    DefaultRoute,
    /// Overlaps `0.0.0.0/8` or is `::` (RFC 1122 3.2.1.3, RFC 4291 2.5.2).
    Unspecified,
    /// Overlaps `127.0.0.0/8` or is `::1`.
    Loopback,
    /// Overlaps `169.254.0.0/16` or `fe80::/10`: means something else on every link.
    LinkLocal,
    /// Overlaps `224.0.0.0/4`, `255.255.255.255` or `ff00::/8`.
    Multicast,
    /// Overlaps `::ffff:0:0/96` (RFC 4291 2.5.5.2).
    Ipv4Mapped,
}

impl fmt::Display for UnusablePrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DefaultRoute => "it covers every address there is",
            Self::Unspecified => "it overlaps addresses that name no host",
            Self::Loopback => "it overlaps loopback addresses",
            Self::LinkLocal => "it overlaps link-local addresses",
            Self::Multicast => "it overlaps multicast or broadcast addresses",
            Self::Ipv4Mapped => "it overlaps IPv4-mapped IPv6 addresses",
        })
    }
}

const fn v4(a: u8, b: u8, c: u8, d: u8, length: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), length))
}

const fn v6(address: u128, length: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::from_bits(address), length))
}

const SPECIAL: [(IpNet, UnusablePrefix); 10] = [
    (v4(0, 0, 0, 0, 8), UnusablePrefix::Unspecified),
    (v4(127, 0, 0, 0, 8), UnusablePrefix::Loopback),
    (v4(169, 254, 0, 0, 16), UnusablePrefix::LinkLocal),
    (v4(224, 0, 0, 0, 4), UnusablePrefix::Multicast),
    (v4(255, 255, 255, 255, 32), UnusablePrefix::Multicast),
    (v6(0, 128), UnusablePrefix::Unspecified),
    (v6(1, 128), UnusablePrefix::Loopback),
    (v6(0xfe80 << 112, 10), UnusablePrefix::LinkLocal),
    (v6(0xff00 << 112, 8), UnusablePrefix::Multicast),
    (v6(0xffff_0000_0000, 96), UnusablePrefix::Ipv4Mapped),
];

/// Reason why no mesh can carry the prefix; `None` if one can.
pub fn unusable(prefix: &IpNet) -> Option<UnusablePrefix> {
    if prefix.prefix_len() == 0 {
        return Some(UnusablePrefix::DefaultRoute);
    }
    SPECIAL.iter().find(|(special, _)| overlap(special, prefix)).map(|(_, why)| *why)
}

/// Unicast parts of a wide prefix, without those of [`unusable`] prefixes. Holes are rounded up (class E, `::/8`), so that even
/// `0.0.0.0/0` has few parts.
pub fn usable_parts(prefix: IpNet) -> Vec<IpNet> {
    let holes = [v4(0, 0, 0, 0, 8), v4(127, 0, 0, 0, 8), v4(169, 254, 0, 0, 16), v4(224, 0, 0, 0, 3)]
        .into_iter()
        .chain([v6(0, 8), v6(0xfe80 << 112, 10), v6(0xff00 << 112, 8)]);
    PrefixSet::from_iter([prefix]).subtract(&holes.collect()).prefixes().collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn classes_of_addresses() {
        let table = [
            ("10.0.0.1", true, true),
            ("100.64.0.1", true, true),
            ("100.128.0.1", true, false),
            ("172.31.255.255", true, true),
            ("192.0.2.1", true, false),
            ("0.1.2.3", false, false),
            ("127.0.0.1", false, false),
            ("169.254.1.1", false, false),
            ("224.0.0.1", false, false),
            ("240.0.0.1", false, false),
            ("255.255.255.255", false, false),
            ("2001:db8::1", true, false),
            ("fd00::1", true, true),
            ("::", false, false),
            ("::1", false, false),
            ("fe80::1", false, false),
            ("ff02::1", false, false),
            ("::ffff:10.0.0.1", true, true),
            ("::ffff:127.0.0.1", false, false),
        ];
        for (text, reachable, private) in table {
            let address = text.parse().unwrap();
            assert_eq!((is_reachable(address), is_private(address)), (reachable, private), "{text}");
        }
    }

    #[test]
    fn a_mapped_endpoint_equals_its_ipv4_form() {
        assert_eq!(canonical("[::ffff:192.0.2.1]:5".parse().unwrap()), "192.0.2.1:5".parse().unwrap());
        assert_eq!(canonical("[fe80::1%3]:5".parse().unwrap()), "[fe80::1]:5".parse().unwrap());
    }

    #[test]
    fn classes_of_prefixes() {
        let table = [
            ("0.0.0.0/0", Some(UnusablePrefix::DefaultRoute)),
            ("::/0", Some(UnusablePrefix::DefaultRoute)),
            ("0.0.0.0/1", Some(UnusablePrefix::Unspecified)),
            ("::/96", Some(UnusablePrefix::Unspecified)),
            ("127.9.0.0/16", Some(UnusablePrefix::Loopback)),
            ("169.254.0.0/15", Some(UnusablePrefix::LinkLocal)),
            ("fe80::/64", Some(UnusablePrefix::LinkLocal)),
            ("255.255.255.255/32", Some(UnusablePrefix::Multicast)),
            ("ff02::1/128", Some(UnusablePrefix::Multicast)),
            ("::ffff:10.0.0.0/104", Some(UnusablePrefix::Ipv4Mapped)),
            ("10.0.0.0/8", None),
            ("fd00::/8", None),
        ];
        for (text, expected) in table {
            assert_eq!(unusable(&text.parse().unwrap()), expected, "{text}");
        }
    }

    #[test]
    fn a_default_route_has_few_usable_parts() {
        for (whole, inside, outside) in
            [("0.0.0.0/0", "8.8.8.8", "169.254.169.254"), ("::/0", "2001:db8::1", "fe80::1")]
        {
            let parts = usable_parts(whole.parse().unwrap());
            let has = |address: &str| {
                let address: IpAddr = address.parse().unwrap();
                parts.iter().any(|part| part.contains(&address))
            };
            assert!(has(inside) && !has(outside) && parts.len() < 64, "{parts:?}");
            assert!(parts.iter().all(|part| unusable(part).is_none()), "{parts:?}");
        }
    }

    proptest! {
        #[test]
        fn an_address_that_no_host_answers_is_in_no_usable_prefix(address: IpAddr) {
            // Class E (RFC 1112 4): reserved for hosts, but some networks route it.
            let class_e = matches!(address, IpAddr::V4(ip) if ip.octets()[0] >= 240);
            if !is_reachable(address) && !class_e {
                prop_assert!(unusable(&address.into()).is_some());
            }
        }
    }
}

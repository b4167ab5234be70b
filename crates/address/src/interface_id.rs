//! The second half of an IPv6 address: the interface identifier (RFC 4291, section 2.5.1).

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

use ipnet::Ipv6Net;

/// The last 64 bits of an IPv6 address, which tell hosts of a subnet from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InterfaceId(pub [u8; 8]);

/// A text is no interface identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no interface identifier: write four groups of hexadecimal digits, as in 2c1a:b6ff:fe53:8169"
)]
pub struct InvalidInterfaceId(pub String);

impl InterfaceId {
    /// The modified EUI-64 of a link-layer address (RFC 4291, appendix A).
    pub fn of_mac([a, b, c, d, e, f]: [u8; 6]) -> Self {
        Self([a ^ 0x02, b, c, 0xff, 0xfe, d, e, f])
    }

    /// The identifier of an address.
    pub fn of_address(address: Ipv6Addr) -> Self {
        Self((address.to_bits() as u64).to_be_bytes())
    }

    /// Whether it is zero, which is the address of all routers of a subnet (RFC 4291, section 2.6.1).
    pub fn is_zero(self) -> bool {
        self.0 == [0; 8]
    }

    /// The address that it makes in the subnet of 64 bits which begins as `subnet`.
    pub fn address_in(self, subnet: Ipv6Net) -> Ipv6Addr {
        let network = subnet.addr().to_bits() >> 64 << 64;
        Ipv6Addr::from_bits(network | u128::from(u64::from_be_bytes(self.0)))
    }
}

impl fmt::Display for InterfaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f0, g, h] = self.0;
        let group = |high: u8, low: u8| u16::from_be_bytes([high, low]);
        write!(f, "{:x}:{:x}:{:x}:{:x}", group(a, b), group(c, d), group(e, f0), group(g, h))
    }
}

impl FromStr for InterfaceId {
    type Err = InvalidInterfaceId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidInterfaceId(text.chars().take(40).collect());
        let mut value = 0u64;
        let mut groups = 0;
        for group in text.split(':') {
            let is_group =
                (1..=4).contains(&group.len()) && group.bytes().all(|byte| byte.is_ascii_hexdigit());
            let parsed = u16::from_str_radix(group, 16).ok().filter(|_| is_group && groups < 4);
            value = value << 16 | u64::from(parsed.ok_or_else(invalid)?);
            groups += 1;
        }
        if groups == 4 { Ok(Self(value.to_be_bytes())) } else { Err(invalid()) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_address_of_a_mac_is_that_of_rfc_4291() {
        let id = InterfaceId::of_mac([0x2e, 0x1a, 0xb6, 0x53, 0x81, 0x69]);
        assert_eq!(id.to_string(), "2c1a:b6ff:fe53:8169");
        let subnet = "fd7f:175a:b97c:5602::/64".parse().unwrap();
        let address = id.address_in(subnet);
        assert_eq!(address, "fd7f:175a:b97c:5602:2c1a:b6ff:fe53:8169".parse::<Ipv6Addr>().unwrap());
        assert_eq!(InterfaceId::of_address(address), id);
    }

    #[test]
    fn what_is_not_four_groups_is_refused() {
        for text in ["", ":", "1:2:3", "1:2:3:4:5", "1:2:3:", "1::2:3", "12345:1:1:1", "+1:1:1:1", "g:1:1:1"]
        {
            let error = text.parse::<InterfaceId>().unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(bytes: [u8; 8]) {
            let id = InterfaceId(bytes);
            prop_assert_eq!(id.to_string().parse(), Ok(id));
        }

        #[test]
        fn hostile_texts_never_panic(text in ".{0,40}") {
            let _ = text.parse::<InterfaceId>();
        }
    }
}

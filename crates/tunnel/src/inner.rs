//! The fields of an inner IP packet that WireGuard needs.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// WireGuard pads to multiples of this many bytes (WireGuard paper 5.4.6).
const PADDING: usize = 16;
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;

/// The fields of a well-formed IP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inner {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    /// Bytes of the packet without the padding behind it.
    pub(crate) length: usize,
}

/// Reads the header of an IPv4 (RFC 791) or IPv6 (RFC 8200) packet that may carry padding; `None` if it is neither,
/// or shorter than it claims.
pub(crate) fn parse(packet: &[u8]) -> Option<Inner> {
    let inner = match packet.first()? >> 4 {
        4 => parse_v4(packet)?,
        6 => parse_v6(packet)?,
        _ => return None,
    };
    (inner.length <= packet.len()).then_some(inner)
}

fn parse_v4(packet: &[u8]) -> Option<Inner> {
    let header = packet.first_chunk::<IPV4_HEADER>()?;
    let [_, _, total_high, total_low, .., s0, s1, s2, s3, d0, d1, d2, d3] = *header;
    let length = usize::from(u16::from_be_bytes([total_high, total_low]));
    (length >= IPV4_HEADER).then(|| Inner {
        source: Ipv4Addr::new(s0, s1, s2, s3).into(),
        destination: Ipv4Addr::new(d0, d1, d2, d3).into(),
        length,
    })
}

fn parse_v6(packet: &[u8]) -> Option<Inner> {
    let header = packet.first_chunk::<IPV6_HEADER>()?;
    let payload = u16::from_be_bytes(*header.get(4..)?.first_chunk()?);
    let source: [u8; 16] = *header.get(8..)?.first_chunk()?;
    let destination: [u8; 16] = *header.get(24..)?.first_chunk()?;
    Some(Inner {
        source: Ipv6Addr::from(source).into(),
        destination: Ipv6Addr::from(destination).into(),
        length: IPV6_HEADER.saturating_add(payload.into()),
    })
}

/// Length of a packet when it is encrypted: a multiple of 16, but never beyond the MTU.
pub(crate) fn padded_length(length: usize, mtu: u16) -> usize {
    length.checked_next_multiple_of(PADDING).unwrap_or(length).min(mtu.into()).max(length)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn headers_are_read_and_padding_is_seen() {
        let mut v4 = vec![0x45, 0, 0, 21, 0, 0, 0, 0, 64, 1, 0, 0, 10, 1, 2, 3, 10, 4, 5, 6];
        v4.extend([0; 12]);
        let expected = Inner {
            source: "10.1.2.3".parse().unwrap(),
            destination: "10.4.5.6".parse().unwrap(),
            length: 21,
        };
        assert_eq!(parse(&v4), Some(expected));

        let mut v6 = vec![0x60, 0, 0, 0, 0, 8, 58, 64];
        v6.extend("fd00::1".parse::<Ipv6Addr>().unwrap().octets());
        v6.extend("fd00::2".parse::<Ipv6Addr>().unwrap().octets());
        v6.extend([0; 8]);
        let expected =
            Inner { source: "fd00::1".parse().unwrap(), destination: "fd00::2".parse().unwrap(), length: 48 };
        assert_eq!(parse(&v6), Some(expected));
        assert_eq!(parse(&v6[..47]), None, "shorter than it claims");
    }

    #[test]
    fn padding_ends_at_the_mtu() {
        assert_eq!(padded_length(0, 1420), 0);
        assert_eq!(padded_length(1, 1420), 16);
        assert_eq!(padded_length(1419, 1420), 1420);
        assert_eq!(padded_length(1420, 1420), 1420);
        assert_eq!(padded_length(1500, 1420), 1500, "the MTU shrank behind our back");
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic_nor_claim_more_than_there_is(bytes: Vec<u8>) {
            if let Some(inner) = parse(&bytes) {
                prop_assert!(inner.length <= bytes.len());
            }
        }

        #[test]
        fn padding_never_shortens(length in 0_usize..70_000, mtu: u16) {
            let padded = padded_length(length, mtu);
            prop_assert!(padded >= length && padded < length + PADDING);
        }
    }
}

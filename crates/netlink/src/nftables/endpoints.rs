//! Maps of endpoints as the kernel stores them: the key is an IPv4 address and a port, each in four bytes; the data is a port.

use std::net::{Ipv4Addr, SocketAddrV4};

/// The numbers by which `nft` knows the types of a map: `inet_service`, and `ipv4_addr . inet_service`, in which each
/// type has six bits. The kernel only stores them.
pub(super) const DATA_TYPE: u32 = 13;
pub(super) const KEY_TYPE: u32 = (7 << 6) | DATA_TYPE;
/// Lengths of both in bytes.
pub(super) const DATA_LENGTH: u32 = 2;
pub(super) const KEY_LENGTH: u32 = 8;
/// Most elements that a map may have; the kernel reserves 16 bytes for each.
pub(super) const CAPACITY: u32 = 16_384;

/// An endpoint as a key.
pub(super) fn key(endpoint: SocketAddrV4) -> Vec<u8> {
    [&endpoint.ip().octets()[..], &endpoint.port().to_be_bytes(), &[0; 2]].concat()
}

/// The reverse of [`key`]; `None` for a key of another length.
pub(super) fn endpoint(key: &[u8]) -> Option<SocketAddrV4> {
    let [a, b, c, d, high, low, _, _] = *<&[u8; KEY_LENGTH as usize]>::try_from(key).ok()?;
    Some(SocketAddrV4::new(Ipv4Addr::new(a, b, c, d), u16::from_be_bytes([high, low])))
}

/// A port as data; `None` for data of another length.
pub(super) fn port(data: &[u8]) -> Option<u16> {
    data.try_into().ok().map(u16::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_key_is_read_back(address: u32, port: u16) {
            let wanted = SocketAddrV4::new(address.into(), port);
            prop_assert_eq!(endpoint(&key(wanted)), Some(wanted));
        }

        #[test]
        fn hostile_bytes_never_panic(bytes: Vec<u8>) {
            prop_assert_eq!(endpoint(&bytes).is_some(), bytes.len() == 8);
            prop_assert_eq!(port(&bytes).is_some(), bytes.len() == 2);
        }
    }
}

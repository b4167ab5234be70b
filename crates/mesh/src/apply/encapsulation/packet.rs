//! A request in a tunnel as the packet that is sent: IP in IP (RFC 2003, RFC 2473), and an ICMP echo in that. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fairlead_tunnel::checksum;

/// Protocol numbers (IANA).
const ICMP: u8 = 1;
const IPV4: u8 = 4;
const IPV6: u8 = 41;
const ICMPV6: u8 = 58;
/// Lengths of the headers (RFC 791, RFC 8200).
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;
/// Bytes of the checksum in an ICMP message.
const ICMP_CHECKSUM: std::ops::Range<usize> = 2..4;
const HOP_LIMIT: u8 = 64;

/// The echo request `message`, from one end of the tunnel to the other, in the tunnel. The inner packet is padded to `length` bytes. That
/// of ICMPv6 gets its checksum here. `None` for ends of different families, and for a packet that is longer than IP allows.
pub(super) fn in_tunnel(local: IpAddr, remote: IpAddr, message: &[u8], length: usize) -> Option<Vec<u8>> {
    match (local, remote) {
        (IpAddr::V4(local), IpAddr::V4(remote)) => {
            let message = padded(message, length.saturating_sub(IPV4_HEADER));
            let inner = ipv4(local, remote, ICMP, &message)?;
            ipv4(local, remote, IPV4, &inner)
        }
        (IpAddr::V6(local), IpAddr::V6(remote)) => {
            let mut message = padded(message, length.saturating_sub(IPV6_HEADER));
            let sum = icmpv6_checksum(local, remote, &message)?.to_be_bytes();
            message.splice(ICMP_CHECKSUM, sum);
            let inner = ipv6(local, remote, ICMPV6, &message)?;
            ipv6(local, remote, IPV6, &inner)
        }
        _ => None,
    }
}

fn padded(message: &[u8], length: usize) -> Vec<u8> {
    let mut message = message.to_vec();
    // Zeros do not change a checksum.
    message.resize(message.len().max(length), 0);
    message
}

/// IPv4 packet with the bit "don't fragment". The kernel replaces identification and checksum of the outer header (raw(7)); the inner one
/// needs its own.
fn ipv4(source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, payload: &[u8]) -> Option<Vec<u8>> {
    let length = u16::try_from(payload.len().checked_add(IPV4_HEADER)?).ok()?.to_be_bytes();
    let mut header = vec![0x45, 0, length[0], length[1], 0, 0, 0x40, 0, HOP_LIMIT, protocol, 0, 0];
    header.extend(source.octets());
    header.extend(destination.octets());
    let sum = checksum(&header).to_be_bytes();
    header.splice(10..12, sum);
    header.extend(payload);
    Some(header)
}

fn ipv6(source: Ipv6Addr, destination: Ipv6Addr, protocol: u8, payload: &[u8]) -> Option<Vec<u8>> {
    let length = u16::try_from(payload.len()).ok()?.to_be_bytes();
    let mut header = vec![0x60, 0, 0, 0, length[0], length[1], protocol, HOP_LIMIT];
    header.extend(source.octets());
    header.extend(destination.octets());
    header.extend(payload);
    Some(header)
}

/// Over the message and the pseudo-header (RFC 8200, section 8.1).
fn icmpv6_checksum(source: Ipv6Addr, destination: Ipv6Addr, message: &[u8]) -> Option<u16> {
    let mut bytes = [source.octets(), destination.octets()].concat();
    bytes.extend(u32::try_from(message.len()).ok()?.to_be_bytes());
    bytes.extend([0, 0, 0, ICMPV6]);
    bytes.extend(message);
    Some(checksum(&bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn ipv4_in_ipv4_is_what_rfc_2003_says() {
        let message = [8, 0, 0xf7, 0xfe, 0, 1, 0, 0];
        let packet = in_tunnel(ip("192.0.2.1"), ip("198.51.100.2"), &message, 0).unwrap();
        assert_eq!(packet.len(), 48);
        assert_eq!((packet[9], packet[29]), (4, 1), "ICMP in IPv4 in IPv4");
        for header in [&packet[..20], &packet[20..40]] {
            assert_eq!((header[0], header[6], checksum(header)), (0x45, 0x40, 0));
            assert_eq!((&header[12..16], &header[16..20]), (&[192, 0, 2, 1][..], &[198, 51, 100, 2][..]));
        }
        assert_eq!(&packet[40..], &message);
    }

    #[test]
    fn ipv6_in_ipv6_is_what_rfc_2473_says() {
        let (local, remote) = (ip("2001:db8::1"), ip("2001:db8:1::2"));
        let packet = in_tunnel(local, remote, &[128, 0, 0, 0, 0, 1, 0, 0], 0).unwrap();
        assert_eq!(packet.len(), 88);
        assert_eq!((packet[6], packet[46]), (41, 58), "ICMPv6 in IPv6 in IPv6");
        let (IpAddr::V6(local), IpAddr::V6(remote)) = (local, remote) else { panic!() };
        assert_eq!(icmpv6_checksum(local, remote, &packet[80..]), Some(0));
    }

    proptest! {
        #[test]
        fn a_request_has_the_length_that_is_wanted(length in 0usize..1500, is_ipv4: bool) {
            let (local, remote, outer) = match is_ipv4 {
                true => (ip("192.0.2.1"), ip("192.0.2.2"), 20),
                false => (ip("2001:db8::1"), ip("2001:db8::2"), 40),
            };
            let message = [8; 20];
            let packet = in_tunnel(local, remote, &message, length).unwrap();
            prop_assert_eq!(packet.len(), outer + length.max(outer + message.len()));
        }
    }

    #[test]
    fn what_ip_cannot_carry_is_not_sent() {
        assert_eq!(in_tunnel(ip("192.0.2.1"), ip("2001:db8::1"), &[8; 20], 0), None);
        assert_eq!(in_tunnel(ip("192.0.2.1"), ip("192.0.2.2"), &[8; 20], 70_000), None);
        assert_eq!(in_tunnel(ip("2001:db8::2"), ip("2001:db8::1"), &[8; 20], 70_000), None);
    }
}

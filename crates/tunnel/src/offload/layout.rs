//! Offsets of the fields of IPv4 (RFC 791), IPv6 (RFC 8200), TCP (RFC 9293) and UDP (RFC 768) headers.

use std::ops::Range;

/// The largest length that the fields of IP headers can say.
pub(crate) const MAX_PACKET: usize = 65_535;

/// Bytes of an IPv4 header without options.
pub(crate) const IPV4_HEADER: usize = 20;
/// The first byte of such a header: version 4, five words.
pub(crate) const IPV4_WITHOUT_OPTIONS: u8 = 0x45;
pub(crate) const IPV4_LENGTH: usize = 2;
pub(crate) const IPV4_ID: usize = 4;
pub(crate) const IPV4_FRAGMENT: usize = 6;
/// "Don't fragment", in the field at [`IPV4_FRAGMENT`].
pub(crate) const IPV4_DONT_FRAGMENT: u16 = 0x4000;
/// "More fragments" and the offset: zero in all but fragments.
pub(crate) const IPV4_FRAGMENTED: u16 = 0x3fff;
pub(crate) const IPV4_PROTOCOL: usize = 9;
pub(crate) const IPV4_CHECKSUM: usize = 10;
pub(crate) const IPV4_ADDRESSES: Range<usize> = 12..20;

/// Bytes of an IPv6 header without extension headers.
pub(crate) const IPV6_HEADER: usize = 40;
pub(crate) const IPV6_LENGTH: usize = 4;
pub(crate) const IPV6_NEXT_HEADER: usize = 6;
pub(crate) const IPV6_ADDRESSES: Range<usize> = 8..40;

/// Protocol number of TCP.
pub(crate) const TCP: u8 = 6;
/// Bytes of a TCP header without options.
pub(crate) const TCP_HEADER: usize = 20;
pub(crate) const TCP_SEQUENCE: usize = 4;
pub(crate) const TCP_ACKNOWLEDGMENT: usize = 8;
/// The data offset in its upper four bits.
pub(crate) const TCP_OFFSET: usize = 12;
pub(crate) const TCP_FLAGS: usize = 13;
pub(crate) const TCP_WINDOW: usize = 14;
pub(crate) const TCP_CHECKSUM: usize = 16;
pub(crate) const TCP_URGENT: usize = 18;
pub(crate) const FIN: u8 = 0x01;
pub(crate) const PSH: u8 = 0x08;
pub(crate) const ACK: u8 = 0x10;
pub(crate) const ECE: u8 = 0x40;
pub(crate) const CWR: u8 = 0x80;

/// Protocol number of UDP.
pub(crate) const UDP: u8 = 17;
pub(crate) const UDP_HEADER: usize = 8;
pub(crate) const UDP_LENGTH: usize = 4;
pub(crate) const UDP_CHECKSUM: usize = 6;

/// The field of `N` bytes at an offset; `None` if it is not there whole.
pub(crate) fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// The big-endian field of 16 bits at an offset.
pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u16> {
    field(bytes, at).map(u16::from_be_bytes)
}

/// Writes a field at an offset that was found to be within `bytes` before; elsewhere nothing is written.
pub(crate) fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    if let Some(field) = bytes.get_mut(at..).and_then(|bytes| bytes.first_chunk_mut()) {
        *field = value;
    }
}

/// Writes a big-endian field of 16 bits, as [`put`] does.
pub(crate) fn put_word(bytes: &mut [u8], at: usize, value: u16) {
    put(bytes, at, value.to_be_bytes());
}

/// Bytes of a TCP header with its options, by its data offset; `None` if that is too small, or the field is not there.
pub(crate) fn tcp_header_length(segment: &[u8]) -> Option<usize> {
    let length = usize::from(segment.get(TCP_OFFSET)? >> 4).saturating_mul(4);
    (length >= TCP_HEADER).then_some(length)
}

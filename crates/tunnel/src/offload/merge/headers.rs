//! Headers of a packet, as far as they decide what it can be joined with.

use super::super::checksum::{Sum, pseudo_header};
use super::super::layout::{
    self, ACK, ECE, FIN, IPV4_ADDRESSES, IPV4_DONT_FRAGMENT, IPV4_FRAGMENT, IPV4_HEADER, IPV4_ID,
    IPV4_LENGTH, IPV4_PROTOCOL, IPV4_WITHOUT_OPTIONS, IPV6_ADDRESSES, IPV6_HEADER, IPV6_LENGTH,
    IPV6_NEXT_HEADER, PSH, TCP, TCP_ACKNOWLEDGMENT, TCP_FLAGS, TCP_HEADER, TCP_OFFSET, TCP_SEQUENCE,
    TCP_URGENT, TCP_WINDOW, UDP, UDP_CHECKSUM, UDP_HEADER, UDP_LENGTH,
};

/// A packet, by what it can be joined with.
pub(super) enum Parsed<'a> {
    /// An IP packet between these addresses whose flow is not known: another protocol, a fragment, one with IPv4 options or IPv6
    /// extension headers, or a malformed one.
    Opaque { addresses: &'a [u8] },
    /// A whole TCP segment or UDP datagram.
    Segment(Segment<'a>),
    /// Not an IP packet.
    Unrelated,
}

/// A packet of TCP or UDP without IPv4 options or IPv6 extension headers.
pub(super) struct Segment<'a> {
    packet: &'a [u8],
    /// All headers, of IP and TCP or UDP.
    pub(super) headers: &'a [u8],
    /// Bytes of the IP header.
    pub(super) ip_header: usize,
    pub(super) protocol: u8,
    pub(super) payload: &'a [u8],
    /// Hash of the flow: addresses, ports and protocol. Other flows may have the same.
    pub(super) hash: u64,
    /// TCP sequence number.
    pub(super) sequence: u32,
    /// TCP flags.
    pub(super) flags: u8,
    /// IPv4 identification.
    pub(super) id: u16,
    /// Whether the Don't Fragment bit of IPv4 is set.
    pub(super) dont_fragment: bool,
    /// Whether it can be joined with any other, so far as its own headers say.
    pub(super) may_join: bool,
}

/// The source and destination address of an IP packet, as they follow each other in it; `None`: it is none.
pub(super) fn addresses(packet: &[u8]) -> Option<&[u8]> {
    match packet.first()? >> 4 {
        4 => packet.get(IPV4_ADDRESSES),
        6 => packet.get(IPV6_ADDRESSES),
        _ => None,
    }
}

/// Reads the headers of a packet.
pub(super) fn parse(packet: &[u8]) -> Parsed<'_> {
    match (parse_segment(packet), addresses(packet)) {
        (Some(segment), _) => Parsed::Segment(segment),
        (None, Some(addresses)) => Parsed::Opaque { addresses },
        (None, None) => Parsed::Unrelated,
    }
}

fn parse_segment(packet: &[u8]) -> Option<Segment<'_>> {
    let first = *packet.first()?;
    if first == IPV4_WITHOUT_OPTIONS {
        let fragment = layout::word(packet, IPV4_FRAGMENT)?;
        let is_whole = fragment & !IPV4_DONT_FRAGMENT == 0;
        let is_exact = usize::from(layout::word(packet, IPV4_LENGTH)?) == packet.len();
        let protocol = (is_whole && is_exact).then_some(*packet.get(IPV4_PROTOCOL)?)?;
        let segment = parse_transport(packet, IPV4_HEADER, protocol)?;
        let id = layout::word(packet, IPV4_ID)?;
        return Some(Segment { id, dont_fragment: fragment & IPV4_DONT_FRAGMENT != 0, ..segment });
    }
    let length = usize::from(layout::word(packet, IPV6_LENGTH)?).saturating_add(IPV6_HEADER);
    let is_v6 = first >> 4 == 6 && length == packet.len();
    parse_transport(packet, IPV6_HEADER, is_v6.then_some(*packet.get(IPV6_NEXT_HEADER)?)?)
}

fn parse_transport(packet: &[u8], ip_header: usize, protocol: u8) -> Option<Segment<'_>> {
    let transport = packet.get(ip_header..)?;
    let length = match protocol {
        TCP => layout::tcp_header_length(transport)?,
        UDP => UDP_HEADER,
        _ => return None,
    };
    let (headers, payload) = packet.split_at_checked(ip_header.saturating_add(length))?;
    let (sequence, flags, may_join) = if protocol == TCP {
        let flags = *transport.get(TCP_FLAGS)?;
        let sequence = u32::from_be_bytes(layout::field(transport, TCP_SEQUENCE)?);
        // The kernel takes CWR only in the first packet of a frame. It is in one packet of a round trip at most (RFC 3168, section 6.1.2).
        (sequence, flags, flags & ACK != 0 && flags & !(ACK | ECE | FIN | PSH) == 0)
    } else {
        let is_exact = usize::from(layout::word(transport, UDP_LENGTH)?) == transport.len();
        let has_checksum = layout::word(transport, UDP_CHECKSUM)? != 0;
        (0, 0, is_exact && has_checksum && !is_ip(payload))
    };
    Some(Segment {
        packet,
        headers,
        ip_header,
        protocol,
        payload,
        hash: hash(flow(packet, ip_header)?, protocol),
        sequence,
        flags,
        id: 0,
        dont_fragment: false,
        may_join: may_join && !payload.is_empty(),
    })
}

/// Whether the payload of a datagram is an IP packet: that of a tunnel (IP in UDP, `CONFIG_NET_FOU`). A BPF program that takes the outer
/// headers away cannot do that with a joined packet.
fn is_ip(payload: &[u8]) -> bool {
    let says = |at| layout::word(payload, at).map(usize::from);
    match payload.first().map_or(0, |first| first >> 4) {
        4 => says(IPV4_LENGTH) == Some(payload.len()),
        6 => says(IPV6_LENGTH).map(|length| length.saturating_add(IPV6_HEADER)) == Some(payload.len()),
        _ => false,
    }
}

/// The addresses and ports, which follow each other if nothing is between the IP and the transport header.
fn flow(packet: &[u8], ip_header: usize) -> Option<&[u8]> {
    let start = if ip_header == IPV4_HEADER { IPV4_ADDRESSES.start } else { IPV6_ADDRESSES.start };
    packet.get(start..ip_header.saturating_add(4))
}

/// Needs no secret: flows that a sender has chosen for the same hash only cost a comparison of headers with each open frame.
fn hash(flow: &[u8], protocol: u8) -> u64 {
    let (words, _) = flow.as_chunks::<4>();
    words.iter().fold(protocol.into(), |hash: u64, word| {
        (hash ^ u64::from(u32::from_ne_bytes(*word))).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    })
}

impl Segment<'_> {
    /// Whether it is IPv4.
    pub(super) fn is_v4(&self) -> bool {
        self.ip_header == IPV4_HEADER
    }

    /// The sequence number of the byte behind it.
    pub(super) fn sequence_behind(&self) -> u32 {
        self.sequence.wrapping_add(u32::try_from(self.payload.len()).unwrap_or_default())
    }

    /// Whether it is of the same flow as another one, of which `first` is the packet.
    pub(super) fn is_of_flow_of(&self, first: &[u8]) -> bool {
        let protocol = if self.is_v4() { IPV4_PROTOCOL } else { IPV6_NEXT_HEADER };
        first.first().map(|byte| byte >> 4) == self.headers.first().map(|byte| byte >> 4)
            && first.get(protocol) == Some(&self.protocol)
            && flow(first, self.ip_header) == flow(self.headers, self.ip_header)
    }

    /// Whether it has the same headers as a packet of its flow of as many bytes of headers, apart from what differs between segments:
    /// lengths, IPv4 identification, checksums, sequence number, FIN and PSH.
    pub(super) fn has_headers_of(&self, first: &[u8]) -> bool {
        let is_same_ip = if self.is_v4() {
            // Type of service; flags, time to live and protocol.
            is_same::<2>(self.headers, first, 0) && is_same::<4>(self.headers, first, IPV4_FRAGMENT)
        } else {
            // Traffic class and flow label; next header and hop limit.
            is_same::<4>(self.headers, first, 0) && is_same::<2>(self.headers, first, IPV6_NEXT_HEADER)
        };
        is_same_ip && (self.protocol == UDP || self.has_tcp_header_of(first))
    }

    fn has_tcp_header_of(&self, first: &[u8]) -> bool {
        let own = self.headers.get(self.ip_header..).unwrap_or_default();
        let Some(first) = first.get(self.ip_header..self.headers.len()) else { return false };
        let flags = |header: &[u8]| header.get(TCP_FLAGS).map(|flags| flags & !(FIN | PSH));
        is_same::<4>(own, first, TCP_ACKNOWLEDGMENT)
            && is_same::<1>(own, first, TCP_OFFSET)
            && flags(own) == flags(first)
            && is_same::<2>(own, first, TCP_WINDOW)
            && is_same::<2>(own, first, TCP_URGENT)
            && own.get(TCP_HEADER..) == first.get(TCP_HEADER..)
    }

    /// Whether its checksums are right: see [`has_valid_checksums`].
    pub(super) fn has_valid_checksums(&self) -> bool {
        has_valid_checksums(self.packet)
    }
}

fn is_same<const N: usize>(a: &[u8], b: &[u8], at: usize) -> bool {
    let field: Option<[u8; N]> = layout::field(a, at);
    field.is_some() && field == layout::field(b, at)
}

/// Whether the checksums of a packet that was parsed as a [`Segment`] are right: the kernel does not look at them again in a joined one.
pub(super) fn has_valid_checksums(packet: &[u8]) -> bool {
    let is_v4 = packet.first() == Some(&IPV4_WITHOUT_OPTIONS);
    let at = if is_v4 { IPV4_HEADER } else { IPV6_HEADER };
    let protocol = packet.get(if is_v4 { IPV4_PROTOCOL } else { IPV6_NEXT_HEADER });
    let (Some((ip, transport)), Some(&protocol), Some(addresses)) =
        (packet.split_at_checked(at), protocol, addresses(packet))
    else {
        return false;
    };
    let Ok(length) = u16::try_from(transport.len()) else { return false };
    let is_valid = |sum: Sum| sum.folded() == u16::MAX;
    (!is_v4 || is_valid(Sum::of(ip)))
        && is_valid(pseudo_header(addresses, protocol, length).plus(Sum::of(transport)))
}

//! Cuts what one read of the TUN gave into the packets that go onto the wire, as `tcp_gso_segment`, `__udp_gso_segment` and
//! `inet_gso_segment` of the kernel do, and completes checksums as `skb_checksum_help` does.

use super::checksum::{Sum, pseudo_header};
use super::header::{GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CHECKSUM, VnetHeader};
use super::layout::{
    self, CWR, FIN, IPV4_ADDRESSES, IPV4_CHECKSUM, IPV4_FRAGMENT, IPV4_FRAGMENTED, IPV4_HEADER, IPV4_ID,
    IPV4_LENGTH, IPV4_PROTOCOL, IPV6_ADDRESSES, IPV6_HEADER, IPV6_LENGTH, IPV6_NEXT_HEADER, MAX_PACKET, PSH,
    TCP, TCP_CHECKSUM, TCP_FLAGS, TCP_OFFSET, TCP_SEQUENCE, UDP, UDP_CHECKSUM, UDP_HEADER, UDP_LENGTH,
};

/// Reason why a packet cannot be split as its [`VnetHeader`] says. The kernel gives no such packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Malformed {
    /// The checksum field is not in the packet, or not where the transport protocol has it.
    #[error("the checksum field is not where the protocol has it")]
    Checksum,
    /// The IP or transport header does not fit in the packet, or is not of the protocol that the type says.
    #[error("the headers are not those of the segmentation type")]
    Headers,
    /// Segments without payload, or longer than an IP packet can be.
    #[error("segments of {0} bytes are not possible")]
    SegmentSize(u16),
    /// A segmentation type that is not known, or that this TUN has not asked for, such as fragmentation of UDP (`GSO_UDP`).
    #[error("segmentation type {0} is not known")]
    Type(u8),
}

/// The packets that one read gave, one after the other.
#[derive(Debug)]
pub(crate) struct Split<'a> {
    packet: &'a mut [u8],
    /// `None`: one packet, which is complete.
    template: Option<Template>,
    segments: usize,
    appended: usize,
}

/// Completes the checksum of `packet`, and prepares cutting it.
///
/// # Errors
/// The header and the packet do not fit together; the packet should be dropped.
pub(crate) fn split<'a>(header: &VnetHeader, packet: &'a mut [u8]) -> Result<Split<'a>, Malformed> {
    if header.gso_type == GSO_NONE {
        if header.flags & NEEDS_CHECKSUM != 0 {
            complete_checksum(header, packet).ok_or(Malformed::Checksum)?;
        }
        return Ok(Split { packet, template: None, segments: 1, appended: 0 });
    }
    let template = Template::new(header, packet)?;
    let payload = packet.len().saturating_sub(template.headers);
    // The kernel may give a packet that needs only one segment (`virtio_net_hdr_to_skb`: "not really GSO ones").
    let segments = payload.div_ceil(template.segment_size).max(1);
    Ok(Split { packet, template: Some(template), segments, appended: 0 })
}

impl Split<'_> {
    /// The packet as it was read, for looking up its destination, which all segments have. Once segments were appended, its headers are
    /// those of the last one.
    pub(crate) fn packet(&self) -> &[u8] {
        self.packet
    }

    /// Number of packets that it is cut into: at least one, and at most one for each byte of payload.
    pub(crate) fn segments(&self) -> usize {
        self.segments
    }

    /// Bytes of the longest of them with headers, which is the first one.
    pub(crate) fn max_length(&self) -> usize {
        match &self.template {
            Some(template) => template.headers.saturating_add(template.segment_size).min(self.packet.len()),
            None => self.packet.len(),
        }
    }

    /// Appends the next packet, complete with all checksums; `false`: none is left, and nothing was appended.
    pub(crate) fn append_next(&mut self, to: &mut Vec<u8>) -> bool {
        if self.appended == self.segments {
            return false;
        }
        let Some(template) = &mut self.template else {
            self.appended = self.segments;
            to.extend_from_slice(self.packet);
            return true;
        };
        let Some((headers, payload)) = self.packet.split_at_mut_checked(template.headers) else {
            return false;
        };
        let start = self.appended.saturating_mul(template.segment_size);
        let end = start.saturating_add(template.segment_size).min(payload.len());
        let payload = payload.get(start..end).unwrap_or_default();
        let is_first = self.appended == 0;
        self.appended = self.appended.saturating_add(1);
        template.write(headers, payload, is_first, self.appended == self.segments);
        to.reserve(headers.len().saturating_add(payload.len()));
        to.extend_from_slice(headers);
        to.extend_from_slice(payload);
        true
    }
}

/// Puts the complement of the sum over everything from `checksum_start` on into the checksum field, which holds the sum of the
/// pseudo-header until then. Never zero, as in the kernel: UDP needs that, and for others it is the same.
fn complete_checksum(header: &VnetHeader, packet: &mut [u8]) -> Option<()> {
    let covered = packet.get_mut(usize::from(header.checksum_start)..)?;
    let at = usize::from(header.checksum_offset);
    layout::word(covered, at)?;
    let checksum = Sum::of(covered).checksum_not_zero();
    layout::put_word(covered, at, checksum);
    Some(())
}

/// Headers of the segments: what all have in common, and what the next one has of its own.
#[derive(Debug)]
struct Template {
    /// Bytes of all headers.
    headers: usize,
    /// Offset of the TCP or UDP header.
    transport: usize,
    /// Bytes of payload.
    segment_size: usize,
    /// Over the pseudo-header and the transport header, without what differs between segments: lengths, and [`Varying::Tcp`].
    sum: Sum,
    ip: Ip,
    varying: Varying,
}

#[derive(Debug)]
enum Ip {
    /// The identification of the next segment, and the sum of the header without it and the length.
    V4 {
        id: u16,
        sum: Sum,
    },
    V6,
}

#[derive(Debug)]
enum Varying {
    /// The sequence number of the next segment, and the data offset, which shares a word with the flags.
    Tcp { sequence: u32, offset: u8, flags: u8 },
    /// The length of the whole packet.
    Udp { length: u16 },
}

impl Varying {
    fn taken_out_of(&self, sum: Sum) -> Sum {
        match *self {
            Self::Tcp { sequence, offset, flags } => sum
                .minus_word(high(sequence))
                .minus_word(low(sequence))
                .minus_word(u16::from_be_bytes([offset, flags])),
            Self::Udp { length } => sum.minus_word(length),
        }
    }
}

impl Template {
    /// Reads the headers of `packet`, which stay as they are.
    fn new(header: &VnetHeader, packet: &[u8]) -> Result<Self, Malformed> {
        let protocol = match header.gso_type {
            GSO_UDP_L4 => UDP,
            other if matches!(other & !GSO_ECN, GSO_TCPV4 | GSO_TCPV6) => TCP,
            other => return Err(Malformed::Type(other)),
        };
        let transport = transport_offset(header, protocol, packet).ok_or(Malformed::Headers)?;
        let segment = packet.get(transport..).ok_or(Malformed::Headers)?;
        let (length, varying) = read_transport(protocol, segment).ok_or(Malformed::Headers)?;
        let headers = transport.saturating_add(length);
        let segment_size = usize::from(header.segment_size);
        if segment_size == 0 || headers.saturating_add(segment_size).min(packet.len()) > MAX_PACKET {
            return Err(Malformed::SegmentSize(header.segment_size));
        }
        let is_v4 = packet.first().is_some_and(|first| first >> 4 == 4);
        let addresses =
            packet.get(if is_v4 { IPV4_ADDRESSES } else { IPV6_ADDRESSES }).ok_or(Malformed::Headers)?;
        let transport_header = segment.get(..length).ok_or(Malformed::Headers)?;
        let sum = common_sum(header, protocol, addresses, segment.len(), transport_header)?;
        let ip = if is_v4 { read_ipv4(packet).ok_or(Malformed::Headers)? } else { Ip::V6 };
        Ok(Self { headers, transport, segment_size, sum: varying.taken_out_of(sum), ip, varying })
    }

    /// Writes what the next segment has of its own.
    fn write(&mut self, headers: &mut [u8], payload: &[u8], is_first: bool, is_last: bool) {
        let length = headers.len().saturating_add(payload.len());
        self.ip.write(headers, length);
        // `new` has checked that no segment is longer than lengths can say.
        let length = u16::try_from(length.saturating_sub(self.transport)).unwrap_or(u16::MAX);
        let sum = self.sum.plus(Sum::of(payload)).plus_word(length);
        let Some(transport) = headers.get_mut(self.transport..) else { return };
        match &mut self.varying {
            Varying::Tcp { sequence, offset, flags } => {
                let first_only = if is_first { 0 } else { CWR };
                let last_only = if is_last { 0 } else { FIN | PSH };
                let flags = *flags & !(first_only | last_only);
                let sum = sum.plus_word(high(*sequence)).plus_word(low(*sequence));
                let sum = sum.plus_word(u16::from_be_bytes([*offset, flags]));
                layout::put(transport, TCP_SEQUENCE, sequence.to_be_bytes());
                layout::put(transport, TCP_FLAGS, [flags]);
                layout::put_word(transport, TCP_CHECKSUM, sum.checksum());
                *sequence = sequence.wrapping_add(u32::try_from(payload.len()).unwrap_or_default());
            }
            Varying::Udp { .. } => {
                layout::put_word(transport, UDP_LENGTH, length);
                layout::put_word(transport, UDP_CHECKSUM, sum.plus_word(length).checksum_not_zero());
            }
        }
    }
}

impl Ip {
    /// Writes the length of a segment, `length` bytes with all headers; in IPv4 also its identification and the header's checksum.
    fn write(&mut self, headers: &mut [u8], length: usize) {
        match self {
            Self::V4 { id, sum } => {
                let length = u16::try_from(length).unwrap_or(u16::MAX);
                layout::put_word(headers, IPV4_LENGTH, length);
                layout::put_word(headers, IPV4_ID, *id);
                let checksum = sum.plus_word(length).plus_word(*id).checksum();
                layout::put_word(headers, IPV4_CHECKSUM, checksum);
                *id = id.wrapping_add(1);
            }
            Self::V6 => {
                let length = u16::try_from(length.saturating_sub(IPV6_HEADER)).unwrap_or(u16::MAX);
                layout::put_word(headers, IPV6_LENGTH, length);
            }
        }
    }
}

/// Offset of the transport header; `None` if the IP header is not of the version or protocol that the type says. `header_length` says
/// nothing of it; between the IPv6 header and what `checksum_start` says lie extension headers.
fn transport_offset(header: &VnetHeader, protocol: u8, packet: &[u8]) -> Option<usize> {
    let checksum_start = usize::from(header.checksum_start);
    let says_start = header.flags & NEEDS_CHECKSUM != 0;
    let first = *packet.first()?;
    match (first >> 4, header.gso_type & !GSO_ECN) {
        (4, GSO_TCPV4 | GSO_UDP_L4) => {
            let length = usize::from(first & 0xf).saturating_mul(4);
            let is_whole = layout::word(packet, IPV4_FRAGMENT)? & IPV4_FRAGMENTED == 0;
            let is_well_formed = length >= IPV4_HEADER && is_whole && *packet.get(IPV4_PROTOCOL)? == protocol;
            (is_well_formed && (!says_start || checksum_start == length)).then_some(length)
        }
        (6, GSO_TCPV6 | GSO_UDP_L4) => {
            let is_without_extension = *packet.get(IPV6_NEXT_HEADER)? == protocol;
            match (says_start, is_without_extension) {
                (true, false) if checksum_start > IPV6_HEADER => Some(checksum_start),
                (true, true) if checksum_start == IPV6_HEADER => Some(IPV6_HEADER),
                (false, true) => Some(IPV6_HEADER),
                _ => None,
            }
        }
        _ => None,
    }
}

/// The length of the transport header, which fits in `segment`, and what differs between segments in it.
fn read_transport(protocol: u8, segment: &[u8]) -> Option<(usize, Varying)> {
    let (length, varying) = if protocol == TCP {
        let sequence = u32::from_be_bytes(layout::field(segment, TCP_SEQUENCE)?);
        let [offset, flags] = layout::field(segment, TCP_OFFSET)?;
        (layout::tcp_header_length(segment)?, Varying::Tcp { sequence, offset, flags })
    } else {
        (UDP_HEADER, Varying::Udp { length: layout::word(segment, UDP_LENGTH)? })
    };
    (length <= segment.len()).then_some((length, varying))
}

/// The sum over the pseudo-header without its length and the transport header without its checksum. The former is what the kernel has put
/// into the checksum field, if it did: with a routing header (RFC 8200, section 4.4) the destination in it is not that of the IPv6 header.
fn common_sum(
    header: &VnetHeader,
    protocol: u8,
    addresses: &[u8],
    length: usize,
    transport_header: &[u8],
) -> Result<Sum, Malformed> {
    let at = if protocol == TCP { TCP_CHECKSUM } else { UDP_CHECKSUM };
    let sum = Sum::of(transport_header);
    if header.flags & NEEDS_CHECKSUM == 0 {
        let checksum = layout::word(transport_header, at).ok_or(Malformed::Headers)?;
        return Ok(sum.minus_word(checksum).plus(pseudo_header(addresses, protocol, 0)));
    }
    let length = u16::try_from(length).map_err(|_| Malformed::Headers)?;
    if usize::from(header.checksum_offset) == at {
        Ok(sum.minus_word(length))
    } else {
        Err(Malformed::Checksum)
    }
}

/// Reads what differs between the IPv4 headers of segments, and sums the rest.
fn read_ipv4(packet: &[u8]) -> Option<Ip> {
    let length = usize::from(packet.first()? & 0xf).saturating_mul(4);
    let header = packet.get(..length)?;
    let id = layout::word(header, IPV4_ID)?;
    let sum = Sum::of(header).minus_word(layout::word(header, IPV4_LENGTH)?).minus_word(id);
    Some(Ip::V4 { id, sum: sum.minus_word(layout::word(header, IPV4_CHECKSUM)?) })
}

/// The upper half of a sequence number.
fn high(sequence: u32) -> u16 {
    let [a, b, _, _] = sequence.to_be_bytes();
    u16::from_be_bytes([a, b])
}

/// The lower half of a sequence number.
fn low(sequence: u32) -> u16 {
    let [_, _, a, b] = sequence.to_be_bytes();
    u16::from_be_bytes([a, b])
}

//! Joins consecutive packets of a flow, so that one write gives them to the kernel: `inet_gro_receive`, `ipv6_gro_receive`,
//! `tcp_gro_receive` and `udp_gro_receive_segment` of the kernel. What is joined can be split again without a difference
//! ([`split()`](super::split())), except for the identification of IPv4 packets that may not be fragmented, which says nothing (RFC 6864).

mod headers;

use std::ops::Range;

use super::checksum::{Sum, pseudo_header};
use super::header::{GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, LENGTH, NEEDS_CHECKSUM, VnetHeader};
use super::layout::{
    self, FIN, IPV4_ADDRESSES, IPV4_CHECKSUM, IPV4_HEADER, IPV4_LENGTH, IPV6_ADDRESSES, IPV6_HEADER,
    IPV6_LENGTH, MAX_PACKET, PSH, TCP, TCP_CHECKSUM, TCP_FLAGS, UDP, UDP_CHECKSUM, UDP_LENGTH,
};
use headers::{Parsed, Segment};

/// Packets in a frame: the kernel's `UDP_MAX_SEGMENTS` before 6.9, which it also takes for what is written to a TUN. More than 64 KiB of
/// TCP need with any usual MTU; and a write takes at most `IOV_MAX` = 1,024 parts.
pub(crate) const MAX_SEGMENTS: usize = 64;
/// Flows to whose frames packets can be added at a time. All are searched for each packet; the one that began first makes room.
const MAX_FLOWS: usize = 32;

/// Joins the packets of one batch. Its memory is used again for the next batch.
#[derive(Debug)]
pub(crate) struct Merger {
    /// Whether the TUN takes UDP segments (`TUN_F_USO4` and `TUN_F_USO6`, Linux 6.2).
    udp: bool,
    packets: Vec<Packet>,
    entries: Vec<Entry>,
    /// The entries that a packet may still join, with the [`Segment::hash`] of their flow. A flow has at most one.
    open: Vec<(u64, usize)>,
    parts: Vec<Range<usize>>,
}

/// Data of one write: the header, and then these parts of the buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frame<'a> {
    /// A [`VnetHeader`] as bytes.
    pub(crate) header: [u8; LENGTH],
    /// Ranges of the buffer: a whole packet, and then the payloads of those that were joined to it.
    pub(crate) parts: &'a [Range<usize>],
}

#[derive(Debug)]
struct Packet {
    /// Range of the buffer that is written: the whole packet, or only its payload.
    range: Range<usize>,
    /// The index of the packet that is joined to this one.
    next: Option<usize>,
}

/// A frame whose parts are not yet together.
#[derive(Debug)]
struct Entry {
    /// Indexes of its packets.
    first: usize,
    last: usize,
    joined: Joined,
    header: [u8; LENGTH],
    /// Indexes of its parts, once they are together.
    parts: Range<usize>,
}

/// Properties of a frame that decide whether a packet continues it. All zero in a frame that none can continue.
#[derive(Debug, Clone, Copy, Default)]
struct Joined {
    segments: usize,
    /// Bytes of the first packet's headers, and of its IP header.
    headers: usize,
    ip_header: usize,
    protocol: u8,
    /// Bytes of payload in all packets but the last, and of all together.
    segment_size: usize,
    payload: usize,
    /// The TCP sequence number behind the last packet.
    sequence: u32,
    /// The IPv4 identification of the last packet.
    id: u16,
    ids: Ids,
    /// FIN and PSH of the last packet.
    flags: u8,
    /// Whether the checksums of the first packet were found to be valid. They are not looked at before another packet would join.
    is_valid: bool,
}

/// Sequence of the IPv4 identification from packet to packet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Ids {
    /// The same in all, which is valid if the packets may not be fragmented.
    Constant,
    Incrementing,
    /// There is only one packet, or no identification.
    #[default]
    Unknown,
}

impl Merger {
    /// `udp`: the TUN takes UDP segments (Linux 6.2); otherwise only TCP is joined.
    pub(crate) fn new(udp: bool) -> Self {
        Self { udp, packets: Vec::new(), entries: Vec::new(), open: Vec::new(), parts: Vec::new() }
    }

    /// Adds a packet: the `range` of `buffer`, without padding behind it. `buffer` is the same for all packets of the batch, and the
    /// ranges do not overlap; what lies in them stays until the frames are written.
    pub(crate) fn push(&mut self, buffer: &[u8], range: Range<usize>) {
        match buffer.get(range.clone()).map_or(Parsed::Unrelated, headers::parse) {
            Parsed::Segment(segment) if self.udp || segment.protocol == TCP => {
                self.push_segment(buffer, range, &segment)
            }
            Parsed::Opaque { addresses } => {
                self.close_between(buffer, addresses);
                self.begin(range, Joined::default());
            }
            _ => {
                self.begin(range, Joined::default());
            }
        }
    }

    fn push_segment(&mut self, buffer: &[u8], range: Range<usize>, segment: &Segment) {
        if let Some(slot) = self.find(buffer, segment) {
            let index = self.open.get(slot).map(|(_, index)| *index);
            if let Some(joined) = index.and_then(|index| self.join(buffer, index, segment)) {
                self.add(index, range, segment, joined, slot);
                return;
            }
            // Whether it can be joined or not: no later packet may come to stand before this one.
            self.open.remove(slot);
        }
        if !segment.may_join {
            self.begin(range, Joined::default());
            return;
        }
        let index = self.begin(range, Joined::begin(segment));
        if segment.flags & (FIN | PSH) == 0 {
            if self.open.len() >= MAX_FLOWS {
                self.open.remove(0);
            }
            self.open.push((segment.hash, index));
        }
    }

    /// Position of the open entry of this flow. The newest are looked at first: packets of a flow come in trains.
    fn find(&self, buffer: &[u8], segment: &Segment) -> Option<usize> {
        self.open.iter().rposition(|(hash, index)| {
            *hash == segment.hash
                && self.first(buffer, *index).is_some_and(|first| segment.is_of_flow_of(first))
        })
    }

    /// The first packet of an entry.
    fn first<'a>(&self, buffer: &'a [u8], index: usize) -> Option<&'a [u8]> {
        let packet = self.packets.get(self.entries.get(index)?.first)?;
        buffer.get(packet.range.clone())
    }

    /// Properties of an entry once this segment has joined it; `None` if they cannot be joined.
    fn join(&self, buffer: &[u8], index: usize, segment: &Segment) -> Option<Joined> {
        let joined = self.entries.get(index)?.joined;
        let first = self.first(buffer, index)?;
        let next = joined.with(segment)?;
        if !segment.has_headers_of(first) {
            return None;
        }
        let are_valid =
            (joined.is_valid || headers::has_valid_checksums(first)) && segment.has_valid_checksums();
        are_valid.then_some(next)
    }

    /// Adds the payload of a segment to an entry, which it may end.
    fn add(
        &mut self,
        index: Option<usize>,
        range: Range<usize>,
        segment: &Segment,
        joined: Joined,
        slot: usize,
    ) {
        let added = self.packets.len();
        let start = range.start.saturating_add(segment.headers.len());
        self.packets.push(Packet { range: start..range.end, next: None });
        if let Some(entry) = index.and_then(|index| self.entries.get_mut(index)) {
            if let Some(last) = self.packets.get_mut(entry.last) {
                last.next = Some(added);
            }
            entry.last = added;
            entry.joined = joined;
        }
        if joined.is_ended_by(segment) {
            self.open.remove(slot);
        }
    }

    /// A frame of its own, to which others may be joined.
    fn begin(&mut self, range: Range<usize>, joined: Joined) -> usize {
        let first = self.packets.len();
        let index = self.entries.len();
        self.packets.push(Packet { range, next: None });
        self.entries.push(Entry { first, last: first, joined, header: [0; LENGTH], parts: 0..0 });
        index
    }

    /// Closes all frames between these addresses: the packet may be of any flow between them, as fragments do not say it.
    fn close_between(&mut self, buffer: &[u8], addresses: &[u8]) {
        let entries = &self.entries;
        let packets = &self.packets;
        self.open.retain(|(_, index)| {
            let packet = entries.get(*index).and_then(|entry| packets.get(entry.first));
            let first = packet.and_then(|packet| buffer.get(packet.range.clone()));
            first.and_then(headers::addresses) != Some(addresses)
        });
    }

    /// Ends all frames: writes the headers of joined packets into `buffer`. [`Self::frames`] has them afterwards.
    pub(crate) fn finish(&mut self, buffer: &mut [u8]) {
        self.open.clear();
        self.parts.clear();
        for entry in &mut self.entries {
            let start = self.parts.len();
            let mut next = Some(entry.first);
            while let Some(packet) = next.and_then(|index| self.packets.get(index)) {
                self.parts.push(packet.range.clone());
                next = packet.next;
            }
            entry.parts = start..self.parts.len();
            if let Some(first) = self.parts.get(start).and_then(|range| buffer.get_mut(range.clone()))
                && entry.joined.segments > 1
            {
                entry.header = entry.joined.write(first).write();
            }
        }
    }

    /// Frames to write, in this order. A frame stands where its first packet was, and packets of a flow stay in their order. Before
    /// [`Self::finish`] the frames have no parts.
    pub(crate) fn frames(&self) -> impl Iterator<Item = Frame<'_>> {
        self.entries.iter().map(|entry| Frame {
            header: entry.header,
            parts: self.parts.get(entry.parts.clone()).unwrap_or_default(),
        })
    }

    /// Forgets all packets, for the next batch.
    pub(crate) fn clear(&mut self) {
        self.packets.clear();
        self.entries.clear();
        self.open.clear();
        self.parts.clear();
    }
}

impl Joined {
    fn begin(segment: &Segment) -> Self {
        Self {
            segments: 1,
            headers: segment.headers.len(),
            ip_header: segment.ip_header,
            protocol: segment.protocol,
            segment_size: segment.payload.len(),
            payload: segment.payload.len(),
            sequence: segment.sequence_behind(),
            id: segment.id,
            ids: Ids::Unknown,
            flags: 0,
            is_valid: false,
        }
    }

    /// The frame with one packet more; `None` if lengths, sequence or identifications do not fit.
    fn with(&self, segment: &Segment) -> Option<Self> {
        let length = segment.payload.len();
        let payload = self.payload.saturating_add(length);
        let fits = segment.may_join
            && self.headers == segment.headers.len()
            && length <= self.segment_size
            && self.headers.saturating_add(payload) <= MAX_PACKET
            && (self.protocol == UDP || self.sequence == segment.sequence);
        fits.then_some(Self {
            segments: self.segments.saturating_add(1),
            payload,
            sequence: segment.sequence_behind(),
            id: segment.id,
            ids: self.ids_with(segment)?,
            flags: segment.flags & (FIN | PSH),
            is_valid: true,
            ..*self
        })
    }

    /// Continues the sequence of identifications, as the kernel's `gro_receive_network_flush` does; `None` if the segment breaks it.
    fn ids_with(&self, segment: &Segment) -> Option<Ids> {
        if !segment.is_v4() {
            return Some(Ids::Unknown);
        }
        let ids = match segment.id.wrapping_sub(self.id) {
            0 if segment.dont_fragment => Ids::Constant,
            1 => Ids::Incrementing,
            _ => return None,
        };
        (self.ids == Ids::Unknown || self.ids == ids).then_some(ids)
    }

    /// Whether the segment, which was added last, is one that only the last of a frame can be.
    fn is_ended_by(&self, segment: &Segment) -> bool {
        segment.payload.len() < self.segment_size || self.flags != 0 || self.segments >= MAX_SEGMENTS
    }

    /// Writes the headers of all packets together into those of the first, and says how the kernel can split them.
    fn write(&self, first: &mut [u8]) -> VnetHeader {
        let is_v4 = self.ip_header == IPV4_HEADER;
        let length = self.headers.saturating_add(self.payload);
        let transport_length = field(length.saturating_sub(self.ip_header));
        let addresses = first.get(if is_v4 { IPV4_ADDRESSES } else { IPV6_ADDRESSES }).unwrap_or_default();
        let partial = pseudo_header(addresses, self.protocol, transport_length).folded();
        if let Some((ip, transport)) = first.split_at_mut_checked(self.ip_header) {
            write_ip(ip, length);
            if self.protocol == TCP {
                let flags = transport.get(TCP_FLAGS).map_or(0, |flags| flags | self.flags);
                layout::put(transport, TCP_FLAGS, [flags]);
                layout::put_word(transport, TCP_CHECKSUM, partial);
            } else {
                layout::put_word(transport, UDP_LENGTH, transport_length);
                layout::put_word(transport, UDP_CHECKSUM, partial);
            }
        }
        VnetHeader {
            flags: NEEDS_CHECKSUM,
            gso_type: match (self.protocol, is_v4) {
                (TCP, true) => GSO_TCPV4,
                (TCP, false) => GSO_TCPV6,
                _ => GSO_UDP_L4,
            },
            header_length: field(self.headers),
            segment_size: field(self.segment_size),
            checksum_start: field(self.ip_header),
            checksum_offset: field(if self.protocol == TCP { TCP_CHECKSUM } else { UDP_CHECKSUM }),
        }
    }
}

fn write_ip(ip: &mut [u8], length: usize) {
    if ip.len() == IPV4_HEADER {
        layout::put_word(ip, IPV4_LENGTH, field(length));
        layout::put_word(ip, IPV4_CHECKSUM, 0);
        let checksum = Sum::of(ip).checksum();
        layout::put_word(ip, IPV4_CHECKSUM, checksum);
    } else {
        layout::put_word(ip, IPV6_LENGTH, field(length.saturating_sub(IPV6_HEADER)));
    }
}

/// A length as a field: none is beyond [`MAX_PACKET`].
fn field(length: usize) -> u16 {
    u16::try_from(length).unwrap_or(u16::MAX)
}

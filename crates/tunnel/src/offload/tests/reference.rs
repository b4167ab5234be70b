//! The work of [`split()`](super::super::split()), slow and plain: each segment is built on its own, and every checksum is a sum over
//! all that it covers. Nothing of the code that is tested is used.
//!
//! The fuzz target `offload` and `tests/corpus.rs` include this file too.

/// Bytes of `struct virtio_net_hdr`, with which reads and writes begin.
pub(super) const HEADER: usize = 10;
const NEEDS_CHECKSUM: u8 = 1;
/// The first segmentation type is for IPv4, the second for IPv6.
const TCP_TYPES: [u8; 2] = [1, 4];
const UDP_TYPE: u8 = 5;
const ECN: u8 = 0x80;
const FIN_AND_PSH: u8 = 1 | 8;
const CWR: u8 = 0x80;
const MAX_PACKET: usize = 65_535;

/// Layout of the headers of a TCP or UDP packet that is no fragment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    v6: bool,
    tcp: bool,
    /// Position of the TCP or UDP header.
    transport: usize,
    /// Bytes of all headers.
    headers: usize,
}

impl Shape {
    /// Layout of a packet whose IP header says all: there is no IPv6 extension header.
    pub(super) fn of(packet: &[u8]) -> Option<Self> {
        let (v6, transport, protocol) = match packet.first()? >> 4 {
            4 if packet.len() >= 20 => (false, usize::from(packet[0] & 15) * 4, packet[9]),
            6 if packet.len() >= 40 => (true, 40, packet[6]),
            _ => return None,
        };
        let is_whole = v6 || (transport >= 20 && word(packet, 6) & 0x3fff == 0);
        let tcp = [(6, true), (17, false)].into_iter().find(|(number, _)| *number == protocol)?.1;
        if is_whole { Self::at(packet, v6, tcp, transport) } else { None }
    }

    fn at(packet: &[u8], v6: bool, tcp: bool, transport: usize) -> Option<Self> {
        let segment = packet.get(transport..)?;
        let length = if tcp { usize::from(segment.get(12)? >> 4) * 4 } else { 8 };
        let fits = length <= segment.len() && length >= if tcp { 20 } else { 8 };
        fits.then_some(Self { v6, tcp, transport, headers: transport + length })
    }

    /// Layout of the packet of a read, as the read's header says; `None` if that is not so.
    fn of_read(header: &[u8], packet: &[u8]) -> Option<Self> {
        let (v6, kind) = (packet.first()? >> 4 == 6, header[1]);
        let tcp = kind & !ECN == TCP_TYPES[usize::from(v6)];
        let start = (header[0] & NEEDS_CHECKSUM != 0).then(|| native(header, 6));
        let plain = Self::of(packet).filter(|shape| shape.tcp == tcp);
        let extended = || {
            let is_extended = v6 && packet.len() >= 40 && packet[6] != if tcp { 6 } else { 17 };
            start
                .filter(|start| is_extended && *start > 40)
                .and_then(|start| Self::at(packet, v6, tcp, start))
        };
        let shape = plain.or_else(extended).filter(|_| tcp || kind == UDP_TYPE)?;
        let fits = start.is_none_or(|start| {
            start == shape.transport
                && native(header, 8) + start == shape.checksum()
                && shape.length(packet) <= MAX_PACKET
        });
        fits.then_some(shape)
    }

    /// Position of the TCP or UDP checksum.
    fn checksum(&self) -> usize {
        self.transport + if self.tcp { 16 } else { 6 }
    }

    /// Bytes from the TCP or UDP header on.
    fn length(&self, packet: &[u8]) -> usize {
        packet.len() - self.transport
    }

    /// The sum of the pseudo-header without the length.
    fn pseudo_sum(&self, packet: &[u8]) -> u16 {
        let addresses = if self.v6 { &packet[8..40] } else { &packet[12..20] };
        slow_sum(&[addresses, &[0, if self.tcp { 6 } else { 17 }]].concat())
    }

    /// Writes the lengths and checksums that the packet has to have, with this sum of the pseudo-header without the length.
    fn complete(&self, packet: &mut [u8], pseudo_sum: u16) {
        self.set_lengths(packet);
        let at = self.checksum();
        put(packet, at, 0);
        let length = self.length(packet) as u16;
        let start = [pseudo_sum, length].map(u16::to_be_bytes);
        let checksum = !slow_sum(&[start.as_flattened(), &packet[self.transport..]].concat());
        put(packet, at, if !self.tcp && checksum == 0 { u16::MAX } else { checksum });
    }

    fn set_lengths(&self, packet: &mut [u8]) {
        if self.v6 {
            put(packet, 4, (packet.len() - 40) as u16);
        } else {
            put(packet, 2, packet.len() as u16);
            put(packet, 10, 0);
            put(packet, 10, !slow_sum(&packet[..self.transport]));
        }
        if !self.tcp {
            put(packet, self.transport + 4, self.length(packet) as u16);
        }
    }

    /// The packet `index` places behind this one, which has the same payload length.
    fn advance(&self, packet: &mut [u8], index: usize, payload: usize) {
        if !self.v6 {
            put(packet, 4, word(packet, 4).wrapping_add(index as u16));
        }
        if self.tcp {
            let sequence = &mut packet[self.transport + 4..][..4];
            let next =
                u32::from_be_bytes(sequence.try_into().unwrap()).wrapping_add((index * payload) as u32);
            sequence.copy_from_slice(&next.to_be_bytes());
        }
    }
}

/// The packets that a read is to be cut into; `None` if its header and its packet do not fit together.
pub(super) fn split(read: &[u8]) -> Option<Vec<Vec<u8>>> {
    let (header, packet) = read.split_at_checked(HEADER)?;
    let is_partial = header[0] & NEEDS_CHECKSUM != 0;
    if header[1] == 0 {
        return if is_partial { complete(header, packet) } else { Some(vec![packet.to_vec()]) };
    }
    let shape = Shape::of_read(header, packet)?;
    let size = native(header, 4);
    if size == 0 || (shape.headers + size).min(packet.len()) > MAX_PACKET {
        return None;
    }
    // What the kernel has put into the checksum field is with the length.
    let length = !(shape.length(packet) as u16);
    let without_length = [word(packet, shape.checksum()), length].map(u16::to_be_bytes);
    let pseudo_sum =
        if is_partial { slow_sum(without_length.as_flattened()) } else { shape.pseudo_sum(packet) };
    let (headers, payload) = packet.split_at(shape.headers);
    let chunks: Vec<&[u8]> = if payload.is_empty() { vec![&[]] } else { payload.chunks(size).collect() };
    let segment = |(index, chunk): (usize, &&[u8])| {
        let mut segment = [headers, chunk].concat();
        shape.advance(&mut segment, index, size);
        if shape.tcp {
            let first_only = if index > 0 { CWR } else { 0 };
            let last_only = if index + 1 < chunks.len() { FIN_AND_PSH } else { 0 };
            segment[shape.transport + 13] &= !(first_only | last_only);
        }
        shape.complete(&mut segment, pseudo_sum);
        segment
    };
    Some(chunks.iter().enumerate().map(segment).collect())
}

/// A packet that only needs its checksum.
fn complete(header: &[u8], packet: &[u8]) -> Option<Vec<Vec<u8>>> {
    let (start, mut packet) = (native(header, 6), packet.to_vec());
    let covered = packet.get_mut(start..)?;
    let checksum = !slow_sum(covered);
    let field = covered.get_mut(native(header, 8)..)?.first_chunk_mut()?;
    *field = if checksum == 0 { [0xff; 2] } else { checksum.to_be_bytes() };
    Some(vec![packet])
}

/// The packet with the lengths and checksums that it has to have, if it is one of TCP or UDP.
pub(super) fn repaired(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    if let Some(shape) = Shape::of(&packet) {
        let pseudo_sum = shape.pseudo_sum(&packet);
        shape.complete(&mut packet, pseudo_sum);
    }
    packet
}

/// The packet that follows this one in its flow, with as many bytes of payload. IPv4 numbers it, or does not.
pub(super) fn following(packet: &[u8], is_numbered: bool) -> Vec<u8> {
    let mut next = packet.to_vec();
    if let Some(shape) = Shape::of(packet) {
        shape.advance(&mut next, 1, packet.len() - shape.headers);
        if !is_numbered && !shape.v6 {
            next[4..6].copy_from_slice(&packet[4..6]);
        }
    }
    repaired(&next)
}

/// Whether a receiver takes the packet: lengths and checksums are right.
pub(super) fn is_valid(packet: &[u8]) -> bool {
    let Some(shape) = Shape::of(packet) else { return false };
    let length = shape.length(packet);
    let says_length = if shape.v6 {
        usize::from(word(packet, 4)) + 40 == packet.len()
    } else {
        usize::from(word(packet, 2)) == packet.len() && slow_sum(&packet[..shape.transport]) == u16::MAX
    };
    let start = [shape.pseudo_sum(packet), length as u16].map(u16::to_be_bytes);
    let sum = slow_sum(&[start.as_flattened(), &packet[shape.transport..]].concat());
    says_length && sum == u16::MAX && (shape.tcp || usize::from(word(packet, shape.transport + 4)) == length)
}

/// Whether the packet of a read has the sum that its checksum field must have before it is cut, or needs none.
pub(super) fn has_pseudo_sum(read: &[u8]) -> bool {
    let (header, packet) = read.split_at(HEADER);
    header[0] & NEEDS_CHECKSUM == 0
        || Shape::of(packet).is_some_and(|shape| {
            let sum = [shape.pseudo_sum(packet), shape.length(packet) as u16].map(u16::to_be_bytes);
            shape.transport == native(header, 6)
                && slow_sum(sum.as_flattened()) % u16::MAX == word(packet, shape.checksum()) % u16::MAX
        })
}

/// Whether the kernel takes a write of joined packets as what it is: `virtio_net_hdr_to_skb` (include/linux/virtio_net.h) by its
/// header, and then IP by that of the packet, of which the lengths and the sum of the pseudo-header are those of the whole.
pub(super) fn is_sound(write: &[u8]) -> bool {
    let (header, packet) = write.split_at(HEADER);
    let Some(shape) = Shape::of(packet) else { return false };
    let kind = if shape.tcp { TCP_TYPES[usize::from(shape.v6)] } else { UDP_TYPE };
    let offset = shape.checksum() - shape.transport;
    let mut expected = packet.to_vec();
    shape.set_lengths(&mut expected);
    header[..2] == [NEEDS_CHECKSUM, kind]
        && [2, 6, 8].map(|at| native(header, at)) == [shape.headers, shape.transport, offset]
        && packet.len() <= MAX_PACKET
        && packet == expected
        && has_pseudo_sum(write)
}

/// The one's-complement sum (RFC 1071), word by word.
pub(super) fn slow_sum(bytes: &[u8]) -> u16 {
    let mut sum = 0_u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The field of 16 bits at an offset, big-endian as in all headers of packets.
pub(super) fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn put(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// A field of `struct virtio_net_hdr`, in the byte order of this host.
fn native(header: &[u8], at: usize) -> usize {
    u16::from_ne_bytes([header[at], header[at + 1]]).into()
}

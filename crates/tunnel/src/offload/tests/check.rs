//! Properties of each read and each batch of packets, whatever bytes they are.
//!
//! The fuzz target `offload` and `tests/corpus.rs` include this file too.

use std::collections::BTreeSet;

use super::reference::{self, HEADER, following, has_pseudo_sum, is_sound, is_valid, repaired, word};

/// Packets in a frame, and in a batch that is made of a fuzzer's bytes.
const MAX_SEGMENTS: usize = 64;
const MAX_BATCH: usize = 256;

/// The two functions that are tested.
pub(super) struct Offload {
    /// `split_read` of the crate.
    pub(super) split: fn(&[u8]) -> Option<Packets>,
    /// `join_packets` of the crate.
    pub(super) join: fn(&[Vec<u8>], bool) -> Packets,
}

type Packets = Vec<Vec<u8>>;

/// Number of packets, and of the writes that they became. `None` if a read was refused.
pub(super) type Counts = Option<(usize, usize)>;

impl Offload {
    /// Takes the input of a fuzz target. The first byte says what the others are: bit 0, packets instead of a read; bit 1, the TUN
    /// takes UDP segments.
    pub(super) fn check(&self, input: &[u8]) -> Counts {
        let (flags, bytes) = input.split_first()?;
        let udp = flags & 2 != 0;
        if flags & 1 == 0 {
            self.check_read(bytes, udp)
        } else {
            let packets = packets(bytes);
            Some((packets.len(), self.check_batch(&packets, udp)))
        }
    }

    /// A read is refused or cut as the reference does it, into buffers that never grow, and the segments can be joined again.
    pub(super) fn check_read(&self, read: &[u8], udp: bool) -> Counts {
        let packets = (self.split)(read);
        assert_eq!(packets, reference::split(read));
        let packets = packets?;
        let whole = &read[HEADER..];
        assert!(!packets.is_empty() && packets.len() <= whole.len().max(1));
        assert!(packets.iter().all(|packet| packet.capacity() <= whole.len()), "a buffer has grown");
        if read[1] != 0 {
            let length: usize = packets.iter().map(Vec::len).sum();
            let headers = (length - whole.len()).checked_div(packets.len() - 1);
            let payload =
                headers.map(|headers| packets.iter().flat_map(|it| &it[headers..]).copied().collect());
            assert_eq!(payload, headers.map(|headers| whole[headers..].to_vec()));
            assert!(!has_pseudo_sum(read) || packets.iter().all(|packet| is_valid(packet)));
        }
        Some((packets.len(), self.check_batch(&packets, udp)))
    }

    /// Packets are written each as it is, or joined as the kernel takes it, and can be split again: all of them, and those of a flow in
    /// their order. Returns how many writes there are.
    pub(super) fn check_batch(&self, sent: &[Vec<u8>], udp: bool) -> usize {
        let writes = (self.join)(sent, udp);
        let mut received = Vec::new();
        for write in &writes {
            let packets = reference::split(write).unwrap();
            assert_eq!((self.split)(write).as_ref(), Some(&packets));
            let is_joined = packets.len() > 1;
            assert!(is_joined || write[..HEADER] == [0; HEADER]);
            assert!(!is_joined || (packets.len() <= MAX_SEGMENTS && is_sound(write)));
            assert!(!is_joined || udp || flow(&packets[0]).transport.is_some_and(|it| it[0] == 6));
            received.extend(packets.into_iter().map(|packet| (packet, is_joined)));
        }
        assert_eq!(received.len(), sent.len());
        assert_in_order(sent, &received);
        writes.len()
    }
}

/// Packets of a flow are the same, in the same order. Of what was `received`, it is known whether it was joined.
fn assert_in_order(sent: &[Vec<u8>], received: &[(Vec<u8>, bool)]) {
    let sent: Vec<_> = sent.iter().map(|packet| (flow(packet), packet)).collect();
    let received: Vec<_> = received.iter().map(|(packet, joined)| (flow(packet), packet, *joined)).collect();
    let flows: BTreeSet<_> = sent.iter().map(|(flow, _)| flow).collect();
    for flow in flows {
        let mut received = received.iter().filter(|(other, ..)| flow.is_in_order_with(other));
        for (_, packet) in sent.iter().filter(|(other, _)| flow.is_in_order_with(other)) {
            let (_, same, is_joined) = received.next().expect("a packet is lost");
            if *is_joined {
                assert_eq!(without_id(packet), without_id(same));
                assert!(is_valid(packet), "joining hides a wrong checksum");
            } else {
                assert_eq!(packet, same);
            }
        }
        assert_eq!(received.next(), None);
    }
}

/// Makes packets of a fuzzer's bytes. Each begins with 16 bits, big-endian, of which the two highest say what follows. 0: a packet of
/// so many bytes, whose lengths and checksums are set right; 1: one as it is; 2 and 3: so many more (modulo 64) that follow the last one
/// in its flow, with IPv4 identifications that are counted (2) or the same (3).
fn packets(mut bytes: &[u8]) -> Packets {
    let mut packets = Packets::new();
    while let Some((prefix, rest)) = bytes.split_first_chunk()
        && packets.len() < MAX_BATCH
    {
        let prefix = u16::from_be_bytes(*prefix);
        let (kind, number) = (prefix >> 14, usize::from(prefix & 0x3fff));
        let (packet, behind) = rest.split_at(if kind < 2 { number.min(rest.len()) } else { 0 });
        bytes = behind;
        match kind {
            0 => packets.push(repaired(packet)),
            1 => packets.push(packet.to_vec()),
            _ => {
                for _ in 0..=number % 64 {
                    packets.extend(packets.last().map(|last| following(last, kind == 2)));
                }
            }
        }
    }
    packets
}

/// Flow of a packet, as its headers say: packets of one flow have to stay in order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Flow {
    /// Source and destination; empty if it is not IP.
    addresses: Vec<u8>,
    /// Protocol and ports; `None` if the packet is a fragment or has more headers, so that it may be of any flow between the addresses.
    transport: Option<Vec<u8>>,
}

fn flow(packet: &[u8]) -> Flow {
    let (addresses, protocol, at) = match packet.first().map(|first| first >> 4) {
        Some(4) => (packet.get(12..20), packet.get(9), 20),
        Some(6) => (packet.get(8..40), packet.get(6), 40),
        _ => (None, None, 0),
    };
    let is_plain = match packet.first() {
        Some(0x45) => packet.len() >= 20 && word(packet, 6) & 0xbfff == 0,
        Some(0x60..=0x6f) => true,
        _ => false,
    };
    let protocol = protocol.filter(|protocol| is_plain && [6, 17].contains(*protocol));
    let ports = packet.get(at..at + 4);
    let transport = protocol.zip(ports).map(|(protocol, ports)| [&[*protocol], ports].concat());
    Flow { addresses: addresses.unwrap_or_default().to_vec(), transport }
}

impl Flow {
    fn is_in_order_with(&self, other: &Self) -> bool {
        self.addresses == other.addresses && (other.transport.is_none() || self.transport == other.transport)
    }
}

/// A packet that was joined, without the identification of one that may not be fragmented (RFC 6864), and with checksums of which zero
/// is written in one of its two forms.
fn without_id(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    if packet[0] >> 4 == 4 && packet[6] & 0x40 != 0 {
        packet[4..6].fill(0);
    }
    repaired(&packet)
}

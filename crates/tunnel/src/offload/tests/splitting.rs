//! Packets that the kernel gives in one read.

use proptest::prelude::*;

use super::super::header::VnetHeader;
use super::super::split::{Malformed, split};
use super::builder::{ACK, CWR, ECE, FIN, PSH, Spec, any_spec};
use super::{OFFLOAD, drain};

const NEEDS_CHECKSUM: u8 = 1;

/// The header with which the kernel would give a packet; it says the length of the headers wrongly.
fn header(spec: &Spec, segment_size: u16) -> VnetHeader {
    VnetHeader {
        flags: NEEDS_CHECKSUM,
        gso_type: match (spec.tcp, spec.v6) {
            (true, false) => 1,
            (true, true) => 4,
            (false, _) => 5,
        },
        header_length: 3,
        segment_size,
        checksum_start: spec.ip_header() as u16,
        checksum_offset: if spec.tcp { 16 } else { 6 },
    }
}

/// The packets into which one is to be cut, each of them built on its own.
fn expected(spec: &Spec, segment_size: usize) -> Vec<Vec<u8>> {
    let chunks: Vec<_> = spec.payload.chunks(segment_size).collect();
    let segment = |(index, chunk): (usize, &&[u8])| {
        let mut flags = spec.flags;
        flags &= !if index > 0 { CWR } else { 0 };
        flags &= !if index + 1 < chunks.len() { FIN | PSH } else { 0 };
        let sequence = spec.sequence.wrapping_add((index * segment_size) as u32);
        let id = spec.id.wrapping_add(index as u16);
        Spec { flags, sequence, id, payload: chunk.to_vec(), ..spec.clone() }.build()
    };
    chunks.iter().enumerate().map(segment).collect()
}

#[test]
fn a_packet_is_cut_into_segments_with_headers_of_their_own() {
    for (v6, tcp) in [(false, false), (false, true), (true, false), (true, true)] {
        let all = ACK | PSH | FIN | ECE | CWR;
        let spec = Spec { flags: all, ..Spec::new(v6, tcp, 3 * 1300 + 7) };
        let mut packet = spec.build_partial();
        let whole = packet.clone();
        let mut split = split(&header(&spec, 1300), &mut packet).unwrap();
        assert_eq!(split.packet(), whole);
        assert_eq!((split.segments(), split.max_length()), (4, spec.headers() + 1300));
        let packets = drain(&mut split);
        assert_eq!(packets, expected(&spec, 1300));
        let flags = |packet: &[u8]| packet[spec.ip_header() + 13];
        if tcp {
            assert_eq!(
                [0, 1, 2, 3].map(|at| flags(&packets[at])),
                [ACK | ECE | CWR, ACK | ECE, ACK | ECE, ACK | ECE | PSH | FIN]
            );
        }
    }
}

#[test]
fn the_longest_packet_is_cut() {
    let spec = Spec::new(false, true, 65_535 - 52);
    let mut packet = spec.build_partial();
    assert_eq!(packet.len(), 65_535);
    assert_eq!(drain(&mut split(&header(&spec, 1448), &mut packet).unwrap()), expected(&spec, 1448));
}

#[test]
fn a_packet_that_is_not_to_be_cut_has_its_checksum_completed() {
    for (v6, tcp) in [(false, false), (false, true), (true, false), (true, true)] {
        let spec = Spec { extension: v6, ..Spec::new(v6, tcp, 999) };
        let mut packet = spec.build_partial();
        let partial = VnetHeader { gso_type: 0, segment_size: 0, ..header(&spec, 0) };
        let mut completed = split(&partial, &mut packet).unwrap();
        assert_eq!((completed.segments(), completed.max_length()), (1, spec.build().len()));
        assert_eq!(drain(&mut completed), [spec.build()]);

        let mut packet = b"anything".to_vec();
        let mut same = split(&VnetHeader::default(), &mut packet).unwrap();
        assert_eq!(drain(&mut same), [b"anything"]);
    }
}

#[test]
fn a_udp_checksum_of_zero_is_written_as_its_other_form() {
    let mut spec = Spec::new(false, false, 2);
    spec.payload = vec![0, 0];
    let sum = u16::from_be_bytes([spec.build()[26], spec.build()[27]]);
    spec.payload = sum.to_be_bytes().to_vec();
    assert_eq!(spec.build()[26..28], [0xff, 0xff]);
    for gso_type in [0, 5] {
        let mut packet = spec.build_partial();
        let header = VnetHeader { gso_type, ..header(&spec, 2) };
        assert_eq!(drain(&mut split(&header, &mut packet).unwrap()), [spec.build()]);
    }
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let spec = Spec::new(false, true, 100);
    let good = header(&spec, 10);
    let refused =
        |header: VnetHeader, mut packet: Vec<u8>| split(&header, &mut packet).map(drop).unwrap_err();
    let of = |header| refused(header, spec.build_partial());
    assert_eq!(of(VnetHeader { segment_size: 0, ..good }), Malformed::SegmentSize(0));
    for gso_type in [2, 3, 6, 0x83, 0x85, 0x80] {
        assert_eq!(
            of(VnetHeader { gso_type, ..good }),
            Malformed::Type(gso_type),
            "UFO, unknown, ECN without TCP"
        );
    }
    for gso_type in [4, 0x84, 5] {
        assert_eq!(of(VnetHeader { gso_type, ..good }), Malformed::Headers, "of another version or protocol");
    }
    assert_eq!(of(VnetHeader { checksum_start: 24, ..good }), Malformed::Headers);
    assert_eq!(of(VnetHeader { checksum_offset: 6, ..good }), Malformed::Checksum);
    let none = VnetHeader { gso_type: 0, ..good };
    assert_eq!(of(VnetHeader { checksum_offset: 131, ..none }), Malformed::Checksum);
    assert_eq!(of(VnetHeader { checksum_start: u16::MAX, ..none }), Malformed::Checksum);
    for length in 0..spec.headers() {
        assert_eq!(refused(good, spec.build_partial()[..length].to_vec()), Malformed::Headers);
    }
    let fragment = Spec { fragment: 0x2000, ..spec.clone() };
    assert_eq!(refused(good, fragment.build_partial()), Malformed::Headers);
    let too_long = Spec::new(true, true, 65_535);
    assert_eq!(refused(header(&too_long, 65_500), too_long.build_partial()), Malformed::SegmentSize(65_500));
}

proptest! {
    /// Extension headers and IPv4 options included, and with the checksum of the whole packet where the kernel has not left it open.
    #[test]
    fn segments_are_those_of_the_plain_builder(
        spec in any_spec(),
        length in 1..5000_usize,
        segment_size in 1..2000_u16,
        flags: u8,
        is_partial: bool,
        extension: bool,
        is_ecn: bool,
    ) {
        // Without the offset of the transport header there may be nothing before it that hides it.
        let extension = extension && (is_partial || !spec.v6);
        let payload = Spec::new(false, false, length).payload;
        let spec = Spec { payload, flags, extension, ..spec };
        let mut packet = if is_partial { spec.build_partial() } else { spec.build() };
        let mut header = header(&spec, segment_size);
        header.gso_type |= if is_ecn && spec.tcp { 0x80 } else { 0 };
        if !is_partial {
            (header.flags, header.checksum_start, header.checksum_offset) = (0, 0, 0);
        }
        let mut split = split(&header, &mut packet).unwrap();
        let (count, longest) = (split.segments(), split.max_length());
        let packets = drain(&mut split);
        prop_assert_eq!(packets.len(), count);
        prop_assert_eq!(packets.iter().map(Vec::len).max(), Some(longest));
        prop_assert_eq!(packets, expected(&spec, segment_size.into()));
    }

    #[test]
    fn hostile_reads_are_refused_or_cut_as_by_the_reference(
        spec in any_spec(),
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        overwritten in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        raw: [u8; 10],
        is_raw: bool,
    ) {
        let mut packet = if is_raw { bytes } else { spec.build_partial() };
        for (at, byte) in overwritten.iter().filter(|_| !packet.is_empty()).cloned().collect::<Vec<_>>() {
            let at = at.index(packet.len());
            packet[at] = byte;
        }
        let mut header = VnetHeader::read(&raw);
        if !is_raw {
            let size = header.segment_size % 16;
            header = self::header(&spec, size);
            // One of the fields is anything.
            let mut bytes = header.write();
            bytes[usize::from(raw[0] % 10)] = raw[1];
            header = VnetHeader::read(&bytes);
        }
        OFFLOAD.check_read(&[&header.write(), &packet[..]].concat(), true);
    }
}

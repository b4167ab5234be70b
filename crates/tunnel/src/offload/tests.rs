//! Packets of a slow and plain builder go through [`Merger`] and [`split()`].

mod builder;
mod check;
mod merging;
mod reference;
mod splitting;

use std::ops::Range;

use proptest::prelude::*;

use super::checksum::{Sum, pseudo_header};
use super::header::{LENGTH, VnetHeader};
use super::merge::Merger;
use super::split::{Split, split};
use super::{join_packets, split_read};
use builder::Spec;
use check::Offload;
use reference::slow_sum;

const OFFLOAD: Offload = Offload { split: split_read, join: join_packets };

/// All packets that are left in `split`.
fn drain(split: &mut Split) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    let mut packet = b"before".to_vec();
    while split.append_next(&mut packet) {
        assert!(packet.starts_with(b"before"), "what was there stays");
        packets.push(packet.split_off(6));
    }
    assert_eq!(packet, b"before", "nothing is appended if none is left");
    packets
}

/// Lays out packets as a batch of a caller, with something between them.
fn batch(packets: &[Vec<u8>]) -> (Vec<u8>, Vec<Range<usize>>) {
    let mut buffer = vec![0xee; 3];
    let mut ranges = Vec::new();
    for packet in packets {
        ranges.push(buffer.len()..buffer.len() + packet.len());
        buffer.extend(packet);
        buffer.extend([0xee; 5]);
    }
    (buffer, ranges)
}

/// Writes that a batch becomes: the header and the bytes of each.
fn merge(merger: &mut Merger, packets: &[Vec<u8>]) -> Vec<(VnetHeader, Vec<u8>)> {
    let (mut buffer, ranges) = batch(packets);
    merger.clear();
    for range in ranges {
        merger.push(&buffer, range);
    }
    merger.finish(&mut buffer);
    let starts: Vec<_> = merger.frames().map(|frame| frame.parts[0].start).collect();
    assert!(starts.is_sorted(), "a frame stands where its first packet was");
    let write =
        |parts: &[Range<usize>]| parts.iter().flat_map(|range| buffer[range.clone()].to_vec()).collect();
    merger.frames().map(|frame| (VnetHeader::read(&frame.header), write(frame.parts))).collect()
}

/// Number of packets in each write of a batch.
fn shape(udp: bool, specs: &[Spec]) -> Vec<usize> {
    let packets: Vec<_> = specs.iter().map(Spec::build).collect();
    let frames = merge(&mut Merger::new(udp), &packets);
    let split = |(header, mut bytes): (VnetHeader, Vec<u8>)| split(&header, &mut bytes).unwrap().segments();
    frames.into_iter().map(split).collect()
}

#[test]
fn the_header_has_the_layout_of_the_kernel() {
    let header = VnetHeader {
        flags: 1,
        gso_type: 4,
        header_length: 60,
        segment_size: 1340,
        checksum_start: 40,
        checksum_offset: 16,
    };
    let numbers = [60_u16, 1340, 40, 16].map(u16::to_ne_bytes);
    let expected = [&[1, 4][..], numbers.as_flattened()].concat();
    assert_eq!(header.write().to_vec(), expected);
    assert_eq!(VnetHeader::read(&header.write()), header);
    assert_eq!(LENGTH, 10);
}

#[test]
fn the_example_of_rfc_1071_is_summed_as_there() {
    let sum = Sum::of(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
    assert_eq!(sum.folded(), 0xddf2);
    assert_eq!(sum.checksum(), 0x220d);
    assert_eq!(Sum::of(&[0xff; 2]).checksum_not_zero(), 0xffff);
    assert_eq!(pseudo_header(&[1, 2, 3, 4], 17, 8).folded(), 0x0102 + 0x0304 + 17 + 8);
}

#[test]
fn no_carry_is_lost_in_the_longest_packet() {
    for byte in [0xff, 0xfe, 0x80] {
        let bytes = vec![byte; 65_535];
        assert_eq!(Sum::of(&bytes).folded(), slow_sum(&bytes));
    }
    // Folding this carries three times; no packet is so long.
    let bytes = [vec![0xff; 4 * 0x1_0001], vec![0, 0, 1, 0]].concat();
    assert_eq!(Sum::of(&bytes).folded(), slow_sum(&bytes));
}

proptest! {
    #[test]
    fn any_bytes_are_cut_and_joined(input in prop::collection::vec(any::<u8>(), 0..300)) {
        OFFLOAD.check(&input);
    }

    #[test]
    fn a_sum_is_that_of_a_plain_loop(bytes in prop::collection::vec(any::<u8>(), 0..700), at: prop::sample::Index, word: u16) {
        let expected = slow_sum(&bytes);
        prop_assert_eq!(Sum::of(&bytes).folded(), expected);
        let (front, back) = bytes.split_at(at.index(bytes.len() + 1) & !1);
        prop_assert_eq!(Sum::of(front).plus(Sum::of(back)).folded(), expected, "in two pieces");
        let taken_out = Sum::of(&bytes).plus_word(word).minus_word(word).folded();
        prop_assert_eq!(taken_out % 0xffff, expected % 0xffff, "0xFFFF is another zero");
    }
}

//! Batches of packets that are to be written.

use proptest::prelude::*;

use super::super::header::VnetHeader;
use super::super::merge::{MAX_SEGMENTS, Merger};
use super::super::split::split;
use super::builder::{ACK, CWR, DONT_FRAGMENT, ECE, FIN, PSH, RST, SYN, Spec, URG, any_spec};
use super::reference::slow_sum;
use super::{OFFLOAD, drain, merge, shape};

const KINDS: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

#[test]
fn a_train_becomes_one_packet_that_the_kernel_can_split() {
    for (v6, tcp) in KINDS {
        let mut train = Spec::new(v6, tcp, 1300).train(5);
        train[4].payload.truncate(17);
        train[4].flags |= PSH | FIN;
        let packets: Vec<_> = train.iter().map(Spec::build).collect();
        let frames = merge(&mut Merger::new(true), &packets);
        assert_eq!(frames.len(), 1);
        let (header, bytes) = &frames[0];
        let payload = train.iter().flat_map(|spec| spec.payload.clone()).collect();
        let whole = Spec { payload, flags: ACK | PSH | FIN, ..train[0].clone() };
        assert_eq!(*bytes, whole.build_partial());
        let expected = VnetHeader {
            flags: 1,
            gso_type: match (tcp, v6) {
                (true, false) => 1,
                (true, true) => 4,
                (false, _) => 5,
            },
            header_length: whole.headers() as u16,
            segment_size: 1300,
            checksum_start: whole.ip_header() as u16,
            checksum_offset: if tcp { 16 } else { 6 },
        };
        assert_eq!(*header, expected);
        assert_eq!(drain(&mut split(header, &mut bytes.clone()).unwrap()), packets);
    }
}

#[test]
fn a_single_packet_is_written_as_it_came() {
    for packet in
        [Spec::new(false, true, 9).build(), b"neither IPv4 nor IPv6".to_vec(), vec![], vec![0x45], vec![0x60]]
    {
        let frames = merge(&mut Merger::new(true), std::slice::from_ref(&packet));
        assert_eq!(frames, [(VnetHeader::default(), packet)]);
    }
}

/// Packets in each write of a train of three, of which the first two would be joined if `change` had not altered the second.
fn second_with(v6: bool, tcp: bool, change: impl Fn(&mut Spec)) -> Vec<usize> {
    let mut train = Spec::new(v6, tcp, 100).train(3);
    change(&mut train[1]);
    shape(true, &train)
}

#[test]
fn what_could_not_be_told_apart_later_is_not_joined() {
    type Change = fn(&mut Spec);
    let of_ip: [Change; 4] =
        [|spec| spec.ttl = 63, |spec| spec.service = 1, |spec| spec.extension = true, |spec| spec.damage = 1];
    for (v6, tcp) in KINDS {
        assert_eq!(second_with(v6, tcp, |_| ()), [3]);
        for change in of_ip {
            assert_eq!(second_with(v6, tcp, change), [1, 1, 1], "v6: {v6}, tcp: {tcp}");
        }
        assert_eq!(second_with(v6, tcp, |spec| spec.payload.clear()), [1, 1, 1]);
        // The third has the sequence number that the second had without the change.
        assert_eq!(
            second_with(v6, tcp, |spec| spec.payload.push(0)),
            if tcp { vec![1, 1, 1] } else { vec![1, 2] }
        );
        assert_eq!(second_with(v6, tcp, |spec| spec.payload.truncate(99)), [2, 1], "shorter than the first");
        let [first, second] = [0, 1].map(|at| Spec::new(v6, tcp, 100).train(2)[at].clone());
        for other in [Spec { port: 7, ..second.clone() }, Spec { host: 7, ..second.clone() }] {
            assert_eq!(shape(true, &[first.clone(), other, second.clone()]), [2, 1], "of another flow");
        }
    }
    let of_tcp: [Change; 12] = [
        |spec| spec.flags |= SYN,
        |spec| spec.flags |= RST,
        |spec| spec.flags |= URG,
        |spec| spec.flags |= CWR,
        |spec| spec.flags |= ECE,
        |spec| spec.flags = 0,
        |spec| spec.acknowledgment += 1,
        |spec| spec.window += 1,
        |spec| spec.urgent += 1,
        |spec| spec.options[7] += 1,
        |spec| spec.options.clear(),
        |spec| spec.sequence += 1,
    ];
    for change in of_tcp {
        assert_eq!(second_with(false, true, change), [1, 1, 1]);
        assert_eq!(second_with(true, true, change), [1, 1, 1]);
    }
    assert_eq!(second_with(true, true, |spec| spec.flow_label += 1), [1, 1, 1]);
    for fragment in [DONT_FRAGMENT, 0x2000, 0x8000, 1] {
        assert_eq!(second_with(false, true, |spec| spec.fragment = fragment), [1, 1, 1]);
    }
    for flag in [PSH, FIN] {
        assert_eq!(second_with(false, true, |spec| spec.flags |= flag), [2, 1]);
    }
}

#[test]
fn packets_that_cannot_join_any_other_are_alone() {
    for flags in [ACK | SYN, ACK | RST, ACK | URG, ACK | CWR, 0, ACK | PSH, ACK | FIN] {
        let train = Spec { flags, ..Spec::new(false, true, 100) }.train(3);
        assert_eq!(shape(true, &train), [1, 1, 1], "flags {flags:#x}");
    }
    let echoing = Spec { flags: ACK | ECE, ..Spec::new(false, true, 100) };
    assert_eq!(shape(true, &echoing.train(3)), [3], "the receiver of a mark says so in every packet");
    assert_eq!(
        shape(false, &Spec::new(false, false, 100).train(3)),
        [1, 1, 1],
        "the TUN takes no UDP segments"
    );
    assert_eq!(shape(false, &Spec::new(false, true, 100).train(3)), [3]);

    let mut packets: Vec<_> = Spec::new(false, false, 100).train(2).iter().map(Spec::build).collect();
    for packet in &mut packets {
        // With this payload the checksum is one form of zero, and the other form says that there is none.
        packet[28..30].fill(0);
        let sum = slow_sum(&[&packet[12..26], &packet[28..], &[0, 17], &packet[24..26]].concat());
        packet[28..30].copy_from_slice(&(!sum).to_be_bytes());
        packet[26..28].fill(0xff);
    }
    assert_eq!(merge(&mut Merger::new(true), &packets).len(), 1);
    for packet in &mut packets {
        packet[26..28].fill(0);
    }
    assert_eq!(merge(&mut Merger::new(true), &packets).len(), 2, "UDP without a checksum");
    packets[1] = Spec { extension: true, ..Spec::new(false, false, 100) }.build();
    assert_eq!(merge(&mut Merger::new(true), &packets).len(), 2, "IPv4 options");
}

#[test]
fn a_damaged_ip_header_is_not_hidden() {
    for damaged in 0..2 {
        let mut packets: Vec<_> = Spec::new(false, true, 100).train(2).iter().map(Spec::build).collect();
        packets[damaged][10] ^= 1;
        let frames: Vec<_> =
            merge(&mut Merger::new(true), &packets).into_iter().map(|(_, bytes)| bytes).collect();
        assert_eq!(frames, packets);
    }
}

#[test]
fn ip_in_udp_is_not_joined() {
    for inner in [Spec::new(false, true, 100), Spec::new(true, true, 100)] {
        let outer = |payload| Spec { payload, ..Spec::new(false, false, 0) };
        let mut payload = inner.build();
        assert_eq!(shape(true, &outer(payload.clone()).train(3)), [1, 1, 1]);
        // The first bytes of other protocols look the same, but no length follows.
        payload.push(0);
        assert_eq!(shape(true, &outer(payload).train(3)), [3]);
    }
}

#[test]
fn identifications_are_joined_as_the_kernel_does() {
    let of = |fragment, ids: [u16; 4]| {
        let mut train = Spec { fragment, ..Spec::new(false, true, 100) }.train(4);
        train.iter_mut().zip(ids).for_each(|(spec, id)| spec.id = id);
        shape(true, &train)
    };
    for fragment in [0, DONT_FRAGMENT] {
        assert_eq!(of(fragment, [0xfffe, 0xffff, 0, 1]), [4]);
        assert_eq!(of(fragment, [5, 6, 8, 9]), [2, 2]);
        assert_eq!(of(fragment, [5, 4, 3, 2]), [1; 4]);
    }
    assert_eq!(of(0, [5, 5, 5, 5]), [1; 4]);
    assert_eq!(of(DONT_FRAGMENT, [5, 5, 5, 5]), [4]);
    assert_eq!(of(DONT_FRAGMENT, [0, 0, 1, 2]), [2, 2], "once constant, always constant");
}

#[test]
fn a_packet_of_unknown_flow_ends_all_frames_between_its_addresses() {
    let train = Spec::new(false, true, 100).train(3);
    let fragment = Spec { fragment: 5, port: 7, ..train[0].clone() };
    let other = Spec { host: 9, ..fragment.clone() };
    let batch = |between: &Spec| vec![train[0].clone(), train[1].clone(), between.clone(), train[2].clone()];
    assert_eq!(shape(true, &batch(&fragment)), [2, 1, 1]);
    assert_eq!(shape(true, &batch(&other)), [3, 1]);
    let acknowledgment = Spec { payload: vec![], ..train[2].clone() };
    assert_eq!(shape(true, &batch(&acknowledgment)), [2, 1, 1], "of the flow itself");
}

#[test]
fn frames_are_bounded() {
    assert_eq!(shape(true, &Spec::new(true, false, 1000).train(130)), [MAX_SEGMENTS, MAX_SEGMENTS, 2]);
    assert_eq!(shape(true, &Spec::new(false, true, 20).train(130)), [MAX_SEGMENTS, MAX_SEGMENTS, 2]);
    // 52 bytes of headers: 65,483 are left.
    assert_eq!(shape(true, &Spec::new(false, true, 9354).train(8)), [7, 1]);
    assert_eq!(shape(true, &Spec::new(false, true, 9355).train(8)), [6, 2]);
    // 72 bytes of headers.
    assert_eq!(shape(true, &Spec::new(true, true, 9351).train(8)), [7, 1]);
    assert_eq!(shape(true, &Spec::new(true, true, 9352).train(8)), [6, 2]);
}

#[test]
fn many_flows_at_once_are_joined_until_there_are_too_many() {
    let interleaved = |flows: u16| {
        let train = Spec::new(true, true, 100).train(2);
        let of = |spec: &Spec, port| Spec { port, ..spec.clone() };
        let specs: Vec<_> =
            train.iter().flat_map(|spec| (0..flows).map(move |port| of(spec, port))).collect();
        shape(true, &specs)
    };
    assert_eq!(interleaved(32), [2; 32]);
    assert_eq!(interleaved(33), [1; 66], "each makes room for the next");
}

#[test]
fn a_range_outside_of_the_buffer_is_a_frame_of_its_own() {
    let mut merger = Merger::new(true);
    let mut buffer = Spec::new(false, true, 10).build();
    let ranges = [0..buffer.len(), 10..5000, 0..0];
    for range in &ranges {
        merger.push(&buffer, range.clone());
    }
    merger.finish(&mut buffer);
    merger.finish(&mut buffer);
    let parts: Vec<_> = merger.frames().flat_map(|frame| frame.parts.to_vec()).collect();
    assert_eq!(parts, ranges);
    merger.clear();
    assert_eq!(merger.frames().count(), 0);
}

/// A step of a batch: of which flow the packet is, how long it is and what is special about it.
type Step = (usize, usize, u8);

/// Packets of a few flows that mostly continue, each with its specialities.
fn packets(flows: &[Spec], steps: &[Step]) -> Vec<Vec<u8>> {
    let mut flows = flows.to_vec();
    let step = |&(flow, length, special): &Step| {
        let count = flows.len();
        let spec = &mut flows[flow % count];
        spec.payload = (0..length).map(|at| (at * 31 + length) as u8).collect();
        let mut sent = spec.clone();
        match special {
            0 => sent.flags |= PSH,
            1 => sent.flags |= FIN,
            2 => sent.flags |= CWR,
            3 => sent.ttl = 3,
            4 => sent.damage = 1,
            5 => sent.extension = true,
            6 => sent.payload.clear(),
            7 => sent.fragment |= 0x2000,
            8 => spec.sequence ^= 0x100,
            9 => spec.id ^= 0x100,
            10 => spec.acknowledgment += 1,
            _ => {}
        }
        *spec = spec.next();
        // A sender that does not number the packets that may not be fragmented.
        spec.id = spec.id.wrapping_sub(u16::from(spec.fragment == DONT_FRAGMENT && spec.host == 1));
        sent.build()
    };
    steps.iter().map(step).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]
    #[test]
    fn what_is_joined_and_split_again_is_what_there_was(
        flows in prop::collection::vec(any_spec(), 1..5),
        steps in prop::collection::vec((0..5_usize, prop::sample::select(vec![1, 2, 99, 100, 100, 100, 100]), 0..60_u8), 0..80),
        udp: bool,
    ) {
        OFFLOAD.check_batch(&packets(&flows, &steps), udp);
    }

    #[test]
    fn hostile_packets_never_panic_and_all_are_written(
        flows in prop::collection::vec(any_spec(), 1..3),
        steps in prop::collection::vec((0..3_usize, Just(100_usize), Just(u8::MAX)), 0..20),
        overwritten in prop::collection::vec(any::<(prop::sample::Index, prop::sample::Index, u8)>(), 0..20),
        junk in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 0..10),
    ) {
        let mut sent = packets(&flows, &steps);
        for (packet, at, byte) in overwritten {
            if !sent.is_empty() {
                let packet = packet.index(sent.len());
                // Within the headers of any of them.
                sent[packet][at.index(28)] = byte;
            }
        }
        sent.extend(junk);
        OFFLOAD.check_batch(&sent, true);
    }
}

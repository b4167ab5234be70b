use std::net::IpAddr;

use proptest::prelude::*;

use super::*;

const ALICE: [u8; 32] = [1; 32];
const BOB: [u8; 32] = [2; 32];
const EPOCH: Epoch = Epoch([7; 16]);

fn public(private: [u8; 32]) -> [u8; 32] {
    PublicKey::from(&StaticSecret::from(private)).to_bytes()
}

/// The keys of `own` towards the node whose private key is `other`.
fn keys(own: [u8; 32], other: [u8; 32], preshared: Option<&[u8; 32]>) -> ProbeKeys {
    ProbeKeys::derive(&own, &public(other), preshared).unwrap()
}

fn request(transaction: u8) -> Message {
    Message::Request {
        transaction: TransactionId([transaction; 12]),
        starts_round: false,
        wants_handshake: false,
        is_birthday: false,
        wants_keepalives: false,
        ports: None,
        candidates: Vec::new(),
    }
}

#[test]
fn what_one_node_seals_the_other_opens_and_no_third_one() {
    let (alice, bob) = (keys(ALICE, BOB, None), keys(BOB, ALICE, None));
    let datagram = alice.seal(EPOCH, 3, &request(9), 0);
    assert_eq!(datagram.len(), MIN_LENGTH);
    let header = Header::parse(&datagram).unwrap();
    assert_eq!(
        header,
        Header { sender: SenderTag::new(&public(ALICE), &public(BOB)), epoch: EPOCH, counter: 3 }
    );
    assert_eq!(bob.open(&datagram), Ok(request(9)));
    // Not even its sender: what comes back as it went out is no message of the peer.
    assert_eq!(alice.open(&datagram), Err(InvalidProbe::Unauthenticated));
    assert_eq!(keys(BOB, [3; 32], None).open(&datagram), Err(InvalidProbe::Unauthenticated));
    assert_eq!(keys(BOB, ALICE, Some(&[5; 32])).open(&datagram), Err(InvalidProbe::Unauthenticated));
}

#[test]
fn probes_of_nodes_with_a_pre_shared_key_need_it() {
    let (alice, bob) = (keys(ALICE, BOB, Some(&[5; 32])), keys(BOB, ALICE, Some(&[5; 32])));
    let datagram = alice.seal(EPOCH, 1, &request(1), 0);
    assert_eq!(bob.open(&datagram), Ok(request(1)));
    assert_eq!(keys(BOB, ALICE, None).open(&datagram), Err(InvalidProbe::Unauthenticated));
}

/// The bytes are those of an earlier build: a change of the format changes the version too.
#[test]
fn a_probe_of_version_1_has_these_bytes() {
    let datagram = keys(ALICE, BOB, None).seal(EPOCH, 3, &request(9), 0);
    let hex: String = datagram.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, GOLDEN);
}

const GOLDEN: &str = "f11ead500100000026de835f0bf39c5a07070707070707070707070707070707\
    00000000000000033c2788f5987998e008c8c9a942406869b23f01cfc5d3425d\
    62546cbc789962d7ccb23b619e55be3463105aabd2f15fb1";

#[test]
fn the_version_comes_before_everything_that_a_version_may_change() {
    let mut datagram = keys(ALICE, BOB, None).seal(EPOCH, 1, &request(1), 0);
    datagram[4] = 2;
    assert_eq!(Header::parse(&datagram), Err(InvalidProbe::Version(2)));
    assert_eq!(Header::parse(&datagram[..HEADER_LENGTH]), Err(InvalidProbe::Version(2)));
}

/// Probe that a build with version 2 may send: in version 1 it says in the next byte that it reads version 2, and may use flags, fields and
/// an extension that this build does not know.
fn of_a_later_build(version: u8, counter: u64) -> Vec<u8> {
    let bob = keys(BOB, ALICE, None);
    let mut header = Header { sender: bob.tag, epoch: EPOCH, counter }.to_bytes();
    (header[4], header[5]) = (version, 2);
    let mut body = request(9).to_bytes();
    body[20] = 0xaa;
    body[31] = 0x80;
    body.extend([0xbb; 24]);
    let tag = bob.sending.encrypt_in_place_detached(nonce(&header), associated(&header), &mut body).unwrap();
    [&header[..], &body, &tag].concat()
}

/// `fairlead-path` has the same bytes, and tests what an agent does with them.
#[test]
fn what_a_later_build_adds_to_version_1_is_ignored() {
    let datagram = of_a_later_build(1, 7);
    let hex: String = datagram.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, OF_A_LATER_BUILD);
    assert_eq!(keys(ALICE, BOB, None).open(&datagram), Ok(request(9)));
    // The byte is authenticated all the same: a router cannot make two nodes use the older version.
    let mut changed = datagram;
    changed[5] = 0;
    assert_eq!(keys(ALICE, BOB, None).open(&changed), Err(InvalidProbe::Unauthenticated));
    assert_eq!(keys(ALICE, BOB, None).open(&of_a_later_build(2, 8)), Err(InvalidProbe::Version(2)));
}

const OF_A_LATER_BUILD: &str = "f11ead5001020000bc1da8248395a06c07070707070707070707070707070707\
    00000000000000077fc5dc167e67659b23c9fe692332a91e2f730dfc5f7db7cd\
    5c1fd98eaea9298ea7d6d87d3fac255ca7a367d3ccfa45070cb372a51d116c62\
    73777f8869d8a97eb957f27eadca1d2a";

#[test]
fn a_public_key_of_low_order_gives_no_keys() {
    assert!(ProbeKeys::derive(&ALICE, &[0; 32], None).is_none());
}

#[test]
fn a_kind_of_a_later_version_is_named() {
    let mut bytes = request(1).to_bytes();
    bytes[0] = 9;
    assert_eq!(Message::parse(&bytes), Err(InvalidProbe::Kind(9)));
}

/// An earlier build takes the list for padding.
#[test]
fn a_list_of_candidates_has_these_bytes_and_unknown_kinds_are_left_out() {
    let address = "192.0.2.1:51820".parse().unwrap();
    let candidates = vec![Candidate { kind: CandidateKind::ServerReflexive, address }];
    let transaction = TransactionId([9; 12]);
    let message = |candidates| Message::Request {
        transaction,
        starts_round: false,
        wants_handshake: false,
        is_birthday: false,
        wants_keepalives: false,
        ports: None,
        candidates,
    };
    let mut bytes = message(candidates.clone()).to_bytes();
    let expected = [&[1, 2][..], &[0; 10], &[0xff, 0xff, 192, 0, 2, 1, 0xca, 0x6c]].concat();
    assert_eq!((bytes[31], &bytes[MESSAGE_LENGTH..]), (FLAG_CANDIDATES, &expected[..]));
    assert_eq!(Message::parse(&bytes), Ok(message(candidates.clone())));
    // Without the flag, as an earlier build reads it.
    bytes[31] = 0;
    assert_eq!(Message::parse(&bytes), Ok(message(Vec::new())));
    let list = [&[2][..], &[9; 19], &expected[1..]].concat();
    assert_eq!(parse_candidates(&list), candidates);
    for broken in [&list[..list.len() - 1], &[17; 400], &[]] {
        assert_eq!(parse_candidates(broken), []);
    }
}

/// An earlier build reads neither the flag nor these bytes of a request.
#[test]
fn predicted_ports_have_these_bytes() {
    let ports = Some(PortSequence { next: 0xabcd, step: -2 });
    let Message::Request { transaction, starts_round, wants_handshake, candidates, .. } = request(9) else {
        unreachable!()
    };
    let (is_birthday, wants_keepalives) = (true, false);
    let bytes = Message::Request {
        transaction,
        starts_round,
        wants_handshake,
        is_birthday,
        wants_keepalives,
        ports,
        candidates,
    }
    .to_bytes();
    assert_eq!(bytes[31], FLAG_BIRTHDAY | FLAG_PORTS);
    assert_eq!((&bytes[13..17], &bytes[17..31]), (&[0xab, 0xcd, 0xff, 0xfe][..], &[0; 14][..]));
}

#[test]
fn no_wireguard_or_stun_message_is_a_probe() {
    for kind in 1..=4 {
        assert!(!is_probe(&[kind, 0, 0, 0, 0]));
    }
    assert!(!is_probe(&crate::stun::binding_request(crate::stun::TransactionId([0; 12]))));
    assert!(!crate::stun::is_stun(&keys(ALICE, BOB, None).seal(EPOCH, 1, &request(1), 0)));
}

proptest! {
    #[test]
    fn requests_are_read_back_whatever_flags_a_later_build_adds(
        transaction: [u8; 12], starts_round: bool, wants_handshake: bool, is_birthday: bool,
        wants_keepalives: bool, ports: Option<(u16, i16)>, unknown: u8,
    ) {
        let (transaction, candidates) = (TransactionId(transaction), Vec::new());
        let ports = ports.map(|(next, step)| PortSequence { next, step });
        let message = Message::Request {
            transaction,
            starts_round,
            wants_handshake,
            is_birthday,
            wants_keepalives,
            ports,
            candidates,
        };
        let mut bytes = message.to_bytes();
        let known = FLAG_ROUND | FLAG_HANDSHAKE | FLAG_BIRTHDAY | FLAG_CANDIDATES | FLAG_PORTS | FLAG_KEEPALIVES;
        bytes[31] |= unknown & !known;
        prop_assert_eq!(Message::parse(&bytes), Ok(message));
    }

    #[test]
    fn candidates_are_read_back_at_any_length(
        named in prop::collection::vec((any::<IpAddr>(), any::<u16>(), 0_usize..3), 0..20),
        length in 0_usize..2000,
    ) {
        let kinds = [CandidateKind::Host, CandidateKind::PeerReflexive, CandidateKind::ServerReflexive];
        let candidate = |(ip, port, kind): (IpAddr, u16, usize)| Candidate {
            kind: kinds[kind],
            address: SocketAddr::new(ip.to_canonical(), port),
        };
        let candidates: Vec<Candidate> = named.into_iter().map(candidate).collect();
        let of = |candidates: &[Candidate]| Message::Request {
            transaction: TransactionId([9; 12]),
            starts_round: true,
            wants_handshake: false,
            is_birthday: false,
            wants_keepalives: false,
            ports: None,
            candidates: candidates.to_vec(),
        };
        let datagram = keys(ALICE, BOB, None).seal(EPOCH, 1, &of(&candidates), length);
        prop_assert!(datagram.len() <= length.max(MIN_LENGTH + 1 + 16 * 19));
        let kept = &candidates[..candidates.len().min(MAX_CANDIDATES)];
        prop_assert_eq!(keys(BOB, ALICE, None).open(&datagram), Ok(of(kept)));
    }

    #[test]
    fn hostile_lists_of_candidates_are_short_or_none(bytes: Vec<u8>) {
        prop_assert!(parse_candidates(&bytes).len() <= MAX_CANDIDATES);
    }

    #[test]
    fn answers_are_read_back_at_any_length(
        ip: IpAddr, port: u16, transaction: [u8; 12], epoch: [u8; 16], counter: u64, length in 0_usize..2000,
    ) {
        let message = Message::Answer {
            transaction: TransactionId(transaction),
            observed: SocketAddr::new(ip.to_canonical(), port),
        };
        let datagram = keys(ALICE, BOB, None).seal(Epoch(epoch), counter, &message, length);
        prop_assert_eq!(datagram.len(), length.max(MIN_LENGTH));
        prop_assert_eq!(keys(BOB, ALICE, None).open(&datagram), Ok(message));
    }

    #[test]
    fn a_changed_byte_is_noticed(at in 4_usize..MIN_LENGTH, change in 1_u8..) {
        let mut datagram = keys(ALICE, BOB, None).seal(EPOCH, 1, &request(1), 0);
        datagram[at] ^= change;
        prop_assert!(keys(BOB, ALICE, None).open(&datagram).is_err());
    }

    #[test]
    fn hostile_bytes_never_panic(mut bytes: Vec<u8>, as_probe: bool) {
        if as_probe {
            bytes.splice(..bytes.len().min(5), [&MAGIC[..], &[VERSION]].concat());
        }
        let _ = Header::parse(&bytes);
        prop_assert!(keys(BOB, ALICE, None).open(&bytes).is_err());
    }
}

//! Floods of handshakes, and datagrams and packets that are damaged or made up.

use proptest::prelude::*;

use super::*;

/// More handshakes a second than one address may begin, and than all may.
const MAX_HANDSHAKES_PER_ADDRESS: u64 = 100;
const MAX_HANDSHAKES: u32 = 1_000;

#[test]
fn cookies_are_given_under_load_and_do_not_move_the_endpoint() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    b.peer_with(&a, None, &[]);
    let first = a.peer_with(&b, Some(b.address), &[]);
    let initiation = first[0].bytes.to_vec();
    let mut answers = Vec::new();
    for _ in 0..=MAX_HANDSHAKES_PER_ADDRESS {
        answers = b.receive(a.address, &initiation);
    }
    assert_eq!(answers.len(), 1);
    assert_eq!((answers[0].peer, answers[0].bytes.len()), (None, 64), "a cookie, counted for no peer");
    let elsewhere = "198.51.100.1:7".parse().unwrap();
    a.receive(elsewhere, &answers[0].bytes);
    assert_eq!(a.state(&b).config.endpoint, Some(b.address));

    let later = Duration::from_millis(400);
    (a.ahead, b.ahead) = (later, later);
    let repeated = a.tick(a.now()).1;
    assert_eq!(repeated.len(), 1);
    exchange(&mut a, &mut b, repeated, Vec::new());
    assert!(a.state(&b).last_handshake.is_some(), "with the cookie it gets through");
}

#[test]
fn floods_from_many_addresses_are_answered_with_cookies_too() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    b.peer_with(&a, None, &[]);
    let initiation = a.peer_with(&b, Some(b.address), &[])[0].bytes.to_vec();
    let mut last = Vec::new();
    for number in 0..=MAX_HANDSHAKES {
        let [_, _, high, low] = number.to_be_bytes();
        last = b.receive(SocketAddr::from(([10, 0, high, low], 1)), &initiation);
    }
    assert_eq!(last[0].bytes.len(), 64);
}

#[test]
fn datagrams_that_are_no_handshake_with_us_demand_no_cookie_of_others() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    b.peer_with(&a, None, &[]);
    let first = a.peer_with(&b, Some(b.address), &[]);
    let mut forged = first[0].bytes.to_vec();
    // The first byte of MAC1 (WireGuard paper 5.4.2).
    forged[116] ^= 1;
    for number in 0..=3 * MAX_HANDSHAKES {
        let [_, _, high, low] = number.to_be_bytes();
        let from = SocketAddr::from(([10, 0, high, low], 1));
        for junk in [&[1][..], &[2], &[1, 0, 0, 0], &forged] {
            assert!(b.receive(from, junk).is_empty());
        }
    }
    exchange(&mut a, &mut b, first, Vec::new());
    assert!(a.state(&b).last_handshake.is_some(), "at once, without a cookie");
}

/// Messages that look real up to a point, and those that do not.
fn hostile() -> impl Strategy<Value = Vec<u8>> {
    let sizes = prop_oneof![Just(148_usize), Just(92), Just(64), Just(32), 0_usize..200, Just(65_535)];
    (0_u8..6, sizes, any::<u64>()).prop_map(|(kind, size, seed)| {
        let mut bytes: Vec<u8> = (0..size).map(|index| (seed >> (index % 57)) as u8 ^ index as u8).collect();
        bytes.iter_mut().take(4).zip([kind, 0, 0, 0]).for_each(|(byte, value)| *byte = value);
        bytes
    })
}

proptest! {
    #[test]
    fn hostile_datagrams_change_nothing(datagrams in prop::collection::vec(hostile(), 1..20)) {
        let (mut a, b) = connected();
        let before = a.state(&b);
        for datagram in datagrams {
            prop_assert!(a.receive("203.0.113.5:5".parse().unwrap(), &datagram).is_empty());
        }
        prop_assert_eq!(a.state(&b), before);
        prop_assert!(a.delivered.is_empty());
    }

    #[test]
    fn damaged_messages_are_refused(position: prop::sample::Index, flip in 1_u8.., cut: prop::sample::Index) {
        let (mut a, mut b) = connected();
        let genuine = a.send(&packet("10.0.0.1", "10.0.0.2", 60))[0].bytes.to_vec();
        let mut damaged = genuine.clone();
        let place = position.index(damaged.len());
        damaged[place] ^= flip;
        // Bytes 1 to 3 are reserved: the demultiplexer checks them, before the engine.
        if !(1..4).contains(&place) {
            b.receive(a.address, &damaged);
        }
        b.receive(a.address, &genuine[..cut.index(genuine.len())]);
        prop_assert!(b.delivered.is_empty());
        b.receive(a.address, &genuine);
        prop_assert_eq!(b.delivered.len(), 1);
    }

    #[test]
    fn hostile_inner_packets_never_panic(bytes: Vec<u8>) {
        let (mut a, mut b) = connected();
        let out = a.send(&bytes);
        exchange(&mut a, &mut b, out, Vec::new());
    }
}

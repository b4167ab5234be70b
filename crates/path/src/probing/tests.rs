use fairlead_wire::probe::TransactionId;
use x25519_dalek::StaticSecret;

use super::*;

const REQUEST: Message = Message::Request {
    transaction: TransactionId([7; 12]),
    starts_round: false,
    wants_handshake: false,
    is_birthday: false,
    wants_keepalives: false,
    ports: None,
    candidates: Vec::new(),
};

fn public(private: [u8; 32]) -> PublicKey {
    PublicKey(x25519_dalek::PublicKey::from(&StaticSecret::from(private)).to_bytes())
}

/// The node with this private key, in its `run`-th run, which has `peers`.
fn node(private: u8, run: u8, peers: &[u8]) -> Probing {
    let mut node = Probing::new(Identity {
        private_key: PrivateKey([private; 32]),
        public_key: public([private; 32]),
        epoch: [run; 16],
    });
    peers.iter().for_each(|peer| node.add_peer(public([*peer; 32])));
    node
}

fn address(number: u32) -> SocketAddr {
    SocketAddr::new(IpAddr::V4((0xc000_0200 + number).into()), 51820)
}

fn seal(from: &mut Probing, to: u8) -> Vec<u8> {
    from.seal(&public([to; 32]), &REQUEST, 0).unwrap()
}

#[test]
fn a_request_that_was_recorded_is_answered_once() {
    let (mut alice, mut bob) = (node(1, 1, &[2]), node(2, 1, &[1]));
    let request = seal(&mut alice, 2);
    let (peer, header, message) = bob.open(SECOND, &request).unwrap();
    assert_eq!((peer, header.counter, message), (public([1; 32]), 1, REQUEST));
    assert!(bob.open(SECOND, &request).is_none());
    assert_eq!(bob.counts().drops, ProbeDrops { replayed: 1, ..ProbeDrops::default() });
}

#[test]
fn requests_that_overtook_each_other_are_all_taken() {
    let (mut alice, mut bob) = (node(1, 1, &[2]), node(2, 1, &[1]));
    let requests: Vec<_> = (0..4).map(|_| seal(&mut alice, 2)).collect();
    for request in [&requests[2], &requests[0], &requests[3], &requests[1]] {
        assert!(bob.open(SECOND, request).is_some());
    }
}

#[test]
fn another_epoch_is_limited_until_an_answer_confirms_it() {
    let (mut alice, mut bob) = (node(1, 1, &[2]), node(2, 1, &[1]));
    let taken = |bob: &mut Probing, alice: &mut Probing, now| {
        (0..50).filter(|_| bob.open(now, &seal(alice, 2)).is_some()).count()
    };
    assert_eq!(taken(&mut bob, &mut alice, SECOND), 4);
    assert_eq!(bob.counts().drops.limited, 46);
    let recorded = seal(&mut alice, 2);
    let confirm = |bob: &mut Probing, alice: &mut Probing, now| {
        let transaction = TransactionId([9; 12]);
        let answer = Message::Answer { transaction, observed: address(1) };
        let answer = alice.seal(&public([2; 32]), &answer, 0).unwrap();
        let (peer, header, _) = bob.open(now, &answer).unwrap();
        bob.conclude(&peer, &header, address(1), true);
    };
    confirm(&mut bob, &mut alice, 2 * SECOND);
    assert_eq!(taken(&mut bob, &mut alice, 3 * SECOND), 50);
    // It restarts; what was recorded of its last run does not bring that back.
    let mut restarted = node(1, 2, &[2]);
    assert_eq!(taken(&mut bob, &mut restarted, 4 * SECOND), 4);
    confirm(&mut bob, &mut restarted, 5 * SECOND);
    let (peer, header, _) = bob.open(6 * SECOND, &recorded).expect("as one of four a second");
    assert!(!bob.is_confirmed(&peer, &header));
    let (peer, header, _) = bob.open(6 * SECOND, &seal(&mut restarted, 2)).unwrap();
    assert!(bob.is_confirmed(&peer, &header));
    assert_eq!(taken(&mut bob, &mut restarted, 6 * SECOND), 50);
}

#[test]
fn an_answer_that_was_not_asked_for_confirms_nothing() {
    let (mut alice, mut bob) = (node(1, 1, &[2]), node(2, 1, &[1]));
    let answer = Message::Answer { transaction: TransactionId([9; 12]), observed: address(1) };
    let answer = alice.seal(&public([2; 32]), &answer, 0).unwrap();
    let (peer, header, _) = bob.open(SECOND, &answer).unwrap();
    bob.conclude(&peer, &header, address(1), false);
    assert_eq!(bob.counts().drops.unexpected, 1);
    let taken = (0..50).filter(|_| bob.open(SECOND, &seal(&mut alice, 2)).is_some()).count();
    assert_eq!(taken, 4);
}

#[test]
fn hosts_that_are_no_peers_are_counted_and_dropped() {
    let (mut stranger, mut bob) = (node(3, 1, &[2]), node(2, 1, &[1]));
    assert!(bob.open(SECOND, &seal(&mut stranger, 2)).is_none());
    // Public keys are no secret: the tag of a peer is easily forged.
    let mut forged = seal(&mut stranger, 2);
    forged[8..16].copy_from_slice(&SenderTag::new(&public([1; 32]).0, &public([2; 32]).0).0);
    assert!(bob.open(SECOND, &forged).is_none());
    let mut other_version = forged.clone();
    other_version[4] = 2;
    assert!(bob.open(SECOND, &other_version).is_none());
    assert_eq!(bob.counts().drops, ProbeDrops { unauthenticated: 2, unknown: 1, ..ProbeDrops::default() });
}

/// A member publishes the address of a victim, or a thousand members do.
#[test]
fn an_address_that_does_not_answer_gets_few_requests_whatever_peers_publish() {
    let peers: Vec<u8> = (2..60).collect();
    let mut alice = node(1, 1, &peers);
    let mut send = |now, to| {
        let sent = peers.iter().filter_map(|peer| alice.request(now, &public([*peer; 32]), to, &REQUEST, 0));
        sent.count()
    };
    assert_eq!(send(SECOND, address(1)), 20);
    // Another port is the same victim.
    assert_eq!(send(SECOND, SocketAddr::new(address(1).ip(), 53)), 0);
    assert_eq!(send(SECOND, address(2)), 20);
    assert_eq!(send(2 * SECOND, address(1)), 20);
    let in_all: usize = (3..200).map(|number| send(9 * SECOND, address(number))).sum();
    assert_eq!(in_all, 500);
}

/// A peer that publishes ever other candidates, each of which is tried at once.
#[test]
fn a_peer_that_does_not_answer_gets_few_requests_and_the_others_get_theirs() {
    let mut alice = node(1, 1, &[2, 3]);
    let mut send = |now, peer: u8| {
        let peer = public([peer; 32]);
        (1..200).filter(|number| alice.request(now, &peer, address(*number), &REQUEST, 0).is_some()).count()
    };
    assert_eq!(send(SECOND, 2), 80);
    assert_eq!(send(SECOND, 3), 80);
    assert_eq!(send(SECOND + SECOND / 2, 2), 8);
    assert_eq!(send(3 * SECOND, 2), 24);
    assert_eq!(send(60 * SECOND, 2), 80);
}

#[test]
fn the_check_of_a_path_that_works_is_never_held_back() {
    let mut alice = node(1, 1, &[2, 3]);
    let (thief, honest) = (public([2; 32]), public([3; 32]));
    while alice.request(SECOND, &thief, address(1), &REQUEST, 0).is_some() {}
    assert!(alice.check(&honest, &REQUEST, 0).is_some());
}

#[test]
fn nodes_behind_one_address_that_answer_are_not_held_back() {
    let peers: Vec<u8> = (2..60).collect();
    let mut alice = node(1, 1, &peers);
    let header = Header { sender: SenderTag([0; 8]), epoch: Epoch([0; 16]), counter: 0 };
    for peer in &peers {
        let peer = public([*peer; 32]);
        assert!(alice.request(SECOND, &peer, address(1), &REQUEST, 0).is_some());
        alice.conclude(&peer, &header, address(1), true);
    }
}

#[test]
fn a_peer_that_left_is_forgotten() {
    let (mut alice, mut bob) = (node(1, 1, &[2]), node(2, 1, &[1]));
    bob.remove_peer(&public([1; 32]));
    assert!(bob.open(SECOND, &seal(&mut alice, 2)).is_none());
    assert!(bob.by_tag.is_empty() && bob.peers.is_empty());
}

#[test]
fn a_window_takes_each_counter_once() {
    let mut window = Window::new(Epoch([0; 16]), 100);
    assert!(!window.accept(100));
    assert!(window.accept(99) && !window.accept(99));
    assert!(window.accept(36) && !window.accept(35), "64 counters");
    assert!(window.accept(u64::MAX - 1) && !window.accept(u64::MAX - 1) && !window.accept(100));
    assert!(window.accept(u64::MAX - 65) && !window.accept(u64::MAX - 66));
    assert!(!window.accept(u64::MAX), "a counter that no message may have");
}

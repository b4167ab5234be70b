//! A peer whose clock was set back: its handshake initiations are older than one that was received (TAI64N).

use std::collections::BTreeSet;

use super::*;

#[test]
fn a_peer_whose_initiations_are_refused_gets_a_session_by_a_handshake_towards_it() {
    // The same node before: its clock ran ahead then.
    let (mut set_back, mut b) = (Node::new(1), Node::new(2));
    let refused = set_back.peer_with(&b, Some(b.address), &["10.0.0.2/32"]);
    let mut before = Node::new(1);
    b.peer_with(&before, None, &["10.0.0.1/32"]);
    let first = before.peer_with(&b, Some(b.address), &["10.0.0.2/32"]);
    exchange(&mut before, &mut b, first, Vec::new());
    assert_eq!(set_back.send(&packet("10.0.0.1", "10.0.0.2", 60)).len(), 0, "it waits for a session");
    assert_eq!(b.receive(set_back.address, &refused[0].bytes).len(), 0);

    let handshakes = BTreeSet::from([before.public(), PublicKey([9; 32])]);
    let initiation = b.change(&DeviceChange { handshakes, ..DeviceChange::default() }).unwrap();
    assert_eq!(initiation.len(), 1);
    // The session with the one before serves on: it might have been the one that works.
    let packets = b.send(&packet("10.0.0.2", "10.0.0.1", 60));
    packets.iter().for_each(|datagram| drop(before.receive(b.address, &datagram.bytes)));
    assert_eq!(before.delivered.len(), 1);

    exchange(&mut set_back, &mut b, Vec::new(), initiation);
    assert_eq!(b.delivered, [packet("10.0.0.1", "10.0.0.2", 60)]);
    let answer = b.send(&packet("10.0.0.2", "10.0.0.1", 60));
    exchange(&mut set_back, &mut b, Vec::new(), answer);
    assert_eq!(set_back.delivered.len(), 1);
}

#[test]
fn a_clock_that_is_set_back_while_the_device_runs_does_not_show_in_its_handshakes() {
    let (mut a, mut b) = connected();
    let later = after(Duration::from_secs(60));
    let set_back = Now { wall: later.wall - Duration::from_secs(3600), ..later };
    let mut out = Outbox::default();
    let handshakes = BTreeSet::from([b.public()]);
    a.engine.apply(&DeviceChange { handshakes, ..DeviceChange::default() }, set_back, &mut out);
    let initiation = sent(out);
    assert_eq!(b.receive_at(later, a.address, &initiation[0].bytes).len(), 1, "it is answered");
}

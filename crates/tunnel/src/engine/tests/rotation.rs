//! A node takes another private key while packets flow; its peer has prepared the new key.

use super::*;

/// `b` knows both keys of `a`, and lets the next one send from the same addresses.
fn prepared() -> (Node, Node, PrivateKey) {
    let (a, mut b) = connected();
    let next = PrivateKey([33; 32]);
    b.change(&set_peer(next.public_key(), None, &[])).unwrap();
    b.engine.accept(&BTreeMap::from([(next.public_key(), vec!["10.0.0.1/32".parse().unwrap()])]));
    (a, b, next)
}

fn rotate(node: &mut Node, next: &PrivateKey) -> Vec<Datagram> {
    node.private = next.clone();
    node.change(&DeviceChange { private_key: Some(next.clone()), ..DeviceChange::default() }).unwrap()
}

#[test]
fn no_packet_is_lost_in_either_direction() {
    let (mut a, mut b, next) = prepared();
    let (there, back) = (packet("10.0.0.1", "10.0.0.2", 60), packet("10.0.0.2", "10.0.0.1", 60));
    let first = b.send(&back);
    exchange(&mut a, &mut b, Vec::new(), first);
    let on_the_way = b.send(&back);
    let initiation = rotate(&mut a, &next);
    assert_eq!(initiation.len(), 1, "the peer learns at once");
    // What was sent to the old key is taken, and what is sent waits for the new session.
    exchange(&mut a, &mut b, Vec::new(), on_the_way);
    let mut out = a.send(&there);
    assert!(out.is_empty());
    out.extend(initiation);
    let late = b.send(&back);
    exchange(&mut a, &mut b, out, late);
    assert_eq!((a.delivered.len(), b.delivered.len()), (3, 1));
    assert!(b.state(&a).last_handshake.is_some(), "of the new key");

    // The peer follows.
    let mut follow = set_peer(a.public(), None, &["10.0.0.1/32"]);
    follow.remove_peers.push(PrivateKey([1; 32]).public_key());
    b.change(&follow).unwrap();
    let (out, answer) = (a.send(&there), b.send(&back));
    exchange(&mut a, &mut b, out, answer);
    assert_eq!((a.delivered.len(), b.delivered.len()), (4, 2));
}

#[test]
fn after_a_while_nothing_is_taken_from_the_session_of_the_old_key() {
    let (mut a, mut b, next) = prepared();
    let back = packet("10.0.0.2", "10.0.0.1", 60);
    let first = b.send(&back);
    exchange(&mut a, &mut b, Vec::new(), first);
    rotate(&mut a, &next);
    let late = b.send(&back);
    let after = Now { instant: Instant::now() + Duration::from_secs(16), ..Now::read() };
    a.receive_at(after, b.address, &late[0].bytes);
    assert_eq!(a.delivered.len(), 1);
}

#[test]
fn a_peer_that_is_not_to_be_called_is_not_called_by_another_key() {
    let (mut a, b) = (Node::new(1), Node::new(2));
    a.peer_with(&b, None, &[]);
    assert!(rotate(&mut a, &PrivateKey([33; 32])).is_empty());
}

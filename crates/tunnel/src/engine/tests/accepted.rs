//! Gateways of one location, each of which may send what another one is sent for.

use super::*;

#[test]
fn a_packet_of_a_gateway_that_is_not_in_use_is_accepted_and_answers_go_to_the_one_in_use() {
    let (mut a, mut b) = connected();
    let mut c = Node::new(9);
    c.peer_with(&a, Some(a.address), &["10.0.0.1/32"]);
    let initiation = a.peer_with(&c, Some(c.address), &["10.0.0.9/32"]).remove(0);
    let response = c.receive(a.address, &initiation.bytes).remove(0);
    for datagram in a.receive(c.address, &response.bytes) {
        c.receive(a.address, &datagram.bytes);
    }
    let from_behind_b = packet("10.0.0.2", "10.0.0.1", 60);
    let mut arrives = |a: &mut Node, packet: &[u8]| {
        let before = a.delivered.len();
        for datagram in c.send(packet) {
            a.receive(c.address, &datagram.bytes);
        }
        a.delivered.len() > before
    };
    assert!(arrives(&mut a, &packet("10.0.0.9", "10.0.0.1", 60)));
    assert!(!arrives(&mut a, &from_behind_b), "b has that address");
    a.engine
        .accept(&BTreeMap::from([(PrivateKey([9; 32]).public_key(), vec!["10.0.0.2/32".parse().unwrap()])]));
    assert!(arrives(&mut a, &from_behind_b));
    assert!(!arrives(&mut a, &packet("10.0.0.3", "10.0.0.1", 60)));
    assert_eq!(a.send(&packet("10.0.0.1", "10.0.0.2", 60))[0].peer, Some(b.public()));
    assert_eq!(b.send(&packet("10.0.0.2", "10.0.0.1", 60)).len(), 1);
    a.engine.accept(&BTreeMap::new());
    assert!(!arrives(&mut a, &from_behind_b));
}

//! Messages that move an endpoint, and those that do not.

use super::*;

/// Two nodes move their session from one path to another: what the other side sent before arrives afterwards.
#[test]
fn only_the_node_with_the_higher_key_leaves_a_new_endpoint_for_one_that_packets_come_from() {
    let [(mut low, from_low), (mut high, from_high)] = ordered();
    let elsewhere: SocketAddr = "198.51.100.1:7".parse().unwrap();
    let start = Now::read();
    let after = |milliseconds| Now { instant: start.instant + Duration::from_millis(milliseconds), ..start };

    assert_eq!(low.peer_with(&high, Some(elsewhere), &[]).len(), 1, "a keepalive tells the other node");
    for (milliseconds, expected) in [(500, elsewhere), (2500, high.address)] {
        let message = high.send(&from_high)[0].bytes.to_vec();
        low.receive_at(after(milliseconds), high.address, &message);
        assert_eq!(low.state(&high).config.endpoint, Some(expected), "after {milliseconds} ms");
    }

    assert_eq!(high.peer_with(&low, Some(elsewhere), &[]).len(), 1);
    low.peer_with(&high, None, &["10.0.0.1/32", "10.0.0.2/32"]);
    let message = low.send(&from_low)[0].bytes.to_vec();
    high.receive_at(after(500), low.address, &message);
    assert_eq!(high.state(&low).config.endpoint, Some(low.address), "it follows at once");
}

#[test]
fn only_authenticated_messages_move_the_endpoint() {
    let (mut a, mut b) = connected();
    let elsewhere: SocketAddr = "198.51.100.1:7".parse().unwrap();
    let mut forged = a.send(&packet("10.0.0.1", "10.0.0.2", 60))[0].bytes.to_vec();
    *forged.last_mut().unwrap() ^= 1;
    b.receive(elsewhere, &forged);
    assert_eq!(b.state(&a).config.endpoint, Some(a.address));

    let genuine = a.send(&packet("10.0.0.1", "10.0.0.2", 60))[0].bytes.to_vec();
    b.receive(elsewhere, &genuine);
    assert_eq!(b.state(&a).config.endpoint, Some(elsewhere));
    b.receive(a.address, &genuine);
    assert_eq!(b.state(&a).config.endpoint, Some(elsewhere), "a replay is not authentic");
}

#[test]
fn a_packet_that_was_overtaken_does_not_move_the_endpoint_back() {
    let (mut a, mut b) = connected();
    let old = a.send(&packet("10.0.0.1", "10.0.0.2", 60)).remove(0);
    let new = a.send(&packet("10.0.0.1", "10.0.0.2", 60)).remove(0);
    let [slow, fast] = ["192.0.2.101:51820", "192.0.2.102:51820"].map(|address| address.parse().unwrap());
    // Longer than a node keeps a path that was just established.
    let later = Now { instant: Instant::now() + Duration::from_secs(20), ..Now::read() };
    b.receive_at(later, fast, &new.bytes);
    assert_eq!(b.state(&a).config.endpoint, Some(fast));
    b.receive_at(later, slow, &old.bytes);
    assert_eq!((b.state(&a).config.endpoint, b.delivered.len()), (Some(fast), 2));
    let newer = a.send(&packet("10.0.0.1", "10.0.0.2", 60)).remove(0);
    b.receive_at(later, slow, &newer.bytes);
    assert_eq!(b.state(&a).config.endpoint, Some(slow));
}

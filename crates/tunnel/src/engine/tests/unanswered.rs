//! Packets that a peer does not answer.

use super::*;

fn later(milliseconds: u64) -> Now {
    let now = Now::read();
    Now { instant: now.instant + Duration::from_millis(milliseconds), ..now }
}

#[test]
fn packets_without_an_answer_are_reported_after_half_a_second_and_again_only_for_later_ones() {
    let (mut a, b) = connected();
    assert_eq!(a.engine.take_unanswered(), []);
    let sent = Instant::now();
    a.send(&packet("10.0.0.1", "10.0.0.2", 60));
    a.send(&packet("10.0.0.1", "10.0.0.2", 60));
    // The timers lead there.
    while a.engine.take_unanswered().is_empty() {
        let due = a.engine.poll_timeout().unwrap();
        assert!(due < sent + Duration::from_millis(900), "{:?}", due - sent);
        a.tick(Now { instant: due, ..Now::read() });
    }
    a.tick(later(700));
    assert_eq!(a.engine.take_unanswered(), []);
    a.send(&packet("10.0.0.1", "10.0.0.2", 60));
    a.tick(later(700));
    assert_eq!(a.engine.take_unanswered(), [b.public()]);
}

#[test]
fn whatever_the_peer_sends_is_an_answer_and_keepalives_need_none() {
    let (mut a, mut b) = connected();
    let datagrams = a.send(&packet("10.0.0.1", "10.0.0.2", 60));
    assert_eq!(datagrams.len(), 1);
    for datagram in b.send(&packet("10.0.0.2", "10.0.0.1", 60)) {
        a.receive(b.address, &datagram.bytes);
    }
    let mut change = set_peer(b.public(), None, &["10.0.0.2/32"]);
    change.set_peers.values_mut().for_each(|config| config.persistent_keepalive = Some(25));
    a.change(&change).unwrap();
    assert_eq!(a.tick(later(1000)).1.len(), 1, "a keepalive");
    a.tick(later(1800));
    assert_eq!(a.engine.take_unanswered(), []);
}

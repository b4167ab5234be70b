//! Paths of answers to handshakes.

use super::*;

/// A peer that is tried where it does not answer, and is reached by way of a relay from the other end.
#[test]
fn an_initiation_is_answered_the_way_it_came() {
    let direct: SocketAddr = "192.0.2.9:9".parse().unwrap();
    let relay: SocketAddr = "127.64.0.1:7".parse().unwrap();
    // With the lower key at either end.
    for (first, second) in [(1, 2), (2, 1)] {
        let (mut a, mut b) = (Node::new(first), Node::new(second));
        let sent = a.peer_with(&b, Some(relay), &["10.0.0.2/32"]);
        assert_eq!(b.peer_with(&a, Some(direct), &["10.0.0.1/32"])[0].path.remote, direct);
        let answer = b.receive(relay, &sent[0].bytes);
        assert_eq!(answer[0].path.remote, relay);
        let confirmation = a.receive(relay, &answer[0].bytes);
        assert_eq!(confirmation[0].path.remote, relay);
        b.receive(relay, &confirmation[0].bytes);
        let data = b.send(&packet("10.0.0.2", "10.0.0.1", 60));
        assert_eq!(data[0].path.remote, relay, "there was no session that might stay elsewhere");

        // A session that uses a direct path stays there, and what comes over the relay is answered over it.
        b.peer_with(&a, Some(direct), &["10.0.0.1/32"]);
        let (mut restarted, later) = (Node::new(first), after(Duration::from_millis(100)));
        restarted.ahead = Duration::from_millis(100);
        let sent = restarted.peer_with(&b, Some(relay), &["10.0.0.2/32"]);
        let answer = b.receive_at(later, relay, &sent[0].bytes);
        assert_eq!(answer[0].path.remote, relay);
        assert_eq!(b.state(&a).config.endpoint, Some(direct));
    }
}

//! Persistent keepalives.

use super::*;

#[test]
fn keepalives_are_sent_at_once_and_then_at_their_interval() {
    let (mut a, mut b) = connected();
    let start = Now::read();
    let mut change = set_peer(b.public(), None, &["10.0.0.2/32"]);
    change.set_peers.values_mut().for_each(|config| config.persistent_keepalive = Some(25));
    a.change(&change).unwrap();
    let after = |seconds| Now { instant: start.instant + Duration::from_secs(seconds), ..start };
    let sent: Vec<usize> = [1, 20, 27, 40, 53].map(|seconds| a.tick(after(seconds)).1.len()).to_vec();
    assert_eq!(sent, [1, 0, 1, 0, 1]);
    b.tick(after(53));
}

#[test]
fn each_end_sends_keepalives_whatever_it_receives() {
    let (mut a, mut b) = connected();
    let start = Now::read();
    for (node, peer) in [(&mut a, b.public()), (&mut b, PrivateKey([1; 32]).public_key())] {
        let mut change = set_peer(peer, None, &[]);
        change.set_peers.values_mut().for_each(|config| config.persistent_keepalive = Some(25));
        node.change(&change).unwrap();
    }
    let (mut from_a, mut from_b) = (0, 0);
    for second in 1..=90 {
        let now = Now { instant: start.instant + Duration::from_secs(second), ..start };
        for datagram in a.tick(now).1 {
            from_a += 1;
            b.receive_at(now, a.address, &datagram.bytes);
        }
        for datagram in b.tick(now).1 {
            from_b += 1;
            a.receive_at(now, b.address, &datagram.bytes);
        }
    }
    assert_eq!((from_a, from_b), (4, 4), "after 1, 26, 51 and 76 s");
}

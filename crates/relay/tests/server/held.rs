//! Handshake initiations wait for the link to the relay, and for the peer.

use std::sync::Arc;

use fairlead_api::wireguard::PublicKey;
use fairlead_relay::client::{LinkQueue, LinkStatus, keep_connected};
use fairlead_wire::relay::Frame;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::bed::{Bed, public};

/// A message of the type and the length of a handshake initiation.
fn initiation(number: u8) -> Vec<u8> {
    [&[1, 0, 0, 0][..], &[number; 144]].concat()
}

/// A client that connects now.
fn start(bed: &Bed, number: u8, queue: &LinkQueue, tasks: &mut JoinSet<()>) -> watch::Receiver<LinkStatus> {
    let (sender, status) = watch::channel(LinkStatus::default());
    let receive = Arc::new(|_: PublicKey, _: &[u8]| {});
    tasks.spawn(keep_connected(bed.settings("tcp", number), queue.clone(), receive, sender));
    status
}

#[tokio::test]
async fn what_wireguard_sends_before_there_is_a_link_arrives_once_there_is_one() {
    let bed = Bed::start().await;
    let mut peer = bed.client("tcp", 2).await;
    let (queue, mut tasks) = (LinkQueue::default(), JoinSet::new());
    queue.send(&PublicKey(public(2)), false, &initiation(6));
    queue.send(&PublicKey(public(2)), false, &initiation(7));
    let _status = start(&bed, 1, &queue, &mut tasks);
    assert_eq!(peer.datagram().await, (public(1), initiation(7)), "the newest one");
    assert_eq!(queue.counters().dropped, 1);
}

#[tokio::test]
async fn a_peer_that_comes_to_the_relay_later_gets_the_initiation_when_it_is_heard() {
    // Of two nodes, either may have the lower key.
    for (own, other) in [(1, 2), (2, 1)] {
        let bed = Bed::start().await;
        let (queue, mut tasks) = (LinkQueue::default(), JoinSet::new());
        let mut status = start(&bed, own, &queue, &mut tasks);
        status.wait_for(|status| status.is_up).await.unwrap();
        queue.send(&PublicKey(public(other)), false, &initiation(own));
        let mut peer = bed.client("tcp", other).await;
        peer.send(&Frame::Probe { peer: public(own), payload: b"a probe" }).await;
        assert_eq!(peer.datagram().await, (public(own), initiation(own)));
    }
}

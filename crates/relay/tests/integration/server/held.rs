//! Handshake initiations wait for the link to the relay, and for the peer.

use std::sync::Arc;
use std::time::Duration;

use fairlead_keys::PublicKey;
use fairlead_relay::client::{LinkQueue, LinkStatus, keep_connected};
use fairlead_wire::relay::Frame;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::bed::{Bed, Client, public};

/// Time limit of the wait for a datagram, and the number of attempts of the whole test.
const PATIENCE: Duration = Duration::from_secs(3);
const ATTEMPTS: usize = 5;

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

/// The datagram that a peer gets first; `None` if none comes.
async fn first(peer: &mut Client) -> Option<([u8; 32], Vec<u8>)> {
    timeout(PATIENCE, peer.datagram()).await.ok()
}

/// An initiation is held for a second, in which a busy machine may not connect.
async fn succeeds(scenario: impl AsyncFn() -> bool) {
    for _ in 0..ATTEMPTS {
        if scenario().await {
            return;
        }
    }
    panic!("it never arrived");
}

#[tokio::test]
async fn what_wireguard_sends_before_there_is_a_link_arrives_once_there_is_one() {
    succeeds(async || {
        let bed = Bed::start().await;
        let mut peer = bed.client("tcp", 2).await;
        let (queue, mut tasks) = (LinkQueue::default(), JoinSet::new());
        queue.send(&PublicKey(public(2)), false, &initiation(6));
        queue.send(&PublicKey(public(2)), false, &initiation(7));
        let _status = start(&bed, 1, &queue, &mut tasks);
        let arrived = first(&mut peer).await;
        assert!(
            arrived.as_ref().is_none_or(|it| *it == (public(1), initiation(7))),
            "the newest one: {arrived:?}"
        );
        arrived.is_some()
    })
    .await;
}

#[tokio::test]
async fn a_peer_that_comes_to_the_relay_later_gets_the_initiation_when_it_is_heard() {
    // Of two nodes, either may have the lower key.
    for (own, other) in [(1, 2), (2, 1)] {
        succeeds(async || {
            let bed = Bed::start().await;
            let (queue, mut tasks) = (LinkQueue::default(), JoinSet::new());
            let mut status = start(&bed, own, &queue, &mut tasks);
            status.wait_for(|status| status.is_up).await.unwrap();
            queue.send(&PublicKey(public(other)), false, &initiation(own));
            let mut peer = bed.client("tcp", other).await;
            peer.send(&Frame::Probe { peer: public(own), payload: b"a probe" }).await;
            let arrived = first(&mut peer).await;
            assert!(arrived.as_ref().is_none_or(|it| *it == (public(own), initiation(own))), "{arrived:?}");
            arrived.is_some()
        })
        .await;
    }
}

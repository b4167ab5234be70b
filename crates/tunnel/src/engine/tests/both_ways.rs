//! Packets that go two ways while the path in use is in doubt.

use super::*;

const BURST: u64 = 128 << 10;
const BYTES_PER_SECOND: u64 = 256 << 10;

fn relay() -> SocketAddr {
    SocketAddr::from(([127, 64, 0, 1], 7))
}

fn to(node: &Node) -> BTreeMap<PublicKey, SocketAddr> {
    BTreeMap::from([(node.public(), relay())])
}

fn remotes(datagrams: &[Datagram]) -> Vec<SocketAddr> {
    datagrams.iter().map(|datagram| datagram.path.remote).collect()
}

fn there() -> Vec<u8> {
    packet("10.0.0.1", "10.0.0.2", 60)
}

#[test]
fn data_goes_both_ways_and_is_delivered_once_whichever_way_is_faster() {
    let (mut a, mut b) = connected();
    a.engine.set_both_ways(&to(&b));
    for is_relay_first in [true, false] {
        let before = b.delivered.len();
        let mut sent = a.send(&there());
        assert_eq!(remotes(&sent), [b.address, relay()]);
        assert_eq!(sent.iter().map(|datagram| datagram.peer).collect::<Vec<_>>(), [Some(b.public()), None]);
        assert_eq!(sent[0].bytes.to_vec(), sent[1].bytes.to_vec());
        if is_relay_first {
            sent.reverse();
        }
        for datagram in &sent {
            b.receive(a.address, &datagram.bytes);
        }
        assert_eq!(b.delivered.len(), before + 1);
    }
    assert_eq!(a.engine.take_copies(), Copies { sent: 2, held_back: 0 });
    a.engine.set_both_ways(&BTreeMap::new());
    assert_eq!(remotes(&a.send(&there())), [b.address]);
    assert_eq!(a.engine.take_copies(), Copies::default());
}

#[test]
fn what_comes_over_the_relay_moves_the_endpoint_only_after_the_direct_one_is_silent_for_a_while() {
    let (mut a, mut b) = connected();
    let start = Instant::now() + Duration::from_secs(20);
    let silence = |milliseconds| Now { instant: start + Duration::from_millis(milliseconds), ..Now::read() };
    let mut arrives = |from, milliseconds| {
        let back = b.send(&packet("10.0.0.2", "10.0.0.1", 60)).remove(0);
        a.receive_at(silence(milliseconds), from, &back.bytes);
        a.state(&b).config.endpoint
    };
    let direct = SocketAddr::from(([192, 0, 2, 2], 51_820));
    assert_eq!(arrives(relay(), 0), Some(direct));
    assert_eq!(arrives(direct, 1900), Some(direct));
    assert_eq!(arrives(relay(), 2100), Some(direct), "the direct endpoint delivers");
    assert_eq!(arrives(relay(), 4100), Some(relay()));
    assert_eq!(arrives(direct, 4200), Some(direct), "nothing holds it at the relay");
    assert_eq!(a.delivered.len(), 5);
}

#[test]
fn nothing_goes_twice_over_one_way_and_handshakes_go_one_way() {
    let (mut a, b) = connected();
    a.engine.set_both_ways(&to(&b));
    a.peer_with(&b, Some(relay()), &["10.0.0.2/32"]);
    assert_eq!(remotes(&a.send(&there())), [relay()]);
    let (mut a, b) = (Node::new(1), Node::new(2));
    a.engine.set_both_ways(&to(&b));
    assert_eq!(remotes(&a.peer_with(&b, Some(b.address), &[])), [b.address]);
}

#[test]
fn what_goes_both_ways_is_limited_in_bytes() {
    let (mut a, b) = connected();
    a.engine.set_both_ways(&to(&b));
    let length = 1420 + 32;
    let start = Now::read();
    let mut send = |number: u64, milliseconds| {
        let now = Now { instant: start.instant + Duration::from_millis(milliseconds), ..start };
        let packet = packet("10.0.0.1", "10.0.0.2", 1420);
        // Without an answer there are handshakes as well.
        let is_data = |datagram: &Datagram| datagram.bytes.len() > 1420;
        let sent: usize =
            (0..number).map(|_| a.send_at(now, &packet).into_iter().filter(is_data).count()).sum();
        let copies = a.engine.take_copies();
        assert_eq!(u64::try_from(sent).unwrap(), number + copies.sent);
        assert_eq!(copies.held_back + copies.sent, number);
        copies.sent
    };
    assert_eq!(send(1_000, 0), BURST / length);
    let second: u64 = (1..=1_000).map(|millisecond| send(10, millisecond)).sum();
    assert!((second * length).abs_diff(BYTES_PER_SECOND) <= 2 * length, "{second}");
    assert_eq!(send(1_000, 60_000), BURST / length, "no more than that is saved up");
}

//! Peers that do not answer.

use super::*;

/// A node with `peers` peers that never answer, and the keepalives that all members of a mesh have.
fn with_silent_peers(peers: u16) -> Node {
    let mut node = Node::new(1);
    let peer = |number: u16| {
        let [high, low] = number.to_be_bytes();
        let mut key = [7; 32];
        key[..2].copy_from_slice(&[low, high]);
        let config = PeerConfig {
            preshared_key: None,
            endpoint: Some(SocketAddr::from(([198, 18, high, low], 51_820))),
            persistent_keepalive: Some(25),
            allowed_ips: Vec::new(),
        };
        (PublicKey(key), config)
    };
    let change = DeviceChange { set_peers: (0..peers).map(peer).collect(), ..DeviceChange::default() };
    node.change(&change).unwrap();
    node
}

/// Runs the timers when they are due until `seconds` after `start`; returns the datagrams.
fn run(node: &mut Node, start: Now, seconds: u64) -> Vec<Datagram> {
    let end = start.instant + Duration::from_secs(seconds);
    let mut sent = Vec::new();
    while let Some(due) = node.engine.poll_timeout().filter(|due| *due <= end) {
        sent.extend(node.tick(Now { instant: due, ..start }).1);
    }
    sent
}

#[test]
fn peers_that_never_answered_are_not_touched_by_a_tick_and_have_no_session_state() {
    let mut node = with_silent_peers(300);
    let start = Now::read();
    run(&mut node, start, 120);
    let quiet = node.engine.timers.first().unwrap().0;
    assert!(quiet > start.instant + Duration::from_secs(120));
    assert!(node.tick(Now { instant: start.instant + Duration::from_secs(120), ..start }).1.is_empty());
    let with_state = node.engine.peers.values().filter(|peer| peer.has_state()).count();
    assert!(with_state < 300 * 6 / 25, "{with_state} of 300");
    assert!(node.engine.indexes.len() <= 600 + 64);
}

#[test]
fn peers_that_do_not_answer_are_asked_ever_more_rarely() {
    for (peers, most) in [(10, 10 * 30 / 25), (500, 35 * 25), (1_000, 35 * 25)] {
        let mut node = with_silent_peers(peers);
        let start = Now::read();
        run(&mut node, start, 400);
        let later = run(&mut node, start, 430).len();
        assert!((1..=most).contains(&later), "{later} handshakes in 30 s with {peers} peers");
    }
}

#[test]
fn a_packet_or_a_new_endpoint_begins_a_handshake_at_once_also_after_a_long_silence() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    let start = Now::read();
    a.peer_with(&b, Some(b.address), &["10.0.0.2/32"]);
    assert_eq!(run(&mut a, start, 5_000).len(), 3, "without a keepalive nothing asks for more");
    assert_eq!(a.engine.poll_timeout(), None);
    let first = a.send(&packet("10.0.0.1", "10.0.0.2", 60));
    assert_eq!(first.len(), 1);
    b.peer_with(&a, None, &["10.0.0.1/32"]);
    exchange(&mut a, &mut b, first, Vec::new());
    assert_eq!(b.delivered.len(), 1, "it waited for the session");

    let (mut a, b) = (Node::new(1), Node::new(2));
    a.peer_with(&b, Some(b.address), &[]);
    run(&mut a, start, 5_000);
    assert_eq!(a.peer_with(&b, Some("192.0.2.9:9".parse().unwrap()), &[]).len(), 1);
}

#[test]
fn a_peer_that_was_heard_is_remembered_against_replays_while_it_rests() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    b.peer_with(&a, None, &[]);
    let first = a.peer_with(&b, Some(b.address), &[]);
    let recorded = first[0].bytes.to_vec();
    // The answer is lost.
    assert_eq!(b.receive(a.address, &recorded).len(), 1);
    let start = Now::read();
    run(&mut b, start, 600);
    assert_eq!(b.engine.poll_timeout(), None, "it rests");
    let elsewhere = "198.51.100.1:7".parse().unwrap();
    assert!(b.receive(elsewhere, &recorded).is_empty());
    assert_eq!(b.state(&a).config.endpoint, Some(a.address));

    run(&mut b, start, 600);
    (a.ahead, b.ahead) = (Duration::from_secs(600), Duration::from_secs(600));
    let again = a.peer_with(&b, Some("192.0.2.3:1".parse().unwrap()), &[]);
    exchange(&mut a, &mut b, again, Vec::new());
    assert!(a.state(&b).last_handshake.is_some());
}

#[test]
fn thousands_of_peers_are_not_asked_all_at_once() {
    let mut node = Node::new(1);
    let change = |endpoint: &str| {
        let mut all = with_silent_peers(1_000).engine;
        let peers = all.peers.drain().map(|(key, _)| {
            let config = PeerConfig {
                preshared_key: None,
                endpoint: endpoint.parse().ok(),
                persistent_keepalive: None,
                allowed_ips: Vec::new(),
            };
            (key, config)
        });
        DeviceChange { set_peers: peers.collect(), ..DeviceChange::default() }
    };
    let start = Now::read();
    assert_eq!(node.change(&change("192.0.2.5:5")).unwrap().len(), AT_ONCE + 1);
    let mut asked: Vec<PublicKey> = run(&mut node, start, 10).iter().filter_map(|it| it.peer).collect();
    asked.sort_unstable();
    asked.dedup();
    assert_eq!(asked.len(), 1_000, "all in the end");
}

/// A peer whose key is a point of low order (RFC 7748, section 6.1), as only a hostile node publishes.
#[test]
fn a_peer_with_an_unusable_key_costs_nothing() {
    let mut a = Node::new(1);
    let mut key = [0; 32];
    key[0] = 1;
    let mut change = set_peer(PublicKey(key), "192.0.2.9:9".parse().ok(), &["10.0.0.9/32"]);
    change.set_peers.values_mut().for_each(|config| config.persistent_keepalive = Some(25));
    let start = Now::read();
    assert!(a.change(&change).unwrap().is_empty());
    assert!(a.send(&packet("10.0.0.1", "10.0.0.9", 60)).is_empty());
    let mut now = start;
    let mut ticks = 0;
    while let Some(due) =
        a.engine.poll_timeout().filter(|due| *due < start.instant + Duration::from_secs(600))
    {
        now.instant = now.instant.max(due);
        assert!(a.tick(now).1.is_empty());
        ticks += 1;
        assert!(ticks < 600, "it never rests");
    }
}

#[test]
fn a_handshake_that_is_given_up_leaves_a_session_that_works() {
    let (mut a, mut b) = connected();
    let start = after(Duration::from_secs(1));
    let handshakes = std::collections::BTreeSet::from([b.public()]);
    a.ahead = Duration::from_secs(1);
    assert_eq!(a.change(&DeviceChange { handshakes, ..DeviceChange::default() }).unwrap().len(), 1);
    // All handshakes are lost, and the session is used.
    for second in 1..=100 {
        let now = Now { instant: start.instant + Duration::from_secs(second), ..start };
        drop(a.tick(now));
        for datagram in b.send_at(now, &packet("10.0.0.2", "10.0.0.1", 60)) {
            a.receive_at(now, b.address, &datagram.bytes);
        }
    }
    assert_eq!(a.delivered.len(), 100);
}

//! Two or more engines wired together by hand: no sockets, no namespaces.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use fairlead_keys::PresharedKey;
use fairlead_wireguard::SystemRandom;

use super::*;
use crate::offload::{self, VnetHeader};

mod accepted;
mod answers;
mod both_ways;
mod clock;
mod hostile;
mod keepalives;
mod roaming;
mod rotation;
mod silent;
mod unanswered;

/// A datagram that was sent.
struct Datagram {
    peer: Option<PublicKey>,
    path: Path,
    bytes: Vec<u8>,
}

/// An engine and its address on the simulated network.
struct Node {
    engine: Engine,
    address: SocketAddr,
    private: PrivateKey,
    /// Inner packets it would have written to its TUN.
    delivered: Vec<Vec<u8>>,
    /// Time by which its clocks are ahead of this host's.
    ahead: Duration,
}

impl Node {
    fn new(number: u8) -> Self {
        let private = PrivateKey([number; 32]);
        let mut node = Self {
            engine: engine(),
            address: SocketAddr::from(([192, 0, 2, number], 51_820)),
            private: private.clone(),
            delivered: Vec::new(),
            ahead: Duration::ZERO,
        };
        let change = DeviceChange { private_key: Some(private), ..DeviceChange::default() };
        assert!(node.change(&change).unwrap().is_empty());
        node
    }

    fn now(&self) -> Now {
        after(self.ahead)
    }

    fn public(&self) -> PublicKey {
        self.private.public_key()
    }

    fn change(&mut self, change: &DeviceChange) -> Result<Vec<Datagram>, Error> {
        self.engine.check(change)?;
        let mut out = Outbox::default();
        self.engine.apply(change, self.now(), &mut out);
        Ok(sent(out))
    }

    fn peer_with(&mut self, other: &Self, endpoint: Option<SocketAddr>, allowed: &[&str]) -> Vec<Datagram> {
        let change = set_peer(other.public(), endpoint, allowed);
        self.change(&change).unwrap()
    }

    fn send(&mut self, packet: &[u8]) -> Vec<Datagram> {
        self.send_at(self.now(), packet)
    }

    fn send_at(&mut self, now: Now, packet: &[u8]) -> Vec<Datagram> {
        let mut out = Outbox::default();
        let mut packet = packet.to_vec();
        self.engine.send_packets(plain(&mut packet), now, &mut out);
        sent(out)
    }

    fn receive(&mut self, from: SocketAddr, datagram: &[u8]) -> Vec<Datagram> {
        self.receive_at(self.now(), from, datagram)
    }

    fn receive_at(&mut self, now: Now, from: SocketAddr, datagram: &[u8]) -> Vec<Datagram> {
        let (mut out, mut packets) = (Outbox::default(), Vec::new());
        let path = Path { remote: from, local: Some(self.address.ip()) };
        let mut bytes = datagram.to_vec();
        self.engine.receive(&mut Received::of(path, datagram.len(), &mut bytes), now, &mut out, &mut packets);
        self.delivered.extend(packets.into_iter().map(|packet| bytes[packet].to_vec()));
        sent(out)
    }

    fn tick(&mut self, now: Now) -> (Instant, Vec<Datagram>) {
        let mut out = Outbox::default();
        self.engine.tick(now, &mut out);
        let next = self.engine.poll_timeout().unwrap_or(now.instant + Duration::from_secs(3600));
        (next, sent(out))
    }

    fn state(&self, other: &Self) -> PeerState {
        self.engine.peers().find(|(key, _)| *key == other.public()).unwrap().1
    }
}

/// Both clocks of this host after this time.
fn after(time: Duration) -> Now {
    let now = Now::read();
    Now { instant: now.instant + time, wall: now.wall + time }
}

/// Result of a read of the TUN with a packet that is complete.
fn plain(packet: &mut [u8]) -> Split<'_> {
    offload::split(&VnetHeader::read(&[0; offload::HEADER_LENGTH]), packet).unwrap()
}

fn engine() -> Engine {
    Engine::new(1420, Box::new(SystemRandom))
}

/// The datagrams, one by one, each with its copy.
fn sent(mut out: Outbox) -> Vec<Datagram> {
    let batches = std::iter::from_fn(|| out.pop_front());
    let datagrams = |batch: Batch| {
        let first = (batch.to.peer, batch.to.path);
        let copy = batch.to.also.map(|also| (None, also));
        let one = |bytes: &[u8]| {
            let to = [Some(first), copy].into_iter().flatten();
            to.map(|(peer, path)| Datagram { peer, path, bytes: bytes.to_vec() }).collect::<Vec<_>>()
        };
        batch.datagrams().flat_map(one).collect::<Vec<_>>()
    };
    batches.flat_map(datagrams).collect()
}

fn set_peer(key: PublicKey, endpoint: Option<SocketAddr>, allowed: &[&str]) -> DeviceChange {
    let config = PeerConfig {
        preshared_key: None,
        endpoint,
        persistent_keepalive: None,
        allowed_ips: allowed.iter().map(|prefix| prefix.parse().unwrap()).collect(),
    };
    DeviceChange { set_peers: BTreeMap::from([(key, config)]), ..DeviceChange::default() }
}

/// An IPv4 packet of `length` bytes.
fn packet(source: &str, destination: &str, length: u16) -> Vec<u8> {
    let mut bytes = vec![0x45, 0];
    bytes.extend(length.to_be_bytes());
    bytes.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    for address in [source, destination] {
        let IpAddr::V4(address) = address.parse().unwrap() else { panic!("{address}") };
        bytes.extend(address.octets());
    }
    bytes.resize(length.into(), 0x5a);
    bytes
}

/// Carries datagrams between two nodes until both are idle.
fn exchange(a: &mut Node, b: &mut Node, mut from_a: Vec<Datagram>, mut from_b: Vec<Datagram>) {
    for _ in 0..20 {
        let to_b: Vec<Vec<u8>> = from_a.drain(..).map(|datagram| datagram.bytes.to_vec()).collect();
        let to_a: Vec<Vec<u8>> = from_b.drain(..).map(|datagram| datagram.bytes.to_vec()).collect();
        if to_a.is_empty() && to_b.is_empty() {
            return;
        }
        from_b.extend(to_b.iter().flat_map(|bytes| b.receive(a.address, bytes)));
        from_a.extend(to_a.iter().flat_map(|bytes| a.receive(b.address, bytes)));
    }
    panic!("the two never become idle");
}

/// Two nodes with a session: 10.0.0.1 and 10.0.0.2.
fn connected() -> (Node, Node) {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    let quiet = b.peer_with(&a, None, &["10.0.0.1/32"]);
    assert!(quiet.is_empty(), "no endpoint");
    let first = a.peer_with(&b, Some(b.address), &["10.0.0.2/32"]);
    assert_eq!(first.len(), 1, "a new endpoint is tried at once");
    exchange(&mut a, &mut b, first, Vec::new());
    (a, b)
}

#[test]
fn packets_cross_both_ways_and_lose_their_padding() {
    let (mut a, mut b) = connected();
    let (there, back) = (packet("10.0.0.1", "10.0.0.2", 77), packet("10.0.0.2", "10.0.0.1", 1420));
    let out = a.send(&there);
    assert_eq!(out[0].bytes.len(), 80 + 32, "padded to 16, and 32 bytes of WireGuard");
    let out = (out, b.send(&back));
    assert_eq!(out.1[0].bytes.len(), 1420 + 32, "never padded beyond the MTU");
    exchange(&mut a, &mut b, out.0, out.1);
    assert_eq!((a.delivered, b.delivered), (vec![back], vec![there]));
}

#[test]
fn both_ends_know_the_handshake_and_only_after_it_completed() {
    let (a, b) = connected();
    assert!(a.state(&b).last_handshake.is_some() && b.state(&a).last_handshake.is_some());
    assert_eq!(b.state(&a).config.endpoint, Some(a.address), "learned from the handshake");

    let (mut a, mut b) = (Node::new(1), Node::new(2));
    b.peer_with(&a, None, &["10.0.0.1/32"]);
    let first = a.peer_with(&b, Some(b.address), &["10.0.0.2/32"]);
    let answer = b.receive(a.address, &first[0].bytes);
    assert_eq!(answer.len(), 1);
    assert_eq!(b.state(&a).last_handshake, None, "the answer may be lost");
    let held = b.send(&packet("10.0.0.2", "10.0.0.1", 60));
    assert!(held.is_empty(), "no packet goes into an unconfirmed session");
    exchange(&mut a, &mut b, Vec::new(), answer);
    assert_eq!(a.delivered.len(), 1, "it went once the session was confirmed");
}

#[test]
fn packets_wait_for_a_session_in_order_and_in_bounds() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    b.peer_with(&a, None, &["10.0.0.1/32"]);
    let first = a.peer_with(&b, Some(b.address), &["10.0.0.2/32"]);
    for length in 100..200 {
        assert!(a.send(&packet("10.0.0.1", "10.0.0.2", length)).is_empty());
    }
    exchange(&mut a, &mut b, first, Vec::new());
    let lengths: Vec<usize> = b.delivered.iter().map(Vec::len).collect();
    assert_eq!(lengths, (168..200).collect::<Vec<_>>(), "the newest 32");
}

#[test]
fn simultaneous_handshakes_end_in_one_session() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    let from_a = a.peer_with(&b, Some(b.address), &["10.0.0.2/32"]);
    let from_b = b.peer_with(&a, Some(a.address), &["10.0.0.1/32"]);
    exchange(&mut a, &mut b, from_a, from_b);
    let out = (a.send(&packet("10.0.0.1", "10.0.0.2", 60)), b.send(&packet("10.0.0.2", "10.0.0.1", 60)));
    exchange(&mut a, &mut b, out.0, out.1);
    assert_eq!((a.delivered.len(), b.delivered.len()), (1, 1));
}

#[test]
fn a_handshake_to_a_new_endpoint_is_repeated_until_it_is_answered() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    let start = Now::read();
    assert_eq!(a.peer_with(&b, Some(b.address), &[]).len(), 1);
    let after = |milliseconds| Now { instant: start.instant + Duration::from_millis(milliseconds), ..start };
    assert!(a.tick(after(100)).1.is_empty());
    let mut sent = Vec::new();
    for milliseconds in [900, 1_900, 2_900, 3_900, 4_500] {
        sent.push(a.tick(after(milliseconds)).1.len());
    }
    // 0.3, 1 and 2 seconds after the first; later repetitions are the library's, by its own clock.
    assert_eq!(sent, [1, 1, 1, 0, 0]);

    let again = a.peer_with(&b, Some("192.0.2.9:9".parse().unwrap()), &[]);
    assert_eq!(again.len(), 1, "another endpoint is tried at once, also during repetitions");
    assert_eq!(again[0].path.remote, "192.0.2.9:9".parse().unwrap());
    b.peer_with(&a, None, &[]);
    exchange(&mut a, &mut b, again, Vec::new());
    assert!(a.tick(after(60_000)).1.is_empty(), "answered: no more repetitions");
}

#[test]
fn the_answer_to_any_repetition_completes_the_handshake() {
    for answered in 0..4 {
        let (mut a, mut b) = (Node::new(1), Node::new(2));
        b.peer_with(&a, None, &[]);
        let start = Now::read();
        let after =
            |milliseconds| Now { instant: start.instant + Duration::from_millis(milliseconds), ..start };
        let mut sent = a.peer_with(&b, Some(b.address), &[]);
        for milliseconds in [900, 1_900, 2_900] {
            sent.extend(a.tick(after(milliseconds)).1);
        }
        assert_eq!(sent.len(), 4);
        let answer = b.receive(a.address, &sent[answered].bytes);
        exchange(&mut a, &mut b, Vec::new(), answer);
        assert!(a.state(&b).last_handshake.is_some(), "message {answered}");
    }
}

#[test]
fn a_repetition_is_due_before_the_timers_of_the_protocol() {
    let (mut a, b) = (Node::new(1), Node::new(2));
    let now = Now::read();
    a.peer_with(&b, Some(b.address), &[]);
    let later = Now { instant: now.instant + Duration::from_millis(200), ..now };
    let (next, _) = a.tick(later);
    assert!(next < later.instant + Duration::from_millis(200));
}

#[test]
fn changing_a_peer_keeps_its_session() {
    let (mut a, mut b) = connected();
    let before = a.state(&b);
    let moved: SocketAddr = "192.0.2.77:1".parse().unwrap();
    let out = a.peer_with(&b, Some(moved), &["10.0.0.2/32", "10.9.0.0/16"]);
    assert_eq!(out.len(), 1);
    assert_eq!((out[0].path.remote, out[0].bytes.len()), (moved, 32), "a keepalive through the new endpoint");
    let after = a.state(&b);
    assert_eq!(after.last_handshake, before.last_handshake);
    assert!(after.rx_bytes >= before.rx_bytes && after.rx_bytes > 0);
    exchange(&mut a, &mut b, out, Vec::new());

    assert!(a.peer_with(&b, Some(moved), &["10.0.0.2/32"]).is_empty(), "an unchanged endpoint sends nothing");
    assert!(a.peer_with(&b, None, &["10.0.0.2/32"]).is_empty());
    assert_eq!(a.state(&b).config.endpoint, Some(moved), "no endpoint leaves it alone");
}

#[test]
fn inner_sources_must_be_allowed_addresses_of_the_sender() {
    let (mut a, mut b) = connected();
    let spoofed = a.send(&packet("10.0.0.99", "10.0.0.2", 60));
    exchange(&mut a, &mut b, spoofed, Vec::new());
    assert!(b.delivered.is_empty());

    let c = Node::new(3);
    b.peer_with(&c, None, &["10.0.0.1/32"]);
    assert_eq!(b.state(&a).config.allowed_ips, [], "moved to the new peer");
    let out = a.send(&packet("10.0.0.1", "10.0.0.2", 60));
    exchange(&mut a, &mut b, out, Vec::new());
    assert!(b.delivered.is_empty(), "its address belongs to another peer now");
}

/// Two nodes with a session, the first of which has the lower public key, and a packet from either to the other.
fn ordered() -> [(Node, Vec<u8>); 2] {
    let (one, other) = connected();
    let is_lower = one.public() < other.public();
    let first = (one, packet("10.0.0.1", "10.0.0.2", 60));
    let second = (other, packet("10.0.0.2", "10.0.0.1", 60));
    if is_lower { [first, second] } else { [second, first] }
}

#[test]
fn unknown_keys_get_no_answer() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    let first = a.peer_with(&b, Some(b.address), &[]);
    assert!(b.receive(a.address, &first[0].bytes).is_empty());
}

#[test]
fn a_peer_with_our_own_key_is_refused_and_nothing_changes() {
    let mut a = Node::new(1);
    let mut change = set_peer(a.public(), None, &["10.0.0.0/8"]);
    change.set_peers.extend(set_peer(PublicKey([7; 32]), None, &[]).set_peers);
    let error = a.change(&change).err().unwrap();
    assert!(error.to_string().contains(&a.public().to_string()), "{error}");
    assert_eq!(a.engine.peers().count(), 0);

    // The other way round: the new identity is that of a peer.
    let b = Node::new(2);
    a.peer_with(&b, None, &[]);
    let change = DeviceChange { private_key: Some(b.private.clone()), ..DeviceChange::default() };
    assert!(matches!(a.change(&change), Err(Error::OwnKey(key)) if key == b.public()));
}

#[test]
fn peers_need_a_private_key_first() {
    let mut engine = engine();
    let change = set_peer(PublicKey([7; 32]), None, &[]);
    assert!(matches!(engine.check(&change), Err(Error::NoPrivateKey)));
    let path = Path::to("192.0.2.1:1".parse().unwrap());
    let mut out = Outbox::default();
    engine.receive(&mut Received::of(path, 148, &mut [1; 148]), Now::read(), &mut out, &mut Vec::new());
    let mut packet = packet("10.0.0.1", "10.0.0.2", 60);
    engine.send_packets(plain(&mut packet), Now::read(), &mut out);
    assert!(out.is_empty());
}

#[test]
fn two_nodes_with_one_key_cause_neither_panic_nor_message_loop() {
    let (mut a, mut twin, mut b) = (Node::new(1), Node::new(1), Node::new(2));
    twin.address = "192.0.2.111:51820".parse().unwrap();
    b.peer_with(&a, None, &["10.0.0.1/32"]);
    for round in 0..5 {
        // Peers take no more than one handshake in 20 ms.
        for node in [&mut a, &mut twin, &mut b] {
            node.ahead += Duration::from_millis(50);
        }
        let endpoint = SocketAddr::new(b.address.ip(), 51_820 + round);
        let first = a.peer_with(&b, Some(endpoint), &["10.0.0.2/32"]);
        exchange(&mut a, &mut b, first, Vec::new());
        for node in [&mut a, &mut twin, &mut b] {
            node.ahead += Duration::from_millis(50);
        }
        let first = twin.peer_with(&b, Some(endpoint), &["10.0.0.2/32"]);
        exchange(&mut twin, &mut b, first, Vec::new());
    }
    let out = twin.send(&packet("10.0.0.1", "10.0.0.2", 60));
    exchange(&mut twin, &mut b, out, Vec::new());
    assert_eq!(b.state(&a).config.endpoint, Some(twin.address), "the last sender is the peer's endpoint");
}

#[test]
fn a_new_identity_ends_sessions_and_starts_new_ones() {
    let (mut a, mut b) = connected();
    let fresh = PrivateKey([33; 32]);
    let mut move_on = set_peer(fresh.public_key(), None, &["10.0.0.1/32"]);
    move_on.remove_peers.push(a.public());
    b.change(&move_on).unwrap();
    let change = DeviceChange { private_key: Some(fresh.clone()), ..DeviceChange::default() };
    let out = a.change(&change).unwrap();
    a.private = fresh;
    exchange(&mut a, &mut b, out, Vec::new());
    let out = a.send(&packet("10.0.0.1", "10.0.0.2", 60));
    exchange(&mut a, &mut b, out, Vec::new());
    assert_eq!(b.delivered.len(), 1);
}

#[test]
fn preshared_keys_must_agree() {
    let (mut a, mut b) = (Node::new(1), Node::new(2));
    b.peer_with(&a, None, &[]);
    let mut change = set_peer(b.public(), Some(b.address), &[]);
    change.set_peers.values_mut().for_each(|config| config.preshared_key = Some(PresharedKey([5; 32])));
    let first = a.change(&change).unwrap();
    exchange(&mut a, &mut b, first, Vec::new());
    assert_eq!(a.state(&b).last_handshake, None);
}

#[test]
fn removed_peers_leave_no_session_and_no_index() {
    let (mut a, mut b) = connected();
    b.change(&DeviceChange { remove_peers: vec![a.public()], ..DeviceChange::default() }).unwrap();
    let out = a.send(&packet("10.0.0.1", "10.0.0.2", 60));
    exchange(&mut a, &mut b, out, Vec::new());
    assert!(b.delivered.is_empty());
    assert!(b.send(&packet("10.0.0.2", "10.0.0.1", 60)).is_empty());
    b.tick(Now::read());
    assert!(b.engine.indexes.len() == 0);
}

#[test]
fn a_send_error_is_shown_until_a_datagram_is_sent() {
    let (mut a, b) = connected();
    let datagram = a.send(&packet("10.0.0.1", "10.0.0.2", 60)).remove(0);
    let before = a.state(&b).tx_bytes;
    let failure = io::Error::from_raw_os_error(nix::libc::ENETUNREACH);
    let mut out = Outbox::default();
    out.push_message(datagram.peer, &datagram.path, &datagram.bytes);
    let batch = out.pop_front().unwrap();
    a.engine.sent(&batch, &batch.to.path, Some(&failure));
    let said = a.engine.send_error(&b.public()).unwrap().to_owned();
    assert!(said.contains(&b.address.to_string()) && said.contains("unreachable"), "{said}");
    assert_eq!(a.state(&b).tx_bytes, before);
    a.engine.sent(&batch, &batch.to.path, None);
    assert_eq!(a.engine.send_error(&b.public()), None);
    assert_eq!(a.state(&b).tx_bytes, before + 96);
}

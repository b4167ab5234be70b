//! The embedded WireGuard and wireguard-go over networks that lose, reorder and repeat what they send, and that move their ends.

use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, UdpSocket};
use std::thread;
use std::time::Duration;

use crate::common::flow::{Flow, Pace};
use crate::common::forwarder::Forwarder;
use crate::common::wireguard_go::{INNER, Judge};
use crate::common::{NAME, Namespace, Node, PORT, cable, set_peer, transfer, until};
use fairlead_keys::DeviceChange;
use nix::libc;
use socket2::{Domain, Protocol, Socket, Type};

/// A datagram every 10 ms, whatever becomes of them.
const STEADY: Pace = Pace { total: usize::MAX, under_way: usize::MAX, interval: Duration::from_millis(10) };
/// The same where none may be lost.
const LOSSLESS: Pace = Pace { under_way: 32, ..STEADY };
/// So many that some are under way whenever the ends change to another session.
const DENSE: Pace = Pace { under_way: 64, interval: Duration::from_micros(500), ..STEADY };
/// Packets that wait for a session: fewer than either end keeps.
const STAGED: Pace = Pace { total: 20, ..AT_ONCE };
const AT_ONCE: Pace = Pace { total: 200, under_way: 32, interval: Duration::ZERO };
/// Buffers of TCP connections: fewer packets wait for a session than the 128 that wireguard-go keeps, beside those of a flow.
const SMALL_WINDOW: &str = "sysctl -qw net.ipv4.tcp_rmem='4096 32768 65536'";
/// An Ethernet frame's type for sockets that get every frame, also those that leave (packet(7)).
const ALL_FRAMES: u16 = libc::ETH_P_ALL as u16;
/// The types of messages (WireGuard paper, section 5.4).
const INITIATION: u8 = 1;
const DATA: u8 = 4;

/// A device with one thread for everything or with more, as [`Node::restart`] says, and wireguard-go at the two ends of a cable.
fn ends(host: u8) -> (Node, Judge) {
    let (a, b) = cable();
    (Node::start(a, host), Judge::start(b))
}

fn to_wireguard_go(node: &Node, judge: &Judge, pace: Pace) -> Flow {
    Flow::start(&node.namespace, &judge.namespace, judge.inner()[1], pace)
}

/// Over IPv4. wireguard-go sends a UDP checksum that comes to 0 as 0, which over IPv6 no receiver takes (RFC 8200, section 8.1): one
/// datagram in 65,536 would be lost.
fn to_node(node: &Node, judge: &Judge, pace: Pace) -> Flow {
    Flow::start(&judge.namespace, &node.namespace, node.inner()[0], pace)
}

fn both_ways(node: &Node, judge: &Judge, pace: Pace) -> [Flow; 2] {
    [to_wireguard_go(node, judge, pace), to_node(node, judge, pace)]
}

/// Value of `what` that `wg show` prints for the only peer.
fn shown(namespace: &Namespace, what: &str) -> String {
    let line = namespace.sh(&format!("wg show {NAME} {what}"));
    line.trim_end().split_once('\t').unwrap().1.to_owned()
}

#[test]
fn a_session_is_established_although_one_handshake_message_in_three_is_lost() {
    thread::scope(|scope| {
        for begins in [[true, true], [true, false], [false, true]] {
            for (host, lost) in [(1, [0, 0]), (2, [1, 0])] {
                scope.spawn(move || is_established_with_losses(host, begins, lost));
            }
        }
    });
}

/// Whether the node and wireguard-go begin a handshake, and how many of its messages either of them gets before the first that is lost.
fn is_established_with_losses(host: u8, [node_begins, judge_begins]: [bool; 2], lost: [usize; 2]) {
    let (node, judge) = ends(host);
    let namespaces = [&node.namespace, &judge.namespace];
    for (namespace, lost) in namespaces.into_iter().zip(lost) {
        namespace.sh(&format!(
            "nft 'table inet lossy {{
                 chain handshakes {{ type filter hook input priority filter;
                     udp dport {PORT} @th,64,8 {{ 1, 2 }} numgen inc mod 3 {lost} counter drop
                 }}
             }}'"
        ));
    }
    judge.peer_with(&node, if judge_begins { "endpoint 192.0.2.1:51820" } else { "" });
    node.change(&set_peer(judge.public, node_begins.then_some("192.0.2.2:51820"), &INNER));
    let staged = [
        node_begins.then(|| to_wireguard_go(&node, &judge, STAGED)),
        judge_begins.then(|| to_node(&node, &judge, STAGED)),
    ];
    staged.into_iter().flatten().for_each(Flow::assert_each_once);

    both_ways(&node, &judge, AT_ONCE).into_iter().for_each(Flow::assert_each_once);
    for (namespace, lost) in namespaces.into_iter().zip(lost) {
        assert_ne!(shown(namespace, "latest-handshakes"), "0");
        let rules = namespace.sh("nft list table inet lossy");
        assert!(lost > 0 || !rules.contains("packets 0 "), "nothing was lost: {rules}");
    }
}

#[test]
fn reordered_and_repeated_messages_arrive_once() {
    for host in [1, 2] {
        let (node, judge) = ends(host);
        let ends = ["192.0.2.1:51820", "192.0.2.2:51820"];
        let forwarder = Forwarder::start(&judge.namespace, "192.0.2.2:51900", ends);
        judge.peer_with(&node, "");
        node.change(&set_peer(judge.public, Some("192.0.2.2:51900"), &INNER));
        node.reaches(judge.inner()[0]);
        let flows = both_ways(&node, &judge, Pace { total: 2_000, ..AT_ONCE });
        flows.iter().for_each(Flow::settle);
        until("all copies are sent", || forwarder.keeps_nothing());
        // They arrive before what is sent later.
        node.reaches(judge.inner()[0]);
        flows.into_iter().for_each(Flow::assert_each_once);
        let counts = forwarder.counts();
        assert!(counts.as_flattened().iter().all(|count| *count > 300), "reordered and repeated: {counts:?}");
        for namespace in [&node.namespace, &judge.namespace] {
            assert_ne!(shown(namespace, "latest-handshakes"), "0");
        }
    }
}

#[test]
fn new_sessions_under_load_lose_nothing() {
    let (node, judge) = connected(2);
    let flows = both_ways(&node, &judge, LOSSLESS);
    transfers_while(&node, &judge, || {
        let dense = both_ways(&node, &judge, DENSE);
        for _ in 0..15 {
            renew(&node, &judge, || node.shakes_hands_with(judge.public));
        }
        dense.into_iter().for_each(Flow::assert_each_once);
        for _ in 0..6 {
            renew(&node, &judge, || judge.gives_up_its_sessions());
        }
        flows.into_iter().for_each(Flow::assert_each_once);
    });
}

/// wireguard-go erases a session in which this node may still send when handshakes cross, so that single datagrams may be lost.
#[test]
fn handshakes_that_cross_under_load_damage_nothing() {
    let (node, judge) = connected(1);
    transfers_while(&node, &judge, || {
        thread::scope(|scope| {
            let theirs = scope.spawn(|| {
                for _ in 0..10 {
                    judge.gives_up_its_sessions();
                    thread::sleep(Duration::from_millis(50));
                }
            });
            while !theirs.is_finished() {
                node.shakes_hands_with(judge.public);
                // wireguard-go takes 50 a second.
                thread::sleep(Duration::from_millis(21));
            }
        });
    });
    both_ways(&node, &judge, AT_ONCE).into_iter().for_each(Flow::assert_each_once);
}

/// A session, and small windows for connections inside.
fn connected(host: u8) -> (Node, Judge) {
    let (node, judge) = ends(host);
    for namespace in [&node.namespace, &judge.namespace] {
        namespace.sh(SMALL_WINDOW);
    }
    judge.peer_with(&node, "");
    node.change(&set_peer(judge.public, Some("192.0.2.2:51820"), &INNER));
    node.reaches(judge.inner()[0]);
    (node, judge)
}

/// Megabytes go both ways while `work` is done.
fn transfers_while(node: &Node, judge: &Judge, work: impl FnOnce() + Send) {
    thread::scope(|scope| {
        let work = scope.spawn(work);
        while !work.is_finished() {
            thread::scope(|both| {
                both.spawn(|| transfer(&node.namespace, &judge.namespace, judge.inner()[0], 2));
                both.spawn(|| transfer(&judge.namespace, &node.namespace, node.inner()[1], 2));
            });
        }
        work.join().unwrap();
    });
}

/// Waits for the session that `begin` leads to, and about 100 ms in all.
fn renew(node: &Node, judge: &Judge, begin: impl FnOnce()) {
    let last = node.peer(&judge.public).last_handshake;
    begin();
    until("there is a new session", || node.peer(&judge.public).last_handshake != last);
    thread::sleep(Duration::from_millis(50));
}

#[test]
fn only_authenticated_messages_move_a_peer_behind_a_nat() {
    let (node, judge) = ends(2);
    judge.namespace.sh("ip addr add 192.0.2.22/24 dev veth0; ip addr add 192.0.2.66/24 dev veth0");
    let capture = Capture::start(&judge.namespace);
    rebind(&judge.namespace, "192.0.2.2:40001");
    node.change(&set_peer(judge.public, None, &INNER));
    judge.peer_with(&node, "endpoint 192.0.2.1:51820");
    let endpoint = || shown(&node.namespace, "endpoints");
    let flows = both_ways(&node, &judge, STEADY);
    let is_followed = |external: &str| {
        until("the node follows", || endpoint() == external);
        flows.iter().for_each(Flow::goes_on);
    };
    is_followed("192.0.2.2:40001");
    for external in ["192.0.2.2:40002", "192.0.2.22:40003"] {
        rebind(&judge.namespace, external);
        is_followed(external);
    }
    // After the last answer wireguard-go sends nothing that would move the node back.
    drop(flows);
    node.reaches(judge.inner()[0]);

    let attacker = judge.namespace.run(|| UdpSocket::bind("192.0.2.66:0")).unwrap();
    attacker.set_nonblocking(true).unwrap();
    let messages = capture.messages(Ipv4Addr::new(192, 0, 2, 1));
    for kind in [INITIATION, DATA] {
        assert!(messages.iter().any(|message| message[0] == kind), "no message of type {kind} was captured");
    }
    for message in messages.iter().flat_map(|message| forged(message)) {
        attacker.send_to(&message, ("192.0.2.1", PORT)).unwrap();
    }
    attacker.send_to(b"no message of WireGuard", ("192.0.2.1", PORT)).unwrap();
    until("all is received", || node.device().path_socket_stats().dropped_without_reader == 1);
    assert_eq!(endpoint(), "192.0.2.22:40003");
    node.reaches(judge.inner()[0]);
    assert_eq!(attacker.recv(&mut [0; 2_048]).unwrap_err().kind(), ErrorKind::WouldBlock);
}

/// From now on datagrams of WireGuard leave with this source. What comes to an external port without a mapping is dropped, before it makes
/// a connection of its own that takes the port from the next mapping.
fn rebind(namespace: &Namespace, external: &str) {
    namespace.sh(&format!(
        "nft 'table ip rebinding
             delete table ip rebinding
             table ip rebinding {{
                 chain out {{ type nat hook postrouting priority srcnat;
                     udp sport {PORT} snat to {external}
                 }}
                 chain in {{ type filter hook input priority filter;
                     udp dport 40001-40003 drop
                 }}
             }}'
         conntrack -F 2>/dev/null"
    ));
}

/// A message as it was sent before, and two that no key authenticates: with another last byte, and, of data, with another counter.
fn forged(message: &[u8]) -> [Vec<u8>; 3] {
    let (mut damaged, mut other) = (message.to_vec(), message.to_vec());
    damaged[message.len() - 1] ^= 1;
    other[10] ^= 1;
    [message.to_vec(), damaged, other]
}

/// A socket that gets each frame of a namespace.
struct Capture(Socket);

impl Capture {
    fn start(namespace: &Namespace) -> Self {
        let protocol = Some(Protocol::from(i32::from(ALL_FRAMES.to_be())));
        let socket = namespace.run(|| Socket::new(Domain::PACKET, Type::DGRAM, protocol)).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self(socket)
    }

    /// The messages to this address since the start, or as many as the socket's buffer holds.
    fn messages(&self, to: Ipv4Addr) -> Vec<Vec<u8>> {
        let mut messages = Vec::new();
        let mut buffer = [0; 65_536];
        while let Ok(length) = (&self.0).read(&mut buffer) {
            let packet = &buffer[..length];
            // IPv4 without options, UDP, and where they go.
            let is_wanted = length > 28
                && (packet[0], packet[9]) == (0x45, 17)
                && packet[16..20] == to.octets()
                && packet[22..24] == PORT.to_be_bytes();
            if is_wanted {
                messages.push(packet[28..].to_vec());
            }
        }
        messages
    }
}

#[test]
fn wireguard_go_follows_a_node_that_changes_its_port_and_its_address() {
    let (node, judge) = connected(1);
    let session = node.peer(&judge.public).last_handshake;
    let flows = both_ways(&node, &judge, STEADY);
    let is_followed = |endpoint: &str| {
        until("wireguard-go follows", || shown(&judge.namespace, "endpoints") == endpoint);
        flows.iter().for_each(Flow::goes_on);
    };
    is_followed("192.0.2.1:51820");
    node.change(&DeviceChange { listen_port: Some(PORT + 1), ..DeviceChange::default() });
    is_followed("192.0.2.1:51821");
    node.namespace.sh("ip addr del 192.0.2.1/24 dev veth0; ip addr add 192.0.2.11/24 dev veth0");
    is_followed("192.0.2.11:51821");
    assert_eq!(node.peer(&judge.public).last_handshake, session, "one session all along");
}

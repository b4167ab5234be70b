//! Datagrams on the WireGuard port that are no WireGuard messages, in namespaces.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use crate::common::handover::{Pings, assert_lossless};
use crate::common::{Node, PORT, TIMEOUT, pair, until};
use fairlead_keys::DeviceChange;
use fairlead_tunnel::{PathDatagram, PathSocket};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

fn open(node: &Node) -> PathSocket {
    node.device().open_path_socket().unwrap().unwrap()
}

fn receive(socket: &PathSocket) -> PathDatagram {
    let timeout = PollTimeout::try_from(TIMEOUT).unwrap();
    let found = poll(&mut [PollFd::new(socket.as_fd(), PollFlags::POLLIN)], timeout).unwrap();
    assert_eq!(found, 1, "no datagram arrived");
    socket.try_receive().unwrap()
}

/// A program on the node that is no WireGuard device.
fn stranger(node: &Node, address: &str) -> UdpSocket {
    let socket = node.namespace.run(|| UdpSocket::bind((address, 0))).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket
}

#[test]
fn a_datagram_to_the_port_arrives_and_its_answer_leaves_from_the_same_port() {
    let (a, b) = pair();
    let socket = open(&a);
    for (ours, theirs) in [("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::2")] {
        let stranger = stranger(&b, theirs);
        stranger.send_to(b"a question", (ours, PORT)).unwrap();
        let question = receive(&socket);
        assert_eq!(
            (question.remote, question.payload.as_slice()),
            (stranger.local_addr().unwrap(), &b"a question"[..])
        );
        assert_eq!(question.local, Some(ours.parse().unwrap()));
        for local in [question.local, None] {
            socket.send(local, question.remote, b"an answer").unwrap();
            let mut answer = [0; 64];
            let (length, from) = stranger.recv_from(&mut answer).unwrap();
            assert_eq!(&answer[..length], b"an answer");
            assert_eq!(from, SocketAddr::new(ours.parse().unwrap(), PORT));
        }
    }
    assert_eq!(socket.stats().queued, 2);
    assert!(a.pings(b.inner()[0]), "WireGuard works beside it");
}

#[test]
fn packets_for_a_peer_go_another_way_as_well_until_that_is_ended() {
    let (a, b) = pair();
    assert!(a.pings(b.inner()[0]));
    let (socket, other) = (open(&a), stranger(&b, "192.0.2.2"));
    let key = *a.device().state().unwrap().peers.keys().next().unwrap();
    socket.send_both_ways(&key, Some(other.local_addr().unwrap()));
    assert!(a.pings(b.inner()[0]));
    let mut copy = [0; 2000];
    let (length, from) = other.recv_from(&mut copy).unwrap();
    assert_eq!((copy[0], from), (4, SocketAddr::new("192.0.2.1".parse().unwrap(), PORT)), "{length} bytes");
    let sent = socket.stats().sent_both_ways;
    assert!(sent > 0);
    drop(socket);
    assert!(a.pings(b.inner()[0]));
    let socket = open(&a);
    assert!(a.pings(b.inner()[0]));
    assert_eq!(socket.stats().sent_both_ways, sent, "closing the socket ends it");
}

#[test]
fn answers_carry_the_mark_and_follow_the_port() {
    let (a, b) = pair();
    let (socket, stranger) = (open(&a), stranger(&b, "192.0.2.2"));
    let remote = stranger.local_addr().unwrap();
    // Only what is marked 0x20 finds the other end.
    a.namespace.sh(
        "ip rule add fwmark 0x20/0x60 lookup 77 priority 10; ip route add 192.0.2.2 dev veth0 table 77; \
         ip route add unreachable 192.0.2.2",
    );
    socket.send(None, remote, b"unmarked").unwrap_err();
    a.change(&DeviceChange { fwmark: Some(0x20), listen_port: Some(PORT + 1), ..DeviceChange::default() });
    socket.send(None, remote, b"marked").unwrap();
    let mut bytes = [0; 64];
    let (length, from) = stranger.recv_from(&mut bytes).unwrap();
    assert_eq!((&bytes[..length], from.port()), (&b"marked"[..], PORT + 1));
    stranger.send_to(b"again", ("192.0.2.1", PORT + 1)).unwrap();
    assert_eq!(receive(&socket).payload, b"again");
}

#[test]
fn a_flood_is_bounded_and_counted_and_loses_no_packet_of_the_tunnel() {
    const FLOOD: u64 = 20_000;
    let (a, b) = pair();
    let stranger = stranger(&b, "192.0.2.2");
    let pings = Pings::start(&a.namespace, b.inner()[0]);
    let stats = || a.device().path_socket_stats();
    let flood = |counted: &dyn Fn() -> u64| {
        for number in 1..=FLOOD {
            // Type 0 to 4, with the length of none of them.
            let junk = [(number % 5) as u8; 100];
            stranger.send_to(&junk, ("192.0.2.1", PORT)).unwrap();
            // The socket's buffer holds some thousand.
            if number % 1_000 == 0 {
                until("the datagrams are counted", || counted() == number);
            }
        }
    };
    flood(&|| stats().dropped_without_reader);
    let socket = open(&a);
    flood(&|| stats().queued + stats().dropped_queue_full);
    let received = std::iter::from_fn(|| socket.try_receive()).count() as u64;
    assert_eq!(received, stats().queued);
    assert!(received < FLOOD / 10, "{received} datagrams waited");
    assert_lossless(pings.finish());
}

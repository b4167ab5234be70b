//! One process hands its device over to the next: what happens to the traffic of pods when the node program is upgraded.

use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::common::handover::{Handover, Pings, assert_lossless};
use crate::common::{NAME, Node, PORT, TIMEOUT, cable, keys, namespace, pair, set_peer, until};
use fairlead_keys::DeviceChange;
use fairlead_tunnel::{Device, Settings};

#[test]
fn no_packet_is_lost_when_either_end_is_handed_over() {
    let (mut a, mut b) = pair();
    let pings = [Pings::start(&a.namespace, b.inner()[0]), Pings::start(&b.namespace, a.inner()[0])];
    for _ in 0..3 {
        let handover = Handover::new();
        handover.complete(&mut a, b.public, Some("192.0.2.2:51820"), &b.inner_prefixes());
        handover.complete(&mut b, a.public, None, &a.inner_prefixes());
        assert!(!handover.path.exists(), "the socket is left behind");
    }
    pings.into_iter().map(Pings::finish).for_each(assert_lossless);
}

/// The first waits for a third peer, which has gone, and until then encrypts with the sessions of the second one's old process.
#[test]
fn no_packet_is_lost_when_both_ends_are_handed_over_at_once() {
    let (mut a, mut b) = pair();
    let c = namespace();
    a.namespace.veth("veth1", &c, "veth0");
    a.namespace.sh("ip addr add 198.51.100.1/24 dev veth1");
    c.sh("ip addr add 198.51.100.3/24 dev veth0");
    let c = Node::start(c, 3);
    c.peer_with(&a, None);
    a.peer_with(&c, Some("198.51.100.3:51820"));
    a.reaches(c.inner()[0]);
    let pings = [Pings::start(&a.namespace, b.inner()[0]), Pings::start(&b.namespace, a.inner()[0])];
    let mut peers = set_peer(b.public, Some("192.0.2.2:51820"), &b.inner_prefixes());
    peers.set_peers.extend(set_peer(c.public, Some("198.51.100.3:51820"), &c.inner_prefixes()).set_peers);
    drop(c);
    let handover = Handover::new();
    let pending = handover.start(&mut a);
    let waiting = thread::spawn(move || pending.wait(TIMEOUT));
    a.device = Some(handover.new_device(&a).unwrap());
    a.change(&DeviceChange { private_key: Some(a.private.clone()), listen_port: Some(PORT), ..peers });
    Handover::new().complete(&mut b, a.public, None, &a.inner_prefixes());
    assert!(waiting.join().unwrap());
    pings.into_iter().map(Pings::finish).for_each(assert_lossless);
}

/// As behind a NAT that has a mapping for this socket only, which a birthday attempt found.
#[test]
fn the_socket_that_is_kept_for_a_peer_is_handed_over_with_the_device() {
    let (mut a, b) = pair();
    let remote: SocketAddr = "192.0.2.2:51820".parse().unwrap();
    let mut path_socket = a.device().open_path_socket().unwrap().unwrap();
    a.namespace.run(|| path_socket.open_sockets(2)).unwrap();
    path_socket.keep_socket(1, remote).unwrap();
    a.namespace.sh("nft add table inet nat
         nft 'add chain inet nat out { type filter hook output priority 0; }'
         nft 'add chain inet nat in { type filter hook input priority 0; }'
         nft add rule inet nat out udp sport 51820 drop
         nft add rule inet nat in udp dport 51820 drop");
    a.reaches(b.inner()[0]);
    let pings = [Pings::start(&a.namespace, b.inner()[0]), Pings::start(&b.namespace, a.inner()[0])];
    for _ in 0..2 {
        drop(path_socket);
        thread::sleep(Duration::from_millis(500));
        Handover::new().complete(&mut a, b.public, Some("192.0.2.2:51820"), &b.inner_prefixes());
        path_socket = a.device().open_path_socket().unwrap().unwrap();
        assert_eq!(path_socket.kept_endpoints(), [remote]);
    }
    pings.into_iter().map(Pings::finish).for_each(assert_lossless);
    path_socket.leave_socket(remote);
    assert_eq!(path_socket.kept_endpoints(), []);
}

/// The endpoint of a peer behind a NAT is known to the device alone.
#[test]
fn the_new_device_knows_the_endpoint_of_a_peer_that_has_none_configured() {
    let (a, mut b) = pair();
    Handover::new().complete(&mut b, a.public, None, &a.inner_prefixes());
    assert!(b.pings(a.inner()[0]), "the first ping finds its way");
    assert_eq!(b.peer(&a.public).config.endpoint, Some("192.0.2.1:51820".parse().unwrap()));
}

#[test]
fn a_working_endpoint_is_kept_although_another_is_configured() {
    let (mut a, b) = pair();
    Handover::new().complete(&mut a, b.public, Some("192.0.2.77:51820"), &b.inner_prefixes());
    assert!(a.pings(b.inner()[0]));
    assert_eq!(a.peer(&b.public).config.endpoint, Some("192.0.2.2:51820".parse().unwrap()));
}

#[test]
fn a_peer_added_after_the_hand_over_uses_its_configured_endpoint() {
    let (mut a, b) = pair();
    let handover = Handover::new();
    let pending = handover.start(&mut a);
    let waiting = thread::spawn(move || pending.wait(TIMEOUT));
    a.device = Some(handover.new_device(&a).unwrap());
    a.change(&DeviceChange {
        private_key: Some(a.private.clone()),
        listen_port: Some(PORT),
        ..DeviceChange::default()
    });
    assert!(waiting.join().unwrap());
    a.peer_with(&b, Some("192.0.2.77:51820"));
    assert_eq!(a.peer(&b.public).config.endpoint, Some("192.0.2.77:51820".parse().unwrap()));
}

#[test]
fn a_new_process_that_ends_before_the_hand_over_finished_leaves_the_old_one_working() {
    let (mut a, b) = pair();
    let handover = Handover::new();
    let pending = handover.start(&mut a);
    let pings = [Pings::start(&a.namespace, b.inner()[0]), Pings::start(&b.namespace, a.inner()[0])];
    let new = a.namespace.run(|| handover.new_device(&a)).unwrap();
    // The new process reads the sockets. With a key that the peer does not know it never gets a session, so that the
    // old process still has the TUN and gets the datagrams of its session forwarded.
    new.change(&DeviceChange {
        private_key: Some(keys().0),
        listen_port: Some(PORT),
        ..set_peer(b.public, Some("192.0.2.2:51820"), &b.inner_prefixes())
    })
    .unwrap();
    // Longer than an answer may take: packets that wait in the queue of an unread TUN show.
    thread::sleep(Duration::from_millis(2_500));
    assert_eq!(new.state().unwrap().peers[&b.public].last_handshake, None);
    drop(new);
    thread::sleep(Duration::from_millis(700));
    pings.into_iter().map(Pings::finish).for_each(assert_lossless);
    assert!(!pending.wait(Duration::from_millis(1)), "no process took over");

    // Without a hand-over the next process starts as after any restart.
    a.restart();
    a.peer_with(&b, Some("192.0.2.2:51820"));
    a.reaches(b.inner()[0]);
}

#[test]
fn an_old_process_that_ends_before_the_hand_over_finished_leaves_everything_to_the_new_one() {
    let (mut a, b) = pair();
    let handover = Handover::new();
    let pending = handover.start(&mut a);
    let new = handover.new_device(&a).unwrap();
    drop(pending);
    a.device = Some(new);
    a.change(&DeviceChange {
        private_key: Some(a.private.clone()),
        listen_port: Some(PORT),
        ..set_peer(b.public, Some("192.0.2.2:51820"), &b.inner_prefixes())
    });
    a.reaches(b.inner()[0]);
}

/// As the node program does with a port that only this node has.
#[test]
fn no_packet_is_lost_when_the_port_is_set_before_all_else_and_another_was_refused() {
    let (mut a, b) = pair();
    let taken = a.namespace.run(|| UdpSocket::bind(("0.0.0.0", PORT + 1))).unwrap();
    let handover = Handover::new();
    let pending = handover.start(&mut a);
    let pings = [Pings::start(&a.namespace, b.inner()[0]), Pings::start(&b.namespace, a.inner()[0])];
    let waiting = thread::spawn(move || pending.wait(TIMEOUT));
    let new = a.namespace.run(|| handover.new_device(&a)).unwrap();
    let only = |port| DeviceChange { listen_port: Some(port), ..DeviceChange::default() };
    new.change(&only(PORT + 1)).unwrap_err();
    new.change(&only(PORT)).unwrap();
    // The device knows no peer, and must not take that for all it needs.
    thread::sleep(Duration::from_millis(500));
    new.change(&DeviceChange {
        private_key: Some(a.private.clone()),
        ..set_peer(b.public, Some("192.0.2.2:51820"), &b.inner_prefixes())
    })
    .unwrap();
    assert!(waiting.join().unwrap());
    pings.into_iter().map(Pings::finish).for_each(assert_lossless);
    drop((new, taken));
}

#[test]
fn with_another_port_the_new_device_starts_with_new_sessions() {
    let (mut a, b) = pair();
    let handover = Handover::new();
    let pending = handover.start(&mut a);
    let waiting = thread::spawn(move || pending.wait(TIMEOUT));
    a.device = Some(handover.new_device(&a).unwrap());
    a.change(&DeviceChange {
        private_key: Some(a.private.clone()),
        listen_port: Some(PORT + 1),
        ..set_peer(b.public, Some("192.0.2.2:51820"), &b.inner_prefixes())
    });
    assert!(waiting.join().unwrap());
    a.reaches(b.inner()[0]);
    until("the peer follows", || b.peer(&a.public).config.endpoint.unwrap().port() == PORT + 1);
}

#[test]
fn without_an_old_process_a_device_starts_as_usual() {
    let (namespace, _other) = cable();
    let path = Path::new("/nonexistent/handover.sock");
    let settings = Settings { handover_socket: Some(path.to_owned()), ..Settings::new(NAME, 1420) };
    namespace.run(|| Device::start(settings)).unwrap();
}

#[test]
fn a_hand_over_socket_that_cannot_be_opened_is_named() {
    let (namespace, _other) = cable();
    let device = namespace.run(|| Device::start(Settings::new(NAME, 1420))).unwrap();
    let error = device.hand_over("/nonexistent/handover.sock".into()).err().unwrap().to_string();
    assert!(error.contains("/nonexistent/handover.sock"), "{error}");
}

//! The path socket on this machine's kernel. In place of the kernel's WireGuard an ordinary socket holds the port: only what
//! is no probe and no STUN response may reach it. The VM ring has the real one.

use std::net::UdpSocket;

use fairlead_netlink::changes_sent;
use fairlead_wire::{probe, stun};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use testbed_netns::Namespace;

use super::*;

const WIREGUARD: u16 = 51820;
const OWN: [&str; 2] = ["192.0.2.1", "2001:db8::1"];
const OTHER: [&str; 2] = ["192.0.2.2", "2001:db8::2"];
/// Only bounds a test that fails.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A node, and a host on its network. Their kernels count what leaves and arrives.
struct Bed {
    node: Namespace,
    port: Arc<PathPort>,
    socket: KernelPathSocket,
    /// Both families.
    wireguard: UdpPort,
    host: Namespace,
    peer: UdpPort,
}

impl Bed {
    fn new() -> Self {
        let (node, host) = (Namespace::new(), Namespace::new());
        node.veth("eth0", &host, "eth0");
        for (namespace, addresses) in [(&node, OWN), (&host, OTHER)] {
            let [v4, v6] = addresses;
            namespace.sh(&format!("ip addr add {v4}/24 dev eth0; ip addr add {v6}/64 dev eth0 nodad"));
        }
        // With connections tracked, as on a node of Kubernetes.
        node.sh(
            "nft 'add table inet judge; add chain inet judge in { type filter hook input priority 0; }; \
             add rule inet judge in ct state invalid counter'",
        );
        host.sh(
            "nft 'add table inet judge; add chain inet judge in { type filter hook prerouting priority -300; }; \
             add rule inet judge in udp sport != 51820 counter'",
        );
        let wireguard = node.run(|| UdpPort::open(WIREGUARD, MARK_FROM_WIREGUARD)).unwrap();
        let port = Arc::new(node.run(PathPort::new).unwrap());
        let socket = port.open(WIREGUARD).unwrap();
        let peer = host.run(|| UdpPort::open(0, 0)).unwrap();
        Self { node, port, socket, wireguard, host, peer }
    }

    fn probe(&self, text: &str) -> Vec<u8> {
        [&probe::MAGIC[..], text.as_bytes()].concat()
    }

    fn to_wireguard(&self, family: usize) -> SocketAddr {
        SocketAddr::new(OWN[family].parse().unwrap(), WIREGUARD)
    }

    fn to_peer(&self, family: usize) -> SocketAddr {
        SocketAddr::new(OTHER[family].parse().unwrap(), self.peer.port())
    }

    /// The host has received nothing from any other port than WireGuard's, and the node's kernel found nothing amiss.
    fn judge(&self) {
        for namespace in [&self.node, &self.host] {
            let table = namespace.sh("nft list table inet judge 2>/dev/null || true");
            assert!(!table.contains("counter") || table.contains("counter packets 0 "), "{table}");
        }
        let wrong = self.node.sh("awk '/InCsumErrors/ && $2 > 0' /proc/net/snmp6");
        assert_eq!(wrong, "", "wrong checksums");
    }
}

fn next(mut receive: impl FnMut() -> Option<PathDatagram>) -> PathDatagram {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match receive() {
            Some(datagram) => return datagram,
            None => assert!(Instant::now() < deadline, "nothing is received"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

const WORKS: PathSocketHealth =
    PathSocketHealth { access: PortAccess::Nftables, families: Vec::new(), failures: Vec::new() };
/// A firewall behind the table that knows WireGuard's port alone.
const LATE_FIREWALL: &str = "nft 'add table inet late; add chain inet late in { type filter hook input priority 300; }; \
     add rule inet late in udp dport != 51820 drop'";

fn works() -> PathSocketHealth {
    PathSocketHealth { families: IpFamily::BOTH.to_vec(), ..WORKS }
}

#[test]
fn probes_and_stun_responses_pass_by_the_wireguard_port() {
    let bed = Bed::new();
    assert_eq!(bed.socket.maintain(), works());
    assert!(bed.port.open(WIREGUARD).is_none(), "one at a time");
    let stun = [&[1, 1, 0, 0], &stun::MAGIC_COOKIE[..], &[7; 12]].concat();
    for family in 0..2 {
        let peer = bed.to_peer(family);
        bed.socket.send(None, peer, b"whatever it is").unwrap();
        let sent = next(|| bed.peer.try_receive());
        assert_eq!((sent.remote, &sent.payload[..]), (bed.to_wireguard(family), &b"whatever it is"[..]));
        for datagram in [bed.probe("a request"), stun.clone()] {
            // With and without a checksum that the card computes.
            bed.peer.send(None, sent.remote, &datagram).unwrap();
            bed.peer.send_with_checksum(sent.remote, &datagram).unwrap();
            for _ in 0..2 {
                let received = next(|| bed.socket.try_receive());
                assert_eq!((received.remote, &received.payload), (peer, &datagram));
                assert_eq!(received.local, Some(sent.remote.ip()));
            }
        }
    }
    assert_eq!(bed.socket.stats().queued, 8);
    assert!(bed.wireguard.try_receive().is_none());
    bed.judge();
}

#[test]
fn wireguard_s_messages_stay_with_it_and_nothing_else_reaches_the_path_socket() {
    let bed = Bed::new();
    for family in 0..2 {
        let to = bed.to_wireguard(family);
        // A data packet whose receiver index is STUN's magic cookie.
        let data = [&[4, 0, 0, 0][..], &stun::MAGIC_COOKIE, &[0; 24]].concat();
        for datagram in [&data[..], b"\x01\0\0\0 an initiation", b"something else", b""] {
            bed.peer.send_with_checksum(to, datagram).unwrap();
            assert_eq!(next(|| bed.wireguard.try_receive()).payload, datagram);
        }
        let own = SocketAddr::new(to.ip(), bed.port.socket.port());
        bed.peer.send(None, own, &bed.probe("past the WireGuard port")).unwrap();
        bed.peer.send(None, to, &bed.probe("by the WireGuard port")).unwrap();
        assert_eq!(next(|| bed.socket.try_receive()).payload, bed.probe("by the WireGuard port"));
    }
    assert!(bed.socket.try_receive().is_none());
    bed.judge();
}

#[test]
fn a_datagram_without_a_checksum_is_received() {
    let bed = Bed::new();
    bed.host.sh("nft 'add table ip none; add chain ip none out { type filter hook output priority 0; }; \
         add rule ip none out udp dport 51820 udp checksum set 0'");
    bed.peer.send_with_checksum(bed.to_wireguard(0), &bed.probe("unchecked")).unwrap();
    assert_eq!(next(|| bed.socket.try_receive()).payload, bed.probe("unchecked"));
}

#[test]
fn connection_tracking_sees_one_connection_at_the_wireguard_port() {
    let bed = Bed::new();
    bed.node.sh("conntrack -F 2>/dev/null");
    bed.socket.send(None, bed.to_peer(0), b"a request").unwrap();
    let request = next(|| bed.peer.try_receive());
    bed.peer.send(None, request.remote, &bed.probe("its answer")).unwrap();
    next(|| bed.socket.try_receive());
    let connections = bed.node.sh("conntrack -L -p udp 2>/dev/null");
    let ours: Vec<&str> = connections.lines().filter(|line| line.contains(OTHER[0])).collect();
    assert!(
        matches!(ours[..], [one] if one.contains("sport=51820 ") && !one.contains("UNREPLIED")),
        "{connections}"
    );
}

#[test]
fn what_other_programs_flush_is_mended() {
    let bed = Bed::new();
    bed.node.sh("nft flush ruleset");
    for family in 0..2 {
        bed.socket.send(None, bed.to_peer(family), b"after the flush").unwrap();
        assert_eq!(
            next(|| bed.peer.try_receive()).remote,
            bed.to_wireguard(family),
            "it left from another port"
        );
        bed.node.sh("nft flush ruleset");
    }
    for damage in ["nft flush ruleset", "nft flush table inet fairlead_path_socket"] {
        bed.node.sh(damage);
        assert_eq!(bed.socket.maintain(), works());
        bed.peer.send(None, bed.to_wireguard(1), &bed.probe("after it was mended")).unwrap();
        next(|| bed.socket.try_receive());
    }
    let sent = changes_sent();
    assert_eq!((bed.socket.maintain(), changes_sent()), (works(), sent));
    bed.judge();
}

#[test]
fn the_next_process_finds_everything_in_place() {
    let Bed { node, port, socket, .. } = Bed::new();
    let number = port.socket.port();
    drop((port, socket));
    let table = node.sh("nft list table inet fairlead_path_socket");
    let sent = changes_sent();
    let port = Arc::new(node.run(PathPort::new).unwrap());
    let socket = port.open(WIREGUARD).unwrap();
    assert_eq!((port.socket.port(), socket.maintain()), (number, works()));
    assert_eq!((changes_sent(), node.sh("nft list table inet fairlead_path_socket")), (sent, table));
    drop((port, socket));

    let taken = node.run(|| UdpSocket::bind(("0.0.0.0", number))).unwrap();
    let port = Arc::new(node.run(PathPort::new).unwrap());
    assert_ne!(port.socket.port(), number);
    assert_eq!(port.open(WIREGUARD).unwrap().maintain(), works());
    drop(taken);
    port.remove().unwrap();
    assert_eq!(node.sh("nft list tables | grep fairlead || true"), "");
}

#[test]
fn a_reader_takes_nothing_from_a_test() {
    let bed = Bed::new();
    let (socket, port) = (&bed.socket, &bed.port);
    let has_ended = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                assert_eq!(socket.try_receive(), None);
            }
        });
        for number in (1..=20).rev() {
            port.set_wireguard_port(WIREGUARD - number);
            assert_eq!(socket.maintain(), works());
        }
        has_ended.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
}

#[test]
fn a_family_that_does_not_work_is_named_and_the_other_one_used() {
    let bed = Bed::new();
    bed.node.sh("nft 'insert rule inet judge in iifname lo meta nfproto ipv6 meta l4proto udp drop'");
    bed.node.run(|| {
        bed.port.set_wireguard_port(WIREGUARD - 1);
        bed.port.set_wireguard_port(WIREGUARD);
    });
    // Raw sockets do not work either.
    let PathSocketHealth { access, families, failures } = bed.socket.maintain();
    assert_eq!((access, &families[..]), (PortAccess::Nftables, &[IpFamily::V4][..]));
    let [PathSocketFailure { family: IpFamily::V6, reason }] = &failures[..] else { panic!("{failures:?}") };
    assert!(reason.contains("[::1]:51820") && reason.contains("firewall"), "{reason}");
    bed.socket.send(None, bed.to_peer(0), b"IPv4").unwrap();
    next(|| bed.peer.try_receive());
    let error = bed.socket.send(None, bed.to_peer(1), b"IPv6").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Unsupported);
}

#[test]
fn a_host_without_ipv6_addresses_has_no_problem() {
    let bed = Bed::new();
    bed.node.sh("sysctl -qw net.ipv6.conf.all.disable_ipv6=1");
    bed.port.set_wireguard_port(WIREGUARD - 1);
    bed.port.set_wireguard_port(WIREGUARD);
    assert_eq!(bed.socket.maintain(), PathSocketHealth { families: vec![IpFamily::V4], ..WORKS });
}

#[test]
fn sending_needs_a_port() {
    let namespace = Namespace::new();
    let port = Arc::new(namespace.run(PathPort::new).unwrap());
    let socket = port.open(0).unwrap();
    let error = socket.send(None, "192.0.2.9:7".parse().unwrap(), b"x").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotConnected);
    assert_eq!(socket.maintain(), WORKS);
    assert_eq!(namespace.sh("nft list tables"), "", "nothing is joined yet");
}

/// Has the table been found to be of no use, in both families.
fn uses_raw_sockets(bed: &Bed) {
    let works = PathSocketHealth { access: PortAccess::RawSocket, ..works() };
    assert_eq!(bed.node.run(|| bed.socket.maintain()), works);
    assert_eq!(bed.node.sh("nft list tables | grep fairlead || true"), "");
}

fn datagrams_pass(bed: &Bed) {
    let stun = [&[1, 1, 0, 0], &stun::MAGIC_COOKIE[..], &[7; 12]].concat();
    for family in 0..2 {
        let (peer, to) = (bed.to_peer(family), bed.to_wireguard(family));
        for payload in [&b"whatever"[..], &[0xff; 1400]] {
            bed.socket.send(None, peer, payload).unwrap();
            let sent = next(|| bed.peer.try_receive());
            assert_eq!((sent.remote, &sent.payload[..]), (to, payload));
        }
        bed.socket.send(Some(to.ip()), peer, b"from an address").unwrap();
        assert_eq!(next(|| bed.peer.try_receive()).remote, to);
        let data = [&[4, 0, 0, 0][..], &stun::MAGIC_COOKIE, &[0; 24]].concat();
        bed.peer.send(None, to, &data).unwrap();
        // WireGuard receives all that raw sockets do, and drops it.
        next(|| bed.wireguard.try_receive().filter(|datagram| datagram.payload == data));
        let request = [&[0, 1, 0, 0], &stun::MAGIC_COOKIE[..], &[7; 12]].concat();
        for datagram in [bed.probe("a request"), request, stun.clone()] {
            bed.peer.send(None, to, &datagram).unwrap();
        }
        for datagram in [bed.probe("a request"), stun.clone()] {
            let received = next(|| bed.socket.try_receive());
            assert_eq!((received.remote, received.local), (peer, Some(to.ip())));
            assert_eq!(received.payload, datagram);
        }
        assert_eq!(bed.socket.try_receive(), None);
    }
}

#[test]
fn raw_sockets_are_used_where_a_firewall_knows_the_wireguard_port_alone() {
    let bed = Bed::new();
    bed.node.sh(LATE_FIREWALL);
    bed.node.run(|| {
        bed.port.set_wireguard_port(WIREGUARD - 1);
        bed.port.set_wireguard_port(WIREGUARD);
    });
    uses_raw_sockets(&bed);
    datagrams_pass(&bed);
    bed.node.sh("nft flush ruleset");
    datagrams_pass(&bed);
    uses_raw_sockets(&bed);
    bed.judge();
}

#[test]
fn raw_sockets_are_used_where_the_table_cannot_be_made() {
    let bed = Bed::new();
    bed.node.sh("nft delete table inet fairlead_path_socket");
    // Only the program that made it may change a table with an owner.
    let owner = bed.node.run(|| {
        let mut nft = std::process::Command::new("nft");
        nft.arg("-i").stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::null()).spawn()
    });
    let mut owner = owner.unwrap();
    let table = b"add table inet fairlead_path_socket { flags owner; }\n";
    std::io::Write::write_all(owner.stdin.as_mut().unwrap(), table).unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while !bed.node.sh("nft list tables").contains("fairlead") {
        assert!(Instant::now() < deadline, "nft made no table");
    }
    let health = bed.node.run(|| bed.socket.maintain());
    assert_eq!(health, PathSocketHealth { access: PortAccess::RawSocket, ..works() });
    datagrams_pass(&bed);
    owner.kill().unwrap();
    owner.wait().unwrap();
    bed.judge();
}

#[test]
fn the_descriptor_is_readable_while_datagrams_wait_at_raw_sockets() {
    let bed = Bed::new();
    bed.node.sh(LATE_FIREWALL);
    let waits = |timeout: u16| {
        poll(&mut [PollFd::new(bed.socket.as_fd(), PollFlags::POLLIN)], PollTimeout::from(timeout)).unwrap()
            == 1
    };
    bed.node.run(|| {
        bed.port.set_wireguard_port(WIREGUARD - 1);
        bed.port.set_wireguard_port(WIREGUARD);
    });
    uses_raw_sockets(&bed);
    assert!(!waits(0));
    bed.peer.send(None, bed.to_wireguard(1), &bed.probe("wakes")).unwrap();
    assert!(waits(10_000));
    next(|| bed.socket.try_receive());
    assert!(!waits(0));
}

/// Some time after the last test, and after other programs have changed nftables.
fn test_is_due(bed: &Bed) {
    let before = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
    bed.port.lock().retests.record(before, None, 0);
}

#[test]
fn raw_sockets_and_nftables_take_each_other_s_place_while_datagrams_pass() {
    let bed = Bed::new();
    for _ in 0..2 {
        bed.node.sh(LATE_FIREWALL);
        assert_eq!(bed.socket.maintain(), works(), "too soon after the last test");
        test_is_due(&bed);
        uses_raw_sockets(&bed);
        test_is_due(&bed);
        uses_raw_sockets(&bed);
        datagrams_pass(&bed);

        bed.node.sh("nft delete table inet late");
        uses_raw_sockets(&bed);
        // What waits at the raw sockets is not lost.
        bed.peer.send(None, bed.to_wireguard(0), &bed.probe("before")).unwrap();
        next(|| bed.wireguard.try_receive());
        test_is_due(&bed);
        assert_eq!(bed.node.run(|| bed.socket.maintain()), works());
        bed.peer.send(None, bed.to_wireguard(1), &bed.probe("after")).unwrap();
        for expected in ["before", "after"] {
            let mut descriptors = [PollFd::new(bed.socket.as_fd(), PollFlags::POLLIN)];
            assert_eq!(poll(&mut descriptors, PollTimeout::from(10_000_u16)).unwrap(), 1);
            assert_eq!(next(|| bed.socket.try_receive()).payload, bed.probe(expected));
        }
        let sent = changes_sent();
        assert_eq!((bed.socket.maintain(), changes_sent()), (works(), sent));
    }
    bed.judge();
}

mod pins;

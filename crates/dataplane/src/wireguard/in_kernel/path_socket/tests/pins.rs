//! A port of a birthday attempt is pinned to the endpoint of a peer.

use super::*;

/// The peer's endpoint, and the port that an attempt has pinned to it.
fn pinned(bed: &Bed) -> (SocketAddr, u16) {
    bed.node.run(|| bed.socket.open_sockets(16)).unwrap();
    let remote = bed.to_peer(0);
    bed.socket.send_from_socket(3, remote, &bed.probe("opens the mapping")).unwrap();
    let SocketAddr::V4(from) = next(|| bed.peer.try_receive()).remote else { panic!("not IPv4") };
    bed.peer.send(None, from.into(), &bed.probe("by the mapping")).unwrap();
    let answer = next(|| bed.socket.try_receive());
    assert_eq!((answer.socket, answer.payload), (Some(3), bed.probe("by the mapping")));
    bed.socket.keep_socket(3, remote).unwrap();
    // Probes have the number of the socket until the attempt ends.
    bed.peer.send(None, from.into(), &bed.probe("confirms")).unwrap();
    let answer = next(|| bed.socket.try_receive());
    assert_eq!((answer.socket, answer.payload), (Some(3), bed.probe("confirms")));
    bed.socket.send_from_socket(3, remote, b"confirmed").unwrap();
    assert_eq!(next(|| bed.peer.try_receive()).remote, from.into());
    bed.socket.close_sockets();
    assert_eq!(bed.socket.kept_endpoints(), [remote]);
    (remote, from.port())
}

/// Packets of WireGuard and probes, to and from the endpoint that is pinned; and to others.
fn pin_works(bed: &Bed, socket: &dyn PathSocket, (remote, port): (SocketAddr, u16)) {
    let own = SocketAddr::new(OWN[0].parse().unwrap(), port);
    bed.wireguard.send_with_checksum(remote, b"\x04 of WireGuard").unwrap();
    socket.send(None, remote, b"a probe").unwrap();
    for payload in [&b"\x04 of WireGuard"[..], b"a probe"] {
        let sent = next(|| bed.peer.try_receive());
        assert_eq!((sent.remote, &sent.payload[..]), (own, payload));
    }
    bed.peer.send(None, own, b"\x04 to WireGuard").unwrap();
    bed.peer.send_with_checksum(own, b"\x04 with a checksum").unwrap();
    for payload in [&b"\x04 to WireGuard"[..], b"\x04 with a checksum"] {
        // With raw sockets it receives probes too.
        let received = next(|| bed.wireguard.try_receive().filter(|it| it.payload.starts_with(b"\x04")));
        assert_eq!((received.remote, &received.payload[..]), (remote, payload));
    }
    bed.peer.send(None, own, &bed.probe("a request")).unwrap();
    let received = next(|| socket.try_receive());
    assert_eq!((received.socket, received.remote, received.payload), (None, remote, bed.probe("a request")));
    // IPv6 is not concerned.
    socket.send(None, bed.to_peer(1), b"by IPv6").unwrap();
    assert_eq!(next(|| bed.peer.try_receive()).remote, bed.to_wireguard(1));
    assert!(bed.node.run(|| UdpSocket::bind(("0.0.0.0", port))).is_err(), "another program could take it");
}

/// The node's kernel found nothing amiss, and tracks one connection with the peer, at the pinned port.
fn judge(bed: &Bed, port: u16) {
    let table = bed.node.sh("nft list table inet judge 2>/dev/null || true");
    assert!(!table.contains("counter") || table.contains("counter packets 0 "), "{table}");
    assert_eq!(bed.node.sh("awk '/InCsumErrors/ && $2 > 0' /proc/net/snmp6"), "", "wrong checksums");
    let connections = bed.node.sh("conntrack -L -p udp 2>/dev/null");
    let ours: Vec<&str> = connections.lines().filter(|line| line.contains(OTHER[0])).collect();
    let is_ours = |line: &&str| line.contains(&format!("sport={port} ")) && !line.contains("UNREPLIED");
    assert!(ours.len() == 1 && ours.iter().all(is_ours), "{connections}");
}

#[test]
fn wireguard_s_packets_and_probes_pass_by_the_pinned_port_until_it_is_left() {
    let bed = Bed::new();
    let pin = pinned(&bed);
    pin_works(&bed, &bed.socket, pin);
    judge(&bed, pin.1);
    let sent = changes_sent();
    assert_eq!((bed.socket.maintain(), changes_sent()), (works(), sent));
    for damage in ["nft flush ruleset", "nft flush map inet fairlead_path_socket pinned_ports"] {
        bed.node.sh(damage);
        assert_eq!(bed.socket.maintain(), works());
        pin_works(&bed, &bed.socket, pin);
    }
    let (remote, port) = pin;
    bed.socket.leave_socket(remote);
    bed.wireguard.send(None, remote, b"from its own port").unwrap();
    assert_eq!(next(|| bed.peer.try_receive()).remote, bed.to_wireguard(0));
    let table = bed.node.sh("nft list table inet fairlead_path_socket");
    assert!(!table.contains("pinned") && bed.socket.kept_endpoints().is_empty(), "{table}");
    bed.node.run(|| UdpSocket::bind(("0.0.0.0", port))).unwrap();
}

#[test]
fn a_datagram_without_a_checksum_reaches_wireguard_by_the_pinned_port() {
    let bed = Bed::new();
    let (_, port) = pinned(&bed);
    bed.host.sh(&format!(
        "nft 'add table ip none; add chain ip none out {{ type filter hook output priority 0; }}; \
         add rule ip none out udp dport {port} udp checksum set 0'"
    ));
    let own = SocketAddr::new(OWN[0].parse().unwrap(), port);
    bed.peer.send_with_checksum(own, b"\x04 unchecked").unwrap();
    assert_eq!(next(|| bed.wireguard.try_receive()).payload, b"\x04 unchecked");
}

#[test]
fn the_next_process_keeps_the_pin_if_its_port_is_free() {
    let mut bed = Bed::new();
    let pin = pinned(&bed);
    let table = bed.node.sh("nft list table inet fairlead_path_socket");
    let restart = |bed: Bed, between: &dyn Fn(&Namespace)| {
        let Bed { node, port, socket, wireguard, host, peer } = bed;
        drop((port, socket));
        between(&node);
        let port = Arc::new(node.run(PathPort::new).unwrap());
        let socket = port.open(WIREGUARD).unwrap();
        Bed { node, port, socket, wireguard, host, peer }
    };
    let sent = changes_sent();
    bed = restart(bed, &|_| {});
    assert_eq!((bed.socket.maintain(), bed.socket.kept_endpoints()), (works(), vec![pin.0]));
    assert_eq!((changes_sent(), bed.node.sh("nft list table inet fairlead_path_socket")), (sent, table));
    pin_works(&bed, &bed.socket, pin);
    judge(&bed, pin.1);

    let taken = std::cell::RefCell::new(None);
    bed = restart(bed, &|node| {
        taken.replace(Some(node.run(|| UdpSocket::bind(("0.0.0.0", pin.1))).unwrap()));
    });
    assert_eq!((bed.socket.maintain(), bed.socket.kept_endpoints()), (works(), vec![]));
    assert!(!bed.node.sh("nft list table inet fairlead_path_socket").contains("pinned"));
}

#[test]
fn a_pin_works_beside_raw_sockets_and_moves_with_the_wireguard_port() {
    let bed = Bed::new();
    let pin = pinned(&bed);
    bed.node.sh(LATE_FIREWALL);
    for _ in 0..2 {
        test_is_due(&bed);
        let raw = PathSocketHealth { access: PortAccess::RawSocket, ..works() };
        assert_eq!(bed.node.run(|| bed.socket.maintain()), raw);
        pin_works(&bed, &bed.socket, pin);
        bed.node.sh("nft delete table inet fairlead_path_socket");
    }
    bed.node.sh("nft delete table inet late");
    test_is_due(&bed);
    assert_eq!(bed.node.run(|| bed.socket.maintain()), works());
    pin_works(&bed, &bed.socket, pin);

    bed.port.set_wireguard_port(WIREGUARD - 1);
    let table = bed.node.sh("nft list table inet fairlead_path_socket");
    assert!(table.contains(&format!(". {} : {}", pin.1, WIREGUARD - 1)), "{table}");
    bed.port.remove().unwrap();
    assert_eq!(bed.socket.kept_endpoints(), vec![]);
    bed.node.run(|| UdpSocket::bind(("0.0.0.0", pin.1))).unwrap();
}

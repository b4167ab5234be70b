//! Devices in namespaces: what a node relies on.

use std::io::{Read, Write};
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use crate::common::{
    MTU, NAME, Node, PORT, TIMEOUT, cable, keys, namespace, pair, set_peer, start_again, transfer, until,
};
use fairlead_keys::{DeviceChange, PresharedKey, PrivateKey};
use fairlead_tunnel::{Device, Error, Settings};

#[test]
fn both_inner_families_cross_both_outer_families() {
    for endpoint in ["192.0.2.2:51820", "[2001:db8::2]:51820"] {
        let (a, b) = cable();
        let (a, b) = (Node::start(a, 1), Node::start(b, 2));
        b.peer_with(&a, None);
        a.peer_with(&b, Some(endpoint));
        for (from, to) in [(&a, &b), (&b, &a)] {
            to.inner().into_iter().for_each(|address| from.reaches(address));
        }
        assert_eq!(a.peer(&b.public).config.endpoint, Some(endpoint.parse().unwrap()));
        assert_eq!(b.peer(&a.public).config.endpoint.unwrap().is_ipv6(), endpoint.starts_with('['));
    }
}

#[test]
fn large_transfers_arrive_intact_in_both_directions_at_once() {
    let (a, b) = pair();
    std::thread::scope(|scope| {
        scope.spawn(|| transfer(&a.namespace, &b.namespace, b.inner()[0], 16));
        scope.spawn(|| transfer(&b.namespace, &a.namespace, a.inner()[1], 16));
    });
    let (sent, received) = (a.peer(&b.public), b.peer(&a.public));
    assert!(sent.tx_bytes > 16 << 20 && received.rx_bytes > 16 << 20);
}

/// RFC 6040: the outer packet is as ECN-capable as the inner one, which learns of the congestion that the outer one met.
#[test]
fn congestion_outside_shows_inside() {
    for (endpoint, outer) in [("192.0.2.2:51820", "ip"), ("[2001:db8::2]:51820", "ip6")] {
        let (a, b) = cable();
        let (a, b) = (Node::start(a, 1), Node::start(b, 2));
        b.peer_with(&a, None);
        a.peer_with(&b, Some(endpoint));
        a.reaches(b.inner()[0]);
        b.namespace.sh(&format!(
            "nft 'table inet congestion {{
                 chain cable {{ type filter hook prerouting priority raw;
                     iifname veth0 {outer} ecn ect0 {outer} ecn set ce
                 }}
                 chain inside {{ type filter hook input priority filter;
                     iifname {NAME} ip ecn ce counter comment \"met\"
                     iifname {NAME} ip ecn not-ect icmp type echo-request counter comment \"plain\"
                 }}
             }}'"
        ));
        let ping = |class: u8| {
            let command =
                format!("ping -n -c 3 -i 0.05 -W 1 -Q {class} 10.8.0.2 | grep -o '[0-9]* received'");
            a.namespace.run(|| {
                let output = Command::new("sh").args(["-c", &command]).output().unwrap();
                String::from_utf8(output.stdout).unwrap().trim().to_owned()
            })
        };
        let listed = |comment: &str, packets: u8| {
            let rules = b.namespace.sh("nft list table inet congestion");
            let wanted = format!("packets {packets} ");
            assert!(rules.lines().any(|line| line.contains(comment) && line.contains(&wanted)), "{rules}");
        };
        assert_eq!(ping(0), "3 received");
        listed("plain", 3);
        listed("met", 0);
        assert_eq!(ping(2), "3 received");
        listed("met", 3);
        // Without ECN a packet that met congestion is lost.
        b.namespace.sh(&format!(
            "nft 'add rule inet congestion cable iifname veth0 udp dport {PORT} {outer} ecn set ce'"
        ));
        assert_eq!(ping(0), "0 received");
        assert_eq!(ping(1), "3 received");
    }
}

#[test]
fn a_node_that_changes_its_address_is_followed() {
    let (a, b) = pair();
    b.namespace.sh("ip addr del 192.0.2.2/24 dev veth0; ip addr add 192.0.2.22/24 dev veth0");
    b.reaches(a.inner()[0]);
    a.reaches(b.inner()[1]);
    assert_eq!(a.peer(&b.public).config.endpoint, Some("192.0.2.22:51820".parse().unwrap()));
}

#[test]
fn changing_a_peer_keeps_its_session_and_its_counters() {
    let (a, b) = pair();
    // For a second after a session is established, the end with the lower key stays on its path.
    std::thread::sleep(std::time::Duration::from_millis(1200));
    let before = a.peer(&b.public);
    let [v4, v6] = b.inner_prefixes();
    a.change(&set_peer(b.public, Some("[2001:db8::2]:51820"), &[v4, v6, "10.99.0.0/16".to_owned()]));
    a.reaches(b.inner()[0]);
    let after = a.peer(&b.public);
    assert_eq!(after.last_handshake, before.last_handshake);
    assert!(after.rx_bytes > before.rx_bytes && after.tx_bytes > before.tx_bytes);
    assert_eq!(after.config.endpoint, Some("[2001:db8::2]:51820".parse().unwrap()));
    assert_eq!(after.config.allowed_ips.len(), 3);
    until("the other end follows", || b.peer(&a.public).config.endpoint.unwrap().is_ipv6());
}

#[test]
fn inner_sources_are_enforced() {
    let (a, b) = pair();
    a.namespace.sh(&format!("ip addr add 10.8.0.99/24 dev {NAME}"));
    let receiver = b.namespace.run(|| UdpSocket::bind("10.8.0.2:7000")).unwrap();
    receiver.set_read_timeout(Some(TIMEOUT)).unwrap();
    let send = |source: &str, text: &str| {
        let socket = a.namespace.run(|| UdpSocket::bind((source, 0))).unwrap();
        socket.send_to(text.as_bytes(), "10.8.0.2:7000").unwrap();
    };
    let receive = || {
        let mut buffer = [0; 64];
        let length = receiver.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    send("10.8.0.99", "spoofed");
    send("10.8.0.1", "genuine");
    assert_eq!(receive(), "genuine", "one queue: the first would have come first");

    // The address moves to another peer, and back.
    let (_, stranger) = keys();
    b.change(&set_peer(stranger, None, &["10.8.0.1/32"]));
    assert_eq!(b.peer(&a.public).config.allowed_ips, ["fd00:8::1/128".parse().unwrap()]);
    let seen = b.peer(&a.public).rx_bytes;
    send("10.8.0.1", "not yours");
    until("it was received", || b.peer(&a.public).rx_bytes > seen);
    b.peer_with(&a, None);
    assert_eq!(b.peer(&stranger).config.allowed_ips, []);
    send("10.8.0.1", "yours again");
    assert_eq!(receive(), "yours again");
}

#[test]
fn a_restarted_device_adopts_the_interface_and_traffic_resumes() {
    let (mut a, b) = pair();
    a.namespace.sh(&format!("ip route add 10.77.0.0/16 dev {NAME}; ip -6 route add fd00:77::/48 dev {NAME}"));
    let (index, routes) =
        (a.index(), a.namespace.sh("ip route show 10.77.0.0/16; ip -6 route show fd00:77::/48"));
    a.device = None;
    assert!(
        a.namespace.sh(&format!("ip link show {NAME}")).contains(NAME),
        "the interface outlives its process"
    );
    a.restart();
    a.peer_with(&b, Some("192.0.2.2:51820"));
    b.reaches(a.inner()[0]);
    assert_eq!(a.index(), index);
    assert_eq!(a.namespace.sh("ip route show 10.77.0.0/16; ip -6 route show fd00:77::/48"), routes);
}

/// Not a test: the process that the next test kills.
#[test]
#[ignore = "runs inside the test that kills it: cargo xtask test lab -- device"]
fn victim() {
    let private: PrivateKey = std::env::var("VICTIM_KEY").unwrap().parse().unwrap();
    let device = start_again(0, MTU);
    let change =
        DeviceChange { private_key: Some(private), listen_port: Some(PORT), ..DeviceChange::default() };
    device.change(&change).unwrap();
    let peer = std::env::var("VICTIM_PEER").unwrap().parse().unwrap();
    device.change(&set_peer(peer, Some("192.0.2.2:51820"), &["10.8.0.2/32", "fd00:8::2/128"])).unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn after_kill_9_the_next_process_adopts_interface_and_control_socket() {
    let (mut a, b) = pair();
    a.device = None;
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "device::victim", "--nocapture"]).stdout(Stdio::null());
    command.env("VICTIM_KEY", a.private.to_base64()).env("VICTIM_PEER", b.public.to_string());
    let mut victim = a.namespace.run(|| command.spawn()).unwrap();
    a.reaches(b.inner()[0]);
    victim.kill().unwrap();
    victim.wait().unwrap();
    assert!(a.namespace.sh("ls /run/wireguard").contains(NAME), "the victim could not clean up");

    a.restart();
    a.peer_with(&b, Some("192.0.2.2:51820"));
    b.reaches(a.inner()[0]);
    assert_eq!(a.namespace.sh(&format!("wg show {NAME} public-key")).trim(), a.public.to_string());
}

#[test]
fn wg_shows_what_the_device_says() {
    let (a, b) = pair();
    let mut change = set_peer(b.public, None, &b.inner_prefixes());
    change.fwmark = Some(0x20);
    change.set_peers.values_mut().for_each(|config| {
        config.persistent_keepalive = Some(25);
        config.preshared_key = Some(PresharedKey([7; 32]));
    });
    a.change(&change);
    let dump = a.namespace.sh(&format!("wg show {NAME} dump"));
    let lines: Vec<Vec<&str>> = dump.lines().map(|line| line.split('\t').collect()).collect();
    let state = a.device().state().unwrap();
    assert_eq!(lines[0], [&a.private.to_base64(), &a.public.to_string(), "51820", "0x20"]);
    let peer = &state.peers[&b.public];
    let handshake = peer.last_handshake.unwrap().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    assert_eq!(lines[1][0], b.public.to_string());
    assert_eq!(lines[1][2..5], ["192.0.2.2:51820", "10.8.0.2/32,fd00:8::2/128", &handshake.to_string()]);
    assert!(lines[1][5].parse::<u64>().unwrap() > 0 && lines[1][6].parse::<u64>().unwrap() > 0);
    assert_eq!(lines[1][7], "25");
    assert_eq!(lines.len(), 2);
    let configuration = a.namespace.sh(&format!("wg showconf {NAME}"));
    assert!(configuration.contains("FwMark = 0x20") && configuration.contains("PersistentKeepalive = 25"));
}

#[test]
fn wg_sets_what_the_device_does() {
    let (a, b) = pair();
    let before = a.peer(&b.public);
    let (_, stranger) = keys();
    a.namespace.sh(&format!(
        "wg set {NAME} listen-port 51999 fwmark 0x40 peer {} persistent-keepalive 9 \
         peer {stranger} endpoint 192.0.2.2:9 allowed-ips 10.9.0.0/16,fd00:9::/32",
        b.public
    ));
    let state = a.device().state().unwrap();
    assert_eq!((state.listen_port, state.fwmark, state.peers.len()), (51_999, 0x40, 2));
    assert_eq!(state.peers[&b.public].config.persistent_keepalive, Some(9));
    assert_eq!(state.peers[&b.public].last_handshake, before.last_handshake);
    a.reaches(b.inner()[0]);
    assert_eq!(b.peer(&a.public).config.endpoint, Some("192.0.2.1:51999".parse().unwrap()));
    a.namespace.sh(&format!("wg set {NAME} peer {stranger} remove"));
    assert_eq!(a.device().state().unwrap().peers.len(), 1);
    let own = format!("wg set {NAME} peer {} allowed-ips 10.9.0.0/16", a.public);
    assert!(
        a.namespace.run(|| Command::new("sh").args(["-c", &own]).output().unwrap()).status.code() != Some(0)
    );

    let saved = a.namespace.sh(&format!("wg showconf {NAME}"));
    a.namespace.run(|| std::fs::write("/run/wireguard/saved", &saved)).unwrap();
    a.namespace.sh(&format!("wg syncconf {NAME} /run/wireguard/saved"));
    assert_eq!(a.peer(&b.public).last_handshake, before.last_handshake, "the same again changes nothing");
}

#[test]
fn the_control_socket_is_private_and_survives_nonsense() {
    let node = Node::start(namespace(), 1);
    let path = format!("/run/wireguard/{NAME}.sock");
    node.namespace.run(|| {
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let mut idle: Vec<UnixStream> = (0..20).map(|_| UnixStream::connect(&path).unwrap()).collect();
        for nonsense in [&b"\n\n"[..], b"get=1\xff\n\n", b"set=1\nlisten_port=x\n\n", b"\0\0\0\n\n"] {
            let mut stream = idle.remove(0);
            stream.set_read_timeout(Some(TIMEOUT)).unwrap();
            stream.write_all(nonsense).unwrap();
            let mut answer = [0; 64];
            let length = stream.read(&mut answer).unwrap();
            assert_eq!(&answer[..length], b"errno=22\n\n", "{nonsense:?}");
        }
    });
    assert!(node.namespace.sh(&format!("wg show {NAME} listen-port")).contains("51820"));
    drop(node.device);
    assert_eq!(node.namespace.sh("ls /run/wireguard"), "", "removed when stopped in order");
}

#[test]
fn without_a_control_socket_the_device_works_all_the_same() {
    let first = Node::start(namespace(), 1);
    let (private, _) = keys();
    // Another network namespace that shares the directory, as nodes on one test machine do.
    let second = first.namespace.run(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        Device::start(Settings::new(NAME, 1420)).unwrap()
    });
    let change = DeviceChange { private_key: Some(private.clone()), ..DeviceChange::default() };
    second.change(&change).unwrap();
    assert_eq!(second.state().unwrap().private_key, Some(private));
    drop(second);
    let shown = first.namespace.sh(&format!("wg show {NAME} public-key"));
    assert_eq!(shown.trim(), first.public.to_string(), "the socket stays with its first owner");
}

#[test]
fn hostile_datagrams_change_no_peer_and_no_session() {
    let (a, b) = pair();
    let before = a.peer(&b.public);
    let attacker = b.namespace.run(|| UdpSocket::bind("192.0.2.2:0")).unwrap();
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for round in 0..20_000_usize {
        let length = match round % 8 {
            0 => 0,
            1 => 148,
            2 => 92,
            3 => 64,
            4 => 32,
            5 => 1400,
            _ => (next() % 300) as usize,
        };
        let mut bytes: Vec<u8> = (0..length).map(|_| next() as u8).collect();
        bytes.iter_mut().take(4).zip([(round % 5) as u8, 0, 0, 0]).for_each(|(byte, value)| *byte = value);
        attacker.send_to(&bytes, ("192.0.2.1", PORT)).unwrap();
    }
    attacker.send_to(&vec![4; 65_507], ("192.0.2.1", PORT)).unwrap();
    a.reaches(b.inner()[0]);
    let after = a.peer(&b.public);
    assert_eq!(after.config, before.config);
    assert_eq!(after.last_handshake, before.last_handshake);
}

#[test]
fn two_nodes_with_one_key_disturb_no_third() {
    let (a, b) = pair();
    let c = b.namespace.run(|| Device::start(Settings::new("wg-twin", 1420))).unwrap();
    let mut change = set_peer(a.public, Some("192.0.2.1:51820"), &a.inner_prefixes());
    change.private_key = Some(b.private.clone());
    change.listen_port = Some(51_821);
    c.change(&change).unwrap();
    until("the twin has a session too", || c.state().unwrap().peers[&a.public].last_handshake.is_some());
    b.reaches(a.inner()[0]);
    a.reaches(b.inner()[0]);
    assert_eq!(a.device().state().unwrap().peers.len(), 1);
    let refused = a.device().change(&set_peer(a.public, None, &["10.0.0.0/8"])).unwrap_err();
    assert!(matches!(refused, Error::OwnKey(key) if key == a.public));
    c.delete().unwrap();
}

#[test]
fn mark_and_port_change_while_traffic_flows() {
    let (a, b) = pair();
    let handshake = a.peer(&b.public).last_handshake;
    // Only what is marked 0x20 finds the other end.
    a.namespace.sh(
        "ip rule add fwmark 0x20/0x60 lookup 77 priority 10; ip route add 192.0.2.2 dev veth0 table 77; \
         ip route add unreachable 192.0.2.2",
    );
    assert!(!a.pings(b.inner()[0]));
    until("the reason is shown", || a.device().send_error(&b.public).is_some());
    let said = a.device().send_error(&b.public).unwrap();
    assert!(said.contains("192.0.2.2:51820"), "{said}");

    a.change(&DeviceChange { fwmark: Some(0x20), ..DeviceChange::default() });
    a.reaches(b.inner()[0]);
    assert_eq!(a.device().send_error(&b.public), None);
    a.change(&DeviceChange { listen_port: Some(51_900), ..DeviceChange::default() });
    a.reaches(b.inner()[0]);
    assert_eq!(b.peer(&a.public).config.endpoint, Some("192.0.2.1:51900".parse().unwrap()));
    assert_eq!(a.peer(&b.public).last_handshake, handshake, "one session all along");

    let holder = a.namespace.run(|| UdpSocket::bind("0.0.0.0:51901")).unwrap();
    let change = DeviceChange { listen_port: Some(51_901), fwmark: Some(0x40), ..DeviceChange::default() };
    assert!(matches!(a.device().change(&change), Err(Error::Listen { port: 51_901, .. })));
    let state = a.device().state().unwrap();
    assert_eq!((state.listen_port, state.fwmark), (51_900, 0x20), "all or nothing");
    drop(holder);
}

#[test]
fn answers_leave_from_the_address_that_was_asked() {
    let (a, b) = cable();
    b.sh("ip addr add 192.0.2.200/24 dev veth0");
    let (a, b) = (Node::start(a, 1), Node::start(b, 2));
    b.peer_with(&a, None);
    a.peer_with(&b, Some("192.0.2.200:51820"));
    a.reaches(b.inner()[0]);
    b.reaches(a.inner()[0]);
    assert_eq!(a.peer(&b.public).config.endpoint, Some("192.0.2.200:51820".parse().unwrap()));
}

#[test]
fn packets_larger_than_the_outer_path_still_arrive() {
    let (a, b) = pair();
    for node in [&a, &b] {
        node.namespace.sh("ip link set veth0 mtu 1300");
    }
    transfer(&a.namespace, &b.namespace, b.inner()[0], 1);
}

#[test]
fn a_deleted_or_removed_interface_is_noticed() {
    let mut node = Node::start(namespace(), 1);
    node.namespace.sh(&format!("ip link del {NAME}"));
    until("the loop ends", || matches!(node.device().state(), Err(Error::Stopped(_))));
    assert!(node.device().send_error(&node.public).is_some());

    node.device = None;
    node.restart();
    node.device.take().unwrap().delete().unwrap();
    assert!(!node.namespace.sh("ip -o link").contains(NAME));
}

#[test]
fn an_interface_in_use_or_of_another_kind_is_refused_by_name() {
    let node = Node::start(namespace(), 1);
    node.namespace.sh("ip link add dummy-like type veth peer name other");
    for name in [NAME, "dummy-like"] {
        let error = node.namespace.run(|| Device::start(Settings::new(name, 1420))).err().unwrap();
        assert!(matches!(error, Error::AttachTun { .. }) && error.to_string().contains(name), "{error}");
    }
}

#[test]
fn a_thousand_peers_are_taken_and_shown() {
    let node = Node::start(namespace(), 1);
    let shown = node.namespace.sh(&format!("ip link show {NAME}"));
    assert!(shown.contains("mtu 1420") && shown.contains("qlen 1000"), "{shown}");
    let mut change = DeviceChange::default();
    for number in 0..1_000_u32 {
        let mut key = [7; 32];
        key[..4].copy_from_slice(&number.to_be_bytes());
        let [_, _, high, low] = number.to_be_bytes();
        let one = set_peer(
            fairlead_keys::PublicKey(key),
            Some("192.0.2.2:51820"),
            &[format!("10.9.{high}.{low}/32")],
        );
        change.set_peers.extend(one.set_peers);
    }
    node.change(&change);
    assert_eq!(node.device().state().unwrap().peers.len(), 1_000);
    assert_eq!(node.namespace.sh(&format!("wg show {NAME} peers")).lines().count(), 1_000);
}

//! Ways of real packets: a node between a pod, an uplink and a veth in the place of the WireGuard device.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use crate::mesh_common::{Namespace, apply, join};
use fairlead_dataplane::mesh::{Bypass, MeshState, NarrowRoute};
use fairlead_dataplane::uplink::HostNetwork;
use fairlead_dataplane::wireguard::{self, Preference, Settings};
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

const TARGET_V4: &str = "10.5.0.1";
const TARGET_V6: &str = "fd05::1";
const PORT: u16 = 9999;
/// Only bounds a failing test.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The target addresses exist twice: behind the mesh device, and on the uplink for packets that must not enter it.
struct Bed {
    node: Namespace,
    mesh: Namespace,
    uplink: Namespace,
    pod: Namespace,
}

impl Bed {
    fn new() -> Self {
        let bed = Self {
            node: Namespace::new(),
            mesh: Namespace::new(),
            uplink: Namespace::new(),
            pod: Namespace::new(),
        };
        bed.node.sh("sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0 \
             net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
        join(&bed.node, [("mesh0", &bed.mesh, 64), ("up0", &bed.uplink, 65), ("pod0", &bed.pod, 66)]);
        for other in [&bed.mesh, &bed.uplink] {
            other.sh(&format!(
                "ip addr add {TARGET_V4}/32 dev eth0; ip addr add {TARGET_V6}/128 dev eth0 nodad"
            ));
        }
        bed.node.sh("ip route add default via 100.65.0.2; ip route add default via fd65::2");
        // A mesh device has no neighbours to ask; a veth has.
        let mac = bed.mesh.sh("ip -j link show eth0 | jq -r .[0].address");
        let mac = mac.trim();
        bed.node.sh(&format!(
            "ip neigh replace {TARGET_V4} lladdr {mac} dev mesh0; ip neigh replace {TARGET_V6} lladdr {mac} dev mesh0"
        ));
        bed
    }

    fn apply(&self) {
        self.apply_with(Vec::new());
    }

    fn apply_with(&self, narrow: Vec<NarrowRoute>) {
        let without_default = self.node.run(|| HostNetwork::read().unwrap()).families_without_default();
        let state = MeshState {
            interface: "mesh0".into(),
            mtu: 1420,
            addresses: Vec::new(),
            targets_v4: vec!["10.5.0.0/16".parse().unwrap()],
            targets_v6: vec!["fd05::/64".parse().unwrap()],
            bypass: Bypass::default(),
            plain: Vec::new(),
            narrow,
            masqueraded: Vec::new(),
            without_default,
            listen_port: 51820,
            sources: Vec::new(),
            uplinks: Vec::new(),
        };
        self.node.run(|| apply(&state).unwrap());
    }
}

/// Answers each datagram with a name until one says "stop", or none comes any more.
fn answer(socket: &UdpSocket, name: &str) {
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut buffer = [0; 64];
    while let Ok((length, from)) = socket.recv_from(&mut buffer) {
        if &buffer[..length] == b"stop" {
            return;
        }
        socket.send_to(name.as_bytes(), from).unwrap();
    }
}

fn any(target: &str) -> SocketAddr {
    match target.parse().unwrap() {
        IpAddr::V4(_) => "0.0.0.0:0".parse().unwrap(),
        IpAddr::V6(_) => "[::]:0".parse().unwrap(),
    }
}

/// Host that answers a datagram from here with this mark: "mesh" or "uplink".
fn who_answers(from: &Namespace, target: &str, mark: u32) -> String {
    who_answers_port(from, target, mark, 0)
}

/// The same from a port of this host.
fn who_answers_port(from: &Namespace, target: &str, mark: u32, own_port: u16) -> String {
    from.run(|| {
        let socket = UdpSocket::bind(SocketAddr::new(any(target).ip(), own_port)).unwrap();
        setsockopt(&socket, sockopt::Mark, &mark).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        socket.send_to(b"who?", (target.parse::<IpAddr>().unwrap(), PORT)).unwrap();
        let mut buffer = [0; 64];
        let length = socket.recv(&mut buffer).unwrap_or_else(|e| panic!("{target} mark {mark:#x}: {e}"));
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    })
}

#[test]
fn packets_to_the_mesh_enter_it_and_no_others() {
    let bed = Bed::new();
    for target in [TARGET_V4, TARGET_V6] {
        thread::scope(|scope| {
            for (namespace, name) in [(&bed.mesh, "mesh"), (&bed.uplink, "uplink")] {
                let address = (target.parse::<IpAddr>().unwrap(), PORT);
                let socket = namespace.run(|| UdpSocket::bind(address).unwrap());
                scope.spawn(move || answer(&socket, name));
            }
            bed.node.sh("for table in talos_kubespan fairlead_guard; do nft delete table inet $table 2>/dev/null || true; done; \
                 for pref in 101 102 103 104 105; do for family in -4 -6; do \
                 while ip $family rule del pref $pref 2>/dev/null; do :; done; done; done");
            assert_eq!(who_answers(&bed.node, target, 0), "uplink", "before there is a mesh");
            bed.apply();
            assert_eq!(who_answers(&bed.node, target, 0), "mesh", "from this host");
            assert_eq!(who_answers(&bed.pod, target, 0), "mesh", "forwarded");
            assert_eq!(who_answers(&bed.node, target, 0x20), "uplink", "the node program's own packets");
            assert_eq!(
                who_answers_port(&bed.node, target, 0xffff_ffbf, 51820),
                "uplink",
                "WireGuard's own packets, with all other bits set"
            );
            assert_eq!(who_answers(&bed.node, target, 0xffff_ffbf), "mesh", "a mark of another program");
            assert_eq!(who_answers(&bed.node, target, 0x60), "mesh", "both bits are not WireGuard's mark");
            other_bits_survive(&bed, target);
            for namespace in [&bed.mesh, &bed.uplink] {
                namespace.run(|| {
                    let to = (target.parse::<IpAddr>().unwrap(), PORT);
                    UdpSocket::bind(any(target)).unwrap().send_to(b"stop", to).unwrap();
                });
            }
        });
    }
}

fn other_bits_survive(bed: &Bed, target: &str) {
    for (before, after) in [(0xabcd_0f1f_u32, 0xabcd_0f5f_u32), (0xffff_ffff, 0xffff_ffdf), (0, 0x40)] {
        bed.node.sh(&format!(
            "nft 'table inet judge; delete table inet judge; table inet judge {{ chain out {{ \
             type filter hook postrouting priority 300; udp dport {PORT} meta mark {after:#x} counter; }}; }}'"
        ));
        assert_eq!(who_answers(&bed.node, target, before), "mesh", "mark {before:#x}");
        let counter = bed.node.sh("nft list table inet judge");
        assert!(counter.contains("packets 1 "), "mark {before:#x} did not become {after:#x}: {counter}");
    }
    bed.node.sh("nft delete table inet judge");
}

/// Whether a packet of this length, which must not be fragmented, is answered; else what the sender is told.
fn ping(from: &Namespace, target: &str, length: u32) -> Result<(), String> {
    let headers = if target.contains(':') { 48 } else { 28 };
    let out = from.sh(&format!("ping -n -c 1 -W 2 -M do -s {} {target} 2>&1 || true", length - headers));
    if out.contains(" 0% packet loss") { Ok(()) } else { Err(out) }
}

#[test]
fn whoever_sends_packets_longer_than_the_path_to_a_node_passes_is_told() {
    let bed = Bed::new();
    bed.apply();
    let targets = [TARGET_V4, TARGET_V6];
    for target in targets {
        assert_eq!(ping(&bed.pod, target, 1420), Ok(()));
    }
    let narrow = |mtu| {
        let route = |prefix: &str| NarrowRoute { destination: prefix.parse().unwrap(), mtu };
        ["10.5.0.0/24", "fd05::/112"].map(route).to_vec()
    };
    bed.apply_with(narrow(1296));
    for target in targets {
        for from in [&bed.pod, &bed.node] {
            assert_eq!(ping(from, target, 1296), Ok(()));
            let told = ping(from, target, 1420).unwrap_err();
            assert!(told.contains("1296"), "{target}: {told}");
        }
    }
    // IPv6 has no MTU below 1280: there the kernel would say that, which passes no better.
    bed.apply_with(narrow(1216));
    let routes = bed.node.sh("ip route show table 180; ip -6 route show table 180");
    let narrow: Vec<&str> = routes.lines().filter(|line| line.contains(" mtu ")).collect();
    assert!(matches!(&narrow[..], [one] if one.starts_with("10.5.0.0/24 ")), "{routes}");
    bed.apply();
    for namespace in [&bed.pod, &bed.node] {
        // What they were told lasts for ten minutes.
        namespace.sh("ip route flush cache; ip -6 route flush cache");
        for target in targets {
            assert_eq!(ping(namespace, target, 1420), Ok(()));
        }
    }
}

/// Packets to the target that left by the uplink, after packets to the uplink itself have arrived there.
fn in_clear_text(bed: &Bed) -> usize {
    const CONTROL: u16 = 9998;
    bed.uplink.sh(&format!(
        "nft 'table inet judge; delete table inet judge; table inet judge {{ chain in {{ \
         type filter hook prerouting priority -300; udp dport {PORT} counter; udp dport {CONTROL} counter; }}; }}'"
    ));
    let counted = |port: u16| -> usize {
        let rules = bed.uplink.sh("nft list table inet judge");
        let rule = rules.lines().find(|line| line.contains(&format!("udp dport {port} "))).unwrap();
        rule.split("packets ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok()).unwrap()
    };
    for from in [&bed.node, &bed.pod] {
        from.run(|| {
            for target in [TARGET_V4, TARGET_V6] {
                // This host is told at once that there is no way.
                drop(
                    UdpSocket::bind(any(target))
                        .unwrap()
                        .send_to(b"x", (target.parse::<IpAddr>().unwrap(), PORT)),
                );
            }
            for uplink in ["100.65.0.2", "fd65::2"] {
                let to = (uplink.parse::<IpAddr>().unwrap(), CONTROL);
                UdpSocket::bind(any(uplink)).unwrap().send_to(b"x", to).unwrap();
            }
        });
    }
    let deadline = std::time::Instant::now() + TIMEOUT;
    while counted(CONTROL) < 4 && std::time::Instant::now() < deadline {
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(counted(CONTROL), 4);
    counted(PORT)
}

#[test]
fn packets_to_the_mesh_are_dropped_while_the_device_is_down_or_missing_or_has_no_peer() {
    let bed = Bed::new();
    assert_eq!(in_clear_text(&bed), 4, "before there is a mesh");
    bed.apply();
    assert_eq!(in_clear_text(&bed), 0);
    bed.node.sh("ip link set mesh0 down");
    assert_eq!(in_clear_text(&bed), 0, "down");
    bed.apply();
    assert!(bed.node.sh("ip -o link show mesh0").contains(",UP"));
    assert!(bed.node.sh("ip route show table 180").starts_with("default dev mesh0"));
    bed.node.sh("ip link delete mesh0");
    assert_eq!(in_clear_text(&bed), 0, "missing");
    let settings = Settings {
        interface: "mesh0".to_owned(),
        mtu: 1420,
        preference: Preference::Embedded,
        handover_socket: None,
    };
    let device = bed.node.run(|| wireguard::open(&settings).unwrap());
    bed.apply();
    assert!(bed.node.sh("ip route show table 180").starts_with("default dev mesh0"));
    assert_eq!(in_clear_text(&bed), 0, "no peer has the target");
    drop(device);
    assert_eq!(in_clear_text(&bed), 0, "the program has ended");
}

/// As kube-proxy does for a NodePort that is asked at this host's own address.
#[test]
fn what_a_service_sends_elsewhere_from_the_hosts_own_address_enters_the_mesh() {
    let bed = Bed::new();
    bed.apply();
    for (family, target, own) in [("ip", TARGET_V4, "100.65.0.1"), ("ip6", TARGET_V6, "fd65::1")] {
        bed.node.sh(&format!(
            "nft 'table {family} service {{ chain out {{ type nat hook output priority -100; \
             {family} daddr {own} udp dport {PORT} dnat to {target}; }}; }}'"
        ));
        thread::scope(|scope| {
            let address = (target.parse::<IpAddr>().unwrap(), PORT);
            let socket = bed.mesh.run(|| UdpSocket::bind(address).unwrap());
            scope.spawn(move || answer(&socket, "mesh"));
            assert_eq!(who_answers(&bed.node, own, 0), "mesh");
            bed.mesh.run(|| UdpSocket::bind(any(target)).unwrap().send_to(b"stop", address).unwrap());
        });
    }
}

/// Counts, where they arrive, packets that open or accept a connection with these segment sizes.
fn judge(bed: &Bed, sizes: [u16; 2]) {
    let mut rules = String::new();
    for size in sizes {
        for (what, flags) in [("open", "syn"), ("accept", "syn | ack")] {
            rules += &format!(
                "tcp flags & (syn | ack) == {flags} tcp option maxseg size {size} counter comment \"{what}{size}\"; "
            );
        }
    }
    bed.mesh.sh(&format!(
        "nft 'table inet judge; delete table inet judge; \
         table inet judge {{ chain in {{ type filter hook prerouting priority -300; {rules} }}; }}'"
    ));
}

/// Name of the counter that has counted a packet: "open1380", for instance.
fn counted(bed: &Bed) -> String {
    bed.mesh.sh("nft list table inet judge | grep 'packets 1 ' | grep -o 'comment .*' | tr -dc 'a-z0-9\n' | sed 's/comment//'")
        .trim()
        .to_owned()
}

/// Opens a connection and moves a byte each way: a wrong checksum would not get through.
fn connect(client: &Namespace, server: &Namespace, address: &str) {
    let address: SocketAddr = (address.parse::<IpAddr>().unwrap(), PORT).into();
    let listener = server.run(|| TcpListener::bind(address).unwrap());
    // Also how long `accept` waits (socket(7)).
    setsockopt(&listener, sockopt::ReceiveTimeout, &TimeVal::seconds(TIMEOUT.as_secs() as i64)).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            stream.write_all(&byte).unwrap();
        });
        client.run(|| {
            let mut stream = TcpStream::connect_timeout(&address, TIMEOUT).unwrap();
            stream.set_read_timeout(Some(TIMEOUT)).unwrap();
            stream.write_all(b"x").unwrap();
            stream.read_exact(&mut [0]).unwrap();
        });
    });
}

#[test]
fn segments_are_clamped_for_this_host_and_for_pods() {
    let bed = Bed::new();
    bed.apply();
    for (target, expected) in [(TARGET_V4, "open1380"), (TARGET_V6, "open1360")] {
        for (client, whose) in [(&bed.node, "this host"), (&bed.pod, "a pod")] {
            judge(&bed, [1380, 1360]);
            connect(client, &bed.mesh, target);
            assert_eq!(counted(&bed), expected, "the SYN of {whose} to {target}");
        }
    }
    // And what answers a connection from the mesh, whose client is a target then.
    bed.mesh.sh("ip addr del 100.64.0.2/24 dev eth0; ip addr del fd64::2/64 dev eth0; \
         ip route replace default via 100.64.0.1 dev eth0 onlink; \
         ip -6 route replace default via fd64::1 dev eth0 onlink");
    for (pod, node, expected) in
        [("100.66.0.2", "100.65.0.1", "accept1380"), ("fd66::2", "fd65::1", "accept1360")]
    {
        for (server, address) in [(&bed.node, node), (&bed.pod, pod)] {
            judge(&bed, [1380, 1360]);
            connect(&bed.mesh, server, address);
            assert_eq!(counted(&bed), expected, "the answer of {address}");
        }
    }
}

#[test]
fn a_segment_that_fits_is_left_alone() {
    let bed = Bed::new();
    bed.apply();
    bed.pod.sh("ip link set eth0 mtu 1400");
    for (target, expected) in [(TARGET_V4, "open1360"), (TARGET_V6, "open1340")] {
        judge(&bed, [1360, 1340]);
        connect(&bed.pod, &bed.mesh, target);
        assert_eq!(counted(&bed), expected);
    }
}

/// Error that a program gets at once which sends a datagram with this mark.
fn refusal(from: &Namespace, target: &str, mark: u32) -> Option<Errno> {
    from.run(|| {
        let socket = UdpSocket::bind(any(target)).unwrap();
        setsockopt(&socket, sockopt::Mark, &mark).unwrap();
        let sent = socket.send_to(b"x", (target.parse::<IpAddr>().unwrap(), PORT));
        sent.err().and_then(|error| error.raw_os_error()).map(Errno::from_raw)
    })
}

/// Addresses of this host, the first of each family on the mesh device, which are no target.
const OWN: [&str; 2] = ["100.64.0.1", "fd64::1"];
/// Addresses outside of the mesh.
const ELSEWHERE: [&str; 2] = ["192.0.2.1", "2001:db8::1"];

#[test]
fn without_a_default_route_this_host_sends_to_the_mesh_and_answers_it_and_nothing_else_enters_it() {
    let bed = Bed::new();
    bed.node.sh("ip route del default; ip -6 route del default");
    let told = |target: &str, mark| refusal(&bed.node, target, mark);
    bed.apply();
    for ((target, own), elsewhere) in [TARGET_V4, TARGET_V6].into_iter().zip(OWN).zip(ELSEWHERE) {
        assert_eq!(ping(&bed.node, target, 1420), Ok(()));
        // What the kernel itself answers, and a connection.
        let answered = bed.mesh.sh(&format!("ping -n -c 1 -W 2 -I {target} {own} 2>&1 || true"));
        assert!(answered.contains(" 0% packet loss"), "{answered}");
        connect(&bed.node, &bed.mesh, target);
        assert_eq!(told(elsewhere, 0), Some(Errno::ENETUNREACH));
        assert_eq!(told(elsewhere, 0x10), Some(Errno::ENETUNREACH));
        assert_eq!(told(target, 0x20), Some(Errno::ENETUNREACH), "WireGuard's own: {target}");
    }
    // Another program takes rules and routes away; they are mended.
    bed.node
        .sh("for family in -4 -6; do for pref in 102 32800; do ip $family rule del pref $pref; done; done");
    assert_eq!([TARGET_V4, TARGET_V6].map(|it| told(it, 0)), [Some(Errno::ENETUNREACH); 2]);
    bed.apply();
    assert_eq!([TARGET_V4, TARGET_V6].map(|it| told(it, 0)), [None; 2]);
    bed.node.sh("ip route flush table 180; ip -6 route flush table 180");
    bed.apply();
    assert_eq!([TARGET_V4, TARGET_V6].map(|it| ping(&bed.node, it, 1420)), [Ok(()), Ok(())]);
    // While the device is down, the sender is told at once.
    bed.node.sh("ip link set mesh0 down");
    for target in [TARGET_V4, TARGET_V6, ELSEWHERE[0], ELSEWHERE[1]] {
        assert!(matches!(told(target, 0), Some(Errno::ENETUNREACH | Errno::EHOSTUNREACH)), "{target}");
    }
}

#[test]
fn a_default_route_that_comes_and_goes_is_used_for_what_is_not_in_the_mesh() {
    let bed = Bed::new();
    bed.apply();
    let routes = || bed.node.sh("ip route show table 180; ip -6 route show table 180");
    assert!(!routes().contains("10.5.0.0/16") && !routes().contains("fd05::/64"), "{}", routes());
    bed.node.sh("ip -6 route del default");
    bed.apply();
    assert!(!routes().contains("10.5.0.0/16") && routes().contains("fd05::/64"), "{}", routes());
    assert_eq!(ping(&bed.node, TARGET_V6, 1420), Ok(()));
    bed.node.sh("ip -6 route add default via fd65::2");
    assert_eq!(ping(&bed.node, TARGET_V6, 1420), Ok(()));
    assert_eq!(refusal(&bed.node, ELSEWHERE[1], 0), None);
    bed.apply();
    assert!(!routes().contains("fd05::/64"), "{}", routes());
}

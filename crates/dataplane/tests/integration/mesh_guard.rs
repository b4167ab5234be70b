//! Packets for the mesh that would leave outside of it: what lets them out is gone, or rules of other programs come first. Each is shown with
//! the guard and without it, and beside packets of WireGuard, which leave. The rules that come before those of other programs
//! (`mesh_guard_routes`) are taken away: the table holds without them.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::mesh_common::{Namespace, in_namespace, join, mesh, run};
use fairlead_dataplane::mesh::{Applier, MeshState, PlainRoute, remove};
use fairlead_dataplane::nft_table::Applied;
use fairlead_dataplane::uplink::HostNetwork;
use ipnet::IpNet;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, sendto, setsockopt,
    socket, sockopt,
};

/// Members behind the mesh's device; the uplink has their addresses as well.
pub(crate) const TARGETS: [&str; 2] = ["10.5.0.1", "fd05::1"];
/// The node's own addresses on the uplink, and those of the router there.
const OWN: [&str; 2] = ["100.65.0.1", "fd65::1"];
pub(crate) const ROUTER: [&str; 2] = ["100.65.0.2", "fd65::2"];
/// An address of the node that is not in the mesh.
const VIRTUAL: [&str; 2] = ["100.65.0.9", "fd65::9"];
/// Destination ports: what belongs into the mesh, WireGuard's, and one by which it is seen that all has arrived.
pub(crate) const CLEAR: u16 = 9999;
const WIREGUARD: u16 = 51820;
const LAST: u16 = 9998;
/// Mark of WireGuard's packets.
const FROM_WIREGUARD: u32 = 0x20;
/// Only bounds a failing test.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) struct Bed {
    pub(crate) node: Namespace,
    uplink: Namespace,
    pod: Namespace,
    member: Namespace,
    pub(crate) applier: Applier,
    pub(crate) state: MeshState,
}

impl Bed {
    pub(crate) fn new() -> Self {
        let [node, member, uplink, pod] = [(); 4].map(|()| Namespace::new());
        node.sh("sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0 net.ipv4.ip_forward=1 \
             net.ipv6.conf.all.forwarding=1");
        join(&node, [("mesh0", &member, 64), ("up0", &uplink, 65), ("pod0", &pod, 66)]);
        node.sh("ip route add default via 100.65.0.2; ip route add default via fd65::2; \
             ip addr add 100.65.0.9/32 dev up0; ip addr add fd65::9/128 dev up0 nodad");
        for address in TARGETS {
            let flags = if address.contains(':') { "nodad" } else { "" };
            uplink.sh(&format!("ip addr add {address} dev eth0 {flags}"));
            // A mesh device has no neighbours to ask; a veth has.
            node.sh(&format!("ip neigh replace {address} lladdr 02:00:00:00:00:01 dev mesh0"));
        }
        uplink.sh(&format!(
            "nft 'table inet judge {{ chain in {{ type filter hook prerouting priority -300; udp dport {CLEAR} counter; \
             udp dport {WIREGUARD} counter; udp dport {LAST} counter; meta l4proto {{ tcp, 4, 41 }} counter; \
             icmpv6 type nd-neighbor-solicit ip6 daddr != ff00::/8 counter; }}; }}'"
        ));
        let mut state = mesh(1420, &["10.5.0.0/16"], &["fd05::/64"]);
        state.listen_port = WIREGUARD;
        let own = ["100.65.0.1/32", "100.66.0.0/24", "fd65::1/128", "fd66::/64"];
        state.bypass.own = own.iter().map(|text| text.parse().unwrap()).collect();
        Self { node, uplink, pod, member, applier: Applier::default(), state }
    }

    fn apply(&mut self) {
        self.node.run(|| self.applier.apply(&self.state).unwrap());
        self.node.sh(WITHOUT_FIRST_RULES);
    }

    /// Index of a link of the node.
    pub(crate) fn link(&self, name: &str) -> u32 {
        self.node.run(|| HostNetwork::read().unwrap()).links.iter().find(|it| it.name == name).unwrap().index
    }

    /// Number of packets that the guard has counted in all.
    fn guarded(&mut self) -> u64 {
        self.apply();
        self.applier.guarded().packets
    }

    /// Packets at the uplink that the rule with this text has counted, once all that was sent before has arrived.
    fn seen(&self, rule: &str) -> u64 {
        let counted = |rule: &str| -> u64 {
            let rules = self.uplink.sh("nft list table inet judge");
            let line =
                rules.lines().find(|line| line.contains(rule)).unwrap_or_else(|| panic!("{rule}: {rules}"));
            line.split("packets ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok()).unwrap()
        };
        let last = format!("udp dport {LAST} ");
        let wanted = counted(&last) + 2;
        ROUTER.iter().for_each(|router| send(&self.node, (router, LAST), (0, 0)));
        let deadline = Instant::now() + TIMEOUT;
        while counted(&last) < wanted && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(counted(&last), wanted, "packets to the router itself arrive");
        counted(rule)
    }

    /// Packets in clear text and packets of WireGuard that leave by the uplink, of two each that the node sends and two that it forwards.
    pub(crate) fn leaves(&self) -> (u64, u64) {
        let before =
            (self.seen(&format!("udp dport {CLEAR} ")), self.seen(&format!("udp dport {WIREGUARD} ")));
        for target in TARGETS {
            send(&self.node, (target, CLEAR), (0, 0));
            send(&self.pod, (target, CLEAR), (0, 0));
            send(&self.node, (target, WIREGUARD), (WIREGUARD, FROM_WIREGUARD));
        }
        let after =
            (self.seen(&format!("udp dport {CLEAR} ")), self.seen(&format!("udp dport {WIREGUARD} ")));
        (after.0 - before.0, after.1 - before.1)
    }
}

/// Packets that a table's rules have counted in all.
pub(crate) fn counted(namespace: &Namespace, table: &str) -> u64 {
    let counters = format!("nft list table inet {table} | grep -o 'packets [0-9]*' | cut -d' ' -f2");
    namespace.sh(&counters).lines().map(|line| line.parse::<u64>().unwrap()).sum()
}

/// A socket with this address. A child of another test that is forked and not yet executed may keep the last one open.
fn bound(address: SocketAddr) -> UdpSocket {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match UdpSocket::bind(address) {
            Ok(socket) => return socket,
            Err(error) => assert!(Instant::now() < deadline, "{address}: {error}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Sends a datagram from a port with a mark.
pub(crate) fn send(from: &Namespace, (target, port): (&str, u16), (source, mark): (u16, u32)) {
    let target: IpAddr = target.parse().unwrap();
    let any: SocketAddr =
        if target.is_ipv4() { ([0; 4], source).into() } else { ([0_u16; 8], source).into() };
    from.run(|| {
        let socket = bound(any);
        setsockopt(&socket, sockopt::Mark, &mark).unwrap();
        // The host is told at once that a packet was dropped.
        drop(socket.send_to(b"x", (target, port)));
    });
}

pub(crate) const WITHOUT_FIRST_RULES: &str = "for pref in 100 101 102 103 104 105; do for family in -4 -6; do \
     while ip $family rule del pref $pref 2>/dev/null; do :; done; done; done";

/// As a provider's guide, or Tailscale with an exit node.
const THIEF: &str = "for ip in 'ip -4' 'ip -6'; do $ip rule add pref 5270 lookup 52; done; \
    ip route add default via 100.65.0.2 table 52; ip -6 route add default via fd65::2 table 52";

#[test]
fn nothing_leaves_in_clear_text_whatever_else_is_gone_or_comes_first() {
    for (what, damage) in [
        ("the table of marks", "nft delete table inet talos_kubespan"),
        ("the rules", "for ip in 'ip -4' 'ip -6'; do $ip rule del pref 32500; done"),
        ("the routes", "ip route flush table 180; ip -6 route flush table 180"),
        ("a rule of another program", THIEF),
        (
            "the table and the rules",
            "nft delete table inet talos_kubespan; ip rule del pref 32500; ip -6 rule del pref 32500",
        ),
        (
            "the table, and a rule of another program",
            format!("nft delete table inet talos_kubespan; {THIEF}").as_str(),
        ),
    ] {
        let mut bed = Bed::new();
        assert_eq!(bed.leaves(), (4, 2), "before there is a mesh");
        bed.apply();
        assert_eq!(bed.leaves(), (0, 2), "all is there");
        assert_eq!(bed.guarded(), 0, "nothing comes as far as the guard");
        bed.node.sh(damage);
        assert_eq!(bed.leaves(), (0, 2), "{what}");
        // The control: the same without the guard.
        let counted = counted(&bed.node, "fairlead_guard");
        bed.node.sh("nft delete table inet fairlead_guard");
        let (clear, wireguard) = bed.leaves();
        assert_eq!((clear, wireguard), (counted, 2), "{what}, without the guard");
        assert!(clear > 0, "{what}");
    }
}

#[test]
fn what_is_dropped_is_counted_over_changes_of_the_table_and_told() {
    let mut bed = Bed::new();
    bed.apply();
    bed.node.sh(THIEF);
    assert_eq!(bed.leaves(), (0, 2));
    assert_eq!(bed.guarded(), 4);
    let problem = bed.applier.guarded().problem.clone().unwrap();
    assert_eq!((problem.reason(), problem.at_least), ("PacketsOutsideMesh", 1));
    bed.state.listen_port = 51821;
    bed.apply();
    assert_eq!(bed.leaves().0, 0);
    assert_eq!(bed.guarded(), 8, "the table was made anew");
    // A program that is started later goes on with what the table has.
    bed.applier = Applier::default();
    assert_eq!(bed.guarded(), 4);
    assert_eq!(bed.applier.guarded().problem, None, "what was before is no news");
}

#[test]
fn a_mark_of_wireguard_on_what_is_forwarded_is_not_believed() {
    let mut bed = Bed::new();
    bed.apply();
    for mark in ["0x1bd20", "0x20"] {
        bed.node.sh(&format!(
            "nft 'table inet other; delete table inet other; table inet other {{ chain in {{ type filter hook prerouting priority -150; \
             iifname \"pod0\" meta mark set {mark}; }}; }}'"
        ));
        let before = bed.seen(&format!("udp dport {CLEAR} "));
        let send_all = || TARGETS.iter().for_each(|target| send(&bed.pod, (target, CLEAR), (WIREGUARD, 0)));
        send_all();
        assert_eq!(bed.seen(&format!("udp dport {CLEAR} ")), before, "{mark}");
        bed.node.sh("nft delete table inet talos_kubespan");
        send_all();
        assert_eq!(bed.seen(&format!("udp dport {CLEAR} ")), before, "{mark}, without the table of marks");
        bed.node.sh("nft delete table inet fairlead_guard");
        send_all();
        assert_eq!(bed.seen(&format!("udp dport {CLEAR} ")), before + 2, "{mark}, without the guard");
        bed.apply();
    }
    bed.node.sh("nft delete table inet other");
    // Bits of other programs on what WireGuard sends, and on what another socket of the host sends.
    bed.node.sh("nft delete table inet talos_kubespan");
    let before = bed.seen(&format!("udp dport {WIREGUARD} "));
    for target in TARGETS {
        send(&bed.node, (target, WIREGUARD), (WIREGUARD, 0x1_0020));
        send(&bed.node, (target, WIREGUARD), (0, 0x1_0020));
    }
    assert_eq!(bed.seen(&format!("udp dport {WIREGUARD} ")), before + 2);
}

/// Tries to connect; the packets that open the connection are counted at the uplink.
fn connect(from: &Namespace, source: &str, target: &str, port: u16) {
    let family = if target.contains(':') { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let address = |text: &str, port| SockaddrStorage::from(SocketAddr::new(text.parse().unwrap(), port));
    from.run(|| {
        let socket = socket(family, SockType::Stream, SockFlag::SOCK_NONBLOCK, None).unwrap();
        bind(socket.as_raw_fd(), &address(source, 0)).unwrap();
        // It does not wait.
        nix::sys::socket::connect(socket.as_raw_fd(), &address(target, port)).unwrap_err();
        thread::sleep(Duration::from_millis(20));
    });
}

#[test]
fn each_exception_of_the_documentation_leaves_as_it_is() {
    let mut bed = Bed::new();
    let endpoint = |address: &str, port| SocketAddr::new(address.parse().unwrap(), port);
    bed.state.bypass.servers = TARGETS.iter().map(|it| endpoint(it, 6443)).collect();
    bed.apply();
    let tcp = "meta l4proto";
    for (family, target) in TARGETS.iter().enumerate() {
        let before = bed.seen(tcp);
        connect(&bed.node, OWN[family], target, 6443);
        assert!(bed.seen(tcp) > before, "to the API server at {target}");
        let before = bed.seen(tcp);
        connect(&bed.node, OWN[family], target, 443);
        assert_eq!(bed.seen(tcp), before, "to another port of {target}");
    }
    // Answers from an address of this host that is not in the mesh, while nothing marks what is to enter it.
    for marks in [false, true] {
        if !marks {
            bed.node.sh("nft delete table inet talos_kubespan");
        }
        for (family, target) in TARGETS.iter().enumerate() {
            for (own, is_let_out) in [(VIRTUAL[family], true), (OWN[family], false)] {
                let before = bed.seen(tcp);
                // A closed port answers with a reset.
                connect(&bed.uplink, target, own, 1);
                assert_eq!(bed.seen(tcp) > before, is_let_out, "from {own} to {target}, marks: {marks}");
            }
        }
        bed.apply();
    }
    // Neighbor Discovery of a member on the link.
    bed.node.sh("ip -6 route add fd05::1/128 dev up0; nft delete table inet talos_kubespan");
    bed.apply();
    let guarded = bed.guarded();
    let solicitations = bed.seen("icmpv6");
    let mac = bed.uplink.sh("ip -j link show eth0 | jq -r .[0].address");
    bed.node.sh(&format!("ip -6 neigh replace fd05::1 lladdr {} dev up0 nud probe", mac.trim()));
    let end = Instant::now() + Duration::from_secs(10);
    while bed.seen("icmpv6") <= solicitations {
        assert!(Instant::now() < end, "no neighbor is asked");
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(bed.guarded(), guarded);
    // What is excluded, or belongs to a node that is bypassed, is no target.
    bed.state.targets_v4.clear();
    bed.state.targets_v6.clear();
    bed.apply();
    bed.node.sh("ip -6 route del fd05::1/128 dev up0; ip -6 neigh flush dev up0");
    assert_eq!(bed.leaves(), (4, 2));
}

#[test]
fn plain_routes_and_ip_tunnels_of_the_location_leave_and_what_is_inside_of_none_does_not() {
    let mut bed = Bed::new();
    let up0 = bed.link("up0");
    let to = |destination: &str, gateway: &str, is_tunnel| PlainRoute {
        destination: destination.parse().unwrap(),
        gateway: gateway.parse().unwrap(),
        link: up0,
        is_tunnel,
    };
    bed.state.plain = vec![to("10.5.0.1/32", ROUTER[0], false), to("fd05::1/128", ROUTER[1], false)];
    bed.apply();
    assert_eq!(bed.leaves(), (4, 2), "to neighbours of the location");
    assert_eq!(bed.guarded(), 0);
    // Another prefix takes a tunnel to the neighbour, whose address is a target without a plain route: the outer packets leave.
    bed.state.plain = vec![to("10.5.9.0/24", TARGETS[0], true)];
    bed.apply();
    bed.node.sh("ip route add 10.5.0.1/32 via 100.65.0.2; nft delete table inet talos_kubespan; ip rule del pref 32500");
    let before = bed.seen("meta l4proto");
    send_outer(&bed.node, OWN[0], TARGETS[0]);
    assert_eq!(bed.seen("meta l4proto"), before + 1);
    send(&bed.node, (TARGETS[0], CLEAR), (0, 0));
    assert_eq!(bed.seen("meta l4proto"), before + 1);
    let counted = bed.node.sh("nft list table inet fairlead_guard");
    assert_eq!(counted.matches("packets 1 ").count(), 1, "only what is in no tunnel: {counted}");
}

/// Sends an outer packet of an IP tunnel. The kernel of the tests may have no such tunnels, but it sends what has a header already
/// (`IPPROTO_RAW`, `raw(7)`), and fills in length and checksum.
fn send_outer(from: &Namespace, source: &str, target: &str) {
    let octets = |text: &str| text.parse::<std::net::Ipv4Addr>().unwrap().octets();
    let header =
        [&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, 4, 0, 0][..], &octets(source), &octets(target), &[0; 20]].concat();
    from.run(|| {
        let socket =
            socket(AddressFamily::Inet, SockType::Raw, SockFlag::empty(), SockProtocol::Raw).unwrap();
        let to = SockaddrStorage::from(SocketAddr::new(target.parse().unwrap(), 0));
        sendto(socket.as_raw_fd(), &header, &to, MsgFlags::empty()).unwrap();
    });
}

/// A host of virtual machines that are nodes, too: their tunnels pass it as frames.
#[test]
fn frames_between_ports_of_a_bridge_are_not_ours() {
    let mut bed = Bed::new();
    let machine = Namespace::new();
    bed.node.veth("vm0", &machine, "eth0");
    bed.node.sh("ip addr flush dev up0; ip link add br0 type bridge; ip link set vm0 master br0; ip link set up0 master br0; \
         ip link set br0 up; ip addr add 100.65.0.1/24 dev br0; ip addr add fd65::1/64 dev br0 nodad; \
         ip route add default via 100.65.0.2; ip -6 route replace default via fd65::2; \
         sysctl -qw net.bridge.bridge-nf-call-iptables=1 net.bridge.bridge-nf-call-ip6tables=1");
    machine.sh("ip addr add 100.65.0.7/24 dev eth0; ip addr add fd65::7/64 dev eth0 nodad; \
         ip route add default via 100.65.0.2; ip route add default via fd65::2");
    bed.apply();
    let before = bed.seen(&format!("udp dport {WIREGUARD} "));
    for target in TARGETS {
        send(&machine, (target, WIREGUARD), (WIREGUARD, 0));
    }
    assert_eq!(bed.seen(&format!("udp dport {WIREGUARD} ")), before + 2);
    bed.node.sh("nft delete table inet talos_kubespan");
    assert_eq!(bed.leaves(), (0, 2), "what the host and its pods send is guarded");
}

#[test]
fn a_change_is_one_element_and_the_same_state_sends_nothing() {
    in_namespace(|| {
        run("ip tuntap add mesh0 mode tun && ip link set mesh0 up");
        let mut applier = Applier::default();
        applier.apply(&mesh(1420, &["10.1.0.0/16", "10.3.0.0/16"], &["fd00:1::/64"])).unwrap();
        let handles = || run("nft -a list table inet fairlead_guard | grep -o 'handle [0-9]*$'");
        let (before, reads) = (handles(), applier.table_reads());
        applier.apply(&mesh(1420, &["10.1.0.0/16", "10.5.0.0/16"], &["fd00:1::/64"])).unwrap();
        assert_eq!(handles(), before, "rules and sets are the same objects");
        let table = run("nft list table inet fairlead_guard");
        assert!(table.contains("10.1.0.0/16, 10.5.0.0/16"), "{table}");
        let listed = run("nft list ruleset");
        applier.apply(&mesh(1420, &["10.1.0.0/16", "10.5.0.0/16"], &["fd00:1::/64"])).unwrap();
        assert_eq!(run("nft list ruleset"), listed);
        assert_eq!(
            applier.table_reads(),
            reads,
            "changes of one table are none of another program for the other"
        );
        for damage in [
            "nft flush table inet fairlead_guard",
            "nft delete table inet fairlead_guard",
            "nft flush ruleset",
        ] {
            run(damage);
            applier.apply(&mesh(1420, &["10.1.0.0/16", "10.5.0.0/16"], &["fd00:1::/64"])).unwrap();
            assert_eq!(run("nft list table inet fairlead_guard"), table, "{damage}");
        }
        let applied = applier.apply(&mesh(1420, &["10.1.0.0/16", "10.5.0.0/16"], &["fd00:1::/64"])).unwrap();
        assert_eq!(applied, Applied::Unchanged);
        remove().unwrap();
        assert_eq!(run("nft list ruleset"), "");
    });
}

#[test]
fn what_comes_by_the_tunnel_for_a_pod_that_is_not_there_leaves_by_no_uplink() {
    let mut bed = Bed::new();
    bed.state.bypass.own.extend(["10.7.0.0/24", "fd07::/64"].map(|own| own.parse::<IpNet>().unwrap()));
    bed.state.uplinks = vec!["up0".to_owned()];
    let leave = |bed: &Bed| {
        let rule = format!("udp dport {CLEAR} ");
        let before = bed.seen(&rule);
        for pod in ["10.7.0.5", "fd07::5"] {
            send(&bed.member, (pod, CLEAR), (0, 0));
        }
        bed.seen(&rule) - before
    };
    assert_eq!(leave(&bed), 2, "before there is a mesh");
    bed.apply();
    assert_eq!(leave(&bed), 0);
    assert_eq!(bed.guarded(), 0, "nothing of this node was about to leave");
}

/// They are among the prefixes of their node, which is known to them in place of who sends.
#[test]
fn what_comes_by_the_tunnel_for_hosts_beside_this_node_leaves_by_an_uplink() {
    let mut bed = Bed::new();
    let site = ["10.8.0.0/24", "fd08::/64"].map(|prefix| prefix.parse::<IpNet>().unwrap());
    bed.state.bypass.own.extend(["10.7.0.0/24", "fd07::/64"].map(|own| own.parse::<IpNet>().unwrap()));
    bed.state.bypass.own.extend(site);
    bed.state.masqueraded = site.to_vec();
    bed.state.uplinks = vec!["up0".to_owned()];
    bed.apply();
    for (targets, leave) in [(["10.7.0.5", "fd07::5"], 0), (["10.8.0.5", "fd08::5"], 2)] {
        let rule = format!("udp dport {CLEAR} ");
        let before = bed.seen(&rule);
        for target in targets {
            send(&bed.member, (target, CLEAR), (0, 0));
        }
        assert_eq!(bed.seen(&rule) - before, leave, "{targets:?}");
    }
}

/// The device is up last: from then on packets come.
#[test]
fn the_guard_is_there_before_the_device_is_up() {
    let mut bed = Bed::new();
    bed.node.sh("ip link set mesh0 down");
    let log = std::env::temp_dir().join(format!("fairlead-monitor-{}", std::process::id()));
    let output = std::fs::File::create(&log).unwrap();
    let mut monitor = bed
        .node
        .run(|| Command::new("ip").args(["-o", "monitor", "link", "rule"]).stdout(output).spawn().unwrap());
    let seen = || std::fs::read_to_string(&log).unwrap();
    let place =
        |texts: [&str; 2]| seen().lines().position(|line| texts.iter().all(|text| line.contains(text)));
    let is_up = ["mesh0", ",UP"];
    // What it missed before it listened is not shown: it listens once it shows a rule of this test.
    let deadline = Instant::now() + TIMEOUT;
    while place(["20000:", "lookup 4711"]).is_none() {
        assert!(Instant::now() < deadline, "{}", seen());
        bed.node.sh("ip rule add pref 20000 lookup 4711; ip rule del pref 20000");
        thread::sleep(Duration::from_millis(20));
    }
    bed.node.run(|| bed.applier.apply(&bed.state).unwrap());
    while place(is_up).is_none() {
        assert!(Instant::now() < deadline, "{}", seen());
        thread::sleep(Duration::from_millis(20));
    }
    monitor.kill().unwrap();
    monitor.wait().unwrap();
    let (rule, up) = (place(["104:", "lookup 183"]), place(is_up));
    let shown = seen();
    std::fs::remove_file(&log).unwrap();
    assert!(rule.is_some() && rule < up, "{shown}");
}

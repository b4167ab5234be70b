//! Rules of other programs that set marks, check sources or translate destinations: those that lead a packet another way are named, each beside the way that it takes without
//! them, and no others are. A veth stands in the place of the WireGuard device.

use std::net::UdpSocket;
use std::thread;
use std::time::{Duration, Instant};

use fairlead_dataplane::mesh::{Applier, Foreign, Harm, MeshState};

use crate::mesh_common::{Namespace, join, mesh};
use crate::mesh_guard::send;
use crate::mesh_guard_routes::{WITHOUT_GUARD, assert_kept, everything};
use crate::mesh_guard_routes_bed::{self as tunnels, DATAGRAMS, PATIENCE};

/// A pod of another node, the other node, which is on the uplink, and a host outside of the mesh.
const OTHER_POD: &str = "10.5.0.1";
const OTHER_NODE: &str = "100.65.0.2";
const OUTSIDE: &str = "198.51.100.9";
/// This node.
const NODE: &str = "100.65.0.1";
/// Ports of all packets but WireGuard's, and of these.
const CLEAR: u16 = 9999;
const WIREGUARD: u16 = 51820;
const FROM_WIREGUARD: u32 = 0x20;
/// Only bounds a failing test.
const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packet {
    /// From a pod to the host outside.
    Forwarded,
    /// From the node to the other pod.
    Sent,
    /// Packet of the node's WireGuard to the other node.
    WireGuard,
}

/// End of a packet's way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The guard has dropped it.
    Dropped,
    Mesh,
    Uplink,
}

struct Bed {
    node: Namespace,
    member: Namespace,
    uplink: Namespace,
    pod: Namespace,
    applier: Applier,
    state: MeshState,
}

impl Bed {
    fn new() -> Self {
        let [node, member, uplink, pod] = [(); 4].map(|()| Namespace::new());
        node.sh("sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0 net.ipv4.ip_forward=1");
        join(&node, [("mesh0", &member, 64), ("up0", &uplink, 65), ("pod0", &pod, 66)]);
        node.sh(&format!("ip route add default via {OTHER_NODE}"));
        for to in [OTHER_POD, OTHER_NODE, OUTSIDE] {
            // A mesh device has no neighbours to ask; a veth has.
            node.sh(&format!("ip neigh replace {to} lladdr 02:00:00:00:00:01 dev mesh0"));
        }
        for end in [&member, &uplink] {
            end.sh(&format!(
                "nft 'table netdev judge {{ chain in {{ type filter hook ingress device eth0 priority 0; \
                 udp dport {{ {CLEAR}, {WIREGUARD} }} counter; }}; }}'"
            ));
        }
        let mut state = mesh(1420, &["10.5.0.0/16", "100.65.0.2/32"], &[]);
        state.bypass.nodes = vec![OTHER_NODE.parse().unwrap()];
        state.bypass.own = ["100.65.0.1/32", "100.66.0.0/24"].map(|it| it.parse().unwrap()).to_vec();
        state.uplinks = vec!["up0".to_owned()];
        let mut bed = Self { node, member, uplink, pod, applier: Applier::default(), state };
        bed.apply();
        bed
    }

    fn apply(&mut self) {
        self.node.run(|| self.applier.apply(&self.state).unwrap());
    }

    fn harms(&self) -> Vec<Harm> {
        let harm = |found: &Foreign| match found {
            Foreign::Packets(rule) => rule.harm,
            Foreign::Routing(rule) => panic!("{rule}"),
        };
        self.applier.foreign().iter().map(harm).collect()
    }

    /// Sends a packet, and finds out where it ends.
    fn way(&self, packet: Packet) -> Way {
        let before = self.counted();
        match packet {
            Packet::Forwarded => send(&self.pod, (OUTSIDE, CLEAR), (0, 0)),
            Packet::Sent => send(&self.node, (OTHER_POD, CLEAR), (0, 0)),
            Packet::WireGuard => send(&self.node, (OTHER_NODE, WIREGUARD), (WIREGUARD, FROM_WIREGUARD)),
        }
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let after = self.counted();
            let mut ends = [Way::Dropped, Way::Mesh, Way::Uplink].into_iter().zip(before.iter().zip(after));
            if let Some((way, _)) = ends.find(|(_, (before, after))| after > *before) {
                return way;
            }
            assert!(Instant::now() < deadline, "{packet:?} is nowhere");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Packets that the guard has dropped, that came to the mesh and that came to the uplink.
    fn counted(&self) -> [u64; 3] {
        let judge = "netdev judge";
        [(&self.node, "inet fairlead_guard"), (&self.member, judge), (&self.uplink, judge)].map(
            |(namespace, table)| {
                let rules = namespace.sh(&format!("nft list table {table}"));
                let counts = rules.split("packets ").skip(1).filter_map(|rest| rest.split(' ').next());
                counts.map(|count| count.parse::<u64>().unwrap()).sum()
            },
        )
    }

    /// Whether a packet of the other node arrives.
    fn hears_the_other_node(&self) -> bool {
        self.hears_at(0)
    }

    /// Whether a packet of the other node arrives at this port; 0 for any.
    fn hears_at(&self, port: u16) -> bool {
        let socket = self.node.run(|| UdpSocket::bind((NODE, port))).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        send(&self.uplink, (NODE, socket.local_addr().unwrap().port()), (0, 0));
        socket.recv_from(&mut [0; 8]).is_ok()
    }
}

/// A rule of another program leads a packet another way, and is named for it, with its place, until it is gone.
fn is_harmful(rule: &str, place: &str, packet: Packet, [before, after]: [Way; 2], harm: Harm) {
    let mut bed = Bed::new();
    assert_eq!((bed.way(packet), bed.harms()), (before, vec![]), "without {rule}");
    bed.node.sh(rule);
    assert_eq!(bed.way(packet), after, "{rule}");
    bed.apply();
    assert_eq!(bed.harms(), [harm], "{rule}");
    let found = bed.applier.foreign();
    assert_eq!(found[0].reason(), "ForeignPacketMark");
    assert!(found[0].to_string().contains(place), "{place} is not in {}", found[0]);
    bed.node.sh("nft flush ruleset");
    bed.apply();
    assert_eq!((bed.way(packet), bed.harms()), (before, vec![]), "after {rule}");
}

/// The shell command for a table of nftables with one rule.
fn nft(chain: &str, rule: &str) -> String {
    format!("nft 'table inet other {{ chain c {{ type {chain}; {rule}; }}; }}'")
}

#[test]
fn rules_that_take_wireguards_mark_are_named() {
    let route = nft("route hook output priority mangle", "meta mark set 0x1");
    let place = "chain inet other c (hook output, priority -150)";
    is_harmful(&route, place, Packet::WireGuard, [Way::Uplink, Way::Mesh], Harm::WireGuard);
    let filter = nft("filter hook output priority 10", "meta l4proto udp meta mark set ct mark");
    let place = "chain inet other c (hook output, priority 10)";
    is_harmful(&filter, place, Packet::WireGuard, [Way::Uplink, Way::Dropped], Harm::WireGuard);
    let shaping = "iptables-nft -t mangle -N UPLINKS; iptables-nft -t mangle -A POSTROUTING -j UPLINKS; \
         iptables-nft -t mangle -A UPLINKS -o up0 -m comment --comment shaping -j MARK --set-mark 6";
    let place = "chain ip mangle UPLINKS (reached from POSTROUTING, hook postrouting, priority -150)";
    is_harmful(shaping, place, Packet::WireGuard, [Way::Uplink, Way::Dropped], Harm::WireGuard);
}

#[test]
fn marks_that_mean_something_else_to_the_mesh_are_named() {
    let provider = nft("filter hook prerouting priority mangle", "iifname pod0 meta mark set 200");
    let place = "chain inet other c (hook prerouting, priority -150)";
    is_harmful(&provider, place, Packet::Forwarded, [Way::Uplink, Way::Mesh], Harm::IntoMesh);
    // NetBird's pull request 6289 would move its marks of what it forwards from 0x1BD20 there (`client/net/net.go`).
    let netbird = nft("filter hook prerouting priority mangle", "iifname pod0 meta mark set 0x1bd41");
    is_harmful(&netbird, place, Packet::Forwarded, [Way::Uplink, Way::Mesh], Harm::IntoMesh);
    let own = nft("route hook output priority mangle", "ip daddr 10.5.0.0/16 meta mark set 0x20");
    let place = "chain inet other c (hook output, priority -150)";
    is_harmful(&own, place, Packet::Sent, [Way::Mesh, Way::Uplink], Harm::ClearText);
    let late = nft("route hook output priority 10", "ip daddr 10.5.0.0/16 meta mark set 100");
    let place = "chain inet other c (hook output, priority 10)";
    is_harmful(&late, place, Packet::Sent, [Way::Mesh, Way::Dropped], Harm::PastMesh);
}

#[test]
fn what_a_named_rule_counts_is_told() {
    let mut bed = Bed::new();
    bed.node.sh("iptables-nft -t mangle -A OUTPUT -j MARK --set-mark 1");
    let told = |bed: &mut Bed| -> u64 {
        bed.apply();
        match &bed.applier.foreign()[..] {
            [Foreign::Packets(rule)] => rule.at_least,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(told(&mut bed), 0);
    assert_eq!(bed.way(Packet::WireGuard), Way::Mesh);
    assert_eq!(told(&mut bed), 1);
}

#[test]
fn marks_that_mean_nothing_to_the_mesh_change_no_way_and_are_not_named() {
    let mut bed = Bed::new();
    // As NetBird and Tailscale mark, Calico, Cilium, kube-proxy, and hosts with several uplinks that mark what has no mark.
    bed.node.sh("nft 'table inet other { \
         chain in { type filter hook prerouting priority mangle; iifname pod0 meta mark set 0x1bd20; \
             meta mark set meta mark & 0xff00ffff | 0x40000; meta mark set meta mark & 0x0000ffff | 0x10000; \
             meta mark set meta mark | 0x80; }; \
         chain late { type filter hook prerouting priority 10; iifname pod0 meta mark set 0x1; }; \
         chain out { type route hook output priority mangle; oifname lo accept; \
             meta mark set meta mark | 0x1004000; meta mark 0 meta mark set 0x2; }; \
         chain behind { type filter hook postrouting priority 100; meta mark set 0x1; }; }'; \
         iptables-nft -t mangle -A OUTPUT -m mark --mark 0 -j MARK --set-mark 1; \
         iptables-nft -t mangle -A PREROUTING -j MARK --set-xmark 0x4000/0x4000");
    // Cilium's rules, which also move that of the table local (`pkg/datapath/linux/linux_defaults/linux_defaults.go`).
    bed.node.sh(
        "ip route add default via 100.66.0.2 table 201; ip rule add pref 1 fwmark 0xe00/0xf00 lookup 201; \
         ip route add local default dev lo table 2004; ip rule add pref 9 fwmark 0x200/0xf00 lookup 2004; \
         ip rule add pref 100 lookup local; ip rule del pref 0 lookup local",
    );
    bed.apply();
    let ways = [Packet::Forwarded, Packet::Sent, Packet::WireGuard].map(|packet| bed.way(packet));
    assert_eq!((ways, bed.harms()), ([Way::Uplink, Way::Mesh, Way::Uplink], vec![]));
}

/// The bridge of a container engine has an address of the node, as an uplink has, and leads to no other node.
#[test]
fn rules_for_a_bridge_of_containers_change_no_way_and_are_not_named() {
    let mut bed = Bed::new();
    bed.node.sh("ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up; \
         nft 'table inet other { \
         chain in { type filter hook prerouting priority raw; iifname docker0 fib saddr . iif oif missing drop; }; \
         chain out { type route hook output priority mangle; oifname docker0 meta mark set 0x1; \
             oifname docker0 meta mark set 0x20; }; \
         chain late { type route hook output priority 10; oifname docker0 meta mark set 100; }; }'; \
         iptables-nft -t mangle -A POSTROUTING -o docker0 -j MARK --set-mark 6");
    bed.state.uplinks.push("docker0".to_owned());
    bed.apply();
    let ways = [Packet::Forwarded, Packet::Sent, Packet::WireGuard].map(|packet| bed.way(packet));
    assert_eq!((ways, bed.harms()), ([Way::Uplink, Way::Mesh, Way::Uplink], vec![]));
    // No rule of nftables changes with the route.
    bed.node.sh("ip route add 203.0.113.0/24 via 172.17.0.2 dev docker0");
    bed.apply();
    let mut harms = bed.harms();
    harms.sort_by_key(|harm| format!("{harm:?}"));
    let all = [Harm::ClearText, Harm::PastMesh, Harm::SourceCheck, Harm::WireGuard, Harm::WireGuard];
    assert_eq!(harms, all, "packets to other nodes may leave by it");
}

/// As keepalived's `virtual_server fwmark 64` wants them marked.
#[test]
fn marks_of_packets_to_addresses_of_the_node_are_not_named() {
    let mut bed = Bed::new();
    let mark = |bed: &Bed, address: &str| {
        bed.node.sh(&format!(
            "iptables-nft -t mangle -F PREROUTING; \
             iptables-nft -t mangle -A PREROUTING -d {address} -p udp -j MARK --set-mark 64"
        ));
    };
    mark(&bed, NODE);
    bed.apply();
    assert!(bed.hears_the_other_node());
    assert_eq!(bed.harms(), []);
    let floating = "100.65.0.100";
    mark(&bed, floating);
    bed.apply();
    assert_eq!(bed.harms(), [Harm::IntoMesh], "another host has the address");
    bed.node.sh(&format!("ip addr add {floating}/32 dev up0"));
    bed.apply();
    assert_eq!(bed.harms(), []);
    bed.node.sh(&format!("ip addr del {floating}/32 dev up0"));
    bed.apply();
    assert_eq!(bed.harms(), [Harm::IntoMesh], "it has moved on");
}

#[test]
fn a_check_of_sources_without_marks_drops_what_other_nodes_send_and_is_named() {
    let nft = |by: &str| {
        nft("filter hook prerouting priority raw", &format!("fib saddr . {by}iif oif missing drop"))
    };
    let iptables =
        |by: &str| format!("iptables-nft -t raw -A PREROUTING -i up0 -m rpfilter {by}--invert -j DROP");
    for (rule, drops) in
        [(nft(""), true), (nft("mark . "), false), (iptables(""), true), (iptables("--validmark "), false)]
    {
        let mut bed = Bed::new();
        assert!(bed.hears_the_other_node(), "without {rule}");
        bed.node.sh(&rule);
        bed.apply();
        assert_eq!(bed.hears_the_other_node(), !drops, "{rule}");
        let expected: &[Harm] = if drops { &[Harm::SourceCheck] } else { &[] };
        assert_eq!(bed.harms(), expected, "{rule}");
        if let [found] = &bed.applier.foreign()[..] {
            assert_eq!(found.reason(), "ForeignSourceCheck");
        }
    }
}

/// A pod's `hostPort` as the CNI plugin portmap translates it, by iptables and by nftables, a node port as kube-proxy does, and rules of administrators.
#[test]
fn rules_that_give_wireguards_port_to_another_program_are_named() {
    let prerouting = |rule: &str| nft("nat hook prerouting priority dstnat", rule);
    let portmap = "iptables-nft -t nat -N CNI-HOSTPORT-DNAT; iptables-nft -t nat -N CNI-DN-1; \
         iptables-nft -t nat -A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT; \
         iptables-nft -t nat -A CNI-HOSTPORT-DNAT -p udp -m comment --comment 'dnat name' -m multiport --dports 53,51820 -j CNI-DN-1; \
         iptables-nft -t nat -A CNI-DN-1 -p udp --dport 51820 -j DNAT --to-destination 100.66.0.2:51820";
    let portmap_nft = "nft 'table ip cni_hostport { chain hostip_hostports { }; \
         chain hostports { udp dport 51820 dnat to 100.66.0.2:51820 comment \"id\"; }; \
         chain prerouting { type nat hook prerouting priority dstnat; jump hostip_hostports; jump hostports; }; }'";
    let service = "nft 'table ip kube-proxy { \
         map ports { type inet_proto . inet_service : verdict; }; \
         chain endpoint { meta l4proto udp dnat to 100.66.0.2:51820; }; \
         chain service { numgen random mod 1 vmap { 0 : goto endpoint }; }; \
         chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }; \
         chain services { ip daddr 100.65.0.1 meta l4proto . th dport vmap @ports; }; }; \
         add element ip kube-proxy ports { udp . 51820 : goto service }'";
    let own = "chain inet other c (hook prerouting, priority -100)";
    for (rule, place) in [
        (prerouting("meta nfproto ipv4 udp dport 51820 counter dnat ip to 100.66.0.2"), own),
        (prerouting("iifname up0 udp dport 51000-52000 redirect to :5000"), own),
        (prerouting("udp dport { 53, 51820 } redirect to :5000"), own),
        (
            portmap.to_owned(),
            "chain ip nat CNI-DN-1 (reached from PREROUTING, hook prerouting, priority -100)",
        ),
        (portmap_nft.to_owned(), "chain ip cni_hostport hostports (reached from prerouting, hook prerouting"),
        (service.to_owned(), "chain ip kube-proxy endpoint (reached from nat-prerouting, hook prerouting"),
    ] {
        let mut bed = Bed::new();
        assert!(bed.hears_at(WIREGUARD), "without {rule}");
        bed.node.sh(&rule);
        bed.apply();
        assert!(!bed.hears_at(WIREGUARD), "{rule}");
        assert_eq!(bed.harms(), [Harm::Translation], "{rule}");
        let found = bed.applier.foreign();
        assert_eq!(found[0].reason(), "ForeignPortTranslation");
        assert!(found[0].to_string().contains(place), "{place} is not in {}", found[0]);
        bed.node.sh("nft flush ruleset");
        bed.apply();
        assert!(bed.hears_at(WIREGUARD) && bed.harms().is_empty(), "after {rule}");
    }
}

#[test]
fn rules_that_translate_other_packets_leave_wireguards_port_alone_and_are_not_named() {
    for rules in [
        "udp dport 51821 redirect to :5000; tcp dport 51820 redirect to :5000",
        "meta nfproto ipv4 ip daddr 100.65.0.100 udp dport 51820 redirect to :5000",
        "iifname docker0 udp dport 51820 redirect to :5000",
        "udp dport 51820 accept; udp dport 51000-52000 redirect to :5000",
        // By more ports than its own.
        "udp dport 1024-65535 redirect to :51820",
        "udp dport { 53, 5000 } redirect to :51820",
    ] {
        let mut bed = Bed::new();
        bed.node.sh(
            "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up",
        );
        bed.state.uplinks.push("docker0".to_owned());
        bed.node.sh(&nft("nat hook prerouting priority dstnat", rules));
        bed.apply();
        assert!(bed.hears_at(WIREGUARD), "{rules}");
        assert_eq!(bed.harms(), [], "{rules}");
    }
}

/// Rules that come before all of the mesh's: one without a number, which the kernel puts before all others but its own, and that of Calico's WireGuard
/// (`felix/wireguard/wireguard.go`). Their table has the pods of the other node alone.
#[test]
fn routing_rules_that_come_first_are_named_and_what_they_lead_out_is_dropped() {
    for rule in ["rule add lookup 52", "rule add pref 99 not fwmark 0x100000/0x100000 lookup 52"] {
        let mut bed = tunnels::Bed::new();
        bed.a.node.sh(&format!(
            "ip route add 10.77.2.0/24 dev exit0 table 52; ip -6 route add fd77:2::/64 dev exit0 table 52; \
             ip {rule}; ip -6 {rule}"
        ));
        let named = |bed: &mut tunnels::Bed| -> Vec<u64> {
            bed.apply();
            let found = bed.a.foreign();
            assert!(found.iter().all(|it| it.reason() == "ForeignRoutingRule"), "{found:?}");
            let counted = |it: &Foreign| match it {
                Foreign::Packets(rule) => panic!("{rule}"),
                Foreign::Routing(rule) => rule.at_least,
            };
            found.iter().map(counted).collect()
        };
        assert_eq!(named(&mut bed), [0, 0], "{rule}: one of each family");
        assert_eq!(bed.leaks(), 0, "{rule}");
        // Of the pod and of the node, to both addresses of the other pod.
        assert_eq!(named(&mut bed), [10, 10], "{rule}: {} packets", 4 * DATAGRAMS);
        bed.a.node.sh("nft delete table inet fairlead_guard");
        assert!(bed.leaks() > 0, "{rule}: without the guard it leaves in clear text");
        bed.a.node.sh("ip rule del pref 99; ip -6 rule del pref 99");
        assert!(named(&mut bed).is_empty(), "{rule} is gone");
        assert_kept(everything(&bed), rule);
    }
}

/// Through real tunnels: the rules without marks keep in the mesh what has lost the mesh's.
#[test]
fn a_mark_that_another_program_sets_after_the_mesh_leads_nothing_out_and_is_not_named() {
    let mut bed = tunnels::Bed::new();
    for mark in [0x1_u32, 0x20, 0x60, 0x64] {
        bed.a.node.sh(&format!(
            "nft 'table inet other; delete table inet other; table inet other {{ \
             chain forwarded {{ type filter hook prerouting priority 10; iifname pod0 counter meta mark set {mark:#x}; }}; \
             chain sent {{ type route hook output priority 10; meta mark & 0x60 == 0x40 counter meta mark set 0x1; }}; }}'"
        ));
        assert_kept(everything(&bed), &format!("{mark:#x}"));
        let counted = bed.a.node.sh("nft list table inet other");
        assert!(!counted.contains("packets 0 "), "{mark:#x}: {counted}");
        bed.apply();
        assert_eq!(bed.a.foreign(), [], "{mark:#x}");
    }
    bed.a.node.sh(WITHOUT_GUARD);
    let traffic = everything(&bed);
    assert!(traffic.clear >= DATAGRAMS, "without the rules it leaves in clear text: {traffic:?}");
}

//! IP tunnels between nodes on two subnets, on kernels that have them. `FAIRLEAD_KERNEL_TUNNELS=1` says that this one must; without it,
//! a kernel without them must be reported as such.

use std::net::IpAddr;

use crate::mesh_common::{Namespace, apply};
use fairlead_address::IpFamily;
use fairlead_dataplane::encapsulation::{Applier, Encapsulation, Tunnels, remotes_in_use, remove_all};
use fairlead_dataplane::mesh::{Bypass, MeshState, PlainRoute};
use fairlead_netlink::changes_sent;

/// The node's internal addresses, and those of its pod.
const NODES: [[&str; 4]; 2] =
    [["192.168.1.1", "fd01::1", "10.1.0.1", "fd11::1"], ["192.168.2.2", "fd02::2", "10.2.0.1", "fd12::1"]];
const UPLINK_MTU: u32 = 1400;

/// Two nodes, and a router between their subnets that has addresses which are those of no node.
struct Bed {
    nodes: [Namespace; 2],
    router: Namespace,
}

impl Bed {
    fn new() -> Self {
        let bed = Self { nodes: [Namespace::new(), Namespace::new()], router: Namespace::new() };
        let forward = "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1";
        bed.router.sh(forward);
        for (node, (number, [v4, v6, pod_v4, pod_v6])) in bed.nodes.iter().zip((1..).zip(NODES)) {
            let link = format!("to{number}");
            bed.router.veth(&link, node, "eth0");
            bed.router.sh(&format!(
                "ip addr add 192.168.{number}.254/24 dev {link}; ip addr add fd0{number}::fe/64 dev {link} nodad
                 ip link set {link} mtu {UPLINK_MTU}"
            ));
            node.sh(forward);
            node.sh(&format!(
                "sysctl -qw net.ipv4.conf.all.rp_filter=1 net.ipv4.conf.default.rp_filter=1
                 ip link set eth0 mtu {UPLINK_MTU}
                 ip addr add {v4}/24 dev eth0; ip addr add {v6}/64 dev eth0 nodad
                 ip route add default via 192.168.{number}.254; ip route add default via fd0{number}::fe
                 ip link add mesh0 type veth peer name far0; ip link set mesh0 up; ip link set far0 up
                 ip addr add {pod_v4}/32 dev lo; ip addr add {pod_v6}/128 dev lo nodad"
            ));
        }
        bed
    }

    /// Desired state of node `own`, where these may send to it.
    fn wanted(own: usize, senders: &[&str]) -> Encapsulation {
        Encapsulation {
            local: NODES[own][..2].iter().map(|text| text.parse().unwrap()).collect(),
            senders: senders.iter().map(|text| text.parse().unwrap()).collect(),
            uplink_mtu: UPLINK_MTU,
        }
    }

    fn encapsulate(&self, applier: &mut Applier, own: usize, senders: &[&str]) -> Tunnels {
        self.nodes[own].run(|| applier.apply(&Self::wanted(own, senders)).unwrap())
    }

    /// Leads packets to the other node's pod into the tunnels.
    fn lead(&self, own: usize, tunnels: &Tunnels) {
        let other = NODES[1 - own];
        let route = |destination: &str, gateway: &str| {
            let gateway: IpAddr = gateway.parse().unwrap();
            let link = *tunnels[&IpFamily::of(gateway)].as_ref().unwrap();
            let destination = destination.parse::<IpAddr>().unwrap().into();
            PlainRoute { destination, gateway, link, is_tunnel: true }
        };
        let [v4, v6, pod_v4, pod_v6] = other;
        let plain = vec![route(pod_v4, v4), route(pod_v6, v6)];
        let (targets_v4, targets_v6) =
            plain.iter().map(|it| it.destination).partition(|it| it.addr().is_ipv4());
        let state = MeshState {
            interface: "mesh0".to_owned(),
            mtu: 1320,
            addresses: Vec::new(),
            targets_v4,
            targets_v6,
            bypass: Bypass::default(),
            plain,
            narrow: Vec::new(),
            masqueraded: Vec::new(),
            without_default: Vec::new(),
            listen_port: 51820,
            sources: Vec::new(),
            // Answers to the host itself come by it, and its reverse path filter is strict.
            uplinks: vec!["eth0".to_owned()],
        };
        self.nodes[own].run(|| apply(&state).unwrap());
    }

    fn pings(&self, from: &str, to: &str, more: &str) -> bool {
        let ping = format!("ping -n -c 1 -W 2 -I {from} {more} {to} >/dev/null 2>&1 && echo yes || echo no");
        self.nodes[0].sh(&ping).trim() == "yes"
    }

    /// Number of packets of an IP protocol that the router has forwarded.
    fn count(&self, chain: &str) -> u64 {
        let listed = self.router.sh(&format!("nft list chain inet judge {chain}"));
        let counts = listed
            .lines()
            .filter_map(|line| line.split_once("packets ")?.1.split(' ').next()?.parse::<u64>().ok());
        counts.sum()
    }
}

#[test]
fn packets_of_nodes_and_pods_cross_subnets_in_ip_tunnels() {
    let bed = Bed::new();
    let mut appliers = [Applier::default(), Applier::default()];
    let tunnels = bed.encapsulate(&mut appliers[0], 0, &NODES[1][..2]);
    if tunnels.values().all(Result::is_err) {
        assert!(std::env::var_os("FAIRLEAD_KERNEL_TUNNELS").is_none(), "{tunnels:?}");
        testbed_netns::skipped(
            "this kernel has no IP tunnels, and FAIRLEAD_KERNEL_TUNNELS does not demand them",
        );
        return a_missing_module_is_reported(&bed, &tunnels);
    }
    let others = bed.encapsulate(&mut appliers[1], 1, &NODES[0][..2]);
    bed.lead(0, &tunnels);
    bed.lead(1, &others);
    bed.router.sh("nft add table inet judge
         nft 'add chain inet judge inside { type filter hook forward priority 0; }'
         nft 'add chain inet judge outside { type filter hook forward priority 1; }'
         nft add rule inet judge inside meta l4proto { 4, 41 } counter accept
         nft 'add rule inet judge outside ip daddr { 10.0.0.0/8 } counter'
         nft 'add rule inet judge outside meta l4proto { icmp, icmpv6 } counter'");
    let [v4, v6, pod_v4, pod_v6] = NODES[0];
    let [.., other_v4, other_v6] = NODES[1];
    for (from, to) in [(pod_v4, other_v4), (pod_v6, other_v6)] {
        assert!(
            bed.pings(from, to, ""),
            "{from} to {to}: {}",
            bed.nodes[0].sh("ip -s -d link; ip route show table 180")
        );
    }
    assert_eq!((bed.count("inside"), bed.count("outside")), (4, 0), "all of them, both ways");
    assert!(bed.pings(v4, other_v4, "") && bed.pings(v6, other_v6, ""), "hosts and pods");
    the_longest_packets_pass(&bed);
    only_known_nodes_may_send(&bed, &mut appliers[1]);
    the_same_again_sends_nothing_and_what_is_removed_comes_back(&bed);
}

/// The MTU is that of the uplink without the outer header, and packets of that length pass.
fn the_longest_packets_pass(bed: &Bed) {
    let shown = bed.nodes[0].sh("ip -d link show fairlead_ipip; ip -d link show fairlead_ip6tnl");
    for word in [
        "mtu 1380",
        "ipip ipip remote any local 192.168.1.1 ttl 64",
        "mtu 1360",
        "ip6tnl ip6ip6 remote any local fd01::1",
        "encaplimit none",
    ] {
        assert!(shown.contains(word), "`{word}` is missing in\n{shown}");
    }
    let [.., pod_v4, pod_v6] = NODES[0];
    let [.., other_v4, other_v6] = NODES[1];
    // Without the headers of IP and ICMP.
    assert!(bed.pings(pod_v4, other_v4, "-M do -s 1352"), "1380 bytes");
    assert!(!bed.pings(pod_v4, other_v4, "-M do -s 1353"), "1381 bytes");
    assert!(bed.pings(pod_v6, other_v6, "-M do -s 1312"), "1360 bytes");
    assert!(!bed.pings(pod_v6, other_v6, "-M do -s 1313"), "1361 bytes");
}

/// The router is no node. It comes into the second node's tunnel only once that node knows it.
fn only_known_nodes_may_send(bed: &Bed, applier: &mut Applier) {
    bed.router.sh(
        "ip link add liar type ipip local 192.168.2.254 remote 192.168.2.2; ip link set liar up
         ip link add liar6 type ip6tnl mode ip6ip6 local fd02::fe remote fd02::2 encaplimit none; ip link set liar6 up
         ip addr add 10.9.0.9/32 dev lo; ip addr add fd19::9/128 dev lo nodad
         ip route add 10.2.0.1 dev liar src 10.9.0.9; ip route add fd12::1 dev liar6 src fd19::9",
    );
    let node = &bed.nodes[1];
    let received = || [received_by(node, "fairlead_ipip"), received_by(node, "fairlead_ip6tnl")];
    let send =
        || bed.router.sh("for to in 10.2.0.1 fd12::1; do ping -n -c 1 -W 1 $to >/dev/null || true; done");
    let before = received();
    send();
    assert_eq!(received(), before, "it is no node");
    let reads = applier.table_reads();
    let with_router = [NODES[0][0], NODES[0][1], "192.168.2.254", "fd02::fe"];
    bed.encapsulate(applier, 1, &with_router);
    assert_eq!(applier.table_reads(), reads + 1, "another applier of the mesh has changed nftables since");
    send();
    assert_eq!(received(), before.map(|count| count + 1), "now it is one");
    bed.encapsulate(applier, 1, &NODES[0][..2]);
    assert_eq!(applier.table_reads(), reads + 1, "only elements change");
    // A tunnel of another program that names the same router keeps what is its own.
    node.sh("ip link add theirs type ipip local 192.168.2.2 remote 192.168.2.254; ip link set theirs up");
    bed.encapsulate(applier, 1, &NODES[0][..2]);
    bed.router.sh("ping -n -c 1 -W 1 10.2.0.1 >/dev/null || true");
    assert_eq!(received_by(node, "theirs"), 1);
}

/// Number of packets that have come out of a link.
fn received_by(node: &Namespace, link: &str) -> u64 {
    let shown = node.sh(&format!("ip -s link show dev {link}"));
    let counts = shown.lines().skip_while(|line| !line.trim_start().starts_with("RX:")).nth(1).unwrap();
    counts.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn the_same_again_sends_nothing_and_what_is_removed_comes_back(bed: &Bed) {
    let node = &bed.nodes[0];
    let again = || {
        // As a program that was just started.
        node.run(|| Applier::default().apply(&Bed::wanted(0, &NODES[1][..2])).unwrap())
    };
    let before = changes_sent();
    let tunnels = again();
    assert_eq!(changes_sent(), before, "adopted");
    let mut remotes = node.run(|| remotes_in_use().unwrap());
    remotes.sort();
    remotes.dedup();
    let expected: Vec<IpAddr> = NODES[1][..2].iter().map(|text| text.parse().unwrap()).collect();
    assert_eq!(remotes, expected, "an earlier program's routes are known");
    node.sh("ip link delete fairlead_ipip; nft delete table inet fairlead_encapsulation; ip link set fairlead_ip6tnl down mtu 1300");
    let tunnels_again = again();
    assert_ne!(tunnels_again[&IpFamily::V4], tunnels[&IpFamily::V4]);
    bed.lead(0, &tunnels_again);
    assert!(bed.pings(NODES[0][2], NODES[1][2], "") && bed.pings(NODES[0][3], NODES[1][3], ""));
    the_longest_packets_pass(bed);
    // Another address of the node.
    let moved = Encapsulation { local: vec!["192.168.1.9".parse().unwrap()], ..Bed::wanted(0, &[]) };
    node.run(|| Applier::default().apply(&moved).unwrap());
    let shown = node.sh("ip -d link");
    assert!(shown.contains("local 192.168.1.9") && !shown.contains("fairlead_ip6tnl"), "{shown}");
    node.run(|| remove_all().unwrap());
    let shown = node.sh("ip link; nft list tables");
    assert!(!shown.contains("fairlead_ipip") && !shown.contains("fairlead_encapsulation"), "{shown}");
}

fn a_missing_module_is_reported(bed: &Bed, tunnels: &Tunnels) {
    for (family, module) in [(IpFamily::V4, "module ipip"), (IpFamily::V6, "module ip6_tunnel")] {
        let reason = tunnels[&family].as_ref().unwrap_err();
        assert!(reason.contains("the kernel has no ip") && reason.contains(module), "{reason}");
    }
    bed.nodes[0].run(|| {
        assert!(remotes_in_use().unwrap().is_empty());
        remove_all().unwrap();
    });
    assert!(!bed.nodes[0].sh("nft list tables").contains("fairlead_encapsulation"));
}

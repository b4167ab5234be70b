//! Traffic that leaves a site of a mesh and is not encrypted.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use fairlead_demo::judge::counters;
use fairlead_demo::{World, topology};
use testbed_lab::{NatSite, Router, eventually};

use crate::outage::{self, TIMEOUT, gaps_are_within, node, udp};
use crate::site::reached;

/// Rules that count, on a router, packets with addresses of pods: traffic with the Internet beside WireGuard, the relay and the API server.
pub(crate) const WITH_PODS: &str = "nft add table inet judge\n\
    nft 'add chain inet judge clear { type filter hook forward priority -300; }'\n\
    nft 'add rule inet judge clear ip saddr 10.64.0.0/16 counter'\n\
    nft 'add rule inet judge clear ip daddr 10.64.0.0/16 counter'\n\
    nft 'add rule inet judge clear ip6 saddr fd02:fa1e::/112 counter'\n\
    nft 'add rule inet judge clear ip6 daddr fd02:fa1e::/112 counter'\n\
    nft 'add rule inet judge clear udp dport 51820 counter'\n\
    nft 'add rule inet judge clear udp sport 51820 counter'\n";

/// Rules that count, on the Internet, packets with addresses that nodes, pods and the mesh have inside: only nodes that look for each other
/// at addresses of their own LANs send that, encrypted.
pub(crate) const INSIDE: &str = "nft add table inet judge\n\
    nft 'add chain inet judge inside { type filter hook prerouting priority -300; }'\n\
    nft 'add set inet judge ours { type ipv4_addr; flags interval; elements = { 10.0.0.0/8, 100.64.0.0/10, 192.168.0.0/16 }; }'\n\
    nft 'add rule inet judge inside ip saddr != @ours ip daddr @ours udp dport 51820 counter accept'\n\
    nft 'add rule inet judge inside ip saddr @ours counter'\n\
    nft 'add rule inet judge inside ip daddr @ours counter'\n\
    nft 'add rule inet judge inside ip6 saddr fc00::/7 counter'\n\
    nft 'add rule inet judge inside ip6 daddr fc00::/7 counter'\n";

/// Packets between pods and nodes of different locations, to the addresses that nodes have on their LAN and on the mesh.
pub(crate) fn nodes_are_reached_at_their_inner_addresses(world: &World) {
    for node in &world.nodes {
        // What they answer over IPv6 enters the mesh all the same.
        assert_eq!(node.host.shell("ip -6 route show default").unwrap(), "", "{}", node.name);
    }
    for (from, to) in [("home-3", "farm-3"), ("farm-2", "home-3"), ("cloud-3", "home-2")] {
        let mesh_addresses = || {
            let shown = node(world, to).host.shell("ip -o addr show dev wire_kube scope global")?;
            let addresses = shown.lines().filter_map(|line| line.split_whitespace().nth(3)?.split_once('/'));
            let addresses: Vec<String> = addresses.map(|(address, _)| address.to_owned()).collect();
            ensure!(addresses.iter().any(|it| it.starts_with("100.100.")), "{to}: {shown}");
            ensure!(addresses.iter().any(|it| it.starts_with("fd")), "{to}: {shown}");
            Ok(addresses)
        };
        let own = node(world, to).host.address().to_string();
        for address in eventually(TIMEOUT, mesh_addresses).unwrap().into_iter().chain([own]) {
            reached(world, from, &address);
        }
    }
}

/// Packets that a router forwarded with addresses of pods, and those of WireGuard.
pub(crate) fn forwarded(router: &Router) -> (u64, u64) {
    let counts = counters(&router.shell("nft -j list chain inet judge clear").unwrap()).unwrap();
    (counts[..4].iter().sum(), counts[4..].iter().sum())
}

/// Nothing is there that nodes should have encrypted: [`INSIDE`].
pub(crate) fn none_is_on_the_internet(world: &World) {
    let listed = world.lab().internet().shell("nft -j list chain inet judge inside").unwrap();
    let inside = counters(&listed).unwrap();
    println!(
        "on the Internet: {} packets to ports of WireGuard at addresses of LANs, others with inner addresses: {:?}",
        inside[0],
        &inside[1..]
    );
    assert_eq!(inside[1..].iter().sum::<u64>(), 0, "{listed}");
}

/// Parts of a node that keep packets in the mesh, and commands of another program that take each away (docs/mesh.md, "Rules and tables of other
/// programs").
const PARTS: [(&str, &str); 3] = [
    ("the marks", "nft delete table inet talos_kubespan"),
    ("the guard", "nft delete table inet fairlead_guard"),
    (
        "the first rules",
        "for pref in 100 101 102 103 104 105; do for family in -4 -6; do \
         while ip $family rule del pref $pref 2>/dev/null; do :; done; done; done",
    ),
];
/// Longest gap in traffic: the guard drops what the rules do not lead into the mesh until they are there again.
const GAP: Duration = Duration::from_secs(5);

/// Two of three lines are gone at once, each pair after the other: the third holds until the node program has made them anew.
#[test]
fn nothing_is_in_clear_text_while_two_parts_of_a_node_are_gone_at_once() {
    let world = outage::mesh_of(&topology::two_sites());
    let routers: Vec<&Router> = world.sites.iter().map(NatSite::router).collect();
    for router in &routers {
        router.shell(WITH_PODS).unwrap();
    }
    let host = &node(&world, "office-1").host;
    let shown = || {
        let script = "(nft list tables inet; ip rule; ip -6 rule) | grep -E 'table inet|proto 30' | sort";
        host.shell(script).unwrap().lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>()
    };
    let whole = shown();
    let flows = [udp(&world, "office-1", "cloud-1"), udp(&world, "cloud-1", "office-1")];
    let pairs = [(0, 1), (0, 2), (1, 2)].map(|(one, other): (usize, usize)| (PARTS[one], PARTS[other]));
    for ((one, delete), (other, delete_too)) in pairs {
        let mark = Instant::now();
        host.shell(&format!("{delete}; {delete_too}")).unwrap();
        while shown() != whole {
            assert!(mark.elapsed() < TIMEOUT, "{:#?} instead of {whole:#?}", shown());
            thread::sleep(Duration::from_millis(5));
        }
        println!("{one} and {other} were gone for {:.2?} at most", mark.elapsed());
        thread::sleep(Duration::from_secs(2));
        gaps_are_within(&format!("without {one} and {other}"), &flows, mark, GAP);
        for router in &routers {
            let (clear, tunnels) = forwarded(router);
            assert!(
                clear == 0 && tunnels > 0,
                "{} without {one} and {other}: {clear} in clear text, {tunnels} of WireGuard",
                router.name()
            );
        }
    } // A rule before all of them leads packets out: the guard drops them, and users hear of it.
    host.shell("ip rule add pref 50 lookup main").unwrap();
    let named = || {
        let message = world.notes("reason=ForeignRoutingRule")?;
        ensure!(message.contains("50"), "{message:?}");
        Ok(message)
    };
    println!("{}", eventually(TIMEOUT, named).unwrap());
    host.shell("ip rule del pref 50").unwrap();
    let clear: u64 = routers.iter().map(|router| forwarded(router).0).sum();
    assert_eq!(clear, 0, "in clear text, by a rule of another program");
}

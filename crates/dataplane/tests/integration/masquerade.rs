//! Pods that reach hosts outside of the cluster, through a node whose network knows no route to pods.

use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use fairlead_dataplane::masquerade::{self, Masquerade};
use fairlead_dataplane::mesh::{Applier, Bypass, MeshState, PlainRoute};
use fairlead_dataplane::nft_table::Applied;
use fairlead_netlink::netns::Netns;
use ipnet::IpNet;
use nix::libc::linger;
use nix::sys::socket::{setsockopt, sockopt};
use testbed_netns::{sh_in, try_sh_in};

use crate::pods_common::{Host, NODE, NODE_V6, ping, spec};

const POD: [&str; 2] = ["10.1.0.5", "fd00:1::5"];
/// A host on the node's network, and another node there that knows the way to pods.
const SERVER: [&str; 2] = ["192.0.2.20", "2001:db8::20"];
const OTHER_NODE: [&str; 2] = ["192.0.2.11", "2001:db8::11"];

fn prefixes(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn wanted() -> Masquerade {
    Masquerade {
        pods: prefixes(&["10.1.0.0/16", "fd00:1::/64"]),
        cluster: prefixes(&["10.1.0.0/16", "fd00:1::/64", "192.0.2.11/32", "2001:db8::11/128"]),
        mesh_devices: vec!["wire_kube".to_owned()],
    }
}

/// A node with two pods; its network has a server without any route to pods, and another node with one.
fn bed() -> (Host, Netns, Netns) {
    let (host, pod, other) = (Host::new(), Netns::create().unwrap(), Netns::create().unwrap());
    host.add(&spec(&pod, "a", Some(POD[0]), Some(POD[1]))).unwrap();
    host.add(&spec(&other, "b", Some("10.1.0.6"), Some("fd00:1::6"))).unwrap();
    sh_in(&host.network, "ip link set far up");
    for address in SERVER.iter().chain(&OTHER_NODE) {
        let length = if address.contains(':') { 64 } else { 24 };
        sh_in(&host.network, &format!("ip addr add {address}/{length} dev far nodad"));
    }
    (host, pod, other)
}

/// The source that a server at `to` sees of a datagram of `from`.
fn source(from: &Netns, server: &Netns, to: &str) -> IpAddr {
    source_of((from, if to.contains(':') { "::" } else { "0.0.0.0" }), server, to)
}

/// The same of a datagram from this address of `from`.
fn source_of((from, own): (&Netns, &str), server: &Netns, to: &str) -> IpAddr {
    // A port of the kernel's choice: a program that another test starts holds the last socket until it runs.
    let socket = server.run(|| UdpSocket::bind((to, 0)).unwrap()).unwrap();
    let port = socket.local_addr().unwrap().port();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    from.run(|| UdpSocket::bind((own, 0)).unwrap().send_to(b"x", (to, port)).unwrap()).unwrap();
    socket.recv_from(&mut [0; 8]).unwrap().1.ip()
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn a_pod_reaches_the_outside_by_the_nodes_address_and_the_cluster_by_its_own() {
    let (host, pod, other) = bed();
    for server in SERVER {
        assert!(try_sh_in(&pod, &format!("ping -c 1 -W 1 {server}")).is_err(), "there is a route back");
    }
    host.at(|| masquerade::apply(&wanted()).unwrap());
    for (server, node) in SERVER.iter().zip([NODE, NODE_V6]) {
        ping(&pod, server);
        assert_eq!(source(&pod, &host.network, server), address(node));
    }
    for (own, node) in POD.iter().zip(OTHER_NODE) {
        assert_eq!(source(&pod, &host.network, node), address(own), "another node sees the pod");
    }
    for (own, neighbour) in POD.iter().zip(["10.1.0.6", "fd00:1::6"]) {
        assert_eq!(source(&pod, &other, neighbour), address(own), "another pod sees the pod");
    }
    for (own, node) in POD.iter().zip([NODE, NODE_V6]) {
        assert_eq!(source(&pod, &host.netns, node), address(own), "the node itself sees the pod");
        assert_eq!(source(&host.netns, &pod, own), address(node), "and the pod the node");
    }
}

#[test]
fn what_leaves_by_the_mesh_keeps_its_source_whatever_its_destination() {
    let (host, pod, _other) = bed();
    let by_uplink = Masquerade { mesh_devices: vec!["uplink".to_owned()], ..wanted() };
    host.at(|| masquerade::apply(&by_uplink).unwrap());
    for (own, server) in POD.iter().zip(SERVER) {
        assert_eq!(source(&pod, &host.network, server), address(own));
    }
}

/// With the granularities `cross` and `location` a neighbour's addresses are in the mesh, and packets to it take a plain route. One that is bypassed,
/// because it is down, is not in the mesh: no network between the two need let a pod's address pass.
#[test]
fn a_neighbour_in_the_mesh_sees_the_pod_and_one_that_is_bypassed_the_node() {
    let (host, pod, _other) = bed();
    host.sh("ip link add mesh0 type veth peer name far0");
    let link = host.sh("ip -o link show uplink | cut -d: -f1").trim().parse().unwrap();
    let plain = |destination: &str, gateway: &str| PlainRoute {
        destination: destination.parse().unwrap(),
        gateway: gateway.parse().unwrap(),
        link,
        is_tunnel: false,
    };
    // The second node is behind the neighbour, as behind the gateway of a location.
    sh_in(&host.network, "ip addr add 198.51.100.4/32 dev far; ip addr add 2001:db8:4::4/128 dev far nodad");
    let of_neighbours = ["192.0.2.11/32", "198.51.100.4/32"];
    let of_neighbours_v6 = ["2001:db8::11/128", "2001:db8:4::4/128"];
    let state = MeshState {
        targets_v4: prefixes(&of_neighbours),
        targets_v6: prefixes(&of_neighbours_v6),
        masqueraded: Vec::new(),
        plain: of_neighbours
            .iter()
            .map(|it| plain(it, OTHER_NODE[0]))
            .chain(of_neighbours_v6.iter().map(|it| plain(it, OTHER_NODE[1])))
            .collect(),
        ..mesh()
    };
    let of_pools = Masquerade { cluster: wanted().pods, mesh_devices: vec!["mesh0".to_owned()], ..wanted() };
    host.at(|| masquerade::apply(&of_pools).unwrap());
    let mut mesh_table = Applier::default();
    host.at(|| mesh_table.apply(&state).unwrap());
    for (own, nodes) in POD.iter().zip([[OTHER_NODE[0], "198.51.100.4"], [OTHER_NODE[1], "2001:db8:4::4"]]) {
        for node in nodes {
            assert_eq!(source(&pod, &host.network, node), address(own), "{node}");
        }
    }
    for (server, node) in SERVER.iter().zip([NODE, NODE_V6]) {
        assert_eq!(source(&pod, &host.network, server), address(node), "which is no member");
    }
    let bypassed = MeshState { targets_v4: Vec::new(), targets_v6: Vec::new(), ..state };
    host.at(|| mesh_table.apply(&bypassed).unwrap());
    for (neighbour, node) in OTHER_NODE.iter().zip([NODE, NODE_V6]) {
        assert_eq!(source(&pod, &host.network, neighbour), address(node));
    }
}

#[test]
fn the_table_is_changed_by_its_elements_and_removed_when_nothing_is_masqueraded() {
    let (host, _pod, _other) = bed();
    let apply = |wanted: &Masquerade| host.at(|| masquerade::apply(wanted).unwrap());
    assert_eq!(apply(&Masquerade::default()), None);
    assert_eq!(apply(&wanted()), Some(Applied::Rebuilt));
    assert_eq!(apply(&wanted()), Some(Applied::Unchanged));
    let table = host.sh("nft list table inet fairlead_masquerade");
    for line in [
        "type nat hook postrouting priority srcnat",
        "oifgroup 116 accept",
        "oifname \"wire_kube\" accept",
        "meta mark & 0x00000060 == 0x00000040 accept",
        "ip daddr @cluster_ipv4 accept",
        "ip saddr @pods_ipv4 masquerade fully-random",
        "ip6 saddr @pods_ipv6 masquerade fully-random",
        "ip saddr @pods_ipv4 ct state & invalid == invalid counter",
    ] {
        assert!(table.contains(line), "{line} is not in {table}");
    }
    let mut more = wanted();
    more.cluster.extend(prefixes(&["203.0.113.0/24"]));
    assert_eq!(apply(&more), Some(Applied::Elements { deleted: 0, added: 1 }));
    assert_eq!(apply(&Masquerade::default()), None);
    assert_eq!(host.sh("nft list tables"), "");
}

/// Messages that a connection carried in both directions by turns.
fn talk(client: &mut TcpStream, server: &mut TcpStream) -> io::Result<()> {
    for _ in 0..3 {
        client.write_all(b"question")?;
        server.read_exact(&mut [0; 8])?;
        server.write_all(b"answer")?;
        client.read_exact(&mut [0; 6])?;
    }
    Ok(())
}

#[test]
fn connections_that_are_translated_last_when_masquerading_is_switched_off_and_new_ones_are_not() {
    let off = Masquerade { pods: Vec::new(), ..wanted() };
    for (server, own) in SERVER.iter().zip(POD) {
        let (host, pod, _other) = bed();
        let apply = |wanted: &Masquerade| host.at(|| masquerade::apply(wanted).unwrap());
        apply(&wanted());
        let listener = host.network.run(|| TcpListener::bind((*server, 0)).unwrap()).unwrap();
        let to = listener.local_addr().unwrap();
        let mut client = pod.run(|| TcpStream::connect(to).unwrap()).unwrap();
        let mut accepted = listener.accept().unwrap().0;
        for stream in [&client, &accepted] {
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        }
        talk(&mut client, &mut accepted).unwrap();
        sh_in(
            &host.network,
            "nft 'table inet judge { chain in { type filter hook prerouting priority -300; \
             ip saddr 10.1.0.0/16 tcp dport != 0 counter; ip6 saddr fd00:1::/64 tcp dport != 0 counter; }; }'",
        );
        assert!(matches!(apply(&off), Some(Applied::Elements { added: 0, .. })));
        talk(&mut client, &mut accepted).unwrap_or_else(|error| panic!("{server}: {error}"));
        let counted = sh_in(&host.network, "nft list table inet judge");
        assert_eq!(counted.matches("packets 0 ").count(), 2, "packets have the pod's address: {counted}");
        assert_eq!(source(&pod, &host.network, server), address(own), "a new one is not masqueraded");
        assert_eq!(apply(&off), Some(Applied::Unchanged), "it is still needed");
        drop((client, accepted));
        let end = Instant::now() + Duration::from_secs(20);
        while apply(&off).is_some() {
            assert!(Instant::now() < end, "{}", host.sh("nft list ruleset; conntrack -L 2>&1"));
            thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(host.sh("nft list tables"), "");
    }
}

/// A reset of a connection that this node has not seen begin, as after one that left by an egress gateway until now: no chain translates it.
#[test]
fn packets_that_belong_to_no_connection_do_not_leave_with_a_pods_address() {
    let (host, pod, _other) = bed();
    let resets = |server: &str| {
        let listener = host.network.run(|| TcpListener::bind((server, 0)).unwrap()).unwrap();
        let to = listener.local_addr().unwrap();
        let client = pod.run(|| TcpStream::connect(to).unwrap()).unwrap();
        let _accepted = listener.accept().unwrap();
        host.sh("conntrack -F 2>/dev/null");
        setsockopt(&client, sockopt::Linger, &linger { l_onoff: 1, l_linger: 0 }).unwrap();
        drop(client);
        ping(&pod, server);
        sh_in(&host.network, "nft list table inet judge").matches("packets 0 ").count() < 2
    };
    sh_in(
        &host.network,
        "nft 'table inet judge { chain in { type filter hook prerouting priority -300; \
         ip saddr 10.1.0.0/16 tcp flags rst counter; ip6 saddr fd00:1::/64 tcp flags rst counter; }; }'",
    );
    host.at(|| masquerade::apply(&wanted()).unwrap());
    for server in SERVER {
        assert!(!resets(server), "{server} saw the pod's address");
    }
    host.sh("nft flush chain inet fairlead_masquerade untranslated");
    assert!(resets(SERVER[0]), "without that rule it leaves with the pod's address");
}

#[test]
fn a_source_address_of_a_gateway_stays_as_it_is_in_no_pool() {
    let (host, pod, _other) = bed();
    host.at(|| masquerade::apply(&wanted()).unwrap());
    let held = "198.51.100.7";
    sh_in(&pod, &format!("ip addr add {held}/32 dev lo"));
    assert_eq!(source_of((&pod, held), &host.network, SERVER[0]), address(held));
    assert_eq!(source(&pod, &host.network, SERVER[0]), address(NODE));
}

/// The mesh of a node that others reach hosts of its network through. The pod at 10.1.0.5 stands for another node's.
fn mesh() -> MeshState {
    MeshState {
        interface: "mesh0".into(),
        mtu: 1420,
        addresses: Vec::new(),
        targets_v4: prefixes(&["10.1.0.5/32"]),
        targets_v6: prefixes(&["fd00:1::5/128"]),
        bypass: Bypass::default(),
        plain: Vec::new(),
        narrow: Vec::new(),
        masqueraded: prefixes(&["192.0.2.0/24", "10.1.0.6/32", "2001:db8::/64", "fd00:1::6/128"]),
        without_default: Vec::new(),
        listen_port: 51820,
        sources: Vec::new(),
        uplinks: Vec::new(),
    }
}

#[test]
fn hosts_beside_a_node_see_the_node_as_source_of_what_comes_from_the_mesh_and_each_other_as_they_are() {
    let (host, pod, beside) = bed();
    host.sh("ip link add mesh0 type veth peer name far0");
    let mut mesh_table = Applier::default();
    host.at(|| mesh_table.apply(&mesh()).unwrap());
    for (server, node) in SERVER.iter().zip([NODE, NODE_V6]) {
        assert_eq!(source(&pod, &host.network, server), address(node));
    }
    for (own, server) in ["10.1.0.6", "fd00:1::6"].iter().zip(SERVER) {
        assert_eq!(source(&beside, &host.network, server), address(own), "two hosts beside the node");
    }
    assert_eq!(host.at(|| mesh_table.apply(&mesh()).unwrap()), Applied::Unchanged);
    let without = MeshState { masqueraded: Vec::new(), ..mesh() };
    host.at(|| mesh_table.apply(&without).unwrap());
    assert!(!host.sh("nft list table inet talos_kubespan").contains("masquerade"));
}

//! Sources of what a host sends into the mesh: peers accept a node's own address, its pods' and those it forwards for others, and drop all
//! other packets, as WireGuard does.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use crate::mesh_common::{Namespace, apply, mesh};
use fairlead_dataplane::mesh::{Bypass, MeshState, OwnSource};
use fairlead_dataplane::nft_table::Applied;

const PORT: u16 = 9999;
/// Bounds a test that fails.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Addresses of one family.
struct Family {
    /// Another node's, behind the mesh device.
    target: &'static str,
    /// The address of this node's Node object, which peers accept.
    node: &'static str,
    /// On the link with the default route.
    uplink: &'static str,
    /// On `lo`.
    virtual_address: &'static str,
    pod: &'static str,
    /// A member for which this node forwards.
    transit: &'static str,
    /// A client beyond the uplink.
    client: &'static str,
    any: &'static str,
}

const FAMILIES: [Family; 2] = [
    Family {
        target: "10.5.0.1",
        node: "192.0.2.1",
        uplink: "100.65.0.1",
        virtual_address: "203.0.113.5",
        pod: "10.9.0.2",
        transit: "10.5.5.5",
        client: "100.65.0.2",
        any: "0.0.0.0",
    },
    Family {
        target: "fd05::1",
        node: "2001:db8:2::1",
        uplink: "fd65::1",
        virtual_address: "2001:db8:113::5",
        pod: "fd09::2",
        transit: "fd05:0:0:0:5::5",
        client: "fd65::2",
        any: "::",
    },
];

/// A node with two network cards, of which the one with the default route is not that of the Node object, a virtual address on `lo`, and a
/// pod. The mesh device has no address, as with a mesh without `spec.meshCIDR`.
struct Bed {
    node: Namespace,
    peer: Namespace,
    client: Namespace,
    pod: Namespace,
}

impl Bed {
    fn new() -> Self {
        let bed = Self {
            node: Namespace::new(),
            peer: Namespace::new(),
            client: Namespace::new(),
            pod: Namespace::new(),
        };
        bed.node.sh("sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0 \
             net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1; ip link set lo up");
        for (link, other) in [("mesh0", &bed.peer), ("up0", &bed.client), ("pod0", &bed.pod)] {
            bed.node.veth(link, other, "eth0");
        }
        bed.node
            .sh("ip link add node0 type veth peer name node1; ip link set node0 up; ip link set node1 up");
        for Family { target, node, uplink, virtual_address, pod, transit, client, .. } in FAMILIES {
            let (all, link) = if target.contains(':') { (128, 64) } else { (32, 24) };
            let nodad = if target.contains(':') { "nodad" } else { "" };
            bed.node.sh(&format!(
                "ip addr add {virtual_address}/{all} dev lo {nodad}; ip addr add {node}/{all} dev node0 {nodad}; \
                 ip addr add {uplink}/{link} dev up0 {nodad}"
            ));
            bed.client.sh(&format!("ip addr add {client}/{link} dev eth0 {nodad}"));
            bed.peer.sh(&format!("ip addr add {target}/{all} dev eth0 {nodad}"));
            bed.pod.sh(&format!(
                "ip addr add {pod}/{all} dev eth0 {nodad}; ip addr add {transit}/{all} dev eth0 {nodad}"
            ));
            for (namespace, link, other, far, destinations) in [
                (&bed.node, "mesh0", &bed.peer, "eth0", vec![target]),
                (&bed.node, "pod0", &bed.pod, "eth0", vec![pod]),
                (&bed.pod, "eth0", &bed.node, "pod0", vec![target]),
                (&bed.peer, "eth0", &bed.node, "mesh0", vec![node, pod]),
            ] {
                let mac = other.sh(&format!("ip -j link show {far} | jq -r .[0].address"));
                for destination in destinations {
                    let neighbour =
                        format!("ip neigh replace {destination} lladdr {} dev {link}", mac.trim());
                    // Into the mesh only table 180 leads.
                    let route = format!("ip route add {destination}/{all} dev {link}; ");
                    namespace.sh(&(if link == "mesh0" { String::new() } else { route } + &neighbour));
                }
            }
            bed.node.sh(&format!("ip route add default via {client}"));
        }
        bed.peer.sh(
            "nft 'table inet wireguard { chain in { type filter hook prerouting priority -300; \
             ip saddr != { 192.0.2.1, 10.9.0.0/24, 10.5.5.0/24 } drop; \
             meta l4proto != ipv6-icmp ip6 saddr != { 2001:db8:2::1, fd09::/64, fd05:0:0:0:5::/80 } drop; }; }'",
        );
        bed
    }

    fn state() -> MeshState {
        let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        MeshState {
            bypass: Bypass {
                own: nets(&["192.0.2.1/32", "10.9.0.0/24", "2001:db8:2::1/128", "fd09::/64"]),
                ..Bypass::default()
            },
            sources: FAMILIES
                .map(|family| OwnSource { address: family.node.parse().unwrap(), is_on_host: false })
                .to_vec(),
            ..mesh(1420, &["10.5.0.0/16"], &["fd05::/64"])
        }
    }

    /// Address and port that the peer sees of a datagram of `from`, from its address `bound` to `to`; the peer is at `target`.
    fn seen(&self, from: &Namespace, bound: (&str, u16), to: &str, target: &str) -> Option<SocketAddr> {
        let server = self.server(target);
        let client = from.run(|| UdpSocket::bind(bound).unwrap());
        client.send_to(b"x", (to.parse::<IpAddr>().unwrap(), PORT)).unwrap();
        Some(server.recv_from(&mut [0; 8]).ok()?.1)
    }

    /// The same, once the answer has come back.
    fn answered(&self, from: &Namespace, bound: (&str, u16), to: &str, target: &str) -> Option<SocketAddr> {
        let server = self.server(target);
        let client = from.run(|| UdpSocket::bind(bound).unwrap());
        client.set_read_timeout(Some(TIMEOUT)).unwrap();
        client.connect((to.parse::<IpAddr>().unwrap(), PORT)).unwrap();
        client.send(b"x").unwrap();
        let seen = server.recv_from(&mut [0; 8]).ok()?.1;
        server.send_to(b"y", seen).unwrap();
        client.recv(&mut [0; 8]).ok().map(|_| seen)
    }

    fn server(&self, target: &str) -> UdpSocket {
        let server = self.peer.run(|| UdpSocket::bind((target.parse::<IpAddr>().unwrap(), PORT)).unwrap());
        server.set_read_timeout(Some(TIMEOUT)).unwrap();
        server
    }

    /// A Service of the node's address on the uplink, as kube-proxy makes one: what is not from a pod is marked, and masqueraded later.
    fn service(&self, masquerades: bool) {
        let mark = if masquerades { "meta mark set meta mark | 0x4000;" } else { "" };
        let rules: String = FAMILIES
            .iter()
            .map(|Family { uplink, target, .. }| {
                let family = if uplink.contains(':') { "ip6" } else { "ip" };
                format!("{family} daddr {uplink} meta l4proto {{ tcp, udp }} th dport {PORT} {mark} dnat {family} to {target}; ")
            })
            .collect();
        self.node.sh(&format!(
            "nft 'table inet proxy; delete table inet proxy; table inet proxy {{ \
             chain pre {{ type nat hook prerouting priority dstnat; {rules} }}; \
             chain out {{ type nat hook output priority -100; {rules} }}; \
             chain post {{ type nat hook postrouting priority srcnat; \
             meta mark & 0x4000 == 0x4000 meta mark set meta mark ^ 0x4000 masquerade fully-random; }}; }}'"
        ));
    }
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn a_host_sends_into_the_mesh_from_an_address_that_peers_accept() {
    let bed = Bed::new();
    let state = Bed::state();
    assert_eq!(bed.node.run(|| apply(&state).unwrap()), Applied::Rebuilt);
    assert_eq!(bed.node.run(|| apply(&state).unwrap()), Applied::Unchanged);
    for Family { target, node, uplink, virtual_address, any, .. } in FAMILIES {
        for bound in [any, uplink, virtual_address] {
            let seen = bed.answered(&bed.node, (bound, 0), target, target);
            assert_eq!(seen.map(|seen| seen.ip()), Some(address(node)), "{target} from {bound}");
        }
        // Programs that need a certain port keep it.
        let own = bed.answered(&bed.node, (node, 777), target, target);
        assert_eq!(own, Some(SocketAddr::new(address(node), 777)));
        let listener = bed.peer.run(|| TcpListener::bind((address(target), PORT)).unwrap());
        let connect = || TcpStream::connect_timeout(&(address(target), PORT).into(), TIMEOUT);
        bed.node.run(connect).unwrap_or_else(|error| panic!("webhook at {target}: {error}"));
        assert_eq!(listener.accept().unwrap().1.ip(), address(node));
    }
}

#[test]
fn pods_and_members_for_which_a_node_forwards_keep_their_sources() {
    let bed = Bed::new();
    bed.node.run(|| apply(&Bed::state()).unwrap());
    for Family { target, pod, transit, .. } in FAMILIES {
        let seen = bed.answered(&bed.pod, (pod, 4711), target, target);
        assert_eq!(seen, Some(SocketAddr::new(address(pod), 4711)));
        let seen = bed.seen(&bed.pod, (transit, 4712), target, target);
        assert_eq!(seen, Some(SocketAddr::new(address(transit), 4712)));
    }
}

/// A pod that starts may send before its node has heard of its block. What is translated then stays so as long as the connection.
#[test]
fn a_pod_of_a_block_that_the_node_does_not_know_yet_keeps_its_source() {
    let bed = Bed::new();
    let mut state = Bed::state();
    state.bypass.own.retain(|own| !FAMILIES.iter().any(|family| own.contains(&address(family.pod))));
    bed.node.sh("ip link set pod0 group 116");
    bed.node.run(|| apply(&state).unwrap());
    for Family { target, pod, .. } in FAMILIES {
        let seen = bed.seen(&bed.pod, (pod, 4711), target, target);
        assert_eq!(seen, Some(SocketAddr::new(address(pod), 4711)));
    }
}

/// Answers come back to the node that has translated the destination, and from there to the client.
#[test]
fn a_client_of_a_node_port_is_answered_whether_kube_proxy_masquerades_it_or_not() {
    let bed = Bed::new();
    bed.node.run(|| apply(&Bed::state()).unwrap());
    for masquerades in [true, false] {
        bed.service(masquerades);
        for Family { target, node, uplink, client, virtual_address, any, .. } in FAMILIES {
            let cases =
                [(&bed.client, client), (&bed.node, any), (&bed.node, node), (&bed.node, virtual_address)];
            for (from, bound) in cases {
                let seen = bed.answered(from, (bound, 0), uplink, target);
                let what = format!("{target} from {bound}, masqueraded by kube-proxy: {masquerades}");
                assert_eq!(seen.map(|seen| seen.ip()), Some(address(node)), "{what}");
            }
        }
    }
}

/// A Peer with all addresses is a target for every source.
#[test]
fn a_host_is_accepted_where_a_peer_has_all_addresses() {
    let bed = Bed::new();
    let all = mesh(1420, &["0.0.0.0/0"], &["::/0"]);
    let state = MeshState { targets_v4: all.targets_v4, targets_v6: all.targets_v6, ..Bed::state() };
    bed.node.run(|| apply(&state).unwrap());
    for Family { target, node, any, virtual_address, .. } in FAMILIES {
        for bound in [any, virtual_address] {
            let seen = bed.seen(&bed.node, (bound, 0), target, target);
            assert_eq!(seen.map(|seen| seen.ip()), Some(address(node)), "{target} from {bound}");
        }
    }
}

#[test]
fn another_address_of_the_node_rewrites_the_chain_and_none_takes_it_away() {
    let bed = Bed::new();
    let mut state = Bed::state();
    bed.node.run(|| apply(&state).unwrap());
    let chain =
        || bed.node.sh("nft list table inet talos_kubespan | grep -A9 'chain fairlead_sources' || true");
    for rule in [
        "type nat hook postrouting priority srcnat - 2; policy accept;",
        "oifname \"mesh0\" ip saddr != @fairlead_own_ipv4 ip saddr != @kubespan_targets_ipv4 snat ip to 192.0.2.1 fully-random",
        "oifname \"mesh0\" ip6 saddr != @fairlead_own_ipv6 ip6 saddr != @kubespan_targets_ipv6 snat ip6 to 2001:db8:2::1 fully-random",
    ] {
        assert!(chain().contains(rule), "{rule} is not in {}", chain());
    }
    state.sources.pop();
    assert_eq!(bed.node.run(|| apply(&state).unwrap()), Applied::Rebuilt);
    assert!(!chain().contains("snat ip6") && chain().contains("192.0.2.1"), "{}", chain());
    state.sources.clear();
    assert_eq!(bed.node.run(|| apply(&state).unwrap()), Applied::Rebuilt);
    assert_eq!(chain(), "");
}

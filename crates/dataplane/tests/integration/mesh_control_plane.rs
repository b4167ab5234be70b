//! A control-plane node and another one, which has no tunnel because it boots: etcd, API server and kubelet reach each other past the mesh, and
//! nothing else does.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::mesh_common::{Namespace, apply, mesh};
use fairlead_dataplane::mesh::ControlPlane;
use fairlead_dataplane::mesh::{Bypass, MeshState};
use fairlead_dataplane::nft_table::Applied;

/// Bounds a test that fails.
const TIMEOUT: Duration = Duration::from_secs(5);
const ETCD: u16 = 2380;
/// A port of no program that a node needs to boot.
const OTHER: u16 = 8080;

/// This node, the other one and a pod, by family.
const ADDRESSES: [[&str; 3]; 2] =
    [["192.0.2.1", "192.0.2.2", "10.9.0.2"], ["2001:db8::1", "2001:db8::2", "fd09::2"]];

/// Two nodes with two links between them: `up0` to `eth0`, and `mesh0` to `wg0` in the place of the tunnel.
struct Bed {
    node: Namespace,
    other: Namespace,
    pod: Namespace,
}

impl Bed {
    fn new() -> Self {
        let bed = Self { node: Namespace::new(), other: Namespace::new(), pod: Namespace::new() };
        for namespace in [&bed.node, &bed.other] {
            namespace.sh("sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0 \
                 net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
        }
        bed.node.veth("up0", &bed.other, "eth0");
        bed.node.veth("mesh0", &bed.other, "wg0");
        bed.node.veth("pod0", &bed.pod, "eth0");
        for [own, other, pod] in ADDRESSES {
            let (all, link, nodad) = if own.contains(':') { (128, 64, "nodad") } else { (32, 24, "") };
            bed.node.sh(&format!("ip addr add {own}/{link} dev up0 {nodad}"));
            bed.other.sh(&format!("ip addr add {other}/{link} dev eth0 {nodad}"));
            bed.pod.sh(&format!("ip addr add {pod}/{all} dev eth0 {nodad}"));
            for (namespace, link, to, far, destinations, has_route) in [
                (&bed.node, "mesh0", &bed.other, "wg0", vec![other], false),
                (&bed.node, "pod0", &bed.pod, "eth0", vec![pod], true),
                (&bed.pod, "eth0", &bed.node, "pod0", vec![other], true),
                (&bed.other, "wg0", &bed.node, "mesh0", vec![own], false),
                (&bed.other, "wg0", &bed.node, "mesh0", vec![pod], true),
            ] {
                let mac = to.sh(&format!("ip -j link show {far} | jq -r .[0].address"));
                for destination in destinations {
                    if has_route {
                        namespace.sh(&format!("ip route add {destination}/{all} dev {link}"));
                    }
                    namespace.sh(&format!("ip neigh replace {destination} lladdr {} dev {link}", mac.trim()));
                }
            }
        }
        bed
    }

    /// Whether the other node sends by its tunnel.
    fn has_tunnel(&self, has_tunnel: bool) {
        for [own, ..] in ADDRESSES {
            let all = if own.contains(':') { 128 } else { 32 };
            let link = if has_tunnel { "wg0" } else { "eth0" };
            self.other.sh(&format!("ip route replace {own}/{all} dev {link}"));
        }
    }

    fn apply(&self, down: bool) -> Applied {
        let nodes = || ADDRESSES.into_iter().map(|[_, other, _]| other.parse::<IpAddr>().unwrap());
        let wanted = ControlPlane::of(nodes(), &["192.0.2.1:16443".parse().unwrap()]);
        assert_eq!(wanted.ports, [2379, 2380, 6443, 10250, 16443]);
        assert_eq!(wanted.down, wanted.nodes, "before anything is known of the tunnels");
        let own = ["192.0.2.1/32", "10.9.0.0/24", "2001:db8::1/128", "fd09::/64"];
        let state = MeshState {
            bypass: Bypass {
                control_plane: ControlPlane { down: if down { nodes().collect() } else { vec![] }, ..wanted },
                own: own.map(|prefix| prefix.parse().unwrap()).to_vec(),
                ..Bypass::default()
            },
            ..mesh(1420, &["192.0.2.2/32"], &["2001:db8::2/128"])
        };
        self.node.run(|| apply(&state).unwrap())
    }

    /// Counts what arrives at the other node from and to this port, from now on.
    fn count(&self, port: u16) {
        let rule = |(link, end): (&str, &str)| {
            format!("iifname {link} tcp {end} {port} counter comment \"{link}\"; ")
        };
        let rules =
            [("eth0", "sport"), ("eth0", "dport"), ("wg0", "sport"), ("wg0", "dport")].map(rule).concat();
        self.other.sh(&format!(
            "nft 'table inet judge; delete table inet judge; \
             table inet judge {{ chain in {{ type filter hook prerouting priority -300; {rules} }}; }}'"
        ));
    }

    /// Links by which anything has arrived there.
    fn arrived(&self) -> Vec<String> {
        let rules = self.other.sh("nft list table inet judge");
        let counted = rules.lines().filter(|line| line.contains("counter") && !line.contains("packets 0 "));
        counted.filter_map(|line| Some(line.split('"').nth(3)?.to_owned())).collect()
    }

    /// Links by which packets of `from` to a port of the other node arrive there.
    fn way(&self, from: &Namespace, other: &str, port: u16) -> Vec<String> {
        let address = SocketAddr::new(other.parse().unwrap(), port);
        let listener = self.other.run(|| TcpListener::bind(address).unwrap());
        self.count(port);
        let mut client = from.run(|| TcpStream::connect_timeout(&address, TIMEOUT).unwrap());
        client.write_all(b"x").unwrap();
        listener.accept().unwrap().0.read_exact(&mut [0]).unwrap();
        self.arrived()
    }
}

#[test]
fn a_control_plane_node_without_a_tunnel_is_reached_past_the_mesh_by_what_it_needs_to_boot() {
    let bed = Bed::new();
    assert_eq!(bed.apply(true), Applied::Rebuilt);
    assert_eq!(bed.apply(true), Applied::Unchanged);
    for [_, other, _] in ADDRESSES {
        bed.has_tunnel(false);
        for port in [2379, ETCD, 6443, 10250, 16443] {
            assert_eq!(bed.way(&bed.node, other, port), ["eth0"], "{other}, port {port}");
        }
        assert_eq!(bed.way(&bed.node, other, OTHER), ["wg0"], "{other}");
        bed.has_tunnel(true);
        assert_eq!(bed.way(&bed.pod, other, ETCD), ["wg0"], "a pod, to {other}");
    }
    // Two addresses of one node whose tunnel is up again.
    assert_eq!(bed.apply(false), Applied::Elements { deleted: 2, added: 0 });
    for [_, other, _] in ADDRESSES {
        assert_eq!(bed.way(&bed.node, other, ETCD), ["wg0"], "{other}");
    }
}

/// The other node has lost its tunnel, and this one does not know it yet.
#[test]
fn an_answer_goes_the_way_that_the_last_request_came() {
    let bed = Bed::new();
    bed.apply(false);
    for [own, ..] in ADDRESSES {
        let address = SocketAddr::new(own.parse().unwrap(), ETCD);
        let listener = bed.node.run(|| TcpListener::bind(address).unwrap());
        bed.has_tunnel(false);
        bed.count(ETCD);
        let mut client = bed.other.run(|| TcpStream::connect_timeout(&address, TIMEOUT).unwrap());
        let mut server = listener.accept().unwrap().0;
        let mut exchange = || {
            client.write_all(b"x").unwrap();
            server.read_exact(&mut [0]).unwrap();
            server.write_all(b"y").unwrap();
            client.set_read_timeout(Some(TIMEOUT)).unwrap();
            client.read_exact(&mut [0]).unwrap();
        };
        exchange();
        assert_eq!(bed.arrived(), ["eth0"], "{own}");
        bed.has_tunnel(true);
        exchange();
        bed.count(ETCD);
        exchange();
        assert_eq!(bed.arrived(), ["wg0"], "{own}: the connection goes on in the tunnel");
        bed.has_tunnel(false);
        bed.count(ETCD);
        exchange();
        assert_eq!(bed.arrived(), ["eth0"], "{own}: and past it when the tunnel is lost");
    }
}

/// The kernel takes the first packet that it sees of such a connection for one of its original direction: here an answer.
#[test]
fn a_connection_that_is_older_than_the_rules_is_answered_the_way_that_its_requests_come() {
    let bed = Bed::new();
    bed.has_tunnel(false);
    let connect = |[own, ..]: [&'static str; 3]| {
        let address = SocketAddr::new(own.parse().unwrap(), ETCD);
        let listener = bed.node.run(|| TcpListener::bind(address).unwrap());
        let client = bed.other.run(|| TcpStream::connect_timeout(&address, TIMEOUT).unwrap());
        client.set_read_timeout(Some(TIMEOUT)).unwrap();
        (own, client, listener.accept().unwrap().0)
    };
    let connections = ADDRESSES.map(connect);
    bed.apply(false);
    for (own, mut client, mut server) in connections {
        let mut answer = || {
            server.write_all(b"y").unwrap();
            client.read_exact(&mut [0]).unwrap();
            client.write_all(b"x").unwrap();
            server.read_exact(&mut [0]).unwrap();
        };
        answer();
        bed.count(ETCD);
        answer();
        assert_eq!(bed.arrived(), ["eth0"], "{own}");
    }
}

#[test]
fn other_ports_are_answered_in_the_tunnel_and_other_bits_of_a_connection_s_mark_stay() {
    let bed = Bed::new();
    bed.apply(false);
    bed.node.sh(
        "nft 'table inet other { chain in { type filter hook prerouting priority -160; ct mark set 0xabcd0040; }; \
         chain marked { type filter hook input priority 0; tcp dport 2380 ct mark 0xabcd0020 counter; }; }'",
    );
    for [own, ..] in ADDRESSES {
        bed.has_tunnel(false);
        for (port, link) in [(OTHER, "wg0"), (ETCD, "eth0")] {
            let address = SocketAddr::new(own.parse().unwrap(), port);
            let _listener = bed.node.run(|| TcpListener::bind(address).unwrap());
            bed.count(port);
            bed.other.run(|| TcpStream::connect_timeout(&address, TIMEOUT).unwrap());
            assert_eq!(bed.arrived(), [link], "{address}");
        }
    }
    let counted = bed.node.sh("nft list chain inet other marked");
    assert!(!counted.contains("packets 0 "), "{counted}");
}

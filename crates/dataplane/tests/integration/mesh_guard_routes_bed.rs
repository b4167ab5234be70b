//! Two nodes with the embedded WireGuard, each with a pod, joined by a network on which the second one counts; the first one has a second
//! link, by which another program may lead packets out; from there they get to the second one, too.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use fairlead_dataplane::forwarding::Forwarding;
use fairlead_dataplane::mesh::{Applier, Bypass, Foreign, MeshState, OwnSource};
use fairlead_dataplane::uplink::loosen_reverse_path_filter;
use fairlead_dataplane::wireguard::{Preference, Settings, WireGuardDevice, open};
use fairlead_keys::{DeviceConfig, PeerConfig, PrivateKey, PublicKey};
use ipnet::IpNet;

use crate::mesh_common::{Namespace, run};

const WIREGUARD: u16 = 51820;
/// Table with the routes to pods of a node, before the rules for marks: what checks sources finds them there.
const TABLE_PODS: u32 = 116;
/// Datagrams that are sent for each pair of addresses.
pub(crate) const DATAGRAMS: usize = 3;
/// Addresses of the second node that are not in the mesh.
const PAST_MESH: [&str; 2] = ["198.51.100.9", "fd98::9"];
/// A datagram that has not arrived by then was dropped.
pub(crate) const PATIENCE: Duration = Duration::from_millis(1500);
/// Time after which a firewall that drops packets is told.
pub(crate) const LASTING: Duration = Duration::from_secs(3);

/// Packets as they left the first node.
#[derive(Debug)]
pub(crate) struct UplinkTraffic {
    /// Packets of pods and nodes outside of WireGuard, on both links.
    pub(crate) clear: usize,
    /// Packets of WireGuard; several datagrams that it sends at once count as one.
    pub(crate) encrypted: usize,
    /// Packets of TCP outside of WireGuard.
    pub(crate) past: usize,
    /// ICMP errors outside of WireGuard.
    pub(crate) errors: usize,
    /// Datagrams or connections that arrived.
    pub(crate) arrived: usize,
}

pub(crate) struct Side {
    pub(crate) node: Namespace,
    pub(crate) pod: Namespace,
    pub(crate) interface: String,
    pub(crate) state: MeshState,
    applier: Applier,
    keys: (PrivateKey, PublicKey),
    device: Option<Box<dyn WireGuardDevice>>,
}

impl Side {
    /// Addresses of the first pod and node.
    pub(crate) const ADDRESSES_OF_A: [&str; 4] = ["10.77.1.2", "fd77:1::2", "192.0.2.1", "fd02::1"];
    /// Addresses of the second pod and node.
    pub(crate) const ADDRESSES_OF_B: [&str; 4] = ["10.77.2.2", "fd77:2::2", "192.0.2.2", "fd02::2"];

    fn new(me: u8, it: u8) -> Self {
        let (node, pod) = (Namespace::new(), Namespace::new());
        node.sh("sysctl -qw net.ipv4.conf.all.rp_filter=1 net.ipv4.conf.default.rp_filter=1 \
             net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
        node.veth("pod0", &pod, "eth0");
        node.sh(&format!(
            "ip addr add 10.77.{me}.1/24 dev pod0; ip addr add fd77:{me}::1/64 dev pod0 nodad; \
             ip route add 10.77.{me}.2 dev pod0 table {TABLE_PODS}; ip -6 route add fd77:{me}::2 dev pod0 table {TABLE_PODS}"
        ));
        pod.sh(&format!(
            "ip addr add 10.77.{me}.2/24 dev eth0; ip addr add fd77:{me}::2/64 dev eth0 nodad; \
             ip route add default via 10.77.{me}.1; ip route add default via fd77:{me}::1"
        ));
        let private = run("wg genkey");
        let public = run(&format!("echo {} | wg pubkey", private.trim())).trim().parse().unwrap();
        let interface = format!("guard{me}-{}", std::process::id() % 100_000);
        Self {
            node,
            pod,
            state: state(&interface, me, it),
            interface,
            applier: Applier::beside_pods(TABLE_PODS),
            keys: (private.trim().parse().unwrap(), public),
            device: None,
        }
    }

    fn open(&mut self, other: &PublicKey, endpoint: &str) {
        let settings = Settings {
            interface: self.interface.clone(),
            mtu: 1420,
            preference: Preference::Embedded,
            handover_socket: None,
        };
        let device = self.node.run(|| open(&settings)).unwrap();
        let peer = PeerConfig {
            endpoint: Some(SocketAddr::new(endpoint.parse().unwrap(), WIREGUARD)),
            allowed_ips: self.state.targets_v4.iter().chain(&self.state.targets_v6).copied().collect(),
            ..PeerConfig::default()
        };
        let wanted = DeviceConfig {
            private_key: self.keys.0.clone(),
            listen_port: WIREGUARD,
            fwmark: 0x20,
            peers: BTreeMap::from([(*other, peer)]),
        };
        let change = device.state().unwrap().change_of(
            (&wanted.private_key, WIREGUARD, 0x20),
            &wanted.peers,
            |_, peer| (peer, peer.endpoint),
        );
        device.change(&change).unwrap();
        self.device = Some(device);
    }

    /// Findings of the last application about firewalls.
    pub(crate) fn forwarding(&self) -> &Forwarding {
        self.applier.forwarding()
    }

    /// Rules of other programs that the last application has found.
    pub(crate) fn foreign(&self) -> Vec<Foreign> {
        self.applier.foreign()
    }

    fn apply(&mut self, now: Instant) {
        let Self { node, applier, state, .. } = self;
        node.run(|| {
            loosen_reverse_path_filter(&state.interface).unwrap();
            applier.apply_at(state, now).unwrap()
        });
    }
}

fn state(interface: &str, me: u8, it: u8) -> MeshState {
    let nets = |texts: [String; 2]| texts.map(|text| text.parse::<IpNet>().unwrap()).to_vec();
    let of_node =
        |number: u8| [format!("192.0.2.{number}"), format!("fd02::{number}")].map(|it| it.parse().unwrap());
    let own = of_node(me).map(IpNet::from).into_iter();
    let own = own.chain(nets([format!("10.77.{me}.0/24"), format!("fd77:{me}::/64")])).collect();
    MeshState {
        interface: interface.to_owned(),
        mtu: 1420,
        addresses: Vec::new(),
        targets_v4: nets([format!("10.77.{it}.0/24"), format!("192.0.2.{it}/32")]),
        targets_v6: nets([format!("fd77:{it}::/64"), format!("fd02::{it}/128")]),
        bypass: Bypass {
            servers: ["192.0.2.1", "192.0.2.2", "fd02::2"]
                .map(|it| SocketAddr::new(it.parse().unwrap(), 6443))
                .to_vec(),
            relays: vec!["10.77.1.2:3478".parse().unwrap()],
            nodes: of_node(it).to_vec(),
            own,
            ..Bypass::default()
        },
        plain: Vec::new(),
        narrow: Vec::new(),
        masqueraded: Vec::new(),
        without_default: Vec::new(),
        listen_port: WIREGUARD,
        sources: of_node(me).map(|address| OwnSource { address, is_on_host: true }).to_vec(),
        uplinks: if me == 2 { vec!["eth0".to_owned(), "eth1".to_owned()] } else { vec!["eth0".to_owned()] },
    }
}

pub(crate) struct Bed {
    pub(crate) a: Side,
    pub(crate) b: Side,
    exit: Namespace,
}

impl Bed {
    pub(crate) fn new() -> Self {
        Self::with_endpoints(["192.0.2.1", "192.0.2.2"])
    }

    /// One whose WireGuard packets are of IPv6.
    pub(crate) fn over_ipv6() -> Self {
        Self::with_endpoints(["fd02::1", "fd02::2"])
    }

    fn with_endpoints([of_a, of_b]: [&str; 2]) -> Self {
        let (mut a, mut b, exit) = (Side::new(1, 2), Side::new(2, 1), Namespace::new());
        a.node.veth("eth0", &b.node, "eth0");
        a.node.veth("exit0", &exit, "eth0");
        for (side, me, it) in [(&a, 1, 2), (&b, 2, 1)] {
            side.node.sh(&format!(
                "ip addr add 192.0.2.{me}/24 dev eth0; ip addr add fd02::{me}/64 dev eth0 nodad; \
                 ip route add default via 192.0.2.{it}; ip route add default via fd02::{it}"
            ));
        }
        for address in PAST_MESH {
            b.node.sh(&format!("ip addr add {address} dev lo"));
        }
        exit.veth("eth1", &b.node, "eth1");
        exit.sh(
            "sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.eth0.rp_filter=0 net.ipv4.ip_forward=1; \
             ip addr add 198.51.100.2/24 dev eth0; ip addr add 192.0.3.1/24 dev eth1; \
             ip route add 192.0.2.2 via 192.0.3.2",
        );
        b.node.sh("ip addr add 192.0.3.2/24 dev eth1");
        // Whatever is led out there arrives, without neighbours that would have to answer.
        let mac = exit.sh("ip -j link show eth0 | jq -r .[0].address");
        for address in Side::ADDRESSES_OF_B {
            a.node.sh(&format!("ip neigh replace {address} lladdr {} dev exit0", mac.trim()));
        }
        let (key_a, key_b) = (a.keys.1, b.keys.1);
        a.open(&key_b, of_b);
        b.open(&key_a, of_a);
        let mut bed = Self { a, b, exit };
        bed.apply();
        bed.wait();
        bed
    }

    /// Waits until the handshake is done and all links have their addresses.
    pub(crate) fn wait(&self) {
        for from in [&self.a.pod, &self.a.node] {
            for to in Side::ADDRESSES_OF_B {
                let end = Instant::now() + Duration::from_secs(30);
                while self.send(from, to) < DATAGRAMS {
                    assert!(Instant::now() < end, "nothing arrives at {to}");
                }
            }
        }
    }

    /// Brings both nodes to their state.
    pub(crate) fn apply(&mut self) {
        self.apply_at(Instant::now());
    }

    /// Brings both nodes to their state, and once more when what firewalls drop has lasted.
    pub(crate) fn apply_lasting(&mut self) {
        let now = Instant::now();
        self.apply_at(now);
        self.apply_at(now + LASTING);
    }

    fn apply_at(&mut self, now: Instant) {
        self.a.apply(now);
        self.b.apply(now);
    }

    /// Brings the first node to its state, as a program that was just started.
    pub(crate) fn apply_anew(&mut self) {
        self.a.applier = Applier::beside_pods(TABLE_PODS);
        self.a.apply(Instant::now());
    }

    /// Sends datagrams, and returns how many arrived.
    pub(crate) fn send(&self, from: &Namespace, to: &str) -> usize {
        let owner = match to {
            "10.77.1.2" | "fd77:1::2" => &self.a.pod,
            "10.77.2.2" | "fd77:2::2" => &self.b.pod,
            "192.0.2.1" | "fd02::1" => &self.a.node,
            _ => &self.b.node,
        };
        let to: IpAddr = to.parse().unwrap();
        let socket = owner.run(|| UdpSocket::bind((to, 0))).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        throw(from, socket.local_addr().unwrap());
        (0..DATAGRAMS).take_while(|_| socket.recv_from(&mut [0; 8]).is_ok()).count()
    }

    /// Packets in clear text that leave the first node while it and its pod send to all of the other side, whether it arrives or not.
    pub(crate) fn leaks(&self) -> usize {
        self.leaks_to(&Side::ADDRESSES_OF_B)
    }

    /// Packets among them that are for these addresses.
    pub(crate) fn leaks_to(&self, addresses: &[&str]) -> usize {
        let traffic = self.count(|| {
            for from in [&self.a.pod, &self.a.node] {
                for to in addresses {
                    throw(from, SocketAddr::new(to.parse().unwrap(), WIREGUARD - 1));
                }
            }
            // Behind them on the same link.
            PAST_MESH.iter().map(|past| self.send(&self.a.node, past)).sum()
        });
        assert_eq!(traffic.arrived, PAST_MESH.len() * DATAGRAMS, "{traffic:?}");
        traffic.clear
    }

    /// Counts what leaves the first node meanwhile.
    pub(crate) fn count(&self, work: impl FnOnce() -> usize) -> UplinkTraffic {
        let clear = "ip protocol udp ip daddr { 10.77.2.0/24, 192.0.2.2 } counter comment \"clear\"; \
             ip6 nexthdr udp ip6 daddr { fd77:2::/64, fd02::2 } counter comment \"clear\"; \
             icmp type echo-request counter comment \"clear\"; \
             icmp type { destination-unreachable, time-exceeded, parameter-problem } counter comment \"errors\"; \
             icmpv6 type { destination-unreachable, packet-too-big, time-exceeded, parameter-problem } counter comment \"errors\"; \
             meta l4proto tcp counter comment \"past\"";
        for (namespace, link) in [(&self.b.node, "eth0"), (&self.exit, "eth0")] {
            namespace.sh(&format!(
                "nft 'table netdev judge; delete table netdev judge; table netdev judge {{ chain in {{ \
                 type filter hook ingress device {link} priority 0; \
                 udp dport {WIREGUARD} counter accept comment \"encrypted\"; {clear}; }}; }}'"
            ));
        }
        let arrived = work();
        let counted = |namespace: &Namespace, what: &str| -> usize {
            let rules = namespace.sh("nft list table netdev judge");
            let of = rules.lines().filter(|line| line.contains(&format!("comment \"{what}\"")));
            of.map(|line| {
                line.split("packets ").nth(1).unwrap().split(' ').next().unwrap().parse::<usize>().unwrap()
            })
            .sum()
        };
        UplinkTraffic {
            clear: counted(&self.b.node, "clear") + counted(&self.exit, "clear"),
            encrypted: counted(&self.b.node, "encrypted") + counted(&self.exit, "encrypted"),
            past: counted(&self.b.node, "past"),
            errors: counted(&self.b.node, "errors") + counted(&self.exit, "errors"),
            arrived,
        }
    }
}

/// Sends datagrams.
fn throw(from: &Namespace, to: SocketAddr) {
    from.run(|| {
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let sender = UdpSocket::bind(any).unwrap();
        for _ in 0..DATAGRAMS {
            // Where there is no way, the host itself is told.
            drop(sender.send_to(b"x", to));
        }
    });
}

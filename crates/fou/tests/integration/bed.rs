//! A client, two gateways and a server in namespaces, joined by a router that translates the service addresses as kube-proxy
//! does:
//!
//! ```text
//! client ---+
//! gateway 0 +-- router ---- server (has routes to the gateways' addresses only)
//! gateway 1 +
//! ```
//!
//! All of it is real, except that the router's rules stand for kube-proxy's. Nothing is held by a process: sockets and
//! namespaces vanish with the handle.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fairlead_api::fou::{Gateway, Service};
use fairlead_fou::{Counter, Peer, Settings, TunnelLink, Tunnels};
use ipnet::IpNet;
use testbed_netns::Namespace;
use testbed_netns::pods::{Flow, HOST_SETUP, pod};

/// MTU of the pods' links.
pub(crate) const MTU: u32 = 1450;
const PORT: u16 = 5555;
/// Ports of the server.
const TCP_ECHO: u16 = 9000;
const UDP_SOURCE: u16 = 9002;

/// Addresses of one family.
#[derive(Debug)]
pub(crate) struct Addresses {
    pub(crate) client: IpAddr,
    pub(crate) service: IpAddr,
    pub(crate) gateways: [IpAddr; 2],
    pub(crate) server: IpAddr,
}

/// IPv4 and IPv6.
pub(crate) fn families() -> [Addresses; 2] {
    let ip = |text: &str| text.parse().unwrap();
    let of = |client, service, gateways: [&str; 2], server| Addresses {
        client: ip(client),
        service: ip(service),
        gateways: gateways.map(ip),
        server: ip(server),
    };
    [
        of("10.20.30.40", "10.68.12.49", ["10.20.50.1", "10.20.50.2"], "203.0.113.10"),
        of("fd00:20::40", "fd00:68::49", ["fd00:50::1", "fd00:50::2"], "2001:db8:113::10"),
    ]
}

const ROUTER_SETUP: &str = "
    sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1";
const ROUTER_RULES: &str = "
    table inet router {
        counter in_clear { }
        counter encapsulated { }
        counter untranslated { }
        counter unspecified { }
        counter outer { }
        counter outer_without_df { }
        chain services { type nat hook prerouting priority dstnat;
            ip daddr 10.68.12.49 udp dport 5555 dnat ip to 10.20.50.1
            ip6 daddr fd00:68::49 udp dport 5555 dnat ip6 to fd00:50::1
        }
        chain received { type filter hook prerouting priority raw;
            iifname client ip daddr 203.0.113.0/24 counter name in_clear drop
            iifname client ip6 daddr 2001:db8:113::/64 counter name in_clear drop
            iifname client udp dport 5555 counter name encapsulated
            meta nfproto ipv4 udp dport 5555 counter name outer
            udp dport 5555 ip ttl 225 ip frag-off & 0x4000 == 0 counter name outer_without_df
            iifname gateway0 ip saddr 10.20.30.0/24 counter name untranslated
            iifname gateway0 ip6 saddr fd00:20::/64 counter name untranslated
            iifname gateway0 ip6 saddr :: icmpv6 type nd-neighbor-solicit counter name unspecified
        }
    }";
pub(crate) const MASQUERADE: &str = "
    table inet egress {
        chain leaving { type nat hook postrouting priority srcnat;
            oifname eth0 ip saddr 10.20.30.40 masquerade
            oifname eth0 ip6 saddr fd00:20::40 masquerade
        }
    }";

/// The namespaces, and the tunnels of client and gateways.
pub(crate) struct Bed {
    pub(crate) client: Namespace,
    pub(crate) client_tunnels: Tunnels,
    pub(crate) gateways: Vec<(Namespace, Tunnels)>,
    pub(crate) router: Namespace,
    server: Namespace,
    _echo: [Echo; 2],
}

impl Bed {
    pub(crate) fn new() -> Self {
        let router = Namespace::new();
        router.sh(HOST_SETUP);
        router.sh(ROUTER_SETUP);
        let pods = ["client", "gateway0", "gateway1"].map(|name| {
            let own = families().map(|of| match name {
                "client" => of.client,
                "gateway0" => of.gateways[0],
                _ => of.gateways[1],
            });
            pod(&router, name, own, MTU)
        });
        let server = server(&router);
        router.sh(&format!("nft '{ROUTER_RULES}'"));
        let [client, gateways @ ..] = pods;
        let client_tunnels = set_up_client(&client);
        let gateways = gateways.into_iter().enumerate().map(|(index, pod)| {
            let tunnels = set_up_gateway(&pod, index);
            (pod, tunnels)
        });
        let gateways = gateways.collect();
        let _echo = [Echo::tcp(&server), Echo::udp(&server)];
        Self { client, client_tunnels, gateways, router, server, _echo }
    }

    /// A counter of gateway 0.
    pub(crate) fn counted(&self, counter: Counter) -> u64 {
        self.gateways[0].1.counters().unwrap().of(counter)
    }

    /// Packets of a counter of the router: `in_clear`, `encapsulated`, `untranslated`, `unspecified`; of IPv4 tunnels `outer`, and of these
    /// `outer_without_df` those that may be fragmented and have the TTL of Coil's.
    pub(crate) fn routed(&self, counter: &str) -> u64 {
        let listed = self.router.sh(&format!("nft list counter inet router {counter}"));
        listed.split_whitespace().skip_while(|word| *word != "packets").nth(1).unwrap().parse().unwrap()
    }

    /// Sends an echo request from the client and says whether the reply came.
    pub(crate) fn ping(&self, options: &str, address: IpAddr) -> bool {
        let script = format!("ping -c 1 -W 1 {options} {address} >/dev/null 2>&1 && echo reply || true");
        self.client.sh(&script).contains("reply")
    }

    /// Sends as many bytes to the server and receives them again.
    pub(crate) fn tcp_echo(&self, server: IpAddr, bytes: usize) -> bool {
        let data: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        let address = SocketAddr::new(server, TCP_ECHO);
        let limit = Duration::from_secs(10);
        let stream = self.client.run(|| TcpStream::connect_timeout(&address, limit)).unwrap();
        stream.set_read_timeout(Some(limit)).unwrap();
        let mut received = Vec::new();
        thread::scope(|scope| {
            scope.spawn(|| {
                (&stream).write_all(&data).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
            });
            (&stream).read_to_end(&mut received).unwrap();
        });
        received == data
    }

    /// Lets packets of the client reach the server without a tunnel, too.
    pub(crate) fn open_plain_path(&self) {
        self.router.sh("nft flush chain inet router received");
        for (family, router) in families().into_iter().zip(["203.0.113.1", "2001:db8:113::1"]) {
            self.server.sh(&format!("ip route add {} via {router}", family.client));
        }
    }

    /// iperf3 on the server, until it is killed.
    pub(crate) fn iperf_server(&self) -> Child {
        let mut command = Command::new("iperf3");
        command.args(["-s", "-p", "5201"]).stdout(Stdio::null());
        let child = self.server.run(|| command.spawn()).unwrap();
        thread::sleep(Duration::from_millis(500));
        child
    }

    /// Rate of a TCP connection of two seconds; `-R` is from the server to the client.
    pub(crate) fn mbit_per_second(&self, server: IpAddr, direction: &str) -> u64 {
        let receiver = "awk '/receiver/ { print int($(NF-2)) }'";
        let rate = self.client.sh(&format!("iperf3 -c {server} -p 5201 -t 2 -f m {direction} | {receiver}"));
        rate.trim().parse().unwrap()
    }

    /// A new flow of the client.
    pub(crate) fn flow(&self, server: IpAddr) -> Flow {
        Flow::new(&self.client, server, UDP_SOURCE)
    }
}

fn server(router: &Namespace) -> Namespace {
    let server = Namespace::new();
    server.sh(HOST_SETUP);
    server.veth("eth0", router, "server");
    let addresses = |v4: &str, v6: &str, link: &str| {
        format!("ip addr add {v4}/24 dev {link}; ip addr add {v6}/64 dev {link} nodad")
    };
    router.sh(&addresses("203.0.113.1", "2001:db8:113::1", "server"));
    server.sh(&addresses("203.0.113.10", "2001:db8:113::10", "eth0"));
    server.sh("ip route add 10.20.50.0/24 via 203.0.113.1
         ip -6 route add fd00:50::/64 via 2001:db8:113::1");
    server
}

/// Index of eth0 of a namespace.
pub(crate) fn uplink(namespace: &Namespace) -> u32 {
    namespace.sh("ip -o link show eth0 | cut -d: -f1").trim().parse().unwrap()
}

fn set_up_client(pod: &Namespace) -> Tunnels {
    let settings = Settings { port: PORT, drop_unknown: false, own: None };
    let mut tunnels = pod.run(|| Tunnels::open(uplink(pod), settings)).unwrap();
    let (mut links, mut peers) = (BTreeMap::new(), BTreeMap::new());
    for family in families() {
        let link = tunnels.add_link(family.service).unwrap();
        let remote = Some(family.service);
        links.insert(link, TunnelLink { local: family.client, remote, source_port: None });
        let peer = Peer::Gateway { link, service: family.service };
        peers.insert(family.service, peer);
        peers.extend(family.gateways.map(|gateway| (gateway, peer)));
        let (to, name) = (family.server, fairlead_fou::link_name(family.service));
        pod.sh(&format!("ip route add {to} dev {name} proto 30"));
    }
    tunnels.set_links(&links).unwrap();
    tunnels.set_peers(&peers).unwrap();
    tunnels
}

fn set_up_gateway(pod: &Namespace, index: usize) -> Tunnels {
    pod.sh(ROUTER_SETUP);
    let own = families().iter().map(|family| family.gateways[index]).collect();
    let settings = Settings { port: PORT, drop_unknown: true, own: Some(own) };
    let mut tunnels = pod.run(|| Tunnels::open(uplink(pod), settings)).unwrap();
    let (mut links, mut peers) = (BTreeMap::new(), BTreeMap::new());
    for family in families() {
        let link = tunnels.add_link(family.client).unwrap();
        let local = family.gateways[index];
        links.insert(link, TunnelLink { local, remote: None, source_port: Some(PORT) });
        peers.insert(family.client, Peer::Client { link: Some(link) });
        let (to, name) = (family.client, fairlead_fou::link_name(family.client));
        // Not in the main table: outer packets to the client must not find this route.
        pod.sh(&format!("ip route add {to} dev {name} proto 30 table 118"));
    }
    pod.sh("ip rule add iif eth0 lookup 118 pref 2000; ip -6 rule add iif eth0 lookup 118 pref 2000");
    pod.sh(&format!("nft '{MASQUERADE}'"));
    tunnels.set_links(&links).unwrap();
    tunnels.set_peers(&peers).unwrap();
    tunnels.set_allowed(&everything()).unwrap();
    tunnels
}

/// All destinations.
pub(crate) fn everything() -> BTreeMap<IpNet, bool> {
    ["0.0.0.0/0", "::/0"].into_iter().map(|text| (text.parse().unwrap(), true)).collect()
}

/// The service addresses with these of their gateways, by flow.
pub(crate) fn services(gateways: &[usize]) -> BTreeMap<IpAddr, Service> {
    let service = |family: Addresses| {
        let gateway = |index: &usize| Gateway { address: family.gateways[*index], is_draining: false };
        let gateways = gateways.iter().map(gateway).collect();
        (family.service, Service { gateways, by_client: false, idle_timeout: Some(Duration::from_secs(60)) })
    };
    families().into_iter().map(service).collect()
}

/// A server for both families on a thread of its own, until it is dropped.
struct Echo {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

const PAUSE: Duration = Duration::from_millis(5);

impl Echo {
    /// Sends back what it receives, to one connection after the other.
    fn tcp(server: &Namespace) -> Self {
        let listener = server.run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, TCP_ECHO))).unwrap();
        listener.set_nonblocking(true).unwrap();
        Self::start(move || match listener.accept() {
            Ok((mut stream, _)) => {
                stream.set_nonblocking(false).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
                let mut reader = stream.try_clone().unwrap();
                let _ = std::io::copy(&mut reader, &mut stream);
            }
            Err(_) => thread::sleep(PAUSE),
        })
    }

    /// Answers each packet with its source address.
    fn udp(server: &Namespace) -> Self {
        let socket = server.run(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, UDP_SOURCE))).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        Self::start(move || {
            let mut packet = [0; 2048];
            match socket.recv_from(&mut packet) {
                Ok((_, from)) => {
                    let source = from.ip().to_canonical().to_string();
                    let _ = socket.send_to(source.as_bytes(), from);
                }
                Err(error) => assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)),
            }
        })
    }

    fn start(mut step: impl FnMut() + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                step();
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

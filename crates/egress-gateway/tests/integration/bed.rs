//! A client, a gateway and a server in namespaces, joined by a router, which is also the node:
//!
//! ```text
//! client --+
//! other ---+- router ---- server (knows no route to clients)
//! gateway -+
//! ```
//!
//! The gateway is the real program in a process of its own, with CAP_NET_ADMIN and CAP_BPF only. The API server is not real.

pub(crate) mod api;
pub(crate) mod node;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use fairlead_egress::EgressName;
use fairlead_fou::{Peer, Settings, TunnelLink, Tunnels};
use fairlead_wire::egress::{Client, octets};
use serde_json::{Value, json};
use testbed_netns::Namespace;
use testbed_netns::pods::{Flow, HOST_SETUP, pod};

use api::Objects;
use node::Node;

/// MTU of the pods' links.
pub(crate) const MTU: u32 = 1450;
pub(crate) const REGISTRATION: u16 = 5556;
pub(crate) const TCP_ECHO: u16 = 9000;
const UDP_SOURCE: u16 = 9002;
/// The environment of the gateway's process.
pub(crate) const API: &str = "FAIRLEAD_TEST_API";

/// Addresses of one family.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Addresses {
    pub(crate) client: IpAddr,
    pub(crate) other: IpAddr,
    pub(crate) gateway: IpAddr,
    pub(crate) server: IpAddr,
    /// A second address of the server, which is in a ServiceCIDR.
    pub(crate) service: IpAddr,
}

/// IPv4 and IPv6.
pub(crate) fn families() -> [Addresses; 2] {
    let of = |[client, other, gateway, server, service]: [&str; 5]| Addresses {
        client: client.parse().unwrap(),
        other: other.parse().unwrap(),
        gateway: gateway.parse().unwrap(),
        server: server.parse().unwrap(),
        service: service.parse().unwrap(),
    };
    [
        of(["10.20.30.40", "10.20.30.41", "10.20.50.1", "203.0.113.10", "10.96.0.10"]),
        of(["fd00:20::40", "fd00:20::41", "fd00:50::1", "2001:db8:113::10", "fd00:96::10"]),
    ]
}

pub(crate) fn egress() -> EgressName {
    EgressName { namespace: "internet-egress".to_owned(), name: "nat".to_owned() }
}

/// The pod with this UID and the addresses of the client.
pub(crate) fn client(uid: &str, addresses: impl IntoIterator<Item = IpAddr>) -> Client {
    let (namespace, name) = ("default".to_owned(), uid.to_owned());
    Client { uid: uid.to_owned(), namespace, name, addresses: addresses.into_iter().map(octets).collect() }
}

pub(crate) fn objects() -> Vec<(&'static str, Value)> {
    let block = |name: &str, node: &str, ipv4: &str, ipv6: &str| {
        json!({ "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "index": 0, "ipv4": ipv4, "ipv6": ipv6,
            "metadata": { "name": name, "labels": { "coil.cybozu.com/node": node, "coil.cybozu.com/pool": "default" } } })
    };
    let node = |name: &str, address: &str| {
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name }, "spec": {},
            "status": { "addresses": [{ "type": "InternalIP", "address": address }] } })
    };
    vec![
        ("nodes", node("n1", "192.0.2.1")),
        ("nodes", node("n2", "192.0.2.2")),
        ("addressblocks", block("default-0", "n1", "10.20.30.0/24", "fd00:20::/120")),
        ("addressblocks", block("default-1", "n2", "10.20.31.0/24", "fd00:21::/120")),
        (
            "servicecidrs",
            json!({ "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": { "name": "kubernetes" },
                "spec": { "cidrs": ["10.96.0.0/12", "fd00:96::/108"] } }),
        ),
        (
            "egresses",
            json!({ "apiVersion": "coil.cybozu.com/v2", "kind": "Egress",
                "metadata": { "name": "nat", "namespace": "internet-egress" },
                "spec": { "destinations": ["0.0.0.0/0", "::/0"], "replicas": 1 } }),
        ),
    ]
}

const ROUTER_RULES: &str = "
    table inet router {
        counter leaked { }
        chain received { type filter hook prerouting priority raw;
            iifname client ip daddr { 203.0.113.0/24, 10.96.0.0/12 } counter name leaked drop
            iifname client ip6 daddr { 2001:db8:113::/64, fd00:96::/108 } counter name leaked drop
            iifname gateway ip saddr 10.20.30.0/24 counter name leaked
            iifname gateway ip6 saddr fd00:20::/64 counter name leaked
            iifname gateway ip daddr 10.20.30.0/24 ip protocol icmp counter name leaked
            iifname gateway ip6 daddr fd00:20::/64 meta l4proto ipv6-icmp icmpv6 type != { nd-neighbor-solicit, nd-neighbor-advert } counter name leaked
        }
    }";

/// The namespaces and the gateway's process.
pub(crate) struct Bed {
    pub(crate) client: Namespace,
    _client_tunnels: Tunnels,
    pub(crate) gateway: Namespace,
    pub(crate) router: Namespace,
    pub(crate) server: Namespace,
    pub(crate) objects: Objects,
    api: u16,
    process: Option<Child>,
}

impl Bed {
    /// With a gateway that is ready and has no client.
    pub(crate) fn new() -> Self {
        let router = Namespace::new();
        router.sh(HOST_SETUP);
        router.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
        let [client, gateway] = ["client", "gateway"].map(|name| {
            let own = families().map(|of| if name == "client" { of.client } else { of.gateway });
            pod(&router, name, own, MTU)
        });
        client.sh("ip addr add 10.20.30.41/32 dev lo; ip addr add fd00:20::41/128 dev lo nodad");
        let server = server(&router);
        router.sh(&format!("nft '{ROUTER_RULES}'"));
        echo(&server);
        let _client_tunnels = tunnels_of_client(&client);
        let objects: Objects = Arc::new(Mutex::new(objects()));
        let api = api::serve(&gateway, Arc::clone(&objects));
        let mut bed = Self { client, _client_tunnels, gateway, router, server, objects, api, process: None };
        bed.start();
        bed.wait_ready();
        bed
    }

    /// Starts the gateway.
    pub(crate) fn start(&mut self) {
        let own = std::env::current_exe().unwrap();
        let list = "-all,+net_admin,+bpf";
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", list, "--inh-caps", list, "--ambient-caps", list]);
        command.arg(own).args(["--ignored", "--exact", "gateway::gateway_process", "--nocapture"]);
        command.env(API, self.api.to_string()).stdin(Stdio::null());
        self.process = Some(self.gateway.run(|| command.spawn()).unwrap());
    }

    /// Kills it without any warning.
    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Sends SIGTERM.
    pub(crate) fn terminate(&self) {
        self.signal("TERM");
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, signal: &str) {
        let id = self.process.as_ref().unwrap().id();
        testbed_netns::sh(&format!("kill -{signal} {id}"));
    }

    /// Memory of the process.
    pub(crate) fn resident_kib(&self) -> u32 {
        let id = self.process.as_ref().unwrap().id();
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
    }

    /// Whether the process has ended well.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.process.as_mut().unwrap().try_wait().unwrap().is_some_and(|status| status.success())
    }

    /// Response of a path of the gateway's HTTP ports, with its head.
    pub(crate) fn get(&self, port: u16, path: &str) -> String {
        self.get_from(&self.gateway, [127, 0, 0, 1].into(), port, path)
    }

    /// The same, as a program in another namespace gets it.
    pub(crate) fn get_from(&self, from: &Namespace, gateway: IpAddr, port: u16, path: &str) -> String {
        let connect = || -> std::io::Result<String> {
            let address = SocketAddr::new(gateway, port);
            let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
            stream.set_read_timeout(Some(Duration::from_secs(2)))?;
            write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        };
        from.run(connect).unwrap_or_default()
    }

    /// The value of a metric.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let text = self.get(8080, "/metrics");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name}: {text}")).parse().unwrap()
    }

    pub(crate) fn wait_ready(&self) {
        self.wait("ready", Duration::from_secs(20), || self.get(8081, "/readyz").starts_with("HTTP/1.1 200"));
    }

    pub(crate) fn wait(&self, what: &str, limit: Duration, mut condition: impl FnMut() -> bool) -> Duration {
        let start = Instant::now();
        while !condition() {
            assert!(start.elapsed() < limit, "{what} after {limit:?}: {}", self.get(8081, "/readyz?verbose"));
            thread::sleep(Duration::from_millis(20));
        }
        start.elapsed()
    }

    /// A node program's stream.
    pub(crate) fn node(&self, name: &str) -> Node {
        self.try_node(|audience| api::token(name, audience)).unwrap()
    }

    /// A stream with another token.
    pub(crate) fn try_node(&self, token: impl FnOnce(&str) -> String) -> Result<Node, tonic::Status> {
        let gateway = SocketAddr::new(families()[0].gateway, REGISTRATION);
        Node::connect(&self.router, gateway, &egress(), token)
    }

    /// The stream of the client's node, with the client.
    pub(crate) fn registered(&self) -> Node {
        let mut node = self.node("n1");
        assert_eq!(node.all(vec![client("c", families().map(|family| family.client))]).unwrap(), []);
        node
    }

    /// Packets that should not have left a pod as they did.
    pub(crate) fn leaked(&self) -> u64 {
        let listed = self.router.sh("nft list counter inet router leaked");
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
        let stream = self.connect(server);
        let mut received = Vec::new();
        thread::scope(|scope| {
            scope.spawn(|| {
                (&stream).write_all(&data).unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
            });
            let _ = (&stream).read_to_end(&mut received);
        });
        received == data
    }

    /// A connection of the client to the echo server.
    pub(crate) fn connect(&self, server: IpAddr) -> TcpStream {
        self.try_connect(server).unwrap()
    }

    /// The same, if it can be made.
    pub(crate) fn try_connect(&self, server: IpAddr) -> std::io::Result<TcpStream> {
        let (address, limit) = (SocketAddr::new(server, TCP_ECHO), Duration::from_secs(10));
        let stream = self.client.run(|| TcpStream::connect_timeout(&address, limit))?;
        stream.set_read_timeout(Some(limit))?;
        Ok(stream)
    }

    /// The source that a connection of the client has outside, as the gateway's kernel says.
    pub(crate) fn outside_of(&self, stream: &TcpStream, gateway: IpAddr) -> SocketAddr {
        let own = stream.local_addr().unwrap();
        let family = if own.is_ipv4() { "ipv4" } else { "ipv6" };
        let listed =
            self.gateway.sh(&format!("conntrack -L -f {family} -p tcp --sport {} 2>/dev/null", own.port()));
        let reply = listed.rsplit("dport=").next().unwrap();
        SocketAddr::new(gateway, reply.split_whitespace().next().unwrap().parse().unwrap())
    }

    /// Runs `work` while the client sends to the server: in each family a flow that goes on, and one new flow after the other. Its
    /// result, and the number of packets.
    pub(crate) fn with_traffic<R>(&self, work: impl FnOnce() -> R) -> (R, u64) {
        let stop = AtomicBool::new(false);
        let send = &|family: Addresses| {
            let (old, mut sent) = (self.flow(family.server), 0);
            while !stop.load(Ordering::Relaxed) {
                old.send();
                self.flow(family.server).send();
                sent += 2;
                thread::sleep(Duration::from_millis(1));
            }
            sent
        };
        thread::scope(|scope| {
            let senders = families().map(|family| scope.spawn(move || send(family)));
            // Also when it panics: the scope waits for the senders.
            let stop = StopOnDrop(&stop);
            let result = work();
            drop(stop);
            (result, senders.into_iter().map(|sender| sender.join().unwrap()).sum())
        })
    }

    /// A new flow of the client; the source that the server sees.
    pub(crate) fn flow(&self, server: IpAddr) -> Flow {
        Flow::new(&self.client, server, UDP_SOURCE)
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.kill();
    }
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn server(router: &Namespace) -> Namespace {
    let server = Namespace::new();
    server.sh(HOST_SETUP);
    server.veth("eth0", router, "server");
    router.sh("ip addr add 203.0.113.1/24 dev server; ip addr add 2001:db8:113::1/64 dev server nodad
         ip route add 10.96.0.0/12 via 203.0.113.10; ip -6 route add fd00:96::/108 via 2001:db8:113::10");
    server.sh("ip addr add 203.0.113.10/24 dev eth0; ip addr add 2001:db8:113::10/64 dev eth0 nodad
         ip addr add 10.96.0.10/32 dev lo; ip addr add fd00:96::10/128 dev lo nodad
         ip route add 10.20.50.0/24 via 203.0.113.1; ip -6 route add fd00:50::/64 via 2001:db8:113::1");
    server
}

/// Echo of TCP, and of UDP the source; until the process ends.
fn echo(server: &Namespace) {
    let listener = server.run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, TCP_ECHO))).unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut reader = stream.try_clone().unwrap();
                let _ = std::io::copy(&mut reader, &mut stream);
                let _ = stream.shutdown(std::net::Shutdown::Write);
            });
        }
    });
    let socket = server.run(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, UDP_SOURCE))).unwrap();
    thread::spawn(move || {
        let mut packet = [0; 2048];
        while let Ok((_, from)) = socket.recv_from(&mut packet) {
            let _ = socket.send_to(from.ip().to_canonical().to_string().as_bytes(), from);
        }
    });
}

/// Tunnels straight to the gateway's addresses; no service stands before them.
fn tunnels_of_client(pod: &Namespace) -> Tunnels {
    let settings = Settings { port: 5555, drop_unknown: false, own: None };
    let uplink = pod.sh("ip -o link show eth0 | cut -d: -f1").trim().parse().unwrap();
    let mut tunnels = pod.run(|| Tunnels::open(uplink, settings)).unwrap();
    let (mut links, mut peers) = (BTreeMap::new(), BTreeMap::new());
    for Addresses { client, gateway, server, service, .. } in families() {
        let link = tunnels.add_link(gateway).unwrap();
        links.insert(link, TunnelLink { local: client, remote: Some(gateway), source_port: None });
        peers.insert(gateway, Peer::Gateway { link, service: gateway });
        let name = fairlead_fou::link_name(gateway);
        pod.sh(&format!(
            "ip route add {server} dev {name} src {client}; ip route add {service} dev {name} src {client}"
        ));
    }
    tunnels.set_links(&links).unwrap();
    tunnels.set_peers(&peers).unwrap();
    tunnels
}

//! Pods whose egress Coil v2.15 has set up: links, rules, routes and translation as its `pkg/fou` and `pkg/nat` make them, here by `ip`
//! and `nft`, in a network with a Service, two gateways and a server:
//!
//! ```text
//! client ---+
//! gateway 0 +-- router ---- server (has routes to the gateways' addresses only)
//! gateway 1 +
//! ```
//!
//! Needs a kernel with the modules fou, ipip and ip6_tunnel. The router's rules stand for kube-proxy's.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use crate::pods::{Flow, HOST_SETUP, pod};
use crate::{Namespace, skipped, try_sh_in};

/// The variable that says that this kernel must have Coil's tunnels.
pub const KERNEL_FOU: &str = "FAIRLEAD_KERNEL_FOU";
/// MTU of the pods' links in bytes.
pub const MTU: u32 = 1450;
/// Port of the server that sends back what it receives, by TCP.
pub const TCP_ECHO: u16 = 9000;
/// Port of the server that answers `?` with the source of the packet, and sends back everything else.
pub const UDP_ECHO: u16 = 9002;
const LIMIT: Duration = Duration::from_secs(20);

/// Addresses of one family.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    /// Address of the client pod.
    pub client: IpAddr,
    /// Address of the Service of the gateways, which the router translates to that of gateway 0.
    pub service: IpAddr,
    /// Addresses of the gateway pods.
    pub gateways: [IpAddr; 2],
    /// Address of the server.
    pub server: IpAddr,
}

/// IPv4 and IPv6.
pub fn families() -> [Addresses; 2] {
    let of = |texts: [&str; 5]| {
        let [client, service, one, two, server] = texts.map(|text| text.parse().expect("this is an address"));
        Addresses { client, service, gateways: [one, two], server }
    };
    [
        of(["10.20.30.40", "10.68.12.49", "10.20.50.1", "10.20.50.2", "203.0.113.10"]),
        of(["fd00:20::40", "fd00:68::49", "fd00:50::1", "fd00:50::2", "2001:db8:113::10"]),
    ]
}

/// The outer source port of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourcePort {
    /// 5555, as Coil has it without `fouSourcePortAuto`.
    Fixed,
    /// By the inner flow.
    Auto,
}

impl SourcePort {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::Fixed, Self::Auto];

    /// The number; `None` is one for each flow.
    pub fn number(self) -> Option<u16> {
        (self == Self::Fixed).then_some(5555)
    }
}

// Comments tell the counters apart: the VM's kernel has no module for named ones.
const ROUTER_RULES: &str = "
    table inet router {
        chain services { type nat hook prerouting priority dstnat;
            ip daddr 10.68.12.49 udp dport 5555 dnat ip to 10.20.50.1
            ip6 daddr fd00:68::49 udp dport 5555 dnat ip6 to fd00:50::1
        }
        chain received { type filter hook prerouting priority raw;
            iifname client ip daddr 203.0.113.0/24 counter drop comment in_clear
            iifname client ip6 daddr 2001:db8:113::/64 counter drop comment in_clear
            iifname { gateway0, gateway1 } ip saddr 10.20.30.0/24 counter comment untranslated
            iifname { gateway0, gateway1 } ip6 saddr fd00:20::/64 counter comment untranslated
            udp dport 5555 udp sport 5555 counter comment fixed
            udp dport 5555 udp sport != 5555 counter comment auto
        }
    }";

/// The namespaces; nothing of egress is set up in them.
#[derive(Debug)]
pub struct Network {
    /// The client pod.
    pub client: Namespace,
    /// The gateway pods.
    pub gateways: [Namespace; 2],
    router: Namespace,
    _server: Namespace,
}

impl Network {
    /// `None` if this kernel lacks what Coil needs, and need not have it: the test is [`skipped`].
    pub fn new() -> Option<Self> {
        if !has_kernel_fou() {
            skipped(&format!("this kernel has no fou, and {KERNEL_FOU} does not demand it"));
            return None;
        }
        let router = Namespace::new();
        router.sh(HOST_SETUP);
        router.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
        let [client, one, two] = ["client", "gateway0", "gateway1"].map(|name| {
            let own = families().map(|of| match name {
                "client" => of.client,
                "gateway0" => of.gateways[0],
                _ => of.gateways[1],
            });
            pod(&router, name, own, MTU)
        });
        let _server = server(&router);
        router.sh(&format!("nft '{ROUTER_RULES}'"));
        Some(Self { client, gateways: [one, two], router, _server })
    }

    /// Packets of a counter of the router: `in_clear`, `untranslated`; FoU packets by their source port, `fixed` and `auto`.
    pub fn counted(&self, counter: &str) -> u64 {
        let listed = self.router.sh("nft list chain inet router received");
        let lines = listed.lines().filter(|line| line.contains(&format!("comment \"{counter}\"")));
        let packets = lines.map(|line| line.split_whitespace().skip_while(|word| *word != "packets").nth(1));
        packets
            .map(|packets| packets.and_then(|it| it.parse::<u64>().ok()).expect("nft prints a number"))
            .sum()
    }

    /// The source that the server sees of a new flow of the client; `None` if no reply comes.
    pub fn seen_as(&self, server: IpAddr) -> Option<IpAddr> {
        Flow::new(&self.client, server, UDP_ECHO).seen_as()
    }

    /// Echo requests, and TCP of 1 MiB there and back, in both families.
    ///
    /// # Panics
    /// Something does not arrive.
    pub fn check(&self) {
        for Addresses { server, .. } in families() {
            self.client.sh(&format!("ping -c 3 -i 0.2 -W 2 {server}"));
            exchange(&self.client, server);
        }
    }
}

/// Whether this kernel has FoU.
///
/// # Panics
/// It has not, and [`KERNEL_FOU`] says that it must.
fn has_kernel_fou() -> bool {
    let must_have = std::env::var_os(KERNEL_FOU).is_some();
    let namespace = Namespace::new();
    if must_have {
        // The kernel does not load these on demand.
        namespace.sh("modprobe -a fou fou6");
    }
    match try_sh_in(&namespace, "ip fou add port 5555 ipproto 4; ip -6 fou add port 5555 ipproto 41") {
        Err(error) => {
            assert!(!must_have && error.contains("No such file"), "{error}");
            false
        }
        Ok(_) => true,
    }
}

fn server(router: &Namespace) -> Namespace {
    let server = Namespace::new();
    server.sh(HOST_SETUP);
    server.veth("eth0", router, "server");
    router.sh("ip addr add 203.0.113.1/24 dev server; ip addr add 2001:db8:113::1/64 dev server nodad");
    server.sh("ip addr add 203.0.113.10/24 dev eth0; ip addr add 2001:db8:113::10/64 dev eth0 nodad
         ip route add 10.20.50.0/24 via 203.0.113.1; ip -6 route add fd00:50::/64 via 2001:db8:113::1");
    let listener = server.run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, TCP_ECHO)));
    let listener = listener.expect("the port is free");
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut reader = stream.try_clone().expect("there are descriptors");
                let _ = std::io::copy(&mut reader, &mut stream);
                let _ = stream.shutdown(Shutdown::Write);
            });
        }
    });
    let socket = server.run(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, UDP_ECHO)));
    let socket = socket.expect("the port is free");
    thread::spawn(move || {
        let mut packet = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut packet) {
            let received = packet.get(..length).unwrap_or_default();
            let source = from.ip().to_canonical().to_string();
            let _ = socket.send_to(if received == b"?" { source.as_bytes() } else { received }, from);
        }
    });
    server
}

/// Connects to the echo server.
pub(crate) fn connect(from: &Namespace, server: IpAddr) -> TcpStream {
    let stream = from.run(|| TcpStream::connect_timeout(&SocketAddr::new(server, TCP_ECHO), LIMIT));
    let stream = stream.expect("the server is reached");
    stream.set_read_timeout(Some(LIMIT)).expect("the timeout is not zero");
    stream
}

fn exchange(from: &Namespace, server: IpAddr) {
    let data: Vec<u8> = (0..1 << 20).map(|at: u32| at.to_le_bytes()[0]).collect();
    let stream = connect(from, server);
    let mut received = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            (&stream).write_all(&data).expect("the server takes everything");
            stream.shutdown(Shutdown::Write).expect("the connection is there");
        });
        (&stream).read_to_end(&mut received).expect("the server sends everything back");
    });
    assert!(received == data, "{} bytes from {server}", received.len());
}

/// `FouTunnelController.Init`: the receivers, and links for packets of hosts without a link of their own.
fn init(namespace: &Namespace) {
    namespace.sh("ip fou add port 5555 ipproto 4; ip -6 fou add port 5555 ipproto 41
         ip link add fou-dummy type dummy
         ip link add coil_ipip4 type ipip external; ip link set coil_ipip4 up
         ip link add coil_ipip6 type ip6tnl external; ip link set coil_ipip6 up
         ip link set tunl0 name coil_tunl; ip link set ip6tnl0 name coil_ip6tnl
         sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0");
}

/// `AddPeer`. With a TTL, the kernel sets DF in outer IPv4 headers whatever `IFLA_IPTUN_PMTUDISC` says.
fn add_peer(namespace: &Namespace, name: &str, local: IpAddr, remote: IpAddr, port: SourcePort) {
    let port = if port == SourcePort::Fixed { "5555" } else { "auto" };
    let kind = if local.is_ipv4() { "ipip" } else { "ip6tnl" };
    let limits = if local.is_ipv4() { "ttl 225" } else { "hoplimit 225 encaplimit 0" };
    namespace.sh(&format!(
        "ip link add {name} type {kind} mode any local {local} remote {remote} {limits} \
             encap fou encap-sport {port} encap-dport 5555
         ip link set {name} up"
    ));
}

/// Sets up the client as `coild` does for an Egress with all destinations. `link_name` is the name of the link to an address.
pub fn set_up_client(client: &Namespace, link_name: impl Fn(IpAddr) -> String, port: SourcePort) {
    init(client);
    client.sh("ip rule add to 169.254.0.0/16 lookup main pref 1800; ip -6 rule add to fe80::/10 lookup main pref 1800
         ip rule add to 10.0.0.0/8 lookup main pref 2000; ip rule add to 172.16.0.0/12 lookup main pref 2001
         ip rule add to 192.168.0.0/16 lookup main pref 2002; ip -6 rule add to fc00::/7 lookup main pref 2000
         for family in -4 -6; do
             ip $family rule add lookup 117 pref 1900; ip $family rule add lookup 118 pref 2100
         done");
    for Addresses { client: own, service, .. } in families() {
        let name = link_name(service);
        add_peer(client, &name, own, service, port);
        let route = if own.is_ipv4() { "-4 route add scope global" } else { "-6 route add" };
        client.sh(&format!("ip {route} default dev {name} table 118 proto 30"));
    }
}

/// Sets up a gateway of these addresses with the client, as `coil-egress` does.
pub fn set_up_gateway(
    gateway: &Namespace,
    own: [IpAddr; 2],
    link_name: impl Fn(IpAddr) -> String,
    port: SourcePort,
) {
    init(gateway);
    gateway.sh("ip link add egress-dummy type dummy
         sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
         ip rule add iif eth0 lookup 118 pref 2000; ip -6 rule add iif eth0 lookup 118 pref 2000");
    for (own, Addresses { client, .. }) in own.into_iter().zip(families()) {
        let family = if own.is_ipv4() { "ip" } else { "ip6" };
        gateway.sh(&format!(
            "nft 'table {family} nat {{
                 chain POSTROUTING {{ type nat hook postrouting priority srcnat;
                     {family} saddr != {own} oifname eth0 counter masquerade
                 }}
             }}
             table {family} filter {{
                 chain FORWARD {{ type filter hook forward priority filter;
                     oifname eth0 ct state invalid counter drop
                 }}
             }}'"
        ));
        let name = link_name(client);
        add_peer(gateway, &name, own, client, port);
        let route = if own.is_ipv4() { "-4 route add scope global" } else { "-6 route add" };
        gateway.sh(&format!("ip {route} {client} dev {name} table 118 proto 30"));
    }
}

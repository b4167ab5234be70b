//! A pod of Kubernetes, as far as its network goes: a namespace with `eth0` to a router, which is the node.

use std::net::{IpAddr, Ipv6Addr, UdpSocket};
use std::time::Duration;

use crate::Namespace;

/// Sysctls for namespaces of pods, nodes and servers: addresses can be used at once, and packets may have any source.
pub const HOST_SETUP: &str = "
    sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0
    sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0";

/// Longest wait for a reply.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A pod with one address of each family, whose link at the router has its name.
pub fn pod(router: &Namespace, name: &str, [ipv4, ipv6]: [IpAddr; 2], mtu: u32) -> Namespace {
    let pod = Namespace::new();
    pod.sh(HOST_SETUP);
    pod.veth("eth0", router, name);
    pod.sh(&format!(
        "ip link set eth0 mtu {mtu}
         ip addr add {ipv4}/32 dev eth0
         ip addr add {ipv6}/128 dev eth0 nodad"
    ));
    router.sh(&format!(
        "ip link set {name} mtu {mtu}
         ip addr add fe80::1/64 dev {name} nodad
         ip addr add 169.254.1.1/32 dev {name}
         ip route add {ipv4}/32 dev {name}
         ip -6 route add {ipv6}/128 dev {name}"
    ));
    pod.sh("ip route add 169.254.1.1 dev eth0
         ip route add default via 169.254.1.1 dev eth0
         ip -6 route add default via fe80::1 dev eth0");
    pod
}

/// A UDP flow to a server that says where packets come from.
#[derive(Debug)]
pub struct Flow(UdpSocket);

impl Flow {
    /// From a namespace to a port of a server.
    pub fn new(from: &Namespace, server: IpAddr, port: u16) -> Self {
        let any: IpAddr = if server.is_ipv4() { [0; 4].into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = from.run(|| UdpSocket::bind((any, 0))).expect("a socket can be bound");
        socket.set_read_timeout(Some(TIMEOUT)).expect("the timeout is not zero");
        from.run(|| socket.connect((server, port))).expect("there is a route");
        Self(socket)
    }

    /// Sends a packet and waits for nothing. Without a way there is none.
    pub fn send(&self) {
        let _ = self.0.send(b"?");
    }

    /// Sends a packet; the source that the server has seen, or nothing if there is no reply.
    pub fn seen_as(&self) -> Option<IpAddr> {
        self.0.send(b"?").ok()?;
        let mut reply = [0; 64];
        let length = self.0.recv(&mut reply).ok()?;
        let text = std::str::from_utf8(reply.get(..length)?).expect("the server writes an address");
        Some(text.parse().expect("the server writes an address"))
    }
}

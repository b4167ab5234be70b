//! Packets to the mesh while other programs change rules, marks and nftables: nothing of it is on the uplink in clear text. The other node
//! counts what arrives there: WireGuard's messages, and packets of pods and nodes that are in none.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};

use fairlead_dataplane::mesh::remove;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, connect, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;

use crate::mesh_common::Namespace;
use crate::mesh_guard_routes_bed::{Bed, DATAGRAMS, PATIENCE, Side, UplinkTraffic};

/// Seconds; only bounds a failing test.
const TIMEOUT: i64 = 20;

/// As Tailscale does with an exit node; the numbers are those of `util/linuxfw` and `wgengine/router/router_linux.go`.
const TAILSCALE: &str = "ip route add default dev exit0 table 52; ip -6 route add default dev exit0 table 52; \
     ip rule add pref 5270 lookup 52; ip -6 rule add pref 5270 lookup 52";
/// As guides of providers do for a second network; without a number the rule would come before all others. Without `dev`, the kernel would look
/// up the link of the gateway by the rules, and find the mesh's device, since the gateway is a node.
const PROVIDER: &str = "ip route add default via 192.0.2.2 dev eth0 table 77; ip rule add pref 200 from 192.0.2.1 lookup 77; \
     ip -6 route add default via fd02::2 dev eth0 table 77; ip -6 rule add pref 200 from fd02::1 lookup 77; \
     ip rule add pref 201 from 10.77.1.0/24 lookup 77; ip -6 rule add pref 201 from fd77:1::/64 lookup 77";
/// Neither the rules nor the table that drops what leaves by another device.
pub(crate) const WITHOUT_GUARD: &str = "nft delete table inet fairlead_guard 2>/dev/null || true; for pref in 100 101 102 103 104 105; do for family in -4 -6; do \
     while ip $family rule del pref $pref 2>/dev/null; do :; done; done; done";

/// Sends from the pod and from the host to pod and node of the other side. Returns clear and encrypted packets, and the answers' count.
pub(crate) fn everything(bed: &Bed) -> UplinkTraffic {
    bed.count(|| {
        let from = [&bed.a.pod, &bed.a.node];
        let to = Side::ADDRESSES_OF_B;
        from.iter().map(|from| to.iter().map(|to| bed.send(from, to)).sum::<usize>()).sum()
    })
}

const ALL: usize = 2 * Side::ADDRESSES_OF_B.len() * DATAGRAMS;

pub(crate) fn assert_kept(traffic: UplinkTraffic, what: &str) {
    assert_eq!((traffic.clear, traffic.arrived), (0, ALL), "{what}: {traffic:?}");
    assert!(traffic.encrypted > 0, "{what}: {traffic:?}");
}

#[test]
fn a_flush_of_nftables_lets_nothing_out_and_traffic_goes_on() {
    let mut bed = Bed::new();
    assert_kept(everything(&bed), "undisturbed");
    bed.a.node.sh("nft flush ruleset");
    assert_kept(everything(&bed), "flushed");
    bed.a.node.sh(WITHOUT_GUARD);
    let traffic = everything(&bed);
    assert!(traffic.clear >= ALL, "without the guard it leaves in clear text: {traffic:?}");
    bed.apply();
    assert_kept(everything(&bed), "restored");
}

#[test]
fn rules_of_other_programs_lead_nothing_out_with_nftables_and_without() {
    for rules in [TAILSCALE, PROVIDER] {
        let mut bed = Bed::new();
        bed.a.node.sh(rules);
        // WireGuard's own packets follow these rules, as all that the host sends: by an exit node some are lost.
        for what in ["undisturbed", "nft flush ruleset"] {
            if what != "undisturbed" {
                bed.a.node.sh(what);
            }
            let traffic = everything(&bed);
            if rules == PROVIDER {
                assert_kept(traffic, what);
            } else {
                assert!(traffic.clear == 0 && traffic.encrypted > 0, "{what}, and {rules}: {traffic:?}");
            }
        }
        bed.apply();
        bed.a.node.sh(WITHOUT_GUARD);
        let traffic = everything(&bed);
        assert!(traffic.clear >= DATAGRAMS, "without the guard it leaves in clear text: {traffic:?}");
    }
}

#[test]
fn without_nftables_and_the_device_everything_is_dropped() {
    for gone in ["ip link set DEV down", "ip link del DEV"] {
        let bed = Bed::new();
        bed.a.node.sh(&format!("nft flush ruleset; {}", gone.replace("DEV", &bed.a.interface)));
        let traffic = everything(&bed);
        assert_eq!((traffic.clear, traffic.arrived), (0, 0), "{gone}: {traffic:?}");
        // Other nodes are answered all the same: ARP, and what goes past the mesh.
        bed.a.node.sh("ip neigh flush dev eth0");
        bed.b.node.sh("ip neigh flush dev eth0");
        bed.connects_past_the_mesh(&bed.a, &bed.b, "192.0.2.2:6443");
        bed.connects_past_the_mesh(&bed.b, &bed.a, "192.0.2.1:6443");
        bed.a.node.sh(WITHOUT_GUARD);
        let traffic = everything(&bed);
        assert!(traffic.clear >= DATAGRAMS, "without the guard it leaves in clear text: {traffic:?}");
    }
}

/// NetBird marks what it forwards (`client/net/net.go`): 0x1BD20 in, 0x1BD21 out, 0x1BD22 redirected.
#[test]
fn a_mark_of_another_program_is_not_taken_for_wireguards_and_its_bits_stay() {
    let mut bed = Bed::new();
    for mark in [0x1_bd20_u32, 0x1_bd21, 0x1_bd22, 0x20] {
        bed.a.node.sh(&format!(
            "nft 'table inet netbird; delete table inet netbird; table inet netbird {{ \
             chain in {{ type filter hook prerouting priority mangle; iifname pod0 meta mark set {mark:#x}; }}; \
             chain out {{ type filter hook postrouting priority 300; meta mark {:#x} counter; }}; }}'",
            mark & !0x60 | 0x40
        ));
        assert_kept(everything(&bed), &format!("{mark:#x}"));
        let counted = bed.a.node.sh("nft list table inet netbird");
        assert!(!counted.contains("packets 0 "), "{mark:#x} has not only become 0x40: {counted}");
        bed.a.node.sh("nft delete table inet talos_kubespan");
        assert_kept(everything(&bed), &format!("{mark:#x} without the table of the mesh"));
        bed.apply();
    }
    let accepts = "nft insert rule inet talos_kubespan kubespan_prerouting 'meta mark & 0x60 == 0x20 accept'";
    bed.a.node.sh(&format!("{accepts}; {WITHOUT_GUARD}"));
    let traffic = everything(&bed);
    assert!(traffic.clear >= DATAGRAMS, "taken for WireGuard's it leaves in clear text: {traffic:?}");
}

#[test]
fn exceptions_leave_as_without_a_mesh_with_nftables_and_without() {
    let bed = Bed::new();
    for flushes in [false, true] {
        if flushes {
            bed.a.node.sh("nft flush ruleset");
        }
        // The API server on the other node, and on this one.
        bed.connects_past_the_mesh(&bed.a, &bed.b, "192.0.2.2:6443");
        bed.connects_past_the_mesh(&bed.b, &bed.a, "192.0.2.1:6443");
        bed.connects_past_the_mesh(&bed.a, &bed.b, "[fd02::2]:6443");
        // A pod of the managed relay answers a node. The node sends with the mark of its program.
        bed.connects_past_the_mesh_marked(&bed.b, (&bed.a.pod, "10.77.1.2:3478"), 0x20);
        // What is no target, such as an excluded prefix.
        let traffic = bed.count(|| bed.send(&bed.a.pod, "198.51.100.9"));
        assert_eq!(traffic.arrived, DATAGRAMS, "{traffic:?}");
    }
}

/// A proxy of Services changes the destination of a connection after its route was looked up. No rule of this node makes the kernel read the ports
/// of such packets.
#[test]
fn connections_to_the_api_server_by_its_service_go_past_the_mesh() {
    let mut bed = Bed::new();
    bed.a.state.bypass.relays.clear();
    bed.apply();
    bed.a.node.sh("nft 'table inet services { chain output { type nat hook output priority -100; \
         ip daddr 10.96.0.1 tcp dport 443 dnat ip to 192.0.2.2:6443; \
         ip6 daddr fd96::1 tcp dport 443 dnat ip6 to [fd02::2]:6443; }; }'");
    for (service, server) in [("10.96.0.1:443", "192.0.2.2:6443"), ("[fd96::1]:443", "[fd02::2]:6443")] {
        let requests = bed.connects_past_the_mesh_by(service, (&bed.a, 0), (&bed.b.node, server));
        assert!(requests > 1, "only the answers are not in the tunnel: {requests} packets");
    }
    bed.a.node.sh(&format!("ip link set {} down", bed.a.interface));
    bed.connects_past_the_mesh_by("10.96.0.1:443", (&bed.a, 0), (&bed.b.node, "192.0.2.2:6443"));
}

/// As hosts with several uplinks do (`CONNMARK --restore-mark` in the chain OUTPUT of the table mangle): what has another mark is routed again, and
/// rules with ports do not see it.
#[test]
fn a_mark_that_another_program_adds_leads_wireguards_packets_not_into_their_tunnel() {
    let mut bed = Bed::new();
    bed.a.state.bypass.relays.clear();
    bed.apply();
    bed.a.node.sh("nft 'table inet uplinks { chain output { type route hook output priority mangle; \
         meta mark set meta mark | 0x1000000; }; }'");
    assert_kept(everything(&bed), "with a mark of another program");
}

/// A virtual address is in no mesh: connections to it come past it, and are answered so.
#[test]
fn answers_of_an_address_that_is_not_in_the_mesh_leave_past_it_and_nothing_else_of_it() {
    let bed = Bed::new();
    bed.a.node.sh("ip addr add 192.0.2.100/24 dev eth0");
    bed.connects_past_the_mesh_marked(&bed.b, (&bed.a.node, "192.0.2.100:80"), 0);
    let traffic = bed.count(|| {
        bed.a.node.sh("ping -c 2 -i 0.2 -W 1 -I 192.0.2.100 192.0.2.2 || true");
        0
    });
    assert_eq!(traffic.clear, 0, "its own connections: {traffic:?}");
    let client = Bed::datagrams(&bed.b.node, "192.0.2.100:9");
    let traffic = bed.count(|| is_refused(&client));
    assert_eq!((traffic.errors, traffic.arrived), (1, 1), "errors about connections to it: {traffic:?}");
    bed.a.node.sh("nft flush ruleset");
    let traffic = bed.count(|| {
        bed.a.node.sh("ping -c 2 -i 0.2 -W 1 -I 192.0.2.100 192.0.2.2 || true");
        0
    });
    assert_eq!(traffic.clear, 0, "without nftables: {traffic:?}");
}

/// A Service of this host leads to an address that is not in the mesh. Until the translation is undone, its answers have that as their source, and
/// so has the ICMP error when nothing listens there, which holds the begin of the packet that came by the tunnel.
#[test]
fn neither_answers_nor_errors_about_what_came_by_the_tunnel_leave_past_it() {
    let bed = Bed::new();
    bed.a.node.sh("ip addr add 198.18.0.1/32 dev lo; ip addr add fd98::1/128 dev lo nodad; \
         nft 'table inet services { chain in { type nat hook prerouting priority dstnat; \
         ip daddr 192.0.2.1 udp dport 7000 dnat ip to 198.18.0.1:7001; \
         ip6 daddr fd02::1 udp dport 7000 dnat ip6 to [fd98::1]:7001; }; }'");
    for (service, server) in [("192.0.2.1:7000", "198.18.0.1:7001"), ("[fd02::1]:7000", "[fd98::1]:7001")] {
        let client = Bed::datagrams(&bed.b.pod, service);
        let traffic = bed.count(|| is_refused(&client));
        assert_eq!((traffic.errors, traffic.arrived), (0, 1), "{service}: {traffic:?}");
        let server = bed.a.node.run(|| UdpSocket::bind(server)).unwrap();
        let traffic = bed.count(|| {
            client.send(b"x").unwrap();
            let from = server.recv_from(&mut [0; 8]).unwrap().1;
            server.send_to(b"y", from).unwrap();
            usize::from(client.recv(&mut [0; 8]).is_ok())
        });
        assert_eq!((traffic.clear, traffic.arrived), (0, 1), "{service}: {traffic:?}");
    }
    // The host chooses an address of the link by which the packet came.
    let interface = &bed.a.interface;
    bed.a.node.sh(&format!(
        "sysctl -qw net.ipv4.icmp_errors_use_inbound_ifaddr=1; ip addr add 198.18.0.9/32 dev {interface}; \
         nft 'table inet firewall {{ chain forward {{ type filter hook forward priority 0; \
         ip daddr 10.77.1.2 udp dport 7002 counter reject; }}; }}'"
    ));
    let client = Bed::datagrams(&bed.b.pod, "10.77.1.2:7002");
    let traffic = bed.count(|| is_refused(&client));
    assert_eq!(traffic.errors, 0, "of another address: {traffic:?}");
    let rejected = bed.a.node.sh("nft list table inet firewall");
    assert!(rejected.contains("packets 1 "), "{rejected}");
}

#[test]
fn connections_of_this_host_have_the_source_that_others_accept() {
    let bed = Bed::new();
    // Another network card has the default route, and a virtual address is on the loopback device.
    bed.a.node.sh("ip addr add 198.18.0.1/32 dev lo; ip addr add 198.51.100.1/24 dev exit0; \
         ip route replace default via 198.51.100.2 dev exit0");
    let source = |to: &str| bed.a.node.sh(&format!("ip route get {to}"));
    for to in ["10.77.2.2", "192.0.2.2"] {
        assert!(source(to).contains(" src 192.0.2.1 "), "{}", source(to));
    }
    let traffic = bed.count(|| bed.send(&bed.a.node, "10.77.2.2"));
    assert_eq!((traffic.arrived, traffic.clear), (DATAGRAMS, 0), "{traffic:?}");
}

#[test]
fn nothing_is_left_of_it_and_what_others_have_there_stays() {
    let bed = Bed::new();
    let rules = || bed.a.node.sh("ip rule; ip -6 rule");
    let routes = || {
        bed.a.node.sh("for table in 181 182 183; do for family in -4 -6; do \
             ip $family route show table $table 2>/dev/null || true; done; done")
    };
    assert!(rules().contains("102:\tfrom all lookup 181 proto 30"), "{}", rules());
    assert!(routes().contains("10.77.2.0/24"), "{}", routes());
    bed.a.node.sh("ip rule add pref 102 from 198.51.100.0/24 lookup 42; \
         ip route add 198.51.100.0/24 dev eth0 table 181");
    bed.a.node.run(|| remove().unwrap());
    assert!(!rules().contains("proto 30"), "{}", rules());
    assert!(rules().contains("from 198.51.100.0/24 lookup 42"), "{}", rules());
    assert_eq!(routes().trim(), "198.51.100.0/24 dev eth0 scope link");
}

/// Rules of Fairlead, in order of their text: of rules with one priority, one that is restored comes last.
pub(crate) fn own_rules(bed: &Bed) -> Vec<String> {
    let shown = bed.a.node.sh("ip rule; ip -6 rule");
    let mut rules: Vec<String> =
        shown.lines().filter(|line| line.contains("proto 30")).map(str::to_owned).collect();
    rules.sort();
    rules
}

#[test]
fn rules_and_routes_follow_the_state_and_are_restored() {
    let mut bed = Bed::new();
    let before = own_rules(&bed);
    for damage in [
        "ip rule del pref 102; ip -6 rule del pref 104",
        "ip rule add pref 103 from 192.0.2.9 ipproto tcp sport 1 goto 105 protocol 30",
        "ip route flush table 181; ip -6 route flush table 183",
        "ip rule flush; ip rule add pref 32766 lookup main; ip rule add pref 32767 lookup default",
    ] {
        bed.a.node.sh(damage);
        bed.apply_anew();
        assert_eq!(own_rules(&bed), before, "{damage}");
        assert_kept(everything(&bed), damage);
    }
    bed.a.state.bypass.servers = vec!["192.0.2.7:443".parse().unwrap()];
    bed.apply_anew();
    let after = own_rules(&bed).join("\n");
    assert!(after.contains("to 192.0.2.7") && !after.contains("6443"), "{after}");
}

impl Bed {
    /// A socket for datagrams to this address.
    fn datagrams(from: &Namespace, to: &str) -> UdpSocket {
        let to: SocketAddr = to.parse().unwrap();
        from.run(|| {
            let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            socket.connect(to).unwrap();
            socket
        })
    }

    /// A connection from a node to a node is made, and its packets are not in the tunnel.
    fn connects_past_the_mesh(&self, from: &Side, to: &Side, address: &str) {
        self.connects_past_the_mesh_marked(from, (&to.node, address), 0);
    }

    fn connects_past_the_mesh_marked(&self, from: &Side, (to, address): (&Namespace, &str), mark: u32) {
        self.connects_past_the_mesh_by(address, (from, mark), (to, address));
    }

    /// As it connects to an address that is translated to that of the listener; returns how many of the packets that came to the second node were
    /// not in the tunnel.
    fn connects_past_the_mesh_by(
        &self,
        by: &str,
        (from, mark): (&Side, u32),
        (to, address): (&Namespace, &str),
    ) -> usize {
        let address: SocketAddr = address.parse().unwrap();
        let listener = to.run(|| TcpListener::bind(address)).unwrap();
        // Also how long `accept` waits (socket(7)).
        setsockopt(&listener, sockopt::ReceiveTimeout, &TimeVal::new(TIMEOUT, 0)).unwrap();
        let traffic = self.count(|| {
            from.node.run(|| drop(connect_marked(by.parse().unwrap(), mark)));
            usize::from(listener.accept().is_ok())
        });
        assert!(traffic.arrived == 1 && traffic.past > 0, "{by}: {traffic:?}");
        traffic.past
    }
}

/// Whether an ICMP error answers a datagram; 1 if one does.
fn is_refused(client: &UdpSocket) -> usize {
    client.send(b"x").unwrap();
    usize::from(client.recv(&mut [0; 8]).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused))
}

/// A connection with a mark, which the socket has before it connects.
fn connect_marked(address: SocketAddr, mark: u32) -> OwnedFd {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    setsockopt(&socket, sockopt::Mark, &mark).unwrap();
    // Also how long `connect` waits.
    setsockopt(&socket, sockopt::SendTimeout, &TimeVal::new(TIMEOUT, 0)).unwrap();
    connect(socket.as_raw_fd(), &SockaddrStorage::from(address))
        .unwrap_or_else(|error| panic!("connect to {address} with mark {mark:#x}: {error}"));
    socket
}

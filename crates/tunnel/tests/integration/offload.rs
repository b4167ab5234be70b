//! Large packets and checksums that the kernel and this process leave to each other. Two hosts send through a tunnel, client – end – end –
//! server, over links on which every packet is small and has its real checksum.

use std::io::{IoSlice, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::common::wireguard_go::Judge;
use crate::common::{NAME, Namespace, Node, TIMEOUT, cable, pair, set_peer, transfer, until};
use nix::libc;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::Pid;
use socket2::{Domain, Protocol, Socket, Type};
use testbed_netns::pods::HOST_SETUP;

/// Bytes that each connection between the hosts carries.
const LENGTH: usize = 8 << 20;
/// Bytes of a segment of TCP over IPv4: the MTU of the tunnel without headers (RFC 791, RFC 9293) and timestamps (RFC 7323).
const SEGMENT: usize = 1420 - 20 - 20 - 12;
/// Datagrams from one host to the other.
const DATAGRAMS: usize = 2_000;
/// Datagrams that are sent before the first of them is received.
const GROUP: usize = 40;
/// Consecutive datagrams of one size: the device can join them.
const RUN: usize = 8;
/// A burst that is one packet until a kernel or a device cuts it.
const BURST: usize = 40;
const BURST_SEGMENT: u16 = 1_200;
/// Datagrams that a busy machine may lose.
const MAX_LOST: usize = 4;
/// Time after which a datagram counts as lost.
const LATE: Duration = Duration::from_secs(2);

#[test]
fn what_is_offloaded_arrives_complete_and_with_valid_checksums() {
    keep_on_one_processor();
    for endpoint in ["192.0.2.2:51820", "[2001:db8::2]:51820"] {
        let (a, b) = cable();
        let (a, b) = (Node::start(a, 1), Node::start(b, 2));
        b.change(&set_peer(a.public, None, &prefixes(1, 1)));
        a.change(&set_peer(b.public, Some(endpoint), &prefixes(2, 2)));
        let network = Network::behind([&a.namespace, &b.namespace]);
        network.exchange(LENGTH);
        for host in &network.hosts {
            assert_eq!(count(host, "TcpExtTCPOFOQueue"), 0, "segments of a connection were reordered");
        }
    }
}

#[test]
fn large_packets_are_one_read_and_one_write() {
    let (a, b) = pair();
    for address in b.inner() {
        let before = [NAME, "veth0"].map(|link| received_packets(&b.namespace, link));
        transfer(&a.namespace, &b.namespace, address, LENGTH >> 20);
        for (link, before) in [NAME, "veth0"].into_iter().zip(before) {
            let packets = received_packets(&b.namespace, link) - before;
            assert!(packets < LENGTH / SEGMENT / 5, "{link} has received {packets} packets for {address}");
        }
    }
}

#[test]
fn wireguard_go_understands_what_is_offloaded_and_is_understood() {
    let (a, b) = cable();
    let (node, judge) = (Node::start(a, 1), Judge::start(b));
    judge.peer_with(&node, "");
    let allowed = prefixes(1, 1).join(",");
    judge.namespace.sh(&format!("wg set {NAME} peer {} allowed-ips {allowed}", node.public));
    node.change(&set_peer(judge.public, Some("192.0.2.2:51820"), &prefixes(9, 2)));
    Network::behind([&node.namespace, &judge.namespace]).exchange(LENGTH / 4);
}

/// With several processors the kernel itself may reorder the packets of a connection: each processor has a queue for what it sends
/// into a veth (`enqueue_to_backlog` in `net/core/dev.c`). Threads and programs that this thread starts stay there too.
fn keep_on_one_processor() {
    let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
    let first = (0..CpuSet::count()).find(|processor| allowed.is_set(*processor).unwrap()).unwrap();
    let mut one = CpuSet::new();
    one.set(first).unwrap();
    sched_setaffinity(Pid::from_raw(0), &one).unwrap();
}

/// The addresses of the end with the inner addresses `10.8.0.INNER` and `fd00:8::INNER`, and of the host behind it.
fn prefixes(inner: u8, side: u8) -> [String; 4] {
    [
        format!("10.8.0.{inner}/32"),
        format!("fd00:8::{inner}/128"),
        format!("10.9.{side}.0/24"),
        format!("fd00:9:{side}::/64"),
    ]
}

/// A tunnel whose ends are routers, and the host behind each of them. The sides are 1 and 2.
struct Network<'a> {
    ends: [&'a Namespace; 2],
    hosts: [Namespace; 2],
}

impl<'a> Network<'a> {
    fn behind(ends: [&'a Namespace; 2]) -> Self {
        let [left, right] = ends;
        Self { ends, hosts: [host_behind(left, 1), host_behind(right, 2)] }
    }

    /// Connections of the hosts, of `length` bytes, and shorter ones of the ends, all at once and both ways. Then datagrams of the hosts
    /// and bursts of the ends. What an end itself sends is cut and gets its checksum in the device.
    fn exchange(&self, length: usize) {
        let [left, right] = &self.hosts;
        let (of_hosts, of_ends) = (self.ways([left, right]), self.ways(self.ends));
        of_hosts.iter().chain(&of_ends).for_each(Direction::answers);
        let of_hosts_and_ends =
            of_hosts.iter().map(|way| (way, length)).chain(of_ends.iter().map(|way| (way, length / 4)));
        let bytes = random(0, length + of_hosts.len() + of_ends.len());
        thread::scope(|scope| {
            for (start, (way, length)) in of_hosts_and_ends.enumerate() {
                let bytes = &bytes[start..start + length];
                scope.spawn(move || way.stream(bytes));
            }
        });
        of_hosts.iter().for_each(Direction::datagrams);
        of_ends.iter().for_each(Direction::burst);
        for namespace in [left, right].into_iter().chain(self.ends) {
            assert_eq!(count(namespace, "InCsumErrors"), 0, "packets arrived with wrong checksums");
        }
    }

    /// From either namespace to the host on the other side, to each of its addresses.
    fn ways<'s>(&'s self, [left, right]: [&'s Namespace; 2]) -> Vec<Direction<'s>> {
        let [client, server] = &self.hosts;
        let mut ways = Vec::new();
        for (from, to, side) in [(left, server, 2), (right, client, 1)] {
            for address in [format!("10.9.{side}.2"), format!("fd00:9:{side}::2")] {
                ways.push(Direction { from, to, address: address.parse().unwrap() });
            }
        }
        ways
    }
}

/// A host of an end, with a link that carries small packets with real checksums, and the routes of both. The receive window keeps all
/// packets that are under way within the queues of the links (500 packets of a TUN, 1,000 of a veth), so that none is lost.
fn host_behind(end: &Namespace, side: u8) -> Namespace {
    let (host, other) = (Namespace::new(), 3 - side);
    host.sh(HOST_SETUP);
    end.sh(HOST_SETUP);
    host.veth("eth0", end, "inside");
    host.sh(&format!(
        "ip link set eth0 mtu 1420
         ip addr add 10.9.{side}.2/24 dev eth0
         ip addr add fd00:9:{side}::2/64 dev eth0 nodad
         ip route add default via 10.9.{side}.1 dev eth0
         ip -6 route add default via fd00:9:{side}::1 dev eth0
         sysctl -qw net.ipv4.tcp_rmem='4096 65536 131072'"
    ));
    end.sh(&format!(
        "ip link set inside mtu 1420
         ip addr add 10.9.{side}.1/24 dev inside
         ip addr add fd00:9:{side}::1/64 dev inside nodad
         sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
         ip route add 10.9.{other}.0/24 dev {NAME}
         ip -6 route add fd00:9:{other}::/64 dev {NAME}"
    ));
    host.run(|| switch_off_offloads("eth0"));
    end.run(|| switch_off_offloads("inside"));
    host
}

/// From a namespace to an address of another one.
struct Direction<'a> {
    from: &'a Namespace,
    to: &'a Namespace,
    address: IpAddr,
}

impl Direction<'_> {
    fn answers(&self) {
        let address = self.address.to_string();
        let ping = || Command::new("ping").args(["-n", "-c", "1", "-W", "1", &address]).output().unwrap();
        until(&format!("{address} answers"), || self.from.run(ping).status.success());
    }

    /// Sends the bytes by TCP and compares what arrives.
    fn stream(&self, bytes: &[u8]) {
        let listener = self.to.run(|| TcpListener::bind((self.address, 0))).unwrap();
        let target = listener.local_addr().unwrap();
        let mut sender = self.from.run(|| TcpStream::connect_timeout(&target, TIMEOUT)).unwrap();
        sender.set_write_timeout(Some(TIMEOUT)).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        receiver.set_read_timeout(Some(TIMEOUT)).unwrap();
        thread::scope(|scope| {
            scope.spawn(move || sender.write_all(bytes).unwrap());
            let mut received = Vec::with_capacity(bytes.len());
            receiver.read_to_end(&mut received).unwrap();
            assert!(received == bytes, "what was sent to {} arrived damaged", self.address);
        });
    }

    /// Datagrams of various sizes, the longest of which fill the MTU of the tunnel. Each group is sent when the last one has arrived.
    fn datagrams(&self) {
        let sizes: &[usize] = match self.address {
            IpAddr::V4(_) => &[1, 31, 1_200, 1_372, 1_392],
            IpAddr::V6(_) => &[1, 31, 1_200, 1_372],
        };
        let (sender, receiver) = self.sockets();
        let numbers: Vec<usize> = (0..DATAGRAMS).collect();
        let datagram = |number: &usize| random(*number as u64, sizes[number / RUN % sizes.len()]);
        let mut arrived = 0;
        for group in numbers.chunks(GROUP) {
            let group: Vec<Vec<u8>> = group.iter().map(datagram).collect();
            group.iter().for_each(|datagram| assert_eq!(sender.send(datagram).unwrap(), datagram.len()));
            arrived += receive(&receiver, &group);
        }
        assert!(arrived + MAX_LOST >= DATAGRAMS, "{arrived} datagrams to {} arrived", self.address);
    }

    /// Datagrams that the sender leaves to the kernel to cut, and the kernel to the device (`UDP_SEGMENT`, udp(7)).
    fn burst(&self) {
        let (sender, receiver) = self.sockets();
        let bytes = random(0, BURST * usize::from(BURST_SEGMENT));
        let control = [ControlMessage::UdpGsoSegments(&BURST_SEGMENT)];
        let slices = [IoSlice::new(&bytes)];
        let sent = sendmsg::<()>(sender.as_raw_fd(), &slices, &control, MsgFlags::empty(), None).unwrap();
        assert_eq!(sent, bytes.len());
        let datagrams: Vec<Vec<u8>> = bytes.chunks(BURST_SEGMENT.into()).map(<[u8]>::to_vec).collect();
        let arrived = receive(&receiver, &datagrams);
        assert!(arrived + MAX_LOST >= BURST, "{arrived} datagrams of a burst to {} arrived", self.address);
    }

    /// A connected one, and the one to which it sends.
    fn sockets(&self) -> (UdpSocket, UdpSocket) {
        let any: IpAddr = match self.address {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let receiver = self.to.run(|| UdpSocket::bind((self.address, 0))).unwrap();
        receiver.set_read_timeout(Some(LATE)).unwrap();
        let sender = self.from.run(|| UdpSocket::bind((any, 0))).unwrap();
        sender.connect(receiver.local_addr().unwrap()).unwrap();
        (sender, receiver)
    }
}

/// Number of datagrams that arrive. All that arrive are among `sent`.
fn receive(socket: &UdpSocket, sent: &[Vec<u8>]) -> usize {
    let mut missing = sent.to_vec();
    let mut buffer = [0; 2_048];
    while !missing.is_empty() {
        let Ok(length) = socket.recv(&mut buffer) else { break };
        let found = missing.iter().position(|datagram| datagram[..] == buffer[..length]);
        missing.remove(found.unwrap_or_else(|| panic!("a datagram of {length} bytes arrived damaged")));
    }
    sent.len() - missing.len()
}

/// Pseudo-random bytes (xorshift64).
fn random(seed: u64, length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ seed;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_ne_bytes()
    };
    std::iter::repeat_with(next).flatten().take(length).collect()
}

/// The sum of the namespace's counters whose names end so: `/proc/net/{snmp,snmp6,netstat}`, as nstat(8) names them.
fn count(namespace: &Namespace, name: &str) -> u64 {
    let all = namespace.sh("nstat -asz");
    let value = |line: &str| {
        let mut words = line.split_whitespace();
        words.next()?.ends_with(name).then_some(())?;
        words.next()?.parse::<u64>().ok()
    };
    let values: Vec<u64> = all.lines().filter_map(value).collect();
    assert!(!values.is_empty(), "the kernel does not count {name}");
    values.iter().sum()
}

/// Packets that came from a link: from a TUN, the writes of its process. `/sys` would show those of another namespace.
fn received_packets(namespace: &Namespace, link: &str) -> usize {
    let links = namespace.sh("cat /proc/net/dev");
    let mut lines = links.lines();
    let values = lines.find_map(|line| line.trim_start().strip_prefix(link)?.strip_prefix(':')).unwrap();
    values.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// `linux/genetlink.h`.
const CONTROLLER: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
/// `linux/ethtool_netlink.h`.
const SET_FEATURES: u8 = 12;
const HEADER: u16 = 1 | NESTED;
const HEADER_NAME: u16 = 2;
const HEADER_FLAGS: u16 = 3;
const OMIT_REPLY: u32 = 2;
const WANTED: u16 = 3 | NESTED;
const BITS: u16 = 3 | NESTED;
const BIT: u16 = 1 | NESTED;
const BIT_NAME: u16 = 2;
/// `linux/netlink.h`.
const NESTED: u16 = 1 << 15;
const REQUEST_AND_ACKNOWLEDGE: u16 = 1 | 4;

/// `ethtool -K LINK tx off gro off`, for a link of this thread's namespace: the kernel cuts large packets and computes checksums before
/// it sends. Without checksums a link gets no large packets of TCP or UDP either (`netdev_fix_features` in `net/core/dev.c`).
fn switch_off_offloads(link: &str) {
    let answer = ask(CONTROLLER, GET_FAMILY, &attribute(FAMILY_NAME, b"ethtool\0"));
    let ethtool = u16::from_ne_bytes(value(&answer[20..], FAMILY_ID).try_into().unwrap());

    let name = attribute(HEADER_NAME, format!("{link}\0").as_bytes());
    let header = attribute(HEADER, &[name, attribute(HEADER_FLAGS, &OMIT_REPLY.to_ne_bytes())].concat());
    let off = |feature: &[u8]| attribute(BIT, &attribute(BIT_NAME, feature));
    let bits = [off(b"tx-checksum-ip-generic\0"), off(b"rx-gro\0")].concat();
    let answer = ask(ethtool, SET_FEATURES, &[header, attribute(WANTED, &attribute(BITS, &bits))].concat());
    assert_eq!(answer[16..20], [0; 4], "the kernel leaves the offloads of {link} on");
}

/// One request of generic netlink, and the first message of its answer.
fn ask(family: u16, command: u8, attributes: &[u8]) -> Vec<u8> {
    let protocol = Some(Protocol::from(libc::NETLINK_GENERIC));
    let socket = Socket::new(Domain::from(libc::AF_NETLINK), Type::RAW, protocol).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut message = u32::try_from(20 + attributes.len()).unwrap().to_ne_bytes().to_vec();
    message.extend(family.to_ne_bytes());
    message.extend(REQUEST_AND_ACKNOWLEDGE.to_ne_bytes());
    // No sequence number and no port; the command with its version.
    message.extend([0; 8]);
    message.extend([command, 1, 0, 0]);
    message.extend(attributes);
    (&socket).write_all(&message).unwrap();
    let mut answer = vec![0; 8_192];
    let length = (&socket).read(&mut answer).unwrap();
    answer.truncate(length);
    answer
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).unwrap();
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// The value of the first attribute of a kind.
fn value(mut attributes: &[u8], kind: u16) -> &[u8] {
    while let [length, more, low, high, ..] = *attributes {
        let length = usize::from(u16::from_ne_bytes([length, more]));
        if u16::from_ne_bytes([low, high]) == kind {
            return &attributes[4..length];
        }
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    panic!("the kernel has no ethtool netlink (CONFIG_ETHTOOL_NETLINK)")
}

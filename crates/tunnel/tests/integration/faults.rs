//! Failures of the kernel below a device: an interface that is removed or down, packets that this host does not send, a kernel that can do
//! less. The device says so, and works again as soon as it can.

use std::io;
use std::net::UdpSocket;

use crate::common::{NAME, Namespace, Node, PORT, namespace, pair, set_peer, transfer, until};
use fairlead_keys::DeviceChange;
use fairlead_tunnel::{Device, Error, Settings};
use nix::libc;
use nix::sys::socket::{getsockopt, sockopt};

/// A port on which no program listens.
const DISCARD: u16 = 9;
/// Size of a transfer, in MiB.
const LENGTH: usize = 2;
/// More packets than the queue of a TUN holds (`TUN_READQ_SIZE`) are of no use.
const BURST: usize = 400;
/// Payload of each packet: with headers of IPv4 and UDP as long as the MTU of the device.
const PAYLOAD: [u8; 1392] = [0; 1392];
/// Buffer of the socket, in bytes; the kernel doubles it, for what it keeps with each packet (socket(7)).
const SOCKET_BUFFER: u64 = 4 << 20;

/// Sends datagrams through the tunnel; whether they arrive is not asked.
fn send(from: &Node, to: &Node, count: usize) {
    let to = to.inner()[0];
    from.namespace.run(|| {
        let socket = UdpSocket::bind(("0.0.0.0", 0)).unwrap();
        socket.set_nonblocking(true).unwrap();
        (0..count).for_each(|_| drop(socket.send_to(&PAYLOAD, (to, DISCARD))));
    });
}

/// Sends until the device of `from` says why it cannot.
fn fails_to_send(from: &Node, to: &Node, why: &str) {
    until(&format!("sending fails: {why}"), || {
        send(from, to, 1);
        from.device().send_error(&to.public).is_some_and(|error| error.contains(why))
    });
}

/// Both ends reach each other, and nothing is left of an error.
fn works(a: &Node, b: &Node) {
    for (from, to) in [(a, b), (b, a)] {
        from.reaches(to.inner()[0]);
        assert_eq!(from.device().send_error(&to.public), None);
    }
}

#[test]
fn a_removed_interface_ends_the_device_and_a_new_one_resumes_the_traffic() {
    let (mut a, b) = pair();
    a.namespace.sh(&format!("ip link delete {NAME}"));
    until("the device has ended", || matches!(a.device().state(), Err(Error::Stopped(_))));
    let change = DeviceChange { fwmark: Some(1), ..DeviceChange::default() };
    assert!(matches!(a.device().change(&change), Err(Error::Stopped(name)) if name == NAME));
    assert!(a.device().send_error(&b.public).is_some_and(|error| error.contains(NAME)));

    // With the same port, which the device that has ended keeps open as long as it is held.
    a.device = None;
    a.restart();
    a.namespace.sh(&format!("ip addr add 10.8.0.1/24 dev {NAME}; ip link set {NAME} up"));
    a.peer_with(&b, Some("192.0.2.2:51820"));
    works(&a, &b);
}

#[test]
fn an_interface_that_was_down_carries_packets_again() {
    let (a, b) = pair();
    a.namespace.sh(&format!("ip link set {NAME} down"));
    let before = a.peer(&b.public).rx_bytes;
    // The device receives them all the same, and cannot write them to the TUN.
    until("packets come while it is down", || {
        send(&b, &a, 1);
        a.peer(&b.public).rx_bytes > before + PAYLOAD.len() as u64
    });
    a.namespace.sh(&format!("ip link set {NAME} up"));
    works(&a, &b);
}

#[test]
fn what_a_firewall_of_this_host_drops_is_told_until_it_passes() {
    let (a, b) = pair();
    a.namespace.sh(&format!(
        "nft 'table inet firewall {{ chain out {{ type filter hook output priority filter; udp dport {PORT} drop; }}; }}'"
    ));
    fails_to_send(&a, &b, "Operation not permitted");
    assert_eq!(b.device().send_error(&a.public), None);
    a.namespace.sh("nft delete table inet firewall");
    works(&a, &b);
}

#[test]
fn a_missing_route_is_told_until_there_is_one() {
    let (a, b) = pair();
    a.namespace.sh("ip link set veth0 down");
    fails_to_send(&a, &b, "Network is unreachable");
    a.namespace.sh("ip link set veth0 up; ip addr replace 2001:db8::1/64 dev veth0 nodad");
    works(&a, &b);

    a.namespace.sh("ip -6 route delete 2001:db8::/64 dev veth0");
    let over_ipv6 = set_peer(b.public, Some("[2001:db8::2]:51820"), &b.inner_prefixes());
    until("sending over IPv6 fails", || {
        // What still comes over IPv4 may move the session back.
        a.change(&over_ipv6);
        send(&a, &b, 1);
        let error = a.device().send_error(&b.public);
        error.is_some_and(|error| error.contains("2001:db8::2") && error.contains("Network is unreachable"))
    });
    a.namespace.sh("ip -6 route add 2001:db8::/64 dev veth0");
    works(&a, &b);
}

/// The other end does not answer ARP: its host keeps what is to be sent, up to a limit (`__neigh_event_send` in `net/core/neighbour.c`).
#[test]
fn a_full_queue_below_loses_packets_or_makes_the_device_wait_and_it_goes_on() {
    let (a, b) = pair();
    // Its own ARP requests would tell where it is.
    let address = a.namespace.sh("ip -o link show veth0 | sed 's/.*ether //; s/ .*//'");
    b.namespace.sh(&format!("ip neigh replace 192.0.2.1 lladdr {} dev veth0 nud permanent", address.trim()));
    let stall = |kept: u32| {
        b.namespace.sh("sysctl -qw net.ipv4.conf.veth0.arp_ignore=8");
        a.namespace.sh(&format!(
            "sysctl -qw net.ipv4.neigh.veth0.unres_qlen_bytes={kept} net.ipv4.neigh.veth0.mcast_solicit=1000; \
             ip neigh flush dev veth0"
        ));
    };
    let go_on = || {
        b.namespace.sh("sysctl -qw net.ipv4.conf.veth0.arp_ignore=0");
        works(&a, &b);
    };
    // The kernel says nothing of what it loses (udp(7), ENOBUFS).
    stall(4096);
    let before = a.peer(&b.public).tx_bytes;
    until("the packets are sent, and lost", || {
        send(&a, &b, BURST);
        a.peer(&b.public).tx_bytes > before + 1_000_000
    });
    assert_eq!(a.device().send_error(&b.public), None);
    go_on();

    // More than the socket may have on its way.
    stall(1 << 30);
    let before = a.peer(&b.public).tx_bytes;
    let (mut sent, mut unchanged) = (0, 0);
    until("the device waits", || {
        send(&a, &b, BURST);
        let before = std::mem::replace(&mut sent, a.peer(&b.public).tx_bytes);
        unchanged = if before == sent { unchanged + 1 } else { 0 };
        unchanged == 5
    });
    assert!(sent > before + (SOCKET_BUFFER >> 1), "{sent} bytes do not fill a socket");
    let before = a.peer(&b.public).rx_bytes;
    until("it receives meanwhile", || {
        send(&b, &a, 1);
        a.peer(&b.public).rx_bytes > before
    });
    go_on();
}

#[test]
fn what_keeps_a_device_from_its_interface_is_named_and_it_starts_once_that_is_gone() {
    let namespace = namespace();
    let start = || namespace.run(|| Device::start(Settings::new(NAME, 1420)));
    namespace.sh("mount -t tmpfs -o nodev tmpfs /dev/net");
    for (make, why, advice) in [
        ("", io::ErrorKind::NotFound, "load the `tun` module"),
        ("mknod /dev/net/tun c 10 200", io::ErrorKind::PermissionDenied, "container"),
    ] {
        namespace.sh(make);
        for error in [start().err().unwrap(), namespace.run(Device::check).unwrap_err()] {
            assert!(matches!(&error, Error::OpenTun(source) if source.kind() == why), "{error:?}");
            assert!(error.to_string().contains(advice), "{error}");
        }
    }
    namespace.sh("umount /dev/net");
    // A TAP is a link of the same kind, and one with several queues can only be opened as such.
    for other in ["mode tap", "mode tun multi_queue"] {
        namespace.sh(&format!("ip tuntap add dev {NAME} {other}"));
        let error = start().err().unwrap().to_string();
        assert!(error.contains(NAME) && error.contains("interface of another kind"), "{error}");
        namespace.sh(&format!("ip link delete {NAME}"));
    }
    let device = start().unwrap();
    namespace.run(Device::check).unwrap();
    device.delete().unwrap();
}

/// Before Linux 6.2 a TUN takes and gives no large packets of UDP, and before 4.18 no socket does. Others offer nothing at all.
#[test]
fn packets_pass_where_the_kernel_cuts_and_joins_less_or_nothing() {
    let (mut a, b) = pair();
    let joined = LENGTH << 20 >> 12;
    for (features, least, most) in [(UDP_OFFLOADS, 0, joined), (u32::MAX, (LENGTH << 20) / 1420, usize::MAX)]
    {
        a.device = None;
        a.device = Some(a.namespace.run(|| {
            refuse_offloads(features);
            let socket = UdpSocket::bind(("0.0.0.0", 0)).unwrap();
            assert!(
                getsockopt(&socket, sockopt::UdpGsoSegment).is_err(),
                "the kernel does what it should not"
            );
            start()
        }));
        a.change(&DeviceChange {
            private_key: Some(a.private.clone()),
            listen_port: Some(PORT),
            ..set_peer(b.public, Some("192.0.2.2:51820"), &b.inner_prefixes())
        });
        for family in [0, 1] {
            let before = read_packets(&a.namespace);
            transfer(&a.namespace, &b.namespace, b.inner()[family], LENGTH);
            let read = read_packets(&a.namespace) - before;
            assert!((least..most).contains(&read), "{read} packets were read for {LENGTH} MiB");
            transfer(&b.namespace, &a.namespace, a.inner()[family], LENGTH);
        }
    }
}

/// Starts a device on an interface that another one has left, and that a child of this process may have open until its execve(2).
fn start() -> Device {
    let mut device = None;
    until("the interface is free", || {
        device = Device::start(Settings::new(NAME, 1420)).ok();
        device.is_some()
    });
    device.unwrap()
}

/// Packets that the device has read from its TUN, large ones as one (`/proc/net/dev`: after 8 values of what is received, bytes).
fn read_packets(namespace: &Namespace) -> usize {
    let links = namespace.sh("cat /proc/net/dev");
    let mut lines = links.lines();
    let values = lines.find_map(|line| line.trim_start().strip_prefix(NAME)?.strip_prefix(':')).unwrap();
    values.split_whitespace().nth(9).unwrap().parse().unwrap()
}

/// Offloads of UDP that a TUN can do (`linux/if_tun.h`).
const UDP_OFFLOADS: u32 = libc::TUN_F_USO4 | libc::TUN_F_USO6;

/// Refuses these features of TUN interfaces to this thread and those that it starts, and all joining and cutting of datagrams, as an old
/// kernel does.
fn refuse_offloads(features: u32) {
    let offload = u32::try_from(libc::TUNSETOFFLOAD).unwrap();
    let [udp, cut, join] = [libc::SOL_UDP, libc::UDP_SEGMENT, libc::UDP_GRO].map(i32::unsigned_abs);
    let calls = [
        Refused {
            call: libc::SYS_ioctl,
            is: vec![(1, offload)],
            has_any: Some((2, features)),
            errno: libc::EINVAL,
        },
        Refused {
            call: libc::SYS_getsockopt,
            is: vec![(1, udp), (2, cut)],
            has_any: None,
            errno: libc::ENOPROTOOPT,
        },
        Refused {
            call: libc::SYS_setsockopt,
            is: vec![(1, udp), (2, join)],
            has_any: None,
            errno: libc::ENOPROTOOPT,
        },
    ];
    let mut filter: Vec<libc::sock_filter> = calls.iter().flat_map(Refused::instructions).collect();
    filter.push(statement(libc::BPF_RET, libc::SECCOMP_RET_ALLOW));
    install(&mut filter);
}

/// A system call that fails (seccomp(2)).
struct Refused {
    call: libc::c_long,
    /// Arguments, by number, with these values.
    is: Vec<(u32, u32)>,
    /// One that has any of these bits.
    has_any: Option<(u32, u32)>,
    errno: i32,
}

impl Refused {
    /// Each condition that does not hold leads behind the last instruction.
    fn instructions(&self) -> Vec<libc::sock_filter> {
        // `struct seccomp_data`: the number of the call, and from byte 16 on its arguments of 8 bytes.
        let low_half = if cfg!(target_endian = "big") { 4 } else { 0 };
        let argument = |number: u32| 16 + 8 * number + low_half;
        let call = u32::try_from(self.call).unwrap();
        let equal = self.is.iter().map(|(number, value)| (argument(*number), libc::BPF_JEQ, *value));
        let any = self.has_any.map(|(number, bits)| (argument(number), libc::BPF_JSET, bits));
        let conditions: Vec<_> = [(0, libc::BPF_JEQ, call)].into_iter().chain(equal).chain(any).collect();
        let mut left = u8::try_from(2 * conditions.len()).unwrap();
        let mut instructions = Vec::new();
        for (offset, comparison, value) in conditions {
            left -= 2;
            instructions.push(statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset));
            let jump = statement(libc::BPF_JMP | libc::BPF_K | comparison, value);
            instructions.push(libc::sock_filter { jf: left + 1, ..jump });
        }
        instructions.push(statement(libc::BPF_RET, libc::SECCOMP_RET_ERRNO | self.errno.unsigned_abs()));
        instructions
    }
}

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: u16::try_from(code).unwrap(), jt: 0, jf: 0, k }
}

#[expect(unsafe_code, reason = "nix has no wrapper for PR_SET_SECCOMP")]
fn install(filter: &mut [libc::sock_filter]) {
    let program = libc::sock_fprog { len: u16::try_from(filter.len()).unwrap(), filter: filter.as_mut_ptr() };
    // SAFETY: PR_SET_SECCOMP reads the program and the `len` instructions that it points to, which outlive the call.
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

//! Findings of a node about its own links: pure cases on made-up snapshots, and the kernel in namespaces.

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};

use fairlead_dataplane::uplink::{
    HostNetwork, Ignored, enable_forwarding, loosen_reverse_path_filter, mesh_mtu, refuse_advertisements,
};
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::{
    Address, AddressFlags, IpFamily, Link, LinkLayer, NextHop, Route, RouteKind, Scope, TABLE_MAIN,
};
use ipnet::IpNet;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn6, sendto, setsockopt, socket,
    sockopt,
};
use proptest::prelude::*;
use testbed_netns::sh_in;

fn prefix(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn run(netns: &Netns, command: &str) -> String {
    sh_in(netns, command).trim().to_owned()
}

fn link(index: u32, name: &str, mtu: u32) -> Link {
    Link {
        index,
        name: name.to_owned(),
        mtu,
        up: true,
        carrier: true,
        operational: true,
        layer: LinkLayer::Ethernet,
        ..Link::default()
    }
}

fn address(link: u32, text: &str) -> Address {
    Address { link, prefix: prefix(text), scope: Scope::UNIVERSE, flags: AddressFlags::PERMANENT }
}

fn default_route(destination: &str, gateway: &str, link: u32) -> Route {
    Route::via(TABLE_MAIN, 3, prefix(destination), ip(gateway), link)
}

#[test]
fn the_default_route_covers_all_ipv4_routes() {
    let routes = |destinations: &[&str]| {
        let route = |text: &&str| {
            let gateway = if text.contains(':') { "fe80::1" } else { "192.0.2.1" };
            default_route(text, gateway, 2)
        };
        HostNetwork { routes: destinations.iter().map(route).collect(), ..HostNetwork::default() }
    };
    let network = routes(&["::/0", "10.1.0.0/16", "10.0.0.0/16", "10.0.7.0/24"]);
    assert_eq!(network.ipv4_routes(), ["10.0.0.0/15".parse().unwrap()]);
    assert_eq!([true, false].map(|is_ipv4| network.has_default_route(is_ipv4)), [false, true]);
    let network = routes(&["0.0.0.0/0", "10.1.0.0/16"]);
    assert_eq!(network.ipv4_routes(), ["0.0.0.0/0".parse().unwrap()]);
    assert_eq!(network.families_without_default(), [IpFamily::V6]);
    assert_eq!([true, false].map(|is_ipv4| network.has_default_route(is_ipv4)), [true, false]);
}

/// Loopback, two cards, the mesh device, a pod and a bridge.
fn node() -> HostNetwork {
    let software = |kind: &str, link| Link { kind: Some(kind.to_owned()), ..link };
    let loopback = Link { layer: LinkLayer::Loopback, ..link(1, "lo", 65536) };
    let pod = Link {
        alias: Some("COIL:default:abc:eth0".into()),
        ..software("veth", link(5, "veth01234567", 1300))
    };
    HostNetwork {
        links: vec![
            loopback,
            link(2, "eth0", 1500),
            link(3, "eth1", 1400),
            Link { layer: LinkLayer::Other, ..software("wireguard", link(4, "wire_kube", 1420)) },
            pod,
            software("bridge", link(6, "docker0", 1280)),
        ],
        addresses: Vec::new(),
        routes: vec![default_route("0.0.0.0/0", "192.0.2.1", 2)],
        ..HostNetwork::default()
    }
}

fn ignored() -> Ignored {
    Ignored {
        links: vec!["wire_kube".into()],
        link_prefixes: vec!["docker".into()],
        networks: vec![prefix("10.1.0.0/16")],
    }
}

#[test]
fn the_uplink_is_where_the_default_routes_lead() {
    let mut node = node();
    assert_eq!(node.uplink_mtu(&ignored()), Some(1500));
    node.routes.push(default_route("::/0", "fe80::1", 3));
    assert_eq!(node.uplink_mtu(&ignored()), Some(1400), "the other family's uplink is smaller");
    node.routes.truncate(1);
    node.routes.push(default_route("0.0.0.0/0", "192.0.2.1", 4));
    node.routes.push(default_route("10.0.0.0/8", "192.0.2.1", 3));
    assert_eq!(node.uplink_mtu(&ignored()), Some(1500), "our own device and narrower routes do not count");
    node.routes.push(Route { mtu: Some(1450), metric: 9, ..default_route("0.0.0.0/0", "192.0.2.1", 2) });
    assert_eq!(node.uplink_mtu(&ignored()), Some(1450), "a route may promise less than its link");
    let hop = |link| NextHop { link, gateway: None };
    let multipath =
        Route { link: None, next_hops: vec![hop(2), hop(3)], ..default_route("::/0", "fe80::1", 1) };
    node.routes = vec![multipath];
    assert_eq!(node.uplink_mtu(&ignored()), Some(1400), "any of several ways may be taken");
    node.routes = vec![Route { kind: RouteKind::UNREACHABLE, ..default_route("::/0", "fe80::1", 3) }];
    assert_eq!(node.uplink_mtu(&ignored()), Some(1400), "no default route: the least physical link");
}

/// As `ip route add`, wg-quick and OpenVPN make them.
#[test]
fn networks_on_links_are_those_of_addresses_and_of_routes_by_hand() {
    let mut node = node();
    node.addresses = vec![address(2, "192.0.2.7/24"), address(6, "172.17.0.1/16")];
    let onto =
        |protocol, destination: &str, link| Route::onto(TABLE_MAIN, protocol, prefix(destination), link);
    node.routes.extend([
        onto(2, "192.0.2.0/24", 2),
        onto(3, "10.64.0.0/12", 3),
        onto(4, "fd00:9::/64", 3),
        // Another node's pods, by a routing daemon; a host; what OpenVPN has for a default route.
        onto(12, "10.80.1.0/24", 3),
        onto(3, "10.65.0.9/32", 3),
        onto(3, "128.0.0.0/1", 3),
        onto(2, "fe80::/64", 3),
        // Of links that do not count, and of the loopback device.
        onto(3, "10.66.0.0/16", 4),
        onto(3, "10.67.0.0/16", 6),
        onto(3, "10.68.0.0/16", 1),
        default_route("10.69.0.0/16", "192.0.2.1", 2),
        Route { kind: RouteKind::UNREACHABLE, ..onto(3, "10.70.0.0/16", 3) },
    ]);
    let found = node.networks_on_links(&ignored());
    assert_eq!(found, ["10.64.0.0/12", "192.0.2.0/24", "fd00:9::/64"].map(prefix));
}

#[test]
fn without_a_default_route_physical_links_count() {
    let mut node = node();
    node.routes.clear();
    assert_eq!(node.uplink_mtu(&ignored()), Some(1400));
    node.links.iter_mut().filter(|link| link.name == "eth1").for_each(|link| link.up = false);
    assert_eq!(node.uplink_mtu(&ignored()), Some(1500));
    node.links.retain(|link| link.kind.is_some());
    assert_eq!(node.uplink_mtu(&ignored()), None, "software devices tell nothing");
}

#[test]
fn the_mesh_fits_the_uplink() {
    for (configured, uplink, expected) in [
        (1420, 1500, 1420),
        (1420, 1400, 1320),
        (1420, 9000, 1420),
        (8920, 9000, 8920),
        (1420, 1300, 1280),
        (1420, 0, 1280),
        (0, 1500, 1280),
    ] {
        assert_eq!(mesh_mtu(configured, uplink), expected, "{configured} over {uplink}");
    }
}

#[test]
fn node_addresses_are_those_others_could_use() {
    let mut node = node();
    let with = |link, text: &str, scope, flags| Address { scope, flags, ..address(link, text) };
    let none = AddressFlags::default();
    node.addresses = vec![
        address(1, "127.0.0.1/8"),
        address(1, "192.0.2.99/32"),
        address(2, "192.0.2.10/24"),
        with(2, "192.0.2.11/24", Scope::UNIVERSE, AddressFlags::TEMPORARY),
        address(2, "192.0.2.10/24"),
        with(2, "192.0.2.12/24", Scope::HOST, none),
        address(2, "169.254.3.4/16"),
        address(2, "10.1.2.3/24"),
        address(3, "2001:db8::10/64"),
        with(3, "fe80::5/64", Scope::LINK, none),
        with(3, "2001:db8::11/64", Scope::UNIVERSE, AddressFlags::TENTATIVE),
        with(3, "2001:db8::12/64", Scope::UNIVERSE, AddressFlags::DEPRECATED),
        with(3, "2001:db8::13/64", Scope::UNIVERSE, AddressFlags::DADFAILED),
        with(3, "2001:db8::14/64", Scope::UNIVERSE, AddressFlags::TEMPORARY),
        address(4, "10.9.0.1/32"),
        address(5, "192.0.2.77/32"),
        address(6, "172.17.0.1/16"),
        address(99, "192.0.2.78/24"),
    ];
    let expected = ["192.0.2.99", "192.0.2.10", "192.0.2.11", "2001:db8::10"].map(ip);
    assert_eq!(node.node_addresses(&ignored()), expected);
    assert_eq!(node.connected_prefixes(&ignored()), ["192.0.2.0/24", "2001:db8::/64"].map(prefix));
    node.links.iter_mut().for_each(|link| link.up = false);
    assert_eq!(node.node_addresses(&ignored()), [] as [IpAddr; 0]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_mesh_mtu_never_exceeds_what_fits_unless_ipv6_needs_it(configured: u32, uplink: u32) {
        let mtu = mesh_mtu(configured, uplink);
        prop_assert!(mtu >= 1280);
        prop_assert!(mtu == 1280 || (mtu <= configured && mtu <= uplink - 80));
    }
}

/// A namespace with an uplink of 1400 bytes, as a container or a lab would have it: the device is a veth.
fn namespace() -> Netns {
    let netns = Netns::create().unwrap();
    for command in [
        "ip link set lo up",
        "ip link add up0 mtu 1400 type veth peer name far0",
        "ip link set up0 up",
        "ip link set far0 up",
        "ip addr add 192.0.2.10/24 dev up0",
        "ip addr add 2001:db8::10/64 dev up0 nodad",
    ] {
        run(&netns, command);
    }
    netns
}

#[test]
fn the_kernels_state_is_read_and_understood() {
    let netns = namespace();
    let ignored = Ignored { links: vec!["far0".into()], ..Ignored::default() };
    let read = || netns.run(|| HostNetwork::read().unwrap()).unwrap();
    assert_eq!(read().uplink_mtu(&ignored), None, "a veth is not physical");
    run(&netns, "ip route add default via 192.0.2.1");
    let node = read();
    assert_eq!(node.uplink_mtu(&ignored), Some(1400));
    assert_eq!(node.node_addresses(&ignored), [ip("192.0.2.10"), ip("2001:db8::10")]);
    assert_eq!(node.connected_prefixes(&ignored), [prefix("192.0.2.0/24"), prefix("2001:db8::/64")]);
    run(&netns, "ip link set up0 down");
    assert_eq!(read().uplink_mtu(&ignored), None);
}

#[test]
fn forwarding_keeps_router_advertisements_where_they_were_heard() {
    let netns = namespace();
    let switch = |path: &str| run(&netns, &format!("cat /proc/sys/net/{path}"));
    for command in
        ["net.ipv6.conf.up0.accept_ra=1", "net.ipv6.conf.far0.accept_ra=0", "net.ipv4.ip_forward=0"]
    {
        run(&netns, &format!("sysctl -qw {command}"));
    }
    let changed = netns.run(|| enable_forwarding().unwrap()).unwrap();
    assert_eq!((switch("ipv4/ip_forward"), switch("ipv6/conf/all/forwarding")), ("1".into(), "1".into()));
    assert_eq!(switch("ipv6/conf/up0/accept_ra"), "2");
    assert_eq!(switch("ipv6/conf/far0/accept_ra"), "0", "a switch that was off stays off");
    let changed: Vec<_> = changed.iter().map(|path| path.display().to_string()).collect();
    assert!(changed.contains(&"/proc/sys/net/ipv6/conf/up0/accept_ra".to_owned()), "{changed:?}");
    let position = |end: &str| changed.iter().position(|path| path.ends_with(end)).unwrap();
    assert!(position("up0/accept_ra") < position("all/forwarding"), "{changed:?}");
    // A link that forwards and does not accept advertisements is as its administrator wants it.
    run(&netns, "sysctl -qw net.ipv6.conf.up0.accept_ra=1");
    assert_eq!(netns.run(|| enable_forwarding().unwrap()).unwrap(), [] as [std::path::PathBuf; 0]);
    assert_eq!(switch("ipv6/conf/up0/accept_ra"), "1");
}

/// A router's announcement of itself (RFC 4861, section 4.2), sent to one host; the kernel adds the checksum.
fn advertise(router: &Netns, to: &str) {
    router
        .run(|| {
            let raw =
                socket(AddressFamily::Inet6, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::IcmpV6)
                    .unwrap();
            // Hosts believe only neighbours, whose packets still have all their hops.
            setsockopt(&raw, sockopt::Ipv6Ttl, &255).unwrap();
            let lifetime = 1800u16.to_be_bytes();
            let packet = [134, 0, 0, 0, 64, 0, lifetime[0], lifetime[1], 0, 0, 0, 0, 0, 0, 0, 0];
            let index = nix::net::if_::if_nametoindex("far0").unwrap();
            let address = SockaddrIn6::from(std::net::SocketAddrV6::new(to.parse().unwrap(), 0, 0, index));
            sendto(raw.as_raw_fd(), &packet, &address, MsgFlags::empty()).unwrap();
        })
        .unwrap();
}

/// A host that has its IPv6 default route from a router's advertisement, and the router.
fn advertised_host() -> (Netns, Netns) {
    let (host, router) = (Netns::create().unwrap(), Netns::create().unwrap());
    run(&host, "ip link add up0 type veth peer name far0");
    run(&host, "sysctl -qw net.ipv6.conf.up0.accept_ra=1 net.ipv6.conf.up0.addr_gen_mode=1");
    run(
        &host,
        &format!("ip link set far0 netns /proc/{}/fd/{}", std::process::id(), router.as_fd().as_raw_fd()),
    );
    run(&router, "ip link set far0 up");
    run(&host, "ip link set up0 up");
    run(&host, "ip addr add fe80::2/64 dev up0 nodad");
    run(&router, "ip addr add fe80::1/64 dev far0 nodad");
    for _ in 0..1000 {
        advertise(&router, "fe80::2");
        if run(&host, "ip -6 route").contains("default via fe80::1 dev up0 proto ra") {
            return (host, router);
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("the host never believed its router: {}", run(&host, "ip -6 route"));
}

#[test]
fn a_default_route_from_an_advertisement_outlives_the_switch() {
    let (host, router) = advertised_host();
    host.run(|| enable_forwarding().unwrap()).unwrap();
    assert!(run(&host, "ip -6 route").contains("default via fe80::1 dev up0 proto ra"));
    advertise(&router, "fe80::2");
    assert!(run(&host, "ip -6 route").contains("default via fe80::1 dev up0 proto ra"));
    // What would happen otherwise.
    let (host, _router) = advertised_host();
    run(&host, "sysctl -qw net.ipv6.conf.all.forwarding=1");
    assert!(!run(&host, "ip -6 route").contains("default"), "then all this would not be needed");
}

#[test]
fn single_links_are_switched_once() {
    let netns = namespace();
    let both = || (loosen_reverse_path_filter("up0").unwrap(), refuse_advertisements("up0").unwrap());
    for (of_host, of_link) in [("0", "0"), ("1", "2"), ("2", "0")] {
        let settings = "net.ipv4.conf.up0.rp_filter=1 net.ipv6.conf.up0.accept_ra=2";
        run(&netns, &format!("sysctl -qw net.ipv4.conf.all.rp_filter={of_host} {settings}"));
        assert_eq!(netns.run(both).unwrap(), (true, true));
        assert_eq!(netns.run(both).unwrap(), (false, false));
        assert_eq!(run(&netns, "cat /proc/sys/net/ipv4/conf/up0/rp_filter"), of_link);
        assert_eq!(run(&netns, "cat /proc/sys/net/ipv6/conf/up0/accept_ra"), "0");
    }
    assert!(
        !netns.run(|| loosen_reverse_path_filter("nosuch0").unwrap()).unwrap(),
        "a missing link has no switch"
    );
}

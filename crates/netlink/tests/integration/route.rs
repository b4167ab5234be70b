//! The route family against the kernel, each test in network namespaces of its own.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;

use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::{
    Address, AddressFlags, Change, IpFamily, LinkLayer, MacAddress, Mark, Netconf, Route, RouteSocket, Rule,
    Scope, Subscription, Transport, VethEnd, add_address, add_route, add_rule, add_veth, delete_address,
    delete_link, delete_neighbour, delete_route, delete_rule, disable_address_generation, link_exists,
    permanent_neighbour, presumed_neighbour, replace_address, replace_route, set_alias, set_mtu, set_name,
    set_up,
};
use fairlead_netlink::{Error, Message};
use ipnet::IpNet;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use testbed_netns::sh_in;

const LOOPBACK: u32 = 1;

fn prefix(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn address(link: u32, text: &str) -> Address {
    Address { link, prefix: prefix(text), scope: Scope::UNIVERSE, flags: AddressFlags::NODAD }
}

fn plain(name: &str) -> VethEnd<'_> {
    VethEnd { name, mac: None, mtu: None, group: 0 }
}

/// A namespace whose loopback is up, with a socket in it.
fn namespace() -> (Netns, RouteSocket) {
    let netns = Netns::create().unwrap();
    let mut socket = RouteSocket::open_in(&netns).unwrap();
    socket.apply(&[set_up(LOOPBACK, true)]).unwrap();
    (netns, socket)
}

/// A namespace with one end of a veth pair that is up, its index, and the namespace of the other end.
fn connected() -> (Netns, RouteSocket, u32, Netns) {
    let ((netns, mut socket), (other, mut peer)) = (namespace(), namespace());
    socket.apply(&[add_veth(&plain("left"), &plain("right"), other.as_fd())]).unwrap();
    let indices = [&mut socket, &mut peer].map(|socket| {
        let link = socket.links_of_kind("veth").unwrap().remove(0);
        socket.apply(&[disable_address_generation(link.index), set_up(link.index, true)]).unwrap();
        link.index
    });
    (netns, socket, indices[0], other)
}

#[test]
fn a_veth_pair_is_born_across_two_namespaces_in_one_message() {
    let ((_a, mut left), (b, mut right)) = (namespace(), namespace());
    let mac = MacAddress([2, 0, 0, 0, 0, 7]);
    let end = VethEnd { name: "left", mac: Some(mac), mtu: Some(1380), group: 7 };
    left.apply(&[add_veth(&end, &plain("right"), b.as_fd())]).unwrap();
    let found = left.link_by_name("left").unwrap().unwrap();
    assert_eq!((found.mac, found.mtu, found.up, found.group), (Some(mac), 1380, false, 7));
    assert_eq!((found.kind.as_deref(), found.layer), (Some("veth"), LinkLayer::Ethernet));
    assert!(!found.is_physical() && found.peer_netns.is_some());
    let other = right.link_by_name("right").unwrap().unwrap();
    assert_eq!((found.peer_index, other.peer_index), (Some(other.index), Some(found.index)));
    left.apply(&[delete_link(found.index)]).unwrap();
    assert_eq!((left.link_by_name("left").unwrap(), right.link_by_name("right").unwrap()), (None, None));
    assert!(left.apply(&[delete_link(found.index)]).unwrap_err().is_missing());
}

#[test]
fn a_link_exists_until_it_is_deleted() {
    let (netns, mut socket, link, _far) = connected();
    let exists = |link| netns.run(|| link_exists(link)).unwrap();
    assert!(exists(1) && exists(link));
    assert!(!exists(0) && !exists(u32::MAX));
    socket.apply(&[delete_link(link)]).unwrap();
    assert!(!exists(link));
}

#[test]
fn links_are_changed_and_found_by_alias_and_kind() {
    let (_a, mut socket, index, _b) = connected();
    let alias = "COIL:default:0123:eth0";
    let changes =
        [set_alias(index, alias), set_mtu(index, 1300), set_up(index, false), set_name(index, "other")];
    socket.apply(&changes).unwrap();
    let expected = socket.link_by_name("other").unwrap().unwrap();
    assert_eq!((expected.mtu, expected.up, expected.alias.as_deref()), (1300, false, Some(alias)));
    assert_eq!(socket.links_by_alias("COIL:").unwrap(), std::slice::from_ref(&expected));
    assert_eq!(socket.links_by_alias("COLI:").unwrap(), []);
    assert_eq!(socket.links_of_kind("veth").unwrap(), [expected]);
    assert_eq!(socket.links_of_kind("bridge").unwrap(), []);
    let names: Vec<_> = socket.links().unwrap().into_iter().map(|link| link.name).collect();
    assert!(names.contains(&"lo".to_owned()) && names.contains(&"other".to_owned()), "{names:?}");
}

#[test]
fn addresses_are_added_replaced_listed_by_link_and_deleted() {
    let (_a, mut socket, index, _b) = connected();
    let host =
        Address { scope: Scope::HOST, flags: AddressFlags::default(), ..address(index, "169.254.1.1/32") };
    let (v4, v6) = (address(index, "10.0.0.1/24"), address(index, "fd00::1/64"));
    socket.apply(&[add_address(&host), add_address(&v4), add_address(&v6)]).unwrap();
    assert!(socket.apply(&[add_address(&v6)]).unwrap_err().is_existing());
    socket.apply(&[replace_address(&v6), replace_address(&v4)]).unwrap();
    let found = socket.addresses_on(index).unwrap();
    let mut seen: Vec<_> = found.iter().map(|it| (it.prefix.to_string(), it.scope.0)).collect();
    seen.sort();
    let expected = [("10.0.0.1/24", 0), ("169.254.1.1/32", 254), ("fd00::1/64", 0)];
    assert_eq!(seen, expected.map(|(text, scope)| (text.to_owned(), scope)));
    assert!(found.iter().all(|it| !it.flags.intersects(AddressFlags::TENTATIVE)), "{found:?}");
    assert!(socket.addresses().unwrap().len() > found.len(), "loopback has addresses too");
    socket.apply(&[delete_address(&v4), delete_address(&v6), delete_address(&host)]).unwrap();
    assert_eq!(socket.addresses_on(index).unwrap(), []);
    assert!(socket.apply(&[delete_address(&v4)]).unwrap_err().is_missing());
}

fn routes_of_every_sort(link: u32) -> Vec<Route> {
    let gateway = |text: &str| text.parse::<IpAddr>().unwrap();
    let mut with_more = Route::via(1080, 30, prefix("10.2.0.0/16"), gateway("10.0.0.2"), link);
    (with_more.metric, with_more.mtu, with_more.prefsrc) = (5, Some(1280), Some(gateway("10.0.0.1")));
    let mut default = Route::onto(1080, 30, prefix("::/0"), link);
    (default.metric, default.mtu) = (1, Some(1290));
    let mut far = Route::via(1080, 31, prefix("10.9.0.0/16"), gateway("192.0.2.1"), link);
    far.onlink = true;
    vec![
        Route::onto(1080, 30, prefix("10.1.0.0/27"), LOOPBACK),
        with_more,
        Route::via(1080, 30, prefix("10.3.0.0/16"), gateway("fd00::2"), link),
        far,
        Route::via(1080, 30, prefix("fd02::/64"), gateway("fd00::2"), link),
        default,
    ]
}

#[test]
fn routes_of_one_table_are_dumped_as_they_were_added() {
    let (netns, mut socket, index, _b) = connected();
    socket.apply(&["10.0.0.1/24", "fd00::1/64"].map(|text| add_address(&address(index, text)))).unwrap();
    let wanted = routes_of_every_sort(index);
    socket.apply(&wanted.iter().map(add_route).collect::<Vec<_>>()).unwrap();
    socket.apply(&[add_route(&Route::onto(1081, 30, prefix("10.8.0.0/16"), index))]).unwrap();
    let found = socket.routes(1080).unwrap();
    for route in wanted.iter().map(Route::canonical) {
        assert!(found.contains(&route), "{route:?} is not in {found:#?}");
    }
    assert_eq!(found.len(), wanted.len());
    assert_eq!(socket.routes(4711).unwrap(), [], "an unused table");
    let shown = sh_in(&netns, "ip route show table 1080");
    assert!(shown.contains("10.1.0.0/27 dev lo proto 30 scope link"), "{shown}");
    assert!(shown.contains("10.3.0.0/16 via inet6 fd00::2 dev left proto 30"), "{shown}");

    let moved = Route { link: Some(index), ..wanted[0].clone() };
    socket.apply(&[replace_route(&moved), delete_route(&wanted[1].canonical())]).unwrap();
    let rest = socket.routes(1080).unwrap();
    assert!(rest.contains(&moved) && !rest.contains(&wanted[0]), "{rest:#?}");
    assert_eq!(rest.len(), wanted.len() - 1);
    assert!(socket.apply(&[delete_route(&wanted[1])]).unwrap_err().is_missing());
}

#[test]
fn the_ways_of_a_multipath_route_are_read() {
    let (netns, mut socket, index, _b) = connected();
    socket.apply(&[add_address(&address(index, "10.0.0.1/24"))]).unwrap();
    sh_in(
        &netns,
        "ip route add default nexthop via 10.0.0.2 dev left nexthop via 10.0.0.3 dev left weight 4",
    );
    let routes = socket.routes(254).unwrap();
    let default = routes.iter().find(|route| route.destination == prefix("0.0.0.0/0")).unwrap();
    let gateways: Vec<_> = default.next_hops.iter().map(|hop| hop.gateway.unwrap().to_string()).collect();
    assert_eq!(gateways, ["10.0.0.2", "10.0.0.3"]);
    assert_eq!(default.links().collect::<Vec<_>>(), [index, index]);
}

#[test]
fn rules_are_dumped_as_they_were_added() {
    let (netns, mut socket) = namespace();
    let mesh =
        Rule { mark: Some(Mark { value: 0x40, mask: 0x60 }), ..Rule::lookup(IpFamily::V4, 32500, 180, 30) };
    let fussy = Rule {
        iif: Some("lo".to_owned()),
        oif: Some("eth7".to_owned()),
        source: Some(prefix("fd00::/64")),
        destination: Some(prefix("fd01::/64")),
        ..Rule::lookup(IpFamily::V6, 2001, 1180, 30)
    };
    let last = Rule {
        mark: Some(Mark { value: 0, mask: 0x60 }),
        suppressed_length: Some(0),
        ..Rule::lookup(IpFamily::V6, 32800, 180, 30)
    };
    let forwarded =
        Rule { iif: Some("lo".to_owned()), is_inverted: true, ..Rule::lookup(IpFamily::V4, 2002, 1181, 30) };
    let answers = Rule {
        source: Some(prefix("192.0.2.1/32")),
        transport: Some(Transport { source_port: Some(6443), ..Transport::protocol(6) }),
        ..Rule::pass_over(IpFamily::V4, 2003, 32500, 30)
    };
    let requests = Rule {
        transport: Some(Transport { destination_port: Some(6443), ..Transport::protocol(6) }),
        ..Rule::pass_over(IpFamily::V6, 2003, 32801, 30)
    };
    let wanted = [
        mesh.clone(),
        Rule { family: IpFamily::V6, ..mesh.clone() },
        fussy,
        last,
        forwarded,
        answers,
        requests,
    ];
    socket.apply(&wanted.iter().map(add_rule).collect::<Vec<_>>()).unwrap();
    assert!(socket.apply(&[add_rule(&mesh)]).unwrap_err().is_existing());
    sh_in(
        &netns,
        "ip rule add pref 99 uidrange 0-5 lookup 42; ip rule add pref 98 ipproto tcp dport 1-9 lookup 42",
    );
    let found = socket.rules().unwrap();
    assert!(wanted.iter().all(|rule| found.contains(rule)), "{found:#?}");
    for exotic in found.iter().filter(|rule| [98, 99].contains(&rule.priority)) {
        assert!(exotic.has_more, "a condition we cannot express must show: {exotic}");
    }
    let shown = sh_in(&netns, "ip rule");
    assert!(shown.contains("2002:\tnot from all iif lo lookup 1181 proto 30"), "{shown}");
    assert!(shown.contains("2003:\tfrom 192.0.2.1 ipproto tcp sport 6443 goto 32500"), "{shown}");
    assert!(shown.contains("32500:\tfrom all fwmark 0x40/0x60 lookup 180 proto 30"), "{shown}");
    let shown = sh_in(&netns, "ip -6 rule");
    assert!(
        shown.contains("2003:\tfrom all ipproto tcp dport 6443 goto 32801 [unresolved]"),
        "a rule that goes on where no rule is does nothing: {shown}"
    );
    assert!(
        shown.contains("32800:\tfrom all fwmark 0/0x60 lookup 180 suppress_prefixlength 0 proto 30"),
        "{shown}"
    );
    socket.apply(&wanted.iter().map(delete_rule).collect::<Vec<_>>()).unwrap();
    let rest = socket.rules().unwrap();
    assert!(wanted.iter().all(|rule| !rest.contains(rule)), "{rest:#?}");
}

#[test]
fn neighbours_are_fixed_presumed_and_forgotten() {
    let (netns, mut socket, index, _b) = connected();
    let mac = MacAddress([2, 0, 0, 0, 0, 7]);
    let both = ["169.254.1.1", "fe80::1"].map(|text| text.parse::<IpAddr>().unwrap());
    socket.apply(&both.map(|ip| permanent_neighbour(index, ip, mac))).unwrap();
    let shown = sh_in(&netns, "ip neigh");
    for ip in both {
        let line = format!("{ip} dev left lladdr 02:00:00:00:00:07 PERMANENT");
        assert!(shown.contains(&line), "{shown}");
    }
    socket.apply(&both.map(|ip| presumed_neighbour(index, ip, mac))).unwrap();
    assert_eq!(sh_in(&netns, "ip neigh show nud stale").lines().count(), 2);
    socket.apply(&both.map(|ip| delete_neighbour(index, ip))).unwrap();
    assert_eq!(sh_in(&netns, "ip neigh show nud permanent"), "");
}

#[test]
fn a_refusal_says_what_failed_on_what_and_why_in_the_kernels_words() {
    let (_netns, mut socket) = namespace();
    let gateway = "192.0.2.1".parse().unwrap();
    let messages: [Message; 3] = [
        set_mtu(LOOPBACK, 60000),
        add_route(&Route::via(116, 30, prefix("10.0.0.0/24"), gateway, LOOPBACK)),
        set_mtu(LOOPBACK, 50000),
    ];
    let error = socket.apply(&messages).unwrap_err();
    assert!(matches!(error, Error::Refused { index: 1, .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.starts_with("cannot add route 10.0.0.0/24 via 192.0.2.1 on link 1 in table 116: "),
        "{text}"
    );
    assert!(text.contains("(Nexthop has invalid gateway)"), "{text}");
    let text = socket.apply(&[set_up(4711, true)]).unwrap_err().to_string();
    assert!(text.contains("set link 4711 up"), "{text}");
    // After refusals the socket is still in step with the kernel.
    let outcomes = socket.apply_each(&messages).unwrap();
    assert_eq!(outcomes.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true]);
    assert_eq!(socket.link_by_name("lo").unwrap().unwrap().mtu, 50000);
}

#[test]
fn thousands_of_changes_fit_one_call_and_one_dump() {
    let (_netns, mut socket) = namespace();
    let network = |n: u32| IpNet::new(Ipv4Addr::from_bits(0x0a00_0000 + n * 4).into(), 30).unwrap();
    let routes: Vec<_> = (0..5000).map(|n| add_route(&Route::onto(116, 30, network(n), LOOPBACK))).collect();
    socket.apply(&routes).unwrap();
    assert_eq!(socket.routes(116).unwrap().len(), routes.len());
    let outcomes = socket.apply_each(&routes).unwrap();
    assert!(outcomes.iter().all(|outcome| outcome.as_ref().is_err_and(Error::is_existing)));
}

#[test]
fn a_subscription_wakes_and_tells_what_changed() {
    let (netns, mut socket) = namespace();
    let mut subscription = netns.run(Subscription::open).unwrap().unwrap();
    assert_eq!(subscription.changes().unwrap(), []);
    let route = Route::onto(116, 30, prefix("10.0.0.0/24"), LOOPBACK);
    let rule = Rule::lookup(IpFamily::V6, 2000, 116, 30);
    let host = address(LOOPBACK, "192.0.2.1/32");
    let changes = [add_route(&route), add_rule(&rule), add_address(&host), set_mtu(LOOPBACK, 60000)];
    socket.apply(&changes).unwrap();
    let mut wait = [PollFd::new(subscription.as_fd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut wait, PollTimeout::from(10_000u16)).unwrap(), 1);
    let changes = subscription.changes().unwrap();
    assert!(changes.contains(&Change::Route { route: route.clone(), gone: false }), "{changes:#?}");
    assert!(changes.contains(&Change::Rule { rule, gone: false }), "{changes:#?}");
    let has = |predicate: &dyn Fn(&Change) -> bool| assert!(changes.iter().any(predicate), "{changes:#?}");
    has(
        &|change| matches!(change, Change::Address { address, gone: false } if address.prefix == host.prefix),
    );
    has(&|change| matches!(change, Change::Link { link, gone: false } if link.mtu == 60000));
    socket.apply(&[delete_route(&route)]).unwrap();
    assert_eq!(subscription.changes().unwrap(), [Change::Route { route, gone: true }]);
}

#[test]
fn a_subscription_reports_forwarding_and_reverse_path_filters() {
    let (netns, _socket, link, _far) = connected();
    let mut subscription = netns.run(Subscription::open).unwrap().unwrap();
    sh_in(
        &netns,
        "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv4.conf.left.rp_filter=1",
    );
    let changes = subscription.changes().unwrap();
    let unchanged = |family| Netconf { family, link: None, forwarding: None, reverse_path_filter: None };
    for expected in [
        Netconf { forwarding: Some(true), ..unchanged(IpFamily::V4) },
        Netconf { forwarding: Some(true), ..unchanged(IpFamily::V6) },
        Netconf { link: Some(link), reverse_path_filter: Some(1), ..unchanged(IpFamily::V4) },
    ] {
        assert!(changes.contains(&Change::Netconf(expected)), "{expected:?} is not in {changes:#?}");
    }
}

#[test]
fn the_namespace_of_the_other_end_is_known_by_its_number() {
    let (netns, mut socket, link, far) = connected();
    let end = socket.link(link).unwrap().unwrap();
    assert_eq!(socket.netns_number(&far).unwrap(), end.peer_netns);
    assert_eq!(socket.netns_number(&netns).unwrap(), None);
    assert_eq!(socket.netns_number(&Netns::create().unwrap()).unwrap(), None);
}

#[test]
fn a_subscriber_that_sleeps_too_long_is_told_so() {
    let (netns, mut socket) = namespace();
    let mut subscription = netns.run(Subscription::open).unwrap().unwrap();
    let flood: Vec<_> = (0..5_000).map(|n| set_mtu(LOOPBACK, 50_000 + n % 2)).collect();
    socket.apply(&flood).unwrap();
    assert!(subscription.changes().unwrap().contains(&Change::Missed));
    assert_eq!(subscription.changes().unwrap(), []);
}

#[test]
fn work_within_work_in_the_same_namespace_stays_on_its_thread() {
    let ((a, _), (b, _)) = (namespace(), namespace());
    let thread = || (std::thread::current().id(), Netns::current().unwrap());
    let (outer, same, other, after) =
        a.run(|| (thread(), a.run(thread).unwrap(), b.run(thread).unwrap(), thread())).unwrap();
    assert_eq!([same.0, after.0], [outer.0; 2]);
    assert_ne!(other.0, outer.0);
    assert!(outer.1.is_same(&a).unwrap() && same.1.is_same(&a).unwrap() && after.1.is_same(&a).unwrap());
    assert!(other.1.is_same(&b).unwrap());
}

#[test]
fn namespaces_are_told_apart_and_bad_ones_refused() {
    let ((a, _), (b, _)) = (namespace(), namespace());
    assert!(!a.is_same(&b).unwrap());
    let again = a.run(Netns::current).unwrap().unwrap();
    assert!(a.is_same(&again).unwrap());
    let error = Netns::open("/run/netns/there-is-no-such").unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENOENT));
    assert!(error.to_string().contains("/run/netns/there-is-no-such"), "{error}");
    let file = std::env::temp_dir().join(format!("no-netns-{}", std::process::id()));
    fs::write(&file, "").unwrap();
    let error = Netns::open(&file).unwrap().run(|| ()).unwrap_err();
    fs::remove_file(&file).unwrap();
    assert!(error.to_string().starts_with("cannot enter network namespace /"), "{error}");
    assert_eq!(error.errno(), Some(libc::EINVAL));
    let panicked = a.run(|| panic!("on purpose")).unwrap_err();
    assert!(panicked.to_string().contains("panicked"), "{panicked}");
}

#[test]
fn a_namespace_is_gone_with_its_last_handle() {
    let ((a, mut left), b) = (namespace(), Netns::create().unwrap());
    left.apply(&[add_veth(&plain("left"), &plain("right"), b.as_fd())]).unwrap();
    drop(b);
    // The kernel takes namespaces down in the background.
    for _ in 0..1000 {
        if left.link_by_name("left").unwrap().is_none() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("the pair outlived a namespace: {}", sh_in(&a, "ip link"));
}

//! Rules and routes of client pods against the kernel, each test in namespaces of its own. The links are veth pairs with the
//! names of tunnels: which packets they would encapsulate does not matter here.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use fairlead_address::DualStack;
use fairlead_api::client_routing::{ClientRoute, ClientRouting, ClientRule, Target};
use fairlead_dataplane::egress_client::{Error, Step, sync};
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::RouteSocket;
use ipnet::IpNet;
use nix::libc;
use testbed_netns::{Monitor, Namespace};

/// Links to the gateways of a domestic network and of the Internet.
const DOMESTIC: [&str; 2] = ["fou4_0a440c31", "fou6_2b9c56e7"];
const INTERNET: [&str; 2] = ["fou4_0a447c91", "fou6_0a447c91"];
/// As the article about the egress NAT of Coil v2 prints them ("Rules in a client Pod").
const RULES: &str = "0: from all lookup local 1800: from all to 169.254.0.0/16 lookup main 1900: from all lookup 117 \
    2000: from all to 10.0.0.0/8 lookup main 2001: from all to 172.16.0.0/12 lookup main \
    2002: from all to 192.168.0.0/16 lookup main 2100: from all lookup 118 32766: from all lookup main \
    32767: from all lookup default";
const TABLE_117: &str = "192.168.10.0/24 dev fou4_0a440c31 proto 30";
const TABLE_118: &str = "default dev fou4_0a447c91 proto 30";
const RULES_OF_IPV6: &str = "0: from all lookup local 1800: from all to fe80::/10 lookup main 1900: from all lookup 117 \
    2000: from all to fc00::/7 lookup main 2100: from all lookup 118 32766: from all lookup main";
/// Addresses behind the gateways: of the domestic network, then of the Internet.
const BEHIND: [&str; 4] = ["192.168.10.1:9", "[fd10::1]:9", "203.0.113.1:9", "[2001:db8::1]:9"];

/// A pod whose `eth0` leads to a node, and with links to gateways.
struct Pod {
    inside: Namespace,
    netns: Netns,
    /// Keep the other ends.
    _outside: [Namespace; 2],
}

impl Pod {
    fn new() -> Self {
        let (inside, node, gateways) = (Namespace::new(), Namespace::new(), Namespace::new());
        // The kernel would report link-local addresses of its own at any time.
        inside.sh("echo 1 > /proc/sys/net/ipv6/conf/default/addr_gen_mode");
        inside.veth("eth0", &node, "host");
        inside.sh("ip addr add 10.20.30.40/32 dev eth0; ip -6 addr add fd02::1/128 dev eth0 nodad");
        inside.sh("ip route add default dev eth0; ip -6 route add default dev eth0");
        for (index, name) in DOMESTIC.iter().chain(&INTERNET).enumerate() {
            inside.veth(name, &gateways, &format!("peer{index}"));
        }
        let netns = Netns::open(inside.path()).unwrap();
        let pod = Self { inside, netns, _outside: [node, gateways] };
        pod.count_from_zero();
        pod
    }

    fn count_from_zero(&self) {
        self.inside.sh("nft add table inet watch; nft delete table inet watch; nft add table inet watch
             nft add chain inet watch out '{ type filter hook postrouting priority 0; }'
             nft add rule inet watch out oifname eth0 ip daddr '{ 192.168.10.1, 203.0.113.1 }' counter
             nft add rule inet watch out oifname eth0 ip6 daddr '{ fd10::1, 2001:db8::1 }' counter");
    }

    fn links(&self) -> BTreeMap<String, u32> {
        let links = RouteSocket::open_in(&self.netns).unwrap().links().unwrap();
        let up = links.into_iter().filter(|link| link.up && link.name.starts_with("fou"));
        up.map(|link| (link.name, link.index)).collect()
    }

    fn sync(&self, desired: &DualStack<ClientRouting, ClientRouting>) -> Vec<Step> {
        sync(&self.netns, desired, &self.links()).unwrap()
    }

    /// Output of a command in one line, without unreachable routes.
    fn shown(&self, command: &str) -> String {
        let output = self.inside.sh(command);
        let lines = output.lines().filter(|line| !line.starts_with("unreachable"));
        lines.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ")
    }

    #[track_caller]
    fn has_what_the_article_prints(&self) {
        assert_eq!(self.shown("ip rule"), RULES);
        assert_eq!(self.shown("ip route show table 117"), TABLE_117);
        assert_eq!(self.shown("ip route show table 118"), TABLE_118);
        assert_eq!(self.shown("ip -6 rule"), RULES_OF_IPV6);
        let route = "proto 30 metric 1024 pref medium";
        assert_eq!(self.shown("ip -6 route show table 117"), format!("fd10::/64 dev fou6_2b9c56e7 {route}"));
        assert_eq!(self.shown("ip -6 route show table 118"), format!("default dev fou6_0a447c91 {route}"));
        for (family, table, destination) in [
            ("-4", 117, "192.168.10.0/24"),
            ("-4", 118, "default"),
            ("-6", 117, "fd10::/64"),
            ("-6", 118, "default"),
        ] {
            let shown = self.inside.sh(&format!("ip {family} route show table {table} type unreachable"));
            assert!(shown.starts_with(&format!("unreachable {destination} ")), "{shown}");
            assert!(shown.contains("proto 30 metric 4278198272") && shown.lines().count() == 1, "{shown}");
        }
    }

    /// Sends to an address by UDP and TCP; the error of both.
    fn send(&self, to: &str) -> [Option<i32>; 2] {
        let to: SocketAddr = to.parse().unwrap();
        self.inside.run(|| {
            let udp = || -> io::Result<()> {
                let any: SocketAddr = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse().unwrap();
                UdpSocket::bind(any)?.send_to(b"x", to).map(drop)
            };
            let tcp = TcpStream::connect_timeout(&to, Duration::from_millis(20)).map(drop);
            [udp(), tcp].map(|result| result.err().and_then(|error| error.raw_os_error()))
        })
    }

    /// Packets to addresses behind gateways that left by `eth0`.
    fn left_by_eth0(&self) -> u32 {
        let shown = self.inside.sh("nft list table inet watch");
        let mut words = shown.split_whitespace();
        let mut sum = 0;
        while words.any(|word| word == "packets") {
            sum += words.next().unwrap().parse::<u32>().unwrap();
        }
        sum
    }

    #[track_caller]
    fn refuses(&self, addresses: &[&str]) {
        for to in addresses {
            assert_eq!(self.send(to), [Some(libc::EHOSTUNREACH); 2], "{to}");
        }
        assert_eq!(self.left_by_eth0(), 0);
    }
}

fn family(rules: &[(u32, &str, u32)], routes: &[(u32, &str, &str)]) -> ClientRouting {
    let prefix = |text: &str| text.parse::<IpNet>().unwrap();
    let rule = |(priority, destination, table): &(u32, &str, u32)| ClientRule {
        priority: *priority,
        destination: prefix(destination),
        table: *table,
    };
    let route = |(table, destination, link): &(u32, &str, &str)| ClientRoute {
        table: *table,
        destination: prefix(destination),
        target: Target::Link((*link).to_owned()),
        originating_only: false,
    };
    ClientRouting { rules: rules.iter().map(rule).collect(), routes: routes.iter().map(route).collect() }
}

/// The article's example, and the same for IPv6.
fn article() -> DualStack<ClientRouting, ClientRouting> {
    let ipv4 = family(
        &[
            (1800, "169.254.0.0/16", 254),
            (1900, "0.0.0.0/0", 117),
            (2000, "10.0.0.0/8", 254),
            (2001, "172.16.0.0/12", 254),
            (2002, "192.168.0.0/16", 254),
            (2100, "0.0.0.0/0", 118),
        ],
        &[(117, "192.168.10.0/24", DOMESTIC[0]), (118, "0.0.0.0/0", INTERNET[0])],
    );
    let ipv6 = family(
        &[(1800, "fe80::/10", 254), (1900, "::/0", 117), (2000, "fc00::/7", 254), (2100, "::/0", 118)],
        &[(117, "fd10::/64", DOMESTIC[1]), (118, "::/0", INTERNET[1])],
    );
    DualStack { ipv4: Some(ipv4), ipv6: Some(ipv6) }
}

#[test]
fn rules_and_tables_are_those_of_coil_s_article_and_the_second_time_nothing_is_sent() {
    let pod = Pod::new();
    assert_eq!(pod.sync(&article()).len(), 18);
    pod.has_what_the_article_prints();
    let mut monitor = Monitor::ip(&pod.inside);
    monitor.wait_idle();
    assert_eq!(pod.sync(&article()), []);
    assert_eq!(monitor.reported(), Vec::<String>::new());
}

#[test]
fn what_was_flushed_is_put_back() {
    let pod = Pod::new();
    pod.sync(&article());
    pod.inside.sh("ip rule flush; ip rule add pref 32766 lookup main; ip rule add pref 32767 lookup default
         ip route flush table 117; ip -6 route flush table 118; ip -6 rule del pref 2000");
    pod.sync(&article());
    pod.has_what_the_article_prints();
    pod.inside.sh("ip route flush table 118; ip rule del pref 1800; ip -6 rule del pref 1900");
    pod.sync(&article());
    pod.has_what_the_article_prints();
}

#[test]
fn what_coil_has_made_is_completed_with_unreachable_routes_alone() {
    let pod = Pod::new();
    for (family, local, private) in
        [("-4", "169.254.0.0/16", "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16"), ("-6", "fe80::/10", "fc00::/7")]
    {
        let [narrow, domestic, internet] = match family {
            "-4" => ["192.168.10.0/24", DOMESTIC[0], INTERNET[0]],
            _ => ["fd10::/64", DOMESTIC[1], INTERNET[1]],
        };
        pod.inside.sh(&format!(
            "ip {family} rule add pref 1800 to {local} lookup main; ip {family} rule add pref 1900 lookup 117
             pref=2000; for to in {private}; do ip {family} rule add pref $pref to $to lookup main; pref=$((pref+1)); done
             ip {family} rule add pref 2100 lookup 118
             ip {family} route add {narrow} dev {domestic} proto 30 scope global table 117
             ip {family} route add default dev {internet} proto 30 scope global table 118"
        ));
    }
    let mut monitor = Monitor::ip(&pod.inside);
    monitor.wait_idle();
    pod.sync(&article());
    let reported = monitor.reported();
    assert_eq!(reported.len(), 4, "{reported:?}");
    assert!(reported.iter().all(|line| line.starts_with("unreachable ")), "{reported:?}");
    pod.has_what_the_article_prints();
}

#[test]
fn packets_to_a_tunnel_that_is_down_or_gone_are_refused_at_once_and_none_leaves_by_eth0() {
    let pod = Pod::new();
    for to in BEHIND {
        pod.send(to);
    }
    assert!(pod.left_by_eth0() >= 8, "the counters see packets");
    pod.count_from_zero();
    pod.sync(&article());
    for to in BEHIND {
        assert_eq!(pod.send(to)[0], None, "{to}");
    }
    assert_eq!(pod.left_by_eth0(), 0);
    // The kernel alone: nothing of ours runs.
    for link in INTERNET {
        pod.inside.sh(&format!("ip link set {link} down"));
    }
    pod.refuses(&BEHIND[2..]);
    for link in DOMESTIC {
        pod.inside.sh(&format!("ip link del {link}"));
    }
    pod.refuses(&BEHIND);
    assert_eq!(pod.sync(&article()), [], "nothing can be better without links");
    pod.refuses(&BEHIND);
    for link in INTERNET {
        pod.inside.sh(&format!("ip link set {link} up"));
    }
    assert_eq!(pod.sync(&article()).len(), 2);
    assert_eq!(pod.send(BEHIND[2])[0], None);
    pod.refuses(&BEHIND[..2]);
}

#[test]
fn a_pod_without_links_has_no_way_out() {
    let pod = Pod::new();
    sync(&pod.netns, &article(), &BTreeMap::new()).unwrap();
    pod.refuses(&BEHIND);
}

#[test]
fn the_change_of_one_destination_touches_only_its_routes() {
    let pod = Pod::new();
    pod.sync(&article());
    let mut monitor = Monitor::ip(&pod.inside);
    monitor.wait_idle();
    for (family, destination, link, other) in
        [(0, "9.9.0.0/16", INTERNET[0], DOMESTIC[0]), (1, "2001:db8:9::/48", INTERNET[1], DOMESTIC[1])]
    {
        let with = |target: Target| {
            let mut desired = article();
            let of_family = if family == 0 { desired.ipv4.as_mut() } else { desired.ipv6.as_mut() };
            let route = ClientRoute {
                table: 118,
                destination: destination.parse().unwrap(),
                target,
                originating_only: false,
            };
            of_family.unwrap().routes.push(route);
            desired
        };
        let [to_one, to_other] = [link, other].map(|link| with(Target::Link(link.to_owned())));
        let excluded = || with(Target::Excluded);
        for (desired, changes) in
            [(to_one, 2), (to_other, 1), (article(), 2), (excluded(), 1), (excluded(), 0), (article(), 1)]
        {
            assert_eq!(pod.sync(&desired).len(), changes);
            let reported = monitor.reported();
            assert_eq!(reported.len(), changes, "{reported:?}");
            assert!(reported.iter().all(|line| line.contains(destination)), "{reported:?}");
        }
    }
    pod.has_what_the_article_prints();
}

#[test]
fn removal_leaves_the_namespace_as_it_was_with_what_others_made() {
    let pod = Pod::new();
    pod.inside.sh(
        "ip rule add pref 1900 lookup 77 protocol 77; ip rule add pref 2050 to 9.0.0.0/8 lookup main protocol 4
         ip rule add pref 2000 iif eth0 lookup 118; ip rule add pref 1700 lookup 117; ip -6 rule add pref 2101 lookup 118
         ip route add 9.0.0.0/8 dev eth0 proto static table 117; ip -6 route add fd09::/64 dev eth0 proto 31 table 118
         ip route add 9.0.0.0/8 dev eth0 proto 30 table 116",
    );
    let all = || pod.inside.sh("ip rule; ip -6 rule; ip route show table all; ip -6 route show table all");
    let before = all();
    pod.sync(&article());
    assert_ne!(all(), before);
    let only_ipv6 = DualStack { ipv4: None, ..article() };
    assert!(
        pod.sync(&only_ipv6).iter().all(|step| matches!(step, Step::DeleteRoute(_) | Step::DeleteRule(_)))
    );
    pod.sync(&DualStack::default());
    assert_eq!(all(), before);
    assert_eq!(pod.sync(&DualStack::default()), []);
}

#[test]
fn failures_name_the_namespace_what_was_refused_and_what_to_do() {
    let pod = Pod::new();
    let links = pod.links();
    pod.inside.sh("ip link set fou4_0a440c31 down");
    let error = sync(&pod.netns, &article(), &links).unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    let error = error.to_string();
    assert!(error.starts_with(&format!("network namespace {}: ", pod.inside.path())), "{error}");
    assert!(error.contains("cannot add route 192.168.10.0/24 on link "), "{error}");
    assert!(error.contains("Network is down") && error.contains("set link \"fou4_0a440c31\" up"), "{error}");
    // Everything else is there.
    pod.refuses(&BEHIND[..1]);
    assert_eq!([pod.send(BEHIND[1])[0], pod.send(BEHIND[2])[0]], [None, None]);

    pod.inside
        .sh("ip link set fou4_0a440c31 up; ip route add 192.168.10.0/24 dev eth0 proto static table 117");
    let error = sync(&pod.netns, &article(), &links).unwrap_err().to_string();
    assert!(error.contains("cannot add route 192.168.10.0/24 on link "), "{error}");
    assert!(error.contains("(protocol 4) is in its place; delete that one"), "{error}");
    pod.inside.sh("ip route del 192.168.10.0/24 dev eth0 table 117 proto static");
    pod.sync(&article());
    pod.has_what_the_article_prints();

    let mut foreign = article();
    foreign.ipv6.as_mut().unwrap().routes[0].table = 254;
    let error = sync(&pod.netns, &foreign, &links).unwrap_err().to_string();
    assert!(
        error.contains("route fd10::/64 to Link(\"fou6_2b9c56e7\") in table 254 is none of egress"),
        "{error}"
    );
    pod.has_what_the_article_prints();
}

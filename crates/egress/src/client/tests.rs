//! Examples, and a simple model of where packets go.

use fairlead_api::client_routing::ClientRoute;
use fairlead_api::fou::link_name;
use fairlead_api::names::{ROUTE_PROTOCOL, RULE_PRIORITIES_EGRESS_IN_CLUSTER};
use proptest::prelude::*;
use std::collections::BTreeSet;

use super::*;

mod cluster;

fn name(text: &str) -> EgressName {
    let (namespace, name) = text.split_once('/').unwrap();
    EgressName { namespace: namespace.to_owned(), name: name.to_owned() }
}

fn addresses(texts: &[&str]) -> DualStackAddrs {
    let mut addresses = DualStackAddrs { ipv4: None, ipv6: None };
    for text in texts {
        match text.parse().unwrap() {
            IpAddr::V4(address) => addresses.ipv4 = Some(address),
            IpAddr::V6(address) => addresses.ipv6 = Some(address),
        }
    }
    addresses
}

fn prefixes<T: FromIterator<IpNet>>(texts: &[&str]) -> T {
    texts.iter().map(|text| text.parse::<IpNet>().unwrap()).collect()
}

fn pod(texts: &[&str]) -> ClientPod {
    ClientPod { addresses: addresses(texts), mtu: 1500 }
}

fn gateways(cluster_ips: &[&str], destinations: &[&str]) -> Gateways {
    Gateways {
        cluster_ips: addresses(cluster_ips),
        port: 5555,
        destinations: Destinations { prefixes: prefixes(destinations), excluded: BTreeSet::new() },
        source_port: SourcePort::Fixed,
        originating_only: false,
    }
}

fn egresses<const N: usize>(all: [(&str, Gateways); N]) -> BTreeMap<EgressName, Gateways> {
    all.into_iter().map(|(egress, gateways)| (name(egress), gateways)).collect()
}

/// The two Egresses of Coil's article, with the addresses that it prints.
fn article() -> BTreeMap<EgressName, Gateways> {
    egresses([
        ("internet-egress/nat", gateways(&["10.68.124.145", "fd04::2"], &["0.0.0.0/0", "::/0"])),
        ("domestic-egress/nat", gateways(&["10.68.12.49", "fd04::1"], &["192.168.10.0/24"])),
    ])
}

fn printed<T: ToString>(items: impl IntoIterator<Item = T>) -> Vec<String> {
    items.into_iter().map(|item| item.to_string()).collect()
}

/// As `ip rule` prints them.
fn rules(plan: &FamilyPlan) -> Vec<String> {
    let rule = |rule: &ClientRule| {
        let ClientRule { priority, destination, table } = rule;
        let to = match destination.prefix_len() {
            0 => String::new(),
            length if length == destination.max_prefix_len() => format!("to {} ", destination.addr()),
            _ => format!("to {destination} "),
        };
        let table = if *table == TABLE_MAIN { "main".to_owned() } else { table.to_string() };
        format!("{priority}: from all {to}lookup {table}")
    };
    plan.routing.rules.iter().map(rule).collect()
}

/// As `ip route show table TABLE` prints it.
fn table(plan: &FamilyPlan, table: u32) -> Vec<String> {
    let route = |ClientRoute { destination, target, .. }: &ClientRoute| {
        let destination = match destination.prefix_len() {
            0 => "default".to_owned(),
            length if length == destination.max_prefix_len() => destination.addr().to_string(),
            _ => destination.to_string(),
        };
        match target {
            Target::Link(link) => format!("{destination} dev {link} proto {ROUTE_PROTOCOL}"),
            Target::Refused => format!("unreachable {destination} proto {ROUTE_PROTOCOL}"),
            Target::Excluded => format!("throw {destination} proto {ROUTE_PROTOCOL}"),
            Target::InCluster => format!("throw {destination} proto {ROUTE_PROTOCOL} metric 2048"),
        }
    };
    plan.routing.routes.iter().filter(|route| route.table == table).map(route).collect()
}

/// The route into a link, or of refusal, that the kernel takes for a packet to this address; `None` if the packet is left to the table
/// `main`.
fn lookup(routing: &ClientRouting, destination: IpAddr) -> Option<&ClientRoute> {
    for rule in routing.rules.iter().filter(|rule| rule.destination.contains(&destination)) {
        if rule.table == TABLE_MAIN {
            return None;
        }
        let routes = routing.routes.iter().filter(|route| route.table == rule.table);
        let matching = routes.filter(|route| route.destination.contains(&destination));
        let longest = matching.max_by_key(|route| route.destination.prefix_len());
        if let Some(route) = longest.filter(|route| !route.target.lets_pass()) {
            return Some(route);
        }
    }
    None
}

#[track_caller]
fn problems(pod: &ClientPod, egresses: &BTreeMap<EgressName, Gateways>, in_cluster: &[&str]) -> Vec<String> {
    let error = routing(pod, egresses, &[], &prefixes(in_cluster)).unwrap_err();
    assert_eq!(error.to_string(), printed(error.iter()).join("; "));
    printed(error.iter())
}

#[test]
fn rules_and_tables_are_those_of_coils_article() {
    let routing = routing(&pod(&["10.20.30.40"]), &article(), &[], &PrefixSet::default()).unwrap();
    assert_eq!(routing.ipv6, None);
    let routing = routing.ipv4.unwrap();
    let expected = [
        "1800: from all to 169.254.0.0/16 lookup main",
        "1900: from all lookup 117",
        "2000: from all to 10.0.0.0/8 lookup main",
        "2001: from all to 172.16.0.0/12 lookup main",
        "2002: from all to 192.168.0.0/16 lookup main",
        "2100: from all lookup 118",
    ];
    assert_eq!(rules(&routing), expected);
    assert_eq!(table(&routing, 117), ["192.168.10.0/24 dev fou4_0a440c31 proto 30"]);
    assert_eq!(table(&routing, 118), ["default dev fou4_0a447c91 proto 30"]);
    let first = Link {
        name: "fou4_0a440c31".to_owned(),
        local: "10.20.30.40".parse().unwrap(),
        remote: "10.68.12.49".parse().unwrap(),
        ttl: 225,
        source_port: 5555,
        destination_port: 5555,
        mtu: 1472,
    };
    assert_eq!(routing.links[0], first);
    assert_eq!(routing.links[1].name, "fou4_0a447c91");
}

#[test]
fn the_second_family_has_its_own_rules_and_links_where_there_is_a_destination() {
    let mut egresses = article();
    egresses.get_mut(&name("internet-egress/nat")).unwrap().source_port = SourcePort::Auto;
    let in_cluster =
        prefixes(&["10.64.0.0/14", "100.64.0.0/25", "100.64.0.128/25", "2001:db8::/48", "fd00::/8"]);
    let routing = routing(&pod(&["10.20.30.40", "fd02::1"]), &egresses, &[], &in_cluster).unwrap();
    let (ipv4, ipv6) = (routing.ipv4.unwrap(), routing.ipv6.unwrap());
    assert_eq!(rules(&ipv4)[5], "2003: from all to 100.64.0.0/24 lookup main");
    let expected = [
        "1800: from all to fe80::/10 lookup main",
        "1900: from all lookup 117",
        "2000: from all to fc00::/7 lookup main",
        "2003: from all to 2001:db8::/48 lookup main",
        "2100: from all lookup 118",
    ];
    assert_eq!(rules(&ipv6), expected);
    let link = link_name("fd04::2".parse().unwrap());
    assert_eq!(table(&ipv6, 118), [format!("default dev {link} proto 30")]);
    assert_eq!(ipv6.routing.routes.len(), 1);
    let [link] = &ipv6.links[..] else { panic!("{ipv6:?}") };
    assert_eq!((link.source_port, link.destination_port, link.mtu), (0, 5555, 1452));
}

#[test]
fn single_addresses_are_printed_as_iproute2_does() {
    let egresses = egresses([("n/a", gateways(&["10.68.0.1"], &["9.9.9.9/32", "10.1.2.3/32"]))]);
    let routing = routing(&pod(&["10.20.30.40"]), &egresses, &[], &prefixes(&["198.51.100.7/32"])).unwrap();
    let routing = routing.ipv4.unwrap();
    assert_eq!(table(&routing, 117), ["10.1.2.3 dev fou4_0a440001 proto 30"]);
    assert_eq!(table(&routing, 118), ["9.9.9.9 dev fou4_0a440001 proto 30"]);
    assert_eq!(rules(&routing)[5], "2003: from all to 198.51.100.7 lookup main");
}

#[test]
fn a_destination_with_the_address_of_a_service_is_refused_unless_a_rule_protects_it() {
    let pod = pod(&["10.20.30.40", "2001:db8::1"]);
    // Rule 1900 comes before that for 10.0.0.0/8. The other Egress's tunnel would enter this one.
    let narrow = egresses([
        ("a/nat", gateways(&["10.68.0.1", "fd04::1"], &["10.0.0.0/8"])),
        ("b/nat", gateways(&["10.68.0.2", "fd04::2"], &["0.0.0.0/0"])),
    ]);
    let words = |of: &str, address: &str| {
        format!(
            "destination 10.0.0.0/8 of Egress a/nat contains the address {address} of Service {of}, to which its \
             tunnel goes: choose destinations without it, or exclude it (spec.excludedDestinations)"
        )
    };
    assert_eq!(problems(&pod, &narrow, &[]), [words("a/nat", "10.68.0.1"), words("b/nat", "10.68.0.2")]);
    // No rule keeps a Service CIDR outside of private networks that is not known.
    let public = egresses([("a/nat", gateways(&["10.68.0.1", "2001:db8:5::1"], &["0.0.0.0/0", "::/0"]))]);
    let [problem] = &problems(&pod, &public, &[])[..] else { panic!("not one problem") };
    assert!(
        problem.starts_with("destination ::/0 of Egress a/nat contains the address 2001:db8:5::1"),
        "{problem}"
    );
    assert!(routing(&pod, &public, &[], &prefixes(&["2001:db8:5::/108"])).is_ok());
}

#[test]
fn two_egresses_with_the_same_prefix_are_named() {
    let egresses = egresses([
        ("a/nat", gateways(&["10.68.0.1"], &["9.9.9.0/24", "8.8.8.0/24"])),
        ("b/nat", gateways(&["10.68.0.2"], &["9.9.9.0/24", "9.9.0.0/16"])),
    ]);
    let words =
        "9.9.9.0/24 is a destination of Egress a/nat and of Egress b/nat: a pod can use only one of them";
    assert_eq!(problems(&pod(&["10.20.30.40"]), &egresses, &[]), [words]);
}

#[test]
fn an_excluded_prefix_has_the_next_longest_destination_or_leaves_by_eth0() {
    let mut all = egresses([
        ("a/nat", gateways(&["10.68.0.1"], &["0.0.0.0/0", "10.0.0.0/8"])),
        ("b/nat", gateways(&["10.68.0.2"], &["11.0.0.0/8", "9.9.9.0/24"])),
    ]);
    let excluded = ["10.64.0.0/10", "8.8.8.0/24", "11.1.0.0/16", "192.168.0.0/16"];
    all.get_mut(&name("a/nat")).unwrap().destinations.excluded = prefixes(&excluded);
    all.get_mut(&name("b/nat")).unwrap().destinations.excluded = prefixes(&["9.9.9.9/32"]);
    let routing = routing(&pod(&["10.20.30.40"]), &all, &[], &PrefixSet::default()).unwrap();
    let routing = routing.ipv4.unwrap();
    let narrow = ["10.0.0.0/8 dev fou4_0a440001 proto 30", "throw 10.64.0.0/10 proto 30"];
    assert_eq!(table(&routing, 117), narrow);
    let wide = [
        "default dev fou4_0a440001 proto 30",
        "throw 8.8.8.0/24 proto 30",
        "9.9.9.0/24 dev fou4_0a440002 proto 30",
        "9.9.9.9 dev fou4_0a440001 proto 30",
        "throw 10.64.0.0/10 proto 30",
        "11.0.0.0/8 dev fou4_0a440002 proto 30",
        "11.1.0.0/16 dev fou4_0a440002 proto 30",
        "throw 192.168.0.0/16 proto 30",
    ];
    assert_eq!(table(&routing, 118), wide);
}

#[test]
fn two_services_with_links_of_one_name_are_named() {
    let egresses = egresses([
        ("a/nat", gateways(&["fd04::da37"], &["2001:db8:1::/48"])),
        ("b/nat", gateways(&["fd04::1:5736"], &["2001:db8:2::/48"])),
    ]);
    let words = "the Services of Egresses a/nat and b/nat need links of the same name fou6_deec9c02: create one of the \
                 Services anew";
    assert_eq!(problems(&pod(&["fd02::1"]), &egresses, &[]), [words]);
}

#[test]
fn a_service_needs_an_address_of_each_family_of_the_pod_that_has_destinations() {
    let single = egresses([("a/nat", gateways(&["10.68.0.1"], &["0.0.0.0/0", "::/0"]))]);
    let words = "Service a/nat has no IPv6 address, and its Egress has destinations of that family";
    assert_eq!(problems(&pod(&["10.20.30.40", "fd02::1"]), &single, &[]), [words]);
    assert!(routing(&pod(&["10.20.30.40"]), &single, &[], &PrefixSet::default()).is_ok());
}

#[test]
fn an_egress_without_a_destination_of_a_family_of_the_pod_is_named() {
    let ipv6 = egresses([("a/nat", gateways(&["10.68.0.1", "fd04::1"], &["::/0"]))]);
    let words = "Egress a/nat has no destination of an address family that the pod has";
    assert_eq!(problems(&pod(&["10.20.30.40"]), &ipv6, &[]), [words]);
}

#[test]
fn a_small_mtu_is_named_once() {
    let small = ClientPod { mtu: 1300, ..pod(&["10.20.30.40", "fd02::1"]) };
    let mut egresses = article();
    egresses
        .get_mut(&name("domestic-egress/nat"))
        .unwrap()
        .destinations
        .prefixes
        .extend(prefixes::<Vec<_>>(&["2001:db8::/32"]));
    let words = "the MTU 1300 of eth0 is too small for a tunnel of IPv6: it must be at least 1328";
    assert_eq!(problems(&small, &egresses, &[]), [words]);
}

#[test]
fn there_are_as_many_rules_for_ranges_as_priorities_after_they_are_joined() {
    let range = |number: u32| format!("100.{}.{}.0/24", 64 + number / 64, number % 64 * 2);
    let ranges =
        |count: u32| (0..count).map(range).map(|text| text.parse::<IpNet>().unwrap()).collect::<PrefixSet>();
    let pod = pod(&["10.20.30.40"]);
    let full = routing(&pod, &article(), &[], &ranges(97)).unwrap().ipv4.unwrap();
    assert_eq!(full.routing.rules.len(), 97 + 6);
    assert!(full.routing.rules.is_sorted_by_key(|rule| rule.priority));
    let error = routing(&pod, &article(), &[], &ranges(98)).unwrap_err().to_string();
    let words = "the cluster has 98 separate ranges of IPv4 addresses outside of private networks, and only 97 rules for them";
    assert_eq!(error, words);
    assert!(routing(&pod, &article(), &[], &prefixes(&["100.64.0.0/10"])).is_ok());
}

#[test]
fn what_no_pod_can_use_is_known_from_the_egress_and_its_service() {
    let of = |cluster_ips: &[&str], destinations: &[&str], excluded: &[&str], in_cluster: &[&str]| {
        let destinations = Destinations { prefixes: prefixes(destinations), excluded: prefixes(excluded) };
        let in_cluster = prefixes(in_cluster);
        let problem = problem_of_all_pods(&name("a/nat"), &destinations, addresses(cluster_ips), &in_cluster);
        problem.map(|problem| problem.to_string()).unwrap_or_default()
    };
    let both = ["10.68.0.1", "2001:db8:5::1"];
    assert_eq!(of(&both, &["0.0.0.0/0", "2001:db8:4::/48"], &[], &[]), "");
    let swallowed = of(&both, &["0.0.0.0/0", "::/0"], &[], &[]);
    assert!(
        swallowed.starts_with("destination ::/0 of Egress a/nat contains the address 2001:db8:5::1"),
        "{swallowed}"
    );
    assert_eq!(of(&both, &["0.0.0.0/0", "::/0"], &[], &["2001:db8:5::/64"]), "");
    assert_eq!(of(&both, &["10.0.0.0/8", "::/0"], &["10.68.0.0/16", "2001:db8:5::/64"], &[]), "");
    assert_eq!(of(&["10.68.0.1"], &["::/0"], &[], &[]), "", "a pod with that family has another problem");
    let ranges: Vec<String> = (0..98).map(|number| format!("100.64.{}.0/24", number * 2)).collect();
    let ranges: Vec<&str> = ranges.iter().map(String::as_str).collect();
    let many = of(&both, &["0.0.0.0/0"], &[], &ranges);
    assert!(many.starts_with("the cluster has 98 separate ranges of IPv4"), "{many}");
    assert_eq!(of(&both, &["2001:db8:4::/48"], &[], &ranges), "");
}

fn is_in(ranges: &[&str], address: IpAddr) -> bool {
    ranges.iter().any(|range| range.parse::<IpNet>().unwrap().contains(&address))
}

const LINK_LOCAL: &[&str] = &["169.254.0.0/16", "fe80::/10"];
const PRIVATE: &[&str] = &["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"];

/// Destination of a packet that does not leave by `eth0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum PacketRoute {
    Refused,
    /// To the remote address of a tunnel.
    Tunnel(IpAddr),
}

/// Destination that a packet should have; `None` for `eth0`.
fn model(
    egresses: &BTreeMap<EgressName, Gateways>,
    unusable: &[Unusable],
    in_cluster: &[IpNet],
    address: IpAddr,
) -> Option<PacketRoute> {
    let is_narrow = |prefix: &IpNet| is_in(PRIVATE, prefix.network());
    let remote = |gateways: &Gateways| {
        gateways.cluster_ips.iter().find(|remote| remote.is_ipv4() == address.is_ipv4()).unwrap()
    };
    let usable =
        egresses.values().map(|gateways| (&gateways.destinations, PacketRoute::Tunnel(remote(gateways))));
    let all = usable.chain(unusable.iter().map(|it| (&it.destinations, PacketRoute::Refused)));
    let all = all.filter(|(of, _)| !of.excluded.iter().any(|prefix| prefix.contains(&address)));
    let all: Vec<(IpNet, PacketRoute)> =
        all.flat_map(|(of, way)| of.prefixes.iter().map(move |prefix| (*prefix, way))).collect();
    let longest = |narrow: bool| {
        let matching = all.iter().filter(|(it, _)| is_narrow(it) == narrow && it.contains(&address));
        matching.max_by_key(|(prefix, way)| (prefix.prefix_len(), *way)).map(|(_, way)| *way)
    };
    if is_in(LINK_LOCAL, address) || in_cluster.iter().any(|range| range.contains(&address)) {
        return None;
    }
    longest(true).or_else(|| if is_in(PRIVATE, address) { None } else { longest(false) })
}

/// Prefixes that often contain each other, in and around the networks that have rules.
fn prefix() -> impl Strategy<Value = IpNet> {
    let bases = ["0.0.0.0", "10.0.0.0", "100.64.0.0", "172.16.0.0", "192.168.0.0", "169.254.0.0", "9.0.0.0"];
    let ipv4 =
        (prop::sample::select(bases.to_vec()), 0..4_u32, 0..=32_u8).prop_map(|(base, more, length)| {
            let base: std::net::Ipv4Addr = base.parse().unwrap();
            let address = std::net::Ipv4Addr::from_bits(base.to_bits() | more << 22 | more << 9 | more);
            IpNet::new(address.into(), length).unwrap().trunc()
        });
    let bases = ["::", "2001:db8::", "fd00::", "fe80::", "fc00::"];
    let ipv6 =
        (prop::sample::select(bases.to_vec()), 0..4_u128, 0..=128_u8).prop_map(|(base, more, length)| {
            let base: std::net::Ipv6Addr = base.parse().unwrap();
            let address = std::net::Ipv6Addr::from_bits(base.to_bits() | more << 90 | more << 60 | more);
            IpNet::new(address.into(), length).unwrap().trunc()
        });
    prop_oneof![ipv4, ipv6]
}

/// First and last address of a prefix, and those beside it.
fn interesting(prefix: &IpNet) -> Vec<IpAddr> {
    let family = IpFamily::of(prefix.addr());
    let number = |address: IpAddr| match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    };
    let (first, last) = (number(prefix.network()), number(prefix.broadcast()));
    let all = [
        Some(first),
        Some(last),
        first.checked_sub(1),
        last.checked_add(1),
        Some(first + (last - first) / 2),
    ];
    let all = all.into_iter().flatten().filter(|number| *number <= family.highest());
    all.map(|number| family.address(number)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_packet_goes_where_the_model_says_or_the_pod_is_refused(
        destinations in prop::collection::vec((prefix(), 0..3_usize), 1..12),
        excluded in prop::collection::vec((prefix(), 0..3_usize), 0..8),
        refused in prop::collection::vec(prefix(), 0..3),
        originating_only in prop::array::uniform3(any::<bool>()),
        in_cluster in prop::collection::vec(prefix(), 0..8),
        service_range in prop::sample::select(vec!["10.68", "100.64"]),
    ) {
        let mut egresses = BTreeMap::new();
        for (prefix, index) in destinations {
            let ipv4 = format!("{service_range}.7.{index}");
            let new = || gateways(&[&ipv4, &format!("fd04::{index}")], &[]);
            let gateways: &mut Gateways = egresses.entry(name(&format!("n/e{index}"))).or_insert_with(new);
            gateways.destinations.prefixes.insert(prefix);
            gateways.originating_only = originating_only[index];
        }
        let mut unusable = Unusable { destinations: Destinations::default(), originating_only: false };
        unusable.destinations.prefixes.extend(refused);
        for (prefix, index) in excluded {
            let of = egresses.get_mut(&name(&format!("n/e{index}"))).map(|gateways| &mut gateways.destinations);
            of.unwrap_or(&mut unusable.destinations).excluded.insert(prefix);
        }
        let unusable = [unusable];
        let pod = pod(&["10.20.30.40", "fd02::1"]);
        let result = routing(&pod, &egresses, &unusable, &in_cluster.iter().collect());
        let remotes: Vec<IpAddr> = egresses.values().flat_map(|gateways| gateways.cluster_ips.iter()).collect();
        let routing = match result {
            Ok(routing) => routing,
            Err(problems) => {
                for problem in problems.iter() {
                    match problem {
                        Problem::SamePrefix { .. } => {}
                        Problem::NoDestination { egress } => {
                            prop_assert_eq!(egresses[egress].destinations.used().next(), None);
                        }
                        Problem::SwallowsTunnel { prefix, cluster_ip, .. } => {
                            prop_assert!(prefix.contains(cluster_ip) && remotes.contains(cluster_ip));
                            // The model agrees that the tunnel's packets would not leave by eth0.
                            prop_assert!(model(&egresses, &[], &in_cluster, *cluster_ip).is_some());
                        }
                        problem => prop_assert!(false, "{problem}"),
                    }
                }
                return Ok(());
            }
        };
        let (ipv4, ipv6) = (routing.ipv4.unwrap(), routing.ipv6.unwrap());
        let origins = [origins::origins(&ipv4.routing), origins::origins(&ipv6.routing)];
        let ranges = LINK_LOCAL.iter().chain(PRIVATE).map(|range| range.parse().unwrap());
        let destinations = egresses.values().map(|gateways| &gateways.destinations);
        let destinations = destinations.chain(unusable.iter().map(|it| &it.destinations));
        let destinations = destinations.flat_map(|it| it.prefixes.iter().chain(&it.excluded).copied());
        let edges = ranges.chain(destinations).chain(in_cluster.iter().copied());
        for address in edges.flat_map(|prefix| interesting(&prefix)).chain(remotes.iter().copied()) {
            let family = if address.is_ipv4() { &ipv4 } else { &ipv6 };
            let remote = |name: &str| family.links.iter().find(|link| link.name == *name).unwrap().remote;
            let way = lookup(&family.routing, address).map(|route| match &route.target {
                Target::Link(name) => PacketRoute::Tunnel(remote(name)),
                _ => PacketRoute::Refused,
            });
            prop_assert_eq!(way, model(&egresses, &unusable, &in_cluster, address), "{}", address);
            let around = origins[usize::from(address.is_ipv6())].iter().filter(|(prefix, _)| prefix.contains(&address));
            let link = around.max_by_key(|(prefix, _)| prefix.prefix_len()).unwrap().1;
            prop_assert_eq!(link.map(|name| PacketRoute::Tunnel(remote(name))), way.filter(|way| *way != PacketRoute::Refused));
            let answered_by_eth0 = replies_by_uplink(IpFamily::of(address), &family.routing.routes).contains(address);
            if let Some(PacketRoute::Tunnel(remote)) = way {
                let of = egresses.values().find(|gateways| gateways.cluster_ips.iter().any(|ip| ip == remote));
                prop_assert_eq!(answered_by_eth0, of.unwrap().originating_only, "{}", address);
            }
        }
        // What the controller writes into the status of each Egress gives the same.
        let all: PrefixSet = in_cluster.iter().collect();
        let destinations = egresses.values().map(|gateways| &gateways.destinations);
        let destinations = destinations.chain(unusable.iter().map(|it| &it.destinations));
        let written = destinations.flat_map(|it| cluster_ranges(&all, it)).collect();
        let again = super::routing(&pod, &egresses, &unusable, &written).unwrap();
        prop_assert_eq!((&again.ipv4.unwrap(), &again.ipv6.unwrap()), (&ipv4, &ipv6));
        for family in [&ipv4, &ipv6] {
            // Outer packets leave by eth0.
            for link in &family.links {
                let route = lookup(&family.routing, link.remote);
                prop_assert!(route.is_none_or(|route| route.target == Target::Refused), "{:?}", route);
                prop_assert!(link.name.len() < 16);
            }
            prop_assert!(family.routing.rules.is_sorted_by_key(|rule| rule.priority));
            let own = family.routing.rules.iter().filter(|rule| RULE_PRIORITIES_EGRESS_IN_CLUSTER.contains(&rule.priority));
            prop_assert!(own.clone().all(|rule| rule.table == TABLE_MAIN));
        }
    }
}

//! A model of the kernel: each step is carried out by itself, and packets are followed in between.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use proptest::prelude::*;

use super::*;

/// Route of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PacketRoute {
    Eth0,
    Link(u32),
    Refused,
}

#[derive(Debug, Clone, Default)]
struct Kernel(Present);

impl Kernel {
    fn apply(&mut self, step: &Step) {
        let Present { rules, routes } = &mut self.0;
        let place = |route: &Route| (route.table, route.destination, route.metric);
        match step {
            Step::AddRoute(route) => {
                assert!(!routes.iter().any(|found| place(found) == place(route)), "{route}");
                routes.push(route.clone());
            }
            Step::AddRule(rule) => {
                assert!(!rules.contains(rule), "{rule}");
                rules.push(rule.clone());
                rules.sort_by_key(|rule| rule.priority);
            }
            Step::DeleteRoute(route) => {
                let at = routes.iter().position(|found| found == route).unwrap();
                routes.remove(at);
            }
            Step::DeleteRule(rule) => {
                // Without a protocol the kernel deletes the first of any.
                let is_hit =
                    |found: &Rule| if rule.protocol == 0 { found.same_effect(rule) } else { found == rule };
                let at = rules.iter().position(is_hit).unwrap();
                rules.remove(at);
            }
            Step::ReplaceRoute(route) => {
                let at = routes.iter().position(|found| place(found) == place(route)).unwrap();
                routes[at] = route.clone();
            }
        }
    }

    fn way(&self, address: IpAddr) -> PacketRoute {
        let matching = |rule: &&Rule| rule.destination.is_none_or(|prefix| prefix.contains(&address));
        for rule in self.0.rules.iter().filter(matching) {
            if rule.table == TABLE_MAIN {
                return PacketRoute::Eth0;
            }
            let routes = self.0.routes.iter().filter(|route| route.table == rule.table);
            let routes = routes.filter(|route| route.destination.contains(&address));
            let best =
                routes.max_by_key(|route| (route.destination.prefix_len(), std::cmp::Reverse(route.metric)));
            match best {
                Some(route) if route.kind == RouteKind::THROW => {}
                Some(route) if route.kind == RouteKind::UNREACHABLE => return PacketRoute::Refused,
                Some(route) => return PacketRoute::Link(route.link.unwrap()),
                None => {}
            }
        }
        PacketRoute::Eth0
    }

    /// Brings it to a state and calls `check` before the first step and after each.
    fn bring_to(
        &mut self,
        desired: Option<&ClientRouting>,
        links: &Links,
        mut check: impl FnMut(&Self),
    ) -> Steps {
        let steps = steps(desired, links, &self.0);
        check(self);
        for step in steps.set.iter().chain(&steps.delete) {
            self.apply(step);
            check(self);
        }
        steps
    }
}

type Links = BTreeMap<String, u32>;

fn prefix(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn links(names: &[&str]) -> Links {
    let all = [("a", 11), ("b", 12), ("c", 13)];
    let wanted = all.iter().filter(|(name, _)| names.contains(name));
    wanted.map(|(name, index)| ((*name).to_owned(), *index)).collect()
}

/// The rules and routes for these destinations and ranges of the cluster, as Coil numbers them.
fn routing(destinations: &[(&str, &str)], in_cluster: &[&str]) -> ClientRouting {
    let rule =
        |priority, destination: &str, table| ClientRule { priority, destination: prefix(destination), table };
    let private = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"];
    let mut rules = vec![rule(1800, "169.254.0.0/16", TABLE_MAIN), rule(1900, "0.0.0.0/0", 117)];
    let ranges = private.iter().chain(in_cluster);
    rules.extend((2000..).zip(ranges).map(|(priority, range)| rule(priority, range, TABLE_MAIN)));
    rules.push(rule(2100, "0.0.0.0/0", 118));
    let route = |(destination, link): &(&str, &str)| {
        let destination = prefix(destination);
        let is_private = private.iter().any(|range| prefix(range).contains(&destination.network()));
        ClientRoute {
            table: if is_private { 117 } else { 118 },
            destination,
            target: match *link {
                "refused" => Target::Refused,
                "excluded" => Target::Excluded,
                "in cluster" => Target::InCluster,
                link => Target::Link(link.to_owned()),
            },
            originating_only: false,
        }
    };
    ClientRouting { rules, routes: destinations.iter().map(route).collect() }
}

/// The two Egresses of Coil's article.
fn article() -> ClientRouting {
    routing(&[("0.0.0.0/0", "a"), ("192.168.10.0/24", "b")], &[])
}

fn shown(steps: &[Step]) -> Vec<String> {
    steps.iter().map(|step| step.message().what).collect()
}

#[test]
fn rules_follow_routes_and_routes_into_links_follow_unreachable_ones() {
    let mut kernel = Kernel::default();
    let done = kernel.bring_to(Some(&article()), &links(&["a", "b"]), |_| {});
    let expected = [
        "add IPv4 rule 1800 to 169.254.0.0/16 to table 254",
        "add route 192.168.10.0/24 in table 117",
        "add route 192.168.10.0/24 on link 12 in table 117",
        "add IPv4 rule 1900 to table 117",
        "add IPv4 rule 2000 to 10.0.0.0/8 to table 254",
        "add IPv4 rule 2001 to 172.16.0.0/12 to table 254",
        "add IPv4 rule 2002 to 192.168.0.0/16 to table 254",
        "add route 0.0.0.0/0 in table 118",
        "add route 0.0.0.0/0 on link 11 in table 118",
        "add IPv4 rule 2100 to table 118",
    ];
    assert_eq!(shown(&done.set), expected);
    assert_eq!(done.delete, []);
    assert_eq!(steps(Some(&article()), &links(&["a", "b"]), &kernel.0), Steps::default());

    let done = kernel.bring_to(None, &links(&[]), |_| {});
    let reversed: Vec<String> = expected.iter().rev().map(|step| step.replacen("add", "delete", 1)).collect();
    assert_eq!((shown(&done.delete), done.set), (reversed, vec![]));
    assert_eq!(kernel.0, Present::default());
}

#[test]
fn a_prefix_inside_of_a_destination_is_excluded_and_becomes_one_again() {
    let mut kernel = Kernel::default();
    kernel.bring_to(Some(&routing(&[("9.0.0.0/8", "a")], &[])), &links(&["a", "b"]), |_| {});
    let wanted = routing(&[("9.0.0.0/8", "a"), ("9.9.0.0/16", "excluded"), ("9.9.9.0/24", "b")], &[]);
    let done = kernel.bring_to(Some(&wanted), &links(&["a", "b"]), |_| {});
    let set = [
        "add route 9.9.9.0/24 in table 118",
        "add route 9.9.9.0/24 on link 12 in table 118",
        "add route 9.9.0.0/16 in table 118",
    ];
    assert_eq!((shown(&done.set), done.delete), (set.map(str::to_owned).to_vec(), vec![]));
    assert_eq!(kernel.way("9.9.1.1".parse().unwrap()), PacketRoute::Eth0);
    // The same place in the kernel, as a destination again.
    let wanted = routing(&[("9.0.0.0/8", "a"), ("9.9.0.0/16", "b")], &[]);
    let done = kernel.bring_to(Some(&wanted), &links(&["a", "b"]), |_| {});
    let set = ["set route 9.9.0.0/16 in table 118", "add route 9.9.0.0/16 on link 12 in table 118"];
    assert_eq!(shown(&done.set), set);
    assert_eq!(kernel.way("9.9.1.1".parse().unwrap()), PacketRoute::Link(12));
}

#[test]
fn a_link_that_is_gone_or_another_touches_one_route() {
    let mut kernel = Kernel::default();
    kernel.bring_to(Some(&article()), &links(&["a", "b"]), |_| {});
    let done = kernel.bring_to(Some(&article()), &links(&["a"]), |_| {});
    assert_eq!(shown(&done.delete), ["delete route 192.168.10.0/24 on link 12 in table 117"]);
    assert_eq!((done.set, kernel.way("192.168.10.1".parse().unwrap())), (vec![], PacketRoute::Refused));
    let done = kernel.bring_to(
        Some(&routing(&[("0.0.0.0/0", "c"), ("192.168.10.0/24", "b")], &[])),
        &links(&["c"]),
        |_| {},
    );
    assert_eq!(
        (shown(&done.set), done.delete),
        (vec!["set route 0.0.0.0/0 on link 13 in table 118".to_owned()], vec![])
    );
}

#[test]
fn what_coil_has_made_is_kept_and_only_completed() {
    let mut kernel = Kernel::default();
    kernel.bring_to(Some(&article()), &links(&["a", "b"]), |_| {});
    kernel.0.routes.retain(|route| route.kind == RouteKind::UNICAST);
    kernel.0.rules[0].protocol = ROUTE_PROTOCOL;
    let done = kernel.bring_to(Some(&article()), &links(&["a", "b"]), |_| {});
    assert_eq!(
        shown(&done.set),
        ["add route 192.168.10.0/24 in table 117", "add route 0.0.0.0/0 in table 118"]
    );
    assert_eq!((done.delete, done.occupied), (vec![], vec![]));
}

#[test]
fn rules_and_routes_of_other_programs_stay() {
    let family = IpFamily::V4;
    let rule = |priority, table, protocol| Rule::lookup(family, priority, table, protocol);
    let foreign = vec![
        rule(0, 255, 2),
        rule(1799, 117, 0),
        rule(1850, 117, 0),
        rule(1900, 117, 77),
        Rule { iif: Some("eth0".to_owned()), ..rule(2000, 118, 0) },
        rule(2000, 116, 30),
        Rule { source: Some(prefix("10.0.0.0/8")), ..rule(2001, TABLE_MAIN, 0) },
        Rule { has_more: true, ..rule(2002, TABLE_MAIN, 30) },
        rule(2050, TABLE_MAIN, 4),
        rule(2101, 118, 30),
        rule(32766, TABLE_MAIN, 2),
    ];
    let route = |table, protocol| Route::onto(table, protocol, prefix("9.0.0.0/8"), 1);
    let routes = vec![route(117, 4), route(118, 31)];
    let mut kernel = Kernel(Present { rules: foreign.clone(), routes: routes.clone() });
    // Deleting this one would delete that of protocol 77.
    kernel.apply(&Step::AddRule(rule(1900, 117, 0)));
    kernel.bring_to(Some(&article()), &links(&["a", "b"]), |_| {});
    kernel.bring_to(None, &links(&[]), |_| {});
    assert!(foreign.iter().all(|rule| kernel.0.rules.contains(rule)), "{:?}", kernel.0.rules);
    assert_eq!((kernel.0.rules.len(), kernel.0.routes), (foreign.len() + 1, routes));
}

#[test]
fn another_program_s_route_in_the_place_of_ours_is_reported_unless_it_leads_the_same_way() {
    let in_place =
        |link| Route { protocol: 4, scope: Scope::LINK, ..Route::onto(118, 4, prefix("0.0.0.0/0"), link) };
    let mut kernel = Kernel(Present { rules: vec![], routes: vec![in_place(1)] });
    let done = kernel.bring_to(Some(&article()), &links(&["a", "b"]), |_| {});
    let [Occupied { wanted, by }] = &done.occupied[..] else { panic!("{:?}", done.occupied) };
    assert_eq!((wanted.link, by), (Some(11), &in_place(1)));
    let mut kernel = Kernel(Present { rules: vec![], routes: vec![in_place(11)] });
    let done = kernel.bring_to(Some(&article()), &links(&["a", "b"]), |_| {});
    assert_eq!(done.occupied, []);
}

#[test]
fn numbers_that_are_not_those_of_egress_are_named() {
    let named = |routing: &ClientRouting| foreign(IpFamily::V4, routing);
    assert_eq!(named(&article()), None);
    let with_rule = |priority, destination: &str, table| {
        let rule = ClientRule { priority, destination: prefix(destination), table };
        named(&ClientRouting { rules: vec![rule], routes: vec![] }).unwrap()
    };
    assert_eq!(with_rule(1801, "0.0.0.0/0", 117), "IPv4 rule 1801 to table 117");
    assert_eq!(with_rule(1900, "0.0.0.0/0", 116), "IPv4 rule 1900 to table 116");
    assert_eq!(with_rule(1900, "::/0", 117), "IPv6 rule 1900 to table 117");
    let route = ClientRoute {
        table: 254,
        destination: prefix("9.0.0.0/8"),
        target: Target::Link("a".to_owned()),
        originating_only: false,
    };
    let named = named(&ClientRouting { rules: vec![], routes: vec![route] });
    assert_eq!(named.unwrap(), "route 9.0.0.0/8 to Link(\"a\") in table 254");
}

const DESTINATIONS: [&str; 9] = [
    "0.0.0.0/0",
    "9.0.0.0/8",
    "9.9.0.0/16",
    "100.64.7.0/24",
    "10.0.0.0/7",
    "10.5.0.0/16",
    "10.5.5.0/24",
    "192.168.10.0/24",
    "172.16.0.0/12",
];
const IN_CLUSTER: [&str; 3] = ["9.9.9.0/24", "100.64.0.0/16", "203.0.113.0/24"];

fn some_routing() -> impl Strategy<Value = Option<ClientRouting>> {
    let link = prop::option::of(prop::sample::select(vec!["a", "b", "c", "refused", "excluded"]));
    let destinations = prop::collection::vec(link, DESTINATIONS.len());
    let ranges = prop::sample::subsequence(IN_CLUSTER.to_vec(), 0..=IN_CLUSTER.len());
    let routing = (destinations, ranges).prop_map(|(chosen, ranges)| {
        let chosen = DESTINATIONS.into_iter().zip(chosen).filter_map(|(prefix, link)| Some((prefix, link?)));
        routing(&chosen.collect::<Vec<_>>(), &ranges)
    });
    prop::option::weighted(0.9, routing)
}

fn some_links() -> impl Strategy<Value = Links> {
    prop::sample::subsequence(vec!["a", "b", "c"], 0..=3).prop_map(|names| links(&names))
}

fn reached(desired: Option<&ClientRouting>, links: &Links) -> Kernel {
    let mut kernel = Kernel::default();
    kernel.bring_to(desired, links, |_| {});
    kernel
}

/// One address for each combination of prefixes that the tests use.
fn addresses() -> Vec<IpAddr> {
    let all = [
        [8, 8, 8, 8],
        [9, 1, 1, 1],
        [9, 9, 1, 1],
        [9, 9, 9, 9],
        [10, 1, 1, 1],
        [10, 5, 1, 1],
        [10, 5, 5, 5],
        [11, 1, 1, 1],
        [100, 64, 1, 1],
        [100, 64, 7, 7],
        [169, 254, 1, 1],
        [172, 17, 1, 1],
        [192, 168, 1, 1],
        [192, 168, 10, 1],
        [203, 0, 113, 1],
    ];
    all.into_iter().map(|octets| Ipv4Addr::from(octets).into()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn no_step_lets_a_packet_to_a_destination_leave_by_eth0(
        before in some_routing(), links_before in some_links(), after in some_routing(), links in some_links(),
        lost_rules in prop::collection::vec(prop::bool::weighted(0.2), 10),
        lost_routes in prop::collection::vec(prop::bool::weighted(0.2), 16),
        is_damaged in any::<bool>(),
    ) {
        let wanted = reached(after.as_ref(), &links);
        let mut kernel = reached(before.as_ref(), &links_before);
        let whole = kernel.clone();
        if is_damaged {
            let (mut rules, mut routes) = (lost_rules.into_iter().cycle(), lost_routes.into_iter().cycle());
            kernel.0.rules.retain(|_| !rules.next().unwrap());
            kernel.0.routes.retain(|_| !routes.next().unwrap());
        }
        let mut states = Vec::new();
        kernel.bring_to(after.as_ref(), &links, |kernel| states.push(kernel.clone()));
        for address in addresses() {
            let ways: Vec<PacketRoute> = states.iter().map(|kernel| kernel.way(address)).collect();
            let by_eth0: Vec<bool> = ways.iter().map(|way| *way == PacketRoute::Eth0).collect();
            prop_assert_eq!(*ways.last().unwrap(), wanted.way(address), "{}", address);
            if wanted.way(address) == PacketRoute::Eth0 {
                // Neither does a packet of the cluster, or of a tunnel, enter a tunnel on the way.
                prop_assert!(is_damaged || by_eth0.is_sorted(), "{} {:?}", address, ways);
            } else {
                // Only the damage may have kept a packet that was excluded.
                let was_excluded = is_damaged && whole.way(address) == PacketRoute::Eth0;
                prop_assert!(was_excluded || by_eth0.iter().rev().is_sorted(), "{} {:?}", address, ways);
            }
        }
        prop_assert_eq!(steps(after.as_ref(), &links, &kernel.0), Steps::default());
    }
}

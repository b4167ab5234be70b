//! Tables and rules against the kernel, each test in a namespace of its own.

use std::net::{Ipv4Addr, Ipv6Addr};

use fairlead_dataplane::routes::{
    LOOPBACK_INDEX, add_blocks, ensure_rules, mesh_rules, pod_rules, rule_difference, sync_blocks,
    sync_export, sync_table, table_difference,
};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::{
    IpFamily, Mark, Route, RouteKind, RouteSocket, Rule, TABLE_MAIN, add_address, set_up,
};
use ipnet::IpNet;
use proptest::prelude::*;
use testbed_netns::sh_in;

const PROTOCOL: u8 = 30;
const TABLE: u32 = 1116;

fn prefix(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn namespace() -> (Netns, RouteSocket) {
    let netns = Netns::create().unwrap();
    let mut socket = RouteSocket::open_in(&netns).unwrap();
    socket.apply(&[set_up(LOOPBACK_INDEX, true)]).unwrap();
    (netns, socket)
}

fn at<T: Send>(netns: &Netns, work: impl FnOnce() -> T + Send) -> T {
    netns.run(work).unwrap()
}

fn to_loopback(text: &str) -> Route {
    Route::onto(TABLE, PROTOCOL, prefix(text), LOOPBACK_INDEX)
}

#[test]
fn blocks_are_exported_as_routing_daemons_expect_and_withdrawn() {
    let (netns, _) = namespace();
    let blocks = ["10.1.0.0/27", "10.1.0.32/27", "fd00:1::/123"].map(prefix);
    at(&netns, || sync_export(RoutingIds::default(), &blocks).unwrap());
    let shown = sh_in(&netns, "ip route show table 119");
    assert!(shown.starts_with("10.1.0.0/27 dev lo proto 30 "), "{shown}");
    assert_eq!(shown.lines().count(), 2, "{shown}");
    let shown = sh_in(&netns, "ip -6 route show table 119");
    assert!(shown.contains("fd00:1::/123 dev lo proto 30 "), "{shown}");
    assert!(at(&netns, || sync_export(RoutingIds::default(), &blocks).unwrap()).is_empty());
    let done = at(&netns, || sync_export(RoutingIds::default(), &blocks[1..]).unwrap());
    assert_eq!(done.delete.iter().map(|route| route.destination).collect::<Vec<_>>(), [blocks[0]]);
    assert_eq!(sh_in(&netns, "ip route show table 119").lines().count(), 1);
    at(&netns, || sync_export(RoutingIds::default(), &[]).unwrap());
    assert_eq!(sh_in(&netns, "ip route show table 119"), "");
}

/// A router that knows the node of the block would send the packets back.
#[test]
fn addresses_of_a_block_that_no_pod_has_are_refused_instead_of_routed_away() {
    let (netns, _) = namespace();
    sh_in(
        &netns,
        "for link in lan pod; do ip link add $link type veth peer name far-$link; ip link set $link up; \
         ip link set far-$link up; done; ip addr add 192.0.2.1/24 dev lan; ip addr add fd02::1/64 dev lan nodad; \
         ip route add default via 192.0.2.9; ip -6 route add default via fd02::9; \
         ip route add 10.1.0.5 dev pod table 116 proto 30; ip -6 route add fd00:1::5 dev pod table 116 proto 30; \
         ip route add 10.2.0.7 dev pod table 116 proto 30",
    );
    let ids = RoutingIds::default();
    at(&netns, || ensure_rules(&pod_rules(ids)).unwrap());
    let to = |address: &str| sh_in(&netns, &format!("ip route get {address} 2>&1 || true"));
    let free = ["10.1.0.9", "fd00:1::9"];
    for address in free {
        assert!(to(address).contains(" via "), "by the default route: {}", to(address));
    }

    // The last two are blocks of a single address, of which one has a pod.
    let blocks = ["10.1.0.0/27", "fd00:1::/123", "10.2.0.7/32", "10.2.0.8/32"].map(prefix);
    assert_eq!(at(&netns, || sync_blocks(ids, &blocks).unwrap()).add.len(), 4);
    for address in free.into_iter().chain(["10.2.0.8"]) {
        assert!(to(address).contains("No route to host"), "{}", to(address));
    }
    for address in ["10.1.0.5", "fd00:1::5", "10.2.0.7"] {
        assert!(to(address).contains("dev pod"), "a pod's own route precedes: {}", to(address));
    }
    assert!(to("10.1.0.32").contains(" via "), "behind the end of the block");
    assert!(at(&netns, || sync_blocks(ids, &blocks).unwrap()).is_empty());

    // Before it is known who has the others.
    assert!(at(&netns, || add_blocks(ids, &blocks[..1]).unwrap()).is_empty());
    sh_in(&netns, "ip route del unreachable 10.1.0.0/27 table 116");
    assert_eq!(at(&netns, || add_blocks(ids, &blocks[..1]).unwrap()).add.len(), 1);
    for address in free.into_iter().chain(["10.2.0.8"]) {
        assert!(to(address).contains("No route to host"), "{}", to(address));
    }

    // Another program deletes them; later the blocks go to other nodes.
    sh_in(&netns, "ip route flush table 116 type unreachable");
    assert_eq!(at(&netns, || sync_blocks(ids, &blocks).unwrap()).add.len(), 3);
    assert_eq!(at(&netns, || sync_blocks(ids, &[]).unwrap()).delete.len(), 4);
    for address in free {
        assert!(to(address).contains(" via "), "{}", to(address));
    }
    assert!(to("10.1.0.5").contains("dev pod"), "routes of pods stay");
}

#[test]
fn our_own_table_is_brought_to_exactly_what_is_wanted() {
    let (netns, mut socket) = namespace();
    sh_in(&netns, "ip route add 10.9.0.0/24 dev lo table 1116 proto static");
    sh_in(&netns, "ip route add blackhole 10.8.0.0/24 table 1116");
    sh_in(&netns, "ip route add 10.1.0.0/24 dev lo table 1116 proto 30 metric 7");
    sh_in(&netns, "ip -6 route add fd09::/64 dev lo table 1116");
    sh_in(&netns, "ip route add 10.9.0.0/24 dev lo table 1117 proto 30");
    let desired = [to_loopback("10.1.0.0/24"), to_loopback("10.2.0.99/24"), to_loopback("fd01::/64")];
    let done = at(&netns, || sync_table(TABLE, PROTOCOL, &desired).unwrap());
    assert_eq!((done.add.len(), done.replace.len(), done.delete.len(), done.blocked.len()), (3, 0, 4, 0));
    let mut found = socket.routes(TABLE).unwrap();
    found.sort_by_key(|route| route.destination);
    assert_eq!(found, desired.each_ref().map(Route::canonical));
    assert_eq!(socket.routes(1117).unwrap().len(), 1, "other tables are not touched");
}

#[test]
fn a_route_that_changed_is_replaced_not_removed_and_added() {
    let (netns, mut socket) = namespace();
    sh_in(&netns, "ip link add left type veth peer name right");
    sh_in(&netns, "ip link set left up");
    sh_in(&netns, "ip link set right up");
    let link = socket.link_by_name("left").unwrap().unwrap().index;
    for text in ["10.1.0.0/24", "fd01::/64", "::/0", "0.0.0.0/0"] {
        let before = to_loopback(text);
        let mut after = Route::onto(TABLE, PROTOCOL, prefix(text), link);
        after.mtu = Some(1380);
        at(&netns, || sync_table(TABLE, PROTOCOL, &[before]).unwrap());
        let done = at(&netns, || sync_table(TABLE, PROTOCOL, std::slice::from_ref(&after)).unwrap());
        assert_eq!((done.add.len(), done.replace.len()), (0, 1), "{text}: {done:?}");
        assert_eq!(socket.routes(TABLE).unwrap(), [after.canonical()]);
    }
}

#[test]
fn in_the_main_table_only_our_routes_are_ours() {
    let (netns, mut socket) = namespace();
    sh_in(&netns, "ip route add 10.1.0.0/24 dev lo proto 31");
    sh_in(&netns, "ip route add 10.2.0.0/24 dev lo proto static");
    let before = socket.routes(TABLE_MAIN).unwrap();
    let desired = [to_loopback("10.2.0.0/24"), to_loopback("10.3.0.0/24")];
    let done = at(&netns, || sync_table(TABLE_MAIN, 31, &desired).unwrap());
    assert_eq!(
        done.blocked.iter().map(|route| route.destination).collect::<Vec<_>>(),
        [prefix("10.2.0.0/24")]
    );
    let after = socket.routes(TABLE_MAIN).unwrap();
    let mut shown: Vec<_> = after.iter().map(|it| (it.destination.to_string(), it.protocol)).collect();
    shown.sort();
    assert_eq!(shown, [("10.2.0.0/24".to_owned(), 4), ("10.3.0.0/24".to_owned(), 31)]);
    at(&netns, || sync_table(TABLE_MAIN, 31, &[]).unwrap());
    assert_eq!(socket.routes(TABLE_MAIN).unwrap().len(), before.len() - 1);
}

#[test]
fn thousands_of_routes_are_synced_and_one_change_is_one_message() {
    let (netns, mut socket) = namespace();
    let v4 = |n: u32| IpNet::new(Ipv4Addr::from_bits(0x0a00_0000 + (n << 8)).into(), 24).unwrap();
    let v6 =
        |n: u32| IpNet::new(Ipv6Addr::from_bits((0xfd00 << 112) + (u128::from(n) << 64)).into(), 64).unwrap();
    let mut desired: Vec<_> = (0..1000)
        .flat_map(|n| [v4(n), v6(n)])
        .map(|prefix| Route::onto(TABLE, PROTOCOL, prefix, LOOPBACK_INDEX))
        .collect();
    let started = std::time::Instant::now();
    at(&netns, || sync_table(TABLE, PROTOCOL, &desired).unwrap());
    println!("{} routes in {:?}", desired.len(), started.elapsed());
    assert_eq!(socket.routes(TABLE).unwrap().len(), 2000);
    assert!(at(&netns, || sync_table(TABLE, PROTOCOL, &desired).unwrap()).is_empty());
    let gone = desired.remove(777).canonical();
    let done = at(&netns, || sync_table(TABLE, PROTOCOL, &desired).unwrap());
    assert_eq!((done.delete, done.add.len(), done.replace.len()), (vec![gone], 0, 0));
}

#[test]
fn one_bad_route_does_not_keep_out_the_others() {
    let (netns, mut socket) = namespace();
    let bad =
        Route::via(TABLE, PROTOCOL, prefix("10.1.0.0/24"), "192.0.2.1".parse().unwrap(), LOOPBACK_INDEX);
    let desired = [bad, to_loopback("10.2.0.0/24"), to_loopback("fd01::/64")];
    let error = at(&netns, || sync_table(TABLE, PROTOCOL, &desired)).unwrap_err().to_string();
    assert!(
        error.contains("add route 10.1.0.0/24 via 192.0.2.1") && error.contains("invalid gateway"),
        "{error}"
    );
    assert_eq!(socket.routes(TABLE).unwrap().len(), 2);
}

#[test]
fn a_rule_of_another_program_is_not_duplicated_and_foreign_rules_stay() {
    let (netns, mut socket) = namespace();
    for command in [
        "ip rule add pref 2000 from 10.0.0.0/8 lookup 77",
        "ip rule add pref 2000 lookup 78 protocol 77",
        "ip rule add pref 2000 uidrange 0-5 lookup 79 protocol 30",
        "ip rule add pref 1999 lookup 116 protocol 30",
        // As Coil makes it, for one family.
        "ip -6 rule add pref 2000 lookup 116",
        // Ours, of an earlier version.
        "ip rule add pref 2000 lookup 115 protocol 30",
    ] {
        sh_in(&netns, command);
    }
    let done = at(&netns, || ensure_rules(&pod_rules(RoutingIds::default())).unwrap());
    assert_eq!(done.add, pod_rules(RoutingIds::default())[..1]);
    assert_eq!(done.delete, [Rule::lookup(IpFamily::V4, 2000, 115, 30)]);
    let shown = sh_in(&netns, "ip rule");
    for kept in ["from 10.0.0.0/8 lookup 77", "lookup 78 proto 77", "uidrange 0-5 lookup 79", "1999:"] {
        assert!(shown.contains(kept), "{kept}: {shown}");
    }
    assert_eq!(shown.matches("2000:\tfrom all lookup 116").count(), 1, "{shown}");
    assert_eq!(sh_in(&netns, "ip -6 rule").matches("lookup 116").count(), 1);
    assert!(at(&netns, || ensure_rules(&pod_rules(RoutingIds::default())).unwrap()).is_empty());
    let count = socket.rules().unwrap().len();
    at(&netns, || ensure_rules(&mesh_rules()).unwrap());
    assert_eq!(socket.rules().unwrap().len(), count + 4);
    let shown = sh_in(&netns, "ip rule");
    assert!(shown.contains("32500:\tfrom all fwmark 0x40/0x60 lookup 180 proto 30"), "{shown}");
}

#[test]
fn a_rule_whose_table_moved_is_replaced() {
    let (netns, mut socket) = namespace();
    let with_table =
        |table| mesh_rules().into_iter().map(move |rule| Rule { table, ..rule }).collect::<Vec<_>>();
    at(&netns, || ensure_rules(&with_table(180)).unwrap());
    at(&netns, || ensure_rules(&with_table(181)).unwrap());
    let tables: Vec<_> = socket
        .rules()
        .unwrap()
        .into_iter()
        .filter(|rule| rule.priority == 32500)
        .map(|rule| rule.table)
        .collect();
    assert_eq!(tables, [181, 181]);
}

#[test]
fn an_address_on_the_loopback_device_does_not_confuse_the_sync() {
    let (netns, mut socket) = namespace();
    let address = fairlead_netlink::route::Address {
        link: LOOPBACK_INDEX,
        prefix: prefix("10.1.0.1/27"),
        scope: fairlead_netlink::route::Scope::UNIVERSE,
        flags: Default::default(),
    };
    socket.apply(&[add_address(&address)]).unwrap();
    at(&netns, || sync_export(RoutingIds::default(), &[prefix("10.1.0.0/27")]).unwrap());
    assert!(at(&netns, || sync_export(RoutingIds::default(), &[prefix("10.1.0.0/27")]).unwrap()).is_empty());
}

/// A kernel of two rules: a place (destination and metric) holds one route; adding needs it free.
fn apply(difference: &fairlead_dataplane::routes::Difference<Route>, existing: &[Route]) -> Vec<Route> {
    let mut table = existing.to_vec();
    let same_place = |a: &Route, b: &Route| (a.destination, a.metric) == (b.destination, b.metric);
    for route in &difference.replace {
        let at = table.iter().position(|found| same_place(found, route)).unwrap();
        table[at] = route.clone();
    }
    for route in &difference.add {
        assert!(!table.iter().any(|found| same_place(found, route)), "{route:?}");
        table.push(route.clone());
    }
    table.retain(|route| !difference.delete.contains(route));
    table
}

fn some_routes() -> impl Strategy<Value = Vec<Route>> {
    let route = (0..6u32, any::<bool>(), 1..4u32, 0..2u32, 30..32u8, any::<bool>()).prop_map(
        |(n, v6, link, metric, protocol, blackhole)| {
            let text = if v6 { format!("fd0{n}::/64") } else { format!("10.{n}.0.0/16") };
            let mut route = Route { metric, ..Route::onto(TABLE, protocol, prefix(&text), link) };
            if blackhole {
                route.kind = RouteKind::BLACKHOLE;
            }
            route
        },
    );
    proptest::collection::vec(route, 0..12)
}

/// At most one route per place, as in a kernel table, in the kernel's form.
fn as_table(table: u32, routes: Vec<Route>) -> Vec<Route> {
    let mut seen = std::collections::HashSet::new();
    let canonical = routes.into_iter().map(|route| Route { table, ..route.canonical() });
    canonical.filter(|route| seen.insert((route.destination, route.metric))).collect()
}

fn sorted(mut routes: Vec<Route>) -> Vec<Route> {
    routes.sort_by_key(|route| (route.destination, route.metric));
    routes
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn after_the_difference_is_carried_out_the_table_is_right(desired in some_routes(), existing in some_routes()) {
        let existing = as_table(TABLE, existing);
        let wanted = as_table(TABLE, desired.iter().map(|it| Route { protocol: PROTOCOL, ..it.clone() }).collect());
        let after = apply(&table_difference(TABLE, PROTOCOL, &desired, &existing), &existing);
        prop_assert_eq!(sorted(after.clone()), sorted(wanted));
        prop_assert!(table_difference(TABLE, PROTOCOL, &desired, &after).is_empty());
    }

    #[test]
    fn in_a_shared_table_foreign_routes_survive(desired in some_routes(), existing in some_routes()) {
        let existing = as_table(TABLE_MAIN, existing);
        let after = apply(&table_difference(TABLE_MAIN, 30, &desired, &existing), &existing);
        let foreign = |routes: &[Route]| {
            sorted(routes.iter().filter(|route| route.protocol != 30).cloned().collect())
        };
        prop_assert_eq!(foreign(&after), foreign(&existing));
        prop_assert!(table_difference(TABLE_MAIN, 30, &desired, &after).is_empty());
    }

    #[test]
    fn rules_settle_in_one_step(
        desired in proptest::collection::vec(some_rule(), 0..6), existing in proptest::collection::vec(some_rule(), 0..8)
    ) {
        let desired: Vec<_> = desired.into_iter().map(|rule| Rule { protocol: 30, ..rule }).collect();
        let difference = rule_difference(&desired, &existing);
        let mut after = existing.clone();
        after.retain(|rule| !difference.delete.contains(rule));
        after.extend(difference.add.iter().cloned());
        prop_assert!(rule_difference(&desired, &after).is_empty());
        prop_assert!(desired.iter().all(|rule| after.iter().any(|found| found.same_effect(rule))));
        prop_assert!(existing.iter().filter(|rule| rule.protocol != 30).all(|rule| after.contains(rule)));
    }
}

fn some_rule() -> impl Strategy<Value = Rule> {
    let mark = proptest::option::of((0..2u32).prop_map(|value| Mark { value, mask: 0x60 }));
    (any::<bool>(), 0..3u32, 100..103u32, mark, 30..32u8).prop_map(|(v6, priority, table, mark, protocol)| {
        let family = if v6 { IpFamily::V6 } else { IpFamily::V4 };
        Rule { mark, ..Rule::lookup(family, priority, table, protocol) }
    })
}

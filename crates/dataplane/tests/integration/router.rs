//! The built-in router's routes against the kernel, each test in a namespace of its own.

use fairlead_dataplane::routes::{sync_router, table_difference};
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::{Route, RouteSocket, TABLE_MAIN};
use testbed_netns::sh_in;

/// A namespace with a network in each family on the link `left`, whose index comes back.
fn namespace() -> (Netns, u32) {
    let netns = Netns::create().unwrap();
    for command in [
        "ip link set lo up",
        "ip link add left type veth peer name right",
        "ip link set left up",
        "ip link set right up",
        "ip addr add 192.0.2.1/24 dev left",
        "ip addr add fd00::1/64 dev left nodad",
    ] {
        sh_in(&netns, command);
    }
    let index = RouteSocket::open_in(&netns).unwrap().link_by_name("left").unwrap().unwrap().index;
    (netns, index)
}

fn via(destination: &str, gateway: &str, link: u32) -> Route {
    Route::via(TABLE_MAIN, 31, destination.parse().unwrap(), gateway.parse().unwrap(), link)
}

#[test]
fn routes_come_change_and_go_and_an_unchanged_state_changes_nothing() {
    let (netns, link) = namespace();
    let desired = [via("10.1.0.0/27", "192.0.2.2", link), via("fd01::/123", "fd00::2", link)];
    let sync = |desired: &[Route]| netns.run(|| sync_router(desired).unwrap()).unwrap();
    let (done, refused) = sync(&desired);
    assert_eq!((done.add.len(), refused.len()), (2, 0), "{refused:?}");
    assert!(sh_in(&netns, "ip route show proto 31").starts_with("10.1.0.0/27 via 192.0.2.2 dev left"));
    assert!(sh_in(&netns, "ip -6 route show proto 31").starts_with("fd01::/123 via fd00::2 dev left"));
    assert!(sync(&desired).0.is_empty());

    let moved = [via("10.1.0.0/27", "192.0.2.3", link), via("fd01::/123", "fd00::3", link)];
    let (done, refused) = sync(&moved);
    assert_eq!((done.replace.len(), done.delete.len(), refused.len()), (2, 0, 0), "{done:?} {refused:?}");
    assert!(sync(&moved).0.is_empty());
    sync(&[]);
    assert_eq!(sh_in(&netns, "ip route show proto 31") + &sh_in(&netns, "ip -6 route show proto 31"), "");
}

#[test]
fn what_the_kernel_refuses_is_said_and_disturbs_no_other() {
    let (netns, link) = namespace();
    let bad = [
        via("10.1.0.0/27", "203.0.113.1", link),
        via("10.2.0.0/27", "192.0.2.2", 999),
        via("fd01::/123", "fd09::2", link),
    ];
    let good = [via("10.3.0.0/27", "192.0.2.2", link), via("fd03::/123", "fd00::2", link)];
    let all = [&bad[..], &good[..]].concat();
    let (_, refused) = netns.run(|| sync_router(&all).unwrap()).unwrap();
    let mut named: Vec<_> = refused.iter().map(|it| it.route.destination).collect();
    named.sort();
    assert_eq!(named, bad.each_ref().map(|route| route.destination));
    assert!(refused.iter().all(|it| !it.reason.is_empty()), "{refused:?}");
    let present = sh_in(&netns, "ip route show proto 31") + &sh_in(&netns, "ip -6 route show proto 31");
    assert_eq!(present.lines().count(), 2, "{present}");
}

#[test]
fn foreign_routes_stay_even_in_the_way_and_equal_ones_are_no_problem() {
    let (netns, link) = namespace();
    let foreign = [
        "10.1.0.0/27 via 192.0.2.9 dev left proto static",
        "10.2.0.0/27 via 192.0.2.2 dev left proto static",
        "10.8.0.0/27 via 192.0.2.2 dev left proto 77",
        "fd01::/123 via fd00::9 dev left proto static metric 1024",
        "fd02::/123 via fd00::2 dev left proto static metric 1024",
    ];
    for route in foreign {
        sh_in(&netns, &format!("ip route add {route}"));
    }
    let desired = [
        via("10.1.0.0/27", "192.0.2.2", link),
        via("10.2.0.0/27", "192.0.2.2", link),
        via("fd01::/123", "fd00::2", link),
        via("fd02::/123", "fd00::2", link),
    ];
    let (done, refused) = netns.run(|| sync_router(&desired).unwrap()).unwrap();
    assert!(done.is_empty(), "{done:?}");
    let named: Vec<_> = refused.iter().map(|it| it.route.destination.to_string()).collect();
    assert_eq!(named, ["10.1.0.0/27", "fd01::/123"]);
    assert!(refused[0].reason.contains("protocol 4"), "{}", refused[0].reason);
    let present = sh_in(&netns, "ip route") + &sh_in(&netns, "ip -6 route");
    assert!(foreign.iter().all(|route| present.contains(route)), "{present}");
}

/// IPv4 lets two programs have a route in one place. A replacement would hit the first: theirs.
#[test]
fn a_foreign_route_beside_ours_is_never_replaced() {
    let (netns, link) = namespace();
    sh_in(&netns, "ip route add 10.1.0.0/27 via 192.0.2.9 dev left proto static");
    sh_in(&netns, "ip route append 10.1.0.0/27 via 192.0.2.2 dev left proto 31");
    let (done, refused) =
        netns.run(|| sync_router(&[via("10.1.0.0/27", "192.0.2.3", link)]).unwrap()).unwrap();
    assert_eq!((done.replace.len(), done.delete.len(), refused.len()), (0, 1, 1), "{done:?}");
    let present = sh_in(&netns, "ip route show 10.1.0.0/27");
    assert_eq!(present.trim(), "10.1.0.0/27 via 192.0.2.9 dev left proto static");
    let existing = [Route { protocol: 4, ..via("10.1.0.0/27", "192.0.2.9", link) }];
    assert_eq!(
        table_difference(TABLE_MAIN, 31, &[via("10.1.0.0/27", "192.0.2.3", link)], &existing).blocked.len(),
        1
    );
}

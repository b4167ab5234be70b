use fairlead_netlink::route::RouteKind;

use super::super::{Bypass, NarrowRoute, OwnSource, PlainRoute};
use super::*;

const DEVICE: u32 = 7;
const UPLINK: u32 = 2;

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn state() -> MeshState {
    MeshState {
        interface: "wire_kube".to_owned(),
        mtu: 1420,
        addresses: vec![net("fd00:4::1/64")],
        targets_v4: vec![net("10.64.0.0/24"), net("192.0.2.2/31")],
        targets_v6: vec![net("fd00:64::/64"), net("fd00:2::2/128")],
        bypass: Bypass {
            servers: vec!["192.0.2.2:6443".parse().unwrap()],
            relays: vec!["10.64.1.9:3478".parse().unwrap()],
            nodes: ["192.0.2.2", "192.0.2.3", "fd00:2::2"].map(|it| it.parse().unwrap()).to_vec(),
            ..Bypass::default()
        },
        plain: Vec::new(),
        narrow: Vec::new(),
        masqueraded: Vec::new(),
        without_default: Vec::new(),
        listen_port: 51821,
        sources: vec![
            OwnSource { address: "192.0.2.1".parse().unwrap(), is_on_host: true },
            OwnSource { address: "fd00:2::1".parse().unwrap(), is_on_host: false },
        ],
        uplinks: Vec::new(),
    }
}

fn shown(device: Option<u32>, state: &MeshState) -> Vec<String> {
    let of_table = |(table, routes): (u32, Vec<Route>)| {
        routes.into_iter().map(move |route| {
            assert_eq!(route.table, table);
            let way = match (route.kind, route.link) {
                (RouteKind::UNREACHABLE, _) => "unreachable",
                (_, Some(DEVICE)) => "mesh",
                (_, Some(UPLINK)) => "uplink",
                _ => "lo",
            };
            let source = route.prefsrc.map(|it| format!(" src {it}")).unwrap_or_default();
            let mtu = route.mtu.map(|it| format!(" mtu {it}")).unwrap_or_default();
            format!("{table}: {} {way}{source}{mtu}", route.destination)
        })
    };
    routes(device, state, true).into_iter().flat_map(of_table).collect()
}

#[test]
fn what_enters_the_mesh_leads_into_the_device_and_nowhere_behind_it() {
    let expected = [
        "181: 10.64.0.0/24 mesh src 192.0.2.1",
        "181: 10.64.0.0/24 unreachable",
        "181: fd00:64::/64 mesh src fd00:4::1",
        "181: fd00:64::/64 unreachable",
        "182: 192.0.2.2/31 mesh src 192.0.2.1",
        "182: 192.0.2.2/31 lo",
        "182: fd00:2::2/128 mesh src fd00:4::1",
        "182: fd00:2::2/128 unreachable",
        "183: 192.0.2.2/31 mesh src 192.0.2.1",
        "183: 192.0.2.2/31 unreachable",
        "183: fd00:2::2/128 mesh src fd00:4::1",
        "183: fd00:2::2/128 unreachable",
    ];
    assert_eq!(shown(Some(DEVICE), &state()), expected);
    let without: Vec<&str> = expected.into_iter().filter(|it| !it.contains(" mesh")).collect();
    assert_eq!(shown(None, &state()), without, "without the device");
}

#[test]
fn neighbours_and_narrow_paths_are_as_in_the_table_of_the_mesh() {
    let gateway: IpAddr = "192.0.2.2".parse().unwrap();
    let plain = |destination| PlainRoute { destination, gateway, link: UPLINK, is_tunnel: false };
    let narrow = |destination| NarrowRoute { destination, mtu: 1300 };
    let state = MeshState {
        plain: vec![plain(net("10.64.0.0/26")), plain(net("192.0.2.2/32"))],
        narrow: vec![narrow(net("10.64.0.64/26")), narrow(net("192.0.2.3/32"))],
        ..state()
    };
    let routes = shown(Some(DEVICE), &state);
    for route in [
        "181: 10.64.0.0/26 uplink",
        "181: 10.64.0.64/26 mesh src 192.0.2.1 mtu 1300",
        "182: 192.0.2.2/32 uplink",
        "183: 192.0.2.2/32 uplink",
        "182: 192.0.2.3/32 mesh src 192.0.2.1 mtu 1300",
    ] {
        assert!(routes.iter().any(|it| it == route), "{route}: {routes:#?}");
    }
    let has = |route: &str| routes.iter().any(|it| it == route);
    assert!(!has("181: 192.0.2.2/32 uplink") && !has("182: 10.64.0.0/26 uplink"), "{routes:#?}");
}

#[test]
fn rules_are_added_before_those_that_they_are_exceptions_of() {
    let rules: Vec<String> = rules(&state(), Some(116)).iter().map(Rule::to_string).collect();
    let ipv4: Vec<&String> = rules.iter().filter(|it| it.starts_with("IPv4")).collect();
    let at = |text: &str| {
        ipv4.iter().position(|it| it.contains(text)).unwrap_or_else(|| panic!("{text}: {ipv4:#?}"))
    };
    let order = [
        "rule 100 to table 116",
        "rule 105 for mark 0x40/0x60",
        "rule 101 for mark 0x40/0x60",
        "rule 101 for mark 0x20/0x60 from link lo of protocol 17 from port 51821 to rule 105",
        "rule 101 for mark 0x20/0xffffffff from link lo to rule 105",
        "rule 101 for mark 0x60/0x60 from link lo to rule 105",
        "rule 101 from link lo to 192.0.2.2/32 of protocol 6 to port 6443 to rule 105",
        "rule 103 from link lo from 192.0.2.2/32 of protocol 6 from port 6443 to rule 105",
        "rule 103 from 10.64.1.9/32 of protocol 6 from port 3478 to rule 105",
        "rule 102 to table 181",
        "rule 104 from link lo to table 182",
        "rule 104 for all but those from link lo to table 183",
    ];
    let found = order.map(at);
    assert!(found.is_sorted(), "{found:?}: {ipv4:#?}");
    assert_eq!(ipv4.len(), order.len(), "{ipv4:#?}");
}

#[test]
fn a_port_that_is_not_known_yet_and_tunnels_that_are_not_there_have_no_rules() {
    let has =
        |state: &MeshState, text: &str| rules(state, None).iter().any(|rule| rule.to_string().contains(text));
    let without = MeshState { listen_port: 0, ..state() };
    assert!(!has(&without, "protocol 17") && has(&state(), "protocol 17"));
    let tunnel = PlainRoute {
        destination: net("10.64.0.0/26"),
        gateway: "192.0.2.2".parse().unwrap(),
        link: UPLINK,
        is_tunnel: true,
    };
    let with = MeshState { plain: vec![tunnel], ..state() };
    assert!(has(&with, "IPv4 rule 101 from link lo of protocol 4 to rule 105"));
    assert!(!has(&with, "of protocol 41") && !has(&state(), "of protocol 4 "));
}

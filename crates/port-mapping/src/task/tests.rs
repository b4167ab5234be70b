use fairlead_netlink::route::{Address, AddressFlags, LinkLayer, NextHop, Scope};

use super::*;
use crate::Protocol;

fn link(index: u32, name: &str) -> Link {
    Link {
        index,
        name: name.to_owned(),
        mtu: 1500,
        up: true,
        carrier: true,
        operational: true,
        layer: LinkLayer::Ethernet,
        ..Link::default()
    }
}

fn default_route(gateway: &str, link: u32, metric: u32) -> Route {
    let gateway: IpAddr = gateway.parse().unwrap();
    let any = if gateway.is_ipv4() { "0.0.0.0/0" } else { "::/0" };
    Route { gateway: Some(gateway), metric, ..Route::onto(TABLE_MAIN, 3, any.parse().unwrap(), link) }
}

fn address(link: u32, prefix: &str) -> Address {
    let flags = AddressFlags::PERMANENT;
    Address { link, prefix: prefix.parse().unwrap(), scope: Scope::UNIVERSE, flags }
}

/// Gateway, link and source of the request.
fn asked(network: &HostNetwork, ipv4: bool) -> Option<(String, String, Option<IpAddr>)> {
    let request = request(network, ipv4, "wire_kube", 51821, Nonce([1; 12]))?;
    assert_eq!((request.port, request.mark), (51821, MARK_FROM_WIREGUARD));
    Some((request.gateway.to_string(), request.link, request.source))
}

#[test]
fn the_preferred_default_gateway_is_asked() {
    let links = vec![link(2, "eth0"), link(3, "wlan0"), link(4, "wire_kube")];
    let of = |routes: Vec<Route>| HostNetwork { links: links.clone(), routes, ..HostNetwork::default() };
    let eth0 = || default_route("192.168.1.1", 2, 100);
    let found = Some(("192.168.1.1".to_owned(), "eth0".to_owned(), None));
    assert_eq!(asked(&of(vec![default_route("10.0.0.1", 3, 600), eth0()]), true), found);
    assert_eq!(asked(&of(vec![eth0()]), false), None);
    assert_eq!(asked(&of(vec![]), true), None);
    // A tunnel without a gateway, the mesh itself, a link that is gone, and a gateway of the other family.
    assert_eq!(asked(&of(vec![Route { gateway: None, ..eth0() }]), true), None);
    assert_eq!(asked(&of(vec![default_route("10.0.0.1", 4, 0)]), true), None);
    assert_eq!(asked(&of(vec![default_route("10.0.0.1", 9, 0)]), true), None);
    assert_eq!(asked(&of(vec![Route { gateway: "fe80::1".parse().ok(), ..eth0() }]), true), None);
    let next_hops = vec![NextHop { link: 2, gateway: "192.168.1.1".parse().ok() }];
    let multipath = Route { gateway: None, link: None, next_hops, ..eth0() };
    assert_eq!(asked(&of(vec![multipath]), true), found);
}

#[test]
fn in_ipv6_the_pinhole_is_for_a_public_address() {
    let network = |prefixes: &[(u32, &str)]| HostNetwork {
        links: vec![link(2, "eth0"), link(3, "eth1")],
        addresses: prefixes.iter().map(|(link, prefix)| address(*link, prefix)).collect(),
        routes: vec![default_route("fe80::1", 2, 0)],
        ..HostNetwork::default()
    };
    let source = |prefixes| asked(&network(prefixes), false).and_then(|(_, _, source)| source);
    let all = [(3, "2001:db8:1::3/64"), (2, "fe80::2/64"), (2, "fd00::2/64"), (2, "2001:db8::2/64")];
    assert_eq!(source(&all), "2001:db8::2".parse().ok());
    assert_eq!(source(&all[..3]), None);
}

#[test]
fn a_refusal_is_a_problem_only_where_no_gateway_maps() {
    let [one, two] = ["192.168.1.1", "fe80::1"].map(|text| text.parse::<IpAddr>().unwrap());
    let mut found = PortMappings::default();
    assert!(!found.update(one, Err(Failure::NoAnswer)));
    assert_eq!(found.refusals().count(), 0);
    let refused = Failure::Refused { protocol: Protocol::Upnp, reason: "it is not allowed".to_owned() };
    assert!(found.update(two, Err(refused.clone())));
    assert!(!found.update(two, Err(refused)));
    let (gateway, failure) = found.refusals().next().unwrap();
    assert_eq!((gateway, failure.to_string().as_str()), (two, "UPnP: it is not allowed"));
    let external = "198.51.100.1:4000".parse().unwrap();
    let mapping = |seconds| Mapping {
        protocol: Protocol::Pcp,
        external,
        lifetime: std::time::Duration::from_secs(seconds),
    };
    assert!(found.update(one, Ok(mapping(7200))));
    assert!(!found.update(one, Ok(mapping(3600))), "a renewal is no news");
    assert_eq!((found.refusals().count(), found.addresses().collect::<Vec<_>>()), (0, vec![external]));
    assert!(found.update(one, Err(Failure::NoAnswer)));
    assert_eq!(found.refusals().count(), 1);
}

#[test]
fn pods_that_start_wake_nothing() {
    let veth = Link { kind: Some("veth".to_owned()), ..link(9, "veth9") };
    let changed = |link| Change::Link { link, gone: false };
    let address = |prefix| Change::Address { address: address(9, prefix), gone: false };
    for change in [changed(veth), address("fe80::9/64"), address("10.1.0.9/32")] {
        assert!(!concerns(&change), "{change:?}");
    }
    for change in [changed(link(2, "eth0")), address("2001:db8::9/64"), Change::Missed] {
        assert!(concerns(&change), "{change:?}");
    }
    let route = |route| Change::Route { route, gone: true };
    assert!(concerns(&route(default_route("192.168.1.1", 2, 0))));
    let other = Route { table: 116, ..default_route("192.168.1.1", 2, 0) };
    assert!(!concerns(&route(other)));
}

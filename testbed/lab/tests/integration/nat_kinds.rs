//! Every kind of NAT behaves as RFC 4787 names it.

use crate::common;
use crate::common::{
    Filtering, Mapping, Observers, at, filtering, hairpin, lan, mapping, punch, receive, seen, socket,
};
use testbed_lab::{Host, Lab, Nat, NatSite, SiteOptions};

struct Bed {
    lab: Lab,
    observers: Observers,
    site: NatSite,
    hosts: [Host; 2],
}

fn bed(nat: Nat) -> Bed {
    let lab = Lab::new().unwrap();
    let observers = Observers::new(&lab);
    let site = lab.nat_site("site", nat, lan("192.168.1.0/24")).unwrap();
    let hosts = ["one", "two"].map(|name| site.host(name).unwrap());
    Bed { lab, observers, site, hosts }
}

/// Checks both hosts of the site: the second one's ports are not preserved, but its NAT is of the same kind.
fn check(nat: Nat, expected_mapping: Mapping, expected_filtering: Filtering, expected_hairpin: bool) -> Bed {
    let bed = bed(nat);
    for host in &bed.hosts {
        assert_eq!(
            mapping(&bed.observers, host, 50_000),
            expected_mapping,
            "mapping of {nat:?} for {}",
            host.name()
        );
        assert_eq!(
            filtering(&bed.observers, host, 50_001),
            expected_filtering,
            "filtering of {nat:?} for {}",
            host.name()
        );
    }
    let [one, two] = &bed.hosts;
    let hairpinned = hairpin(&bed.observers, one, two);
    assert_eq!(hairpinned.is_some(), expected_hairpin, "hairpin of {nat:?}");
    if let Some((observed, external)) = hairpinned {
        assert_eq!(observed, external, "RFC 4787 REQ-9: the external address must be seen as source");
    }
    bed
}

#[test]
fn port_restricted_is_eim_apdf() {
    let bed =
        check(Nat::PortRestricted, Mapping::EndpointIndependent, Filtering::AddressAndPortDependent, false);
    let [one, two] = bed.hosts.each_ref().map(|host| bed.observers.reflexive(&socket(host, 51_820)));
    let wan = bed.site.router().address();
    assert_eq!(one, at(wan, 51_820), "the first host's port is preserved");
    assert_eq!(two.ip(), wan);
    assert_ne!(one, two, "no two hosts share an external port");
}

#[test]
fn linux_masquerade_shares_a_port_between_hosts() {
    let bed =
        check(Nat::LinuxMasquerade, Mapping::EndpointIndependent, Filtering::AddressAndPortDependent, false);
    let [one, two] = bed.hosts.each_ref().map(|host| socket(host, 51_820));
    let wan = bed.site.router().address();
    let [first, second] = bed.observers.hosts.each_ref();
    let (at_first, at_second) = (socket(first, 4100), socket(second, 4100));
    let timeout = common::TIMEOUT;
    assert_eq!(seen(&one, &at_first, at(first.address(), 4100), timeout), Some(at(wan, 51_820)));
    assert_eq!(seen(&two, &at_second, at(second.address(), 4100), timeout), Some(at(wan, 51_820)));
    let remapped = seen(&two, &at_first, at(first.address(), 4100), timeout).unwrap();
    assert_ne!(remapped, at(wan, 51_820), "towards one endpoint the port is taken");
}

#[test]
fn full_cone_is_eim_eif() {
    check(Nat::FullCone, Mapping::EndpointIndependent, Filtering::EndpointIndependent, false);
}

#[test]
fn address_restricted_is_eim_adf() {
    check(Nat::AddressRestricted, Mapping::EndpointIndependent, Filtering::AddressDependent, false);
}

#[test]
fn symmetric_random_is_edm_apdf_without_a_pattern() {
    let bed = check(
        Nat::SymmetricRandom,
        Mapping::AddressAndPortDependent,
        Filtering::AddressAndPortDependent,
        false,
    );
    let ports: Vec<i32> =
        bed.observers.mappings(&socket(&bed.hosts[0], 50_100)).iter().map(|to| to.port().into()).collect();
    let steps: Vec<i32> = ports.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(steps.windows(2).any(|pair| pair[0] != pair[1]), "ports {ports:?} follow a pattern");
}

#[test]
fn symmetric_predictable_counts_up() {
    let bed = check(
        Nat::SymmetricPredictable,
        Mapping::AddressAndPortDependent,
        Filtering::AddressAndPortDependent,
        false,
    );
    let ports: Vec<u16> =
        bed.observers.mappings(&socket(&bed.hosts[0], 50_100)).iter().map(|to| to.port()).collect();
    assert!(ports.windows(2).all(|pair| pair[1] == pair[0] + 1), "ports {ports:?} do not count up by one");
}

#[test]
fn port_pool_is_eim_apdf_within_its_bounds() {
    let nat = Nat::PortPool { first: 40_000, last: 40_063 };
    let bed = check(nat, Mapping::EndpointIndependent, Filtering::AddressAndPortDependent, false);
    for port in 50_200..50_220 {
        let mapped = bed.observers.reflexive(&socket(&bed.hosts[usize::from(port % 2)], port));
        assert!((40_000..=40_063).contains(&mapped.port()), "{mapped} is outside the pool");
    }
}

#[test]
fn an_exhausted_port_pool_refuses() {
    let bed = bed(Nat::PortPool { first: 40_000, last: 40_003 });
    let sockets: Vec<_> = (0..12).map(|index| socket(&bed.hosts[0], 50_300 + index)).collect();
    let heard = sockets.iter().filter(|one| bed.observers.hears(one)).count();
    assert_eq!(heard, 4, "one mapping per port towards one endpoint");
}

#[test]
fn one_to_one_is_eim_eif_with_an_address_per_host() {
    let bed = bed(Nat::OneToOne);
    for host in &bed.hosts {
        assert_eq!(mapping(&bed.observers, host, 50_000), Mapping::EndpointIndependent);
        assert_eq!(filtering(&bed.observers, host, 50_001), Filtering::EndpointIndependent);
        let mapped = bed.observers.reflexive(&socket(host, 50_002));
        assert_eq!(mapped, at(host.public_address(), 50_002), "address of its own, port untouched");
    }
    let [one, two] = bed.hosts.each_ref().map(Host::public_address);
    assert!(one != two && one != bed.site.router().address());
    // Not even one packet outwards is needed.
    let listener = socket(&bed.hosts[0], 50_003);
    bed.observers.send(0, "unasked", at(one, 50_003));
    assert_eq!(receive(&listener, common::TIMEOUT).unwrap().0, "unasked");
}

#[test]
fn hairpin_is_full_cone_that_loops_back() {
    check(Nat::Hairpin, Mapping::EndpointIndependent, Filtering::EndpointIndependent, true);
}

#[test]
fn no_nat_routes_a_public_lan() {
    let lab = Lab::new().unwrap();
    let observers = Observers::new(&lab);
    let site = lab.nat_site("site", Nat::None, lan("198.51.100.0/24")).unwrap();
    let host = site.host("one").unwrap();
    assert_eq!(observers.reflexive(&socket(&host, 50_000)), at(host.address(), 50_000));
    assert_eq!(host.public_address(), host.address());
    assert_eq!(filtering(&observers, &host, 50_001), Filtering::EndpointIndependent);
}

#[test]
fn udp_blocked_lets_only_dns_and_tcp_out() {
    let bed = bed(Nat::UdpBlocked);
    assert!(!bed.observers.hears(&socket(&bed.hosts[0], 50_000)));
    let server = &bed.observers.hosts[0];
    let dns = socket(server, 53);
    let client = socket(&bed.hosts[0], 50_001);
    assert!(seen(&client, &dns, at(server.address(), 53), common::TIMEOUT).is_some());
    let listener = server.run(|| std::net::TcpListener::bind((server.address(), 443)).unwrap()).unwrap();
    let target = listener.local_addr().unwrap();
    bed.hosts[0].run(|| std::net::TcpStream::connect_timeout(&target, common::TIMEOUT).unwrap()).unwrap();
}

#[test]
fn cgnat_translates_twice() {
    let bed = check(Nat::Cgnat, Mapping::EndpointIndependent, Filtering::AddressAndPortDependent, false);
    let router = bed.site.router();
    assert!(lan("100.64.0.0/10").contains(&router.address()), "the home router's wan is the carrier's");
    let mapped = bed.observers.reflexive(&socket(&bed.hosts[0], 50_500));
    assert_eq!(mapped, at(bed.hosts[0].public_address(), 50_500));
    assert!(lan("203.0.113.0/24").contains(&router.public_address()));
    drop(bed.lab);
}

#[test]
fn two_customers_of_one_carrier_meet_only_inside() {
    let lab = Lab::new().unwrap();
    let observers = Observers::new(&lab);
    let carrier = lab.carrier("carrier").unwrap();
    let customer = |name: &str| {
        let options = SiteOptions {
            behind: Some(carrier.clone()),
            ..SiteOptions::new(Nat::PortRestricted, lan("192.168.1.0/24"))
        };
        let site = lab.site(name, options).unwrap();
        let host = site.host(&format!("{name}-host")).unwrap();
        (site, host)
    };
    let ((_, one), (two_site, two)) = (customer("first"), customer("second"));
    let (from, to) = (socket(&one, 51_820), socket(&two, 51_820));
    let (one_seen, two_seen) = (observers.reflexive(&from), observers.reflexive(&to));
    assert_eq!(one_seen.ip(), two_seen.ip(), "both have the carrier's address");
    assert_ne!(one_seen.port(), two_seen.port(), "equal inner ports, different outer ports");
    assert!(!punch(&observers, &from, &to, false), "no hairpin: not by the public address");
    // By the addresses in the carrier's own range: the holes are punched in the home routers alone.
    let inner = |host: &Host| at(host.router().unwrap().address(), 51_820);
    from.send_to(b"punch", inner(&two)).unwrap();
    to.send_to(b"punch", inner(&one)).unwrap();
    assert_eq!(receive(&from, common::TIMEOUT).unwrap().1, at(two_site.router().address(), 51_820));
}

/// Hole punching between each two kinds of NAT; `first` sends first, so both orders are tried.
#[test]
fn hole_punching_works_exactly_where_it_should() {
    let lab = Lab::new().unwrap();
    let observers = Observers::new(&lab);
    let kinds = [
        Nat::FullCone,
        Nat::AddressRestricted,
        Nat::PortRestricted,
        Nat::SymmetricRandom,
        Nat::SymmetricPredictable,
        Nat::OneToOne,
    ];
    let sites = |side: &str| {
        kinds.map(|nat| {
            let name = format!("{side}-{nat:?}").replace("Predictable", "P");
            lab.nat_site(&name, nat, lan("192.168.1.0/24")).unwrap().host(&format!("{name}-h")).unwrap()
        })
    };
    let (left, right) = (sites("l"), sites("r"));
    let symmetric = |nat| matches!(nat, Nat::SymmetricRandom | Nat::SymmetricPredictable);
    let mut port = 30_000;
    for (first_kind, first) in kinds.iter().zip(&left) {
        for (second_kind, second) in kinds.iter().zip(&right) {
            let open = |nat: &Nat| matches!(nat, Nat::FullCone | Nat::AddressRestricted | Nat::OneToOne);
            let expected =
                open(first_kind) || open(second_kind) || !(symmetric(*first_kind) || symmetric(*second_kind));
            port += 1;
            let (one, two) = (socket(first, port), socket(second, port));
            assert_eq!(
                punch(&observers, &one, &two, expected),
                expected,
                "{first_kind:?} to {second_kind:?}"
            );
        }
    }
}

#[test]
fn two_second_hosts_behind_port_restricted_routers_punch_through() {
    let lab = Lab::new().unwrap();
    let observers = Observers::new(&lab);
    let hosts = ["home", "office"].map(|name| {
        let site = lab.nat_site(name, Nat::PortRestricted, lan("192.168.1.0/24")).unwrap();
        [1, 2].map(|number| site.host(&format!("{name}-{number}")).unwrap())
    });
    // All four use one port, as WireGuard does, and are heard by the observers before anything else.
    let sockets = hosts.each_ref().map(|pair| pair.each_ref().map(|host| socket(host, 51_820)));
    for inside in sockets.iter().flatten() {
        observers.mappings(inside);
    }
    for one in &sockets[0] {
        for two in &sockets[1] {
            assert!(punch(&observers, one, two, true));
            common::drain(one);
            common::drain(two);
        }
    }
}

//! The switches: what they break, and that it heals.

use std::net::{Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use crate::common;
use crate::common::{Observers, SILENCE, TIMEOUT, at, lan, receive, seen, socket};
use testbed_lab::{Host, HostOptions, Ipv6, Lab, Nat, NatSite, SiteOptions};

fn bed(nat: Nat) -> (Lab, Observers, NatSite, Host) {
    let lab = Lab::new().unwrap();
    let observers = Observers::new(&lab);
    let site = lab.nat_site("site", nat, lan("192.168.1.0/24")).unwrap();
    let host = site.host("one").unwrap();
    (lab, observers, site, host)
}

#[test]
fn a_rebind_changes_the_mapping() {
    let lab = Lab::new().unwrap();
    let observers = Observers::new(&lab);
    for nat in [
        Nat::PortRestricted,
        Nat::LinuxMasquerade,
        Nat::FullCone,
        Nat::AddressRestricted,
        Nat::Hairpin,
        Nat::SymmetricRandom,
        Nat::SymmetricPredictable,
    ] {
        let site = lab.nat_site(&format!("{nat:?}"), nat, lan("192.168.1.0/24")).unwrap();
        let inside = socket(&site.host("one").unwrap(), 51_820);
        let before = observers.reflexive(&inside);
        assert_eq!(observers.reflexive(&inside), before, "{nat:?} keeps a mapping in use");
        site.router().rebind().unwrap();
        observers.send(0, "to the old mapping", before);
        assert!(receive(&inside, SILENCE).is_none(), "{nat:?}: the old mapping is gone");
        let after = observers.reflexive(&inside);
        assert_ne!(before, after, "{nat:?}");
        observers.send(0, "to the new mapping", after);
        assert_eq!(receive(&inside, TIMEOUT).unwrap().0, "to the new mapping", "{nat:?}");
        site.router().rebind().unwrap();
        assert_ne!(observers.reflexive(&inside), after, "{nat:?}: again");
    }
}

#[test]
fn a_changed_address_moves_the_site() {
    for nat in [Nat::PortRestricted, Nat::SymmetricPredictable, Nat::Hairpin] {
        let (_lab, observers, site, host) = bed(nat);
        let inside = socket(&host, 51_820);
        let before = observers.reflexive(&inside);
        let address = site.router().change_address().unwrap();
        let after = observers.reflexive(&inside);
        assert_eq!(after.ip(), address);
        assert_eq!(host.public_address(), address);
        assert_ne!(before.ip(), after.ip());
        observers.send(0, "answer", after);
        assert_eq!(receive(&inside, TIMEOUT).unwrap().0, "answer");
        // The new address survives a pulled cable.
        site.router().partition().unwrap();
        site.router().heal().unwrap();
        assert_eq!(observers.reflexive(&inside).ip(), address);
    }
}

#[test]
fn a_host_that_roams_has_the_addresses_of_the_other_site() {
    let (lab, observers, site, host) = bed(Nat::PortRestricted);
    let options = SiteOptions { ipv6: Ipv6::Global, ..SiteOptions::new(Nat::FullCone, lan("10.0.0.0/24")) };
    let other = lab.site("other", options).unwrap();
    let neighbour = other.host("neighbour").unwrap();
    let inside = socket(&host, 51_820);
    let before = observers.reflexive(&inside);
    assert_eq!((before.ip(), host.address6()), (site.router().address().into(), None));
    host.roam(&other).unwrap();
    assert!(other.router().lan().contains(&host.address()));
    assert_ne!(host.address(), neighbour.address());
    assert!(host.address6().is_some_and(|it| other.router().lan6().unwrap().contains(&it)));
    assert_eq!(host.public_address(), other.router().address());
    // The socket is that of before.
    assert_eq!(observers.reflexive(&inside).ip(), other.router().address());
    observers.send(0, "to the old site", before);
    assert!(receive(&inside, SILENCE).is_none());
    host.roam(&site).unwrap();
    assert_eq!(observers.reflexive(&inside).ip(), site.router().address());
    assert!(site.router().roam(&other).is_err());
}

#[test]
fn a_short_mapping_life_ends_idle_mappings_only() {
    let lab = Lab::new().unwrap();
    let observers = Observers::new(&lab);
    let sockets = [Nat::PortRestricted, Nat::FullCone, Nat::AddressRestricted].map(|nat| {
        let site = lab.nat_site(&format!("{nat:?}"), nat, lan("192.168.1.0/24")).unwrap();
        site.router().set_mapping_life(Duration::from_secs(2)).unwrap();
        let inside = socket(&site.host("one").unwrap(), 51_820);
        let outside = observers.reflexive(&inside);
        (nat, inside, outside)
    });
    // Kept alive for longer than its life.
    for _ in 0..6 {
        std::thread::sleep(Duration::from_millis(500));
        for (nat, inside, outside) in &sockets {
            assert_eq!(observers.reflexive(inside), *outside, "{nat:?}");
        }
    }
    for (nat, inside, outside) in &sockets {
        observers.send(0, "alive", *outside);
        assert_eq!(receive(inside, TIMEOUT).unwrap().0, "alive", "{nat:?}");
    }
    std::thread::sleep(Duration::from_millis(4500));
    for (nat, inside, outside) in &sockets {
        observers.send(0, "too late", *outside);
        assert!(receive(inside, SILENCE).is_none(), "{nat:?}: the mapping is over");
    }
}

#[test]
fn a_pulled_cable_partitions_and_heals() {
    let lab = Lab::new().unwrap();
    let observers = Observers::new(&lab);
    let options =
        SiteOptions { ipv6: Ipv6::Global, ..SiteOptions::new(Nat::PortRestricted, lan("192.168.1.0/24")) };
    let site = lab.site("site", options).unwrap();
    let (one, two) = (site.host("one").unwrap(), site.host("two").unwrap());
    let public = lab.dual_stack_site("public").host("public").unwrap();
    let (inside, neighbour) = (socket(&one, 5000), socket(&two, 5000));
    let six = (socket6(&one, 5001), socket6(&public, 5001));
    let check = |internet: bool, lan_works: bool, what: &str| {
        assert_eq!(observers.hears_within(&inside, internet), internet, "Internet: {what}");
        assert_eq!(hears6(&six.0, &six.1, &public, internet), internet, "Internet by IPv6: {what}");
        let heard = inside.send_to(b"x", at(two.address(), 5000)).is_ok()
            && receive(&neighbour, wait(lan_works)).is_some();
        assert_eq!(heard, lan_works, "neighbour: {what}");
    };
    check(true, true, "at first");
    site.router().partition().unwrap();
    check(false, true, "uplink pulled");
    site.router().heal().unwrap();
    check(true, true, "uplink healed");
    one.partition().unwrap();
    check(false, false, "host pulled");
    one.heal().unwrap();
    check(true, true, "host healed");
    public.partition().unwrap();
    assert!(!hears6(&six.0, &six.1, &public, false));
    public.heal().unwrap();
    check(true, true, "public host healed");
}

fn wait(expected: bool) -> Duration {
    if expected { TIMEOUT } else { SILENCE }
}

fn socket6(host: &Host, port: u16) -> UdpSocket {
    host.run(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)).unwrap()).unwrap()
}

fn hears6(from: &UdpSocket, to: &UdpSocket, host: &Host, expected: bool) -> bool {
    // The kernel keeps a packet or two while it looks for a neighbour that is away.
    common::drain_now(to);
    let target = SocketAddr::from((host.address6().unwrap(), to.local_addr().unwrap().port()));
    from.send_to(b"x", target).is_ok() && receive(to, wait(expected)).is_some()
}

#[test]
fn loss_takes_all_some_or_nothing() {
    let (_lab, observers, site, host) = bed(Nat::PortRestricted);
    let inside = socket(&host, 5000);
    let outside = observers.reflexive(&inside);
    for (permille, range) in [(1000, 0..=0), (0, 100..=100), (500, 15..=85)] {
        site.router().set_faults(|faults| faults.loss_permille = permille).unwrap();
        for _ in 0..100 {
            observers.send(0, "x", outside);
        }
        let arrived = common::drain(&inside).len();
        assert!(range.contains(&arrived), "{arrived} of 100 arrived with a loss of {permille} per mille");
    }
}

#[test]
fn a_blackholed_port_is_one_way_and_only_that_port() {
    let (_lab, observers, _site, host) = bed(Nat::PortRestricted);
    let (inside, other) = (socket(&host, 51_820), socket(&host, 5000));
    let (outside, other_outside) = (observers.reflexive(&inside), observers.reflexive(&other));
    host.set_faults(|faults| faults.blackholed_udp.extend([51_820])).unwrap();
    assert_eq!(observers.reflexive(&inside), outside, "outwards it works");
    observers.send(0, "lost", outside);
    observers.send(0, "other port", other_outside);
    assert_eq!(receive(&other, TIMEOUT).unwrap().0, "other port");
    assert!(receive(&inside, SILENCE).is_none());
    host.set_faults(|faults| faults.blackholed_udp.clear()).unwrap();
    observers.send(0, "back", outside);
    assert_eq!(receive(&inside, TIMEOUT).unwrap().0, "back");
}

#[test]
fn a_host_firewall_lets_only_answers_in() {
    let lab = Lab::new().unwrap();
    let observers = Observers::new(&lab);
    let host = lab.public_site("public").host("one").unwrap();
    host.set_faults(|faults| faults.udp_firewall = true).unwrap();
    let inside = socket(&host, 5000);
    observers.send(0, "unasked", at(host.address(), 5000));
    assert!(receive(&inside, SILENCE).is_none());
    observers.reflexive(&inside);
    observers.send(0, "answer", at(host.address(), 5000));
    assert_eq!(receive(&inside, TIMEOUT).unwrap().0, "answer");
    host.set_faults(|faults| faults.udp_firewall = false).unwrap();
    observers.send(3, "stranger", at(host.address(), 5000));
    assert_eq!(receive(&inside, TIMEOUT).unwrap().0, "stranger");
}

#[test]
fn the_ipv6_firewall_lets_answers_in_and_can_be_opened() {
    let lab = Lab::new().unwrap();
    let public = lab.dual_stack_site("public").host("public").unwrap();
    let options =
        SiteOptions { ipv6: Ipv6::Global, ..SiteOptions::new(Nat::PortRestricted, lan("192.168.1.0/24")) };
    let site = lab.site("site", options).unwrap();
    let host = site.host("one").unwrap();
    let (inside, outside, other) = (socket6(&host, 5000), socket6(&public, 5000), socket6(&public, 5001));
    let send = |from: &UdpSocket| {
        from.send_to(b"x", SocketAddr::from((host.address6().unwrap(), 5000))).unwrap();
    };
    send(&outside);
    assert!(receive(&inside, SILENCE).is_none(), "unsolicited");
    assert!(hears6(&inside, &outside, &public, true), "outwards");
    send(&other);
    assert!(receive(&inside, SILENCE).is_none(), "another port");
    send(&outside);
    assert!(receive(&inside, TIMEOUT).is_some(), "the answer");
    site.router().set_ipv6_firewall(false).unwrap();
    send(&other);
    assert!(receive(&inside, TIMEOUT).is_some(), "opened");
}

#[test]
fn a_local_ipv6_prefix_stays_local() {
    let lab = Lab::new().unwrap();
    let public = lab.dual_stack_site("public").host("public").unwrap();
    let prefix = "fd00:1::/64".parse().unwrap();
    let options = SiteOptions {
        ipv6: Ipv6::Local(prefix),
        ..SiteOptions::new(Nat::PortRestricted, lan("10.1.0.0/16"))
    };
    let site = lab.site("site", options).unwrap();
    let (one, two) = (site.host("one").unwrap(), site.host("two").unwrap());
    assert_eq!(one.address6(), Some("fd00:1::a".parse().unwrap()));
    assert!(hears6(&socket6(&one, 5000), &socket6(&two, 5001), &two, true));
    assert!(!hears6(&socket6(&one, 5002), &socket6(&public, 5003), &public, false));
}

#[test]
fn a_small_uplink_answers_with_too_big_in_both_directions() {
    let lab = Lab::new().unwrap();
    let public = lab.dual_stack_site("public").host("public").unwrap();
    let options = SiteOptions {
        uplink_mtu: Some(1400),
        ipv6: Ipv6::Global,
        ..SiteOptions::new(Nat::PortRestricted, lan("192.168.1.0/24"))
    };
    let site = lab.site("site", options).unwrap();
    site.router().set_ipv6_firewall(false).unwrap();
    let host = site.host("one").unwrap();
    let there = public.address();
    host.shell(&format!("ping -c1 -W5 -Mdo -s1372 {there}")).unwrap();
    let refused = host.shell(&format!("ping -c1 -W5 -Mdo -s1373 {there} || true")).unwrap();
    assert!(refused.contains("mtu = 1400"), "{refused}");
    let router = site.router().address();
    public.shell(&format!("ping -c1 -W5 -Mdo -s1372 {router}")).unwrap();
    let refused = public.shell(&format!("ping -c1 -W5 -Mdo -s1373 {router} || true")).unwrap();
    assert!(refused.contains("mtu = 1400"), "{refused}");
    let refused = public.shell(&format!("ping -c1 -W5 -s1353 {} || true", host.address6().unwrap())).unwrap();
    assert!(refused.contains("mtu=1400"), "{refused}");
}

#[test]
fn a_path_mtu_black_hole_says_nothing() {
    let lab = Lab::new().unwrap();
    let site = lab.public_site("public");
    let (one, two) = (site.host("one").unwrap(), site.host("two").unwrap());
    two.set_faults(|faults| faults.drop_longer_than = Some(1300)).unwrap();
    let listener = socket(&two, 5000);
    let from = socket(&one, 5001);
    from.send_to(&[b'x'; 1300], at(two.address(), 5000)).unwrap();
    assert!(receive(&listener, SILENCE).is_none());
    assert!(seen(&from, &listener, at(two.address(), 5000), TIMEOUT).is_some());
}

#[test]
fn a_host_may_have_a_small_mtu_and_a_chosen_address() {
    let (_lab, _observers, site, _host) = bed(Nat::PortRestricted);
    let options = HostOptions { address: Some("192.168.1.77".parse().unwrap()), mtu: Some(1280) };
    let host = site.host_with("small", &options).unwrap();
    assert_eq!(host.address().to_string(), "192.168.1.77");
    assert_eq!(host.shell("cat /sys/class/net/eth0/mtu").unwrap(), "1280\n");
}

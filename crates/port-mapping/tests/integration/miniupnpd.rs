//! Mappings at a real miniupnpd, judged by what arrives and by miniupnpc and natpmpc.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use crate::common::{GATEWAY, Home, Mapper, PORT, WAN, eventually, outside, request};
use fairlead_port_mapping::{Failure, Mapping, Protocol, Request};

const ALL: &str = "enable_natpmp=yes\nenable_upnp=yes";
const ONLY_UPNP: &str = "enable_natpmp=no\nenable_upnp=yes";
const ONLY_UPNP_1: &str = "enable_natpmp=no\nenable_upnp=yes\nforce_igd_desc_v1=yes";
const NO_UPNP: &str = "enable_natpmp=yes\nenable_upnp=no";

/// The router drops requests of PCP, the only ones with version 2.
fn without_pcp(home: &Home) {
    home.router.sh("nft insert rule inet home input udp dport 5351 @th,64,8 2 drop");
}

/// A mapper of the first host and its first report. On a busy machine a gateway may not answer within the 3 s of the mapper: then another
/// one asks.
fn asked(home: &Home) -> (Mapper, Result<Mapping, Failure>) {
    let is_late = |report: &Result<Mapping, Failure>| match report {
        Err(Failure::NoAnswer) => true,
        Err(Failure::Refused { reason, .. }) => reason.ends_with("timed out"),
        _ => false,
    };
    eventually(|| {
        let mapper = Mapper::start(&home.hosts[0], request(11));
        let report = mapper.next();
        if is_late(&report) {
            mapper.end(false);
            return None;
        }
        Some((mapper, report))
    })
}

/// Two hosts map the same port, and the second program of a host gets the mapping of the first.
fn check(home: &Home, protocol: Protocol) {
    let began = Instant::now();
    let (first, mapping) = asked(home);
    let mapping = mapping.unwrap_or_else(|failure| panic!("{failure}: {}", home.log()));
    println!("{protocol} after {:?}", began.elapsed());
    assert_eq!((mapping.protocol, mapping.external), (protocol, outside(PORT)), "{}", home.log());
    assert!(home.arrives(mapping.external, 0));

    let second = Mapper::start(&home.hosts[1], request(12));
    let other = second.next().unwrap();
    assert_eq!((other.protocol, other.external.ip()), (protocol, WAN.into()));
    assert_ne!(other.external, mapping.external);
    assert!(home.arrives(other.external, 1) && home.arrives(mapping.external, 0));

    // An upgrade: the mapping stays, and the successor gets it.
    first.end(false);
    assert!(home.arrives(mapping.external, 0));
    let successor = Mapper::start(&home.hosts[0], request(11));
    assert_eq!(successor.next().unwrap().external, mapping.external);

    successor.end(true);
    eventually(|| (!home.arrives(mapping.external, 0)).then_some(()));
    assert!(home.arrives(other.external, 1), "the other host's stays");
    second.end(true);
    eventually(|| (!home.arrives(other.external, 1)).then_some(()));
}

#[test]
fn pcp_is_preferred() {
    let home = Home::new();
    let _daemon = home.miniupnpd(ALL);
    let external = home.hosts[0].sh(&format!("natpmpc -g {GATEWAY}"));
    assert!(external.contains(&WAN.to_string()), "{external}");
    check(&home, Protocol::Pcp);
}

#[test]
fn nat_pmp_is_spoken_where_pcp_is_not() {
    let home = Home::new();
    without_pcp(&home);
    let _daemon = home.miniupnpd(NO_UPNP);
    check(&home, Protocol::NatPmp);
}

#[test]
fn upnp_is_spoken_where_nothing_else_is() {
    for options in [ONLY_UPNP, ONLY_UPNP_1] {
        let home = Home::new();
        let _daemon = home.miniupnpd(options);
        check(&home, Protocol::Upnp);
    }
}

#[test]
fn a_router_behind_another_nat_is_told_from_one_that_has_no_room() {
    let address: IpAddr = "10.9.8.7".parse().unwrap();
    let private = Failure::PrivateOuterAddress { protocol: Protocol::Pcp, address };
    for (options, has_pcp, expected) in [
        (ALL, true, private),
        (ALL, false, Failure::NoOuterAddress { protocol: Protocol::NatPmp }),
        (NO_UPNP, false, Failure::NoOuterAddress { protocol: Protocol::NatPmp }),
        (ONLY_UPNP, true, Failure::NoOuterAddress { protocol: Protocol::Upnp }),
        (ONLY_UPNP_1, true, Failure::NoOuterAddress { protocol: Protocol::Upnp }),
    ] {
        let home = Home::new();
        home.router.sh(&format!("ip addr del {WAN}/24 dev wan; ip addr add {address}/24 dev wan"));
        if !has_pcp {
            without_pcp(&home);
        }
        let _daemon = home.miniupnpd(options);
        let (mapper, report) = asked(&home);
        assert_eq!(report, Err(expected), "{}", home.log());
        mapper.end(false);
    }
}

#[test]
fn the_port_of_another_program_is_left_to_it() {
    let home = Home::new();
    let _daemon = home.miniupnpd(ONLY_UPNP_1);
    let said = home.hosts[1].sh(&format!("upnpc -m eth0 -a 192.168.1.12 {PORT} {PORT} UDP 600"));
    assert!(said.contains("is redirected"), "{said}");
    let mapper = Mapper::start(&home.hosts[0], request(11));
    let mapping = mapper.next().unwrap();
    assert_ne!(mapping.external.port(), PORT);
    let listed = home.hosts[1].sh("upnpc -m eth0 -l");
    assert!(listed.contains(&format!("UDP {PORT}->192.168.1.12:{PORT}")), "{listed}");
    assert!(listed.contains(&format!("UDP {:>5}->192.168.1.11:{PORT}", mapping.external.port())), "{listed}");
    mapper.end(true);
    let listed = home.hosts[1].sh("upnpc -m eth0 -l");
    assert!(!listed.contains("192.168.1.11"), "{listed}");
}

#[test]
fn a_gateway_that_restarts_is_asked_again() {
    for (options, protocol) in [(ALL, Protocol::Pcp), (NO_UPNP, Protocol::NatPmp)] {
        let home = Home::new();
        if protocol == Protocol::NatPmp {
            without_pcp(&home);
        }
        let daemon = home.miniupnpd(options);
        let (mapper, mapping) = asked(&home);
        let mapping = mapping.unwrap();
        assert_eq!(mapping.protocol, protocol);
        // The epoch counts seconds.
        std::thread::sleep(Duration::from_secs(4));
        drop(daemon);
        home.router.sh("nft flush chain inet home prerouting_miniupnpd");
        assert!(!home.arrives(mapping.external, 0));
        let restarted = Instant::now();
        let _daemon = home.miniupnpd(options);
        let again = mapper.next().unwrap();
        println!("{protocol} again {:?} after the restart", restarted.elapsed());
        assert_eq!(again.external, mapping.external);
        assert!(home.arrives(mapping.external, 0));
        mapper.end(true);
    }
}

#[test]
fn a_gateway_that_says_nothing_is_left_alone() {
    let home = Home::new();
    let mapper = Mapper::start(&home.hosts[0], request(11));
    let began = Instant::now();
    assert_eq!(mapper.next(), Err(Failure::NoAnswer));
    assert!(began.elapsed() < Duration::from_secs(3));
    assert!(mapper.reports.recv_timeout(Duration::from_secs(3)).is_err(), "it is not asked again at once");
    mapper.end(true);
}

#[test]
fn in_ipv6_the_firewall_is_opened() {
    let home = Home::new();
    let _daemon = home.miniupnpd(ALL);
    let own: IpAddr = "2a00:1:2:3::11".parse().unwrap();
    let inside = SocketAddr::new(own, PORT);
    assert!(!home.arrives(inside, 0));
    let gateway = "2a00:1:2:3::1".parse().unwrap();
    let mapper = Mapper::start(&home.hosts[0], Request { gateway, source: Some(own), ..request(11) });
    let mapping = mapper.next().unwrap_or_else(|failure| panic!("{failure}: {}", home.log()));
    assert_eq!((mapping.protocol, mapping.external), (Protocol::Pcp, inside));
    assert!(home.arrives(inside, 0), "{}{}", home.router.sh("nft list ruleset"), home.log());
    mapper.end(true);
    eventually(|| (!home.arrives(inside, 0)).then_some(()));
}

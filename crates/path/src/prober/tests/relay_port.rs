use std::net::IpAddr;

use super::*;
use crate::relay_path::RelayPortRange;

pub(super) fn ports() -> RelayPortRange {
    RelayPortRange { ip: IpAddr::from([203, 0, 113, 99]), first: 20_000, last: 20_009 }
}

pub(super) fn port(number: u16) -> SocketAddr {
    SocketAddr::new(ports().ip, number)
}

#[test]
fn a_udp_port_of_the_relay_is_used_rather_than_its_link_until_it_is_lost() {
    let mut bed = relayed(true, &[public(1)]);
    bed.prober.set_relay_ports(Some(ports()));
    bed.run(6 * SECOND, &[RELAY], 40 * MILLISECOND);
    bed.session(RELAY);
    bed.run(SECOND, &[RELAY], 40 * MILLISECOND);
    assert!(bed.prober.uses_relay());
    bed.prober.set_relay_port(bed.now, Some(port(20_001)));
    // It is slower, and better all the same.
    let selected = bed.run(6 * SECOND, &[RELAY, port(20_001)], 60 * MILLISECOND);
    assert_eq!(selected, [(port(20_001), EndpointReason::BetterPath)]);
    bed.session(port(20_001));
    assert!(bed.prober.uses_relay());
    // Neither other candidates nor the end of the link change anything.
    bed.prober.set_candidates(bed.now, &with_relay(&[public(2)], false).1);
    bed.prober.relay_changed(bed.now, false);
    assert_eq!(bed.run(10 * SECOND, &[port(20_001)], 60 * MILLISECOND), []);
    bed.session(port(20_001));
    bed.prober.set_relay_port(bed.now, None);
    let selected = bed.run(2 * SECOND, &[RELAY], 40 * MILLISECOND);
    assert_eq!(selected, [(RELAY, EndpointReason::PathFailed)]);
}

#[test]
fn a_direct_path_is_better_than_a_udp_port_of_the_relay() {
    let mut bed = relayed(true, &[public(1)]);
    bed.prober.set_relay_port(bed.now, Some(port(20_001)));
    bed.run(SECOND, &[port(20_001)], 40 * MILLISECOND);
    bed.session(port(20_001));
    bed.run(6 * SECOND, &[port(20_001)], 40 * MILLISECOND);
    bed.prober.network_changed(bed.now);
    let selected = bed.run(6 * SECOND, &[port(20_001), public(1)], 80 * MILLISECOND);
    assert_eq!(selected, [(public(1), EndpointReason::BetterPath)]);
}

#[test]
fn a_port_that_only_the_peer_has_bound_is_no_direct_path() {
    let mut bed = relayed(false, &[public(1)]);
    bed.prober.set_relay_ports(Some(ports()));
    bed.session(port(20_002));
    bed.prober.handle_request(bed.now, port(20_003), false);
    assert!(bed.prober.uses_relay());
    let asked: Vec<SocketAddr> = bed.requests().into_iter().map(|(to, _)| to).collect();
    assert!(!asked.iter().any(|to| ports().contains(*to)), "{asked:?}");
}

/// Another node has published it as an endpoint at which it sees the peer.
#[test]
fn a_port_of_the_relay_that_is_published_as_an_endpoint_stays_one_of_the_relay() {
    let mut bed = relayed(true, &[public(1)]);
    bed.prober.set_relay_ports(Some(ports()));
    bed.prober.set_relay_port(bed.now, Some(port(20_001)));
    bed.run(SECOND, &[port(20_001)], 20 * MILLISECOND);
    bed.session(port(20_001));
    let (_, published) = with_relay(&[public(1), port(20_001), port(20_002)], false);
    bed.prober.set_candidates(bed.now, &published);
    assert!(!bed.prober.works_directly(bed.now));
    bed.prober.network_changed(bed.now);
    let selected = bed.run(6 * SECOND, &[port(20_001), port(20_002), public(1)], 80 * MILLISECOND);
    assert_eq!(selected, [(public(1), EndpointReason::BetterPath)]);
}

/// The program has just started, and the device has a session of its last run.
#[test]
fn a_port_that_was_taken_for_a_direct_path_is_none_once_the_relay_is_known() {
    let mut bed = relayed(true, &[public(1)]);
    bed.session(port(20_001));
    bed.run(SECOND, &[port(20_001)], 20 * MILLISECOND);
    assert!(bed.prober.works_directly(bed.now));
    bed.prober.set_relay_ports(Some(ports()));
    assert!(bed.prober.uses_relay() && !bed.prober.works_directly(bed.now));
}

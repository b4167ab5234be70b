use std::collections::BTreeSet;

use fairlead_dataplane::egress_gateway::Sources;
use fairlead_netlink::conntrack::{Ports, STATUS_SOURCE_TRANSLATED, Tuple};

use super::*;
use crate::source_addresses::holds::announced::Announcer;

const CLIENT: [u8; 4] = [10, 0, 0, 1];
const OWN: [u8; 4] = [10, 9, 9, 9];
const SOURCE: [u8; 4] = [192, 0, 2, 9];

fn watch() -> (Watch, Announcer) {
    let registry = Registry::new(Vec::new(), [CLIENT.into()]);
    let announcer = Announcer::default();
    let (_, options) = watch::channel(Arc::default());
    let store = Arc::new(Store::new(registry));
    (Watch::new(store, announcer.announced(), options, Known::new(), Metrics::default()), announcer)
}

/// A connection of a client that has this source outside.
pub(super) fn translated(client: IpAddr, port: u16, outside: IpAddr, outside_port: u16) -> Flow {
    let ports = |source, destination| Ports::Ports { source, destination };
    let server = IpAddr::from([203, 0, 113, 10]);
    let original = Tuple { protocol: 6, source: client, destination: server, ports: ports(port, 443) };
    let reply = Tuple { source: server, destination: outside, ports: ports(443, outside_port), ..original };
    Flow {
        original,
        reply,
        zone: 0,
        status: STATUS_SOURCE_TRANSLATED,
        tcp: None,
        timeout: None,
        mark: 0,
        id: None,
        counters: None,
    }
}

fn flow(outside: [u8; 4], port: u16) -> Flow {
    translated(CLIENT.into(), port, outside.into(), port)
}

/// The Egress has the address, and this gateway holds it or not.
fn set_source((watch, announcer): &mut (Watch, Announcer), is_held: bool) -> bool {
    let translate = is_held.then(|| (fairlead_address::IpFamily::V4, SOURCE.into()));
    let floating = [SOURCE.into()].into();
    announcer.set_sources(Some(Sources {
        floating,
        translate: translate.into_iter().collect(),
        standby: !is_held,
    }));
    watch.follow_sources()
}

fn known(watch: &Watch, outside: [u8; 4], port: u16) -> Vec<bool> {
    let connections = watch.known.locked();
    connections.find((outside.into(), port), None).iter().map(|found| found.end.is_some()).collect()
}

#[test]
fn connections_of_addresses_that_another_gateway_holds_are_not_known_here() {
    let mut all = watch();
    assert!(!set_source(&mut all, false));
    let watch = &mut all.0;
    let (copy, own) = (flow(SOURCE, 1), flow(OWN, 2));
    watch.take(&[ConnectionEvent::New(copy), ConnectionEvent::New(own)]);
    assert_eq!((known(watch, SOURCE, 1), known(watch, OWN, 2)), (vec![], vec![false]));
    assert_eq!(watch.set_open(vec![copy, own]), []);
    watch.take(&[ConnectionEvent::Destroyed(copy), ConnectionEvent::Destroyed(own)]);
    assert_eq!((known(watch, SOURCE, 1), known(watch, OWN, 2)), (vec![], vec![true]));
    // It takes the address: connections of before are found by a list.
    let before = now();
    assert!(set_source(&mut all, true), "they are not known yet");
    let watch = &mut all.0;
    assert_eq!(watch.known.locked().complete_since(), None);
    watch.set_open(vec![copy]);
    assert!(watch.known.locked().complete_since().unwrap() >= before);
    assert_eq!(known(watch, SOURCE, 1), [false]);
    // And loses it: the connection goes on elsewhere.
    assert!(!set_source(&mut all, false));
    let watch = &mut all.0;
    assert_eq!(known(watch, SOURCE, 1), [false; 0]);
    watch.take(&[ConnectionEvent::Destroyed(copy)]);
    assert_eq!(known(watch, SOURCE, 1), [false; 0]);
}

#[test]
fn copies_that_are_deleted_since_their_address_has_gone_are_no_connections() {
    let mut all = watch();
    set_source(&mut all, false);
    let (watch, announcer) = &mut all;
    watch.set_open(vec![flow(SOURCE, 1)]);
    announcer.set_sources(None);
    watch.follow_sources();
    watch.set_open(vec![flow(SOURCE, 1)]);
    watch.take(&[ConnectionEvent::Destroyed(flow(SOURCE, 1))]);
    assert_eq!(known(watch, SOURCE, 1), [false; 0]);
    watch.set_open(Vec::new());
    assert_eq!(*watch.copies.addresses(), BTreeSet::new());
}

#[test]
fn lost_notifications_make_what_is_known_incomplete() {
    let (mut watch, _) = watch();
    let before = now();
    assert!(watch.take(&[ConnectionEvent::Missed]));
    assert_eq!(watch.known.locked().complete_since(), None, "some that are open may not be known");
    watch.set_open(Vec::new());
    assert!(watch.known.locked().complete_since().unwrap() >= before);
}

#[test]
fn names_of_pods_are_kept_as_long_as_they_are_clients() {
    let (mut watch, _) = watch();
    watch.pods.insert([10, 0, 0, 7].into(), Arc::default());
    watch.forget_pods();
    assert_eq!(watch.pods.len(), 0);
}

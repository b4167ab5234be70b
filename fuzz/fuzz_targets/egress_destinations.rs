//! `spec.destinations` and `spec.excludedDestinations` of an Egress, an entry a line and an empty line between both, and the routes of a client
//! pod to what remains.
#![no_main]

use std::collections::{BTreeMap, BTreeSet};

use fairlead_api::client_routing::Target;
use fairlead_api::names::{TABLE_EGRESS_NARROW, TABLE_EGRESS_WIDE};
use fairlead_egress::EgressName;
use fairlead_egress::client::SourcePort;
use fairlead_egress::client::plan::{Asking, Cluster, KnownEgress, KnownService, Plan, plan};
use fairlead_egress::destinations::Destinations;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let (destinations, excluded) = text.split_once("\n\n").unwrap_or((text, ""));
    let entries = |text: &str| text.lines().map(str::to_owned).collect::<Vec<String>>();
    let (destinations, excluded) = (entries(destinations), entries(excluded));
    let read = match Destinations::parse(&destinations, &excluded) {
        Ok(read) => read,
        Err(error) => {
            let is_it = |list: &[String]| list.get(error.index) == Some(&error.entry);
            assert!(is_it(&destinations) || is_it(&excluded));
            return;
        }
    };
    let written = |prefixes: &BTreeSet<_>| prefixes.iter().map(ToString::to_string).collect::<Vec<_>>();
    let again = Destinations::parse(&written(&read.prefixes), &written(&read.excluded));
    assert_eq!(again.as_ref(), Ok(&read));
    routes(read);
});

fn routes(destinations: Destinations) {
    let parse = |addresses: [&str; 2]| {
        addresses.iter().filter_map(|address| address.parse::<std::net::IpAddr>().ok()).collect()
    };
    let service = KnownService {
        cluster_ips: parse(["10.68.0.1", "fd04::1"]),
        port: 5555,
        by_client: false,
        idle_timeout: None,
    };
    let known = KnownEgress {
        destinations: Ok(destinations.clone()),
        source_port: SourcePort::Fixed,
        originating_only: None,
        cluster_ranges: Some(Vec::new()),
        ranges_are_stale: false,
        allowed_namespaces: None,
        service: Some(service),
    };
    let egress = EgressName { namespace: "n".to_owned(), name: "e".to_owned() };
    let cluster = Cluster { egresses: BTreeMap::from([(egress.clone(), known)]), originating_only: false };
    let pod = Asking {
        namespace: "n".to_owned(),
        chosen: BTreeSet::from([egress]),
        addresses: parse(["10.1.0.2", "fd01::2"]),
        mtu: 1500,
    };
    let Ok(Plan { routing, .. }) = plan(&cluster, &pod) else { return };
    for route in [routing.ipv4, routing.ipv6].iter().flatten().flat_map(|family| &family.routes) {
        assert_eq!(route.destination, route.destination.trunc());
        assert!([TABLE_EGRESS_NARROW, TABLE_EGRESS_WIDE].contains(&route.table));
        assert_eq!(route.target == Target::Excluded, destinations.excludes(&route.destination));
    }
}

//! `spec.destinations` and `spec.excludedDestinations` of an Egress, an entry a line and an empty line between both, and the routes of a client
//! pod to what remains.
#![no_main]

use std::collections::{BTreeMap, BTreeSet};

use fairlead_address::PrefixSet;
use fairlead_api::names::{TABLE_EGRESS_NARROW, TABLE_EGRESS_WIDE};
use fairlead_egress::EgressName;
use fairlead_egress::client::{ClientPod, Gateways, SourcePort, Target, routing};
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
    let gateways = Gateways {
        cluster_ips: ["10.68.0.1", "fd04::1"].iter().filter_map(|address| address.parse::<std::net::IpAddr>().ok()).collect(),
        port: 5555,
        destinations: destinations.clone(),
        source_port: SourcePort::Fixed,
        originating_only: false,
    };
    let addresses = ["10.1.0.2", "fd01::2"].iter().filter_map(|address| address.parse::<std::net::IpAddr>().ok());
    let pod = ClientPod { addresses: addresses.collect(), mtu: 1500 };
    let egress = EgressName { namespace: "n".to_owned(), name: "e".to_owned() };
    let Ok(routing) = routing(&pod, &BTreeMap::from([(egress, gateways)]), &[], &PrefixSet::default()) else { return };
    for route in [routing.ipv4, routing.ipv6].iter().flatten().flat_map(|family| &family.routes) {
        assert_eq!(route.destination, route.destination.trunc());
        assert!([TABLE_EGRESS_NARROW, TABLE_EGRESS_WIDE].contains(&route.table));
        assert_eq!(route.target == Target::Excluded, destinations.excludes(&route.destination));
    }
}

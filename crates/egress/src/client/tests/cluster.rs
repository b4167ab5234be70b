//! Destinations that contain ranges of the cluster.

use super::*;

#[test]
fn what_a_destination_has_of_the_cluster_leaves_by_eth0_and_the_rest_of_the_local_network_does_not() {
    let egresses = egresses([
        ("a/nat", gateways(&["10.68.0.1"], &["10.0.0.0/8", "10.64.5.0/24"])),
        ("b/nat", gateways(&["10.68.0.2"], &["192.168.0.0/16", "172.16.0.0/12"])),
    ]);
    let pods_and_services = ["10.64.0.0/16", "10.68.0.0/16", "172.16.0.0/12"];
    let in_cluster = pods_and_services.iter().chain(&["192.168.1.5/32", "192.168.1.6/32"]);
    let in_cluster = prefixes(&in_cluster.copied().collect::<Vec<_>>());
    let routing = routing(&pod(&["10.64.1.2"]), &egresses, &[], &in_cluster).unwrap().ipv4.unwrap();
    let narrow = [
        "10.0.0.0/8 dev fou4_0a440001 proto 30",
        "throw 10.64.0.0/16 proto 30 metric 2048",
        "throw 10.68.0.0/16 proto 30 metric 2048",
        "throw 172.16.0.0/12 proto 30 metric 2048",
        "192.168.0.0/16 dev fou4_0a440002 proto 30",
        "throw 192.168.1.5 proto 30 metric 2048",
        "throw 192.168.1.6 proto 30 metric 2048",
    ];
    assert_eq!(table(&routing, 117), narrow);
    let goes = |address: &str| lookup(&routing.routing, address.parse().unwrap()).is_some();
    assert!(goes("192.168.1.50") && goes("10.1.2.3"));
    assert!(["10.64.5.1", "10.68.0.10", "192.168.1.5", "172.16.0.1"].iter().all(|address| !goes(address)));
}

#[test]
fn only_ranges_that_matter_to_an_egress_are_in_its_status() {
    let all = prefixes(&["10.64.0.0/16", "100.64.0.0/24", "192.168.1.5/32", "192.168.1.6/32", "fd02::/64"]);
    let written = |destinations: &[&str], excluded: &[&str]| {
        let destinations = Destinations { prefixes: prefixes(destinations), excluded: prefixes(excluded) };
        printed(cluster_ranges(&all, &destinations))
    };
    assert_eq!(written(&["0.0.0.0/0", "::/0", "172.16.0.0/12"], &[]), ["100.64.0.0/24"]);
    assert_eq!(written(&["10.0.0.0/8"], &[]), ["10.64.0.0/16", "100.64.0.0/24"]);
    assert_eq!(written(&["10.64.7.0/24"], &[]), ["10.64.0.0/16", "100.64.0.0/24"]);
    assert_eq!(written(&["10.0.0.0/8"], &["10.0.0.0/8"]), ["100.64.0.0/24"]);
    let lan = ["100.64.0.0/24", "192.168.1.5/32", "192.168.1.6/32", "fd02::/64"];
    assert_eq!(written(&["192.168.0.0/16", "fd00::/8"], &[]), lan);
}

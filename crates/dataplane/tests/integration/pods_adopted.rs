//! Pods that a node program did not make itself: routes in another table, links that went down, lost routes.

use fairlead_address::DualStackAddrs;
use fairlead_dataplane::pods::{self, Attached, HostEnds, PodSpec, Repair, Unclear};
use fairlead_dataplane::routes;
use fairlead_dataplane::routing_ids::{RawRoutingIds, RoutingIds};
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::TABLE_MAIN;
use testbed_netns::sh_in;

use crate::pods_common::{Host, NODE, NODE_V6, ping, spec};

#[test]
fn numbers_that_an_administrator_chose_are_used() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let ids = routing_ids(1116, 1990);
    host.at(|| routes::ensure_rules(&routes::pod_rules(ids)).unwrap());
    let wanted = PodSpec { ids, ..spec(&pod, "a", Some("10.1.0.5"), Some("fd00:1::5")) };
    let made = host.add(&wanted).unwrap();
    ping(&host.netns, "10.1.0.5");
    ping(&pod, NODE_V6);
    let shown = host.sh("ip route show table 1116");
    assert!(shown.starts_with(&format!("10.1.0.5 dev {} proto 40 ", made.host_name)), "{shown}");
    assert_eq!(
        host.at(|| pods::list(RoutingIds::default()).unwrap())[0].addresses.ipv4,
        None,
        "nothing is where it usually is"
    );
    let listed = host.at(|| pods::list(ids).unwrap());
    assert_eq!(listed[0].addresses, wanted.addresses);
    let seen = host.at(|| pods::inspect(ids, ("a", "eth0"), &wanted.netns, &[TABLE_MAIN]).unwrap());
    assert_eq!(seen.led_to_pod.len(), 2);
}

/// Without it the pods of before would be pods without addresses, and their addresses be given away again.
#[test]
fn pods_keep_their_addresses_when_the_table_gets_another_number() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let wanted = spec(&pod, "a", Some("10.1.0.5"), Some("fd00:1::5"));
    let name = host.add(&wanted).unwrap().host_name;
    // What others made stays where it is, also on the pod's link.
    host.sh(&format!("ip route add 10.1.0.5/32 dev {name} table 77 proto static"));
    host.sh(&format!("ip route add 10.7.0.0/24 dev {name} table 78 proto static"));
    host.sh("ip route add 10.1.0.6/32 dev uplink table 116 proto 30");
    let ids = routing_ids(1116, 1990);
    host.at(|| routes::ensure_rules(&routes::pod_rules(ids)).unwrap());
    assert_eq!(host.at(|| gather(ids)), 2);
    let listed = host.at(|| pods::list(ids).unwrap());
    assert_eq!(listed[0].addresses, wanted.addresses);
    assert!(host.table("-4").starts_with("10.1.0.6 dev uplink") && host.table("-6").is_empty());
    assert_eq!(host.sh("ip route show table 77").lines().count(), 1);
    assert_eq!(host.sh("ip route show table 78").lines().count(), 1);
    ping(&host.netns, "10.1.0.5");
    assert_eq!(host.at(|| gather(ids)), 0, "the second time there is nothing to do");
    assert_eq!(host.at(|| gather(RoutingIds::default())), 2, "and back");
    assert_eq!(host.at(|| pods::list(RoutingIds::default()).unwrap())[0].addresses, wanted.addresses);
}

fn routing_ids(table_pods: u32, rule_priority: u32) -> RoutingIds {
    RawRoutingIds { table_pods, rule_priority, table_export: 1119, protocol: 40 }.try_into().unwrap()
}

fn gather(ids: RoutingIds) -> usize {
    pods::gather_routes(ids, &pods::list(ids).unwrap()).unwrap()
}

/// Repairs that a node program with this one pod in its allocation table would send.
fn repairs(host: &Host, spec: &PodSpec) -> Vec<Repair> {
    let (container_id, ifname) = (spec.container_id.clone(), spec.ifname.clone());
    let attached = [Attached { container_id, ifname, addresses: spec.addresses }];
    host.at(|| pods::repairs(spec.ids, &attached, &HostEnds::read(spec.ids).unwrap()))
}

fn repair(host: &Host, spec: &PodSpec) {
    let repairs = repairs(host, spec);
    assert_eq!(repairs.len(), 1);
    // The second time, all of it is there: as if the operation that attaches the pod had been faster.
    (0..2).for_each(|_| host.at(|| repairs[0].apply().unwrap()));
    assert!(self::repairs(host, spec).is_empty(), "the second time there is nothing to send");
}

#[test]
fn a_link_that_went_down_and_up_gets_its_routes_and_gateways_back() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let wanted = spec(&pod, "a", Some("10.1.0.5"), Some("fd00:1::5"));
    let name = host.add(&wanted).unwrap().host_name;
    assert!(repairs(&host, &wanted).is_empty(), "a pod that was just attached lacks nothing");
    host.sh(&format!("ip link set {name} down; ip link set {name} up"));
    assert_eq!((host.table("-4"), host.table("-6")), (String::new(), String::new()));
    repair(&host, &wanted);
    for (from, to) in [(&host.netns, "10.1.0.5"), (&host.netns, "fd00:1::5"), (&pod, NODE), (&pod, NODE_V6)] {
        ping(from, to);
    }
}

#[test]
fn a_link_that_is_down_a_gateway_and_a_route_are_restored_one_by_one() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let wanted = spec(&pod, "a", Some("10.1.0.5"), Some("fd00:1::5"));
    let name = host.add(&wanted).unwrap().host_name;
    for breaks in [
        format!("ip link set {name} down"),
        format!("ip addr del 169.254.1.1/32 dev {name}"),
        format!("ip addr del fe80::1/64 dev {name}"),
        "ip route flush table 116".to_owned(),
        "ip -6 route flush table 116".to_owned(),
        "ip route replace 10.1.0.5/32 dev uplink table 116 proto 30".to_owned(),
    ] {
        host.sh(&breaks);
        repair(&host, &wanted);
        for to in ["10.1.0.5", "fd00:1::5"] {
            ping(&host.netns, to);
        }
    }
}

#[test]
fn addresses_are_recovered_from_the_pods_namespace() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let wanted = spec(&pod, "a", Some("10.1.0.5"), Some("fd00:1::5"));
    let name = host.add(&wanted).unwrap().host_name;
    let recover = || {
        host.at(|| {
            let mut found = pods::list(RoutingIds::default()).unwrap();
            let unclear = pods::recover(&mut found, &[directory.path()]).unwrap();
            (found.remove(0).addresses, unclear.into_iter().map(|(_, why)| why).collect::<Vec<_>>())
        })
    };
    assert_eq!(recover(), (wanted.addresses, vec![]), "routes are enough, without any namespace");
    host.sh(&format!("ip link set {name} down; ip link set {name} up"));
    assert_eq!(recover(), (DualStackAddrs::default(), vec![Unclear::NamespaceNotFound]));
    std::os::unix::fs::symlink(&wanted.netns, directory.path().join("pod")).unwrap();
    std::fs::write(directory.path().join("other"), "no namespace").unwrap();
    assert_eq!(recover(), (wanted.addresses, vec![]));
    repair(&host, &wanted);
    host.sh("ip -6 route flush table 116");
    assert_eq!(recover(), (wanted.addresses, vec![]), "one family is missing");
    // Which one was allocated cannot be told any more.
    host.sh("ip route flush table 116");
    sh_in(&pod, "ip addr add 10.1.0.99/32 dev eth0");
    let several = Unclear::SeveralAddresses("10.1.0.5, 10.1.0.99, fd00:1::5".to_owned());
    assert_eq!(recover(), (DualStackAddrs::default(), vec![several]));
    sh_in(&pod, "ip addr flush dev eth0 scope global");
    assert_eq!(recover(), (DualStackAddrs::default(), vec![]), "a pod without an address needs none");
}

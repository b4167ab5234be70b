//! Unchanged state is not sent: `ip monitor` and `nft monitor` report nothing while the same state is applied again,
//! and our own counter agrees. One test only: the counter belongs to the whole process.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd};

use fairlead_address::DualStack;
use fairlead_api::client_routing::{ClientRoute, ClientRouting, ClientRule, Target};
use fairlead_dataplane::egress_client;
use fairlead_dataplane::pods::{self, PodSpec};
use fairlead_dataplane::routes::{
    LOOPBACK_INDEX, ensure_rules, mesh_rules, pod_rules, sync_blocks, sync_export,
};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_dataplane::uplink;
use fairlead_netlink::changes_sent;
use fairlead_netlink::netns::Netns;
use testbed_netns::{Monitor, Namespace};

#[test]
fn the_second_time_nothing_is_sent() {
    let (host, pod) = (Namespace::new(), Namespace::new());
    let spec = PodSpec {
        container_id: "abc".to_owned(),
        ifname: "eth0".to_owned(),
        netns: format!("/proc/self/fd/{}", pod.as_fd().as_raw_fd()).into(),
        pool: "default".to_owned(),
        addresses: ["10.1.0.5", "fd00:1::5"].map(|text| text.parse().unwrap()).into_iter().collect(),
        mtu: None,
        link_name: None,
        ids: RoutingIds::default(),
    };
    let blocks = ["10.1.0.0/27", "fd00:1::/123"].map(|text| text.parse().unwrap());
    let apply = || {
        let before = changes_sent();
        let switched = uplink::enable_forwarding().unwrap();
        let rules = ensure_rules(&pod_rules(RoutingIds::default())).unwrap().add.len()
            + ensure_rules(&mesh_rules()).unwrap().add.len();
        let exported = sync_export(RoutingIds::default(), &blocks).unwrap().add.len();
        let refused = sync_blocks(RoutingIds::default(), &blocks).unwrap().add.len();
        let listed = pods::list(RoutingIds::default()).unwrap().len();
        assert!(!pods::remove("another container", "eth0").unwrap());
        (changes_sent() - before, switched.len(), rules, exported + refused, listed)
    };
    let (sent, _, rules, routes, listed) = host.run(apply);
    assert_eq!((sent, rules, routes, listed), (10, 6, 4, 0));
    host.run(|| pods::add(&spec).unwrap());

    let (mut ip, mut nft) = (Monitor::ip(&host), Monitor::nft(&host));
    ip.wait_idle();
    nft.wait_idle();
    assert_eq!(host.run(apply), (0, 0, 0, 0, 1));
    assert_eq!((ip.reported(), nft.reported()), (vec![], vec![]));
    egress_is_sent_once(&pod);
}

fn egress_is_sent_once(pod: &Namespace) {
    let netns = Netns::open(pod.path()).unwrap();
    let everything = "0.0.0.0/0".parse().unwrap();
    let routing = ClientRouting {
        rules: vec![ClientRule { priority: 2100, destination: everything, table: 118 }],
        routes: vec![ClientRoute {
            table: 118,
            destination: everything,
            target: Target::Link("lo".to_owned()),
            originating_only: false,
        }],
    };
    let desired = DualStack { ipv4: Some(routing), ipv6: None };
    let links = BTreeMap::from([("lo".to_owned(), LOOPBACK_INDEX)]);
    let sent = || {
        let before = changes_sent();
        egress_client::sync(&netns, &desired, &links).unwrap();
        changes_sent() - before
    };
    assert_eq!((sent(), sent()), (3, 0));
}

//! Client pods that Coil v2 has set up by the kernel's fou, ipip and ip6tnl. `FAIRLEAD_KERNEL_FOU=1` says that this kernel must have
//! them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::thread;
use std::time::Duration;

use fairlead_api::fou::Gateway;
use fairlead_egress::client::SourcePort as Planned;
use fairlead_egress::client::plan::{
    Asking, Cluster, Desired, KnownEgress, KnownService, NextHop, desired, plan,
};
use fairlead_egress::destinations::Destinations;
use fairlead_fou::link_name;
use fairlead_netlink::netns::Netns;
use testbed_netns::coil::{self, Network, SourcePort, families};
use testbed_netns::traffic::{Report, Traffic};

use super::super::kernel::{self, Place};
use super::super::programs::ProgramStock;
use super::bed::name;

const EGRESS: &str = "internet/nat";
const PAUSE: Duration = Duration::from_secs(1);

/// State that the pod should have, with this way to its gateways.
fn wanted(port: SourcePort, way: &NextHop) -> Desired {
    let service = KnownService {
        cluster_ips: families().map(|family| family.service).into_iter().collect(),
        port: 5555,
        by_client: true,
        idle_timeout: None,
    };
    let egress = KnownEgress {
        destinations: Ok(Destinations {
            prefixes: ["0.0.0.0/0", "::/0"].map(|prefix| prefix.parse().unwrap()).into(),
            ..Destinations::default()
        }),
        source_port: if port == SourcePort::Auto { Planned::Auto } else { Planned::Fixed },
        originating_only: None,
        cluster_ranges: Some(Vec::new()),
        ranges_are_stale: false,
        allowed_namespaces: None,
        service: Some(service),
    };
    let cluster = Cluster { egresses: BTreeMap::from([(name(EGRESS), egress)]), ..Cluster::default() };
    let pod = Asking {
        namespace: "shop".to_owned(),
        chosen: [name(EGRESS)].into(),
        addresses: families().map(|family| family.client).into_iter().collect(),
        mtu: coil::MTU,
    };
    let plan = plan(&cluster, &pod).unwrap();
    let desired = desired(&plan, |_| way.clone()).unwrap();
    desired.answered_by(&plan, |_| families().into_iter().flat_map(|family| family.gateways).collect())
}

/// The gateways of this number, of both families.
fn gateway(number: usize) -> NextHop {
    let gateway = |address: IpAddr| Gateway { address, is_draining: false };
    NextHop::Gateways(families().map(|family| gateway(family.gateways[number])).into())
}

fn network(port: SourcePort) -> Option<Network> {
    let network = Network::new()?;
    for (number, pod) in network.gateways.iter().enumerate() {
        let own = families().map(|family| family.gateways[number]);
        coil::set_up_gateway(pod, own, link_name, port);
    }
    Some(network)
}

#[track_caller]
fn is_seen_as(network: &Network, gateway: usize) {
    for family in families() {
        assert_eq!(network.seen_as(family.server), Some(family.gateways[gateway]));
    }
}

fn taken_over(port: SourcePort) {
    let Some(network) = network(port) else { return };
    coil::set_up_client(&network.client, link_name, port);
    network.check();
    let rules = "ip rule; ip -6 rule; ip -o link show type ipip; ip -o link show type ip6tnl";
    let before = network.client.sh(rules);
    let traffic = Traffic::start(&network.client, families().map(|family| family.server));
    thread::sleep(PAUSE);
    let netns = Netns::open(network.client.path()).unwrap();
    let (place, programs) = (Place { netns: &netns, ifname: "eth0" }, ProgramStock::default());
    for way in [NextHop::Service, gateway(0)] {
        let desired = wanted(port, &way);
        let done = kernel::apply(place, &desired, &programs).unwrap();
        println!("{port:?} {way:?}: {done:#?}");
        assert_eq!(kernel::apply(place, &desired, &programs).unwrap(), Vec::<String>::new());
        assert_eq!(kernel::differences(place, &desired).unwrap(), Vec::<String>::new());
        thread::sleep(PAUSE);
    }
    let reports = traffic.stop();
    reports.iter().for_each(|report| println!("{port:?}: {report:?}"));
    assert!(reports.iter().all(Report::has_gone_on), "{reports:?}");
    // Links and rules are still Coil's, and the programs choose.
    assert_eq!(network.client.sh(rules), before);
    is_seen_as(&network, 0);
    kernel::apply(place, &wanted(port, &gateway(1)), &programs).unwrap();
    is_seen_as(&network, 1);
    network.check();
    assert_eq!(["in_clear", "untranslated"].map(|counter| network.counted(counter)), [0, 0]);
}

#[test]
fn a_client_of_coil_is_taken_over_while_packets_pass() {
    SourcePort::BOTH.into_iter().for_each(taken_over);
}

#[test]
fn our_client_reaches_gateways_of_coil_by_the_service() {
    for port in SourcePort::BOTH {
        let Some(network) = network(port) else { return };
        let netns = Netns::open(network.client.path()).unwrap();
        let (place, programs) = (Place { netns: &netns, ifname: "eth0" }, ProgramStock::default());
        let desired = wanted(port, &NextHop::Service);
        let mut without = desired.clone();
        without.tunnels.values_mut().for_each(|tunnel| tunnel.answering.clear());
        kernel::apply(place, &without, &programs).unwrap();
        for family in families() {
            // With the fixed port, the Service's translation makes its address that of replies.
            let expected = (port == SourcePort::Fixed).then_some(family.gateways[0]);
            assert_eq!(network.seen_as(family.server), expected);
        }
        kernel::apply(place, &desired, &programs).unwrap();
        network.check();
        is_seen_as(&network, 0);
        assert_eq!(["in_clear", "untranslated"].map(|counter| network.counted(counter)), [0, 0]);
    }
}

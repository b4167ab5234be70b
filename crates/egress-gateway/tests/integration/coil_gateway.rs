//! A gateway that Coil v2 has set up by the kernel's fou, ipip and ip6tnl is taken over while packets pass.
//! `FAIRLEAD_KERNEL_FOU=1` says that this kernel must have them.

use std::thread;
use std::time::Duration;

use fairlead_dataplane::egress_gateway::SourceTable;
use fairlead_egress_gateway::plane::{Desired, Plane, PlaneSettings, earlier_clients};
use fairlead_fou::{Counter, link_name};
use testbed_netns::coil::{self, Network, SourcePort, families};
use testbed_netns::traffic::{Report, Traffic};

const PAUSE: Duration = Duration::from_secs(1);

/// Kinds of the tunnel links of a namespace.
const KINDS: &str = "ip -d -o link | grep -o ' fou[46]_[0-9a-f]*.*' | grep -owE 'ifb|ipip|ip6tnl' | sort";

fn taken_over(port: SourcePort) {
    let Some(network) = Network::new() else { return };
    let gateway = &network.gateways[0];
    let own = families().map(|family| family.gateways[0]);
    coil::set_up_client(&network.client, link_name, port);
    coil::set_up_gateway(gateway, own, link_name, port);
    // A client of before, whose link Coil leaves behind.
    gateway.sh("ip link add fou4_0a141e63 type ipip mode any local 10.20.50.1 remote 10.20.30.99 ttl 225 \
         encap fou encap-sport 5555 encap-dport 5555");
    network.check();
    let routes = "ip route show table 118; ip -6 route show table 118";
    let before = gateway.sh(routes);
    let traffic = Traffic::start(&network.client, families().map(|family| family.server));
    thread::sleep(PAUSE);
    let settings = PlaneSettings {
        uplink: "eth0".to_owned(),
        own: own.into(),
        port: 5555,
        source_port_auto: port == SourcePort::Auto,
    };
    let everything = ["0.0.0.0/0", "::/0"].map(|prefix| (prefix.parse().unwrap(), true));
    let plane = gateway.run(|| {
        let mut plane = Plane::open(settings, SourceTable::default()).unwrap();
        let desired = Desired {
            clients: earlier_clients().unwrap().into_iter().collect(),
            destinations: everything.into(),
            max_connections: None,
            sources: None,
        };
        let applied = plane.apply(&desired).unwrap();
        println!("{port:?}: {} changes", applied.changes);
        assert!(applied.refused.is_empty(), "{applied:?}");
        assert_eq!(plane.apply(&desired).unwrap().changes, 0);
        plane
    });
    thread::sleep(PAUSE);
    let reports = traffic.stop();
    reports.iter().for_each(|report| println!("{port:?}: {report:?}"));
    assert!(reports.iter().all(Report::has_gone_on), "{reports:?}");
    assert_eq!(gateway.sh(routes), before);
    assert_eq!(gateway.sh(KINDS), "ifb\nifb\n");
    let counters = plane.counters().unwrap();
    assert!(counters.of(Counter::Decapsulated) > 50, "{counters:?}");
    network.check();
    for (family, own) in families().into_iter().zip(own) {
        assert_eq!(network.seen_as(family.server), Some(own));
    }
    assert_eq!(["in_clear", "untranslated"].map(|counter| network.counted(counter)), [0, 0]);
}

#[test]
fn a_gateway_of_coil_is_taken_over_while_packets_pass() {
    SourcePort::BOTH.into_iter().for_each(taken_over);
}

use fairlead_api::client_routing::Target;
use fairlead_dataplane::egress_client::{Present, steps};
use fairlead_egress::EgressName;
use fairlead_egress::client::SourcePort;
use fairlead_egress::client::plan::{Asking, Cluster, KnownEgress, KnownService, plan};
use fairlead_egress::destinations::Destinations;
use fairlead_netlink::route::RouteKind;

use super::*;

#[test]
fn what_is_decided_for_a_pod_is_what_the_kernel_gets() {
    let known = |cluster_ips: [&str; 2], destinations: &[&str]| KnownEgress {
        destinations: Ok(Destinations {
            prefixes: destinations.iter().map(|prefix| prefix.parse().unwrap()).collect(),
            excluded: BTreeSet::from(["192.168.10.128/25".parse().unwrap()]),
        }),
        source_port: SourcePort::Fixed,
        originating_only: None,
        cluster_ranges: Some(Vec::new()),
        ranges_are_stale: false,
        allowed_namespaces: None,
        service: Some(KnownService {
            cluster_ips: cluster_ips.iter().map(|address| address.parse::<IpAddr>().unwrap()).collect(),
            port: 5555,
            by_client: false,
            idle_timeout: None,
        }),
    };
    let name = |namespace: &str| EgressName { namespace: namespace.to_owned(), name: "nat".to_owned() };
    let egresses = BTreeMap::from([
        (name("internet-egress"), known(["10.68.124.145", "fd04::2"], &["0.0.0.0/0", "::/0"])),
        (name("domestic-egress"), known(["10.68.12.49", "fd04::1"], &["192.168.10.0/24", "fd10::/64"])),
    ]);
    let asking = Asking {
        namespace: "shop".to_owned(),
        chosen: egresses.keys().cloned().collect(),
        addresses: ["10.20.30.40", "fd02::1"]
            .map(|text| text.parse::<IpAddr>().unwrap())
            .into_iter()
            .collect(),
        mtu: 1500,
    };
    let planned = plan(&Cluster { egresses, originating_only: false }, &asking).unwrap();
    assert_eq!(planned.tunnels.len(), 4);
    let links =
        planned.tunnels.iter().zip(11..).map(|(tunnel, index)| (tunnel.link.clone(), index)).collect();
    for planned in [planned.routing.ipv4.unwrap(), planned.routing.ipv6.unwrap()] {
        let set = steps(Some(&planned), &links, &Present::default()).set;
        let rules = set.iter().filter_map(|step| match step {
            Step::AddRule(rule) => Some((rule.priority, rule.destination, rule.table)),
            _ => None,
        });
        let expected = planned.rules.iter().map(|rule| {
            let destination = Some(rule.destination).filter(|prefix| prefix.prefix_len() > 0);
            (rule.priority, destination, rule.table)
        });
        assert_eq!(rules.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        let routes = set.iter().filter_map(|step| match step {
            Step::AddRoute(route) if route.kind != RouteKind::UNREACHABLE => {
                Some((route.table, route.destination, route.link))
            }
            _ => None,
        });
        let expected = planned.routes.iter().map(|it| match &it.target {
            Target::Link(name) => (it.table, it.destination, links.get(name).copied()),
            _ => (it.table, it.destination, None),
        });
        assert_eq!(routes.collect::<BTreeSet<_>>(), expected.collect::<BTreeSet<_>>());
    }
}

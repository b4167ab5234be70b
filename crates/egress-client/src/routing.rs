//! What `fairlead-egress` decides for a client pod, in the form in which `fairlead-dataplane` brings it to the kernel.

use fairlead_address::DualStack;
use fairlead_dataplane::egress_client::{ClientRoute, ClientRouting, ClientRule, Target};
use fairlead_egress::client::{self, Routing};

/// The rules and routes of both families, without links.
pub(crate) fn client_routing(
    planned: &DualStack<Routing, Routing>,
) -> DualStack<ClientRouting, ClientRouting> {
    planned.as_ref().map(of_family, of_family)
}

fn of_family(planned: &Routing) -> ClientRouting {
    let rules = planned.rules.iter().map(|rule| ClientRule {
        priority: rule.priority,
        destination: rule.destination,
        table: rule.table,
    });
    let routes = planned.routes.iter().map(|route| ClientRoute {
        table: route.table,
        destination: route.destination,
        target: match &route.target {
            client::Target::Link(name) => Target::Link(name.clone()),
            client::Target::Refused => Target::Refused,
            client::Target::Excluded => Target::Excluded,
        },
        originating_only: route.originating_only,
    });
    ClientRouting { rules: rules.collect(), routes: routes.collect() }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use fairlead_dataplane::egress_client::{Present, Step, steps};
    use fairlead_egress::EgressName;
    use fairlead_egress::client::{ClientPod, Gateways, SourcePort, routing};
    use fairlead_egress::destinations::Destinations;
    use fairlead_netlink::route::RouteKind;

    use super::*;

    #[test]
    fn what_is_decided_for_a_pod_is_what_the_kernel_gets() {
        let gateways = |cluster_ip: [&str; 2], destinations: &[&str]| Gateways {
            cluster_ips: cluster_ip.iter().map(|address| address.parse().unwrap()).collect(),
            port: 5555,
            destinations: Destinations {
                prefixes: destinations.iter().map(|prefix| prefix.parse().unwrap()).collect(),
                excluded: BTreeSet::from(["192.168.10.128/25".parse().unwrap()]),
            },
            source_port: SourcePort::Fixed,
            originating_only: false,
        };
        let name = |namespace: &str| EgressName { namespace: namespace.to_owned(), name: "nat".to_owned() };
        let egresses = BTreeMap::from([
            (name("internet-egress"), gateways(["10.68.124.145", "fd04::2"], &["0.0.0.0/0", "::/0"])),
            (
                name("domestic-egress"),
                gateways(["10.68.12.49", "fd04::1"], &["192.168.10.0/24", "fd10::/64"]),
            ),
        ]);
        let addresses = ["10.20.30.40", "fd02::1"].map(|address| address.parse().unwrap());
        let pod = ClientPod { addresses: addresses.into_iter().collect(), mtu: 1500 };
        let planned = routing(&pod, &egresses, &[], &Default::default()).unwrap();
        let converted = client_routing(&planned);
        let planned = [planned.ipv4.unwrap(), planned.ipv6.unwrap()];
        for (planned, converted) in planned.iter().zip([converted.ipv4.unwrap(), converted.ipv6.unwrap()]) {
            let links =
                planned.links.iter().zip(11..).map(|(link, index)| (link.name.clone(), index)).collect();
            let set = steps(Some(&converted), &links, &Present::default()).set;
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
                client::Target::Link(name) => (it.table, it.destination, links.get(name).copied()),
                _ => (it.table, it.destination, None),
            });
            assert_eq!(routes.collect::<BTreeSet<_>>(), expected.collect::<BTreeSet<_>>());
        }
    }
}

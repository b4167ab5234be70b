use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::member::{MemberAddresses, MemberRecord, Source};
use crate::merge::merge;
use crate::plan::{Plan, plan};
use crate::policy::Policy;

fn own(link: u32, prefix: &str) -> OwnAddress {
    OwnAddress { link, prefix: prefix.parse().unwrap() }
}

/// A node with a Node object.
fn node(name: &str, addresses: &[&str]) -> Member {
    let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
    Member { addresses: MemberAddresses::of_node(addresses), ..Member::named(name) }
}

/// An AddressBlock of a node.
fn block(node: &str, prefixes: &[&str]) -> Member {
    let blocks = prefixes.iter().map(|text| text.parse().unwrap()).collect();
    Member { blocks, ..Member::named(node) }
}

/// Plan that follows once the objects of each node are one member.
fn routing(own_addresses: &[OwnAddress], objects: impl IntoIterator<Item = Member>) -> Plan {
    let record = |member| MemberRecord { age: Duration::ZERO, source: Source::Kubernetes, member };
    let members = merge(objects.into_iter().map(record).collect());
    plan(&members, &Policy { routes_on: Some(own_addresses.to_vec()), ..Policy::new("a") })
}

/// This host: `a`, on two networks, dual stack on the first.
fn here() -> Vec<OwnAddress> {
    vec![own(2, "192.0.2.1/24"), own(2, "fd00::1/64"), own(3, "198.51.100.1/25")]
}

fn shown(routing: &Plan) -> Vec<String> {
    let show =
        |it: &BlockRoute| format!("{} via {} on {} ({})", it.destination, it.gateway, it.link, it.node);
    routing.routes.iter().map(show).collect()
}

fn problems(nodes: &[Member], blocks: &[Member]) -> Vec<String> {
    let routing = routing(&here(), [nodes, blocks].concat());
    assert!(routing.problems.iter().all(Problem::is_about_routes));
    assert_eq!(shown(&routing), Vec::<String>::new());
    routing.problems.iter().map(ToString::to_string).collect()
}

#[test]
fn blocks_of_neighbours_go_through_their_addresses_in_each_family() {
    let nodes =
        [node("a", &["192.0.2.1"]), node("b", &["192.0.2.2", "fd00::2"]), node("c", &["198.51.100.9"])];
    let blocks = [
        block("a", &["10.0.0.0/27", "fd02::/123"]),
        block("b", &["10.0.0.32/27", "fd02::20/123"]),
        block("c", &["10.0.0.64/27"]),
    ];
    let routing = routing(&here(), nodes.into_iter().chain(blocks));
    assert_eq!(routing.problems, []);
    assert_eq!(
        shown(&routing),
        [
            "10.0.0.32/27 via 192.0.2.2 on 2 (b)",
            "10.0.0.64/27 via 198.51.100.9 on 3 (c)",
            "fd02::20/123 via fd00::2 on 2 (b)",
        ]
    );
}

#[test]
fn the_first_address_that_is_a_neighbours_counts_and_the_narrowest_network_wins() {
    let networks = [own(7, "10.9.0.1/8"), own(8, "10.9.9.1/24")];
    let objects = [node("b", &["203.0.113.1", "10.9.9.2", "10.1.1.1"]), block("b", &["172.16.0.0/24"])];
    let routing = routing(&networks, objects);
    assert_eq!(shown(&routing), ["172.16.0.0/24 via 10.9.9.2 on 8 (b)"]);
}

#[test]
fn a_node_elsewhere_gets_no_route_and_a_reason() {
    let found = problems(&[node("b", &["203.0.113.1"])], &[block("b", &["10.0.0.0/27", "fd02::/123"])]);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].contains("no IPv6 route to the pods of b"), "{found:?}");
    assert!(found[1].contains("203.0.113.1 is on no network of this node"), "{found:?}");
}

#[test]
fn what_two_nodes_have_is_routed_to_neither() {
    let same_block = [block("b", &["10.0.0.0/27"]), block("c", &["10.0.0.0/27"])];
    let found = problems(&[node("b", &["192.0.2.2"]), node("c", &["192.0.2.3"])], &same_block);
    assert!(found.len() == 1 && found[0].contains("b and c"), "{found:?}");

    let blocks = [block("b", &["10.0.0.0/27"]), block("c", &["10.0.0.32/27"])];
    let found = problems(&[node("b", &["192.0.2.2"]), node("c", &["192.0.2.2"])], &blocks);
    assert!(found.len() == 2 && found[0].contains("also that of c") && found[1].contains("also that of b"));

    let found = problems(&[node("b", &["192.0.2.1"])], &blocks[..1]);
    assert!(found[0].contains("also that of this node"), "{found:?}");
}

#[test]
fn one_node_with_two_blocks_of_one_prefix_has_one_route() {
    let blocks = [block("b", &["10.0.0.0/27"]), block("b", &["10.0.0.0/27"])];
    let routing = routing(&here(), blocks.into_iter().chain([node("b", &["192.0.2.2"])]));
    assert_eq!((routing.routes.len(), routing.problems.len()), (1, 0));
}

#[test]
fn a_block_never_takes_nodes_or_everything() {
    let nodes = [node("b", &["192.0.2.2"])];
    let found = problems(&nodes, &[block("b", &["192.0.2.0/28"]), block("b", &["0.0.0.0/0"])]);
    assert!(found[0].contains("covers the node address 192.0.2.1"), "{found:?}");
    assert!(found[1].contains("0.0.0.0/0 cannot be routed"), "{found:?}");
}

#[test]
fn a_block_of_a_node_that_is_gone_leads_nowhere() {
    let found = problems(&[], &[block("b", &["10.0.0.0/27"])]);
    assert!(found[0].contains("its Node b does not exist"), "{found:?}");
}

fn some_address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        (0..4u8, 0..8u8).prop_map(|(net, host)| IpAddr::from([10, 0, net, host])),
        (0..8u16).prop_map(|host| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, host])),
        Just(IpAddr::from([0, 0, 0, 0])),
    ]
}

fn some_prefix() -> impl Strategy<Value = IpNet> {
    (some_address(), 0..=128u8).prop_map(|(address, length)| {
        IpNet::new(address, length.min(if address.is_ipv4() { 32 } else { 128 })).unwrap()
    })
}

fn some_name() -> impl Strategy<Value = String> {
    "[a-d]"
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_route_leads_to_the_one_neighbour_that_has_the_block(
        networks in proptest::collection::vec((1..4u32, some_prefix()), 0..4),
        nodes in proptest::collection::btree_map(some_name(), proptest::collection::vec(some_address(), 0..3), 0..4),
        blocks in proptest::collection::vec((some_name(), proptest::collection::vec(some_prefix(), 0..3)), 0..6),
    ) {
        let networks: Vec<_> = networks.into_iter().map(|(link, prefix)| OwnAddress { link, prefix }).collect();
        let nodes: Vec<_> = nodes
            .into_iter()
            .map(|(name, addresses)| Member { addresses: MemberAddresses::of_node(addresses), ..Member::named(name) })
            .collect();
        let blocks: Vec<_> = blocks
            .into_iter()
            .map(|(node, blocks)| Member { blocks, ..Member::named(node) })
            .collect();
        let objects = [nodes.clone(), blocks.clone()].concat();
        let found = routing(&networks, objects.clone());
        for route in &found.routes {
            prop_assert!(route.node != "a");
            prop_assert_eq!(route.gateway.is_ipv4(), route.destination.addr().is_ipv4());
            let holders: Vec<_> = nodes.iter().filter(|node| node.addresses.node.iter().flatten().any(|it| *it == route.gateway)).collect();
            prop_assert!(holders.len() == 1 && holders[0].name == route.node);
            prop_assert!(networks.iter().any(|own| own.link == route.link && own.prefix.contains(&route.gateway)));
            prop_assert!(!networks.iter().any(|own| route.destination.contains(&own.prefix.addr())));
            prop_assert!(!nodes.iter().flat_map(|it| it.addresses.node.iter().flatten()).any(|it| route.destination.contains(it)));
            let owners: BTreeSet<_> = blocks
                .iter()
                .filter(|block| block.blocks.iter().any(|prefix| prefix.trunc() == route.destination))
                .map(|block| &block.name)
                .collect();
            prop_assert_eq!(owners.into_iter().collect::<Vec<_>>(), [&route.node]);
        }
        let destinations: BTreeSet<_> = found.routes.iter().map(|route| route.destination).collect();
        prop_assert_eq!(destinations.len(), found.routes.len());
        prop_assert_eq!(routing(&networks, objects.into_iter().rev()), found);
    }
}

use proptest::prelude::*;

use super::*;

fn own(link: u32, prefix: &str) -> OwnAddress {
    OwnAddress { link, prefix: prefix.parse().unwrap() }
}

fn node(name: &str, addresses: &[&str]) -> RouterNode {
    let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
    RouterNode { name: name.to_owned(), addresses }
}

fn block(name: &str, node: &str, prefixes: &[&str]) -> RouterBlock {
    let prefixes = prefixes.iter().map(|text| text.parse().unwrap()).collect();
    RouterBlock { name: name.to_owned(), node: node.to_owned(), prefixes }
}

/// This host: `a`, on two networks, dual stack on the first.
fn here() -> Vec<OwnAddress> {
    vec![own(2, "192.0.2.1/24"), own(2, "fd00::1/64"), own(3, "198.51.100.1/25")]
}

fn shown(routing: &Routing) -> Vec<String> {
    let show =
        |it: &BlockRoute| format!("{} via {} on {} ({})", it.destination, it.gateway, it.link, it.node);
    routing.routes.iter().map(show).collect()
}

fn problems(nodes: &[RouterNode], blocks: &[RouterBlock]) -> Vec<String> {
    let routing = desired_routes("a", &here(), nodes, blocks);
    assert_eq!(shown(&routing), Vec::<String>::new());
    routing.problems.iter().map(ToString::to_string).collect()
}

#[test]
fn blocks_of_neighbours_go_through_their_addresses_in_each_family() {
    let nodes =
        [node("a", &["192.0.2.1"]), node("b", &["192.0.2.2", "fd00::2"]), node("c", &["198.51.100.9"])];
    let blocks = [
        block("default-0", "a", &["10.0.0.0/27", "fd02::/123"]),
        block("default-1", "b", &["10.0.0.32/27", "fd02::20/123"]),
        block("default-2", "c", &["10.0.0.64/27"]),
    ];
    let routing = desired_routes("a", &here(), &nodes, &blocks);
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
    let nodes = [node("b", &["203.0.113.1", "10.9.9.2", "10.1.1.1"])];
    let routing = desired_routes("a", &networks, &nodes, &[block("x", "b", &["172.16.0.0/24"])]);
    assert_eq!(shown(&routing), ["172.16.0.0/24 via 10.9.9.2 on 8 (b)"]);
}

#[test]
fn a_node_elsewhere_gets_no_route_and_a_reason() {
    let found = problems(&[node("b", &["203.0.113.1"])], &[block("x", "b", &["10.0.0.0/27", "fd02::/123"])]);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].contains("no IPv6 route to the pods of b"), "{found:?}");
    assert!(found[1].contains("203.0.113.1 is on no network of this node"), "{found:?}");
}

#[test]
fn what_two_nodes_have_is_routed_to_neither() {
    let same_block = [block("x", "b", &["10.0.0.0/27"]), block("y", "c", &["10.0.0.0/27"])];
    let found = problems(&[node("b", &["192.0.2.2"]), node("c", &["192.0.2.3"])], &same_block);
    assert!(found.len() == 1 && found[0].contains("b and c"), "{found:?}");

    let blocks = [block("x", "b", &["10.0.0.0/27"]), block("y", "c", &["10.0.0.32/27"])];
    let found = problems(&[node("b", &["192.0.2.2"]), node("c", &["192.0.2.2"])], &blocks);
    assert!(found.len() == 2 && found[0].contains("also that of c") && found[1].contains("also that of b"));

    let found = problems(&[node("b", &["192.0.2.1"])], &blocks[..1]);
    assert!(found[0].contains("also that of this node"), "{found:?}");
}

#[test]
fn one_node_with_two_blocks_of_one_prefix_has_one_route() {
    let blocks = [block("x", "b", &["10.0.0.0/27"]), block("y", "b", &["10.0.0.0/27"])];
    let routing = desired_routes("a", &here(), &[node("b", &["192.0.2.2"])], &blocks);
    assert_eq!((routing.routes.len(), routing.problems.len()), (1, 0));
}

#[test]
fn a_block_never_takes_nodes_or_everything() {
    let nodes = [node("b", &["192.0.2.2"])];
    let found = problems(&nodes, &[block("x", "b", &["192.0.2.0/28"]), block("y", "b", &["0.0.0.0/0"])]);
    assert!(found[0].contains("covers the node address 192.0.2.1"), "{found:?}");
    assert!(found[1].contains("0.0.0.0/0 cannot be routed"), "{found:?}");
}

#[test]
fn a_block_of_a_node_that_is_gone_leads_nowhere() {
    let found = problems(&[], &[block("x", "b", &["10.0.0.0/27"])]);
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
        let nodes: Vec<_> = nodes.into_iter().map(|(name, addresses)| RouterNode { name, addresses }).collect();
        let mut blocks: Vec<_> = blocks
            .into_iter()
            .enumerate()
            .map(|(index, (node, prefixes))| RouterBlock { name: format!("p-{index}"), node, prefixes })
            .collect();
        let routing = desired_routes("a", &networks, &nodes, &blocks);
        for route in &routing.routes {
            prop_assert!(route.node != "a");
            prop_assert_eq!(route.gateway.is_ipv4(), route.destination.addr().is_ipv4());
            let holders: Vec<_> = nodes.iter().filter(|node| node.addresses.contains(&route.gateway)).collect();
            prop_assert!(holders.len() == 1 && holders[0].name == route.node);
            prop_assert!(networks.iter().any(|own| own.link == route.link && own.prefix.contains(&route.gateway)));
            prop_assert!(!networks.iter().any(|own| route.destination.contains(&own.prefix.addr())));
            prop_assert!(!nodes.iter().flat_map(|it| &it.addresses).any(|it| route.destination.contains(it)));
            let owners: BTreeSet<_> = blocks
                .iter()
                .filter(|block| block.prefixes.iter().any(|prefix| prefix.trunc() == route.destination))
                .map(|block| &block.node)
                .collect();
            prop_assert_eq!(owners.into_iter().collect::<Vec<_>>(), [&route.node]);
        }
        let destinations: BTreeSet<_> = routing.routes.iter().map(|route| route.destination).collect();
        prop_assert_eq!(destinations.len(), routing.routes.len());
        blocks.reverse();
        let others: Vec<_> = nodes.into_iter().rev().collect();
        prop_assert_eq!(desired_routes("a", &networks, &others, &blocks), routing);
    }
}

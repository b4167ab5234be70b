use fairlead_keys::PublicKey;
use ipnet::IpNet;

use super::*;
use crate::member::{ByDiscovery, MemberAddresses};
use crate::plan::{Plan, plan};
use crate::policy::Reserved;
use crate::problem::Refusal;

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| net(text)).collect()
}

/// A node at `192.0.2.NUMBER` with a network of pods `10.244.NUMBER.0/24`.
fn node(number: u8) -> Member {
    let address = net(&format!("192.0.2.{number}/32"));
    Member {
        public_key: Some(PublicKey([number; 32])),
        claims: vec![address],
        addresses: MemberAddresses::of_node(vec![address.addr()]),
        pod_networks: vec![net(&format!("10.244.{number}.0/24"))],
        ..Member::named(format!("n{number}"))
    }
}

fn policy(own: &str) -> Policy {
    Policy { includes_pod_networks: true, ..Policy::new(own) }
}

fn allowed(plan: &Plan, number: u8) -> Vec<IpNet> {
    plan.peers[&PublicKey([number; 32])].allowed_ips.clone()
}

fn targets(plan: &Plan) -> PrefixSet {
    let ipv4 = plan.targets_ipv4.iter().copied().map(IpNet::from);
    ipv4.chain(plan.targets_ipv6.iter().copied().map(IpNet::from)).collect()
}

fn is_target(plan: &Plan, address: &str) -> bool {
    targets(plan).contains(address.parse().unwrap())
}

#[test]
fn networks_of_pods_are_in_the_mesh_only_where_it_says_so() {
    let dual = Member { pod_networks: nets(&["10.244.2.7/24", "fd00:2::/64"]), ..node(2) };
    let members = [node(1), dual, node(3)];
    let with = plan(&members, &policy("n1"));
    assert_eq!(allowed(&with, 2), nets(&["10.244.2.0/24", "192.0.2.2/32", "fd00:2::/64"]));
    assert_eq!(allowed(&with, 3), nets(&["10.244.3.0/24", "192.0.2.3/32"]));
    for (address, is_in) in [("10.244.2.9", true), ("fd00:2::9", true), ("10.244.1.9", false)] {
        assert_eq!(is_target(&with, address), is_in, "{address}");
    }
    assert_eq!(with.problems, []);
    let without = plan(&members, &Policy::new("n1"));
    assert_eq!(allowed(&without, 2), nets(&["192.0.2.2/32"]));
    assert!(!is_target(&without, "10.244.2.9"));
}

#[test]
fn no_claim_takes_an_address_of_another_node_s_pods() {
    // The credentials of a kubelet can put any address into the status of its own Node.
    let mut thief = node(3);
    thief.claims.push(net("10.244.2.5/32"));
    thief.claims.push(net("10.244.0.0/16"));
    thief.addresses.node.get_or_insert_default().push("10.244.2.5".parse().unwrap());
    let planned = plan(&[node(1), node(2), thief.clone()], &policy("n1"));
    assert_eq!(allowed(&planned, 2), nets(&["10.244.2.0/24", "192.0.2.2/32"]));
    let taken: PrefixSet = allowed(&planned, 3).iter().collect();
    assert!(taken.contains("10.244.4.1".parse().unwrap()));
    assert!(
        taken.overlapping(net("10.244.2.0/24")).is_none()
            && taken.overlapping(net("10.244.1.0/24")).is_none()
    );
    let reasons: Vec<_> = planned.problems.iter().map(Problem::reason).collect();
    assert_eq!(reasons, ["ClaimOverlapsClaim"]);
    // Nor one of this node's.
    let own = plan(&[node(2), thief], &policy("n2"));
    assert!(!is_target(&own, "10.244.2.5") && is_target(&own, "10.244.4.1"));
    assert!(!allowed(&own, 3).contains(&net("10.244.2.5/32")));
}

#[test]
fn blocks_go_before_networks_of_pods() {
    let mut owner = node(3);
    owner.blocks = nets(&["10.244.2.64/27", "10.244.1.32/27"]);
    let planned = plan(&[node(1), node(2), owner.clone()], &policy("n1"));
    assert!(allowed(&planned, 3).contains(&net("10.244.2.64/27")));
    // Also inside of the network of this node's pods.
    assert!(is_target(&planned, "10.244.1.33") && !is_target(&planned, "10.244.1.1"));
    let around = Member { blocks: nets(&["10.244.2.0/23"]), ..node(3) };
    let planned = plan(&[node(1), node(2), around], &policy("n1"));
    assert_eq!(allowed(&planned, 2), nets(&["192.0.2.2/32"]));
    assert!(planned.problems.iter().any(|it| it.reason() == "ClaimOverlapsBlock"), "{:?}", planned.problems);
}

#[test]
fn of_two_nodes_with_one_network_one_keeps_it() {
    let twin = Member { pod_networks: node(2).pod_networks, ..node(3) };
    let members = [node(1), node(2), twin.clone()];
    let first = plan(&members, &policy("n1"));
    assert!(allowed(&first, 2).contains(&net("10.244.2.0/24")));
    assert_eq!(first.problems.iter().map(Problem::reason).collect::<Vec<_>>(), ["ClaimedTwice"]);
    let held = [(PublicKey([3; 32]), [net("10.244.2.0/24")].into())].into();
    let planned = plan(&members, &Policy { held, ..policy("n1") });
    assert!(allowed(&planned, 3).contains(&net("10.244.2.0/24")));
    let own = plan(&members, &policy("n3"));
    assert!(!is_target(&own, "10.244.2.1"), "this node's own pods stay here");
}

#[test]
fn what_is_reserved_or_too_wide_is_left_out() {
    let wide = Member { pod_networks: nets(&["0.0.0.0/1", "10.96.0.0/16"]), ..node(2) };
    let reserved = Reserved {
        hosts: nets(&["10.244.3.7/32"]),
        services: nets(&["10.96.0.0/12"]),
        ..Reserved::default()
    };
    let planned = plan(&[node(1), wide, node(3)], &Policy { reserved, ..policy("n1") });
    assert_eq!(allowed(&planned, 2), nets(&["192.0.2.2/32"]));
    let refused =
        |prefix: &str, why| Problem::PodNetworkRefused { node: "n2".to_owned(), prefix: net(prefix), why };
    assert_eq!(
        planned.problems,
        [refused("0.0.0.0/1", Refusal::TooWide), refused("10.96.0.0/16", Refusal::Service)]
    );
    assert!(!is_target(&planned, "10.244.3.7") && is_target(&planned, "10.244.3.8"));
}

#[test]
fn packets_to_pods_of_a_node_without_a_key_are_dropped_and_discovery_names_no_networks() {
    let keyless = Member { public_key: None, ..node(2) };
    let told =
        Member { discovery: ByDiscovery { is_only_source: true, needs_preshared_key: false }, ..node(3) };
    let planned = plan(&[node(1), keyless, told], &policy("n1"));
    assert!(is_target(&planned, "10.244.2.1") && !is_target(&planned, "10.244.3.1"));
    assert!(planned.problems.iter().any(|it| it.reason() == "NotPublished"));
}

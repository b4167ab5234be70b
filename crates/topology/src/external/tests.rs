use fairlead_keys::PublicKey;
use proptest::prelude::*;

use super::*;
use crate::member::Since;
use crate::plan::{Plan, plan};
use crate::policy::Reserved;

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// A member whose key is its number, and who joined then.
fn with(mut member: Member, number: u8, claims: &[&str]) -> Member {
    member.public_key = Some(PublicKey([number; 32]));
    member.since = Some(Since { created: number.into(), uid: String::new() });
    member.claims = claims.iter().copied().map(net).collect();
    member
}

fn node(name: &str, number: u8, claims: &[&str], blocks: &[&str]) -> Member {
    let blocks = blocks.iter().copied().map(net).collect();
    Member { blocks, ..with(Member::named(name), number, claims) }
}

fn peer(name: &str, number: u8, claims: &[&str]) -> Member {
    with(Member::of_peer(name), number, claims)
}

fn allowed(plan: &Plan, number: u8) -> Vec<String> {
    plan.peers
        .get(&PublicKey([number; 32]))
        .map(|peer| peer.allowed_ips.iter().map(ToString::to_string).collect())
        .unwrap_or_default()
}

/// Reasons of the problems, in alphabetical order.
fn reasons(plan: &Plan) -> Vec<&'static str> {
    let mut reasons: Vec<&str> = plan.problems.iter().map(Problem::reason).collect();
    reasons.sort_unstable();
    reasons
}

fn targets(plan: &Plan) -> Vec<String> {
    plan.targets_ipv4.iter().map(ToString::to_string).collect()
}

#[test]
fn an_external_member_is_a_peer_with_its_prefixes_and_no_node() {
    let members = [
        node("a", 1, &["192.0.2.1/32"], &["10.64.0.0/27"]),
        peer("laptop", 2, &["10.9.0.1/32", "192.168.5.7/24"]),
    ];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(plan.problems, []);
    assert_eq!(allowed(&plan, 2), ["10.9.0.1/32", "192.168.5.0/24"]);
    assert_eq!(targets(&plan), ["10.9.0.1/32", "192.168.5.0/24"]);
    assert!(plan.nodes.is_empty(), "its connections to the API server of a node go through the mesh");
}

#[test]
fn blocks_and_older_addresses_of_nodes_go_before_it() {
    let members = [
        node("a", 1, &["192.0.2.1/32"], &["10.64.0.0/27"]),
        node("b", 2, &["192.0.2.2/32"], &["10.64.0.32/27"]),
        // Older than node b, and all the same.
        peer("thief", 1, &[]),
        peer("greedy", 3, &["10.64.0.32/27", "10.64.0.33/32", "192.0.2.2/32", "192.0.2.1/32", "10.9.0.0/24"]),
    ];
    let planned = plan(&members, &Policy::new("a"));
    assert_eq!(allowed(&planned, 2), ["10.64.0.32/27", "192.0.2.2/32"]);
    assert_eq!(allowed(&planned, 3), ["10.9.0.0/24"]);
    assert_eq!(
        reasons(&planned),
        ["ClaimOverlapsBlock", "ClaimOverlapsBlock", "ClaimedTwice", "ClaimedTwice", "PeerKeyTaken"]
    );
    let text: Vec<String> = planned.problems.iter().map(ToString::to_string).collect();
    assert!(text.iter().any(|text| text.starts_with("Peer greedy claims 10.64.0.32/27")), "{text:?}");
    assert!(
        text.iter().any(|text| text.starts_with("Peer thief is left out: its public key is that of node a"))
    );
}

#[test]
fn inside_a_wide_prefix_pods_and_nodes_keep_what_is_theirs() {
    let members = [
        node("a", 1, &["10.0.0.1/32"], &["10.64.0.0/27"]),
        node("b", 2, &["10.0.0.2/32"], &["10.64.0.32/27"]),
        peer("site", 3, &["10.0.0.0/8"]),
    ];
    let policy = Policy {
        reserved: Reserved { hosts: vec![net("10.1.1.1/32")], ..Reserved::default() },
        ..Policy::new("a")
    };
    let plan = plan(&members, &policy);
    assert_eq!(plan.problems, []);
    assert_eq!(allowed(&plan, 2), ["10.0.0.2/32", "10.64.0.32/27"]);
    let covers = |address: &str| {
        allowed(&plan, 3)
            .iter()
            .any(|prefix| net(prefix).contains(&address.parse::<std::net::IpAddr>().unwrap()))
    };
    assert!(covers("10.200.0.1") && covers("10.1.1.2") && !covers("10.1.1.1"));
    // This node's own pods and address are no targets.
    let is_target = |address: &str| {
        plan.targets_ipv4.iter().any(|net| net.contains(&address.parse::<std::net::Ipv4Addr>().unwrap()))
    };
    assert!(is_target("10.64.0.33") && is_target("10.3.0.1"));
    assert!(!is_target("10.64.0.1") && !is_target("10.0.0.1") && !is_target("10.1.1.1"));
}

#[test]
fn everything_and_the_api_server_are_refused() {
    let claims = ["0.0.0.0/0", "::/0", "128.0.0.0/1", "203.0.113.9/32", "10.9.0.1/32"];
    let members = [node("a", 1, &[], &[]), peer("greedy", 3, &claims)];
    let policy = Policy {
        reserved: Reserved { hosts: vec![net("203.0.113.9/32")], ..Reserved::default() },
        ..Policy::new("a")
    };
    let plan = plan(&members, &policy);
    assert_eq!(allowed(&plan, 3), ["10.9.0.1/32"]);
    assert_eq!(targets(&plan), ["10.9.0.1/32"]);
    assert_eq!(reasons(&plan), ["PeerPrefixRefused"; 4]);
}

#[test]
fn addresses_of_services_are_cut_out_and_what_is_too_wide_is_refused_whole() {
    let claims = ["10.96.0.10/32", "10.0.0.0/8", "192.0.2.1/32", "0.0.0.0/0"];
    let members = [node("a", 1, &[], &[]), peer("laptop", 3, &claims)];
    let policy = Policy {
        reserved: Reserved { services: vec![net("10.96.0.0/12")], ..Reserved::default() },
        ..Policy::new("a")
    };
    let plan = plan(&members, &policy);
    let covers = |address: &str| {
        allowed(&plan, 3)
            .iter()
            .any(|prefix| net(prefix).contains(&address.parse::<std::net::IpAddr>().unwrap()))
    };
    assert!(covers("10.95.255.255") && covers("10.112.0.0") && covers("192.0.2.1"));
    assert!(!covers("10.96.0.10") && !covers("10.111.255.255") && !covers("11.0.0.1"));
    assert_eq!(reasons(&plan), ["PeerPrefixRefused"; 2]);
    let texts: Vec<String> = plan.problems.iter().map(ToString::to_string).collect();
    let service = "Peer laptop claims 10.96.0.10/32, which is left out: these addresses belong to Services; correct its allowedIPs";
    assert!(texts.iter().any(|text| text == service), "{texts:?}");
    assert!(texts.iter().any(|text| text.contains("Peer laptop claims 0.0.0.0/0")), "{texts:?}");
}

#[test]
fn of_two_with_one_key_or_prefix_the_older_stays() {
    let members = [
        node("a", 1, &[], &[]),
        peer("z-older", 3, &["10.9.0.1/32", "10.9.1.0/24"]),
        Member { public_key: Some(PublicKey([3; 32])), ..peer("same-key", 4, &["10.9.0.2/32"]) },
        peer("same-prefix", 5, &["10.9.0.1/32", "10.9.1.0/24", "10.9.1.7/32"]),
    ];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(allowed(&plan, 3), ["10.9.0.1/32", "10.9.1.0/24"]);
    assert_eq!(allowed(&plan, 5), ["10.9.1.7/32"], "an address inside a range of another");
    assert_eq!(reasons(&plan), ["ClaimedTwice", "ClaimedTwice", "PeerKeyTaken"]);
}

proptest! {
    /// Nodes get the same, and packets to their pods and addresses go the same way, whatever Peers claim.
    #[test]
    fn external_members_take_nothing_from_nodes(
        claims in prop::collection::vec((0..4u8, 0..4u8, 8..=32u8), 0..6),
        key in 1..5u8,
    ) {
        let nodes = [
            node("a", 1, &["10.0.0.1/32"], &["10.1.0.0/24"]),
            node("b", 2, &["10.0.1.1/32"], &["10.1.1.0/24"]),
        ];
        let claims: Vec<String> = claims.into_iter().map(|(x, y, length)| format!("10.{x}.{y}.1/{length}")).collect();
        let claims: Vec<&str> = claims.iter().map(String::as_str).collect();
        let external = Member { public_key: Some(PublicKey([key; 32])), ..peer("p", 3, &claims) };
        let policy = Policy::new("a");
        let alone = plan(&nodes, &policy);
        let all = plan(&[nodes[0].clone(), nodes[1].clone(), external], &policy);
        prop_assert_eq!(all.peers.get(&PublicKey([2; 32])), alone.peers.get(&PublicKey([2; 32])));
        prop_assert_eq!(&all.nodes, &alone.nodes);
        for target in &alone.targets_ipv4 {
            prop_assert!(all.targets_ipv4.iter().any(|other| other.contains(target)));
        }
        for own in ["10.1.0.0", "10.1.0.255", "10.0.0.1"] {
            let own: std::net::Ipv4Addr = own.parse().unwrap();
            prop_assert!(!all.targets_ipv4.iter().any(|target| target.contains(&own)));
        }
    }
}

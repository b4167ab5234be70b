use std::collections::{BTreeMap, BTreeSet};

use fairlead_keys::PublicKey;
use ipnet::IpNet;

use super::*;
use crate::member::{ByDiscovery, Keepalive, Since};

mod properties;

fn net(text: &str) -> IpNet {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn key(number: u32) -> PublicKey {
    let mut bytes = [7; 32];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    PublicKey(bytes)
}

/// A member that joined in the order of the numbers.
fn member(name: &str, number: u32, claims: &[&str], blocks: &[&str]) -> Member {
    Member {
        public_key: Some(key(number)),
        since: Some(Since { created: i64::from(number), uid: name.to_owned() }),
        claims: claims.iter().copied().map(net).collect(),
        blocks: blocks.iter().copied().map(net).collect(),
        ..Member::named(name)
    }
}

fn allowed(plan: &Plan, number: u32) -> Vec<String> {
    plan.peers[&key(number)].allowed_ips.iter().map(ToString::to_string).collect()
}

fn texts<T: ToString>(items: &[T]) -> Vec<String> {
    items.iter().map(ToString::to_string).collect()
}

#[test]
fn three_nodes_become_two_peers_and_a_merged_cover() {
    let members = [
        member("a", 1, &["192.0.2.1/32"], &["10.64.0.0/27"]),
        member("b", 2, &["192.0.2.2/32", "fd00::2/128"], &["10.64.0.32/27", "fd01::20/123"]),
        member("c", 3, &["192.0.2.3/32"], &["10.64.0.64/27", "10.64.0.96/27"]),
    ];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(plan.problems, []);
    assert_eq!(plan.peers.len(), 2);
    assert_eq!(allowed(&plan, 2), ["10.64.0.32/27", "192.0.2.2/32", "fd00::2/128", "fd01::20/123"]);
    assert_eq!(allowed(&plan, 3), ["10.64.0.64/27", "10.64.0.96/27", "192.0.2.3/32"]);
    assert_eq!(texts(&plan.targets_ipv4), ["10.64.0.32/27", "10.64.0.64/26", "192.0.2.2/31"]);
    assert_eq!(texts(&plan.targets_ipv6), ["fd00::2/128", "fd01::20/123"]);
    assert_eq!(plan.peers[&key(2)].keepalive, 25);
}

#[test]
fn the_keepalive_a_member_asks_for_is_taken() {
    let phone = Member { keepalive: Keepalive::every(Some(0)), ..member("phone", 2, &["10.9.0.2/32"], &[]) };
    assert_eq!(plan(&[phone], &Policy::new("a")).peers[&key(2)].keepalive, 0);
}

#[test]
fn an_address_claimed_twice_stays_with_the_node_that_joined_first() {
    let members = [
        member("a", 1, &["192.0.2.1/32"], &[]),
        member("office-1", 3, &["192.168.1.10/32", "fd00::2/128"], &["10.64.0.0/27"]),
        member("home-1", 4, &["192.168.1.10/32"], &["10.64.0.32/27"]),
        member("office-2", 5, &["192.168.1.11/32"], &[]),
    ];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(allowed(&plan, 3), ["10.64.0.0/27", "192.168.1.10/32", "fd00::2/128"]);
    assert_eq!(allowed(&plan, 4), ["10.64.0.32/27"]);
    assert_eq!(allowed(&plan, 5), ["192.168.1.11/32"]);
    assert_eq!(
        texts(&plan.problems),
        [
            "192.168.1.10/32 is claimed by nodes home-1 and office-1: packets to it go to office-1, whose claim goes \
           first; give each node an address of its own, or name this one in routing.excludeCIDRs of the WireKubeMesh"
        ]
    );
    assert_eq!(plan.problems[0].nodes(), ["home-1", "office-1"]);
    assert!(plan.problems[0].is_solved_by(&[net("10.0.0.0/8"), net("192.168.1.0/24")]));
    assert!(!plan.problems[0].is_solved_by(&[net("192.168.1.11/32")]));
}

/// An attacker on an old node names the address of a younger one; or the younger one's object is deleted and made again.
#[test]
fn an_address_stays_with_the_peer_that_has_it_in_the_device() {
    let members = [
        member("a", 1, &["192.0.2.1/32"], &[]),
        member("thief", 2, &["192.0.2.2/32", "192.0.2.3/32"], &[]),
        member("victim", 3, &["192.0.2.3/32"], &[]),
    ];
    let held = [(key(3), BTreeSet::from([net("192.0.2.3/32")]))].into();
    let plan = plan(&members, &Policy { held, ..Policy::new("a") });
    assert_eq!(allowed(&plan, 3), ["192.0.2.3/32"]);
    assert_eq!(allowed(&plan, 2), ["192.0.2.2/32"]);
}

#[test]
fn a_node_that_claims_our_address_does_not_get_it() {
    let members =
        [member("a", 1, &["192.0.2.1/32"], &["10.64.0.0/27"]), member("impostor", 2, &["192.0.2.1/32"], &[])];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(allowed(&plan, 2), [""; 0]);
    assert_eq!(plan.targets_ipv4, []);
    assert_eq!(plan.problems[0].nodes(), ["a", "impostor"]);
    // Also if that one joined first: a packet from our own address is never let in.
    let older = [member("a", 2, &["192.0.2.1/32"], &[]), member("older", 1, &["192.0.2.1/32"], &[])];
    let plan = super::plan(&older, &Policy::new("a"));
    assert_eq!((allowed(&plan, 1), plan.targets_ipv4), (vec![], vec![]));
}

#[test]
fn blocks_beat_claims() {
    let members = [
        member("a", 1, &[], &["10.64.0.0/27"]),
        member("b", 2, &[], &["10.64.0.32/27"]),
        member("impostor", 3, &["10.64.0.33/32", "10.64.0.5/32", "10.64.0.32/28", "192.0.2.9/32"], &[]),
    ];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(allowed(&plan, 2), ["10.64.0.32/27"]);
    assert_eq!(allowed(&plan, 3), ["192.0.2.9/32"]);
    assert_eq!(plan.problems.len(), 3);
    assert_eq!(
        plan.problems[2].to_string(),
        "node impostor claims 10.64.0.33/32, which overlaps the address block 10.64.0.32/27 of node b: the claim is \
         left out of the mesh; move the pool or the node's address"
    );
}

#[test]
fn a_range_keeps_what_no_other_member_has_in_it() {
    let members = [
        member("a", 1, &["192.0.2.1/32"], &["192.0.6.0/24"]),
        member("wide", 2, &["192.0.0.0/21", "172.16.0.0/24"], &[]),
        member("c", 3, &["192.0.2.3/32"], &[]),
        Member { public_key: None, ..member("keyless", 4, &[], &["192.0.4.0/24"]) },
    ];
    let plan = plan(&members, &Policy::new("a"));
    // What no peer has is cut out, and with it the rest.
    assert_eq!(
        allowed(&plan, 2),
        [
            "172.16.0.0/24",
            "192.0.0.0/23",
            "192.0.2.0/32",
            "192.0.2.2/32",
            "192.0.2.4/30",
            "192.0.2.8/29",
            "192.0.2.16/28",
            "192.0.2.32/27",
            "192.0.2.64/26",
            "192.0.2.128/25",
            "192.0.3.0/24",
            "192.0.5.0/24",
            "192.0.7.0/24"
        ]
    );
    assert_eq!(allowed(&plan, 3), ["192.0.2.3/32"]);
    assert!(matches!(&plan.problems[..], [Problem::NotPublished { node }] if node == "keyless"));
}

#[test]
fn of_two_ranges_the_one_of_the_member_that_joined_first_counts() {
    let inner = member("b", 2, &["172.16.4.0/24"], &[]);
    let outer = member("c", 3, &["172.16.0.0/16"], &[]);
    let plan = super::plan(&[inner.clone(), outer.clone()], &Policy::new("a"));
    assert_eq!(allowed(&plan, 2), ["172.16.4.0/24"]);
    assert_eq!(allowed(&plan, 3), ["172.16.0.0/16"]);
    assert_eq!(plan.problems, []);
    let younger = Member { since: None, ..inner };
    let plan = super::plan(&[younger, outer], &Policy::new("a"));
    assert_eq!(allowed(&plan, 2), [""; 0]);
    assert_eq!(allowed(&plan, 3), ["172.16.0.0/16"]);
    assert!(matches!(&plan.problems[..], [Problem::ClaimOverlapsClaim { node, .. }] if node == "b"));
}

#[test]
fn overlapping_blocks_are_reported_once_and_dropped_on_both() {
    let members =
        [member("b", 2, &[], &["10.64.0.0/26", "10.65.0.0/26"]), member("c", 3, &[], &["10.64.0.32/27"])];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(allowed(&plan, 2), ["10.65.0.0/26"]);
    assert_eq!(allowed(&plan, 3), [""; 0]);
    assert_eq!(
        texts(&plan.targets_ipv4),
        ["10.64.0.0/26", "10.65.0.0/26"],
        "dropped, not sent in clear text"
    );
    assert_eq!(
        texts(&plan.problems),
        [
            "address block 10.64.0.0/26 of node b overlaps 10.64.0.32/27 of node c: packets to both are dropped; \
          delete one of the blocks or the overlapping pool"
        ]
    );
}

#[test]
fn claims_no_mesh_can_carry_are_dropped_and_reported() {
    let bad = [
        "0.0.0.0/0",
        "::/0",
        "0.0.0.0/1",
        "128.0.0.0/1",
        "127.0.0.1/32",
        "169.254.1.1/32",
        "224.0.0.5/32",
        "255.255.255.255/32",
        "0.1.2.3/32",
        "::1/128",
        "::/128",
        "::ffff:192.0.2.1/128",
        "fe80::1/128",
        "ff02::1/128",
        "::/1",
    ];
    for claim in bad {
        let plan = plan(&[member("b", 2, &[claim, "192.0.2.2/32"], &[])], &Policy::new("a"));
        assert_eq!(allowed(&plan, 2), ["192.0.2.2/32"], "{claim}");
        let [Problem::Unusable { node, .. } | Problem::ClaimTooWide { node, .. }] = &plan.problems[..] else {
            panic!("{claim}: {:?}", plan.problems)
        };
        assert_eq!(node, "b");
    }
    let own = plan(&[member("a", 1, &["127.0.0.1/32", "fe80::1/128"], &[])], &Policy::new("a"));
    assert_eq!(own.problems, []);
}

#[test]
fn host_bits_do_not_matter() {
    let plan = plan(&[member("b", 2, &["172.16.4.9/24"], &["10.64.0.7/27"])], &Policy::new("a"));
    assert_eq!(allowed(&plan, 2), ["10.64.0.0/27", "172.16.4.0/24"]);
}

#[test]
fn what_a_member_names_twice_is_listed_once() {
    let twice = member("b", 2, &["10.64.0.1/32", "10.64.0.1/32"], &["10.64.0.0/27", "10.64.0.0/27"]);
    let plan = plan(&[twice], &Policy::new("a"));
    assert_eq!(allowed(&plan, 2), ["10.64.0.0/27"]);
    assert_eq!(plan.problems, []);
}

/// Only the holder of the private key can read what is sent to a key.
#[test]
fn a_copied_key_takes_nothing_from_its_owner_whichever_of_the_two_joined_first() {
    for (victim, thief) in [(2, 3), (3, 2)] {
        let joined = |created| Some(Since { created, uid: String::new() });
        let members = [
            member("a", 1, &[], &[]),
            Member { since: joined(victim), ..member("b", 2, &["192.0.2.2/32"], &["10.64.0.0/27"]) },
            Member {
                since: joined(thief),
                ..member("thief", 2, &["192.0.2.3/32", "192.0.2.2/32"], &["10.64.0.32/27"])
            },
            member("impostor", 4, &["10.64.0.1/32"], &[]),
        ];
        let plan = plan(&members, &Policy::new("a"));
        assert_eq!(plan.peers.keys().copied().collect::<Vec<_>>(), [key(2), key(4)]);
        assert_eq!(allowed(&plan, 2), ["10.64.0.0/27", "10.64.0.32/27", "192.0.2.2/32", "192.0.2.3/32"]);
        assert_eq!(allowed(&plan, 4), [""; 0], "a copied key does not open a block to others");
        assert_eq!(texts(&plan.targets_ipv4), ["10.64.0.0/26", "192.0.2.2/31"]);
        assert!(plan.problems.contains(&Problem::SharedKey {
            key: key(2),
            nodes: vec!["b".into(), "thief".into()],
            own: false
        }));
    }
}

#[test]
fn packets_to_a_member_without_a_usable_peer_are_dropped() {
    let mut zero = member("zero", 9, &["192.0.2.9/32"], &["10.64.1.0/24"]);
    zero.public_key = Some(PublicKey([0; 32]));
    let members = [
        member("a", 1, &["192.0.2.1/32"], &["10.64.0.0/24"]),
        member("clone", 1, &["192.0.2.2/32"], &["10.64.2.0/24"]),
        member("c", 3, &[], &[]),
        zero,
        Member { public_key: None, ..member("keyless", 5, &["192.0.2.5/32"], &["10.64.3.0/24"]) },
    ];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(plan.peers.keys().copied().collect::<Vec<_>>(), [key(3)]);
    // Not the keyless node's own address: until it joins, kubelet and API server reach it as before.
    let expected = ["10.64.1.0/24", "10.64.2.0/23", "192.0.2.2/32", "192.0.2.9/32"];
    assert_eq!(texts(&plan.targets_ipv4), expected);
    let reasons: Vec<&str> = plan.problems.iter().map(Problem::reason).collect();
    assert_eq!(reasons, ["NoKey", "NotPublished", "SharedKey"]);
    assert!(plan.problems[2].to_string().contains("nodes a and clone publish the same WireGuard public key"));
    assert!(plan.problems[2].to_string().contains("packets to the others are dropped"));
}

/// Addresses for which an API server on this node answers without the mesh.
#[test]
fn only_addresses_of_nodes_count_as_such() {
    let members = [
        member("a", 1, &["192.0.2.1/32"], &["10.64.0.0/24"]),
        member("b", 2, &["192.0.2.2/32", "10.64.1.2/32", "172.16.0.0/24"], &["10.64.1.0/24"]),
        member("thief", 3, &["192.0.2.2/32", "192.0.2.3/32", "10.64.0.7/32", "10.64.1.7/32"], &[]),
    ];
    let plan = plan(&members, &Policy::new("a"));
    let nodes: Vec<String> = plan.nodes.iter().map(ToString::to_string).collect();
    assert_eq!(nodes, ["192.0.2.2", "192.0.2.3"]);
}

#[test]
fn excluded_prefixes_are_cut_out_of_the_targets_but_stay_allowed() {
    let members = [member("b", 2, &["192.0.2.10/32"], &["10.64.0.0/24"])];
    let policy = Policy { excluded: vec![net("192.0.2.10/32"), net("10.64.0.64/26")], ..Policy::new("a") };
    let plan = plan(&members, &policy);
    assert_eq!(allowed(&plan, 2), ["10.64.0.0/24", "192.0.2.10/32"]);
    assert_eq!(texts(&plan.targets_ipv4), ["10.64.0.0/26", "10.64.0.128/25"]);
}

#[test]
fn what_a_missing_member_had_is_dropped_unless_another_or_this_node_has_it() {
    let members =
        [member("self", 1, &["192.0.2.1/32"], &["10.64.0.0/27"]), member("b", 2, &["192.0.2.2/32"], &[])];
    let guarded = ["10.64.0.0/26", "192.0.2.1/32", "192.0.2.2/32", "192.0.2.3/32", "fe80::1/128"];
    let policy = Policy { guarded: guarded.map(net).to_vec(), ..Policy::new("self") };
    let plan = plan(&members, &policy);
    assert_eq!(texts(&plan.targets_ipv4), ["10.64.0.32/27", "192.0.2.2/31"]);
    assert_eq!((allowed(&plan, 2), plan.targets_ipv6.len()), (vec!["192.0.2.2/32".to_owned()], 0));
}

#[test]
fn our_own_address_never_enters_the_mesh_even_inside_a_block_of_another() {
    let members = [member("a", 1, &["10.64.0.1/32"], &[]), member("b", 2, &[], &["10.64.0.0/30"])];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(allowed(&plan, 2), ["10.64.0.0/30"]);
    assert_eq!(texts(&plan.targets_ipv4), ["10.64.0.0/32", "10.64.0.2/31"]);
    assert!(matches!(&plan.problems[..], [Problem::ClaimOverlapsBlock { node, .. }] if node == "a"));
}

#[test]
fn a_long_list_of_nodes_is_cut() {
    let members: Vec<Member> =
        (1..=100).map(|i| member(&format!("n{i:03}"), i, &["10.0.0.1/32"], &[])).collect();
    let text = plan(&members, &Policy::new("a")).problems[0].to_string();
    assert!(text.contains("n008 and 92 more"), "{text}");
    assert!(!text.contains("n009"), "{text}");
}

#[test]
fn a_thousand_members_and_a_thousand_conflicts_stay_cheap() {
    let mut members: Vec<Member> = (0..1000u32)
        .map(|i| {
            let claims = [format!("192.168.{}.{}/32", i >> 8, i & 255), format!("fd00::{i:x}/128")];
            let blocks = [format!("10.{}.{}.0/24", i >> 8, i & 255), format!("fd01:0:0:{i:x}::/64")];
            let member = member(&format!("node-{i}"), i, &[], &[]);
            Member {
                claims: claims.iter().map(|text| net(text)).collect(),
                blocks: blocks.iter().map(|text| net(text)).collect(),
                ..member
            }
        })
        .collect();
    let quiet = plan(&members, &Policy::new("node-0"));
    assert_eq!(quiet.peers.len(), 999);
    assert_eq!(quiet.problems, []);
    assert!(quiet.peers.values().all(|peer| peer.allowed_ips.len() == 4));
    // Each member now also claims the prefixes of all others: a million overlaps, found without comparing pairs.
    for member in &mut members {
        member.claims.extend([net("10.0.0.0/8"), net("192.168.0.0/16"), net("192.168.0.1/32")]);
    }
    let noisy = plan(&members, &Policy::new("node-0"));
    assert!(noisy.peers.values().all(|peer| peer.allowed_ips.len() >= 3));
    assert!(noisy.problems.len() <= 2001, "{}", noisy.problems.len());
}

#[test]
fn holes_are_cut_out_of_a_prefix() {
    let holes = |texts: &[&str]| texts.iter().map(|text| net(text)).collect::<PrefixSet>();
    let everything = net("0.0.0.0/0");
    assert_eq!(prefixes::without(everything, &holes(&["::/0"])), [everything]);
    assert_eq!(prefixes::without(everything, &holes(&["255.255.255.255/32", "0.0.0.0/32"])).len(), 62);
    assert_eq!(texts(&prefixes::without(net("::/0"), &holes(&["8000::/1"]))), ["::/1"]);
    assert_eq!(prefixes::without(everything, &holes(&["0.0.0.0/0"])), []);
}

#[test]
fn what_only_discovery_knows_yields_to_all_others() {
    let discovered = |name: &str, number: u32, claims: &[&str]| Member {
        discovery: ByDiscovery { is_only_source: true, needs_preshared_key: false },
        since: None,
        ..member(name, number, claims, &[])
    };
    let members = [
        member("a", 1, &["192.0.2.1/32"], &[]),
        member("b", 2, &["192.0.2.2/32"], &["10.64.0.0/27"]),
        discovered("c", 3, &["192.0.2.2/32", "192.0.2.3/32", "10.64.0.5/32", "10.0.0.0/8"]),
        // It publishes the key of another, and that of this node.
        discovered("d", 2, &["192.0.2.4/32"]),
        discovered("e", 1, &["192.0.2.5/32"]),
    ];
    // The device has what it took from this member before the cluster knew its owner.
    let held = BTreeMap::from([(key(3), BTreeSet::from([net("192.0.2.2/32")]))]);
    let plan = plan(&members, &Policy { held, ..Policy::new("a") });
    assert_eq!(allowed(&plan, 2), ["10.64.0.0/27", "192.0.2.2/32"]);
    assert_eq!(plan.peers[&key(2)].members, ["b"]);
    assert!(allowed(&plan, 3).contains(&"192.0.2.3/32".to_owned()), "{:?}", allowed(&plan, 3));
    assert!(!allowed(&plan, 3).iter().any(|prefix| prefix == "192.0.2.2/32" || prefix == "10.64.0.5/32"));
    assert_eq!(plan.peers.len(), 2);
}

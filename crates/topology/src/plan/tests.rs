use std::collections::{BTreeMap, BTreeSet};

use fairlead_api::wireguard::PublicKey;
use ipnet::IpNet;
use proptest::prelude::*;

use super::*;

fn net(text: &str) -> IpNet {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn key(number: u32) -> PublicKey {
    let mut bytes = [7; 32];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    PublicKey(bytes)
}

fn member(name: &str, number: u32, claims: &[&str], blocks: &[&str]) -> Member {
    Member {
        public_key: Some(key(number)),
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
fn keepalive_and_preshared_key_of_the_member_are_taken_and_the_key_is_never_printed() {
    let mut phone = member("phone", 2, &["10.9.0.2/32"], &[]);
    phone.persistent_keepalive = Some(0);
    phone.preshared_key = Some([0xab; 32]);
    let shown = format!("{phone:?}");
    let plan = plan(&[phone], &Policy::new("a"));
    assert_eq!(plan.peers[&key(2)].keepalive, 0);
    assert_eq!(plan.peers[&key(2)].preshared_key, Some([0xab; 32]));
    assert!(!shown.contains("171") && !format!("{plan:?}").contains("171"), "{shown}");
}

#[test]
fn an_address_claimed_twice_is_left_out_on_both_and_disturbs_no_other_node() {
    let members = [
        member("a", 1, &["192.0.2.1/32"], &[]),
        member("home-1", 2, &["192.168.1.10/32", "fd00::2/128"], &["10.64.0.0/27"]),
        member("office-1", 3, &["192.168.1.10/32"], &["10.64.0.32/27"]),
        member("office-2", 4, &["192.168.1.11/32"], &[]),
    ];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(allowed(&plan, 2), ["10.64.0.0/27", "fd00::2/128"]);
    assert_eq!(allowed(&plan, 3), ["10.64.0.32/27"]);
    assert_eq!(allowed(&plan, 4), ["192.168.1.11/32"]);
    assert_eq!(
        texts(&plan.problems),
        [
            "192.168.1.10/32 is claimed by nodes home-1 and office-1: it is left out of the mesh on all of them; \
           give each node an address of its own, or name this one in routing.excludeCIDRs of the WireKubeMesh"
        ]
    );
    assert_eq!(plan.problems[0].nodes(), ["home-1", "office-1"]);
    assert!(plan.problems[0].is_solved_by(&[net("10.0.0.0/8"), net("192.168.1.0/24")]));
    assert!(!plan.problems[0].is_solved_by(&[net("192.168.1.11/32")]));
}

#[test]
fn a_node_that_claims_our_address_does_not_get_it() {
    let members =
        [member("a", 1, &["192.0.2.1/32"], &["10.64.0.0/27"]), member("impostor", 2, &["192.0.2.1/32"], &[])];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(allowed(&plan, 2), [""; 0]);
    assert_eq!(plan.targets_ipv4, []);
    assert_eq!(plan.problems[0].nodes(), ["a", "impostor"]);
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
fn a_wide_claim_yields_to_anything_inside_it_and_stands_alone() {
    let members = [
        member("a", 1, &["192.0.2.1/32"], &[]),
        member("wide", 2, &["192.0.0.0/16", "172.16.0.0/24"], &[]),
        member("c", 3, &["192.0.2.3/32"], &[]),
    ];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(allowed(&plan, 2), ["172.16.0.0/24"]);
    assert_eq!(allowed(&plan, 3), ["192.0.2.3/32"]);
    assert!(matches!(&plan.problems[..], [Problem::ClaimOverlapsClaim { node, .. }] if node == "wide"));
}

#[test]
fn two_wide_claims_that_overlap_are_both_left_out() {
    let members = [member("b", 2, &["172.16.0.0/16"], &[]), member("c", 3, &["172.16.4.0/24"], &[])];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(allowed(&plan, 2), [""; 0]);
    assert_eq!(allowed(&plan, 3), [""; 0]);
    assert_eq!(plan.problems.len(), 2);
}

#[test]
fn overlapping_blocks_are_reported_once_and_left_out_on_both() {
    let members =
        [member("b", 2, &[], &["10.64.0.0/26", "10.65.0.0/26"]), member("c", 3, &[], &["10.64.0.32/27"])];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(allowed(&plan, 2), ["10.65.0.0/26"]);
    assert_eq!(allowed(&plan, 3), [""; 0]);
    assert_eq!(
        texts(&plan.problems),
        [
            "address block 10.64.0.0/26 of node b overlaps 10.64.0.32/27 of node c: both are left out of the mesh; \
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
        assert!(matches!(&plan.problems[..], [Problem::Unusable { node, .. }] if node == "b"), "{claim}");
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

#[test]
fn members_with_one_key_are_both_left_out() {
    let members = [
        member("b", 2, &["192.0.2.2/32"], &["10.64.0.0/27"]),
        member("clone", 2, &["192.0.2.3/32"], &[]),
        member("impostor", 3, &["10.64.0.1/32"], &[]),
    ];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(plan.peers.keys().copied().collect::<Vec<_>>(), [key(3)]);
    assert_eq!(allowed(&plan, 3), [""; 0], "a copied key does not open a block to others");
    assert!(plan.problems.contains(&Problem::SharedKey {
        key: key(2),
        nodes: vec!["b".into(), "clone".into()],
        own: false
    }));
}

#[test]
fn a_copy_of_our_own_key_is_left_out_and_reported() {
    let members = [member("a", 1, &[], &[]), member("clone", 1, &[], &[]), member("c", 3, &[], &[])];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(plan.peers.keys().copied().collect::<Vec<_>>(), [key(3)]);
    assert!(plan.problems[0].to_string().contains("nodes a and clone have the same WireGuard public key"));
    assert!(plan.problems[0].to_string().contains("the others are left out"));
}

#[test]
fn stale_copies_of_a_member_and_members_without_key_are_left_out() {
    let mut keyless = member("keyless", 9, &["192.0.2.9/32"], &[]);
    keyless.public_key = Some(PublicKey([0; 32]));
    let members = [
        member("b", 2, &["192.0.2.2/32"], &[]),
        member("b", 4, &["192.0.2.2/32"], &[]),
        member("c", 3, &["192.0.2.3/32"], &[]),
        keyless,
    ];
    let plan = plan(&members, &Policy::new("a"));
    assert_eq!(plan.peers.keys().copied().collect::<Vec<_>>(), [key(3)]);
    let expected =
        [Problem::NoKey { node: "keyless".into() }, Problem::SharedName { node: "b".into(), members: 2 }];
    assert_eq!(plan.problems, expected);
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

/// Few addresses, so that everything collides with everything.
fn small_net() -> impl Strategy<Value = IpNet> {
    prop_oneof![
        8 => (0u8..4, 0u8..8, 22u8..=32).prop_map(|(a, b, len)| net(&format!("10.0.{a}.{b}/{len}"))),
        2 => (0u16..8, 120u8..=128).prop_map(|(a, len)| net(&format!("fd00::{a:x}/{len}"))),
        1 => (any::<u32>(), 0u8..=32).prop_map(|(a, len)| net(&format!("{}/{len}", std::net::Ipv4Addr::from_bits(a)))),
        1 => (any::<u128>(), 0u8..=128).prop_map(|(a, len)| net(&format!("{}/{len}", std::net::Ipv6Addr::from_bits(a)))),
    ]
}

prop_compose! {
    fn any_member()(
        name in 0u8..8,
        number in 0u32..12,
        claims in prop::collection::vec(small_net(), 0..4),
        blocks in prop::collection::vec(small_net(), 0..3),
    ) -> Member {
        Member { claims, blocks, ..member(&format!("n{name}"), number, &[], &[]) }
    }
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

/// The rules once more, pair by pair, as slowly as they read.
fn keeps(members: &[Member], owner: &Member, prefix: &IpNet, tier: Tier) -> bool {
    let prefix = prefix.trunc();
    let tier_of = |claim: &IpNet| match claim.prefix_len() == claim.max_prefix_len() {
        true => Tier::HostClaim,
        false => Tier::WideClaim,
    };
    prefixes::unusable(&prefix).is_none()
        && members.iter().filter(|other| other.name != owner.name).all(|other| {
            let blocks = other.blocks.iter().map(|block| (block, Tier::Block));
            let mut named = other.claims.iter().map(|claim| (claim, tier_of(claim))).chain(blocks);
            named.all(|(rival, rival_tier)| {
                prefixes::unusable(&rival.trunc()).is_some() || rival_tier < tier || !overlap(rival, &prefix)
            })
        })
}

proptest! {
    #[test]
    fn the_order_of_members_and_prefixes_does_not_matter(
        members in prop::collection::vec(any_member(), 0..12).prop_shuffle(),
        own in 0u8..8,
    ) {
        let policy = Policy::new(format!("n{own}"));
        let mut sorted = members.clone();
        sorted.sort_by_key(|m| (m.name.clone(), m.public_key, m.claims.clone(), m.blocks.clone()));
        for member in &mut sorted {
            member.claims.sort();
            member.blocks.reverse();
        }
        prop_assert_eq!(plan(&members, &policy), plan(&sorted, &policy));
    }

    #[test]
    fn no_address_belongs_to_two_peers_or_to_us(
        members in prop::collection::vec(any_member(), 0..12),
        own in 0u8..8,
    ) {
        let own = format!("n{own}");
        let plan = plan(&members, &Policy::new(own.clone()));
        let all: Vec<(&str, &IpNet)> =
            plan.peers.values().flat_map(|p| p.allowed_ips.iter().map(|ip| (p.name.as_str(), ip))).collect();
        for (i, (name, ip)) in all.iter().enumerate() {
            prop_assert!(prefixes::unusable(ip).is_none());
            for (other_name, other) in &all[i + 1..] {
                prop_assert!(!overlap(ip, other), "{name} {ip} and {other_name} {other}");
            }
            for mine in members.iter().filter(|m| m.name == own) {
                for block in &mine.blocks {
                    prop_assert!(prefixes::unusable(&block.trunc()).is_some() || !overlap(ip, block));
                }
            }
        }
        for member in members.iter().filter(|m| m.name == own) {
            prop_assert!(!plan.peers.contains_key(&member.public_key.unwrap()));
        }
        prop_assert!(plan.peers.values().all(|peer| peer.name != own));
    }

    #[test]
    fn allowed_prefixes_are_those_of_the_rules_read_pair_by_pair(
        members in prop::collection::vec(any_member(), 0..10),
        own in 0u8..8,
    ) {
        let plan = plan(&members, &Policy::new(format!("n{own}")));
        for (key, peer) in &plan.peers {
            let member = members.iter().find(|m| m.public_key == Some(*key) && m.name == peer.name).unwrap();
            let claims = member.claims.iter().filter(|claim| {
                let host = claim.prefix_len() == claim.max_prefix_len();
                keeps(&members, member, claim, if host { Tier::HostClaim } else { Tier::WideClaim })
            });
            let blocks = member.blocks.iter().filter(|block| keeps(&members, member, block, Tier::Block));
            let expected = prefixes::outermost(claims.chain(blocks).map(IpNet::trunc).collect());
            prop_assert_eq!(&peer.allowed_ips, &expected, "{}", peer.name);
        }
    }

    #[test]
    fn removing_a_member_without_conflicts_touches_only_its_peer(
        members in prop::collection::vec(any_member(), 1..10),
    ) {
        let mut seen = BTreeSet::new();
        let members: Vec<Member> =
            members.into_iter().filter(|m| seen.insert(m.name.clone()) && seen.insert(m.public_key.unwrap().to_string())).collect();
        let policy = Policy::new("elsewhere");
        let before = plan(&members, &policy);
        for (position, member) in members.iter().enumerate() {
            if before.problems.iter().any(|problem| problem.nodes().contains(&member.name.as_str())) {
                continue;
            }
            let mut rest = members.clone();
            rest.remove(position);
            let after = plan(&rest, &policy);
            let mut expected: BTreeMap<_, _> = before.peers.clone();
            expected.remove(&member.public_key.unwrap());
            prop_assert_eq!(after.peers, expected);
            prop_assert_eq!(&after.problems, &before.problems);
        }
    }

    #[test]
    fn targets_cover_exactly_the_allowed_addresses_that_are_not_excluded(
        members in prop::collection::vec(any_member(), 0..8),
        excluded in prop::collection::vec(small_net(), 0..4),
        probes in prop::collection::vec((0u8..4, any::<u8>()), 0..40),
    ) {
        let policy = Policy { excluded: excluded.clone(), ..Policy::new("n0") };
        let plan = plan(&members, &policy);
        for (a, b) in probes {
            let probe: IpNet = net(&format!("10.0.{a}.{b}/32"));
            let wanted = plan.peers.values().any(|p| p.allowed_ips.iter().any(|ip| ip.contains(&probe)))
                && !excluded.iter().any(|out| out.contains(&probe))
                && !members.iter().any(|m| m.name == "n0" && m.claims.contains(&probe));
            let targeted = plan.targets_ipv4.iter().any(|t| IpNet::V4(*t).contains(&probe));
            prop_assert_eq!(wanted, targeted, "{}", probe);
        }
        for pair in plan.targets_ipv4.windows(2) {
            prop_assert!(pair[0].broadcast() < pair[1].network());
            prop_assert!(!pair[0].is_sibling(&pair[1]), "{} {}", pair[0], pair[1]);
        }
        for pair in plan.targets_ipv6.windows(2) {
            prop_assert!(pair[0].broadcast() < pair[1].network());
            prop_assert!(!pair[0].is_sibling(&pair[1]), "{} {}", pair[0], pair[1]);
        }
    }
}

#[test]
fn the_whole_address_space_splits_and_subtracts() {
    let everything = [net("0.0.0.0/0"), net("::/0")];
    let (v4, v6) = prefixes::cover_without(everything.iter(), &[]);
    assert_eq!((texts(&v4), texts(&v6)), (vec!["0.0.0.0/0".to_owned()], vec!["::/0".to_owned()]));
    let holes = [net("255.255.255.255/32"), net("0.0.0.0/32"), net("8000::/1")];
    let (v4, v6) = prefixes::cover_without(everything.iter(), &holes);
    assert_eq!(v4.len(), 62);
    assert_eq!(texts(&v6), ["::/1"]);
    let (v4, v6) = prefixes::cover_without(everything.iter(), &everything);
    assert_eq!((v4, v6), (vec![], vec![]));
}

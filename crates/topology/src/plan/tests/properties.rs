//! Plans of random members, compared with the rules read one by one.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::member::{ByDiscovery, MemberAddresses, MemberRecord, Source};
use crate::merge::merge;

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
        number in prop::option::of(0u32..6),
        created in prop::option::of(0i64..4),
        claims in prop::collection::vec(small_net(), 0..4),
        blocks in prop::collection::vec(small_net(), 0..3),
        pod_networks in prop::collection::vec(small_net(), 0..3),
        addresses in prop::option::weighted(0.3, prop::collection::vec(small_net().prop_map(|net| net.addr()), 0..3)),
        is_unconfirmed: bool,
    ) -> Member {
        Member {
            public_key: number.map(key),
            since: created.map(|created| Since { created, uid: String::new() }),
            claims: claims.into_iter().chain(addresses.iter().flatten().copied().map(IpNet::from)).collect(),
            blocks,
            pod_networks,
            addresses: MemberAddresses { node: addresses, is_unconfirmed, ..MemberAddresses::default() },
            ..member(&format!("n{name}"), 0, &[], &[])
        }
    }
}

prop_compose! {
    /// Members with unique names.
    fn any_members(most: usize)(members in prop::collection::vec(any_member(), 0..most)) -> Vec<Member> {
        let mut seen = BTreeSet::new();
        members.into_iter().filter(|member| seen.insert(member.name.clone())).collect()
    }
}

prop_compose! {
    /// Prefixes that the device has at some of the keys.
    fn any_held()(held in prop::collection::vec((0u32..6, small_net()), 0..6)) -> BTreeMap<PublicKey, BTreeSet<IpNet>> {
        let mut by_key: BTreeMap<PublicKey, BTreeSet<IpNet>> = BTreeMap::new();
        for (number, prefix) in held {
            by_key.entry(key(number)).or_default().insert(prefix.trunc());
        }
        by_key
    }
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

prop_compose! {
    fn any_grants()(grants in prop::collection::vec((0u8..8, small_net()), 0..4)) -> BTreeMap<String, Vec<IpNet>> {
        let mut by_name: BTreeMap<String, Vec<IpNet>> = BTreeMap::new();
        for (name, prefix) in grants {
            by_name.entry(format!("n{name}")).or_default().push(prefix.trunc());
        }
        by_name
    }
}

/// Strength of a claim: the tier, whether the device has it, and the older member.
type Strength = (u8, bool, std::cmp::Reverse<(bool, Option<Since>, String)>);

/// Tiers of blocks and of networks of pods: the first field of a [`Strength`].
const BLOCK: u8 = 10;
const PODS: u8 = 8;

/// One thing a member names, and how strongly it holds it: the greater wins.
struct Named<'a> {
    member: &'a Member,
    prefix: IpNet,
    is_block: bool,
    strength: Strength,
}

/// Prefixes of all members that count, as slowly as it reads.
fn named<'a>(members: &'a [Member], policy: &Policy) -> Vec<Named<'a>> {
    let mut all = Vec::new();
    for member in members {
        let own = member.name == policy.own;
        let joined = (member.since.is_none(), member.since.clone(), member.name.clone());
        let joined = std::cmp::Reverse(if own { (false, None, String::new()) } else { joined });
        for block in &member.blocks {
            let strength = (BLOCK, false, joined.clone());
            all.push(Named { member, prefix: block.trunc(), is_block: true, strength });
        }
        let is_held = |prefix: &IpNet| {
            own || member
                .public_key
                .is_some_and(|key| policy.held.get(&key).is_some_and(|it| it.contains(prefix)))
        };
        for network in member.pod_networks.iter().map(IpNet::trunc).filter(|_| policy.includes_pod_networks) {
            let is_granted = policy.is_granted(member, &network);
            let parts = match network.prefix_len() {
                8.. => vec![network],
                _ if is_granted => fairlead_address::usable_parts(network),
                _ => Vec::new(),
            };
            for prefix in parts {
                let strength = (PODS, is_held(&prefix), joined.clone());
                all.push(Named { member, prefix, is_block: false, strength });
            }
        }
        let claims = member.claims.iter().map(IpNet::trunc).filter(|_| member.public_key.is_some());
        for claim in claims {
            let granted = policy.is_granted(member, &claim);
            let of_node = member.addresses.node.as_ref().map(|addresses| addresses.contains(&claim.addr()));
            let is_host = prefixes::is_host(&claim);
            let is_unconfirmed = of_node.is_none() && member.addresses.is_unconfirmed && !is_held(&claim);
            let is_refused =
                claim.prefix_len() < 8 || (is_host && (of_node == Some(false) || is_unconfirmed));
            if is_refused && !granted && !own {
                continue;
            }
            let is_wide = claim.prefix_len() < 8 && granted;
            let parts = if is_wide { fairlead_address::usable_parts(claim) } else { vec![claim] };
            for prefix in parts {
                let held = member
                    .public_key
                    .is_some_and(|key| policy.held.get(&key).is_some_and(|it| it.contains(&prefix)));
                let kind = match (is_host, granted, of_node) {
                    (true, true, _) => 9,
                    (true, ..) if own => 9,
                    (true, false, Some(true)) => 7,
                    (true, false, _) => 6,
                    (false, true, _) => 3,
                    (false, false, _) => 1,
                };
                all.push(Named {
                    member,
                    prefix,
                    is_block: false,
                    strength: (kind, held || own, joined.clone()),
                });
            }
        }
    }
    all.retain(|it| prefixes::unusable(&it.prefix).is_none());
    all
}

/// Member that may get a packet to this address, by the rules read one by one.
fn owner<'a>(named: &[Named<'a>], address: &IpNet) -> Option<&'a Member> {
    let others = |of: &Named<'_>| {
        let name = of.member.name.clone();
        named.iter().filter(move |other| other.member.name != name)
    };
    let is_lost = |it: &&Named<'_>| match it.is_block {
        true => others(it).any(|other| other.is_block && overlap(&other.prefix, &it.prefix)),
        false => others(it).any(|other| other.prefix.contains(&it.prefix) && other.strength > it.strength),
    };
    let covering = named.iter().filter(|it| it.prefix.contains(address));
    let (lost, kept): (Vec<&Named<'_>>, Vec<&Named<'_>>) = covering.partition(is_lost);
    // A block that two members have goes to neither, and to no range around it.
    let lost_block = lost.iter().filter(|it| it.is_block).map(|it| it.prefix.prefix_len()).max();
    let longest = kept.into_iter().max_by_key(|it| it.prefix.prefix_len())?;
    lost_block.is_none_or(|lost| lost < longest.prefix.prefix_len()).then_some(longest.member)
}

/// Blocks that overlap no block of another member.
fn kept_blocks<'a>(named: &'a [Named<'a>]) -> impl Iterator<Item = &'a Named<'a>> {
    named.iter().filter(|it| it.is_block).filter(move |block| {
        let mut others =
            named.iter().filter(|other| other.is_block && other.member.name != block.member.name);
        others.all(|other| !overlap(&other.prefix, &block.prefix))
    })
}

fn peer_of<'a>(plan: &'a Plan, address: &IpNet) -> Option<&'a Arc<PeerPlan>> {
    let allowed =
        plan.peers.values().flat_map(|peer| peer.allowed_ips.iter().map(move |prefix| (prefix, peer)));
    let covering = allowed.filter(|(prefix, _)| prefix.contains(address));
    covering.max_by_key(|(prefix, _)| prefix.prefix_len()).map(|(_, peer)| peer)
}

fn probes() -> impl Strategy<Value = Vec<IpNet>> {
    prop::collection::vec((0u8..4, 0u8..16).prop_map(|(a, b)| net(&format!("10.0.{a}.{b}/32"))), 0..40)
}

proptest! {
    #[test]
    fn the_order_of_members_and_prefixes_does_not_matter(
        members in any_members(12).prop_shuffle(),
        held in any_held(),
        grants in any_grants(),
        own in 0u8..8,
    ) {
        let policy = Policy { held, grants, includes_pod_networks: true, ..Policy::new(format!("n{own}")) };
        let mut sorted = members.clone();
        sorted.sort();
        for member in &mut sorted {
            member.claims.sort();
            member.blocks.reverse();
            member.pod_networks.reverse();
        }
        prop_assert_eq!(plan(&members, &policy), plan(&sorted, &policy));
    }

    /// Keys of others, their addresses, their names: a service that lies, or who has the secret of the cluster, can tell anything.
    #[test]
    fn whatever_discovery_says_what_belongs_to_members_of_the_cluster_goes_where_it_went(
        cluster in any_members(8),
        lies in prop::collection::vec(any_member(), 0..8),
        held in any_held(),
        probes in probes(),
    ) {
        let record = |source, member| MemberRecord { source, age: Duration::ZERO, member };
        let known = cluster.into_iter().map(|member| record(Source::Kubernetes, member));
        let known: Vec<MemberRecord> = known.collect();
        let lies = lies.into_iter().filter(|member| member.name != "n0").map(|member| {
            let told = Member { discovery: ByDiscovery { is_only_source: true, needs_preshared_key: false }, blocks: Vec::new(), since: None, ..member };
            record(Source::Discovery, told)
        });
        let policy = Policy { held, includes_pod_networks: true, ..Policy::new("n0") };
        let honest = plan(&merge(known.clone()), &policy);
        let lied = plan(&merge(known.into_iter().chain(lies).collect()), &policy);
        let is_target = |plan: &Plan, address: &IpNet| match address {
            IpNet::V4(address) => plan.targets_ipv4.iter().any(|target| target.contains(address)),
            IpNet::V6(address) => plan.targets_ipv6.iter().any(|target| target.contains(address)),
        };
        for address in probes.iter().filter(|address| is_target(&honest, address)) {
            prop_assert!(is_target(&lied, address), "{} would leave in clear text", address);
            let [before, after] = [&honest, &lied].map(|plan| peer_of(plan, address).map(|peer| &peer.members));
            prop_assert_eq!(before, after, "{}", address);
        }
    }

    #[test]
    fn no_two_peers_have_one_prefix_and_none_has_ours(
        members in any_members(12),
        held in any_held(),
        own in 0u8..8,
    ) {
        let own = format!("n{own}");
        let plan = plan(&members, &Policy { held, ..Policy::new(own.clone()) });
        let mut seen = BTreeSet::new();
        let ours = members.iter().find(|member| member.name == own);
        for prefix in plan.peers.values().flat_map(|peer| &peer.allowed_ips) {
            prop_assert!(prefixes::unusable(prefix).is_none());
            prop_assert!(seen.insert(*prefix), "{} twice", prefix);
            for block in ours.iter().flat_map(|ours| &ours.blocks) {
                prop_assert!(prefixes::unusable(&block.trunc()).is_some() || !overlap(prefix, block));
            }
        }
        let own_key = ours.and_then(|ours| ours.public_key);
        prop_assert!(own_key.is_none_or(|key| !plan.peers.contains_key(&key)));
        prop_assert!(plan.peers.values().all(|peer| !peer.members.contains(&own)));
    }

    #[test]
    fn every_address_goes_to_the_key_of_the_member_that_the_rules_name(
        members in any_members(10),
        held in any_held(),
        grants in any_grants(),
        own in 0u8..8,
        probes in probes(),
    ) {
        let policy = Policy { held, grants, includes_pod_networks: true, ..Policy::new(format!("n{own}")) };
        let plan = plan(&members, &policy);
        let named = named(&members, &policy);
        let own_key = members.iter().find(|member| member.name == policy.own).and_then(|own| own.public_key);
        for probe in probes {
            let owner = owner(&named, &probe).filter(|owner| owner.name != policy.own);
            let key = owner.and_then(|owner| owner.public_key).filter(|key| Some(*key) != own_key);
            let expected = key.map(|key| &plan.peers[&key]);
            prop_assert_eq!(peer_of(&plan, &probe), expected, "{}", probe);
        }
    }

    /// Packets to what belongs to others enter the mesh, or are dropped there; they never take another way.
    #[test]
    fn targets_are_exactly_what_other_members_have(
        members in any_members(8),
        excluded in prop::collection::vec(small_net(), 0..4),
        grants in any_grants(),
        probes in probes(),
    ) {
        let policy = Policy { excluded: excluded.clone(), grants, includes_pod_networks: true, ..Policy::new("n0") };
        let plan = plan(&members, &policy);
        let named = named(&members, &policy);
        let own = members.iter().find(|member| member.name == policy.own);
        for probe in probes {
            let foreign = named.iter().any(|it| it.member.name != policy.own && it.prefix.contains(&probe));
            let own_block = kept_blocks(&named)
                .any(|block| block.member.name == policy.own && block.prefix.contains(&probe));
            let own_address = own.is_some_and(|own| own.public_key.is_some() && own.claims.contains(&probe));
            let covering: Vec<_> = named.iter().filter(|it| it.prefix.contains(&probe)).collect();
            let is_own = |it: &Named<'_>| it.member.name == policy.own;
            let own_pods = covering.iter().any(|it| is_own(it) && it.strength.0 == PODS)
                && !covering.iter().any(|it| !is_own(it) && it.strength.0 > PODS);
            let out = excluded.iter().any(|out| out.contains(&probe)) || own_block || own_address || own_pods;
            let targeted = plan.targets_ipv4.iter().any(|target| IpNet::V4(*target).contains(&probe));
            prop_assert_eq!(foreign && !out, targeted, "{}", probe);
        }
        for pair in plan.targets_ipv4.windows(2) {
            prop_assert!(pair[0].broadcast() < pair[1].network());
            prop_assert!(!pair[0].is_sibling(&pair[1]), "{} {}", pair[0], pair[1]);
        }
    }

    /// Packets to the blocks of all others go to the same keys, whatever a node that joined later publishes.
    #[test]
    fn a_thief_takes_no_block_from_another(
        members in any_members(8),
        thief in any_member(),
        probes in probes(),
    ) {
        let policy = Policy::new("elsewhere");
        let before = plan(&members, &policy);
        let thief = Member { name: "thief".to_owned(), blocks: Vec::new(), ..thief };
        let after = plan(&[members.clone(), vec![thief]].concat(), &policy);
        for probe in probes {
            let named = named(&members, &policy);
            let in_block = kept_blocks(&named).any(|block| block.prefix.contains(&probe));
            if in_block {
                let key_of = |plan: &Plan| {
                    let peer = peer_of(plan, &probe).cloned();
                    plan.peers.iter().find(|(_, other)| Some(*other) == peer.as_ref()).map(|(key, _)| *key)
                };
                prop_assert_eq!(key_of(&before), key_of(&after), "{}", probe);
            }
        }
    }

    #[test]
    fn removing_a_member_without_conflicts_touches_only_its_peer(members in any_members(10)) {
        let mut keys = BTreeSet::new();
        let members: Vec<Member> =
            members.into_iter().filter(|member| member.public_key.is_some_and(|key| keys.insert(key))).collect();
        let policy = Policy::new("elsewhere");
        let before = plan(&members, &policy);
        for (position, member) in members.iter().enumerate() {
            let named = named(&members, &policy);
            let alone = named.iter().filter(|it| it.member.name == member.name).all(|it| {
                named.iter().all(|other| other.member.name == member.name || !overlap(&other.prefix, &it.prefix))
            });
            if !alone || before.problems.iter().any(|problem| problem.nodes().contains(&member.name.as_str())) {
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
}

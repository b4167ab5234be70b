use ipnet::IpNet;
use proptest::prelude::*;

use super::*;
use crate::member::{ByDiscovery, External};
use crate::plan::{Plan, plan};
use crate::site::{InternalAddress, OwnAddress};

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn key(number: u8) -> PublicKey {
    PublicKey([number; 32])
}

fn block(number: u8) -> IpNet {
    net(&format!("10.64.{number}.0/24"))
}

/// A node whose key, block and address follow from its number. Nodes of one location are on one subnet.
fn node(number: u8, location: u8) -> Member {
    let address = net(&format!("192.168.{location}.{number}/32")).addr();
    let internal = vec![InternalAddress { address, length: None }];
    Member {
        public_key: Some(key(number)),
        claims: vec![IpNet::from(address)],
        blocks: vec![block(number)],
        site: Some(Site { location: format!("l{location}"), internal, ..Site::default() }),
        ..Member::named(format!("n{number:02}"))
    }
}

fn alone(member: Member) -> Member {
    let site = member.site.map(|site| Site { internal: Vec::new(), ..site });
    Member { site, ..member }
}

fn leader(mut member: Member, is_leader: bool, is_public: bool) -> Member {
    member.site = member.site.map(|site| Site { is_leader, is_public, ..site });
    member
}

fn policy(member: &Member, down: &[&str]) -> Policy {
    let own = member.site.iter().flat_map(|site| &site.internal);
    let addresses =
        own.map(|it| OwnAddress { link: 7, prefix: IpNet::new(it.address, 24).unwrap() }).collect();
    let down = down.iter().map(|name| (*name).to_owned()).collect();
    Policy { granularity: Granularity::Location { addresses, down }, ..Policy::new(&member.name) }
}

/// The member that a node sends what is for a block: whose key has the longest prefix.
fn next(plan: &Plan, prefix: IpNet) -> Option<String> {
    let having = plan.peers.values().flat_map(|peer| peer.allowed_ips.iter().map(move |it| (it, peer)));
    let having = having.filter(|(it, _)| it.contains(&prefix));
    having.max_by_key(|(it, _)| it.prefix_len()).map(|(_, peer)| peer.members[0].clone())
}

/// The nodes that a packet passes, from one to another; each has its own opinion of which gateways are down.
fn way(members: &[Member], down: &BTreeMap<String, Vec<&str>>, from: &str, to: u8) -> Vec<String> {
    let mut at = from.to_owned();
    let mut passed = Vec::new();
    while at != format!("n{to:02}") {
        assert!(passed.len() < 4, "a loop: {passed:?}");
        let own = members.iter().find(|member| member.name == at).unwrap();
        let down = down.get(&at).map(Vec::as_slice).unwrap_or_default();
        let planned = plan(members, &policy(own, down));
        at = next(&planned, block(to)).unwrap_or_else(|| panic!("{at} drops what is for n{to}"));
        passed.push(at.clone());
    }
    passed
}

fn three_by_five() -> Vec<Member> {
    (1..=15).map(|number| node(number, (number - 1) / 5)).collect()
}

#[test]
fn gateways_are_ordered_as_administrators_want_then_by_public_address_then_by_name() {
    let members = [
        node(1, 0),
        leader(node(2, 0), false, true),
        leader(node(3, 0), true, false),
        leader(node(4, 0), true, true),
        alone(leader(node(5, 0), true, true)),
        Member { public_key: None, ..leader(node(6, 0), true, true) },
        Member {
            discovery: ByDiscovery { is_only_source: true, needs_preshared_key: false },
            ..leader(node(7, 0), true, true)
        },
        node(9, 1),
        node(8, 1),
    ];
    let expected = [
        ("l0".to_owned(), ["n04", "n03"].map(str::to_owned).to_vec()),
        ("l1".to_owned(), ["n08", "n09"].map(str::to_owned).to_vec()),
    ];
    assert_eq!(gateways(&members), expected.into());
    let leaders: Vec<Member> = (1..=6).map(|number| leader(node(number, 0), number < 6, false)).collect();
    assert_eq!(
        gateways(&leaders)["l0"],
        ["n01", "n02", "n03", "n04"],
        "as many as administrators name, up to four"
    );
    let public = [node(1, 0), leader(node(2, 0), false, true), node(3, 0)];
    assert_eq!(gateways(&public)["l0"], ["n02", "n01"]);
}

#[test]
fn nodes_have_tunnels_in_their_location_and_gateways_with_gateways() {
    let members = three_by_five();
    let peers = |own: usize| -> Vec<u8> {
        plan(&members, &policy(&members[own], &[])).peers.keys().map(|key| key.0[0]).collect()
    };
    assert_eq!(peers(0), [2, 3, 4, 5, 6, 7, 11, 12]);
    assert_eq!(peers(3), [1, 2, 3, 5]);
    let is_gateway = |own: &Member| plan(&members, &policy(own, &["n01"])).is_gateway;
    let gateways: Vec<&str> =
        members.iter().filter(|own| is_gateway(own)).map(|own| own.name.as_str()).collect();
    assert_eq!(gateways, ["n01", "n02", "n06", "n07", "n11", "n12"]);
    let own_location = [node(1, 0), node(2, 0), alone(node(3, 0))];
    assert!(plan(&own_location, &policy(&own_location[2], &[])).is_gateway);
    assert!(plan(&members, &Policy::new("n04")).is_gateway, "without locations each node has all tunnels");
}

#[test]
fn packets_go_through_the_gateways_in_use_and_are_accepted_from_all() {
    let members = three_by_five();
    assert_eq!(way(&members, &BTreeMap::new(), "n04", 10), ["n01", "n06", "n10"]);
    assert_eq!(way(&members, &BTreeMap::new(), "n04", 7), ["n01", "n07"]);
    assert_eq!(way(&members, &BTreeMap::new(), "n04", 5), ["n05"]);
    let member = plan(&members, &policy(&members[3], &[]));
    assert!(member.routes.iter().any(|it| it.destination == block(10) && it.node == "n01"), "over the LAN");
    assert!(member.peers[&key(2)].accepted_ips.contains(&block(10)));
    assert_eq!(member.peers[&key(2)].allowed_ips.len(), 2, "its own");
    assert_eq!(member.peers[&key(5)].accepted_ips, []);
    let gateway = plan(&members, &policy(&members[0], &["n06"]));
    assert!(gateway.peers[&key(7)].allowed_ips.contains(&block(10)));
    assert!(gateway.peers[&key(6)].accepted_ips.contains(&block(10)));
    assert!(!gateway.peers[&key(6)].accepted_ips.contains(&block(7)), "another gateway speaks for itself");
    assert!(gateway.routes.iter().all(|it| it.destination != block(10)));
    let all_down = plan(&members, &policy(&members[0], &["n06", "n07"]));
    assert!(all_down.peers[&key(6)].allowed_ips.contains(&block(10)), "one may work in spite of all");
}

#[test]
fn a_node_without_an_internal_address_has_its_own_tunnels() {
    let mut members = three_by_five();
    members.push(alone(node(20, 0)));
    assert_eq!(way(&members, &BTreeMap::new(), "n20", 10), ["n06", "n10"]);
    assert_eq!(way(&members, &BTreeMap::new(), "n10", 20), ["n06", "n20"]);
    assert_eq!(way(&members, &BTreeMap::new(), "n05", 20), ["n01", "n20"]);
}

#[test]
fn a_node_that_copies_a_key_takes_nothing_from_its_owner() {
    let mut members = three_by_five();
    // It is older than n1, and in another location.
    members[9].public_key = Some(key(1));
    for (own, expected) in [(3, "n01"), (5, "n01"), (10, "n01")] {
        let planned = plan(&members, &policy(&members[own], &[]));
        let holder = planned.peers.iter().find(|(_, it)| it.allowed_ips.contains(&block(1)));
        assert_eq!(holder.map(|(found, _)| *found), Some(key(1)), "n{:02}: {expected}", own + 1);
    }
}

#[test]
fn what_an_external_member_behind_an_entry_node_has_goes_through_the_gateway_too() {
    let mut members = three_by_five();
    let laptop = Member {
        public_key: Some(key(99)),
        claims: vec![net("10.9.0.1/32")],
        external: Some(External { entry_nodes: vec!["n10".to_owned()], ..External::default() }),
        ..Member::of_peer("laptop")
    };
    members.push(laptop);
    let to = |own: usize| next(&plan(&members, &policy(&members[own], &[])), net("10.9.0.1/32"));
    assert_eq!(to(3).as_deref(), Some("n01"));
    assert_eq!(to(0).as_deref(), Some("n06"));
    assert_eq!(to(5).as_deref(), Some("n10"));
    assert_eq!(to(9).as_deref(), Some("peer/laptop"));
    assert!(
        plan(&members, &policy(&members[0], &[])).peers[&key(7)].accepted_ips.contains(&net("10.9.0.1/32"))
    );
}

prop_compose! {
    fn any_members()(
        nodes in prop::collection::vec((0u8..3, any::<bool>(), any::<bool>(), 0u8..8), 2..12),
    ) -> Vec<Member> {
        let node = |(number, (location, is_leader, is_public, kind)): (u8, (u8, bool, bool, u8))| {
            let node = leader(node(number, location), is_leader, is_public);
            match kind {
                0 => alone(node),
                1 => Member { site: None, ..node },
                _ => node,
            }
        };
        (1..).zip(nodes).map(node).collect()
    }
}

proptest! {
    /// Packets arrive after three steps at most, whatever each node thinks of gateways, and the next node accepts them
    /// from this one.
    #[test]
    fn no_packet_is_dropped_or_goes_around(
        members in any_members(),
        down in prop::collection::vec(prop::collection::vec(1u8..12, 0..4), 12),
    ) {
        let names: Vec<String> = (0..12).map(|number| format!("n{number:02}")).collect();
        let down: BTreeMap<String, Vec<&str>> = members.iter().zip(&down).map(|(member, down)| {
            (member.name.clone(), down.iter().map(|number| names[usize::from(*number)].as_str()).collect())
        }).collect();
        let plans: BTreeMap<&str, Plan> = members.iter().map(|own| {
            (own.name.as_str(), plan(&members, &policy(own, &down[&own.name])))
        }).collect();
        for from in &members {
            for to in members.iter().filter(|to| to.name != from.name) {
                let number: u8 = to.name[1..].parse().unwrap();
                let passed = way(&members, &down, &from.name, number);
                prop_assert!(passed.len() <= 3, "{passed:?}");
                let source = from.blocks[0];
                let mut last = from.name.as_str();
                for at in &passed {
                    let key = members.iter().find(|member| member.name == last).unwrap().public_key.unwrap();
                    let peer = plans[at.as_str()].peers.get(&key);
                    let Some(peer) = peer else { return Err(TestCaseError::fail(format!("{at} has no peer {last}"))) };
                    let accepts = peer.allowed_ips.iter().chain(&peer.accepted_ips).any(|it| it.contains(&source));
                    prop_assert!(accepts, "{at} refuses {source} from {last} on the way {passed:?}");
                    last = at;
                }
            }
        }
    }

    #[test]
    fn all_nodes_know_the_same_gateways_in_the_same_order(members in any_members().prop_shuffle()) {
        let mut sorted = members.clone();
        sorted.sort();
        prop_assert_eq!(gateways(&members), gateways(&sorted));
        for own in &members {
            prop_assert_eq!(plan(&members, &policy(own, &[])), plan(&sorted, &policy(own, &[])));
        }
    }

    /// Each prefix has one peer, and none gets lost: those of `full`, at other keys.
    #[test]
    fn the_peers_together_have_what_they_have_without_gateways(members in any_members(), own in 0usize..12) {
        let own = &members[own.min(members.len() - 1)];
        let prefixes = |plan: &Plan| {
            let mut all: Vec<IpNet> = plan.peers.values().flat_map(|it| it.allowed_ips.clone()).collect();
            all.sort_unstable();
            all
        };
        let (full, with) = (plan(&members, &Policy::new(&own.name)), plan(&members, &policy(own, &[])));
        prop_assert_eq!(prefixes(&full), prefixes(&with));
        prop_assert_eq!((full.targets_ipv4, full.problems), (with.targets_ipv4, with.problems));
        for peer in with.peers.values() {
            prop_assert!(peer.accepted_ips.iter().all(|it| !peer.allowed_ips.contains(it)));
        }
    }
}

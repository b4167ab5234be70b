use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::plan::{Plan, plan};

fn key(byte: u8) -> PublicKey {
    PublicKey([byte; 32])
}

fn member(number: u8, next: Option<u8>) -> Member {
    Member {
        public_key: Some(key(number)),
        next_key: next.map(key),
        blocks: vec![format!("10.0.{number}.0/24").parse().unwrap()],
        ..Member::named(format!("n{number}"))
    }
}

fn planned(members: &[Member], completed: &[u8]) -> Plan {
    let completed = completed.iter().copied().map(key).collect();
    plan(members, &Policy { completed, ..Policy::new("n1") })
}

fn prefixes(plan: &Plan, byte: u8) -> Vec<String> {
    plan.peers.get(&key(byte)).into_iter().flat_map(|it| &it.allowed_ips).map(ToString::to_string).collect()
}

#[test]
fn an_announced_key_is_prepared_and_followed_after_its_first_handshake() {
    let members = [member(1, None), member(2, Some(20)), member(3, None)];
    let before = planned(&members, &[]);
    assert_eq!((prefixes(&before, 2), prefixes(&before, 20)), (vec!["10.0.2.0/24".to_owned()], vec![]));
    assert_eq!(before.next_keys[&key(20)].current, key(2));
    assert_eq!(before.next_keys[&key(20)].allowed_ips, before.peers[&key(2)].allowed_ips);
    let after = planned(&members, &[20]);
    assert_eq!((prefixes(&after, 2), prefixes(&after, 20)), (vec![], vec!["10.0.2.0/24".to_owned()]));
    assert!(!after.peers.contains_key(&key(2)) && after.next_keys.is_empty());
    // What is published later changes nothing.
    let published = planned(
        &[member(1, None), Member { public_key: Some(key(20)), ..member(2, None) }, member(3, None)],
        &[20],
    );
    assert_eq!(published, after);
}

#[test]
fn a_member_that_announces_the_key_of_another_takes_nothing() {
    let honest = [member(1, None), member(2, None), member(3, None)];
    let hostile = [member(1, None), member(2, None), member(3, Some(2))];
    // Key 2 completes handshakes all the time.
    let plan = planned(&hostile, &[2]);
    assert_eq!(plan.peers, planned(&honest, &[]).peers);
    assert!(plan.next_keys.is_empty());
    let reasons: Vec<&str> = plan.problems.iter().map(Problem::reason).collect();
    assert_eq!(reasons, ["NextKeyTaken"]);
    assert!(plan.problems[0].to_string().contains("n3") && plan.problems[0].to_string().contains("n2"));
}

#[test]
fn a_copied_announcement_holds_its_owner_up_in_nothing() {
    let members = [member(1, None), member(2, Some(20)), member(3, Some(20))];
    let before = planned(&members, &[]);
    assert_eq!(before.next_keys.len(), 1);
    assert_eq!((prefixes(&before, 2).len(), prefixes(&before, 3).len()), (1, 1));
    let after = planned(&members, &[20]);
    assert!(prefixes(&after, 20).contains(&"10.0.2.0/24".to_owned()), "the owner is followed");
}

#[test]
fn own_and_useless_keys_are_no_peers() {
    let own = planned(&[member(1, Some(10)), member(2, Some(2)), member(3, Some(0))], &[10]);
    assert!(own.next_keys.is_empty() && own.problems.is_empty());
    assert_eq!(own.peers.keys().copied().collect::<Vec<_>>(), [key(2), key(3)]);
    let keyless = Member { public_key: None, ..member(2, Some(20)) };
    assert!(planned(&[member(1, None), keyless], &[]).next_keys.is_empty());
}

proptest! {
    #[test]
    fn no_announcement_changes_what_a_member_without_one_is_sent(
        next in prop::collection::vec(prop::option::of(0..30_u8), 2..8),
        completed in prop::collection::btree_set(0..30_u8, 0..8),
        honest in prop::collection::btree_set(0..8_usize, 0..4),
    ) {
        let members: Vec<Member> = (1..).zip(&next).map(|(number, next)| {
            member(number, next.filter(|_| !honest.contains(&usize::from(number))))
        }).collect();
        let completed: Vec<u8> = completed.into_iter().collect();
        let plan = planned(&members, &completed);
        let all: BTreeSet<PublicKey> = plan.peers.keys().chain(plan.next_keys.keys()).copied().collect();
        prop_assert_eq!(all.len(), plan.peers.len() + plan.next_keys.len());
        for quiet in members.iter().filter(|member| member.name != "n1" && member.next_key.is_none()) {
            let key = quiet.public_key.unwrap();
            let peer = &plan.peers[&key];
            prop_assert_eq!(&peer.members, &vec![quiet.name.clone()]);
            prop_assert_eq!(&peer.allowed_ips, &quiet.blocks);
        }
        // Each block has one peer.
        for member in members.iter().filter(|member| member.name != "n1") {
            let has = |peer: &&Arc<PeerPlan>| peer.allowed_ips.contains(&member.blocks[0]);
            prop_assert_eq!(plan.peers.values().filter(has).count(), 1);
        }
    }
}

use proptest::prelude::*;

use super::*;

fn applicant(name: &str, created: i64, mac: u8) -> Applicant {
    Applicant {
        name: name.to_owned(),
        since: (created, name.to_owned()),
        present: Vec::new(),
        interface_id: Some(InterfaceId::of_mac([2, 0, 0, 0, 0, mac])),
        has_reported: true,
        public_key: Some(PublicKey([mac; 32])),
    }
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

fn space() -> Space {
    Space { ipv6: Some("fd7f:175a:b97c:5602::/64".parse().unwrap()), ipv4: "100.64.0.0/28".parse().ok() }
}

fn assigned(applicants: &[Applicant], kept: &[Kept], now: i64) -> Assigned {
    assign(applicants, space(), kept, &BTreeMap::new(), &BTreeSet::new(), at(now))
}

/// Applicants as they are after the addresses were written.
fn written(mut applicants: Vec<Applicant>, assigned: &Assigned) -> Vec<Applicant> {
    for applicant in &mut applicants {
        applicant.present.clone_from(&assigned.addresses[&applicant.name]);
    }
    applicants
}

#[test]
fn of_two_nodes_with_one_hardware_address_the_younger_gets_one_of_its_key() {
    let cloned = Applicant { public_key: Some(PublicKey([9; 32])), ..applicant("clone", 2, 1) };
    let found = assigned(&[cloned.clone(), applicant("first", 1, 1)], &[], 0);
    let ula = |name: &str| found.addresses[name][0].to_string();
    assert_eq!(ula("first"), "fd7f:175a:b97c:5602:0:ff:fe00:1");
    let subnet = space().ipv6.unwrap();
    assert_eq!(ula("clone"), InterfaceId(id_of_key(&[9; 32])).address_in(subnet).to_string());
    // The first is deleted: the clone keeps what it has.
    let clone = written(vec![cloned], &found);
    assert_eq!(assigned(&clone, &[], 0).addresses["clone"][0], found.addresses["clone"][0]);
}

#[test]
fn a_node_that_says_it_has_the_address_of_another_does_not_get_it() {
    let victim = written(vec![applicant("victim", 5, 1)], &assigned(&[applicant("victim", 5, 1)], &[], 0));
    let thief = Applicant { public_key: Some(PublicKey([9; 32])), ..applicant("older", 1, 1) };
    let found = assigned(&[thief, victim[0].clone()], &[], 0);
    assert_eq!(found.addresses["victim"], victim[0].present);
    assert_ne!(found.addresses["older"][0], victim[0].present[0]);
}

#[test]
fn a_node_that_has_not_said_what_it_derives_waits() {
    let silent = Applicant { has_reported: false, interface_id: None, ..applicant("a", 1, 1) };
    assert_eq!(assigned(std::slice::from_ref(&silent), &[], 0).addresses["a"].len(), 1, "IPv4 alone");
    let without = Applicant { has_reported: true, ..silent };
    assert_eq!(assigned(&[without], &[], 0).addresses["a"].len(), 2);
}

#[test]
fn the_address_of_a_deleted_node_is_kept_for_a_day() {
    let nodes: Vec<Applicant> = ["a", "b"].map(|name| applicant(name, 1, name.as_bytes()[0])).into();
    let first = assigned(&nodes, &[], 0);
    let IpAddr::V4(of_a) = first.addresses["a"][1] else { panic!("no IPv4") };
    let rest = written(nodes.clone(), &first).split_off(1);
    let departed = [("a".to_owned(), of_a)].into();
    let gone = assign(&rest, space(), &[], &departed, &BTreeSet::new(), at(0));
    let hours_24 = at(24 * 3600);
    assert_eq!(gone.kept, [Kept { node: "a".to_owned(), ip: of_a, until: hours_24 }]);
    // Others take every other address, and a returns.
    let mut many: Vec<Applicant> = (0..12).map(|n| applicant(&format!("n{n}"), 2, n + 100)).collect();
    many.extend(rest);
    let full = assigned(&many, &gone.kept, 60);
    assert_eq!((full.without.len(), full.kept.len()), (0, 1));
    many.push(applicant("a", 3, b'a'));
    let back = assigned(&many, &full.kept, 120);
    assert_eq!((back.addresses["a"][1], back.kept), (IpAddr::V4(of_a), vec![]));
    assert_eq!(assigned(&[], &gone.kept, 24 * 3600 + 1).kept, []);
}

#[test]
fn a_full_prefix_names_who_has_none_and_uses_what_is_kept_last() {
    let kept = Kept { node: "gone".to_owned(), ip: "100.64.0.3".parse().unwrap(), until: at(1000) };
    let nodes: Vec<Applicant> = (0..15).map(|n| applicant(&format!("n{n:02}"), n.into(), n)).collect();
    let found = assigned(&nodes, &[kept], 0);
    assert_eq!((found.without, found.kept), (vec!["n14".to_owned()], vec![]));
}

#[test]
fn addresses_that_nodes_have_elsewhere_are_avoided() {
    let avoided = (1..14).map(|n| IpAddr::from([100, 64, 0, n])).collect();
    let found = assign(&[applicant("a", 1, 1)], space(), &[], &BTreeMap::new(), &avoided, at(0));
    assert_eq!(found.addresses["a"][1], IpAddr::from([100, 64, 0, 14]));
}

#[test]
fn without_the_identifier_of_the_cluster_what_nodes_have_stays() {
    let nodes = written(vec![applicant("a", 1, 1)], &assigned(&[applicant("a", 1, 1)], &[], 0));
    let unknown = Space { ipv6: None, ..space() };
    let found = assign(&nodes, unknown, &[], &BTreeMap::new(), &BTreeSet::new(), at(0));
    assert_eq!(found.addresses["a"], nodes[0].present);
}

proptest! {
    /// No two nodes have one address, and none is given another, whatever nodes join, leave and say.
    #[test]
    fn no_address_has_two_nodes_and_none_changes(
        rounds in prop::collection::vec(prop::collection::btree_map(0..20u8, (0..4u8, any::<bool>(), 0..5i64), 0..20), 1..6),
    ) {
        let mut known: BTreeMap<String, Vec<IpAddr>> = BTreeMap::new();
        let mut kept = Vec::new();
        for (round, nodes) in rounds.into_iter().enumerate() {
            let nodes: Vec<Applicant> = nodes.into_iter().map(|(number, (mac, has_reported, created))| {
                let node = applicant(&format!("n{number}"), created, mac);
                let present = known.get(&node.name).cloned().unwrap_or_default();
                Applicant { present, has_reported, public_key: Some(PublicKey([number; 32])), ..node }
            }).collect();
            let now = at(round as i64);
            let departed = known.iter().filter(|(name, _)| !nodes.iter().any(|node| node.name == **name));
            let departed = departed.filter_map(|(name, has)| has.iter().find_map(|address| match address {
                IpAddr::V4(address) => Some((name.clone(), *address)),
                IpAddr::V6(_) => None,
            })).collect();
            let found = assign(&nodes, space(), &kept, &departed, &BTreeSet::new(), now);
            let all: Vec<IpAddr> = found.addresses.values().flatten().copied().collect();
            prop_assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
            for node in &nodes {
                prop_assert!(node.present.iter().all(|address| found.addresses[&node.name].contains(address)));
            }
            (known, kept) = (found.addresses, found.kept);
        }
    }
}

//! Interval sets against naive models: a list of prefixes for union, a bitmap for difference.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn merged(texts: &[&str]) -> Vec<IpNet> {
    let nets = nets(texts);
    let family = nets.first().map_or(IpFamily::V4, |net| IpFamily::of(net.addr()));
    IntervalSet::from_prefixes(family, &nets).prefixes()
}

#[test]
fn edges() {
    for all in ["0.0.0.0/0", "::/0"] {
        assert_eq!(merged(&[all]), nets(&[all]));
    }
    assert_eq!(merged(&["255.255.255.255/32"]), nets(&["255.255.255.255/32"]));
    assert_eq!(merged(&["0.0.0.0/1", "128.0.0.0/1"]), nets(&["0.0.0.0/0"]));
    assert_eq!(merged(&["::/1", "8000::/1", "fd00::1/128"]), nets(&["::/0"]));
    assert_eq!(merged(&["10.0.1.0/24", "10.0.0.0/24", "10.0.0.7/32"]), nets(&["10.0.0.0/23"]));
    assert_eq!(merged(&["10.0.1.0/24", "10.0.2.0/24"]), nets(&["10.0.1.0/24", "10.0.2.0/24"]));
    assert_eq!(merged(&["10.0.0.9/24"]), nets(&["10.0.0.0/24"]), "host bits do not count");
    assert_eq!(merged(&["10.0.0.1/32", "10.0.0.1/32"]), nets(&["10.0.0.1/32"]));
    assert!(IntervalSet::from_prefixes(IpFamily::V6, &nets(&["10.0.0.0/8"])).is_empty());
}

#[test]
fn everything_without_everything_is_nothing() {
    for family in [IpFamily::V4, IpFamily::V6] {
        let all = IntervalSet::from_intervals(family, vec![Interval { first: 0, last: family.highest() }]);
        assert_eq!(all.subtract(&all), IntervalSet::empty(family));
        assert_eq!(all.subtract(&IntervalSet::empty(family)), all);
        assert_eq!(all.prefixes().len(), 1);
    }
}

/// Prefixes that crowd together, so that overlaps, neighbours and both ends of the space are frequent.
fn crowded(family: IpFamily) -> impl Strategy<Value = Vec<IpNet>> {
    let bits = family.bits();
    let number =
        prop_oneof![0u128..64, Just(u128::MAX), (0u128..64).prop_map(|n| u128::MAX - n), any::<u128>()];
    let length = prop_oneof![bits - 8..=bits, 0..=bits];
    proptest::collection::vec((number, length), 0..24).prop_map(move |list| {
        let prefix =
            |(number, length)| IpNet::new(family.address(number & family.highest()), length).unwrap().trunc();
        list.into_iter().map(prefix).collect()
    })
}

fn check_union(family: IpFamily, nets: &[IpNet], probes: &[u128]) -> Result<(), TestCaseError> {
    let set = IntervalSet::from_prefixes(family, nets);
    for pair in set.intervals.windows(2) {
        prop_assert!(pair[0].last.checked_add(1).unwrap() < pair[1].first, "{:?} touch", pair);
    }
    let edges =
        set.intervals.iter().flat_map(|i| [i.first, i.last, i.first.wrapping_sub(1), i.last.wrapping_add(1)]);
    for number in edges.chain(probes.iter().copied()).map(|n| n & family.highest()) {
        let address = family.address(number);
        prop_assert_eq!(set.contains(address), nets.iter().any(|net| net.contains(&address)), "{}", address);
    }
    let back = set.prefixes();
    prop_assert_eq!(&IntervalSet::from_prefixes(family, &back), &set);
    let mut expected = IpNet::aggregate(&nets.to_vec());
    expected.sort();
    prop_assert_eq!(back, expected);
    Ok(())
}

fn check_difference(family: IpFamily, a: &[IpNet], b: &[IpNet]) -> Result<(), TestCaseError> {
    let (a_set, b_set) = (IntervalSet::from_prefixes(family, a), IntervalSet::from_prefixes(family, b));
    let rest = a_set.subtract(&b_set);
    prop_assert_eq!(&IntervalSet::from_intervals(family, rest.intervals.clone()), &rest, "sorted and apart");
    let edges = [&a_set, &b_set, &rest].into_iter().flat_map(|set| &set.intervals);
    for number in edges.flat_map(|i| [i.first, i.last, i.first.wrapping_sub(1), i.last.wrapping_add(1)]) {
        let address = family.address(number & family.highest());
        let within = |nets: &[IpNet]| nets.iter().any(|net| net.contains(&address));
        prop_assert_eq!(rest.contains(address), within(a) && !within(b), "{}", address);
    }
    Ok(())
}

/// Addresses 0 to 63 as a bitmap.
fn small() -> impl Strategy<Value = BTreeSet<u8>> {
    proptest::collection::btree_set(0u8..64, 0..40)
}

fn set_of(numbers: &BTreeSet<u8>) -> IntervalSet {
    let single = |number: &u8| Interval { first: (*number).into(), last: (*number).into() };
    IntervalSet::from_intervals(IpFamily::V4, numbers.iter().map(single).collect())
}

proptest! {
    #[test]
    fn union_keeps_the_addresses_v4(nets in crowded(IpFamily::V4), probes: Vec<u128>) {
        check_union(IpFamily::V4, &nets, &probes)?;
    }

    #[test]
    fn union_keeps_the_addresses_v6(nets in crowded(IpFamily::V6), probes: Vec<u128>) {
        check_union(IpFamily::V6, &nets, &probes)?;
    }

    #[test]
    fn difference_has_the_addresses_of_one_v4(
        (a, b) in (crowded(IpFamily::V4), crowded(IpFamily::V4))
    ) {
        check_difference(IpFamily::V4, &a, &b)?;
    }

    #[test]
    fn difference_has_the_addresses_of_one_v6(
        (a, b) in (crowded(IpFamily::V6), crowded(IpFamily::V6))
    ) {
        check_difference(IpFamily::V6, &a, &b)?;
    }

    #[test]
    fn small_sets_agree_with_a_bitmap((a, b) in (small(), small()), (first, length) in (0u8..64, 0u8..16)) {
        let (a_set, b_set) = (set_of(&a), set_of(&b));
        prop_assert_eq!(a_set.subtract(&b_set), set_of(&a.difference(&b).copied().collect()));
        let wanted = Interval { first: first.into(), last: (first + length).into() };
        let found = a_set.overlapping(wanted);
        let lowest = a.range(first..=first + length).next();
        prop_assert_eq!(found.is_some(), lowest.is_some());
        if let (Some(found), Some(lowest)) = (found, lowest) {
            prop_assert!((found.first..=found.last).contains(&u128::from(*lowest)));
        }
    }
}

//! Part of a list of the fewest prefixes that cover a set of addresses, replaced.

use fairlead_address::{Interval, IntervalSet, IpFamily, PrefixSet};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Puts `with` in place of what the list covers of `area`. What `with` covers outside of that is added.
pub(super) fn replace_ipv4(cover: &mut Vec<Ipv4Net>, area: &PrefixSet, with: &[Ipv4Net]) {
    let ipv4 = |prefix| if let IpNet::V4(prefix) = prefix { Some(prefix) } else { None };
    replace(cover, area.family(IpFamily::V4), with, ipv4);
}

/// Does as [`replace_ipv4`] for IPv6.
pub(super) fn replace_ipv6(cover: &mut Vec<Ipv6Net>, area: &PrefixSet, with: &[Ipv6Net]) {
    let ipv6 = |prefix| if let IpNet::V6(prefix) = prefix { Some(prefix) } else { None };
    replace(cover, area.family(IpFamily::V6), with, ipv6);
}

/// Visits only the prefixes that touch what changes: of each run of addresses that is covered without a gap, the prefixes follow from
/// its ends.
fn replace<T: Copy + Into<Interval>>(
    cover: &mut Vec<T>,
    area: &IntervalSet,
    with: &[T],
    of_family: impl Fn(IpNet) -> Option<T>,
) {
    let family = area.family();
    let with = IntervalSet::from_intervals(family, with.iter().map(|it| (*it).into()).collect());
    let changing = area.intervals().iter().chain(with.intervals()).copied().collect();
    for changed in IntervalSet::from_intervals(family, changing).intervals() {
        let touching = touching(cover, *changed);
        let before = cover.get(touching.clone()).unwrap_or_default().iter().map(|it| (*it).into());
        let changed_only = IntervalSet::from_intervals(family, vec![*changed]);
        let kept = IntervalSet::from_intervals(family, before.collect()).subtract(&changed_only);
        let first = with.intervals().partition_point(|it| it.first < changed.first);
        let added = with.intervals().iter().skip(first).take_while(|it| it.last <= changed.last);
        let after = kept.intervals().iter().chain(added).copied().collect();
        let prefixes = IntervalSet::from_intervals(family, after).prefixes();
        cover.splice(touching, prefixes.into_iter().filter_map(&of_family));
    }
}

/// The positions of the prefixes of all runs that share an address with the interval or end beside it.
fn touching<T: Copy + Into<Interval>>(cover: &[T], changed: Interval) -> std::ops::Range<usize> {
    let interval = |at: usize| cover.get(at).map(|it| (*it).into());
    let begins = |it: Interval| it.first <= changed.last.saturating_add(1);
    let mut from = cover.partition_point(|it| (*it).into().last < changed.first.saturating_sub(1));
    let mut to = cover.partition_point(|it| begins((*it).into()));
    let are_joined = |left: Option<usize>, right: usize| {
        let (Some(left), Some(right)) = (left.and_then(interval), interval(right)) else { return false };
        left.last.checked_add(1) == Some(right.first)
    };
    while from < to && are_joined(from.checked_sub(1), from) {
        from = from.saturating_sub(1);
    }
    while from < to && are_joined(to.checked_sub(1), to) {
        to = to.saturating_add(1);
    }
    from..to
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_prefixes() -> impl Strategy<Value = Vec<IpNet>> {
        let prefix = (0u8..2, any::<u8>(), 22u8..=32)
            .prop_map(|(a, b, length)| IpNet::new([10, 0, a, b].into(), length).unwrap().trunc());
        prop::collection::vec(prefix, 0..12)
    }

    proptest! {
        #[test]
        fn the_list_is_the_one_of_the_set_with_the_part_replaced(
            all in any_prefixes(), area in any_prefixes(), with in any_prefixes(),
        ) {
            let (area, with): (PrefixSet, PrefixSet) = (area.iter().collect(), with.iter().collect());
            let all: PrefixSet = all.iter().collect();
            let mut cover = all.ipv4_prefixes();
            replace_ipv4(&mut cover, &area, &with.ipv4_prefixes());
            let others = all.subtract(&area).ipv4_prefixes().into_iter().chain(with.ipv4_prefixes());
            let expected: PrefixSet = others.map(IpNet::from).collect();
            prop_assert_eq!(cover, expected.ipv4_prefixes());
        }
    }
}

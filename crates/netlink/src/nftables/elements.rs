//! Interval sets as the kernel stores them: an element for the first address of an interval, and one, flagged as end,
//! for the address behind its last.

use fairlead_address::{Interval, IntervalSet, IpFamily};

/// The elements of one interval set, as the kernel has them: in order; they never overlap, but may touch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elements {
    family: IpFamily,
    intervals: Vec<Interval>,
}

/// Changes that turn the elements of a set into others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Elements to delete.
    pub deleted: Elements,
    /// Elements to add after that.
    pub added: Elements,
}

impl From<IntervalSet> for Elements {
    /// One element for each interval: what a set that is created gets.
    fn from(set: IntervalSet) -> Self {
        Self { family: set.family(), intervals: set.intervals().to_vec() }
    }
}

impl Elements {
    /// No element, in a set of this family.
    pub const fn empty(family: IpFamily) -> Self {
        Self { family, intervals: Vec::new() }
    }

    /// The family of the addresses.
    pub const fn family(&self) -> IpFamily {
        self.family
    }

    /// The elements in order.
    pub fn intervals(&self) -> &[Interval] {
        &self.intervals
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.intervals.is_empty()
    }

    /// Addresses that the elements cover.
    pub fn covered(&self) -> IntervalSet {
        IntervalSet::from_intervals(self.family, self.intervals.clone())
    }

    /// Changes after which they cover exactly the wanted addresses. An element stays if it may: a node whose addresses touch those of
    /// another one is one more element, instead of one deleted and a longer one added.
    pub fn difference(&self, wanted: &IntervalSet) -> Difference {
        let is_wanted = |element: &Interval| {
            wanted
                .overlapping(*element)
                .is_some_and(|it| it.first <= element.first && element.last <= it.last)
        };
        let (kept, deleted): (Vec<Interval>, Vec<Interval>) =
            self.intervals.iter().copied().partition(is_wanted);
        let kept = IntervalSet::from_intervals(self.family, kept);
        Difference {
            deleted: Self { family: self.family, intervals: deleted },
            added: wanted.subtract(&kept).into(),
        }
    }

    /// The elements after such a change.
    #[must_use]
    pub fn after(mut self, Difference { deleted, added }: &Difference) -> Self {
        self.intervals.retain(|element| deleted.intervals.binary_search(element).is_err());
        self.intervals.extend(&added.intervals);
        self.intervals.sort_unstable();
        self
    }
}

/// The number `nft` knows the type of a key by (`ipv4_addr`, `ipv6_addr`); the kernel only stores it.
pub(super) const fn nft_type(family: IpFamily) -> u32 {
    match family {
        IpFamily::V4 => 7,
        IpFamily::V6 => 8,
    }
}

/// Length of a key in bytes.
pub(super) const fn key_length(family: IpFamily) -> u32 {
    (family.bits() / 8) as u32
}

/// An address as a key: network order.
pub(super) fn key(family: IpFamily, number: u128) -> Vec<u8> {
    match family {
        IpFamily::V4 => (number as u32).to_be_bytes().to_vec(),
        IpFamily::V6 => number.to_be_bytes().to_vec(),
    }
}

/// The reverse of [`key`]; `None` for a key of another length.
pub(super) fn number(family: IpFamily, key: &[u8]) -> Option<u128> {
    match family {
        IpFamily::V4 => Some(u128::from(u32::from_be_bytes(key.try_into().ok()?))),
        IpFamily::V6 => Some(u128::from_be_bytes(key.try_into().ok()?)),
    }
}

/// The elements of one interval, each with whether it is the end. An interval that reaches the highest address has no
/// end.
pub(super) fn of_interval(family: IpFamily, interval: Interval) -> impl Iterator<Item = (u128, bool)> {
    let end = interval.last.checked_add(1).filter(|end| *end <= family.highest());
    [(interval.first, false)].into_iter().chain(end.map(|end| (end, true)))
}

/// The elements that a dump describes.
///
/// The kernel guarantees no order. An end without a beginning (`nft` adds one in front) has no meaning; a beginning without
/// an end reaches to the highest address.
pub(crate) fn parse(family: IpFamily, mut elements: Vec<(u128, bool)>) -> Elements {
    // An end sorts before a beginning at the same address: there the intervals touch.
    elements.sort_unstable_by_key(|(address, is_end)| (*address, !is_end));
    let mut intervals = Vec::new();
    let mut open = None;
    for (address, is_end) in elements {
        match (open, is_end) {
            (Some(first), true) => {
                intervals.push(Interval { first, last: address.saturating_sub(1) });
                open = None;
            }
            (None, false) => open = Some(address),
            (Some(_), false) | (None, true) => {}
        }
    }
    intervals.extend(open.map(|first| Interval { first, last: family.highest() }));
    Elements { family, intervals }
}

/// For errors: the prefix or range if there is one interval, else how many and from where to where.
pub(super) fn summary(family: IpFamily, intervals: &[Interval]) -> String {
    let address = |number| family.address(number);
    match intervals {
        [] => "nothing".to_owned(),
        [one] => match IntervalSet::from_intervals(family, vec![*one]).prefixes().as_slice() {
            [prefix] => prefix.to_string(),
            _ => format!("{}-{}", address(one.first), address(one.last)),
        },
        [first, .., last] => {
            format!("{} intervals from {} to {}", intervals.len(), address(first.first), address(last.last))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn elements_in_any_order_and_with_stray_ends() {
        let elements = vec![(20, false), (15, true), (10, false), (0, true), (20, true), (17, false)];
        // [10,15), [17,20) and [20,end]
        assert_eq!(
            parse(IpFamily::V4, elements).intervals(),
            [
                Interval { first: 10, last: 14 },
                Interval { first: 17, last: 19 },
                Interval { first: 20, last: u32::MAX.into() }
            ]
        );
    }

    #[test]
    fn a_neighbour_that_comes_and_goes_is_one_element() {
        let set = |prefixes: &[&str]| {
            let prefixes: Vec<ipnet::IpNet> = prefixes.iter().map(|text| text.parse().unwrap()).collect();
            IntervalSet::from_prefixes(IpFamily::V4, &prefixes)
        };
        let present = Elements::from(set(&["10.0.0.1/32"]));
        let both = set(&["10.0.0.1/32", "10.0.0.2/32"]);
        let comes = present.difference(&both);
        assert_eq!((comes.deleted.intervals().len(), comes.added.clone()), (0, set(&["10.0.0.2/32"]).into()));
        let goes = present.clone().after(&comes).difference(&set(&["10.0.0.1/32"]));
        assert_eq!((goes.deleted, goes.added.intervals().len()), (set(&["10.0.0.2/32"]).into(), 0));
    }

    #[test]
    fn a_summary_is_a_prefix_a_range_or_a_count() {
        let of = |pairs: &[(u128, u128)]| {
            let list: Vec<_> = pairs.iter().map(|&(first, last)| Interval { first, last }).collect();
            summary(IpFamily::V4, &list)
        };
        assert_eq!(of(&[]), "nothing");
        assert_eq!(of(&[(0x0a00_0000, 0x0a00_00ff)]), "10.0.0.0/24");
        assert_eq!(of(&[(1, 2)]), "0.0.0.1-0.0.0.2");
        assert_eq!(of(&[(1, 2), (4, 4), (9, 9)]), "3 intervals from 0.0.0.1 to 0.0.0.9");
    }

    proptest! {
        #[test]
        fn a_set_is_read_back_from_its_elements_in_any_order(
            ipv4: bool,
            pairs in proptest::collection::vec((prop_oneof![0u128..64, any::<u128>()], 0u128..32), 0..16),
            seed: u64,
        ) {
            let family = if ipv4 { IpFamily::V4 } else { IpFamily::V6 };
            let interval = |(first, length): (u128, u128)| {
                let first = first & family.highest();
                Interval { first, last: first.saturating_add(length).min(family.highest()) }
            };
            let set = IntervalSet::from_intervals(family, pairs.into_iter().map(interval).collect());
            let mut elements: Vec<_> = set.intervals().iter().flat_map(|one| of_interval(family, *one)).collect();
            elements.sort_by_key(|(address, _)| address.wrapping_mul(u128::from(seed | 1)));
            prop_assert_eq!(parse(family, elements), set.into());
        }

        #[test]
        fn a_difference_leads_to_the_wanted_addresses_and_leaves_what_may_stay(
            steps in proptest::collection::vec(
                proptest::collection::vec((0u128..64, 0u128..6), 0..12), 1..6,
            ),
        ) {
            let mut present = Elements::empty(IpFamily::V4);
            for step in steps {
                let intervals = step.iter().map(|&(first, length)| Interval { first, last: first + length });
                let wanted = IntervalSet::from_intervals(IpFamily::V4, intervals.collect());
                let difference = present.difference(&wanted);
                let covers = |it: &Interval| (it.first..=it.last).all(|n| wanted.contains(IpFamily::V4.address(n)));
                prop_assert!(difference.deleted.intervals().iter().all(|it| !covers(it)));
                present = present.after(&difference);
                prop_assert_eq!(present.covered(), wanted.clone());
                let touches_at_most = |pair: &[Interval]| pair[0].last < pair[1].first;
                prop_assert!(present.intervals().windows(2).all(touches_at_most));
                let again = present.difference(&wanted);
                prop_assert!(again.deleted.is_empty() && again.added.is_empty());
            }
        }
    }
}

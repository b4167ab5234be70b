//! Interval sets as the kernel stores them: an element for the first address of an interval, and one, flagged as end,
//! for the address behind its last.

use fairlead_address::{Interval, IntervalSet, IpFamily};

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

/// The set that a dump of elements describes.
///
/// The kernel guarantees no order. An end without a beginning (`nft` adds one in front) has no meaning; a beginning without
/// an end reaches to the highest address.
pub(super) fn parse(family: IpFamily, mut elements: Vec<(u128, bool)>) -> IntervalSet {
    // An end sorts before a beginning at the same address: there the intervals touch.
    elements.sort_unstable_by_key(|(address, is_end)| (*address, !is_end));
    let (mut intervals, mut open) = (Vec::new(), None);
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
    IntervalSet::from_intervals(family, intervals)
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
        // [10,15) and [17,20) and [20,end]
        assert_eq!(
            parse(IpFamily::V4, elements).intervals(),
            [Interval { first: 10, last: 14 }, Interval { first: 17, last: u32::MAX.into() }]
        );
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
            prop_assert_eq!(parse(family, elements), set);
        }
    }
}

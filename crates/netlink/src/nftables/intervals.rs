//! Prefixes as merged intervals: what an nftables interval set really holds.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// The addresses a set holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AddressType {
    /// `ipv4_addr`
    Ipv4,
    /// `ipv6_addr`
    Ipv6,
}

impl AddressType {
    /// The type of an address.
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::Ipv4 } else { Self::Ipv6 }
    }

    /// Bits of an address.
    pub const fn bits(self) -> u8 {
        match self {
            Self::Ipv4 => 32,
            Self::Ipv6 => 128,
        }
    }

    /// The highest address as a number.
    pub(crate) const fn highest(self) -> u128 {
        match self {
            Self::Ipv4 => u32::MAX as u128,
            Self::Ipv6 => u128::MAX,
        }
    }

    /// An address as a set's key: network order.
    pub(crate) fn key(self, number: u128) -> Vec<u8> {
        match self {
            Self::Ipv4 => (number as u32).to_be_bytes().to_vec(),
            Self::Ipv6 => number.to_be_bytes().to_vec(),
        }
    }

    /// The reverse of [`Self::key`]; `None` for a key of another length.
    pub(crate) fn number(self, key: &[u8]) -> Option<u128> {
        match self {
            Self::Ipv4 => Some(u128::from(u32::from_be_bytes(key.try_into().ok()?))),
            Self::Ipv6 => Some(u128::from_be_bytes(key.try_into().ok()?)),
        }
    }

    fn address(self, number: u128) -> IpAddr {
        match self {
            Self::Ipv4 => Ipv4Addr::from_bits(number as u32).into(),
            Self::Ipv6 => Ipv6Addr::from_bits(number).into(),
        }
    }

    fn prefix(self, first: u128, length: u8) -> Option<IpNet> {
        Some(match self {
            Self::Ipv4 => Ipv4Net::new(Ipv4Addr::from_bits(first as u32), length).ok()?.into(),
            Self::Ipv6 => Ipv6Net::new(Ipv6Addr::from_bits(first), length).ok()?.into(),
        })
    }
}

/// Addresses from the first to the last, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Interval {
    pub(crate) first: u128,
    pub(crate) last: u128,
}

/// A set of addresses as sorted intervals that neither overlap nor touch.
///
/// Two equal sets of addresses are equal values, whatever prefixes they came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Intervals {
    kind: AddressType,
    list: Vec<Interval>,
}

impl Intervals {
    /// No address of this type.
    pub const fn empty(kind: AddressType) -> Self {
        Self { kind, list: Vec::new() }
    }

    /// The union of those prefixes that are of this type; others are passed over.
    pub fn merge<'a>(kind: AddressType, prefixes: impl IntoIterator<Item = &'a IpNet>) -> Self {
        let intervals = prefixes.into_iter().filter_map(|prefix| match (kind, prefix) {
            (AddressType::Ipv4, IpNet::V4(net)) => Some(Interval {
                first: net.network().to_bits().into(),
                last: net.broadcast().to_bits().into(),
            }),
            (AddressType::Ipv6, IpNet::V6(net)) => {
                Some(Interval { first: net.network().to_bits(), last: net.broadcast().to_bits() })
            }
            _ => None,
        });
        Self::union(kind, intervals.collect())
    }

    /// From a set's elements: an interval's first address, or (`true`) the address behind its last.
    ///
    /// The kernel dumps them in no order we may rely on. An end without a beginning (`nft` puts one in front) says
    /// nothing; a beginning without an end reaches to the highest address.
    pub(crate) fn from_elements(kind: AddressType, mut elements: Vec<(u128, bool)>) -> Self {
        // An end sorts before a beginning at the same address: there the intervals touch.
        elements.sort_unstable_by_key(|(address, is_end)| (*address, !is_end));
        let (mut list, mut open) = (Vec::new(), None);
        for (address, is_end) in elements {
            match (open, is_end) {
                (Some(first), true) => {
                    list.push(Interval { first, last: address.saturating_sub(1) });
                    open = None;
                }
                (None, false) => open = Some(address),
                (Some(_), false) | (None, true) => {}
            }
        }
        list.extend(open.map(|first| Interval { first, last: kind.highest() }));
        Self::union(kind, list)
    }

    fn union(kind: AddressType, mut intervals: Vec<Interval>) -> Self {
        intervals.sort_unstable();
        let mut list: Vec<Interval> = Vec::with_capacity(intervals.len());
        for next in intervals {
            match list.last_mut() {
                Some(present) if next.first <= present.last.saturating_add(1) => {
                    present.last = present.last.max(next.last);
                }
                _ => list.push(next),
            }
        }
        Self { kind, list }
    }

    /// The type of its addresses.
    pub fn address_type(&self) -> AddressType {
        self.kind
    }

    /// How many intervals there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there is no address at all.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Whether an address is in one of the intervals.
    pub fn contains(&self, address: IpAddr) -> bool {
        let number = match address {
            IpAddr::V4(address) => u128::from(address.to_bits()),
            IpAddr::V6(address) => address.to_bits(),
        };
        let after = self.list.partition_point(|interval| interval.first <= number);
        AddressType::of(address) == self.kind
            && self.list.get(..after).and_then(<[_]>::last).is_some_and(|interval| number <= interval.last)
    }

    /// Those of its intervals that `other` does not have exactly so: what has to be added or deleted.
    #[must_use]
    pub fn not_in(&self, other: &Self) -> Self {
        let list = self
            .list
            .iter()
            .filter(|interval| other.list.binary_search(interval).is_err())
            .copied()
            .collect();
        Self { kind: self.kind, list }
    }

    /// The fewest prefixes that cover exactly these addresses, in order.
    pub fn prefixes(&self) -> Vec<IpNet> {
        self.list.iter().flat_map(|interval| Cover { kind: self.kind, rest: Some(*interval) }).collect()
    }

    /// First and last address of each interval, in order.
    pub fn ranges(&self) -> impl DoubleEndedIterator<Item = (IpAddr, IpAddr)> + '_ {
        self.list.iter().map(|interval| (self.kind.address(interval.first), self.kind.address(interval.last)))
    }

    pub(crate) fn list(&self) -> &[Interval] {
        &self.list
    }

    /// Intervals that are known to be sorted and apart: a part of another value's.
    pub(crate) fn of(kind: AddressType, list: &[Interval]) -> Self {
        Self { kind, list: list.to_vec() }
    }

    /// For errors: the prefix or range if there is one interval, else how many and from where to where.
    pub(crate) fn summary(&self) -> String {
        let mut ranges = self.ranges();
        match (ranges.next(), ranges.next_back()) {
            (Some((first, last)), None) => match self.prefixes().as_slice() {
                [prefix] => prefix.to_string(),
                _ => format!("{first}-{last}"),
            },
            (Some((first, _)), Some((_, last))) => format!("{} intervals from {first} to {last}", self.len()),
            (None, _) => "nothing".to_owned(),
        }
    }
}

/// Cuts an interval into prefixes, largest possible first.
struct Cover {
    kind: AddressType,
    rest: Option<Interval>,
}

impl Iterator for Cover {
    type Item = IpNet;

    fn next(&mut self) -> Option<IpNet> {
        let Interval { first, last } = self.rest.take()?;
        let bits = u32::from(self.kind.bits());
        let aligned = first.trailing_zeros().min(bits);
        // `last - first + 1` addresses, except that all of IPv6 does not fit the number.
        let fitting = last.saturating_sub(first).checked_add(1).map_or(128, u128::ilog2);
        let host_bits = aligned.min(fitting);
        let size = 1u128.checked_shl(host_bits);
        self.rest = size
            .and_then(|size| first.checked_add(size))
            .filter(|next| *next <= last)
            .map(|next| Interval { first: next, last });
        self.kind.prefix(first, u8::try_from(bits.saturating_sub(host_bits)).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn merged(texts: &[&str]) -> Vec<IpNet> {
        let nets = nets(texts);
        let kind = nets.first().map_or(AddressType::Ipv4, |net| AddressType::of(net.addr()));
        Intervals::merge(kind, &nets).prefixes()
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
        assert!(Intervals::merge(AddressType::Ipv6, &nets(&["10.0.0.0/8"])).is_empty());
    }

    #[test]
    fn elements_in_any_order_and_with_stray_ends() {
        let kind = AddressType::Ipv4;
        let elements = vec![(20, false), (15, true), (10, false), (0, true), (20, true), (17, false)];
        let read = Intervals::from_elements(kind, elements);
        // [10,15) and [17,20) and [20,end]
        assert_eq!(
            read.list,
            [Interval { first: 10, last: 14 }, Interval { first: 17, last: u32::MAX.into() }]
        );
    }

    /// Prefixes that crowd together, so that overlaps, neighbours and both ends of the space are frequent.
    fn crowded(kind: AddressType) -> impl Strategy<Value = Vec<IpNet>> {
        let bits = kind.bits();
        let number =
            prop_oneof![0u128..64, Just(u128::MAX), (0u128..64).prop_map(|n| u128::MAX - n), any::<u128>()];
        let length = prop_oneof![bits - 8..=bits, 0..=bits];
        proptest::collection::vec((number, length), 0..24).prop_map(move |list| {
            list.into_iter()
                .map(|(number, length)| kind.prefix(number & kind.highest(), length).unwrap().trunc())
                .collect()
        })
    }

    fn check(kind: AddressType, nets: &[IpNet], probes: &[u128]) -> Result<(), TestCaseError> {
        let intervals = Intervals::merge(kind, nets);
        for pair in intervals.list.windows(2) {
            prop_assert!(pair[0].last.checked_add(1).unwrap() < pair[1].first, "{:?} touch", pair);
        }
        let edges = intervals
            .list
            .iter()
            .flat_map(|i| [i.first, i.last, i.first.wrapping_sub(1), i.last.wrapping_add(1)]);
        for number in edges.chain(probes.iter().copied()).map(|n| n & kind.highest()) {
            let address = kind.address(number);
            prop_assert_eq!(
                intervals.contains(address),
                nets.iter().any(|net| net.contains(&address)),
                "{}",
                address
            );
        }
        let back = intervals.prefixes();
        prop_assert_eq!(&Intervals::merge(kind, &back), &intervals);
        let mut expected = IpNet::aggregate(&nets.to_vec());
        expected.sort();
        prop_assert_eq!(back, expected);
        let elements = intervals.list.iter().flat_map(|i| {
            let end = (i.last < kind.highest()).then(|| (i.last + 1, true));
            end.into_iter().chain([(i.first, false)])
        });
        prop_assert_eq!(&Intervals::from_elements(kind, elements.collect()), &intervals);
        Ok(())
    }

    proptest! {
        #[test]
        fn merging_keeps_the_addresses_v4(nets in crowded(AddressType::Ipv4), probes: Vec<u128>) {
            check(AddressType::Ipv4, &nets, &probes)?;
        }

        #[test]
        fn merging_keeps_the_addresses_v6(nets in crowded(AddressType::Ipv6), probes: Vec<u128>) {
            check(AddressType::Ipv6, &nets, &probes)?;
        }

        #[test]
        fn difference_leads_from_one_to_the_other(
            (old, new) in (crowded(AddressType::Ipv4), crowded(AddressType::Ipv4))
        ) {
            let (old, new) = (Intervals::merge(AddressType::Ipv4, &old), Intervals::merge(AddressType::Ipv4, &new));
            let (gone, come) = (old.not_in(&new), new.not_in(&old));
            let mut list: Vec<_> = old.list.iter().filter(|i| !gone.list.contains(i)).chain(&come.list).copied().collect();
            list.sort();
            prop_assert_eq!(list, new.list);
        }
    }
}

//! Sets of addresses of one family, as sorted intervals.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::family::IpFamily;

/// Addresses of one family as numbers, from the first to the last, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interval {
    /// The first.
    pub first: u128,
    /// The last, not below the first.
    pub last: u128,
}

impl From<IpNet> for Interval {
    fn from(prefix: IpNet) -> Self {
        match prefix {
            IpNet::V4(prefix) => prefix.into(),
            IpNet::V6(prefix) => prefix.into(),
        }
    }
}

impl From<Ipv4Net> for Interval {
    fn from(prefix: Ipv4Net) -> Self {
        Self { first: prefix.network().to_bits().into(), last: prefix.broadcast().to_bits().into() }
    }
}

impl From<Ipv6Net> for Interval {
    fn from(prefix: Ipv6Net) -> Self {
        Self { first: prefix.network().to_bits(), last: prefix.broadcast().to_bits() }
    }
}

/// A set of addresses of one family as sorted intervals that neither overlap nor touch.
///
/// Two equal sets of addresses are equal values, whatever prefixes they came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IntervalSet {
    family: IpFamily,
    intervals: Vec<Interval>,
}

impl IntervalSet {
    /// No address of this family.
    pub const fn empty(family: IpFamily) -> Self {
        Self { family, intervals: Vec::new() }
    }

    /// The union of intervals in any order.
    pub fn from_intervals(family: IpFamily, mut intervals: Vec<Interval>) -> Self {
        intervals.sort_unstable();
        intervals.dedup_by(|next, kept| {
            let joins = next.first <= kept.last.saturating_add(1);
            if joins {
                kept.last = kept.last.max(next.last);
            }
            joins
        });
        Self { family, intervals }
    }

    /// The union of those prefixes that are of this family; others are passed over.
    pub fn from_prefixes<'a>(family: IpFamily, prefixes: impl IntoIterator<Item = &'a IpNet>) -> Self {
        let of_family = prefixes.into_iter().filter(|prefix| IpFamily::of(prefix.addr()) == family);
        Self::from_intervals(family, of_family.map(|prefix| Interval::from(*prefix)).collect())
    }

    /// The family of its addresses.
    pub const fn family(&self) -> IpFamily {
        self.family
    }

    /// The intervals, in order.
    pub fn intervals(&self) -> &[Interval] {
        &self.intervals
    }

    /// Number of intervals.
    pub fn len(&self) -> usize {
        self.intervals.len()
    }

    /// Whether there is no address at all.
    pub fn is_empty(&self) -> bool {
        self.intervals.is_empty()
    }

    /// The first interval that shares an address with `wanted`.
    pub fn overlapping(&self, wanted: Interval) -> Option<Interval> {
        let position = self.intervals.partition_point(|interval| interval.last < wanted.first);
        self.intervals.get(position).copied().filter(|interval| interval.first <= wanted.last)
    }

    /// Whether an address is in one of the intervals.
    pub fn contains(&self, address: IpAddr) -> bool {
        IpFamily::of(address) == self.family && self.overlapping(IpNet::from(address).into()).is_some()
    }

    /// The addresses that are not in `other`, which must be of the same family.
    #[must_use]
    pub fn subtract(&self, other: &Self) -> Self {
        let mut rest = Vec::with_capacity(self.intervals.len());
        let mut holes = other.intervals.iter().peekable();
        for &Interval { first, last } in &self.intervals {
            let mut from = Some(first);
            while let (Some(start), Some(&&hole)) = (from, holes.peek()) {
                if hole.first > last {
                    break;
                }
                if hole.first > start {
                    rest.push(Interval { first: start, last: hole.first.saturating_sub(1) });
                }
                if hole.last >= start {
                    from = hole.last.checked_add(1).filter(|next| *next <= last);
                }
                // A hole that reaches past this interval may cut the next one too.
                if hole.last <= last {
                    holes.next();
                }
            }
            rest.extend(from.map(|first| Interval { first, last }));
        }
        Self { family: self.family, intervals: rest }
    }

    /// The fewest prefixes that cover exactly these addresses, in order.
    pub fn prefixes(&self) -> Vec<IpNet> {
        self.intervals
            .iter()
            .flat_map(|interval| Cover { family: self.family, rest: Some(*interval) })
            .collect()
    }
}

/// Cuts an interval into prefixes, largest possible first.
struct Cover {
    family: IpFamily,
    rest: Option<Interval>,
}

impl Iterator for Cover {
    type Item = IpNet;

    fn next(&mut self) -> Option<IpNet> {
        let Interval { first, last } = self.rest.take()?;
        let bits = u32::from(self.family.bits());
        let aligned = first.trailing_zeros().min(bits);
        // `last - first + 1` addresses, except that all of IPv6 does not fit the number.
        let fitting = last.saturating_sub(first).checked_add(1).map_or(128, u128::ilog2);
        let host_bits = aligned.min(fitting);
        self.rest = 1u128
            .checked_shl(host_bits)
            .and_then(|size| first.checked_add(size))
            .filter(|next| *next <= last)
            .map(|first| Interval { first, last });
        IpNet::new(self.family.address(first), u8::try_from(bits.saturating_sub(host_bits)).ok()?).ok()
    }
}

#[cfg(test)]
mod tests;

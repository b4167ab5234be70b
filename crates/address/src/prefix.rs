//! Prefixes of both families.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::family::IpFamily;
use crate::interval::{Interval, IntervalSet};

/// Whether two prefixes share addresses: one lies in the other.
pub fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

/// Whether the prefix is a single address.
pub fn is_host(prefix: &IpNet) -> bool {
    prefix.prefix_len() == prefix.max_prefix_len()
}

/// The bytes of an address in network order: 4 of IPv4, 16 of IPv6.
pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// A set of addresses of both families.
///
/// Two equal sets of addresses are equal values, whatever prefixes they came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixSet {
    /// IPv4 addresses of the set.
    ipv4: IntervalSet,
    /// IPv6 addresses of the set.
    ipv6: IntervalSet,
}

impl PrefixSet {
    /// Addresses of the set in one family.
    pub fn family(&self, family: IpFamily) -> &IntervalSet {
        match family {
            IpFamily::V4 => &self.ipv4,
            IpFamily::V6 => &self.ipv6,
        }
    }

    /// Whether there is no address at all.
    pub fn is_empty(&self) -> bool {
        self.ipv4.is_empty() && self.ipv6.is_empty()
    }

    /// Whether the address is in the set.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.family(IpFamily::of(address)).contains(address)
    }

    /// The first of its intervals that shares an address with the prefix.
    pub fn overlapping(&self, prefix: IpNet) -> Option<Interval> {
        self.family(IpFamily::of(prefix.addr())).overlapping(prefix.into())
    }

    /// The addresses that are not in `other`.
    #[must_use]
    pub fn subtract(&self, other: &Self) -> Self {
        Self { ipv4: self.ipv4.subtract(&other.ipv4), ipv6: self.ipv6.subtract(&other.ipv6) }
    }

    /// The fewest prefixes that cover exactly its addresses, in order, those of IPv4 first.
    pub fn prefixes(&self) -> impl Iterator<Item = IpNet> + use<> {
        self.ipv4.prefixes().into_iter().chain(self.ipv6.prefixes())
    }

    /// The fewest prefixes that cover exactly its IPv4 addresses, in order.
    pub fn ipv4_prefixes(&self) -> Vec<Ipv4Net> {
        let ipv4 = |prefix| if let IpNet::V4(prefix) = prefix { Some(prefix) } else { None };
        self.ipv4.prefixes().into_iter().filter_map(ipv4).collect()
    }

    /// The fewest prefixes that cover exactly its IPv6 addresses, in order.
    pub fn ipv6_prefixes(&self) -> Vec<Ipv6Net> {
        let ipv6 = |prefix| if let IpNet::V6(prefix) = prefix { Some(prefix) } else { None };
        self.ipv6.prefixes().into_iter().filter_map(ipv6).collect()
    }
}

impl Default for PrefixSet {
    fn default() -> Self {
        Self { ipv4: IntervalSet::empty(IpFamily::V4), ipv6: IntervalSet::empty(IpFamily::V6) }
    }
}

impl FromIterator<IpNet> for PrefixSet {
    fn from_iter<I: IntoIterator<Item = IpNet>>(prefixes: I) -> Self {
        let mut ipv4 = Vec::new();
        let mut ipv6 = Vec::new();
        for prefix in prefixes {
            match prefix {
                IpNet::V4(prefix) => ipv4.push(prefix.into()),
                IpNet::V6(prefix) => ipv6.push(prefix.into()),
            }
        }
        Self {
            ipv4: IntervalSet::from_intervals(IpFamily::V4, ipv4),
            ipv6: IntervalSet::from_intervals(IpFamily::V6, ipv6),
        }
    }
}

impl<'a> FromIterator<&'a IpNet> for PrefixSet {
    fn from_iter<I: IntoIterator<Item = &'a IpNet>>(prefixes: I) -> Self {
        prefixes.into_iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn both_families_are_kept_apart() {
        let set: PrefixSet = nets(&["10.0.0.0/24", "fd00::/64", "10.0.1.0/24"]).iter().collect();
        let rest = set.subtract(&nets(&["10.0.0.0/25", "::/0"]).iter().collect());
        assert_eq!(rest.ipv4_prefixes(), ["10.0.0.128/25".parse().unwrap(), "10.0.1.0/24".parse().unwrap()]);
        assert_eq!(rest.ipv6_prefixes(), []);
        assert!(set.overlapping("fd00::5/128".parse().unwrap()).is_some());
        assert!(rest.overlapping("fd00::5/128".parse().unwrap()).is_none());
        assert!(!rest.is_empty() && PrefixSet::default().is_empty());
    }

    #[test]
    fn a_prefix_and_its_own_parts_overlap_in_both_orders() {
        let [wide, narrow, other]: [IpNet; 3] =
            nets(&["10.0.0.0/8", "10.1.0.0/16", "11.0.0.0/8"]).try_into().unwrap();
        assert!(overlap(&wide, &narrow) && overlap(&narrow, &wide) && overlap(&wide, &wide));
        assert!(!overlap(&narrow, &other));
        assert!(is_host(&"10.0.0.1/32".parse().unwrap()) && !is_host(&"fd00::/127".parse().unwrap()));
    }

    proptest! {
        #[test]
        fn a_set_contains_what_its_prefixes_contain(
            list in proptest::collection::vec((any::<IpAddr>(), 0u8..=128), 0..6), probe: IpAddr
        ) {
            let net = |(address, length): (IpAddr, u8)| IpNet::new(address, length.min(if address.is_ipv4() { 32 } else { 128 })).unwrap();
            let list: Vec<IpNet> = list.into_iter().map(net).collect();
            let set: PrefixSet = list.iter().collect();
            prop_assert_eq!(set.contains(probe), list.iter().any(|net| net.contains(&probe)));
        }
    }
}

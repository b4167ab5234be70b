//! Ordered lists of prefixes that say which addresses count.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;

/// An entry of an [`AddressFilter`]: a prefix or a single address, with `!` before it if it takes addresses away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FilterEntry {
    /// Addresses that the entry adds or takes away.
    pub prefix: IpNet,
    /// Whether it takes them away; else it adds them.
    pub is_negated: bool,
}

/// The text is no prefix and no address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("is no CIDR and no address, with or without '!' before it")]
pub struct InvalidFilterEntry;

impl FromStr for FilterEntry {
    type Err = InvalidFilterEntry;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let negated = text.strip_prefix('!');
        let prefix = negated.unwrap_or(text);
        let address = || prefix.parse::<IpAddr>().map(IpNet::from);
        let prefix = prefix.parse().or_else(|_| address()).map_err(|_| InvalidFilterEntry)?;
        Ok(Self { prefix, is_negated: negated.is_some() })
    }
}

impl fmt::Display for FilterEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.is_negated { "!" } else { "" }, self.prefix)
    }
}

/// Filter of addresses, as KubeSpan's `filters.endpoints`: beginning with none, each entry in turn adds the addresses in its
/// prefix, or takes them away. So the last entry with an address decides about it, and one in no entry does not count. Without
/// entries all addresses count.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct AddressFilter(Vec<FilterEntry>);

impl AddressFilter {
    /// The filter with these entries.
    pub fn new(entries: impl IntoIterator<Item = FilterEntry>) -> Self {
        Self(entries.into_iter().collect())
    }

    /// Entries of the filter, in their order.
    pub fn entries(&self) -> &[FilterEntry] {
        &self.0
    }

    /// Whether the address counts. IPv4-mapped addresses are taken for the IPv4 address they hold.
    pub fn allows(&self, address: IpAddr) -> bool {
        self.0.is_empty() || self.rank(address).is_some()
    }

    /// The addresses that count, in the order in which entries add them, and those of one entry as they came.
    pub fn apply<T>(&self, mut items: Vec<T>, address: impl Fn(&T) -> IpAddr) -> Vec<T> {
        if !self.0.is_empty() {
            items.retain(|item| self.allows(address(item)));
            items.sort_by_key(|item| self.rank(address(item)));
        }
        items
    }

    /// The entry that adds the address for good: the first one after the last that takes it away.
    fn rank(&self, address: IpAddr) -> Option<usize> {
        let address = address.to_canonical();
        let with_address = self.0.iter().enumerate().filter(|(_, entry)| entry.prefix.contains(&address));
        with_address
            .fold(None, |rank, (place, entry)| if entry.is_negated { None } else { rank.or(Some(place)) })
    }
}

/// Filters of WireGuard endpoints, by their addresses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EndpointFilters {
    /// Filter of endpoints that nodes publish, of themselves and of each other.
    pub published: AddressFilter,
    /// Filter of endpoints of peers that a node tries.
    pub tried: AddressFilter,
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use ipnet::Ipv4Net;
    use proptest::prelude::*;

    use super::*;

    fn filter(entries: &[&str]) -> AddressFilter {
        AddressFilter::new(entries.iter().map(|entry| entry.parse().unwrap()))
    }

    fn addresses(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    /// The examples of KubeSpan's documentation, and what its algorithm makes of others.
    #[test]
    fn entries_add_and_take_away_in_turn() {
        let all = addresses(&["10.3.4.1", "10.4.4.1", "192.0.2.3", "2001:db8::1"]);
        for (entries, expected) in [
            (&[][..], &["10.3.4.1", "10.4.4.1", "192.0.2.3", "2001:db8::1"][..]),
            (&["10.0.0.0/8", "!10.3.0.0/16"], &["10.4.4.1"]),
            (&["!10.3.0.0/16", "10.0.0.0/8"], &["10.3.4.1", "10.4.4.1"]),
            (&["0.0.0.0/0", "!10.3.0.0/16", "2001:db8::/32"], &["10.4.4.1", "192.0.2.3", "2001:db8::1"]),
            (&["!10.0.0.0/8"], &[]),
            (
                &["2001:db8::/32", "192.0.2.3", "10.0.0.0/8"],
                &["2001:db8::1", "192.0.2.3", "10.3.4.1", "10.4.4.1"],
            ),
            (&["0.0.0.0/0", "!10.3.4.1", "10.3.0.0/16"], &["10.4.4.1", "192.0.2.3", "10.3.4.1"]),
        ] {
            assert_eq!(filter(entries).apply(all.clone(), |it| *it), addresses(expected), "{entries:?}");
        }
        assert!(filter(&["10.0.0.0/8"]).allows("::ffff:10.0.0.1".parse().unwrap()));
    }

    #[test]
    fn what_is_no_entry_is_refused() {
        for text in
            ["", "!", "!!10.0.0.0/8", "10.0.0.0/33", "a.example", "10.0.0.0/8 ", "! 10.0.0.1", "[::1]"]
        {
            assert_eq!(text.parse::<FilterEntry>(), Err(InvalidFilterEntry), "{text:?}");
        }
    }

    /// The algorithm as KubeSpan walks it: a result that entries add to and take from.
    fn walk(entries: &[FilterEntry], all: &[IpAddr]) -> Vec<IpAddr> {
        let mut result: Vec<IpAddr> = Vec::new();
        for entry in entries {
            if entry.is_negated {
                result.retain(|address| !entry.prefix.contains(address));
            } else {
                let new = all.iter().filter(|address| entry.prefix.contains(*address));
                let new: Vec<IpAddr> = new.filter(|address| !result.contains(address)).copied().collect();
                result.extend(new);
            }
        }
        result
    }

    fn address() -> impl Strategy<Value = IpAddr> {
        // Few, so that prefixes hit them.
        let ipv4 = (0..4u8, 0..4u8).prop_map(|(a, b)| IpAddr::from(Ipv4Addr::new(10, a, 0, b)));
        prop_oneof![
            ipv4,
            (0..4u16).prop_map(|last| IpAddr::from(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last)))
        ]
    }

    fn entry() -> impl Strategy<Value = FilterEntry> {
        let prefix = (address(), 0..=32u8).prop_map(|(address, length)| match address {
            IpAddr::V4(it) => Ipv4Net::new(it, length).unwrap().into(),
            IpAddr::V6(it) => IpNet::new(it.into(), 96 + length).unwrap(),
        });
        (prefix, any::<bool>()).prop_map(|(prefix, is_negated)| FilterEntry { prefix, is_negated })
    }

    proptest! {
        #[test]
        fn addresses_and_their_order_are_those_of_kubespan(
            entries in proptest::collection::vec(entry(), 1..8),
            all in proptest::collection::btree_set(address(), 0..12),
        ) {
            let all: Vec<IpAddr> = all.into_iter().collect();
            let applied = AddressFilter::new(entries.clone()).apply(all.clone(), |it| *it);
            prop_assert_eq!(applied, walk(&entries, &all));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "\\PC*") {
            let _ = text.parse::<FilterEntry>();
        }

        #[test]
        fn what_is_written_is_read_back(entry in entry()) {
            let sign = if entry.is_negated { "!" } else { "" };
            prop_assert_eq!(format!("{sign}{}", entry.prefix).parse(), Ok(entry));
        }
    }
}

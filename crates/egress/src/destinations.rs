//! The destinations of an Egress.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

/// An entry of `spec.destinations` or `spec.excludedDestinations` that is no prefix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}[{index}]: {entry:?} is no prefix in CIDR notation, such as {example}")]
pub struct InvalidDestination {
    /// Name of the list.
    field: &'static str,
    /// Position in the list, from zero.
    pub index: usize,
    /// The entry.
    pub entry: String,
    /// Example of a prefix, if possible the one that could be meant.
    example: String,
}

/// Destinations of an Egress: an address is one if one of the prefixes has it and none of the excluded ones.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Destinations {
    /// `spec.destinations`, each once, with host bits masked.
    pub prefixes: BTreeSet<IpNet>,
    /// `spec.excludedDestinations`, likewise.
    pub excluded: BTreeSet<IpNet>,
}

impl Destinations {
    /// Reads both lists of an Egress.
    ///
    /// # Errors
    /// The first entry that is no prefix. A single address without a length is none, as in Coil.
    pub fn parse(destinations: &[String], excluded: &[String]) -> Result<Self, InvalidDestination> {
        Ok(Self {
            prefixes: prefixes("spec.destinations", destinations)?,
            excluded: prefixes("spec.excludedDestinations", excluded)?,
        })
    }

    /// Whether all of a prefix is excluded.
    pub fn excludes(&self, prefix: &IpNet) -> bool {
        self.excluded.iter().any(|excluded| excluded.contains(prefix))
    }

    /// The prefixes of `spec.destinations` that are not wholly excluded.
    pub fn used(&self) -> impl Iterator<Item = IpNet> {
        self.prefixes.iter().copied().filter(|prefix| !self.excludes(prefix))
    }
}

fn prefixes(field: &'static str, entries: &[String]) -> Result<BTreeSet<IpNet>, InvalidDestination> {
    let prefix = |(index, entry): (usize, &String)| match entry.parse::<IpNet>() {
        Ok(prefix) => Ok(prefix.trunc()),
        Err(_) => Err(InvalidDestination { field, index, entry: entry.clone(), example: example(entry) }),
    };
    entries.iter().enumerate().map(prefix).collect()
}

fn example(entry: &str) -> String {
    let host = entry.parse::<IpAddr>().map(IpNet::from);
    host.map_or_else(|_| "192.0.2.0/24".to_owned(), |host| host.to_string())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(entries: &[&str]) -> Result<Vec<String>, String> {
        let entries: Vec<String> = entries.iter().map(|entry| (*entry).to_owned()).collect();
        let destinations = Destinations::parse(&entries, &[]).map_err(|error| error.to_string())?;
        Ok(destinations.used().map(|prefix| prefix.to_string()).collect())
    }

    #[test]
    fn host_bits_are_masked_and_each_prefix_is_there_once() {
        let entries = ["192.168.10.7/24", "::/0", "0.0.0.0/0", "192.168.10.0/24", "fd00::1/64"];
        assert_eq!(parse(&entries).unwrap(), ["0.0.0.0/0", "192.168.10.0/24", "::/0", "fd00::/64"]);
        assert_eq!(parse(&[]).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn an_entry_that_is_no_prefix_is_named() {
        for (entry, example) in [
            ("9.9.9.9", "9.9.9.9/32"),
            ("fd00::1", "fd00::1/128"),
            ("10.0.0.0/33", "192.0.2.0/24"),
            ("example.com", "192.0.2.0/24"),
            ("", "192.0.2.0/24"),
        ] {
            let words =
                format!("spec.destinations[1]: {entry:?} is no prefix in CIDR notation, such as {example}");
            assert_eq!(parse(&["::/0", entry]).unwrap_err(), words);
        }
    }

    #[test]
    fn a_destination_inside_of_an_excluded_prefix_is_not_used() {
        let texts = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let all = texts(&["10.0.0.0/8", "10.1.2.0/24", "192.0.2.0/24", "::/0"]);
        let destinations = Destinations::parse(&all, &texts(&["10.1.7.7/16", "192.0.2.0/24"])).unwrap();
        assert_eq!(destinations.used().map(|it| it.to_string()).collect::<Vec<_>>(), ["10.0.0.0/8", "::/0"]);
        let error = Destinations::parse(&all, &texts(&["::/1", "9.9.9.9"])).unwrap_err();
        let words =
            "spec.excludedDestinations[1]: \"9.9.9.9\" is no prefix in CIDR notation, such as 9.9.9.9/32";
        assert_eq!(error.to_string(), words);
    }

    proptest! {
        #[test]
        fn hostile_entries_never_panic_and_prefixes_have_no_host_bits(entries in prop::collection::vec("[0-9a-f.:/]{0,45}|.{0,20}", 0..5)) {
            if let Ok(Destinations { prefixes, .. }) = Destinations::parse(&entries, &[]) {
                prop_assert!(prefixes.len() <= entries.len());
                prop_assert!(prefixes.iter().all(|prefix| prefix.trunc() == *prefix));
            }
        }

        #[test]
        fn what_is_written_is_read(bits in any::<u128>(), length in 0..=128_u8) {
            let prefix = IpNet::new(std::net::Ipv6Addr::from_bits(bits).into(), length).unwrap();
            let written = [prefix.to_string()];
            let read = Destinations::parse(&written, &written).unwrap();
            let all = BTreeSet::from([prefix.trunc()]);
            prop_assert_eq!(read, Destinations { prefixes: all.clone(), excluded: all });
        }
    }
}

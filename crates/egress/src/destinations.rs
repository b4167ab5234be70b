//! The destinations of an Egress.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

/// An entry of `spec.destinations` that is no prefix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("spec.destinations[{index}]: {entry:?} is no prefix in CIDR notation, such as {example}")]
pub struct InvalidDestination {
    /// Position in the list, from zero.
    pub index: usize,
    /// The entry.
    pub entry: String,
    /// What could have been meant.
    example: String,
}

/// The prefixes of `spec.destinations`, each once, with host bits masked.
///
/// # Errors
/// The first entry that is no prefix. A single address without a length is none, as in Coil.
pub fn prefixes(destinations: &[String]) -> Result<BTreeSet<IpNet>, InvalidDestination> {
    let prefix = |(index, entry): (usize, &String)| match entry.parse::<IpNet>() {
        Ok(prefix) => Ok(prefix.trunc()),
        Err(_) => Err(InvalidDestination { index, entry: entry.clone(), example: example(entry) }),
    };
    destinations.iter().enumerate().map(prefix).collect()
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
        let prefixes = prefixes(&entries).map_err(|error| error.to_string())?;
        Ok(prefixes.iter().map(IpNet::to_string).collect())
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

    proptest! {
        #[test]
        fn hostile_entries_never_panic_and_prefixes_have_no_host_bits(entries in prop::collection::vec("[0-9a-f.:/]{0,45}|.{0,20}", 0..5)) {
            if let Ok(prefixes) = prefixes(&entries) {
                prop_assert!(prefixes.len() <= entries.len());
                prop_assert!(prefixes.iter().all(|prefix| prefix.trunc() == *prefix));
            }
        }

        #[test]
        fn what_is_written_is_read(bits in any::<u128>(), length in 0..=128_u8) {
            let prefix = IpNet::new(std::net::Ipv6Addr::from_bits(bits).into(), length).unwrap();
            let read = prefixes(&[prefix.to_string()]).unwrap();
            prop_assert_eq!(read, BTreeSet::from([prefix.trunc()]));
        }
    }
}

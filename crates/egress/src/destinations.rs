//! The destinations of an Egress.

use std::collections::BTreeSet;
use std::net::IpAddr;

use fairlead_address::{IntervalSet, IpFamily};
use ipnet::IpNet;

/// An entry of `spec.destinations` or `spec.excludedDestinations` that is no prefix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}[{index}]: {entry:?} is no prefix in CIDR notation, such as {example}")]
pub struct InvalidDestination {
    /// The list.
    field: &'static str,
    /// Position in the list, from zero.
    pub index: usize,
    /// The entry.
    pub entry: String,
    /// What could have been meant.
    example: String,
}

/// The prefixes of `spec.destinations` without those of `spec.excludedDestinations`, each once, with host bits masked. A destination of which a
/// part is excluded becomes the fewest prefixes that have the rest of it.
///
/// # Errors
/// The first entry that is no prefix. A single address without a length is none, as in Coil.
pub fn prefixes(destinations: &[String], excluded: &[String]) -> Result<BTreeSet<IpNet>, InvalidDestination> {
    let destinations = parse("spec.destinations", destinations)?;
    let excluded = parse("spec.excludedDestinations", excluded)?;
    Ok(destinations.iter().flat_map(|destination| without(*destination, &excluded)).collect())
}

fn parse(field: &'static str, entries: &[String]) -> Result<BTreeSet<IpNet>, InvalidDestination> {
    let prefix = |(index, entry): (usize, &String)| match entry.parse::<IpNet>() {
        Ok(prefix) => Ok(prefix.trunc()),
        Err(_) => Err(InvalidDestination { field, index, entry: entry.clone(), example: example(entry) }),
    };
    entries.iter().enumerate().map(prefix).collect()
}

fn without(destination: IpNet, excluded: &BTreeSet<IpNet>) -> Vec<IpNet> {
    if excluded.iter().any(|prefix| prefix.contains(&destination)) {
        return Vec::new();
    }
    let family = IpFamily::of(destination.addr());
    let inside = excluded.iter().filter(|prefix| destination.contains(*prefix));
    let holes = IntervalSet::from_prefixes(family, inside);
    IntervalSet::from_prefixes(family, [&destination]).subtract(&holes).prefixes()
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
        let prefixes = prefixes(&entries, &[]).map_err(|error| error.to_string())?;
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

    #[test]
    fn what_is_excluded_is_cut_out_of_each_destination() {
        let cut = |destinations: &[&str], excluded: &[&str]| -> Result<Vec<String>, String> {
            let [destinations, excluded]: [Vec<String>; 2] =
                [destinations, excluded].map(|all| all.iter().map(|entry| (*entry).to_owned()).collect());
            let prefixes = prefixes(&destinations, &excluded).map_err(|error| error.to_string())?;
            Ok(prefixes.iter().map(IpNet::to_string).collect())
        };
        let both = ["10.0.0.0/8", "10.0.0.0/9", "::/0", "192.0.2.0/24"];
        let expected = ["10.0.0.0/10", "10.128.0.0/9", "8000::/1"];
        assert_eq!(cut(&both, &["10.64.0.7/10", "::/1", "192.0.0.0/16", "9.0.0.0/8"]).unwrap(), expected);
        assert_eq!(cut(&["192.0.2.0/31"], &["192.0.2.0/32", "192.0.2.1/32"]).unwrap(), Vec::<String>::new());
        let error = cut(&["0.0.0.0/0"], &["9.9.9.9"]).unwrap_err();
        assert!(error.starts_with("spec.excludedDestinations[0]: \"9.9.9.9\""), "{error}");
    }

    fn narrow() -> impl Strategy<Value = IpNet> {
        (any::<u8>(), 24..=32_u8)
            .prop_map(|(host, length)| IpNet::new([192, 0, 2, host].into(), length).unwrap())
    }

    proptest! {
        #[test]
        fn an_address_is_a_destination_if_it_is_in_one_and_not_excluded(
            destinations in prop::collection::vec(narrow(), 0..6), excluded in prop::collection::vec(narrow(), 0..6),
        ) {
            let texts = |all: &[IpNet]| all.iter().map(IpNet::to_string).collect::<Vec<_>>();
            let prefixes = prefixes(&texts(&destinations), &texts(&excluded)).unwrap();
            for host in 0..=255 {
                let address = IpAddr::from([192, 0, 2, host]);
                let holds = |prefix: &IpNet| prefix.contains(&address);
                let expected = destinations.iter().any(holds) && !excluded.iter().any(holds);
                prop_assert_eq!(prefixes.iter().any(holds), expected, "{}", address);
            }
        }

        #[test]
        fn hostile_entries_never_panic_and_prefixes_have_no_host_bits(entries in prop::collection::vec("[0-9a-f.:/]{0,45}|.{0,20}", 0..5)) {
            if let Ok(prefixes) = prefixes(&entries, &[]) {
                prop_assert!(prefixes.len() <= entries.len());
                prop_assert!(prefixes.iter().all(|prefix| prefix.trunc() == *prefix));
            }
        }

        #[test]
        fn what_is_written_is_read(bits in any::<u128>(), length in 0..=128_u8) {
            let prefix = IpNet::new(std::net::Ipv6Addr::from_bits(bits).into(), length).unwrap();
            let read = prefixes(&[prefix.to_string()], &[]).unwrap();
            prop_assert_eq!(read, BTreeSet::from([prefix.trunc()]));
        }
    }
}

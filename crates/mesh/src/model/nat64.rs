//! Answers of a resolver about a NAT64 (RFC 7050).

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};

use fairlead_address::{InvalidNat64Prefix, Nat64Prefix};

/// Most addresses of an answer that are read.
const MAX_ANSWERS: usize = 16;

/// Answer of the resolver for [`fairlead_address::IPV4_ONLY_NAME`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Nat64Answer {
    /// The prefixes of the NAT64.
    pub prefixes: BTreeSet<Nat64Prefix>,
    /// Addresses that show no prefix, and why.
    pub refused: BTreeMap<Ipv6Addr, InvalidNat64Prefix>,
}

impl Nat64Answer {
    /// Reads the addresses of an answer. Those of IPv4 are what the name has everywhere.
    pub(crate) fn read(addresses: impl Iterator<Item = IpAddr>) -> Self {
        let mut answer = Self::default();
        let ipv6 = addresses.filter_map(|address| match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(address) => Some(address),
        });
        for address in ipv6.take(MAX_ANSWERS) {
            match Nat64Prefix::of_answer(address) {
                Ok(prefix) => drop(answer.prefixes.insert(prefix)),
                Err(reason) => drop(answer.refused.insert(address, reason)),
            }
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(addresses: &[&str]) -> Nat64Answer {
        Nat64Answer::read(addresses.iter().map(|text| text.parse().unwrap()))
    }

    #[test]
    fn an_answer_has_each_prefix_once_and_ipv4_says_nothing() {
        let answer = read(&[
            "192.0.0.170",
            "64:ff9b::192.0.0.170",
            "2001:db8:64::192.0.0.171",
            "64:ff9b::192.0.0.171",
            "fe80::192.0.0.170",
        ]);
        let prefixes: Vec<String> = answer.prefixes.iter().map(ToString::to_string).collect();
        assert_eq!(
            (prefixes, answer.refused.len()),
            (vec!["64:ff9b::/96".into(), "2001:db8:64::/96".into()], 1)
        );
        assert_eq!(read(&["192.0.0.170", "192.0.0.171"]), Nat64Answer::default());
    }
}

//! Facts that a gateway reads from the cluster: whose pods have which addresses, who may use the Egress, and where to.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fairlead_address::{IpFamily, PrefixSet};
use ipnet::IpNet;

/// Facts that decide which clients are accepted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Facts {
    /// The Nodes that there are.
    pub nodes: BTreeSet<String>,
    /// The AddressBlocks of each Node.
    pub blocks: NodePrefixes,
    /// `spec.podCIDRs` of each Node. They say nothing of an address that is in an AddressBlock.
    pub pod_cidrs: NodePrefixes,
    /// Namespaces whose pods may use the gateway; `None` is all.
    pub namespaces: Option<BTreeSet<String>>,
}

impl Facts {
    /// Whether pods of this namespace may use the gateway.
    pub fn allows(&self, namespace: &str) -> bool {
        self.namespaces.as_ref().is_none_or(|allowed| allowed.contains(namespace))
    }

    /// Whether an address is one of a pod of this Node.
    pub fn is_of(&self, node: &str, address: IpAddr) -> bool {
        self.nodes_of(address).any(|of| of == node)
    }

    /// The Nodes whose pods may have an address.
    pub fn nodes_of(&self, address: IpAddr) -> impl Iterator<Item = &str> {
        let is_in_block = self.blocks.of(address).next().is_some();
        let prefixes = if is_in_block { &self.blocks } else { &self.pod_cidrs };
        prefixes.of(address)
    }
}

/// Prefixes of Nodes, which are found by an address at a cost that does not depend on their number.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodePrefixes {
    nodes: BTreeMap<IpNet, BTreeSet<String>>,
    /// The lengths of these prefixes.
    lengths: BTreeSet<u8>,
}

impl NodePrefixes {
    /// Adds a prefix of a Node.
    pub fn add(&mut self, node: &str, prefix: IpNet) {
        self.lengths.insert(prefix.prefix_len());
        self.nodes.entry(prefix.trunc()).or_default().insert(node.to_owned());
    }

    /// The Nodes that have a prefix with this address.
    fn of(&self, address: IpAddr) -> impl Iterator<Item = &str> {
        // Lengths of IPv6 give no prefix of IPv4.
        let prefixes = self.lengths.iter().filter_map(move |length| IpNet::new(address, *length).ok());
        prefixes.filter_map(|prefix| self.nodes.get(&prefix.trunc())).flatten().map(String::as_str)
    }
}

/// Destinations that no gateway forwards to, whatever an Egress says: this host, link-local and multicast (RFC 6890, RFC 4291).
const NEVER: [&str; 8] = [
    "0.0.0.0/8",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "224.0.0.0/4",
    "255.255.255.255/32",
    "::/127",
    "fe80::/10",
    "ff00::/8",
];

/// Prefixes that clients may (`true`) and may not (`false`) send to, where the longest decides: the destinations of the Egress
/// without what it excludes and what is inside of the cluster. Prefixes that change nothing are left out.
pub fn destinations(
    wanted: impl IntoIterator<Item = IpNet>,
    excluded: impl IntoIterator<Item = IpNet>,
) -> BTreeMap<IpNet, bool> {
    let never = NEVER.iter().filter_map(|text| text.parse().ok());
    let forbidden: PrefixSet = excluded.into_iter().map(|prefix| prefix.trunc()).chain(never).collect();
    // Neighbouring prefixes have become one, so a prefix inside of what is forbidden is inside of one of these.
    let forbidden: Vec<IpNet> =
        IpFamily::BOTH.into_iter().flat_map(|family| forbidden.family(family).prefixes()).collect();
    let wanted: BTreeSet<IpNet> = wanted.into_iter().map(|prefix| prefix.trunc()).collect();
    let is_useful = |prefix: &&IpNet| !forbidden.iter().any(|other| other.contains(*prefix));
    let allowed: Vec<IpNet> = wanted.iter().filter(is_useful).copied().collect();
    let cuts = |prefix: &&IpNet| allowed.iter().any(|other| other.contains(*prefix));
    let forbidden = forbidden.iter().filter(cuts).map(|prefix| (*prefix, false));
    forbidden.chain(allowed.iter().map(|prefix| (*prefix, true))).collect()
}

/// Whether clients may send to an address, by what [`destinations`] returns.
pub fn may_send_to(destinations: &BTreeMap<IpNet, bool>, address: IpAddr) -> bool {
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let prefixes = (0..=longest).rev().filter_map(|length| IpNet::new(address, length).ok());
    prefixes.filter_map(|prefix| destinations.get(&prefix.trunc())).next().copied().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_longest_prefix_decides_about_a_destination() {
        let prefix = |text: &str| text.parse::<IpNet>().unwrap();
        let all = BTreeMap::from([
            (prefix("0.0.0.0/0"), true),
            (prefix("10.0.0.0/8"), false),
            (prefix("10.1.2.3/32"), true),
        ]);
        let may = |text: &str| may_send_to(&all, text.parse().unwrap());
        assert!(may("192.0.2.1") && may("10.1.2.3") && !may("10.1.2.4") && !may("2001:db8::1"));
        assert!(!may_send_to(&BTreeMap::new(), "192.0.2.1".parse().unwrap()));
    }

    #[test]
    fn a_block_says_whose_an_address_is_and_pod_cidrs_only_where_there_is_none() {
        let prefix = |text: &str| text.parse::<IpNet>().unwrap();
        let mut facts = Facts::default();
        facts.blocks.add("a", prefix("10.1.0.0/27"));
        facts.blocks.add("a", prefix("fd00::/123"));
        for all in ["0.0.0.0/0", "::/0"] {
            facts.pod_cidrs.add("b", prefix(all));
        }
        facts.pod_cidrs.add("c", prefix("10.2.0.9/24"));
        let of = |text: &str| facts.nodes_of(text.parse().unwrap()).collect::<Vec<_>>();
        assert_eq!([of("10.1.0.31"), of("fd00::1f")], [["a"], ["a"]]);
        assert_eq!([of("10.1.0.32"), of("fd00::20")], [["b"], ["b"]]);
        assert_eq!(of("10.2.0.1"), ["b", "c"]);
    }

    fn of(wanted: &[&str], cluster: &[&str]) -> Vec<(String, bool)> {
        let parse = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNet>>();
        let found = destinations(parse(wanted), parse(cluster));
        found.into_iter().map(|(prefix, allowed)| (prefix.to_string(), allowed)).collect()
    }

    #[test]
    fn the_cluster_is_cut_out_of_the_destinations() {
        let found =
            of(&["192.168.0.0/16", "10.1.2.0/24", "2001:db8::/32"], &["10.0.0.0/8", "192.168.7.0/24"]);
        let expected = [("192.168.0.0/16", true), ("192.168.7.0/24", false), ("2001:db8::/32", true)];
        assert_eq!(found, expected.map(|(prefix, allowed)| (prefix.to_owned(), allowed)));
        let all = of(&["0.0.0.0/0"], &[]);
        assert!(
            all.contains(&("169.254.0.0/16".to_owned(), false))
                && !all.contains(&("fe80::/10".to_owned(), false))
        );
    }

    fn longest(prefixes: &BTreeMap<IpNet, bool>, address: IpAddr) -> bool {
        let matching = prefixes.iter().filter(|(prefix, _)| prefix.contains(&address));
        matching.max_by_key(|(prefix, _)| prefix.prefix_len()).is_some_and(|(_, allowed)| *allowed)
    }

    /// Prefixes of few addresses, so that they often overlap.
    fn prefixes() -> impl Strategy<Value = Vec<IpNet>> {
        let prefix = (26u8..=32, 0u8..64).prop_map(|(length, last)| {
            IpNet::new([198, 51, 100, last].into(), length).unwrap_or_else(|_| unreachable!())
        });
        proptest::collection::vec(prefix, 0..8)
    }

    proptest! {
        #[test]
        fn only_destinations_outside_of_the_cluster_are_allowed(wanted in prefixes(), cluster in prefixes()) {
            let found = destinations(wanted.clone(), cluster.clone());
            for last in 0..64 {
                let address = IpAddr::from([198, 51, 100, last]);
                let is_in = |prefixes: &[IpNet]| prefixes.iter().any(|prefix| prefix.contains(&address));
                prop_assert_eq!(longest(&found, address), is_in(&wanted) && !is_in(&cluster), "{}", address);
            }
        }
    }
}

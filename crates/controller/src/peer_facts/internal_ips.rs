//! InternalIPs of Nodes that are believed. Pure.
//!
//! A kubelet writes the addresses of its own Node, and so does who has stolen its certificate. So an address stays with the Node that had
//! it first for as long as that Node has it, and an address that a Node says of itself later than its first ones is believed only if it is
//! like these. What an administrator grants goes before both.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use fairlead_address::is_private;
use ipnet::IpNet;

/// Most addresses of a Node that are copied.
const MAX_ADDRESSES: usize = 64;

/// A Node and what was copied of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Claimant {
    pub(super) name: String,
    /// UID of the Node.
    pub(super) uid: String,
    /// Seconds at which its WireKubePeer was created, and the UID of that: the order in which nodes joined, by which nodes judge, too.
    /// Without one it comes last, by the age of the Node.
    pub(super) since: (bool, i64, String),
    /// Addresses of type InternalIP of the Node.
    pub(super) addresses: BTreeSet<IpAddr>,
    /// Addresses that its WireKubePeer has as such.
    pub(super) copied: BTreeSet<IpAddr>,
    /// The addresses of the first copy; empty before.
    pub(super) first: BTreeSet<IpAddr>,
}

/// Addresses of a Node that are believed, and those that are not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Judged {
    pub(super) believed: BTreeSet<IpAddr>,
    /// Addresses of the first copy, which is this one where there was none.
    pub(super) first: BTreeSet<IpAddr>,
    pub(super) refused: BTreeMap<IpAddr, Why>,
}

/// Reason why an address of a Node is not believed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Why {
    /// Another Node of this name had it first.
    Held(String),
    /// The Node has more addresses than are copied.
    TooMany,
    /// A public address in no network of the first ones of the Node.
    Unlike,
}

/// Refused address of a Node, for people.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Refusal {
    pub(super) node: String,
    pub(super) text: String,
}

impl Judged {
    /// Refusals of the addresses of this Node but those that are excluded from the mesh: nothing needs them.
    pub(super) fn refusals(&self, node: &str, excluded: &[IpNet]) -> impl Iterator<Item = Refusal> {
        let is_excluded = |address: &IpAddr| excluded.iter().any(|prefix| prefix.contains(address));
        let refused = self.refused.iter().filter(move |(address, _)| !is_excluded(address));
        refused.map(move |(address, why)| Refusal {
            node: node.to_owned(),
            text: format!(
                "InternalIP {address} of Node {node} is not believed: {}",
                Words { node, address, why }
            ),
        })
    }
}

struct Words<'a> {
    node: &'a str,
    address: &'a IpAddr,
    why: &'a Why,
}

impl fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, address, why } = self;
        match why {
            Why::Held(holder) => write!(
                f,
                "Node {holder} had it first; give each Node its own, name it in routing.excludeCIDRs of the WireKubeMesh, delete Node {holder} if it is gone, or grant it to {node} in spec.grants"
            ),
            Why::TooMany => write!(f, "the Node has more than {MAX_ADDRESSES}"),
            Why::Unlike => write!(
                f,
                "it is a public address in none of the networks of those that the Node had first; if {address} is its own, grant it to {node} in spec.grants of the WireKubeMesh, or delete WireKubePeer {node}, which is then made anew"
            ),
        }
    }
}

/// Nodes that had addresses first, by UID, as far as this program has seen it.
#[derive(Debug, Default)]
pub(super) struct Holders(BTreeMap<IpAddr, String>);

impl Holders {
    /// Judges the addresses of all Nodes, by name. `is_granted` says what administrators let a Node have.
    pub(super) fn judge(
        &mut self,
        claimants: &[Claimant],
        is_granted: impl Fn(&str, &IpAddr) -> bool,
    ) -> BTreeMap<String, Judged> {
        let mut by_address: BTreeMap<IpAddr, Vec<&Claimant>> = BTreeMap::new();
        for claimant in claimants {
            for address in &claimant.addresses {
                by_address.entry(*address).or_default().push(claimant);
            }
        }
        let mut judged: BTreeMap<String, Judged> = BTreeMap::new();
        let mut holders = BTreeMap::new();
        for (address, rivals) in by_address {
            let Some(holder) = self.holder(&address, &rivals, &is_granted) else { continue };
            holders.insert(address, holder.uid.clone());
            for claimant in rivals {
                let of_node = judged.entry(claimant.name.clone()).or_default();
                let why = if claimant.name == holder.name {
                    let is_like =
                        is_granted(&claimant.name, &address) || is_like(&address, claimant.before());
                    let is_much = of_node.believed.len() >= MAX_ADDRESSES;
                    (!is_like).then_some(Why::Unlike).or_else(|| is_much.then_some(Why::TooMany))
                } else {
                    Some(Why::Held(holder.name.clone()))
                };
                if let Some(why) = why {
                    of_node.refused.insert(address, why);
                } else {
                    of_node.believed.insert(address);
                }
            }
        }
        self.0 = holders;
        for claimant in claimants {
            let of_node = judged.entry(claimant.name.clone()).or_default();
            let before = claimant.before();
            let first = if before.is_empty() { &of_node.believed } else { before };
            of_node.first = first.iter().take(MAX_ADDRESSES).copied().collect();
        }
        judged
    }

    /// The Node that has an address: to which it is granted, else which had it before, else of whose peer it is a copy, else that which joined first.
    fn holder<'a>(
        &self,
        address: &IpAddr,
        rivals: &[&'a Claimant],
        is_granted: impl Fn(&str, &IpAddr) -> bool,
    ) -> Option<&'a Claimant> {
        let before = self.0.get(address);
        rivals.iter().copied().min_by_key(|claimant| {
            (
                !is_granted(&claimant.name, address),
                before != Some(&claimant.uid),
                !claimant.copied.contains(address),
                &claimant.since,
            )
        })
    }
}

impl Claimant {
    /// The first addresses, or what an earlier program copied.
    fn before(&self) -> &BTreeSet<IpAddr> {
        if self.first.is_empty() { &self.copied } else { &self.first }
    }
}

/// Whether a Node that had the `first` addresses may have this one later: private addresses change, and so do those of one provider.
fn is_like(address: &IpAddr, first: &BTreeSet<IpAddr>) -> bool {
    let network = |address: &IpAddr| match address {
        IpAddr::V4(address) => u128::from(address.to_bits() >> 16),
        IpAddr::V6(address) => address.to_bits() >> 96,
    };
    let is_near = |other: &IpAddr| other.is_ipv4() == address.is_ipv4() && network(other) == network(address);
    first.is_empty() || is_private(*address) || first.iter().any(is_near)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> BTreeSet<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn claimant(name: &str, created: i64, present: &[&str], copied: &[&str]) -> Claimant {
        Claimant {
            name: name.to_owned(),
            uid: name.to_owned(),
            since: (false, created, name.to_owned()),
            addresses: addresses(present),
            copied: addresses(copied),
            first: BTreeSet::new(),
        }
    }

    fn none(_: &str, _: &IpAddr) -> bool {
        false
    }

    fn believed(judged: &BTreeMap<String, Judged>, name: &str) -> BTreeSet<IpAddr> {
        judged[name].believed.clone()
    }

    #[test]
    fn an_address_stays_with_the_node_that_had_it_first_and_both_are_named() {
        let mut holders = Holders::default();
        let victim = claimant("victim", 2, &["192.0.2.2"], &[]);
        holders.judge(&[claimant("thief", 1, &["192.0.2.1"], &[]), victim.clone()], none);
        // The kubelet of an older Node says that it has the address of another.
        let thief = claimant("thief", 1, &["192.0.2.1", "192.0.2.2"], &["192.0.2.1"]);
        let both = [thief.clone(), victim];
        let judged = holders.judge(&both, none);
        assert_eq!(believed(&judged, "victim"), addresses(&["192.0.2.2"]));
        assert_eq!(believed(&judged, "thief"), addresses(&["192.0.2.1"]));
        let refusals: Vec<Refusal> = judged["thief"].refusals("thief", &[]).collect();
        assert_eq!(
            refusals[0].text,
            "InternalIP 192.0.2.2 of Node thief is not believed: Node victim had it first; give each Node its own, name it in \
             routing.excludeCIDRs of the WireKubeMesh, delete Node victim if it is gone, or grant it to thief in spec.grants"
        );
        let excluded = ["192.0.2.2/32".parse().unwrap()];
        assert_eq!(judged["thief"].refusals("thief", &excluded).count(), 0);
        // Another program takes over: what was copied says who had it.
        let victim = claimant("victim", 2, &["192.0.2.2"], &["192.0.2.2"]);
        let judged = Holders::default().judge(&[thief.clone(), victim.clone()], none);
        assert_eq!(believed(&judged, "victim"), addresses(&["192.0.2.2"]));
        // It is there while it has no address, and gone when it is gone.
        let moved = Claimant { addresses: addresses(&["192.0.2.3"]), ..victim.clone() };
        assert_eq!(believed(&holders.judge(&[thief.clone(), moved], none), "thief").len(), 2);
        assert_eq!(believed(&holders.judge(std::slice::from_ref(&thief), none), "thief").len(), 2);
        // Now that one has it, until an administrator says more.
        let both = [thief, victim];
        assert_eq!(believed(&holders.judge(&both, none), "victim").len(), 0);
        let granted = |node: &str, address: &IpAddr| {
            node == "victim" && *address == "192.0.2.2".parse::<IpAddr>().unwrap()
        };
        assert_eq!(believed(&holders.judge(&both, granted), "victim").len(), 1);
    }

    #[test]
    fn of_two_that_are_seen_at_once_the_one_that_joined_first_has_it() {
        let both = [claimant("new", 2, &["10.0.0.1"], &[]), claimant("old", 1, &["10.0.0.1"], &[])];
        let judged = Holders::default().judge(&both, none);
        assert_eq!((believed(&judged, "old").len(), believed(&judged, "new").len()), (1, 0));
    }

    #[test]
    fn a_node_gets_a_public_address_only_near_its_first_ones_or_by_a_grant() {
        let mut holders = Holders::default();
        let new = claimant("n", 1, &["192.168.1.10", "2001:db8:1::10"], &[]);
        let judged = holders.judge(std::slice::from_ref(&new), none);
        assert_eq!((judged["n"].first.len(), judged["n"].refused.len()), (2, 0), "all of the first");
        let later = |present: &[&str]| Claimant {
            first: judged["n"].first.clone(),
            copied: judged["n"].first.clone(),
            addresses: addresses(present),
            ..new.clone()
        };
        let moved = later(&["192.168.7.20", "2001:db8:ffff::10"]);
        assert_eq!(holders.judge(&[moved], none)["n"].refused.len(), 0, "by DHCP, and with another prefix");
        let bank = later(&["192.168.1.10", "203.0.114.80", "2600::1"]);
        let judged = holders.judge(std::slice::from_ref(&bank), none);
        assert_eq!(judged["n"].refused.values().collect::<Vec<_>>(), [&Why::Unlike, &Why::Unlike]);
        assert_eq!(judged["n"].believed, addresses(&["192.168.1.10"]));
        // Nor after it has said that it has none.
        let emptied = Claimant { copied: BTreeSet::new(), ..bank.clone() };
        assert_eq!(holders.judge(&[emptied], none)["n"].refused.len(), 2);
        assert_eq!(holders.judge(&[bank], |_, _| true)["n"].refused.len(), 0);
        // An earlier program copied addresses, and did not write which were the first.
        let upgraded = claimant("n", 1, &["203.0.114.80"], &["192.168.1.10"]);
        assert_eq!(holders.judge(&[upgraded], none)["n"].refused.len(), 1);
        let as_before = claimant("n", 1, &["203.0.114.80"], &["203.0.114.80"]);
        assert_eq!(holders.judge(&[as_before], none)["n"].refused.len(), 0, "what was in use stays");
    }

    #[test]
    fn a_node_has_a_bounded_number_of_addresses() {
        let many: Vec<String> = (0..100).map(|number| format!("10.0.0.{number}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let judged = Holders::default().judge(&[claimant("n", 1, &many, &[])], none);
        assert_eq!((judged["n"].believed.len(), judged["n"].refused.len()), (64, 36));
    }
}

//! The owners of inner addresses: WireGuard's cryptokey routing table (WireGuard paper 2).

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use fairlead_keys::PublicKey;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use prefix_trie::{PrefixMap, PrefixSet};

/// Prefixes and their owners. A prefix has exactly one owner; the longest one wins.
#[derive(Default)]
pub(crate) struct AllowedIps {
    v4: PrefixMap<Ipv4Net, PublicKey>,
    v6: PrefixMap<Ipv6Net, PublicKey>,
    /// The same table the other way round, so that a change of one peer touches no other: sorted, each prefix once.
    by_owner: HashMap<PublicKey, Vec<IpNet>>,
}

impl AllowedIps {
    /// Assigns exactly these prefixes to `owner`; another peer loses those it had.
    pub(crate) fn replace(&mut self, owner: PublicKey, prefixes: &[IpNet]) {
        let mut wanted: Vec<IpNet> = prefixes.iter().map(IpNet::trunc).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let present = self.by_owner.remove(&owner).unwrap_or_default();
        for prefix in present.iter().filter(|prefix| wanted.binary_search(prefix).is_err()) {
            self.remove(prefix);
        }
        for prefix in &wanted {
            let previous = self.assign(*prefix, owner);
            if let Some(loser) = previous.filter(|previous| *previous != owner)
                && let Some(owned) = self.by_owner.get_mut(&loser)
            {
                owned.retain(|kept| kept != prefix);
            }
        }
        if !wanted.is_empty() {
            self.by_owner.insert(owner, wanted);
        }
    }

    /// The prefixes of one peer, sorted.
    pub(crate) fn of(&self, owner: &PublicKey) -> Vec<IpNet> {
        self.by_owner.get(owner).cloned().unwrap_or_default()
    }

    /// Owner of `address`: the peer with the longest prefix that contains it.
    pub(crate) fn owner(&self, address: IpAddr) -> Option<&PublicKey> {
        match address {
            IpAddr::V4(v4) => self.v4.get_lpm(&v4.into()).map(|(_, owner)| owner),
            IpAddr::V6(v6) => self.v6.get_lpm(&v6.into()).map(|(_, owner)| owner),
        }
    }

    fn assign(&mut self, prefix: IpNet, owner: PublicKey) -> Option<PublicKey> {
        match prefix {
            IpNet::V4(v4) => self.v4.insert(v4, owner),
            IpNet::V6(v6) => self.v6.insert(v6, owner),
        }
    }

    fn remove(&mut self, prefix: &IpNet) {
        match prefix {
            IpNet::V4(v4) => self.v4.remove(v4),
            IpNet::V6(v6) => self.v6.remove(v6),
        };
    }
}

/// Prefixes that peers may send from, beside those that they own.
#[derive(Default)]
pub(crate) struct AcceptedIps(HashMap<PublicKey, (PrefixSet<Ipv4Net>, PrefixSet<Ipv6Net>)>);

impl AcceptedIps {
    pub(crate) fn new(prefixes: &BTreeMap<PublicKey, Vec<IpNet>>) -> Self {
        let mut accepted = Self::default();
        for (sender, prefixes) in prefixes {
            let (v4, v6) = accepted.0.entry(*sender).or_default();
            for prefix in prefixes {
                match prefix.trunc() {
                    IpNet::V4(prefix) => v4.insert(prefix),
                    IpNet::V6(prefix) => v6.insert(prefix),
                };
            }
        }
        accepted
    }

    /// Whether `sender` may send from `address`.
    pub(crate) fn contains(&self, sender: &PublicKey, address: IpAddr) -> bool {
        self.0.get(sender).is_some_and(|(v4, v6)| match address {
            IpAddr::V4(address) => v4.get_lpm(&address.into()).is_some(),
            IpAddr::V6(address) => v6.get_lpm(&address.into()).is_some(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::{Ipv4Addr, Ipv6Addr};

    use proptest::prelude::*;

    use super::*;

    fn key(number: u8) -> PublicKey {
        PublicKey([number; 32])
    }

    #[test]
    fn a_prefix_moves_from_its_old_owner_to_the_new_one() {
        let mut table = AllowedIps::default();
        let (wide, narrow): (IpNet, IpNet) = ("10.0.0.0/8".parse().unwrap(), "10.1.0.0/16".parse().unwrap());
        table.replace(key(1), &[wide, narrow]);
        table.replace(key(2), &[narrow]);
        assert_eq!(table.owner("10.1.2.3".parse().unwrap()), Some(&key(2)));
        assert_eq!(table.owner("10.2.2.3".parse().unwrap()), Some(&key(1)));
        assert_eq!(table.of(&key(1)), [wide]);

        table.replace(key(2), &[]);
        assert_eq!(table.owner("10.1.2.3".parse().unwrap()), Some(&key(1)));
        assert_eq!(table.of(&key(2)), []);
    }

    #[test]
    fn host_bits_are_ignored() {
        let mut table = AllowedIps::default();
        table.replace(key(1), &["fd00::5/64".parse().unwrap()]);
        assert_eq!(table.of(&key(1)), ["fd00::/64".parse::<IpNet>().unwrap()]);
        assert_eq!(table.owner("fd00::9".parse().unwrap()), Some(&key(1)));
    }

    /// Few distinct bits, so that prefixes collide and nest.
    fn prefix() -> impl Strategy<Value = IpNet> {
        prop_oneof![
            (0_u32..16, 0_u8..=32).prop_map(|(bits, length)| {
                IpNet::new(Ipv4Addr::from(bits << 27 | bits).into(), length).unwrap()
            }),
            (0_u128..16, 0_u8..=128).prop_map(|(bits, length)| {
                IpNet::new(Ipv6Addr::from(bits << 123 | bits).into(), length).unwrap()
            }),
        ]
    }

    fn naive_owner(model: &BTreeMap<IpNet, PublicKey>, address: IpAddr) -> Option<&PublicKey> {
        let covering = model.iter().filter(|(prefix, _)| prefix.contains(&address));
        covering.max_by_key(|(prefix, _)| prefix.prefix_len()).map(|(_, owner)| owner)
    }

    proptest! {
        #[test]
        fn agrees_with_a_plain_list(
            changes in prop::collection::vec((0_u8..4, prop::collection::vec(prefix(), 0..6)), 0..12),
            probes in prop::collection::vec(prefix(), 1..20),
        ) {
            let mut table = AllowedIps::default();
            let mut model = BTreeMap::new();
            for (owner, prefixes) in &changes {
                table.replace(key(*owner), prefixes);
                model.retain(|_, present| *present != key(*owner));
                model.extend(prefixes.iter().map(|prefix| (prefix.trunc(), key(*owner))));
            }
            for probe in probes {
                prop_assert_eq!(table.owner(probe.addr()), naive_owner(&model, probe.addr()));
            }
            for owner in 0..4 {
                let expected: Vec<IpNet> =
                    model.iter().filter(|(_, present)| **present == key(owner)).map(|(prefix, _)| *prefix).collect();
                prop_assert_eq!(table.of(&key(owner)), expected);
            }
        }
    }
}

//! Addresses at which peers see this node: the source addresses of its probes, as answers to them say. Other peers reach it there if its
//! NAT has one mapping for all destinations; so an address counts only if peers at two addresses see it, or if only one peer sees any of
//! that family. One peer that lies can then at most add an address where no other peer sees this node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fairlead_address::{canonical, is_reachable, without_nat64};
use fairlead_keys::PublicKey;

/// Most addresses that count: one for each uplink of a host, and some more.
const MAX_ADDRESSES: usize = 8;
/// Time in which a peer changes its mind at most once: what counts is published to all nodes, and one peer may decide it alone.
const MIN_INTERVAL: Duration = Duration::from_secs(30);

/// Address that each peer saw last, by family.
#[derive(Debug, Default)]
pub(crate) struct ReflexiveAddresses {
    seen: BTreeMap<(PublicKey, bool), Seen>,
    agreed: BTreeSet<SocketAddr>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    by: IpAddr,
    address: SocketAddr,
    since: Duration,
}

impl ReflexiveAddresses {
    /// Takes what the answer of a peer at `by` says. Whether [`Self::agreed`] is another set now.
    pub(crate) fn insert(
        &mut self,
        now: Duration,
        peer: PublicKey,
        by: SocketAddr,
        observed: SocketAddr,
    ) -> bool {
        // A peer behind a NAT64 may not know that it is.
        let address = canonical(without_nat64(&[], observed));
        // By way of a relay a peer sees an address of its own host.
        if !is_reachable(address.ip()) || !is_reachable(by.ip()) || address.port() == 0 {
            return false;
        }
        let view = (peer, address.is_ipv4());
        let stays = |before: &Seen| {
            let is_same = (before.by, before.address) == (by.ip(), address);
            is_same || now.saturating_sub(before.since) < MIN_INTERVAL
        };
        if self.seen.get(&view).is_some_and(stays) {
            return false;
        }
        self.seen.insert(view, Seen { by: by.ip(), address, since: now });
        self.update()
    }

    pub(crate) fn forget(&mut self, peer: &PublicKey) {
        for is_ipv4 in [false, true] {
            self.seen.remove(&(*peer, is_ipv4));
        }
        // What the others see is decided when they say something else: one peer less changes nothing for them.
    }

    /// The network changed: what was seen is out of date.
    pub(crate) fn clear(&mut self) {
        self.seen.clear();
    }

    /// The addresses that count.
    pub(crate) fn agreed(&self) -> BTreeSet<SocketAddr> {
        self.agreed.clone()
    }

    fn update(&mut self) -> bool {
        let mut observers: BTreeMap<SocketAddr, BTreeSet<IpAddr>> = BTreeMap::new();
        for seen in self.seen.values() {
            observers.entry(seen.address).or_default().insert(seen.by);
        }
        let of_family = |is_ipv4| self.seen.keys().filter(|(_, family)| *family == is_ipv4).count();
        let ipv6 = of_family(false);
        let ipv4 = of_family(true);
        let counts = |(address, by): &(SocketAddr, BTreeSet<IpAddr>)| {
            by.len() >= 2 || if address.is_ipv4() { ipv4 == 1 } else { ipv6 == 1 }
        };
        let mut agreed: Vec<(SocketAddr, BTreeSet<IpAddr>)> = observers.into_iter().filter(counts).collect();
        agreed.sort_by_key(|(_, by)| std::cmp::Reverse(by.len()));
        let agreed = agreed.into_iter().take(MAX_ADDRESSES).map(|(address, _)| address).collect();
        std::mem::replace(&mut self.agreed, agreed) != self.agreed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn key(number: u8) -> PublicKey {
        PublicKey([number; 32])
    }

    /// Takes `(peer, its address, what it sees)` one after the other.
    fn after(answers: &[(u8, &str, &str)]) -> Vec<String> {
        let mut addresses = ReflexiveAddresses::default();
        for (peer, by, observed) in answers {
            addresses.insert(Duration::ZERO, key(*peer), address(by), address(observed));
        }
        addresses.agreed().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_two_peers_see_counts_in_each_family() {
        let answers = [
            (1, "192.0.2.1:1", "203.0.113.7:40000"),
            (2, "192.0.2.2:1", "203.0.113.7:40000"),
            (1, "[2001:db8::1]:1", "[2001:db8:7::7]:51820"),
            (2, "[2001:db8::2]:1", "[2001:db8:7::7]:51820"),
        ];
        assert_eq!(after(&answers), ["203.0.113.7:40000", "[2001:db8:7::7]:51820"]);
        assert_eq!(after(&answers[..1]), ["203.0.113.7:40000"], "the only peer");
    }

    #[test]
    fn behind_a_symmetric_nat_nothing_counts_and_a_liar_stands_alone() {
        let symmetric = [(1, "192.0.2.1:1", "203.0.113.7:40000"), (2, "192.0.2.2:1", "203.0.113.7:40001")];
        assert_eq!(after(&symmetric), [""; 0]);
        // Two peers behind one address are one observer: a NAT may map by address alone.
        let neighbours = [
            (1, "192.0.2.1:1", "203.0.113.7:40000"),
            (2, "192.0.2.1:2", "203.0.113.7:40000"),
            (3, "192.0.2.3:1", "203.0.113.7:40002"),
        ];
        assert_eq!(after(&neighbours), [""; 0]);
        let liar = [
            (1, "192.0.2.1:1", "203.0.113.7:40000"),
            (2, "192.0.2.2:1", "203.0.113.7:40000"),
            (3, "192.0.2.3:1", "198.51.100.99:53"),
        ];
        assert_eq!(after(&liar), ["203.0.113.7:40000"]);
    }

    #[test]
    fn what_cannot_be_an_address_of_this_node_is_left_out() {
        for observed in ["127.0.0.1:1", "0.0.0.0:1", "224.0.0.1:1", "203.0.113.7:0", "[fe80::1]:1"] {
            assert_eq!(after(&[(1, "192.0.2.1:1", observed)]), [""; 0]);
        }
        assert_eq!(after(&[(1, "127.64.0.1:1", "203.0.113.7:1")]), [""; 0], "a relay has its own view");
    }

    #[test]
    fn only_another_set_is_news() {
        let mut addresses = ReflexiveAddresses::default();
        let (one, two) = (address("192.0.2.1:1"), address("192.0.2.2:1"));
        let (before, now) = (address("203.0.113.7:40000"), address("203.0.113.7:50000"));
        let mut clock = Duration::ZERO;
        let mut insert = |peer, by, seen| {
            clock += MIN_INTERVAL;
            addresses.insert(clock, key(peer), by, seen)
        };
        assert_eq!(
            [insert(1, one, before), insert(2, two, before), insert(2, two, before)],
            [true, false, false]
        );
        // The NAT rebinds: the old address goes with the first answer, the new one comes with the second.
        assert_eq!([insert(1, one, now), insert(2, two, now)], [true, true]);
        assert_eq!(addresses.agreed(), [now].into());
        addresses.clear();
        assert_eq!(addresses.agreed(), [now].into(), "until something else is known");
    }

    /// Each change is written to the API server, and read by all nodes.
    #[test]
    fn a_peer_that_says_something_else_each_time_is_seldom_heard() {
        let mut addresses = ReflexiveAddresses::default();
        let by = address("192.0.2.1:1");
        let say = |second: u64| {
            let observed = address(&format!("203.0.113.7:{}", 40_000 + second));
            addresses.insert(Duration::from_secs(second), key(1), by, observed)
        };
        assert_eq!((0..600).map(say).filter(|is_news| *is_news).count(), 20);
    }
}

//! The gateway of a client, or of one of its flows, by rendezvous hashing (Thaler and Ravishankar, "A Name-Based Mapping Scheme
//! for Rendezvous", 1996): each ready gateway has a weight for the key, and the greatest weight wins. Every node comes to the same
//! gateway without asking another, and one that goes takes only its own clients with it.
//!
//! The weight is defined by bytes, so that a BPF program computes the same:
//!
//! 1. The bytes of the key: for a client its address. For a flow source address, destination address, protocol (one byte), source
//!    port and destination port (two bytes each, network byte order). Where a protocol has no ports, they are zero.
//! 2. The bytes of the gateway's address.
//! 3. FNV-1a with 64 bits over both (RFC 9923): begin with [`OFFSET_BASIS`]; for each byte, exclusive or with the byte, then
//!    multiply by [`PRIME`], modulo 2^64.
//! 4. [`mix`], as the last bytes, in which gateways differ, change too little in FNV-1a.
//!
//! An address has 16 bytes; of IPv4 it is the IPv4-mapped one (RFC 4291, section 2.5.5.2). Between equal weights the lower address
//! wins.

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv6Addr};

/// Initial value of a hash of FNV-1a with 64 bits: its offset basis.
pub const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
/// Prime of FNV-1a with 64 bits, by which a hash is multiplied.
pub const PRIME: u64 = 0x0000_0100_0000_01b3;

/// Key for which a gateway is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Key {
    /// All that a client sends (`sessionAffinity: ClientIP`).
    Client(IpAddr),
    /// One flow (`sessionAffinity: None`).
    Flow(Flow),
}

/// A flow as a client sends it, inside of the tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Address of the client.
    pub source: IpAddr,
    /// Address outside of the cluster.
    pub destination: IpAddr,
    /// Protocol (IANA, "Assigned Internet Protocol Numbers").
    pub protocol: u8,
    /// Source port; zero where there is none.
    pub source_port: u16,
    /// Destination port; zero where there is none.
    pub destination_port: u16,
}

/// The gateway for this key, of those that are ready, in any order; `None` if none is.
pub fn choose(key: Key, ready: impl IntoIterator<Item = IpAddr>) -> Option<IpAddr> {
    ready.into_iter().max_by_key(|gateway| (weight(key, *gateway), Reverse(octets(*gateway))))
}

/// The weight of a gateway for this key.
pub fn weight(key: Key, gateway: IpAddr) -> u64 {
    mix(fnv1a(key.hash(), &octets(gateway)))
}

/// The finalizer of MurmurHash3 for 64 bits: every bit of the result depends on every bit.
pub fn mix(mut hash: u64) -> u64 {
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

impl Key {
    /// FNV-1a of its bytes.
    fn hash(self) -> u64 {
        match self {
            Self::Client(address) => fnv1a(OFFSET_BASIS, &octets(address)),
            Self::Flow(Flow { source, destination, protocol, source_port, destination_port }) => {
                let mut hash = fnv1a(OFFSET_BASIS, &octets(source));
                hash = fnv1a(hash, &octets(destination));
                hash = fnv1a(hash, &[protocol]);
                hash = fnv1a(hash, &source_port.to_be_bytes());
                fnv1a(hash, &destination_port.to_be_bytes())
            }
        }
    }
}

fn fnv1a(state: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(state, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}

fn octets(address: IpAddr) -> [u8; 16] {
    let mapped: Ipv6Addr = match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    mapped.octets()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn flow(source_port: u16) -> Key {
        Key::Flow(Flow {
            source: address("10.20.30.40"),
            destination: address("9.9.9.9"),
            protocol: 6,
            source_port,
            destination_port: 443,
        })
    }

    #[test]
    fn hashes_are_those_of_the_definitions() {
        // Of "", "a" and "foobar", as FNV's authors publish them.
        assert_eq!(fnv1a(OFFSET_BASIS, b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(OFFSET_BASIS, b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(OFFSET_BASIS, b"foobar"), 0x8594_4171_f739_67e8);
        assert_eq!((mix(0), mix(1)), (0, 0xb456_bcfc_34c2_cb2c));
    }

    /// Programs of different versions must agree.
    #[test]
    fn weights_never_change() {
        assert_eq!(weight(Key::Client(address("10.20.30.40")), address("10.64.0.1")), 0x3ee9_950d_b96a_70ea);
        assert_eq!(weight(flow(40000), address("fd00::1")), 0xbcdc_c7bb_2a08_36c9);
    }

    #[test]
    fn without_a_ready_gateway_there_is_none() {
        assert_eq!(choose(flow(1), []), None);
    }

    #[test]
    fn flows_and_clients_spread_evenly() {
        let ready: Vec<IpAddr> = (1..=4).map(|host| Ipv4Addr::new(10, 64, 0, host).into()).collect();
        let clients = (0..4000).map(|host| Key::Client(Ipv4Addr::from_bits(0x0a14_0000 + host).into()));
        let flows = (0..4000).map(|port| flow(32768 + port));
        for keys in [clients.collect::<Vec<_>>(), flows.collect()] {
            let mut counts = BTreeMap::new();
            for key in keys {
                *counts.entry(choose(key, ready.iter().copied()).unwrap()).or_insert(0) += 1;
            }
            // 1,000 each; the standard deviation is 27.
            assert!(
                counts.len() == 4 && counts.values().all(|count| (880..1120).contains(count)),
                "{counts:?}"
            );
        }
    }

    fn any_address() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            any::<u32>().prop_map(|bits| Ipv4Addr::from_bits(bits).into()),
            any::<u128>().prop_map(|bits| Ipv6Addr::from_bits(bits).into())
        ]
    }

    proptest! {
        #[test]
        fn a_gateway_that_goes_moves_only_what_it_had(
            clients in prop::collection::vec(any_address(), 1..50),
            ready in prop::collection::btree_set(any_address(), 2..10),
            gone in any::<prop::sample::Index>(),
            shuffle in any::<bool>(),
        ) {
            let gone = *gone.get(&ready.iter().copied().collect::<Vec<_>>());
            let rest: BTreeSet<IpAddr> = ready.iter().copied().filter(|gateway| *gateway != gone).collect();
            for client in clients.into_iter().map(Key::Client) {
                let before = choose(client, ready.iter().copied()).unwrap();
                let after = if shuffle { choose(client, rest.iter().rev().copied()) } else { choose(client, rest.iter().copied()) };
                if before == gone {
                    prop_assert!(rest.contains(&after.unwrap()));
                } else {
                    prop_assert_eq!(after, Some(before));
                }
            }
        }
    }
}

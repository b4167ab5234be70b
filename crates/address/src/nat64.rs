//! NAT64: IPv4 addresses inside IPv6 addresses (RFC 6052), and how a node learns the prefix of its network (RFC 7050).

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::class::{UnusablePrefix, is_reachable, unusable};

/// The name that has only these IPv4 addresses: an IPv6 address of it was made by a DNS64 (RFC 7050, section 8).
pub const IPV4_ONLY_NAME: &str = "ipv4only.arpa";
/// Addresses of [`IPV4_ONLY_NAME`] (RFC 7050, section 8).
const IPV4_ONLY_ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 0, 170), Ipv4Addr::new(192, 0, 0, 171)];
/// The lengths that a prefix may have (RFC 6052, section 2.2).
const LENGTHS: [u8; 6] = [32, 40, 48, 56, 64, 96];
/// Bits 64 to 71, which are zero in every address of this kind (RFC 6052, section 2.2).
const RESERVED: u128 = 0xff << 56;

/// A prefix whose addresses a NAT64 translates to the IPv4 addresses in them: `Pref64::/n` of RFC 7050.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nat64Prefix(Ipv6Net);

/// Reason why no NAT64 can have a prefix, or why an answer for [`IPV4_ONLY_NAME`] shows none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidNat64Prefix {
    /// One of the two IPv4 addresses is in it more than once.
    #[error("it contains an IPv4 address of {IPV4_ONLY_NAME} more than once")]
    Ambiguous,
    /// The length is none of RFC 6052, section 2.2.
    #[error("its length is none of 32, 40, 48, 56, 64 and 96")]
    Length,
    /// No such IPv4 address is in it.
    #[error("it contains no IPv4 address of {IPV4_ONLY_NAME}")]
    NotTranslated,
    /// Bits 64 to 71 are not zero.
    #[error("its bits 64 to 71 are not zero")]
    Reserved,
    /// Addresses of the prefix have another meaning, as [`unusable`] finds it.
    #[error("{0}")]
    Unusable(UnusablePrefix),
}

impl Nat64Prefix {
    /// `64:ff9b::/96`, the Well-Known Prefix (RFC 6052, section 2.1).
    pub const WELL_KNOWN: Self = Self(Ipv6Net::new_assert(Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96));

    /// Checks a prefix.
    ///
    /// # Errors
    /// See [`InvalidNat64Prefix`].
    pub fn new(prefix: Ipv6Net) -> Result<Self, InvalidNat64Prefix> {
        let prefix = prefix.trunc();
        if !LENGTHS.contains(&prefix.prefix_len()) {
            return Err(InvalidNat64Prefix::Length);
        }
        if prefix.network().to_bits() & RESERVED != 0 {
            return Err(InvalidNat64Prefix::Reserved);
        }
        unusable(&IpNet::V6(prefix)).map_or(Ok(Self(prefix)), |why| Err(InvalidNat64Prefix::Unusable(why)))
    }

    /// The prefix with which a DNS64 made this address of [`IPV4_ONLY_NAME`] (RFC 7050, section 3).
    ///
    /// # Errors
    /// See [`InvalidNat64Prefix`].
    pub fn of_answer(address: Ipv6Addr) -> Result<Self, InvalidNat64Prefix> {
        let is_known = |prefix: &Ipv6Net| IPV4_ONLY_ADDRESSES.contains(&extract(prefix, address));
        let mut found =
            LENGTHS.iter().filter_map(|length| Ipv6Net::new(address, *length).ok()).filter(is_known);
        match (found.next(), found.next()) {
            (Some(prefix), None) => Self::new(prefix),
            (Some(_), Some(_)) => Err(InvalidNat64Prefix::Ambiguous),
            (None, _) => Err(InvalidNat64Prefix::NotTranslated),
        }
    }

    /// The prefix itself.
    pub fn network(&self) -> Ipv6Net {
        self.0
    }

    /// The IPv6 address that is translated to an IPv4 address. `None` for one without global meaning in the Well-Known Prefix (RFC
    /// 6052, section 3.1).
    pub fn embed(&self, address: Ipv4Addr) -> Option<Ipv6Addr> {
        if *self == Self::WELL_KNOWN && !is_global(address) {
            return None;
        }
        let bits = u128::from(address.to_bits());
        let embedded = if self.0.prefix_len() == 96 {
            bits
        } else {
            // The part before bit 64 stays where it is; what is behind it makes room for the reserved byte.
            let placed = bits << 96_u32.saturating_sub(self.0.prefix_len().into());
            let behind = placed & u128::from(u64::MAX);
            (placed ^ behind) | behind >> 8
        };
        Some(Ipv6Addr::from_bits(self.0.network().to_bits() | embedded))
    }

    /// The IPv4 address in an IPv6 address; `None` outside of the prefix. The reserved bits and those behind the IPv4 address do
    /// not count, as they do not for a translator.
    pub fn extract(&self, address: Ipv6Addr) -> Option<Ipv4Addr> {
        self.0.contains(&address).then(|| extract(&self.0, address))
    }
}

impl fmt::Display for Nat64Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The IPv4 address of an endpoint within one of the prefixes, or within the Well-Known Prefix; any other endpoint as it is. An
/// endpoint within a prefix of its own network means nothing to a node elsewhere.
pub fn without_nat64(prefixes: &[Nat64Prefix], endpoint: SocketAddr) -> SocketAddr {
    let IpAddr::V6(address) = endpoint.ip() else { return endpoint };
    let mut prefixes = prefixes.iter().chain([&Nat64Prefix::WELL_KNOWN]);
    let embedded = prefixes.find_map(|prefix| prefix.extract(address));
    embedded.map_or(endpoint, |address| SocketAddr::new(address.into(), endpoint.port()))
}

/// NAT64 of a node's network (RFC 6146), through which a node without an IPv4 route reaches IPv4 endpoints.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Nat64 {
    /// Prefixes of the NAT64; empty where there is none.
    pub prefixes: Vec<Nat64Prefix>,
    /// Destinations that the node reaches without it.
    pub ipv4_routes: Vec<Ipv4Net>,
}

impl Nat64 {
    /// The endpoints that are translated to an IPv4 endpoint, one for each prefix. None for what the node has a route to, and for
    /// what no packet through a NAT64 can arrive at.
    pub fn endpoints(&self, endpoint: SocketAddr) -> Vec<SocketAddr> {
        let IpAddr::V4(address) = endpoint.ip().to_canonical() else { return Vec::new() };
        if !is_reachable(address.into()) || self.ipv4_routes.iter().any(|route| route.contains(&address)) {
            return Vec::new();
        }
        let embedded = self.prefixes.iter().filter_map(|prefix| prefix.embed(address));
        embedded.map(|embedded| SocketAddr::new(embedded.into(), endpoint.port())).collect()
    }

    /// The endpoint as other nodes know it ([`without_nat64`]).
    pub fn original(&self, endpoint: SocketAddr) -> SocketAddr {
        without_nat64(&self.prefixes, endpoint)
    }
}

/// Takes the four bytes behind the prefix, without the reserved one.
fn extract(prefix: &Ipv6Net, address: Ipv6Addr) -> Ipv4Addr {
    let bits = address.to_bits();
    let length = u32::from(prefix.prefix_len());
    let placed = if length == 96 {
        bits
    } else {
        let behind = bits & u128::from(u64::MAX);
        ((bits ^ behind) | behind << 8 & u128::from(u64::MAX)) >> 96_u32.saturating_sub(length)
    };
    Ipv4Addr::from_bits((placed & u128::from(u32::MAX)) as u32)
}

/// Whether an address is not private, shared, reserved or for documentation (RFC 6890).
fn is_global(address: Ipv4Addr) -> bool {
    let [first, second, third, _] = address.octets();
    let is_special = match (first, second, third) {
        (0 | 224.., ..) | (100, 64..=127, _) | (192, 0, 0) | (198, 18 | 19, _) => true,
        _ => address.is_private() || address.is_loopback() || address.is_link_local(),
    };
    !(is_special || address.is_documentation())
}

#[cfg(test)]
mod tests;

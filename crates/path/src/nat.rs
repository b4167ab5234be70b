//! The kind of NAT in front of this node, from the endpoints at which peers observe it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use fairlead_address::{canonical, is_private};

use crate::filtering::Filtering;

/// Type of the NAT in front of a node, by its mappings of the WireGuard port. Names are those of the peer resource's `natType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum NatType {
    /// Too few observations.
    #[default]
    Unknown,
    /// No NAT: observed at an address of its own.
    Open,
    /// One mapping for all destinations (endpoint-independent mapping, RFC 4787, 4.1). Its filtering is not known, or does not
    /// depend on ports.
    Cone,
    /// One mapping for all destinations, and only answers come in (address and port-dependent filtering, RFC 4787, 5).
    PortRestrictedCone,
    /// Another mapping for each destination (address- or port-dependent mapping, RFC 4787, 4.1).
    Symmetric,
}

impl NatType {
    /// The type after a new classification: `Unknown` never replaces a known type.
    #[must_use]
    pub fn updated(self, new: Self) -> Self {
        if new == Self::Unknown { self } else { new }
    }

    /// The type with what is known of the filtering, which only tells NATs with one mapping apart.
    #[must_use]
    pub fn with_filtering(self, filtering: Option<Filtering>) -> Self {
        match (self, filtering) {
            (Self::Cone, Some(Filtering::AddressAndPortDependent)) => Self::PortRestrictedCone,
            _ => self,
        }
    }
}

impl fmt::Display for NatType {
    /// Empty when unknown, as the resource's field is.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "",
            Self::Open => "open",
            Self::Cone => "cone",
            Self::PortRestrictedCone => "port-restricted-cone",
            Self::Symmetric => "symmetric",
        })
    }
}

/// The endpoint at which one peer observes this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seen {
    /// The peer's address towards us, by which a NAT distinguishes observers.
    pub observer: IpAddr,
    /// Our address and port as the peer receives them.
    pub address: SocketAddr,
}

/// Classifies the NAT in front of `local` (own addresses with the WireGuard port). `seen` holds the newest observation of
/// each observer.
///
/// IPv4 decides; IPv6, which is rarely translated, only without IPv4 observations. Observers on this side of the NAT see
/// local addresses, and those between two NATs see private ones: neither counts if an observer sees a public one.
pub fn classify(local: &[SocketAddr], seen: &[Seen]) -> NatType {
    let local: BTreeSet<SocketAddr> = local.iter().map(|address| canonical(*address)).collect();
    let seen: BTreeSet<(IpAddr, SocketAddr)> =
        seen.iter().map(|seen| (seen.observer.to_canonical(), canonical(seen.address))).collect();
    let ipv4 = seen.iter().any(|(_, address)| address.is_ipv4());
    let of_family = seen.iter().filter(|(_, address)| address.is_ipv4() == ipv4);
    let (inside, outside): (Vec<_>, Vec<_>) = of_family.partition(|(_, address)| local.contains(address));
    if inside.iter().any(|(_, address)| !is_private(address.ip())) {
        return NatType::Open;
    }
    let public: Vec<_> = outside.iter().filter(|(_, address)| !is_private(address.ip())).copied().collect();
    let counting = if public.is_empty() { outside } else { public };
    if counting.is_empty() {
        return if inside.is_empty() { NatType::Unknown } else { NatType::Open };
    }
    let mut by_observer: BTreeMap<IpAddr, SocketAddr> = BTreeMap::new();
    for (observer, address) in counting {
        // Two nodes behind one address are one observer. If their observations differ, the mapping depends on the port.
        if by_observer.insert(observer, address).is_some_and(|before| before != address) {
            return NatType::Symmetric;
        }
    }
    let mappings: BTreeSet<&SocketAddr> = by_observer.values().collect();
    match (by_observer.len(), mappings.len()) {
        (0 | 1, _) => NatType::Unknown,
        (_, 1) => NatType::Cone,
        _ => NatType::Symmetric,
    }
}

#[cfg(test)]
mod tests;

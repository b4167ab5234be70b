//! One value per address family.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// At most one value of each address family: both, one or neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DualStack<V4, V6> {
    /// Value of IPv4.
    pub ipv4: Option<V4>,
    /// Value of IPv6.
    pub ipv6: Option<V6>,
}

/// At most one address of each family.
pub type DualStackAddrs = DualStack<Ipv4Addr, Ipv6Addr>;

/// At most one prefix of each family.
pub type DualStackNets = DualStack<Ipv4Net, Ipv6Net>;

impl<V4, V6> DualStack<V4, V6> {
    /// Whether it has neither family.
    pub fn is_empty(&self) -> bool {
        self.ipv4.is_none() && self.ipv6.is_none()
    }

    /// Whether both have the same families.
    pub fn same_families<A, B>(&self, other: &DualStack<A, B>) -> bool {
        self.ipv4.is_some() == other.ipv4.is_some() && self.ipv6.is_some() == other.ipv6.is_some()
    }

    /// Borrows the values.
    pub fn as_ref(&self) -> DualStack<&V4, &V6> {
        DualStack { ipv4: self.ipv4.as_ref(), ipv6: self.ipv6.as_ref() }
    }

    /// Applies a function per family.
    pub fn map<A, B>(self, ipv4: impl FnOnce(V4) -> A, ipv6: impl FnOnce(V6) -> B) -> DualStack<A, B> {
        DualStack { ipv4: self.ipv4.map(ipv4), ipv6: self.ipv6.map(ipv6) }
    }

    /// Applies a function per family that may fail.
    ///
    /// # Errors
    /// The first error, IPv4 before IPv6.
    pub fn try_map<A, B, E>(
        self,
        ipv4: impl FnOnce(V4) -> Result<A, E>,
        ipv6: impl FnOnce(V6) -> Result<B, E>,
    ) -> Result<DualStack<A, B>, E> {
        Ok(DualStack { ipv4: self.ipv4.map(ipv4).transpose()?, ipv6: self.ipv6.map(ipv6).transpose()? })
    }

    /// The families that both have, in pairs.
    pub fn zip<A, B>(self, other: DualStack<A, B>) -> DualStack<(V4, A), (V6, B)> {
        DualStack { ipv4: self.ipv4.zip(other.ipv4), ipv6: self.ipv6.zip(other.ipv6) }
    }
}

impl DualStackAddrs {
    /// The addresses, IPv4 first.
    pub fn iter(self) -> impl Iterator<Item = IpAddr> {
        self.ipv4.map(IpAddr::V4).into_iter().chain(self.ipv6.map(IpAddr::V6))
    }
}

impl DualStackNets {
    /// The prefixes, IPv4 first.
    pub fn iter(self) -> impl Iterator<Item = IpNet> {
        self.ipv4.map(IpNet::V4).into_iter().chain(self.ipv6.map(IpNet::V6))
    }

    /// Prefixes without host bits.
    #[must_use]
    pub fn trunc(self) -> Self {
        self.map(|net| net.trunc(), |net| net.trunc())
    }
}

/// Keeps the first address of each family.
impl FromIterator<IpAddr> for DualStackAddrs {
    fn from_iter<I: IntoIterator<Item = IpAddr>>(addresses: I) -> Self {
        let mut first = Self::default();
        for address in addresses {
            match address {
                IpAddr::V4(address) => first.ipv4 = first.ipv4.or(Some(address)),
                IpAddr::V6(address) => first.ipv6 = first.ipv6.or(Some(address)),
            }
        }
        first
    }
}

/// Neither family. Not derived: that would ask for a default address of each family.
impl<V4, V6> Default for DualStack<V4, V6> {
    fn default() -> Self {
        Self { ipv4: None, ipv6: None }
    }
}

impl<V4: fmt::Display, V6: fmt::Display> fmt::Display for DualStack<V4, V6> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.ipv4, &self.ipv6) {
            (Some(ipv4), Some(ipv6)) => write!(f, "{ipv4} and {ipv6}"),
            (Some(ipv4), None) => ipv4.fmt(f),
            (None, Some(ipv6)) => ipv6.fmt(f),
            (None, None) => f.write_str("neither IPv4 nor IPv6"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both() -> DualStackAddrs {
        ["10.0.0.1", "fd00::1", "10.0.0.2", "fd00::2"]
            .map(|text| text.parse::<IpAddr>().unwrap())
            .into_iter()
            .collect()
    }

    #[test]
    fn the_first_address_of_each_family_is_kept() {
        assert_eq!(
            both().iter().map(|address| address.to_string()).collect::<Vec<_>>(),
            ["10.0.0.1", "fd00::1"]
        );
        assert!(DualStackAddrs::from_iter([]).is_empty());
    }

    #[test]
    fn families_are_compared_and_paired() {
        let only_v6 = DualStackAddrs { ipv4: None, ..both() };
        assert!(both().same_families(&both().as_ref()));
        assert!(!both().same_families(&only_v6));
        assert_eq!(both().zip(only_v6), DualStack { ipv4: None, ipv6: both().ipv6.zip(only_v6.ipv6) });
        assert_eq!(
            both().try_map(|_| Err("first"), |_| Err::<(), _>("second")),
            Err::<DualStack<(), ()>, _>("first")
        );
    }

    #[test]
    fn display_names_what_there_is() {
        let nets =
            DualStackNets { ipv4: "10.0.0.9/24".parse().ok(), ipv6: "fd00::9/120".parse().ok() }.trunc();
        assert_eq!(nets.to_string(), "10.0.0.0/24 and fd00::/120");
        assert_eq!(DualStackNets { ipv4: None, ..nets }.to_string(), "fd00::/120");
        assert_eq!(DualStackNets { ipv6: None, ..nets }.to_string(), "10.0.0.0/24");
        assert_eq!(DualStackNets::default().to_string(), "neither IPv4 nor IPv6");
    }
}

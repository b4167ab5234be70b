//! Sets of addresses, as sorted ranges.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// First and last address as numbers, both included.
pub(crate) type Range = (u128, u128);

pub(crate) fn range_v4(net: Ipv4Net) -> Range {
    (net.network().to_bits().into(), net.broadcast().to_bits().into())
}

pub(crate) fn range_v6(net: Ipv6Net) -> Range {
    (net.network().to_bits(), net.broadcast().to_bits())
}

/// Addresses that are spoken for: what no new block may touch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AddressSet {
    ipv4: Vec<Range>,
    ipv6: Vec<Range>,
}

impl AddressSet {
    /// Last address of a taken stretch that the IPv4 range touches.
    pub(crate) fn touching_v4(&self, range: Range) -> Option<u128> {
        touching(&self.ipv4, range)
    }

    /// Last address of a taken stretch that the IPv6 range touches.
    pub(crate) fn touching_v6(&self, range: Range) -> Option<u128> {
        touching(&self.ipv6, range)
    }

    /// Whether the address is in the set.
    pub fn contains(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => {
                let number = address.to_bits().into();
                self.touching_v4((number, number)).is_some()
            }
            IpAddr::V6(address) => self.touching_v6((address.to_bits(), address.to_bits())).is_some(),
        }
    }
}

impl FromIterator<IpNet> for AddressSet {
    fn from_iter<I: IntoIterator<Item = IpNet>>(nets: I) -> Self {
        let mut set = Self::default();
        for net in nets {
            match net {
                IpNet::V4(net) => set.ipv4.push(range_v4(net)),
                IpNet::V6(net) => set.ipv6.push(range_v6(net)),
            }
        }
        set.ipv4 = merge(set.ipv4);
        set.ipv6 = merge(set.ipv6);
        set
    }
}

fn merge(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_unstable();
    let mut merged: Vec<Range> = Vec::with_capacity(ranges.len());
    for (first, last) in ranges {
        match merged.last_mut() {
            Some(open) if first <= open.1.saturating_add(1) => open.1 = open.1.max(last),
            _ => merged.push((first, last)),
        }
    }
    merged
}

fn touching(ranges: &[Range], (first, last): Range) -> Option<u128> {
    let position = ranges.partition_point(|range| range.1 < first);
    ranges.get(position).filter(|range| range.0 <= last).map(|range| range.1)
}

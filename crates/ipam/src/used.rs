//! Ranges of addresses that something else uses than the pools, and which of them a range meets that Fairlead hands out.

use std::fmt;

use fairlead_address::{PrefixSet, overlap};
use ipnet::IpNet;

/// User of a range. The order is that of the harm when Fairlead hands out the same addresses.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum RangeUser {
    /// ServiceCIDR of this name.
    Services(String),
    /// Node of this name, with one of its addresses.
    Node(String),
    /// WireKubeMesh of this name, with `spec.meshCIDR`.
    Mesh(String),
    /// AddressPool of this name.
    Pool(String),
    /// Node of this name, with `spec.podCIDRs`.
    PodNetwork(String),
}

impl RangeUser {
    /// Consequence of addresses that Fairlead hands out in the range, too.
    pub fn consequence(&self) -> &'static str {
        match self {
            Self::Services(_) => "every node sends packets for an address of a Service to the Service",
            Self::Node(_) => "packets for the Node would go to a pod",
            Self::Mesh(_) => "a pod and a node can get the same address",
            Self::Pool(_) => "a pod and a node can get the same address",
            Self::PodNetwork(_) => {
                "another network plugin that assigns addresses of spec.podCIDRs can give a pod the same address"
            }
        }
    }

    /// Whether packets go wrong for certain, and not only if another program assigns addresses of the range.
    pub fn is_certain(&self) -> bool {
        !matches!(self, Self::PodNetwork(_))
    }
}

impl fmt::Display for RangeUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Services(name) => write!(f, "of ServiceCIDR {name}"),
            Self::Node(name) => write!(f, "of Node {name}"),
            Self::Mesh(name) => write!(f, "of spec.meshCIDR of WireKubeMesh {name}"),
            Self::Pool(name) => write!(f, "of AddressPool {name}"),
            Self::PodNetwork(name) => write!(f, "of spec.podCIDRs of Node {name}"),
        }
    }
}

/// A range with its user.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct UsedRange {
    /// User of the range.
    pub user: RangeUser,
    /// The addresses.
    pub net: IpNet,
}

/// A range that Fairlead hands out and that shares addresses with one that something else uses.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SharedRange<'a> {
    /// Range of the other user.
    pub used: &'a UsedRange,
    /// Range that Fairlead hands out.
    pub net: IpNet,
}

impl fmt::Display for SharedRange<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { used: UsedRange { user, net: other }, net } = self;
        write!(f, "{net} shares addresses with {other} {user}")
    }
}

/// All ranges of `used` that share addresses with one of `nets`, the most harmful first.
pub fn shared(nets: impl IntoIterator<Item = IpNet>, used: &[UsedRange]) -> Vec<SharedRange<'_>> {
    let nets: Vec<IpNet> = nets.into_iter().collect();
    let all: PrefixSet = nets.iter().collect();
    // There can be many Nodes, and few of their ranges are shared.
    let candidates = used.iter().filter(|used| all.overlapping(used.net).is_some());
    let shared = candidates.flat_map(|used| {
        let nets = nets.iter().filter(|net| overlap(net, &used.net));
        nets.map(move |net| SharedRange { used, net: *net })
    });
    let mut shared: Vec<SharedRange<'_>> = shared.collect();
    shared.sort_unstable();
    shared
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(user: RangeUser, net: &str) -> UsedRange {
        UsedRange { user, net: net.parse().unwrap() }
    }

    #[test]
    fn ranges_that_share_addresses_are_named_and_the_worst_is_first() {
        let ranges = [
            used(RangeUser::PodNetwork("n1".to_owned()), "10.0.1.0/24"),
            used(RangeUser::Node("n1".to_owned()), "10.0.3.7/32"),
            used(RangeUser::Services("kubernetes".to_owned()), "10.0.0.0/8"),
            used(RangeUser::Services("other".to_owned()), "fd00::/112"),
        ];
        let nets = ["10.0.0.0/16", "fd01::/112"].map(|net| net.parse().unwrap());
        let found: Vec<String> = shared(nets, &ranges).iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "10.0.0.0/16 shares addresses with 10.0.0.0/8 of ServiceCIDR kubernetes",
                "10.0.0.0/16 shares addresses with 10.0.3.7/32 of Node n1",
                "10.0.0.0/16 shares addresses with 10.0.1.0/24 of spec.podCIDRs of Node n1",
            ]
        );
        assert!(shared(["10.1.0.0/16".parse().unwrap()], &ranges[..2]).is_empty());
    }

    #[test]
    fn neither_families_nor_neighbours_are_confused() {
        let ranges = [used(RangeUser::Services("a".to_owned()), "::/0")];
        assert!(shared(["10.0.0.0/8".parse().unwrap()], &ranges).is_empty());
        let ranges = [used(RangeUser::Services("a".to_owned()), "10.96.0.0/16")];
        assert!(shared(["10.97.0.0/16".parse().unwrap()], &ranges).is_empty());
        assert_eq!(shared(["10.96.255.255/32".parse().unwrap()], &ranges).len(), 1);
    }
}

//! Ranges of addresses that something else uses than the pools, and which of them a range meets that Fairlead hands out.

use std::fmt;

use fairlead_address::{PrefixSet, overlap};
use ipnet::IpNet;

/// Shortest prefix with hosts of its own: `0.0.0.0/0` and its halves are the way to everything elsewhere.
const MIN_LENGTH: u8 = 8;

/// Certainty of the harm of shared addresses. The worst is first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Harm {
    /// Packets go wrong.
    Certain,
    /// Packets go wrong if a host in a wider range of the other user has such an address.
    WithinWider,
    /// Packets go wrong if another network plugin assigns such an address.
    OtherPlugin,
}

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
    /// Egress of this namespace and name, with one of its source addresses.
    SourceAddress(String),
    /// WireKubeMesh of this name, with `spec.grants`.
    Grant(String),
    /// Peer of this name outside of the cluster, with `spec.allowedIPs`.
    Peer(String),
    /// Node of this name, with a prefix of hosts beside it.
    Site(String),
    /// Node of this name, with `spec.podCIDRs`.
    PodNetwork(String),
}

impl RangeUser {
    /// Consequence of addresses that Fairlead hands out in the range, too.
    fn consequence(&self) -> &'static str {
        match self {
            Self::Services(_) => "every node sends packets for an address of a Service to the Service",
            Self::Node(_) => "packets for the Node would go to a pod",
            Self::Mesh(_) => "a pod and a node can get the same address",
            Self::Pool(_) => "a pod and a node can get the same address",
            Self::SourceAddress(_) => "replies to connections of the Egress would go to a pod or a node",
            Self::Grant(_) => "a pod or a node can get an address that is granted to another member",
            Self::Peer(_) => "packets for the Peer would go to a pod or a node",
            Self::Site(_) => "packets for hosts beside the Node would go to a pod or a node",
            Self::PodNetwork(_) => {
                "another network plugin that assigns addresses of spec.podCIDRs can give a pod the same address"
            }
        }
    }
}

impl fmt::Display for RangeUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Services(name) => write!(f, "of ServiceCIDR {name}"),
            Self::Node(name) => write!(f, "of Node {name}"),
            Self::Mesh(name) => write!(f, "of spec.meshCIDR of WireKubeMesh {name}"),
            Self::Pool(name) => write!(f, "of AddressPool {name}"),
            Self::SourceAddress(name) => write!(f, "of status.sourceAddresses of Egress {name}"),
            Self::Grant(name) => write!(f, "of spec.grants of WireKubeMesh {name}"),
            Self::Peer(name) => write!(f, "of spec.allowedIPs of Peer {name}"),
            Self::Site(name) => write!(f, "of kilo.squat.ai/allowed-location-ips of Node {name}"),
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
    /// Harm that the shared addresses do.
    pub harm: Harm,
    /// Range of the other user.
    pub used: &'a UsedRange,
    /// Range that Fairlead hands out.
    pub net: IpNet,
}

impl SharedRange<'_> {
    /// Consequence of addresses that Fairlead hands out in the range, too.
    pub fn consequence(&self) -> &'static str {
        match self.harm {
            Harm::Certain | Harm::OtherPlugin => self.used.user.consequence(),
            Harm::WithinWider => {
                "hosts there with such an address are not reached, since a pod or a node can get it"
            }
        }
    }
}

impl fmt::Display for SharedRange<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { used: UsedRange { user, net: other }, net, .. } = self;
        write!(f, "{net} shares addresses with {other} {user}")
    }
}

/// Harm of addresses that `net`, which Fairlead hands out, shares with a range of another user; `None` if that one is meant to lie around it.
fn harm(net: IpNet, used: &UsedRange) -> Option<Harm> {
    let length = used.net.prefix_len();
    let is_wider = length < net.prefix_len();
    match used.user {
        RangeUser::Grant(_) if is_wider => None,
        RangeUser::Peer(_) | RangeUser::Site(_) if is_wider => {
            (length >= MIN_LENGTH).then_some(Harm::WithinWider)
        }
        RangeUser::PodNetwork(_) => Some(Harm::OtherPlugin),
        RangeUser::Grant(_)
        | RangeUser::Mesh(_)
        | RangeUser::Node(_)
        | RangeUser::Peer(_)
        | RangeUser::Pool(_)
        | RangeUser::Services(_)
        | RangeUser::Site(_)
        | RangeUser::SourceAddress(_) => Some(Harm::Certain),
    }
}

/// All ranges of `used` that share addresses with one of `nets` and do harm, the most harmful first. Blocks of pods and addresses on the
/// mesh go before what Peers, Nodes and grants have around them: only what lies within loses its packets for certain.
pub fn shared(nets: impl IntoIterator<Item = IpNet>, used: &[UsedRange]) -> Vec<SharedRange<'_>> {
    let nets: Vec<IpNet> = nets.into_iter().collect();
    let all: PrefixSet = nets.iter().collect();
    // There can be many Nodes, and few of their ranges are shared.
    let candidates = used.iter().filter(|used| all.overlapping(used.net).is_some());
    let shared = candidates.flat_map(|used| {
        let nets = nets.iter().filter(|net| overlap(net, &used.net));
        nets.filter_map(move |net| Some(SharedRange { harm: harm(*net, used)?, used, net: *net }))
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

    #[test]
    fn what_lies_within_loses_packets_and_what_lies_around_may_or_is_meant_to() {
        let net = "10.64.0.0/16";
        let harm = |user: fn(String) -> RangeUser, other: &str| {
            let ranges = [used(user("a".to_owned()), other)];
            shared([net.parse().unwrap()], &ranges).first().map(|shared| shared.harm)
        };
        let users: [fn(String) -> RangeUser; 2] = [RangeUser::Peer, RangeUser::Site];
        for user in users {
            for within in ["10.64.3.7/32", net] {
                assert_eq!(harm(user, within), Some(Harm::Certain), "{within}");
            }
            for around in ["10.64.0.0/15", "10.0.0.0/8"] {
                assert_eq!(harm(user, around), Some(Harm::WithinWider), "{around}");
            }
            assert_eq!(harm(user, "0.0.0.0/0"), None, "the way out of the cluster");
        }
        assert_eq!(harm(RangeUser::Grant, "10.64.3.7/32"), Some(Harm::Certain));
        assert_eq!(harm(RangeUser::Grant, "10.0.0.0/8"), None, "it gives no address by itself");
        assert_eq!(harm(RangeUser::SourceAddress, "10.64.3.7/32"), Some(Harm::Certain));
        for around in ["10.0.0.0/8", "0.0.0.0/0"] {
            assert_eq!(harm(RangeUser::Services, around), Some(Harm::Certain), "{around}");
        }
    }

    #[test]
    fn what_is_certain_is_named_before_what_is_not() {
        let ranges = [
            used(RangeUser::PodNetwork("n1".to_owned()), "10.64.1.0/24"),
            used(RangeUser::Peer("office".to_owned()), "10.0.0.0/8"),
            used(RangeUser::Site("n1".to_owned()), "10.64.2.0/24"),
        ];
        let found = shared(["10.64.0.0/16".parse().unwrap()], &ranges);
        let harms: Vec<Harm> = found.iter().map(|shared| shared.harm).collect();
        assert_eq!(harms, [Harm::Certain, Harm::WithinWider, Harm::OtherPlugin]);
        let consequences: Vec<&str> = found.iter().map(SharedRange::consequence).collect();
        assert!(consequences[0].starts_with("packets for hosts beside the Node"), "{consequences:?}");
        assert!(consequences[1].starts_with("hosts there with such an address"), "{consequences:?}");
    }
}

//! Locations of members, and what they mean for packets among them.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

/// Location of a member, and its part in it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Site {
    /// Name of its location; empty is the location of all members without another.
    pub location: String,
    /// Addresses of the member there, best first. Without any it is a location of its own.
    pub internal: Vec<InternalAddress>,
    /// Whether an administrator wants it to be a gateway of its location.
    pub is_leader: bool,
    /// Whether it has an address that all others can reach.
    pub is_public: bool,
    /// Prefixes of hosts beside it, which are no nodes, and which others reach through it.
    pub networks: Vec<IpNet>,
}

/// An address inside of a location.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct InternalAddress {
    /// The address.
    pub address: IpAddr,
    /// Length of its subnet, if an administrator gave it; else what this host has for its own address counts.
    pub length: Option<u8>,
}

impl InternalAddress {
    /// Whether both are in one subnet, as far as this one's length says.
    pub(crate) fn may_reach(&self, other: IpAddr) -> bool {
        let network = self.length.and_then(|length| IpNet::new(self.address, length).ok());
        network.is_none_or(|network| network.contains(&other))
    }
}

/// An address of this host, with the length of the network it is in and the link it is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnAddress {
    /// Index of the link.
    pub link: u32,
    /// The address; its prefix is what the link is connected to.
    pub prefix: IpNet,
}

/// Granularity of tunnels: the packets that go without one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Granularity {
    /// No packets: every pair of nodes has a tunnel.
    #[default]
    Full,
    /// Packets to members of this node's location that are on a subnet with it. This host has these addresses.
    Cross(Vec<OwnAddress>),
    /// As `Cross`, and only gateways have tunnels with nodes of other locations.
    Location {
        /// Addresses of this host.
        addresses: Vec<OwnAddress>,
        /// Gateways that this node uses only if there is no other.
        down: Down,
    },
}

impl Granularity {
    /// Addresses of this host, where packets inside of the location go without a tunnel.
    pub(crate) fn addresses(&self) -> Option<&[OwnAddress]> {
        match self {
            Self::Cross(addresses) | Self::Location { addresses, .. } => Some(addresses),
            Self::Full => None,
        }
    }
}

/// Members of this node's location to which packets go in IP tunnels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Encapsulation {
    /// All members of the location.
    Always,
    /// Members that are on no subnet with this node.
    CrossSubnet,
    /// No members.
    #[default]
    Never,
}

/// Names of gateways that this node knows to be down.
pub type Down = BTreeSet<String>;

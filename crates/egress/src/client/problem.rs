//! Reasons why a client pod cannot be routed.

use std::fmt;
use std::net::IpAddr;

use fairlead_address::IpFamily;
use fairlead_api::names::RULE_PRIORITIES_EGRESS_IN_CLUSTER;
use ipnet::IpNet;

use crate::EgressName;

/// Reason why a client pod cannot be routed to the gateways that it asks for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// Packets do not fit through a tunnel.
    #[error("the MTU {mtu} of eth0 is too small for a tunnel of {family}: it must be at least {minimum}")]
    MtuTooSmall {
        /// Family of the tunnel.
        family: IpFamily,
        /// MTU of `eth0` in bytes.
        mtu: u32,
        /// The least MTU of `eth0` in bytes.
        minimum: u32,
    },
    /// The pod asks for an Egress in vain.
    #[error("Egress {egress} has no destination of an address family that the pod has")]
    NoDestination {
        /// The Egress.
        egress: EgressName,
    },
    /// There is nothing to send packets to.
    #[error("Service {egress} has no {family} address, and its Egress has destinations of that family")]
    NoServiceAddress {
        /// The Egress.
        egress: EgressName,
        /// Address family that the Service lacks.
        family: IpFamily,
    },
    /// The names of links to two Services are the same, by coincidence.
    #[error("the Services of Egresses {} and {} need links of the same name {name}: create one of the Services anew", egresses[0], egresses[1])]
    SameLink {
        /// The name.
        name: String,
        /// The two.
        egresses: [EgressName; 2],
    },
    /// Two Egresses have the same destination.
    #[error("{prefix} is a destination of Egress {} and of Egress {}: a pod can use only one of them", egresses[0], egresses[1])]
    SamePrefix {
        /// The destination.
        prefix: IpNet,
        /// The two.
        egresses: [EgressName; 2],
    },
    /// The packets of a tunnel would be sent into a tunnel.
    #[error(
        "destination {prefix} of Egress {egress} contains the address {cluster_ip} of Service {of}, to which its tunnel goes: choose destinations without it, or exclude it (spec.excludedDestinations)"
    )]
    SwallowsTunnel {
        /// The destination.
        prefix: IpNet,
        /// The Egress that has it.
        egress: EgressName,
        /// The address in it.
        cluster_ip: IpAddr,
        /// The Egress whose Service has the address.
        of: EgressName,
    },
    /// There are more ranges than rules.
    #[error(
        "the cluster has {ranges} separate ranges of {family} addresses outside of private networks, and only {} rules for them",
        RULE_PRIORITIES_EGRESS_IN_CLUSTER.count()
    )]
    TooManyRanges {
        /// Address family of the ranges.
        family: IpFamily,
        /// Number of the ranges.
        ranges: usize,
    },
}

impl Problem {
    /// Reason as one CamelCase word: for conditions and Events of Egresses.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::MtuTooSmall { .. } => "MtuTooSmall",
            Self::NoDestination { .. } => "NoDestination",
            Self::NoServiceAddress { .. } => "NoServiceAddress",
            Self::SameLink { .. } => "SameLink",
            Self::SamePrefix { .. } => "SamePrefix",
            Self::SwallowsTunnel { .. } => "SwallowsTunnel",
            Self::TooManyRanges { .. } => "TooManyRanges",
        }
    }
}

/// All problems of a pod, at least one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) struct Problems(Vec<Problem>);

impl Problems {
    pub(super) fn none_of(problems: Vec<Problem>) -> Result<(), Self> {
        if problems.is_empty() { Ok(()) } else { Err(Self(problems)) }
    }

    /// Each of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.0.iter()
    }
}

/// One after the other.
impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{problem}")?;
        }
        Ok(())
    }
}

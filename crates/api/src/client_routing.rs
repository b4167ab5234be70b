//! Rules and routes by which the packets of a client pod reach egress gateways: as they are decided, and as the kernel gets them.

use ipnet::IpNet;

/// Rules and routes of a client pod, of one address family.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClientRouting {
    /// Rules by priority.
    pub rules: Vec<ClientRule>,
    /// Routes by table and destination.
    pub routes: Vec<ClientRoute>,
}

/// A rule of a client pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientRule {
    /// Priority: 1800, 1900 or 2000 to 2100; the lowest comes first.
    pub priority: u32,
    /// Destination of the packets that the rule is for.
    pub destination: IpNet,
    /// The table that it looks up: `main`, 117 or 118.
    pub table: u32,
}

/// Target of a route of a client pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// Into the tunnel with a link of this name; while there is none, they are refused.
    Link(String),
    /// Nowhere: the Egress that has the destination cannot be used.
    Refused,
    /// Decision of the rules after the table: the prefix is excluded from a destination around it.
    Excluded,
    /// Decision of the rules after the table: the prefix is one of the cluster's own, inside of a destination.
    InCluster,
}

impl Target {
    /// Whether it leaves packets to the rules after the table.
    pub fn lets_pass(&self) -> bool {
        matches!(self, Self::Excluded | Self::InCluster)
    }
}

/// State of a prefix for which the kernel has routes of egress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Held {
    /// Destination of an Egress.
    Destination,
    /// Excluded from a destination around it.
    Excluded,
    /// Range of the cluster inside of a destination.
    InCluster,
}

/// A route of a client pod, of protocol [`ROUTE_PROTOCOL`](crate::names::ROUTE_PROTOCOL).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClientRoute {
    /// Routing table: 117 or 118.
    pub table: u32,
    /// Destination, without host bits.
    pub destination: IpNet,
    /// Target of the packets.
    pub target: Target,
    /// Connections that are opened from there to the pod are answered by the pod's uplink (`spec.originatingOnly`).
    pub originating_only: bool,
}

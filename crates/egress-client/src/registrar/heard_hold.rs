//! Holds of gateways on this node, as they have said them.

use std::net::IpAddr;
use std::time::Instant;

use fairlead_egress::EgressName;

use super::endpoints::GatewayUid;

/// A source address that a gateway on this node holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeardHold {
    /// Of the gateway.
    pub(crate) egress: EgressName,
    /// The gateway.
    pub(crate) gateway: GatewayUid,
    /// The source address.
    pub(crate) address: IpAddr,
    /// Greater than that of each gateway that has held the address before.
    pub(crate) term: u64,
    /// When it ends, unless the gateway says it again.
    pub(crate) until: Instant,
    /// Whether the gateway takes packets of clients already.
    pub(crate) is_ready: bool,
}

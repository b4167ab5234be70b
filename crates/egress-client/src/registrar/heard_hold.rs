//! Holds of gateways on this node, as they have said them.

use std::net::IpAddr;
use std::time::Instant;

use fairlead_egress::EgressName;
use fairlead_egress::endpoints::GatewayUid;

/// A source address that a gateway on this node holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeardHold {
    /// Egress of the gateway.
    pub(crate) egress: EgressName,
    /// UID of the gateway.
    pub(crate) gateway: GatewayUid,
    /// The source address.
    pub(crate) address: IpAddr,
    /// Term, greater than that of each gateway that has held the address before.
    pub(crate) term: u64,
    /// Time until which the address is announced, unless the gateway says the hold again.
    pub(crate) until: Instant,
    /// Whether the gateway takes packets of clients already.
    pub(crate) is_ready: bool,
}

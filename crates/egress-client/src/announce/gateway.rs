//! Gateway pods of this node.

use fairlead_address::DualStackAddrs;
use fairlead_egress::EgressName;

/// A gateway pod of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Gateway {
    pub(super) egress: EgressName,
    /// UID of the pod.
    pub(super) uid: String,
    /// Name of the pod.
    pub(super) pod: String,
    pub(super) addresses: DualStackAddrs,
}

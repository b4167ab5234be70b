//! Clients of egress gateways.

use fairlead_address::DualStackAddrs;

/// A pod of this node that uses egress gateways.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Client {
    /// UID of the pod, or `NAMESPACE/NAME` where the container runtime passes none.
    pub(crate) uid: String,
    /// Namespace of the pod.
    pub(crate) namespace: String,
    /// Name of the pod.
    pub(crate) name: String,
    /// Source addresses of its packets to gateways: one of each family that the pod has.
    pub(crate) addresses: DualStackAddrs,
}

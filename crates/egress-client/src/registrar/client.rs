//! Clients of egress gateways.

use fairlead_address::DualStackAddrs;

/// A pod of this node that uses egress gateways.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Client {
    /// Of the pod.
    pub(crate) uid: String,
    /// Of the pod.
    pub(crate) namespace: String,
    /// Of the pod.
    pub(crate) name: String,
    /// What its packets to gateways have as their source.
    pub(crate) addresses: DualStackAddrs,
}

//! Source addresses that the node of a gateway announces, so that packets to them come to the gateway.
//!
//! * [`holds`]: what gateways say they hold.
//! * [`pace`]: how often an Egress may change who holds its addresses.
//! * [`plan`]: which addresses are announced, and why others are not.

pub mod holds;
pub mod pace;
pub mod plan;

use std::collections::BTreeMap;

use fairlead_address::DualStackAddrs;
use fairlead_egress::EgressName;
use fairlead_egress::client::known::SourceAddressesOf;

/// Source addresses of all Egresses that have some, each with the gateway pod that the controller names as its holder.
pub type Permitted = BTreeMap<EgressName, SourceAddressesOf>;

/// A gateway pod of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gateway {
    /// Egress of the gateway.
    pub egress: EgressName,
    /// UID of the pod.
    pub uid: String,
    /// Name of the pod.
    pub pod: String,
    /// Addresses of the pod.
    pub addresses: DualStackAddrs,
}

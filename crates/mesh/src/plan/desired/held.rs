//! State of the device and its peers that a plan must keep.

use std::collections::{BTreeMap, BTreeSet};

use fairlead_api::resources::Granularity;
use fairlead_keys::PublicKey;
use fairlead_topology::Down;
use ipnet::IpNet;

/// Prefixes that a WireGuard device has at each key, Peers that have come to this node, and gateways that are down.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Held {
    /// Prefixes by key.
    pub prefixes: BTreeMap<PublicKey, BTreeSet<IpNet>>,
    /// Terms of this node as an entry node, by key.
    pub entry_terms: BTreeMap<PublicKey, u64>,
    /// Gateways that do not forward.
    pub down: Down,
    /// Keys that members announced and that have completed a handshake.
    pub completed: BTreeSet<PublicKey>,
    /// While the granularity changes, the one that other nodes may use: this node has tunnels for that too.
    pub other: Option<Granularity>,
}

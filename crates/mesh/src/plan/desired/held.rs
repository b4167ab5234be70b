//! What the device and its peers have already, which a plan must keep.

use std::collections::{BTreeMap, BTreeSet};

use fairlead_api::resources::Granularity;
use fairlead_keys::PublicKey;
use fairlead_topology::Down;
use ipnet::IpNet;

/// What a WireGuard device has at each key, and which Peers have come to this node.
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

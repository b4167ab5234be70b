//! A node as the device and the path agent are to have it.

use std::net::SocketAddr;
use std::sync::Arc;

use fairlead_address::{AddressFilter, Endpoint, is_reachable};
use fairlead_keys::PeerConfig;
use fairlead_path::{NatType, PeerPaths, is_private};
use fairlead_topology::PeerPlan;

/// The desired state of one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredPeer {
    /// The member that publishes its key; the one that joined first, if several do.
    pub name: String,
    /// WireGuard configuration of the peer, without an endpoint.
    pub config: PeerConfig,
    /// Candidates of the peer, best first, and the policy of its path.
    pub paths: PeerPaths,
    /// Whether the peer may be reached by way of a relay.
    pub uses_relay: bool,
    /// The NAT that it publishes, as far as it matters: symmetric, port-restricted, or unknown.
    pub nat: NatType,
    /// Configured endpoints that the peer's members publish.
    pub(super) manual: Vec<Endpoint>,
    pub(super) host: Vec<SocketAddr>,
    /// Filter of the peer's endpoints that nodes may publish; `None` if that of the mesh counts.
    pub(super) published: Option<AddressFilter>,
    /// Plan of the peer, from which this follows beside the members.
    pub(super) planned: Arc<PeerPlan>,
}

impl DesiredPeer {
    /// Whether others learn something from an endpoint in use.
    pub fn is_news(&self, endpoint: SocketAddr) -> bool {
        if !is_reachable(endpoint.ip()) {
            // It stands for the peer by way of the relay.
            return false;
        }
        let published = self.host.contains(&endpoint);
        let open = published && !is_private(endpoint.ip());
        open || !(published || self.manual.contains(&Endpoint::Address(endpoint)))
    }
}

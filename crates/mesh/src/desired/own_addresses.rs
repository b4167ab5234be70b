//! Where others see this node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use fairlead_path::{Filtering, StunAnswer};

/// What each STUN server said last; `None` where the WireGuard port cannot ask.
pub type StunAnswers = Option<BTreeMap<SocketAddr, StunAnswer>>;

/// What others say of where this node is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnAddresses {
    /// STUN servers.
    pub stun: StunAnswers,
    /// Peers, in their answers to path probes.
    pub peers: BTreeSet<SocketAddr>,
    /// What the NAT in front of this node lets in, as a relay has tested it.
    pub filtering: Option<Filtering>,
}

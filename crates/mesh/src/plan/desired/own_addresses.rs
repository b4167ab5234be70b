//! Where others see this node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};

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

/// This node's endpoints, as far as it may publish them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnEndpoints {
    /// Its addresses with its port.
    pub host: Vec<SocketAddr>,
    /// Where other nodes see it.
    pub observed: Vec<SocketAddr>,
    /// Where STUN servers see it, other than at an address of its own.
    pub reflexive: Vec<SocketAddr>,
    /// Where gateways take packets for it, other than at an address of its own.
    pub mapped: Vec<SocketAddr>,
    /// The public address that EC2 translates to its own.
    pub public_ipv4: Option<Ipv4Addr>,
    /// Where peers see it, as they told it and no other node; without what is above.
    pub peer_reflexive: Vec<SocketAddr>,
}

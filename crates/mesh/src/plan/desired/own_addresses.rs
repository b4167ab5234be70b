//! Addresses at which others see this node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};

use fairlead_path::{Filtering, StunAnswer};

/// Last answer of each STUN server; `None` where the WireGuard port cannot ask.
pub type StunAnswers = Option<BTreeMap<SocketAddr, StunAnswer>>;

/// Observations of this node's address by others.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnAddresses {
    /// STUN servers.
    pub stun: StunAnswers,
    /// Peers, in their answers to path probes.
    pub peers: BTreeSet<SocketAddr>,
    /// Filtering of the NAT in front of this node, as a relay has tested it; `None` until then.
    pub filtering: Option<Filtering>,
}

/// This node's endpoints, as far as it may publish them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnEndpoints {
    /// Addresses of this node with its port.
    pub host: Vec<SocketAddr>,
    /// Endpoints at which other nodes see this one.
    pub observed: Vec<SocketAddr>,
    /// Endpoints at which STUN servers see this node, without its own addresses.
    pub reflexive: Vec<SocketAddr>,
    /// Endpoints at which gateways take packets for this node, without its own addresses.
    pub mapped: Vec<SocketAddr>,
    /// The public address that EC2 translates to its own.
    pub public_ipv4: Option<Ipv4Addr>,
    /// Endpoints at which peers see this node, from their answers to path probes; without those in `host` and `reflexive`.
    pub peer_reflexive: Vec<SocketAddr>,
}

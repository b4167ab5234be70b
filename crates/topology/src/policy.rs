//! Settings and state of this node that decide, together with the members, on its plan.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fairlead_address::PrefixSet;
use fairlead_keys::PublicKey;
use ipnet::IpNet;

use crate::claims;
use crate::conflicts::Tier;
use crate::member::Member;
use crate::prefixes;
use crate::site::{Encapsulation, Granularity, OwnAddress};

/// Nodes that may claim a source address of egress gateways (`spec.sourceAddresses` of an Egress). The cluster names them, not the
/// nodes: none can take the address from the holder. While the holder that is named does not claim it (yet), another one may.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SourceNodes {
    /// The node of the gateway that the controller names as the holder.
    pub holder: Option<String>,
    /// The nodes that have a gateway pod of the Egress.
    pub gateways: BTreeSet<String>,
}

/// Prefixes that others need.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reserved {
    /// Addresses of the API server and of the default gateways of this host.
    pub hosts: Vec<IpNet>,
    /// Name servers of this host, which may be behind an external member.
    pub name_servers: Vec<IpNet>,
    /// Prefixes of Services.
    pub services: Vec<IpNet>,
}

impl Reserved {
    /// Prefixes of Services, and all.
    pub(crate) fn sets(&self) -> (PrefixSet, PrefixSet) {
        (self.services.iter().collect(), self.hosts.iter().chain(&self.services).collect())
    }
}

/// Settings and state of this node that decide, together with the members, on its plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Name of the member that is this node.
    pub own: String,
    /// Prefixes never sent into the mesh: the API server's address, the mesh resource's `excludeCIDRs`.
    /// Peers may still send *from* them, so that an excluded node's answers are not dropped.
    pub excluded: Vec<IpNet>,
    /// Prefixes of members that are missing, and blocks that were released: packets to them are dropped where no other member has them, and never sent in
    /// clear text.
    pub guarded: Vec<IpNet>,
    /// Seconds between keepalives towards members that ask for nothing else.
    pub keepalive: u16,
    /// Prefixes that this node's WireGuard device has at each key now. The device outlives the node program, and a member that has an
    /// address there keeps it.
    pub held: BTreeMap<PublicKey, BTreeSet<IpNet>>,
    /// Keys that members announced and that have completed a handshake with this node.
    pub completed: BTreeSet<PublicKey>,
    /// Prefixes that no external member may have, nor a node that nothing in the cluster names as their holder.
    pub reserved: Reserved,
    /// Prefixes that an administrator lets members have, by the member's name. What only discovery services know has none: the secret of
    /// the cluster proves no name.
    pub grants: BTreeMap<String, Vec<IpNet>>,
    /// Source addresses of egress gateways: which nodes may claim them.
    pub sources: BTreeMap<IpAddr, SourceNodes>,
    /// The terms this node has taken as an entry node, by the key of the external member, as far as it may not have published them yet.
    pub entry_terms: BTreeMap<PublicKey, u64>,
    /// Addresses of this host. On their networks, nodes get plain routes to their blocks, and no peers; `None` asks for peers
    /// and no routes.
    pub routes_on: Option<Vec<OwnAddress>>,
    /// Granularity of tunnels: the packets that go without one.
    pub granularity: Granularity,
    /// Encapsulation inside of a location: the packets that take IP tunnels.
    pub encapsulation: Encapsulation,
    /// Whether [`Member::pod_networks`] are in the mesh.
    pub includes_pod_networks: bool,
    /// Networks that this host is connected to: their hosts are reached there, although they are beside another node too.
    pub connected: Vec<IpNet>,
}

impl Policy {
    /// The usual policy: nothing excluded or granted, a keepalive every 25 s ([`fairlead_keys::KEEPALIVE`]), no routes.
    pub fn new(own: impl Into<String>) -> Self {
        let keepalive = u16::try_from(fairlead_keys::KEEPALIVE.as_secs()).unwrap_or(25);
        Self {
            own: own.into(),
            excluded: Vec::new(),
            guarded: Vec::new(),
            keepalive,
            held: BTreeMap::new(),
            completed: BTreeSet::new(),
            reserved: Reserved::default(),
            grants: BTreeMap::new(),
            sources: BTreeMap::new(),
            entry_terms: BTreeMap::new(),
            routes_on: None,
            granularity: Granularity::Full,
            encapsulation: Encapsulation::Never,
            includes_pod_networks: false,
            connected: Vec::new(),
        }
    }

    /// Strength of a member's claim to a source address of egress gateways; `None` if it may not claim it, or the prefix is no such
    /// address.
    pub(crate) fn source_tier(&self, member: &Member, prefix: &IpNet) -> Option<Tier> {
        let is_candidate =
            prefixes::is_host(prefix) && member.external.is_none() && !member.discovery.is_only_source;
        let nodes = self.sources.get(&prefix.addr()).filter(|_| is_candidate)?;
        let is_holder = nodes.holder.as_ref() == Some(&member.name);
        if is_holder {
            return Some(Tier::HeldSourceAddress);
        }
        nodes.gateways.contains(&member.name).then_some(Tier::SourceAddress)
    }

    /// Whether this claim of a member would count while no device has it.
    pub fn admits(&self, member: &Member, claim: &IpNet) -> bool {
        claims::refusal(member, claim.trunc(), false, self).is_none()
    }

    /// Whether an administrator lets the member have this prefix.
    pub(crate) fn is_granted(&self, member: &Member, prefix: &IpNet) -> bool {
        let granted = self.grants.get(&member.name).filter(|_| !member.discovery.is_only_source);
        granted.is_some_and(|granted| granted.iter().any(|granted| granted.contains(prefix)))
    }
}

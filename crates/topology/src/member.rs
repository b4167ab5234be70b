//! Members of the mesh: the record of one by one source, and the member that all sources together describe.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::BitOr;
use std::time::Duration;

use fairlead_address::{AddressFilter, Endpoint};
use fairlead_keys::{PresharedKey, PublicKey};
use ipnet::IpNet;

use crate::site::Site;

/// Source of a member record. An earlier one is believed before a later one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// The node program itself, of its own node.
    Local,
    /// Custom resources, Nodes and AddressBlocks of the cluster.
    Kubernetes,
    /// A file of this node's administrator.
    Static,
    /// Discovery services. Every program that has the secret of the cluster can publish there, so they add only endpoints to a member that
    /// a source above knows.
    Discovery,
    /// Records that discovery services gave before this program started.
    Cache,
}

impl Source {
    /// Whether discovery services are the source, now or before.
    pub fn is_discovery(self) -> bool {
        matches!(self, Self::Discovery | Self::Cache)
    }
}

/// Sources, without order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Sources(u8);

impl Sources {
    /// Whether this one is among them.
    pub fn contains(self, source: Source) -> bool {
        self.0 & Self::from(source).0 != 0
    }

    /// Iterates over the sources, the strongest first.
    pub fn iter(self) -> impl Iterator<Item = Source> {
        let all = [Source::Local, Source::Kubernetes, Source::Static, Source::Discovery, Source::Cache];
        all.into_iter().filter(move |source| self.contains(*source))
    }
}

impl From<Source> for Sources {
    fn from(source: Source) -> Self {
        Self(1 << source as u8)
    }
}

impl BitOr for Sources {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cache => "cache",
            Self::Discovery => "discovery",
            Self::Kubernetes => "kubernetes",
            Self::Local => "local",
            Self::Static => "static",
        })
    }
}

/// Record of one member from one source. The order of the fields is the order of belief in [`crate::merge`]: the stronger source, then the
/// younger record.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemberRecord {
    /// The source.
    pub source: Source,
    /// Time since the source last confirmed the record; zero for a source that is watched.
    pub age: Duration,
    /// Description of the member by this source, which leaves out what it does not know.
    pub member: Member,
}

impl MemberRecord {
    /// A record of a node, whose name is the same in all sources.
    pub fn of_node(source: Source, node: impl Into<String>) -> Self {
        Self {
            source,
            age: Duration::ZERO,
            member: Member {
                discovery: ByDiscovery { is_only_source: source.is_discovery(), needs_preshared_key: false },
                ..Member::named(node)
            },
        }
    }

    /// A record of a member that is no node, by the ID that only this source knows. Names of nodes contain no slash, so
    /// it is never taken for a node.
    pub fn of_external(source: Source, id: &str) -> Self {
        Self::of_node(source, format!("{source}/{id}"))
    }
}

/// A node or external peer, as all sources together describe it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Member {
    /// Identity of the member: the name of a node, or `source/ID` of a member that is no node. Unique.
    pub name: String,
    /// Sources that know of it, as [`crate::merge`] found; empty for a member that stays only because its tunnel works. No decision
    /// depends on them.
    pub sources: Sources,
    /// WireGuard key; `None` while the member has published none, which keeps it out of the mesh.
    pub public_key: Option<PublicKey>,
    /// The key that it is about to use in its place. Not trusted: [`crate::plan`] ignores one that another member has.
    pub next_key: Option<PublicKey>,
    /// Addresses that the member says are its own, as host prefixes. Not trusted, and bound to the key.
    pub claims: Vec<IpNet>,
    /// Address blocks the controller gave it. Trusted.
    pub blocks: Vec<IpNet>,
    /// Networks of pods that another plugin gives addresses, as its Node object has them. Trusted, because no node may change them.
    pub pod_networks: Vec<IpNet>,
    /// Addresses that the cluster says are its own.
    pub addresses: MemberAddresses,
    /// Endpoints at which its WireGuard may be reached.
    pub endpoints: Endpoints,
    /// Keepalives between it and others.
    pub keepalive: Keepalive,
    /// Location of the member; `None` while the cluster does not say, which makes the member a location of its own.
    pub site: Option<Site>,
    /// Time of joining; `None` while the source does not know, which counts as just now.
    pub since: Option<Since>,
    /// Facts that follow from what discovery services tell.
    pub discovery: ByDiscovery,
    /// Terms of a node as an entry node, by the name of the Peer: one for each Peer that names the node and has completed a handshake with
    /// it, with the key of the Peer and the term that the node took then. Not trusted; [`crate::plan`] reads only those of nodes that the
    /// Peer names.
    pub entry_terms: BTreeMap<String, (PublicKey, u64)>,
    /// Facts of a member that is no node; `None` for nodes.
    pub external: Option<External>,
}

/// Addresses of a member that it does not only claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct MemberAddresses {
    /// Own addresses on the mesh. Trusted, because the controller gives each to one node; those of a member that only discovery
    /// services know are what it says itself.
    pub mesh: Vec<IpAddr>,
    /// Addresses of its Node object of type InternalIP, in the order of the object; `None` where there is no such object.
    pub node: Option<Vec<IpAddr>>,
    /// Whether the cluster has its claims and the controller has not said yet which addresses its Node has.
    pub is_unconfirmed: bool,
    /// Whether its Node has the label of control-plane nodes, which need each other at these addresses before there is a mesh. Trusted, because the
    /// controller copies it.
    pub is_control_plane: bool,
}

impl MemberAddresses {
    /// Addresses of a node that has none on the mesh.
    pub fn of_node(addresses: Vec<IpAddr>) -> Self {
        Self { node: Some(addresses), ..Self::default() }
    }
}

/// Keepalives between a member and others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Keepalive {
    /// Seconds between keepalives towards it; `None` takes the policy's, zero sends none.
    pub interval: Option<u16>,
    /// Whether it sends its keepalives whatever it receives, as Fairlead's embedded WireGuard does. The kernel's puts them off with
    /// each packet it receives.
    pub always_sends: bool,
}

impl Keepalive {
    /// Keepalives of a member that puts its own off.
    pub fn every(interval: Option<u16>) -> Self {
        Self { interval, always_sends: false }
    }
}

/// Facts of a member that follow from what discovery services tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct ByDiscovery {
    /// Whether only discovery services know it: its claims yield to those of all others.
    pub is_only_source: bool,
    /// Whether it is a node of KubeSpan: its tunnels have the secret of the cluster as preshared key, and it answers no path probes and
    /// uses no relay.
    pub needs_preshared_key: bool,
}

/// A member outside of the cluster, which an administrator configured: its claims are prefixes, not only addresses of its own, and it
/// speaks WireGuard and nothing else.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct External {
    /// Extra symmetric key mixed into handshakes with it.
    pub preshared_key: Option<PresharedKey>,
    /// The nodes that have a tunnel with it, one of which forwards for all others; empty if every node has one.
    pub entry_nodes: Vec<String>,
}

/// Time at which a member joined, as the source recorded it. A member can only become younger by its own doing (it deletes its object and
/// creates it again), so the older one is believed where two claim the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Since {
    /// Seconds since the Unix epoch at which the API server created the object.
    pub created: i64,
    /// UID of the object, which orders objects that were created within one second.
    pub uid: String,
}

impl Member {
    /// A member of which only the identity is known.
    pub fn named(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            sources: Sources::default(),
            public_key: None,
            next_key: None,
            claims: Vec::new(),
            blocks: Vec::new(),
            pod_networks: Vec::new(),
            addresses: MemberAddresses::default(),
            endpoints: Endpoints::default(),
            keepalive: Keepalive::default(),
            site: None,
            since: None,
            entry_terms: BTreeMap::new(),
            external: None,
            discovery: ByDiscovery::default(),
        }
    }

    /// A member that a Peer of this name describes, of which nothing else is known. Names of nodes contain no slash.
    pub fn of_peer(peer: &str) -> Self {
        Self { external: Some(External::default()), ..Self::named(format!("{PEER_PREFIX}{peer}")) }
    }

    /// The name of the Peer that describes it; `None` for nodes.
    pub fn peer_name(&self) -> Option<&str> {
        self.external.as_ref().and_then(|_| peer_name(&self.name))
    }
}

/// Prefix of Peers' names in the names of their members.
const PEER_PREFIX: &str = "peer/";

/// The Peer that a member of this name comes from; `None` for nodes.
pub(crate) fn peer_name(member: &str) -> Option<&str> {
    member.strip_prefix(PEER_PREFIX)
}

/// Endpoints at which a member's WireGuard may be reached, and those at which it sees others.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Endpoints {
    /// Endpoint that an administrator chose; it is tried before discovered ones.
    pub manual: Option<Endpoint>,
    /// Endpoint that the member itself thinks best.
    pub preferred: Option<SocketAddr>,
    /// Addresses of the member itself, with its port.
    pub host: Vec<SocketAddr>,
    /// Endpoints at which STUN servers see the member.
    pub reflexive: Vec<SocketAddr>,
    /// Endpoints that discovery services tell of; tried after all others.
    pub discovered: Vec<SocketAddr>,
    /// Endpoints at which the member sees others: name of the other member to the key it has there, and the endpoint.
    pub sightings: BTreeMap<String, (PublicKey, SocketAddr)>,
    /// Whether the member says that its NAT maps it to another port for each destination.
    pub is_nat_symmetric: bool,
    /// Whether the member says that its NAT has one mapping for all destinations and lets in only what they answer.
    pub is_nat_port_restricted: bool,
    /// Filter of these endpoints for publication by others, where the member's Node has one; `None` if that of the mesh counts.
    pub filter: Option<AddressFilter>,
    /// Whether an administrator wants paths to it found by trying many ports; `None` if the mesh decides.
    pub birthday_attack: Option<bool>,
}

impl Endpoints {
    /// Adds what a source with less authority knows.
    pub(crate) fn complete(&mut self, other: Self) {
        self.manual = self.manual.take().or(other.manual);
        self.preferred = self.preferred.or(other.preferred);
        for (known, others) in [
            (&mut self.host, other.host),
            (&mut self.reflexive, other.reflexive),
            (&mut self.discovered, other.discovered),
        ] {
            for endpoint in others {
                if !known.contains(&endpoint) {
                    known.push(endpoint);
                }
            }
        }
        self.is_nat_symmetric |= other.is_nat_symmetric;
        self.is_nat_port_restricted |= other.is_nat_port_restricted;
        self.filter = self.filter.take().or(other.filter);
        self.birthday_attack = self.birthday_attack.or(other.birthday_attack);
        for (member, seen) in other.sightings {
            self.sightings.entry(member).or_insert(seen);
        }
    }
}

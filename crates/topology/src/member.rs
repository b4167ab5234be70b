//! Members of the mesh: what one source says of one, and what all sources together say.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::BitOr;
use std::time::Duration;

use fairlead_address::{AddressFilter, Endpoint};
use fairlead_keys::{PresharedKey, PublicKey};
use ipnet::IpNet;

use crate::site::Site;

/// Who described a member. The first is believed before the next.
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
    /// What discovery services said before this program started.
    Cache,
}

impl Source {
    /// Whether it is what discovery services say, now or before.
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

    /// They, the strongest first.
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

/// What one source says of one member. The order of the fields is the order of belief in [`crate::merge`]: the stronger
/// source, then the younger record.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemberRecord {
    /// The source.
    pub source: Source,
    /// Time since the source last confirmed the record; zero for a source that is watched.
    pub age: Duration,
    /// What it says. A source leaves out what it does not know.
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
    /// Its identity: the name of the node, or `source/ID` of a member that is no node. Unique.
    pub name: String,
    /// Who knows of it, as [`crate::merge`] found; empty for a member that stays only because its tunnel works. It decides nothing.
    pub sources: Sources,
    /// Its WireGuard key; `None` while it has published none, which keeps it out of the mesh.
    pub public_key: Option<PublicKey>,
    /// The key that it is about to use in its place. Not trusted: [`crate::plan`] ignores one that another member has.
    pub next_key: Option<PublicKey>,
    /// What it says it is reachable at: its own addresses, as host prefixes. Not trusted, and bound to the key.
    pub claims: Vec<IpNet>,
    /// Address blocks the controller gave it. Trusted.
    pub blocks: Vec<IpNet>,
    /// Networks of pods that another plugin gives addresses, as its Node object has them. Trusted, because no node may change them.
    pub pod_networks: Vec<IpNet>,
    /// Addresses that the cluster says are its own.
    pub addresses: MemberAddresses,
    /// Where its WireGuard may be reached.
    pub endpoints: Endpoints,
    /// Keepalives between it and others.
    pub keepalive: Keepalive,
    /// Where it is; `None` while the cluster does not say, which makes it a location of its own.
    pub site: Option<Site>,
    /// When it joined; `None` while the source does not know, which counts as just now.
    pub since: Option<Since>,
    /// Facts that follow from what discovery services tell.
    pub discovery: ByDiscovery,
    /// Of a node: the Peers that name it as an entry node and have completed a handshake with it, with their key and the term that this
    /// node took then. Not trusted; [`crate::plan`] reads only those of nodes that the Peer names.
    pub entry_terms: BTreeMap<String, (PublicKey, u64)>,
    /// What only a member that is no node has; `None` for nodes.
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
}

impl MemberAddresses {
    /// Addresses of a node that has none on the mesh.
    pub fn of_node(addresses: Vec<IpAddr>) -> Self {
        Self { mesh: Vec::new(), node: Some(addresses) }
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
    /// Only discovery services know it: its claims yield to those of all others.
    pub is_only_source: bool,
    /// It is a node of KubeSpan: its tunnels have the secret of the cluster as preshared key, and it answers no path probes and uses no
    /// relay.
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

/// When a member joined, as the source recorded it. A member can only become younger by its own doing (it deletes its
/// object and creates it again), so the older one is believed where two claim the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Since {
    /// Seconds since the Unix epoch at which the API server created the object.
    pub created: i64,
    /// Its UID: objects of one second have an order too.
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

/// In front of the names of Peers, in the names of their members.
const PEER_PREFIX: &str = "peer/";

/// The Peer that a member of this name comes from; `None` for nodes.
pub(crate) fn peer_name(member: &str) -> Option<&str> {
    member.strip_prefix(PEER_PREFIX)
}

/// Where a member's WireGuard may be reached, and where it sees others.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Endpoints {
    /// Chosen by an administrator; it is tried before discovered ones.
    pub manual: Option<Endpoint>,
    /// The one the member thinks best itself.
    pub preferred: Option<SocketAddr>,
    /// Its own addresses, with its port.
    pub host: Vec<SocketAddr>,
    /// Where STUN servers see it.
    pub reflexive: Vec<SocketAddr>,
    /// Where discovery services say it is; tried after all others.
    pub discovered: Vec<SocketAddr>,
    /// Where it sees others: name of the member to the key it has there, and the endpoint.
    pub sightings: BTreeMap<String, (PublicKey, SocketAddr)>,
    /// It says that its NAT maps it to another port for each destination.
    pub is_nat_symmetric: bool,
    /// It says that its NAT has one mapping for all destinations and lets in only what they answer.
    pub is_nat_port_restricted: bool,
    /// Which of them others may publish, where its Node says that; `None` if the mesh does.
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

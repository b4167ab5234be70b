//! The cluster's objects as a source of members: WireKubePeers, AddressBlocks and, for the built-in router, Nodes.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fairlead_address::{Endpoint, InvalidEndpoint, is_reachable};
use fairlead_api::names::ANNOTATION_BIRTHDAY;
use fairlead_api::resources::{
    CandidateType, EndpointDiscoveryMethod, EntryTerm, NatType, NodeFacts, NodeLocation,
    WireGuardImplementation, WireKubePeer,
};
use fairlead_cluster::caches::{Cache, Refusal};
use fairlead_ipam::ExistingBlock;
use fairlead_keys::PublicKey;
use fairlead_topology::{
    Endpoints, InternalAddress, Keepalive, Member, MemberAddresses, MemberRecord, Since, Site, Source,
};
use futures::FutureExt as _;
use futures::future::{BoxFuture, select_all};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use tokio::sync::watch;

use super::cached_peer::CachedPeer;
use super::departures::{Deletion, MAX_DELETIONS};
use super::{MemberSource, SourceProblem, nodes};
use crate::cached_block::CachedBlock;

/// Watch caches of the cluster.
pub struct Kubernetes {
    peers: Option<Arc<Cache<CachedPeer>>>,
    nodes: Option<Arc<Cache<Node>>>,
    blocks: Arc<Cache<CachedBlock>>,
    deletions: Deletions,
    changes: Vec<watch::Receiver<u64>>,
    /// Blocks by node, and the generation of the cache they were read from.
    read_blocks: (u64, BTreeMap<String, Vec<IpNet>>),
}

/// WireKubePeers whose deletion the watch has shown, until the source is asked for them; of too many the newest.
#[derive(Debug, Clone, Default)]
pub struct Deletions(Arc<Mutex<VecDeque<Deletion>>>);

impl Deletions {
    /// Notes a deletion. Without a key it had no tunnel.
    pub fn note(&self, peer: &CachedPeer) {
        let Some(public_key) = peer.member().public_key else { return };
        let name = peer.member().name.clone();
        let next_key = peer.member().next_key;
        let mut noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.len() >= MAX_DELETIONS {
            noted.pop_front();
        }
        noted.push_back(Deletion { source: Source::Kubernetes, name, public_key, next_key });
    }

    fn take(&self) -> Vec<Deletion> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner)).into()
    }
}

/// A WireKubePeer as read: the member, unless its key cannot be read, and what was left out.
pub(crate) type ReadPeer = (Option<Member>, Vec<SourceProblem>);

impl Kubernetes {
    /// Members of the mesh: published peers, with their blocks.
    pub fn of_mesh(
        peers: Arc<Cache<CachedPeer>>,
        deletions: Deletions,
        blocks: Arc<Cache<CachedBlock>>,
    ) -> Self {
        let changes = vec![peers.subscribe(), blocks.subscribe()];
        Self { deletions, ..Self::new(Some(peers), None, blocks, changes) }
    }

    /// Nodes for routes: all Nodes, [trimmed](nodes::trim), with their blocks.
    pub fn of_routes(nodes: Arc<Cache<Node>>, blocks: Arc<Cache<CachedBlock>>) -> Self {
        let changes = vec![nodes.subscribe(), blocks.subscribe()];
        Self::new(None, Some(nodes), blocks, changes)
    }

    fn new(
        peers: Option<Arc<Cache<CachedPeer>>>,
        nodes: Option<Arc<Cache<Node>>>,
        blocks: Arc<Cache<CachedBlock>>,
        mut changes: Vec<watch::Receiver<u64>>,
    ) -> Self {
        // Only what changes from now on is news.
        changes.iter_mut().for_each(watch::Receiver::mark_unchanged);
        let deletions = Deletions::default();
        Self { peers, nodes, blocks, deletions, changes, read_blocks: (0, BTreeMap::new()) }
    }

    fn read_blocks(&mut self) {
        // Changes after this are read the next time.
        let generation = self.blocks.generation();
        if self.read_blocks.0 == generation {
            return;
        }
        let mut by_node: BTreeMap<String, Vec<IpNet>> = BTreeMap::new();
        for block in self.blocks.store.state() {
            // A block that is being deleted still counts: pods may use it.
            let ExistingBlock { node, nets, .. } = block.existing();
            match by_node.get_mut(node) {
                Some(blocks) => blocks.extend(nets.iter()),
                None if node.is_empty() => {}
                None => drop(by_node.insert(node.clone(), nets.iter().collect())),
            }
        }
        by_node.values_mut().for_each(|blocks| blocks.sort_unstable());
        self.read_blocks = (generation, by_node);
    }
}

impl MemberSource for Kubernetes {
    fn changed(&mut self) -> BoxFuture<'_, ()> {
        let changed = self.changes.iter_mut().map(|change| change.changed().boxed());
        select_all(changed).map(drop).boxed()
    }

    fn is_ready(&self) -> bool {
        self.blocks.is_ready()
            && self.peers.as_ref().is_none_or(|peers| peers.is_ready())
            && self.nodes.as_ref().is_none_or(|nodes| nodes.is_ready())
    }

    fn refusal(&self) -> Option<Refusal> {
        let peers = self.peers.as_ref().and_then(|peers| peers.refusal());
        let nodes = || self.nodes.as_ref().and_then(|nodes| nodes.refusal());
        peers.or_else(nodes).or_else(|| self.blocks.refusal())
    }

    fn deletions(&mut self) -> Vec<Deletion> {
        self.deletions.take()
    }

    /// Up to three of each node: [`fairlead_topology::merge`] unites them.
    fn records(&mut self, problems: &mut Vec<SourceProblem>) -> Vec<MemberRecord> {
        self.read_blocks();
        let record = |member| MemberRecord { age: Duration::ZERO, source: Source::Kubernetes, member };
        let mut peers = self.peers.as_ref().map(|peers| peers.store.state()).unwrap_or_default();
        peers.sort_unstable_by(|a, b| a.member().name.cmp(&b.member().name));
        let nodes = self.nodes.as_ref().map(|nodes| nodes.store.state()).unwrap_or_default();
        let size = peers.len().saturating_add(nodes.len()).saturating_add(self.read_blocks.1.len());
        let mut records = Vec::with_capacity(size);
        for peer in peers {
            problems.extend_from_slice(peer.problems());
            records.push(record(peer.member().clone()));
        }
        for node in nodes {
            let addresses = MemberAddresses::of_node(nodes::addresses(&node, nodes::INTERNAL));
            records.push(record(Member { addresses, ..Member::named(node.name_any()) }));
        }
        for (node, blocks) in &self.read_blocks.1 {
            records.push(record(Member { blocks: blocks.clone(), ..Member::named(node) }));
        }
        records
    }
}

/// Reads one WireKubePeer. What cannot be read is left out; without a key the rest has no meaning.
pub(crate) fn read_peer(peer: &WireKubePeer) -> ReadPeer {
    let name = peer.name_any();
    let spec = &peer.spec;
    let key = match spec.parse_public_key() {
        Ok(key) => key,
        Err(error) => return (None, vec![SourceProblem::InvalidPublicKey { peer: name, error }]),
    };
    let (claims, unreadable) = spec.parse_allowed_ips();
    let unreadable = unreadable
        .into_iter()
        .map(|entry| SourceProblem::InvalidAllowedIp { peer: name.clone(), entry: entry.to_owned() });
    let mut problems: Vec<SourceProblem> = unreadable.collect();
    let published = spec.parse_endpoint().unwrap_or_else(|InvalidEndpoint(value)| {
        problems.push(SourceProblem::InvalidPeerEndpoint { peer: name.clone(), value });
        None
    });
    let next_key = spec.parse_next_public_key().unwrap_or_else(|error| {
        problems.push(SourceProblem::InvalidNextPublicKey { peer: name.clone(), error });
        None
    });
    let node = peer.status.as_ref().and_then(|status| status.node.as_ref());
    let location = node.and_then(|node| node.location.as_ref());
    let site = location.map(|location| site(&name, location, &mut problems));
    let member = Member {
        public_key: Some(key),
        next_key,
        site,
        claims,
        keepalive: Keepalive {
            interval: Some(spec.persistent_keepalive),
            always_sends: peer.status.as_ref().and_then(|status| status.wireguard)
                == Some(WireGuardImplementation::Embedded),
        },
        endpoints: Endpoints {
            birthday_attack: birthday_attack(peer, &mut problems),
            filter: node.and_then(NodeFacts::parse_endpoint_filters),
            ..endpoints(peer, published)
        },
        since: since(peer),
        addresses: MemberAddresses {
            mesh: node.map(mesh_addresses).unwrap_or_default(),
            node: node.map(node_addresses),
            is_unconfirmed: node.is_none(),
            is_control_plane: node.is_some_and(|node| node.is_control_plane),
        },
        pod_networks: pod_networks(peer),
        entry_terms: entry_terms(peer),
        ..Member::named(name)
    };
    (Some(member), problems)
}

/// Internal addresses of the Node, which the controller copied.
fn node_addresses(node: &NodeFacts) -> Vec<IpAddr> {
    node.internal_ips.iter().filter_map(|address| address.parse().ok()).collect()
}

/// Networks of pods that the controller copied, also without a readable key: nothing is to leave to these pods in clear text.
pub(crate) fn pod_networks(peer: &WireKubePeer) -> Vec<IpNet> {
    let node = peer.status.as_ref().and_then(|status| status.node.as_ref());
    node.map(NodeFacts::parse_pod_cidrs).unwrap_or_default()
}

/// Addresses on the mesh that the controller gave the node.
fn mesh_addresses(node: &NodeFacts) -> Vec<IpAddr> {
    let given = node.mesh_ips.iter().filter_map(|address| address.parse().ok());
    given.filter(|address| is_reachable(*address)).collect()
}

fn entry_terms(peer: &WireKubePeer) -> BTreeMap<String, (PublicKey, u64)> {
    let published = peer.status.iter().flat_map(|status| &status.entry_terms);
    published
        .filter_map(|(peer, EntryTerm { public_key, term })| {
            Some((peer.clone(), (public_key.parse().ok()?, *term)))
        })
        .collect()
}

fn site(peer: &str, location: &NodeLocation, problems: &mut Vec<SourceProblem>) -> Site {
    let (internal, unreadable) = location.parse_internal_ips();
    problems.extend(
        unreadable
            .into_iter()
            .map(|entry| SourceProblem::InvalidInternalIp { peer: peer.to_owned(), entry: entry.to_owned() }),
    );
    let (networks, unreadable) = location.parse_networks();
    let unreadable = unreadable
        .into_iter()
        .map(|entry| SourceProblem::InvalidLocationPrefix { peer: peer.to_owned(), entry: entry.to_owned() });
    problems.extend(unreadable);
    let internal = internal.into_iter().map(|(address, length)| InternalAddress { address, length });
    Site {
        location: location.name.clone(),
        internal: internal.collect(),
        is_leader: location.leader,
        is_public: location.public,
        networks,
    }
}

fn since(peer: &WireKubePeer) -> Option<Since> {
    let created = peer.metadata.creation_timestamp.as_ref()?.0.as_second();
    Some(Since { created, uid: peer.metadata.uid.clone().unwrap_or_default() })
}

fn endpoints(peer: &WireKubePeer, published: Option<Endpoint>) -> Endpoints {
    let status = peer.status.as_ref();
    let method = status.and_then(|status| status.endpoint_discovery_method);
    let is_manual = method.is_none_or(|method| method == EndpointDiscoveryMethod::Manual);
    let candidates = |kinds: &'static [CandidateType]| {
        let all = status.into_iter().flat_map(|status| &status.ice_candidates);
        all.filter(move |candidate| kinds.contains(&candidate.type_))
            .filter_map(|candidate| candidate.address.parse().ok())
            .collect()
    };
    // Behind a symmetric NAT only the address of this endpoint is real: WireKube publishes it with the port WireGuard listens on.
    let nat = status.and_then(|status| status.nat_type);
    let is_nat_symmetric = nat == Some(NatType::Symmetric);
    let is_placeholder = method == Some(EndpointDiscoveryMethod::Stun) && is_nat_symmetric;
    let sightings = status.into_iter().flat_map(|status| &status.observed_endpoints);
    Endpoints {
        discovered: Vec::new(),
        preferred: published.as_ref().filter(|_| !is_manual && !is_placeholder).and_then(Endpoint::address),
        manual: published.filter(|_| is_manual),
        host: candidates(&[CandidateType::Host]),
        reflexive: candidates(&[CandidateType::Srflx, CandidateType::Prflx]),
        sightings: sightings
            .filter_map(|(peer, seen)| {
                Some((peer.clone(), (seen.public_key.parse().ok()?, seen.parse_endpoint().ok()?)))
            })
            .collect(),
        is_nat_symmetric,
        is_nat_port_restricted: nat == Some(NatType::PortRestrictedCone),
        birthday_attack: None,
        filter: None,
    }
}

/// The two words of `spec.natTraversal.birthdayAttack`. What is neither is added to `problems`.
fn birthday_attack(peer: &WireKubePeer, problems: &mut Vec<SourceProblem>) -> Option<bool> {
    match peer.annotations().get(ANNOTATION_BIRTHDAY)?.as_str() {
        "disabled" => Some(false),
        "enabled" => Some(true),
        "" => None,
        value => {
            problems.push(SourceProblem::InvalidBirthdayAttack {
                peer: peer.name_any(),
                annotation: ANNOTATION_BIRTHDAY,
                value: value.to_owned(),
            });
            None
        }
    }
}

#[cfg(test)]
mod tests;

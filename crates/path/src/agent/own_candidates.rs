//! Candidates that nodes tell each other over the relay: this node's own, and what becomes of those that peers name. What a node
//! publishes reaches its peers only through the API server.

use std::net::SocketAddr;
use std::time::Duration;

use fairlead_address::{EndpointFilters, PrefixSet};
use fairlead_keys::PublicKey;
use fairlead_wire::probe::{self, CandidateKind, Epoch, Header};

use super::PathAgent;
use super::peer::Peer;
use crate::candidates::{Candidate, OwnView, PeerView, order};
use crate::reflexive::ReflexiveAddresses;

/// Least time between two moments at which all peers are told that the candidates of this node are others.
const MIN_TELL_INTERVAL: Duration = Duration::from_millis(250);

/// Addresses and filters of this node that do not come from its STUN servers and peers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnSide {
    /// Addresses and networks of this node, to order the candidates of peers.
    pub view: OwnView,
    /// The addresses of pods and Services: no node is there, and packets to a pod would go through the mesh that they carry.
    pub cluster_addresses: PrefixSet,
    /// Addresses of this node, with its port.
    pub host: Vec<SocketAddr>,
    /// Endpoints at which gateways take packets for this node.
    pub mapped: Vec<SocketAddr>,
    /// Endpoints at which this node is reached, as an administrator says.
    pub extra: Vec<SocketAddr>,
    /// Filters of the endpoints that this node tells peers, and of those of peers that it tries.
    pub filters: EndpointFilters,
}

/// The candidates of this node, as peers are told.
#[derive(Debug, Default)]
pub(super) struct OwnCandidates {
    side: OwnSide,
    /// Addresses at which peers see this node.
    pub(super) reflexive: ReflexiveAddresses,
    list: Vec<probe::Candidate>,
    /// Something changed that the list follows from.
    pub(super) is_outdated: bool,
    /// Time at which peers are told of another list, and at which they were told last.
    pub(super) due: Option<Duration>,
    told: Option<Duration>,
}

impl OwnCandidates {
    /// For a request over the relay.
    pub(super) fn list(&self) -> &[probe::Candidate] {
        &self.list
    }

    /// Takes where an answer says that a peer at `by` sees this node. Whether [`Self::reflexive`] is another set now.
    pub(super) fn observed(
        &mut self,
        now: Duration,
        peer: PublicKey,
        by: SocketAddr,
        observed: SocketAddr,
    ) -> bool {
        let is_changed = self.reflexive.insert(now, peer, by, observed);
        self.is_outdated |= is_changed;
        is_changed
    }

    /// Candidates that this node may use of those that a peer names, best first: the rules are those for published ones.
    fn usable(&self, named: &[probe::Candidate]) -> Vec<Candidate> {
        let of_kind = |is_host: bool| {
            let named = named.iter().filter(move |named| (named.kind == CandidateKind::Host) == is_host);
            named.map(|named| named.address).collect()
        };
        let view = &self.side.view;
        let peer = PeerView { manual: None, host: of_kind(true), observed: of_kind(false) };
        let mut candidates = order(view, &peer);
        candidates.retain(|candidate| self.is_tried(candidate.address));
        candidates
    }

    /// Whether this node may send to an endpoint of a peer.
    pub(super) fn is_tried(&self, endpoint: SocketAddr) -> bool {
        let original = self.side.view.nat64.original(endpoint);
        self.side.filters.tried.allows(original.ip()) && !self.is_cluster_address(endpoint)
    }

    /// Whether an endpoint is that of a pod or a Service, directly or through a NAT64.
    pub(super) fn is_cluster_address(&self, endpoint: SocketAddr) -> bool {
        let original = self.side.view.nat64.original(endpoint);
        [endpoint, original].iter().any(|it| self.side.cluster_addresses.contains(it.ip()))
    }
}

impl PathAgent {
    /// Sets what is known of this node itself. Peers without a direct path are told over the relay where it may be reached.
    pub fn set_own_side(&mut self, now: Duration, side: OwnSide) {
        if self.own.side != side {
            self.own.side = side;
            self.own.is_outdated = true;
            self.tell_own_candidates(now);
        }
    }

    /// Tells peers where this node may be reached, if that is somewhere else now.
    pub(super) fn tell_own_candidates(&mut self, now: Duration) {
        if std::mem::take(&mut self.own.is_outdated) {
            let list = self.own_candidates();
            if self.own.list != list {
                self.own.list = list;
                let earliest = self.own.told.map(|told| told.saturating_add(MIN_TELL_INTERVAL));
                self.own.due = Some(earliest.map_or(now, |earliest| earliest.max(now)));
            }
        }
        if self.own.due.take_if(|due| *due <= now).is_none() || self.probing.is_none() {
            return;
        }
        for (key, peer) in &mut self.peers {
            if peer.prober.own_candidates_changed(now) {
                self.own.told = Some(now);
                self.wakeups.follow_prober(key, peer);
            }
        }
    }

    /// Candidates of this node. Those at which others see it come first: peers do not know them yet.
    fn own_candidates(&self) -> Vec<probe::Candidate> {
        let answers = self.stun_answers();
        let seen = answers.values().filter_map(|answer| answer.mapped());
        let OwnSide { host, mapped, extra, filters, .. } = &self.own.side;
        let is_told = |address: &SocketAddr| filters.published.allows(address.ip());
        let server = seen.chain(mapped.iter().copied()).map(|it| (CandidateKind::ServerReflexive, it));
        let peers = self.own.reflexive.agreed().into_iter().map(|it| (CandidateKind::PeerReflexive, it));
        let mut list: Vec<probe::Candidate> = Vec::new();
        let extra = extra.iter().map(|it| (CandidateKind::ServerReflexive, *it));
        for (kind, address) in extra.chain(server.chain(peers).filter(|(_, address)| is_told(address))) {
            let is_known = host.contains(&address) || list.iter().any(|known| known.address == address);
            if !is_known && !self.own.is_cluster_address(address) {
                list.push(probe::Candidate { kind, address });
            }
        }
        list.truncate(probe::MAX_CANDIDATES / 2);
        list.extend(
            host.iter()
                .filter(|it| is_told(it))
                .map(|it| probe::Candidate { kind: CandidateKind::Host, address: *it }),
        );
        list.truncate(probe::MAX_CANDIDATES);
        list
    }
}

impl Peer {
    /// Takes the candidates that the peer names in an authenticated request, unless it has named others since.
    pub(super) fn take_candidates(
        &mut self,
        now: Duration,
        own: &OwnCandidates,
        header: &Header,
        named: &[probe::Candidate],
    ) {
        let is_older = |(epoch, counter): (Epoch, u64)| epoch == header.epoch && counter >= header.counter;
        if named.is_empty() || self.named.is_some_and(is_older) {
            return;
        }
        self.named = Some((header.epoch, header.counter));
        self.prober.set_signalled(now, &own.usable(named));
    }
}

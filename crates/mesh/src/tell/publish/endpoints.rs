//! Endpoints of this node, and those at which it sees others.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use fairlead_api::resources::{
    CandidateType, EndpointDiscoveryMethod, EntryTerm, IceCandidate, ObservedEndpoint,
};
use fairlead_keys::PublicKey;
use fairlead_path::{NatType, is_private};

use super::Facts;
use crate::apply::report::{PeerReport, Report};
use crate::plan::desired::OwnEndpoints;
use crate::tell::observers::{self, OBSERVERS};

/// Priority of an address of the node itself (WireKube's candidate table).
const HOST_PRIORITY: i32 = 100;
/// Priorities of an address that a gateway mapped or that a STUN server sees: behind a symmetric NAT the latter is that of this server alone.
const REFLEXIVE_PRIORITY: i32 = 200;
const SYMMETRIC_PRIORITY: i32 = 50;
/// Priority of an address that peers see.
const PEER_REFLEXIVE_PRIORITY: i32 = 150;
/// Priority of the relay (the same table).
const RELAY_PRIORITY: i32 = 10;
/// Most addresses seen by STUN servers that one node publishes.
const MAX_REFLEXIVE: usize = 8;
/// Most observations one node publishes.
const MAX_OBSERVATIONS: usize = 64;
/// Most Peers of which one node publishes that they came to it.
const MAX_ENTRY_TERMS: usize = 1000;

/// The one endpoint shown to people, and how it was found.
pub(super) fn endpoint(facts: &Facts<'_>) -> (Option<String>, EndpointDiscoveryMethod) {
    if let Some(manual) = &facts.report.configured.manual {
        return (Some(manual.to_string()), EndpointDiscoveryMethod::Manual);
    }
    let port = facts.report.device.port;
    let nat = facts.report.translation.nat;
    let OwnEndpoints { host, observed, reflexive, mapped, public_ipv4, .. } = &facts.report.endpoints;
    let is_public = |address: &&SocketAddr| !is_private(address.ip());
    let mut by_peers = seen_by_peers(facts.report).filter(is_public);
    let public = reflexive.iter().find(is_public);
    let instance = public_ipv4.map(|address| SocketAddr::new(address.into(), port));
    if let Some(instance) = instance.filter(|_| nat != NatType::Open && public.is_none()) {
        return (Some(instance.to_string()), EndpointDiscoveryMethod::AwsMetadata);
    }
    // What the gateway maps is the port of every peer. Where every peer sees the same port anyway, that of STUN comes first.
    let mapped = mapped.iter().find(is_public).filter(|_| nat != NatType::Open);
    if let Some(mapped) = mapped.filter(|_| public.is_none() || nat == NatType::Symmetric) {
        return (Some(mapped.to_string()), EndpointDiscoveryMethod::Upnp);
    }
    // The port is that of the one server or peer, and no other; the address is right (WireKube publishes the same).
    let shown = |seen: &SocketAddr| match nat {
        NatType::Symmetric => SocketAddr::new(seen.ip(), port).to_string(),
        _ => seen.to_string(),
    };
    // A peer on this side of the NAT sees a private address: it never takes the place of a public one.
    let observed = observed.iter().find(is_public).or_else(|| by_peers.next()).or(observed.first());
    let is_outside = |seen: &&SocketAddr| !is_private(seen.ip()) || !host.iter().any(|own| is_public(&own));
    match (public, observed.filter(is_outside), host.first()) {
        (Some(seen), ..) if nat != NatType::Open => (Some(shown(seen)), EndpointDiscoveryMethod::Stun),
        (None, Some(seen), _) if nat != NatType::Open => {
            (Some(shown(seen)), EndpointDiscoveryMethod::Observed)
        }
        (.., host) => (host.map(ToString::to_string), EndpointDiscoveryMethod::InternalIp),
    }
}

/// Endpoints at which peers see this node and others may reach it; none behind a symmetric NAT, which has another port for each of them.
fn seen_by_peers(report: &Report) -> impl Iterator<Item = &SocketAddr> {
    report.endpoints.peer_reflexive.iter().filter(|_| report.translation.nat != NatType::Symmetric)
}

/// Addresses of the node itself, those that an administrator named, those that gateways mapped, those at which STUN servers and peers see it, and the relay.
pub(super) fn ice_candidates(report: &Report) -> Vec<IceCandidate> {
    let is_symmetric = report.translation.nat == NatType::Symmetric;
    let priority = if is_symmetric { SYMMETRIC_PRIORITY } else { REFLEXIVE_PRIORITY };
    let candidate = |type_, address: &SocketAddr, priority| IceCandidate {
        type_,
        address: address.to_string(),
        priority,
    };
    let host =
        report.endpoints.host.iter().map(|address| candidate(CandidateType::Host, address, HOST_PRIORITY));
    let reflexive = report.endpoints.reflexive.iter().take(MAX_REFLEXIVE);
    let reflexive = reflexive.map(|address| candidate(CandidateType::Srflx, address, priority));
    let relay = report.relay.as_ref().map(|relay| IceCandidate {
        type_: CandidateType::Relay,
        address: format!("{}:{}", relay.endpoint.host, relay.endpoint.port),
        priority: RELAY_PRIORITY,
    });
    let by_peers = seen_by_peers(report).take(MAX_REFLEXIVE);
    let by_peers = by_peers.map(|address| candidate(CandidateType::Prflx, address, PEER_REFLEXIVE_PRIORITY));
    let mapped = report
        .endpoints
        .mapped
        .iter()
        .map(|address| candidate(CandidateType::Srflx, address, REFLEXIVE_PRIORITY));
    let chosen =
        report.configured.extra_endpoints.iter().filter(|address| !report.endpoints.host.contains(address));
    let chosen = chosen.map(|address| candidate(CandidateType::Srflx, address, REFLEXIVE_PRIORITY));
    let is_other = |seen: &IceCandidate| {
        !report.endpoints.mapped.iter().any(|mapped| mapped.to_string() == seen.address)
    };
    host.chain(chosen).chain(mapped).chain(reflexive.filter(is_other)).chain(by_peers).chain(relay).collect()
}

/// Endpoints of peers that did not publish them: what a peer behind another NAT needs to reach them.
pub(super) fn observations(facts: &Facts<'_>, up: &[&PeerReport]) -> BTreeMap<String, ObservedEndpoint> {
    up.iter()
        .filter_map(|peer| {
            let endpoint = peer.published_endpoint?;
            (facts.observes)(&peer.name, endpoint).then(|| {
                let seen = ObservedEndpoint {
                    public_key: peer.public_key.to_string(),
                    endpoint: endpoint.to_string(),
                    last_seen: None,
                };
                (peer.name.clone(), seen)
            })
        })
        .take(MAX_OBSERVATIONS)
        .collect()
}

/// Terms of Peers at this entry node, by name: one write when a Peer comes to another node.
pub(super) fn entry_terms(report: &Report) -> BTreeMap<String, EntryTerm> {
    let term = |(peer, key, term): (&str, PublicKey, u64)| {
        (peer.to_owned(), EntryTerm { public_key: key.to_string(), term })
    };
    report.entry_terms().map(term).take(MAX_ENTRY_TERMS).collect()
}

/// Whether this node is to publish that it sees a peer at an endpoint, of which it has known for `age`: unless enough of the
/// `reporters` precede it, and only after those that do had time to.
pub fn observes<'a>(
    (node, peer): (&str, &str),
    reporters: impl Iterator<Item = &'a str>,
    members: usize,
    age: Duration,
) -> bool {
    let own = observers::place(node, peer);
    let before = reporters.filter(|other| *other != node && observers::place(other, peer) < own).count();
    before < OBSERVERS && age >= observers::delay(own, members)
}

//! Endpoints of this node: its own addresses, those that other nodes and STUN servers see, and those that gateways map.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use fairlead_address::{AddressFilter, PrefixSet};
use fairlead_path::{Nat64, NatType, OwnView, Seen, StunAnswer, classify};

use super::host::Host;
use super::nat64;
use super::own_addresses::{OwnAddresses, OwnEndpoints, StunAnswers};
use super::sightings::Sightings;
use crate::model::inputs::Inputs;
use crate::model::problem::MeshProblem;

/// Endpoints of this node, its NAT and its view of the network, before a filter decides which endpoints are published.
pub(super) struct Location {
    pub(super) endpoints: OwnEndpoints,
    /// Addresses and networks of this node, from which the order of candidates follows.
    pub(super) view: OwnView,
    pub(super) nat: NatType,
    /// Answers about a NAT64 that are not used.
    pub(super) refused: Vec<MeshProblem>,
}

impl Location {
    /// An address inside a block, a network of pods or a range of Services (`inside`) is that of a pod or a Service, whatever a node says.
    pub(super) fn new(
        inputs: &Inputs,
        host: &Host,
        sightings: &Sightings<'_>,
        own_addresses: &OwnAddresses,
        inside: &PrefixSet,
    ) -> Self {
        let OwnAddresses { stun, peers: by_peers, filtering } = own_addresses;
        let is_outside = |endpoint: &SocketAddr| !inside.contains(endpoint.ip());
        let mut endpoints = host_endpoints(inputs, &host.addresses, host.port);
        endpoints.retain(is_outside);
        let mut observed = sightings.own_endpoints(inputs);
        observed.retain(is_outside);
        let mut reflexive = reflexive(&endpoints, stun);
        reflexive.retain(is_outside);
        let mapped = mapped(inputs, host.port, &endpoints, inside);
        let is_news =
            |seen: &&SocketAddr| !(endpoints.contains(seen) || reflexive.contains(seen)) && is_outside(seen);
        let peer_reflexive: Vec<SocketAddr> = by_peers.iter().filter(is_news).copied().collect();
        let (nat64, refused) = nat64::usable(inputs, &host.addresses, &host.ipv4_routes);
        let view = OwnView {
            addresses: endpoints.iter().map(SocketAddr::ip).collect(),
            // A public address on an interface of this host says nothing about who else is near.
            public_ips: observed
                .iter()
                .filter(|seen| !endpoints.contains(seen))
                .chain(&reflexive)
                .chain(&mapped)
                .chain(&peer_reflexive)
                .map(SocketAddr::ip)
                .collect(),
            prefixes: host.networks.clone(),
            nat64,
        };
        let seen = seen(inputs, sightings, stun, &view.nat64);
        let nat = classify(&endpoints, &seen).with_filtering(*filtering);
        let public_ipv4 = inputs.network.public_ipv4;
        let host = endpoints;
        let endpoints = OwnEndpoints { host, observed, reflexive, mapped, public_ipv4, peer_reflexive };
        Self { endpoints, view, nat, refused }
    }
}

impl OwnEndpoints {
    /// Endpoints that this node publishes.
    pub(super) fn published(&self, filter: &AddressFilter) -> Self {
        let published = |endpoints: &Vec<SocketAddr>| filter.apply(endpoints.clone(), SocketAddr::ip);
        Self {
            host: published(&self.host),
            observed: published(&self.observed),
            reflexive: published(&self.reflexive),
            mapped: published(&self.mapped),
            public_ipv4: self.public_ipv4.filter(|it| filter.allows((*it).into())),
            peer_reflexive: published(&self.peer_reflexive),
        }
    }
}

/// Addresses at which observers see this node, each with the observer's own address.
fn seen(inputs: &Inputs, sightings: &Sightings<'_>, stun: &StunAnswers, nat64: &Nat64) -> Vec<Seen> {
    // A port that a gateway leads here on request is no mapping of its own accord.
    let mapped: Vec<SocketAddr> = inputs.network.port_mappings.addresses().collect();
    let by_nodes = sightings.of_own(inputs);
    let by_nodes =
        by_nodes.filter(|(_, address)| !mapped.contains(address)).filter_map(|(observer, address)| {
            Some(Seen { observer: observer.endpoints.host.first()?.ip(), address })
        });
    // Another family than the server's comes from a translation between families (RFC 6146), of which a mapping of this
    // family says nothing, unless the server was asked through our own.
    let by_servers = mappings(stun)
        .map(|(server, address)| (nat64.original(server), address))
        .filter(|(server, address)| server.is_ipv4() == address.is_ipv4())
        .map(|(server, address)| Seen { observer: server.ip(), address });
    by_nodes.chain(by_servers).collect()
}

fn mappings(stun: &StunAnswers) -> impl Iterator<Item = (SocketAddr, SocketAddr)> {
    stun.iter().flatten().filter_map(|(server, answer)| match answer {
        StunAnswer::Mapped(address) => Some((*server, *address)),
        StunAnswer::Invalid(_) | StunAnswer::Missing | StunAnswer::Refused(_) => None,
    })
}

/// Addresses in answers of STUN servers, without this host's own endpoints, each once, IPv4 first.
fn reflexive(endpoints: &[SocketAddr], stun: &StunAnswers) -> Vec<SocketAddr> {
    let distinct: BTreeSet<SocketAddr> = mappings(stun).map(|(_, address)| address).collect();
    distinct.into_iter().filter(|address| !endpoints.contains(address)).collect()
}

/// Endpoints that gateways granted and the cloud translates, without this host's own and those inside of prefixes of pods and Services.
fn mapped(inputs: &Inputs, port: u16, endpoints: &[SocketAddr], inside: &PrefixSet) -> Vec<SocketAddr> {
    let instance = inputs.network.public_ipv4.map(|address| SocketAddr::new(address.into(), port));
    let granted = inputs.network.port_mappings.addresses().chain(instance);
    granted.filter(|address| !(endpoints.contains(address) || inside.contains(address.ip()))).collect()
}

/// Addresses of the Node object first, because an administrator chose them; then the other addresses of this host.
fn host_endpoints(inputs: &Inputs, local: &[IpAddr], port: u16) -> Vec<SocketAddr> {
    let mut endpoints: Vec<SocketAddr> = Vec::new();
    for address in inputs.own.addresses.iter().chain(local) {
        let endpoint = SocketAddr::new(*address, port);
        if !endpoints.contains(&endpoint) {
            endpoints.push(endpoint);
        }
    }
    endpoints
}

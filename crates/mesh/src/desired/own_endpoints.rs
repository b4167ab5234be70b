//! Where this node is reached: by its own addresses, as others and STUN servers see it, and by what gateways map.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use fairlead_address::PrefixSet;
use fairlead_path::{Nat64, Seen, StunAnswer};

use super::StunAnswers;
use super::sightings::Sightings;
use crate::inputs::Inputs;

/// Where each observer sees this node, with the observer's own address.
pub(super) fn seen(
    inputs: &Inputs,
    sightings: &Sightings<'_>,
    stun: &StunAnswers,
    nat64: &Nat64,
) -> Vec<Seen> {
    // A port that a gateway leads here on request is no mapping of its own accord.
    let mapped: Vec<SocketAddr> = inputs.port_mappings.addresses().collect();
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

/// What STUN servers said, without this host's own endpoints, each once, IPv4 first.
pub(super) fn reflexive(endpoints: &[SocketAddr], stun: &StunAnswers) -> Vec<SocketAddr> {
    let distinct: BTreeSet<SocketAddr> = mappings(stun).map(|(_, address)| address).collect();
    distinct.into_iter().filter(|address| !endpoints.contains(address)).collect()
}

/// What gateways granted and the cloud translates, without this host's own endpoints and the addresses of pods and Services.
pub(super) fn mapped(
    inputs: &Inputs,
    port: u16,
    endpoints: &[SocketAddr],
    inside: &PrefixSet,
) -> Vec<SocketAddr> {
    let instance = inputs.public_ipv4.map(|address| SocketAddr::new(address.into(), port));
    let granted = inputs.port_mappings.addresses().chain(instance);
    granted.filter(|address| !(endpoints.contains(address) || inside.contains(address.ip()))).collect()
}

/// Addresses of the Node object first, because an administrator chose them; then the other addresses of this host.
pub(super) fn host_endpoints(inputs: &Inputs, local: &[IpAddr], port: u16) -> Vec<SocketAddr> {
    let mut endpoints: Vec<SocketAddr> = Vec::new();
    for address in inputs.node_addresses.iter().chain(local) {
        let endpoint = SocketAddr::new(*address, port);
        if !endpoints.contains(&endpoint) {
            endpoints.push(endpoint);
        }
    }
    endpoints
}

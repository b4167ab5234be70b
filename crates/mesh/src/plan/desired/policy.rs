//! Policy of the planner, from inputs and host.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use fairlead_members::locations;
use fairlead_topology::{Granularity, Member, Policy, Reserved};
use ipnet::IpNet;

use super::held::Held;
use super::host::Host;
use crate::model::inputs::Inputs;

/// The policy, and while the granularity changes the one that other nodes may use.
pub(super) fn policy(inputs: &Inputs, host: &Host, held: Held) -> (Policy, Option<Granularity>) {
    let local = host.networks.iter().filter(|_| inputs.settings.routing.bypass_local_subnets);
    let api_server = inputs.api_server.iter().map(SocketAddr::ip);
    let includes_pod_networks = inputs.settings.routing.includes_pod_networks;
    let Held { prefixes: held, entry_terms, down, completed, other } = held;
    let other = other.map(|other| locations::granularity(other, host.own.clone(), down.clone()));
    let mut policy = Policy {
        excluded: inputs.settings.routing.excluded.iter().chain(local).copied().collect(),
        held,
        completed,
        reserved: Reserved {
            hosts: api_server.chain(host.gateways.iter().copied()).map(IpNet::from).collect(),
            name_servers: host.name_servers.iter().copied().map(IpNet::from).collect(),
            services: inputs.services.clone(),
        },
        grants: inputs.settings.routing.grants.clone(),
        sources: BTreeMap::clone(&inputs.sources),
        entry_terms,
        granularity: locations::granularity(inputs.settings.locations.granularity, host.own.clone(), down),
        encapsulation: locations::encapsulation(inputs.settings.locations.encapsulation),
        includes_pod_networks,
        connected: host.networks.clone(),
        ..Policy::new(&inputs.node)
    };
    let admits = |member: &Member, claim: &IpNet| policy.admits(member, claim);
    policy.guarded = inputs.departures.guarded(includes_pod_networks, &admits).copied().collect();
    (policy, other)
}

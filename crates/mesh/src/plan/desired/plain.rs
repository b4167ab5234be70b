//! Routes of the plan that lead past the device: what leaves without a tunnel.

use std::collections::BTreeSet;

use fairlead_api::resources::Granularity;
use fairlead_dataplane::mesh::PlainRoute;
use fairlead_topology::{self as topology, BlockRoute, Down, Plan};

use super::host::Host;

/// The granularity, with what it takes on this host.
pub(super) fn granularity(of_mesh: Granularity, host: &Host, down: Down) -> topology::Granularity {
    match of_mesh {
        Granularity::Cross => topology::Granularity::Cross(host.own.clone()),
        Granularity::Full => topology::Granularity::Full,
        Granularity::Location => topology::Granularity::Location { addresses: host.own.clone(), down },
    }
}

pub(super) fn route(route: &BlockRoute) -> PlainRoute {
    PlainRoute { destination: route.destination, gateway: route.gateway, link: route.link, is_tunnel: false }
}

/// Names of the links that plain routes lead onto.
pub(super) fn links(host: &Host, plan: &Plan) -> Vec<String> {
    let links: BTreeSet<u32> = plan.routes.iter().map(|route| route.link).collect();
    links.iter().filter_map(|link| host.links.get(link).cloned()).collect()
}

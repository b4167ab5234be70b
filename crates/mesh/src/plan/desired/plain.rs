//! Routes that differ from the one into the device: what of the plan leaves without a tunnel, and what goes to a peer to which the
//! path is narrower than the device.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fairlead_api::resources::Granularity;
use fairlead_dataplane::mesh::{NarrowRoute, PlainRoute};
use fairlead_keys::PublicKey;
use fairlead_topology::{self as topology, BlockRoute, Down, Plan};

use super::host::Host;
use super::peer::DesiredPeer;

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

/// The prefixes of peers to which paths pass shorter packets than the tunnel's.
pub(super) fn narrow(
    peers: &BTreeMap<PublicKey, Arc<DesiredPeer>>,
    tunnel: u32,
    route_mtu: impl Fn(&PublicKey) -> Option<u32>,
) -> Vec<NarrowRoute> {
    let of_peer = |(key, peer): (&PublicKey, &Arc<DesiredPeer>)| {
        let mtu = route_mtu(key).filter(|mtu| *mtu < tunnel)?;
        let prefixes = peer.config.allowed_ips.clone();
        Some(prefixes.into_iter().map(move |destination| NarrowRoute { destination, mtu }))
    };
    peers.iter().filter_map(of_peer).flatten().collect()
}

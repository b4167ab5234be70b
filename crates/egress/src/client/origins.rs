//! Sources of what gateways may send to a client pod: the addresses that the pod reaches by the tunnel to them.

use std::collections::BTreeMap;

use fairlead_api::client_routing::{ClientRouting, Target};
use ipnet::IpNet;

use super::rules::TABLE_MAIN;

/// Prefixes of one family, each with the link into which a pod with this routing sends packets to the addresses that have no longer one;
/// `None` is no link. With rules, every address has a prefix.
pub(super) fn origins(routing: &ClientRouting) -> BTreeMap<IpNet, Option<&str>> {
    // Of all prefixes here that have an address, the longest is inside of the others, so what is true of it is true of the address.
    let rules = routing.rules.iter().map(|rule| rule.destination);
    let prefixes = rules.chain(routing.routes.iter().map(|route| route.destination));
    prefixes.map(|prefix| (prefix, link_to(routing, prefix))).collect()
}

/// The link that the kernel chooses for packets to a prefix, once a gateway can be reached by it.
fn link_to(routing: &ClientRouting, prefix: IpNet) -> Option<&str> {
    let mut rules = routing.rules.iter().filter(|rule| rule.destination.contains(&prefix));
    let decided = rules.find_map(|rule| {
        if rule.table == TABLE_MAIN {
            return Some(None);
        }
        let around = routing
            .routes
            .iter()
            .filter(|route| route.table == rule.table && route.destination.contains(&prefix));
        match &around.max_by_key(|route| route.destination.prefix_len())?.target {
            Target::Excluded | Target::InCluster => None,
            Target::Link(name) => Some(Some(name.as_str())),
            Target::Refused => Some(None),
        }
    });
    decided.flatten()
}

//! Sources of what gateways may send to a client pod: the addresses that the pod reaches by the tunnel to them.

use std::collections::{BTreeMap, BTreeSet};

use fairlead_api::client_routing::{ClientRouting, Target};
use ipnet::IpNet;

use super::routes::around;
use super::rules::TABLE_MAIN;

/// Prefixes of one family, each with the link into which a pod with this routing sends packets to the addresses that have no longer one;
/// `None` is no link. With rules, every address has a prefix.
pub(super) fn origins(routing: &ClientRouting) -> BTreeMap<IpNet, Option<&str>> {
    let mut tables: BTreeMap<u32, Table<'_>> = BTreeMap::new();
    for route in &routing.routes {
        let table = tables.entry(route.table).or_default();
        table.targets.insert(route.destination, &route.target);
        table.lengths.insert(route.destination.prefix_len());
    }
    // Of all prefixes here that have an address, the longest is inside of the others, so what is true of it is true of the address.
    let rules = routing.rules.iter().map(|rule| rule.destination);
    let prefixes = rules.chain(routing.routes.iter().map(|route| route.destination));
    prefixes.map(|prefix| (prefix, link_to(routing, &tables, prefix))).collect()
}

/// Routes of a table by destination. An Egress may have ten thousand: none is compared with all others.
#[derive(Default)]
struct Table<'a> {
    targets: BTreeMap<IpNet, &'a Target>,
    lengths: BTreeSet<u8>,
}

/// The link that the kernel chooses for packets to a prefix, once a gateway can be reached by it.
fn link_to<'a>(routing: &ClientRouting, tables: &BTreeMap<u32, Table<'a>>, prefix: IpNet) -> Option<&'a str> {
    let mut rules = routing.rules.iter().filter(|rule| rule.destination.contains(&prefix));
    let decided = rules.find_map(|rule| {
        if rule.table == TABLE_MAIN {
            return Some(None);
        }
        let Table { targets, lengths } = tables.get(&rule.table)?;
        match around(prefix, lengths).find_map(|destination| targets.get(&destination).copied())? {
            Target::Excluded | Target::InCluster => None,
            Target::Link(name) => Some(Some(name.as_str())),
            Target::Refused => Some(None),
        }
    });
    decided.flatten()
}

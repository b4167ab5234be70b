//! Routes of pods that stand in another table than the one that is used now, because its number was changed.

use std::collections::HashMap;

use fairlead_api::names::LINK_ALIAS_PREFIX;
use fairlead_netlink::route::{
    Route, RouteSocket, TABLE_DEFAULT, TABLE_LOCAL, TABLE_MAIN, add_route, delete_route,
};

use super::{Error, PodAlias, Result};
use crate::numbers::{Numbers, PROTOCOL_STATIC};

/// Brings the routes of all pods of this node into the table of `numbers`, and returns how many were elsewhere. A pod
/// is known by its link and its addresses by these routes, so without them its addresses would be given away again.
///
/// # Errors
/// Links or routes cannot be read, or the kernel refuses a route.
pub fn gather_routes(numbers: Numbers) -> Result<usize> {
    let gather = || {
        let mut host = RouteSocket::open()?;
        let links = host.links_by_alias(LINK_ALIAS_PREFIX)?;
        let pods = links.iter().filter(|link| link.alias.as_deref().and_then(PodAlias::parse).is_some());
        let pods: HashMap<u32, &str> = pods.map(|link| (link.index, link.name.as_str())).collect();
        let astray: Vec<Route> =
            host.all_routes()?.into_iter().filter(|route| is_astray(route, numbers, &pods)).collect();
        for route in &astray {
            let (table, protocol) = (numbers.table_pods(), numbers.protocol());
            let moved = Route { table, protocol, ..route.clone() };
            match host.apply(&[add_route(&moved)]) {
                // An earlier start got as far as this.
                Err(error) if error.is_existing() => {}
                other => other?,
            }
            host.apply(&[delete_route(route)])?;
        }
        Ok(astray.len())
    };
    gather().map_err(Error::List)
}

/// Routes of the kernel and of administrators, and those in tables that everybody uses, are no record of ours.
fn is_astray(route: &Route, numbers: Numbers, pods: &HashMap<u32, &str>) -> bool {
    let shared = [0, TABLE_DEFAULT, TABLE_MAIN, TABLE_LOCAL, numbers.table_pods()];
    let ours = u32::from(route.protocol) > PROTOCOL_STATIC;
    let whole = route.destination.prefix_len() == route.destination.max_prefix_len();
    ours && whole && !shared.contains(&route.table) && route.link.is_some_and(|link| pods.contains_key(&link))
}

//! Routes of pods that stand in another table than the one that is used now, because its number was changed.

use fairlead_netlink::route::{
    Route, RouteSocket, TABLE_DEFAULT, TABLE_LOCAL, TABLE_MAIN, delete_route, replace_route,
};

use super::{Error, PodOnNode, Result};
use crate::routes::is_source;
use crate::routing_ids::{PROTOCOL_STATIC, RoutingIds};

/// Brings the routes of those of `pods` that seem to have no address into the table of `ids`, and returns how many
/// were elsewhere. A pod is known by its link and its addresses by these routes, so without them its addresses would be
/// given away again.
///
/// Other tables, which may be large, are read only if there is such a pod.
///
/// # Errors
/// Routes cannot be read, or the kernel refuses one.
pub fn gather_routes(ids: RoutingIds, pods: &[PodOnNode]) -> Result<usize> {
    let lost = pods.iter().filter(|pod| pod.addresses.is_empty());
    let lost: Vec<u32> = lost.map(|pod| pod.host_index).collect();
    if lost.is_empty() {
        return Ok(0);
    }
    let gather = || {
        let mut host = RouteSocket::open()?;
        let routes = host.all_routes()?;
        let mut moved = 0;
        for link in lost {
            let astray: Vec<&Route> =
                routes.iter().filter(|route| route.link == Some(link) && is_astray(route, ids)).collect();
            let table = ids.table_pods();
            let protocol = ids.protocol();
            let copies =
                astray.iter().map(|route| replace_route(&Route { table, protocol, ..(*route).clone() }));
            let originals = astray.iter().map(|route| delete_route(route));
            // Together, and the copies of both families first: a pod with but one of its addresses is not looked at again.
            host.apply(&copies.chain(originals).collect::<Vec<_>>())?;
            moved += astray.len();
        }
        Ok(moved)
    };
    gather().map_err(Error::List)
}

/// Routes of the kernel and of administrators, and those in tables that others use, are no record of ours.
fn is_astray(route: &Route, ids: RoutingIds) -> bool {
    let shared = [0, TABLE_DEFAULT, TABLE_MAIN, TABLE_LOCAL, ids.table_pods()];
    let whole = route.destination.prefix_len() == route.destination.max_prefix_len();
    whole
        && !is_source(route)
        && u32::from(route.protocol) > PROTOCOL_STATIC
        && !shared.contains(&route.table)
}

//! Whole routing tables and rules, reconciled with the desired state.
//!
//! Tables with IDs of our own belong to Fairlead alone: what is in them beyond the desired routes is deleted,
//! whatever added it. Tables that others use (main, local, default) are shared: there only routes with our
//! protocol number are ours. Rules are ours by protocol number and priority together.

use std::collections::HashMap;
use std::net::IpAddr;

use fairlead_api::names::{
    MARK_MASK, MARK_TO_WIREGUARD, ROUTE_PROTOCOL, ROUTE_PROTOCOL_ROUTER, RULE_PRIORITY_MESH,
    RULE_PRIORITY_MESH_LAST, TABLE_MESH, TABLES_MESH_GUARD,
};
use fairlead_netlink::route::{
    IpFamily, Mark, Route, RouteKind, RouteSocket, Rule, Scope, TABLE_DEFAULT, TABLE_LOCAL, TABLE_MAIN,
    add_route, add_rule, delete_route, delete_rule, replace_route,
};
use fairlead_netlink::{Message, Result};
use ipnet::IpNet;
use nix::libc;

use crate::routing_ids::RoutingIds;
use crate::uplink::has_ipv6;

/// The loopback device has this index in every network namespace (`LOOPBACK_IFINDEX`, `net/core/dev.c`).
pub const LOOPBACK_INDEX: u32 = 1;

/// Metric of a route that any other to its destination precedes (`ip-vrf(8)` uses it in the same way).
pub(crate) const LAST_METRIC: u32 = 4_278_198_272;
/// Metric of the way to a gateway, while a route by it is set; those of IPv6 have 1024 unless they say another one.
const WAY_METRIC: u32 = 1;

/// Metric of routes to source addresses of egress gateways ([`crate::source_addresses`]), by which they are told from those of pods and
/// blocks in the same tables. A pod's own route precedes them.
pub(crate) const SOURCE_METRIC: u32 = 2048;

/// Changes that have to be made to a set of routes or rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference<T> {
    /// Missing in the kernel.
    pub add: Vec<T>,
    /// To replace one in the same place.
    pub replace: Vec<T>,
    /// Present, but not desired.
    pub delete: Vec<T>,
    /// Desired, but a route of another protocol has its place; that route is left unchanged.
    pub blocked: Vec<T>,
}

// Derived, it would ask for `T: Default`.
impl<T> Default for Difference<T> {
    fn default() -> Self {
        Self { add: Vec::new(), replace: Vec::new(), delete: Vec::new(), blocked: Vec::new() }
    }
}

impl<T> Difference<T> {
    /// Whether nothing has to be sent.
    pub fn is_empty(&self) -> bool {
        self.add.is_empty() && self.replace.is_empty() && self.delete.is_empty()
    }
}

/// Whether a table belongs to Fairlead alone.
fn is_own_table(table: u32) -> bool {
    !matches!(table, 0 | TABLE_DEFAULT | TABLE_MAIN | TABLE_LOCAL)
}

/// Compares the desired routes of a table with the present ones. `table` and `protocol` of the desired routes are overridden.
/// If two desired routes have one destination and metric, the first counts: a table cannot hold both.
pub fn table_difference(
    table: u32,
    protocol: u8,
    desired: &[Route],
    existing: &[Route],
) -> Difference<Route> {
    // The kernel compares only these two to decide whether a route exists already.
    let place = |route: &Route| (route.destination, route.metric);
    let mut unmatched: HashMap<_, Vec<&Route>> = HashMap::new();
    for route in existing {
        unmatched.entry(place(route)).or_default().push(route);
    }
    let mut difference = Difference::default();
    let mut seen = HashMap::new();
    for route in desired {
        let route = Route { table, protocol, next_hops: Vec::new(), ..route.clone() }.canonical();
        if seen.insert(place(&route), ()).is_some() {
            continue;
        }
        let there = unmatched.entry(place(&route)).or_default();
        if let Some(position) = there.iter().position(|found| **found == route) {
            there.swap_remove(position);
        } else if there.is_empty() {
            difference.add.push(route);
        } else if is_own_table(table) || there.iter().all(|found| found.protocol == protocol) {
            there.swap_remove(0);
            difference.replace.push(route);
        } else {
            // Replacing hits the first route in that place, which may belong to another protocol even where ours exists too.
            difference.blocked.push(route);
        }
    }
    let extra = |route: &&&Route| is_own_table(table) || route.protocol == protocol;
    difference.delete = unmatched.values().flatten().filter(extra).map(|route| (*route).clone()).collect();
    difference.delete.sort_by_key(|route| (route.destination, route.metric));
    difference
}

/// Brings a table to exactly `desired` and returns what was done. The module's documentation says which routes are touched.
/// Sends nothing when nothing differs. A route that another protocol's route blocks is returned, not an error.
///
/// # Errors
/// The first refusal, after everything else has been tried: one bad route does not prevent the others.
pub fn sync_table(table: u32, protocol: u8, desired: &[Route]) -> Result<Difference<Route>> {
    sync_some(table, protocol, desired, |_| true)
}

/// Carries out a difference; additions first.
///
/// # Errors
/// The first refusal, after everything else has been tried.
pub(crate) fn send(socket: &mut RouteSocket, difference: &Difference<Route>) -> Result<()> {
    let delete: Vec<_> = difference.delete.iter().map(delete_route).collect();
    let replace = difference.replace.iter().map(|route| with_way_to_gateway(route, replace_route(route)));
    let add = difference.add.iter().map(|route| with_way_to_gateway(route, add_route(route)));
    // Additions first, so that traffic always finds a route.
    try_all(socket, &replace.chain(add).flatten().collect::<Vec<_>>(), delete)
}

/// IPv6 takes a gateway that another link leads to only while the same table leads to it through the link of the route
/// (`ip6_route_check_nh`); unlike in IPv4, `onlink` does not help (`ip6_route_check_nh_onlink`). It does not look again later, so that way
/// is there for this moment alone: packets of an IP tunnel would take it into the tunnel once more. Its metric is better than that of a route
/// to the node itself, which stays. In other tables it could be another program's.
fn with_way_to_gateway(route: &Route, message: Message) -> Vec<Message> {
    match (route.gateway, route.link) {
        (Some(gateway @ IpAddr::V6(_)), Some(link)) if !route.onlink && is_of_mesh(route.table) => {
            let way = Route {
                metric: WAY_METRIC,
                ..Route::onto(route.table, route.protocol, gateway.into(), link)
            };
            vec![replace_route(&way), message, delete_route(&way)]
        }
        _ => vec![message],
    }
}

fn is_of_mesh(table: u32) -> bool {
    table == TABLE_MESH || TABLES_MESH_GUARD.contains(&table)
}

/// Sends everything and returns the first refusal that matters: a route to delete may no longer exist.
fn try_all(socket: &mut RouteSocket, set: &[Message], delete: Vec<Message>) -> Result<()> {
    let messages = [set, &delete].concat();
    let outcomes = socket.apply_each(&messages)?;
    for (index, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Err(error) if index >= set.len() && error.is_missing() => {}
            other => other?,
        }
    }
    Ok(())
}

/// The routes that tell a routing daemon which blocks this node has. They lead to the loopback device: no rule looks the
/// table up, daemons only read it.
pub fn export_routes(ids: RoutingIds, blocks: &[IpNet]) -> Vec<Route> {
    let route = |block: &IpNet| Route::onto(ids.table_export(), ids.protocol(), *block, LOOPBACK_INDEX);
    blocks.iter().map(route).collect()
}

/// Brings the export table to exactly the given blocks. Routes to source addresses are not touched.
///
/// # Errors
/// See [`sync_table`].
pub fn sync_export(ids: RoutingIds, blocks: &[IpNet]) -> Result<Difference<Route>> {
    sync_some(ids.table_export(), ids.protocol(), &export_routes(ids, blocks), |route| !is_source(route))
}

/// Whether a route leads to a source address of an egress gateway.
pub fn is_source(route: &Route) -> bool {
    route.metric == SOURCE_METRIC && route.kind == RouteKind::UNICAST
}

/// Brings those routes of a table that `concerns` chooses to exactly `desired`.
pub(crate) fn sync_some(
    table: u32,
    protocol: u8,
    desired: &[Route],
    concerns: impl Fn(&Route) -> bool,
) -> Result<Difference<Route>> {
    let mut socket = RouteSocket::open()?;
    let mut existing = socket.routes(table)?;
    existing.retain(concerns);
    let difference = table_difference(table, protocol, desired, &existing);
    send(&mut socket, &difference)?;
    Ok(difference)
}

/// Routes in the table of pods that refuse packets to addresses of these blocks that no pod has: with a default route they would
/// leave the node, and a router that knows the block's node would send them back. A pod's own route has a better metric, also
/// where a block is a single address.
fn block_routes(ids: RoutingIds, blocks: &[IpNet]) -> Vec<Route> {
    let has_ipv6 = has_ipv6();
    let families = blocks.iter().filter(|block| has_ipv6 || block.addr().is_ipv4());
    families.map(|block| unreachable(ids.table_pods(), ids.protocol(), *block)).collect()
}

/// Brings the routes that refuse packets to addresses without a pod to exactly these blocks. Routes of pods are not touched.
///
/// # Errors
/// See [`sync_table`].
pub fn sync_blocks(ids: RoutingIds, blocks: &[IpNet]) -> Result<Difference<Route>> {
    sync_some(ids.table_pods(), ids.protocol(), &block_routes(ids, blocks), is_last_unreachable)
}

/// Adds the routes of [`sync_blocks`] for these blocks, and leaves those for other blocks.
///
/// # Errors
/// See [`sync_table`].
pub fn add_blocks(ids: RoutingIds, blocks: &[IpNet]) -> Result<Difference<Route>> {
    let is_of_blocks = |route: &Route| is_last_unreachable(route) && blocks.contains(&route.destination);
    sync_some(ids.table_pods(), ids.protocol(), &block_routes(ids, blocks), is_of_blocks)
}

/// A route that refuses packets which no other route of its table takes.
pub(crate) fn unreachable(table: u32, protocol: u8, destination: IpNet) -> Route {
    let is_ipv6 = IpFamily::of(destination.addr()) == IpFamily::V6;
    Route {
        kind: RouteKind::UNREACHABLE,
        // As the kernel shows it.
        link: is_ipv6.then_some(LOOPBACK_INDEX),
        scope: Scope::UNIVERSE,
        metric: LAST_METRIC,
        ..Route::onto(table, protocol, destination, LOOPBACK_INDEX)
    }
}

/// Whether a route is one of [`sync_blocks`].
pub fn is_last_unreachable(route: &Route) -> bool {
    (route.kind, route.metric) == (RouteKind::UNREACHABLE, LAST_METRIC)
}

/// A route that could not be set, and why: the kernel's error, or the route that has its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The route.
    pub route: Route,
    /// The reason, without the route.
    pub reason: String,
}

/// Brings the routes of the built-in router (main table, protocol 31) to exactly `desired`, and returns what was done and
/// what was refused. Routes of other protocols are never touched; one with the same next hop counts as ours.
///
/// # Errors
/// The kernel cannot be read. A refusal of a single route affects no other and is no error.
pub fn sync_router(desired: &[Route]) -> Result<(Difference<Route>, Vec<Refused>)> {
    let mut socket = RouteSocket::open()?;
    let existing = socket.routes(TABLE_MAIN)?;
    let difference = table_difference(TABLE_MAIN, ROUTE_PROTOCOL_ROUTER, desired, &existing);
    let set: Vec<&Route> = difference.replace.iter().chain(&difference.add).collect();
    let replace = difference.replace.iter().map(replace_route);
    let mut messages: Vec<Message> = replace.chain(difference.add.iter().map(add_route)).collect();
    // Additions first, so that traffic always finds a route.
    messages.extend(difference.delete.iter().map(delete_route));
    let mut refused: Vec<Refused> =
        difference.blocked.iter().filter_map(|route| in_the_way(route, &existing)).collect();
    let wanted = set.len();
    let outcomes = socket.apply_each(&messages)?;
    for (index, (route, outcome)) in set.into_iter().chain(&difference.delete).zip(outcomes).enumerate() {
        match outcome {
            Ok(()) => {}
            // A route to delete may no longer exist, with its link.
            Err(error) if index >= wanted && error.is_missing() => {}
            Err(error) => refused.push(Refused { route: route.clone(), reason: error.to_string() }),
        }
    }
    Ok((difference, refused))
}

/// Reason why another protocol's route in the place of ours is a problem; `None` if it has the same next hop.
fn in_the_way(route: &Route, existing: &[Route]) -> Option<Refused> {
    let same_place = |found: &&Route| (found.destination, found.metric) == (route.destination, route.metric);
    let mut others = existing.iter().filter(same_place).filter(|found| found.protocol != route.protocol);
    let other = others.next()?;
    let way = |it: &Route| (it.kind, it.gateway, it.link);
    (way(other) != way(route)).then(|| Refused {
        route: route.clone(),
        reason: format!("another program's {other} (protocol {}) is in its place", other.protocol),
    })
}

/// The rules that lead to the routes of the pods on this node.
pub fn pod_rules(ids: RoutingIds) -> Vec<Rule> {
    let rule = |family| Rule::lookup(family, ids.rule_priority(), ids.table_pods(), ids.protocol());
    IpFamily::BOTH.map(rule).to_vec()
}

/// The rules that lead marked packets into the mesh's table, and those by which packets of this host get as far as being marked.
///
/// The kernel looks for a route before nftables sees a packet of this host, and refuses the packet where there is none. So, after all
/// other tables, the mesh's counts too, without its default routes: what is not in the mesh is refused as before. Nor does it count
/// for what WireGuard sends.
pub fn mesh_rules() -> Vec<Rule> {
    let rule = |family, priority, mark| Rule {
        mark: Some(Mark { value: mark, mask: MARK_MASK }),
        ..Rule::lookup(family, priority, TABLE_MESH, ROUTE_PROTOCOL)
    };
    let marked = IpFamily::BOTH.map(|family| rule(family, RULE_PRIORITY_MESH, MARK_TO_WIREGUARD));
    let last = IpFamily::BOTH
        .map(|family| Rule { suppressed_length: Some(0), ..rule(family, RULE_PRIORITY_MESH_LAST, 0) });
    [marked, last].concat()
}

/// Compares the desired rules with the present ones.
///
/// An equivalent rule of another process counts as present: the kernel would take a second copy that differs only
/// in protocol. A rule with our protocol at a priority we use, but with another effect, is a remnant of ours (for
/// example, the table's number was changed) and is deleted. All other rules belong to other programs.
pub fn rule_difference(desired: &[Rule], existing: &[Rule]) -> Difference<Rule> {
    let mut difference = Difference::default();
    for rule in desired {
        let there = existing.iter().chain(&difference.add).any(|found| found.same_effect(rule));
        if !there {
            difference.add.push(rule.clone());
        }
    }
    let own_place = |found: &Rule| (found.family, found.priority, found.protocol);
    let stale = |found: &&Rule| {
        !found.has_more
            && desired.iter().any(|rule| own_place(rule) == own_place(found))
            && !desired.iter().any(|rule| rule.same_effect(found))
    };
    difference.delete = existing.iter().filter(stale).cloned().collect();
    difference
}

/// Ensures that the given rules exist, once, and removes earlier versions of them
/// (see [`rule_difference`]); returns what was done. Sends nothing when nothing differs.
///
/// On a kernel without IPv6, rules for IPv6 are left out: there is nothing to route.
///
/// # Errors
/// The first refusal, after everything else has been tried.
pub fn ensure_rules(desired: &[Rule]) -> Result<Difference<Rule>> {
    let mut socket = RouteSocket::open()?;
    let mut difference = rule_difference(desired, &socket.rules()?);
    if !has_ipv6() {
        difference.add.retain(|rule| rule.family == IpFamily::V4);
    }
    let add: Vec<_> = difference.add.iter().map(add_rule).collect();
    let delete = difference.delete.iter().map(delete_rule).collect();
    match try_all(&mut socket, &add, delete) {
        // Another process added the same rule meanwhile.
        Err(error) if error.errno() == Some(libc::EEXIST) => Ok(difference),
        other => other.map(|()| difference),
    }
}

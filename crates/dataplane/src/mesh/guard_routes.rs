//! Guard of the mesh by rules and routes: packets to the mesh stay in it although nothing has marked them (another program has flushed
//! nftables), and although other programs have rules of their own. `ip rule` prints
//!
//! ```text
//! 100: from all lookup 116                                                  # pods of this node
//! 101: from all fwmark 0x40/0x60 lookup 180
//! 101: from all iif lo fwmark 0x20/0x60 ipproto udp sport 51820 goto 105    # WireGuard's own
//! 101: from all iif lo fwmark 0x20 goto 105                                 # the node program's own
//! 101: from all iif lo fwmark 0x60/0x60 goto 105                            # answers that go past the mesh
//! 101: from all to A iif lo ipproto tcp dport P goto 105                    # each endpoint of the API server
//! 101: from all iif lo ipproto ipencap goto 105                             # outer packets, where there are IP tunnels
//! 102: from all lookup 181
//! 103: from A iif lo ipproto tcp sport P goto 105                           # answers of the API server, and of relays
//! 104: from all iif lo lookup 182
//! 104: not from all iif lo lookup 183
//! 105: from all fwmark 0x40/0x60 lookup 180
//! ```
//!
//! Table 181 has the targets, without the other nodes' own addresses; these are in 182 and 183. All lead into the device, and to neighbours as
//! table 180 does; behind that stands a route that refuses. What is in none of them goes on at rule 105, and is routed as without a mesh:
//! targets have no exceptions but these.
//!
//! Packets of this host look for a route before nftables sees them. So its connections find the device, and their source by the route. The
//! kernel's check of sources (`rp_filter`) looks up the same rules as if this host answered (`__fib_validate_source`): in IPv4, where
//! the device is missing, packets of this host to other nodes take a route to the loopback device, which drops them. An `unreachable` one would
//! make the kernel drop what comes from these nodes, such as ARP requests and the API server's answers. Forwarded packets would go round there
//! until their hop limit ends, so they have a table of their own.
//!
//! A packet that nftables has given another destination is routed again (`ip_route_me_harder`), and then a rule with ports and `iif lo` does not
//! match: the kernel reads the ports for it only where a rule without `iif lo` has some (`fib_rule_requires_fldissect`). Connections to a Service
//! of the API server are such packets; [`super::table`] marks them.

use std::net::{IpAddr, SocketAddr};

use fairlead_address::{IpFamily, PrefixSet};
use fairlead_api::names::{
    MARK_FROM_WIREGUARD, MARK_MASK, MARK_PAST_MESH, MARK_TO_WIREGUARD, ROUTE_PROTOCOL,
    RULE_PRIORITIES_MESH_GUARD, RULE_PRIORITY_MESH_ANSWERS, RULE_PRIORITY_MESH_FIRST,
    RULE_PRIORITY_MESH_GUARD, RULE_PRIORITY_MESH_NODES, RULE_PRIORITY_MESH_PAST, RULE_PRIORITY_MESH_PODS,
    TABLE_MESH, TABLE_MESH_GUARD, TABLE_MESH_GUARD_NODES, TABLE_MESH_GUARD_NODES_HOST, TABLES_MESH_GUARD,
};
use fairlead_netlink::Result;
use fairlead_netlink::route::{
    Mark, Route, RouteSocket, Rule, Transport, add_rule, delete_route, delete_rule,
};
use ipnet::IpNet;
use nix::libc;

use super::state::{MeshState, narrow_route, plain_route};
use crate::routes::{self, LAST_METRIC, LOOPBACK_INDEX, sync_table};
use crate::uplink::has_ipv6;

/// Name of the loopback device, by which a rule tells packets of this host from forwarded ones.
const LOOPBACK: &str = "lo";
const UDP: u8 = 17;
const TCP: u8 = 6;
/// `IPPROTO_IPIP` and `IPPROTO_IPV6`: outer packets of IP tunnels.
const IPV4_INSIDE: u8 = 4;
const IPV6_INSIDE: u8 = 41;

/// Brings routes and rules to what the state asks for. `device` is the index of the mesh's device, if it is there.
/// `pods` is the table of this node's pods. Sends nothing when nothing differs.
///
/// # Errors
/// The first refusal of the kernel, after everything else has been tried.
pub(super) fn apply(device: Option<u32>, state: &MeshState, pods: Option<u32>) -> Result<()> {
    let mut outcome = Ok(());
    for (table, routes) in routes(device, state, has_ipv6()) {
        outcome = outcome.and(sync_table(table, ROUTE_PROTOCOL, &routes).map(drop));
    }
    outcome.and(sync_rules(&rules(state, pods)))
}

/// Makes what is for the targets refused, while there is no device. Rules come first: without routes they lead nowhere, and a program that ends in
/// between begins anew, since [`are_there`] finds none.
///
/// # Errors
/// The first refusal of the kernel.
pub(super) fn refuse(state: &MeshState, pods: u32) -> Result<()> {
    sync_rules(&rules(state, Some(pods)))?;
    apply(None, state, Some(pods))
}

/// Whether there are any routes of [`apply`].
///
/// # Errors
/// The kernel cannot be asked.
pub(super) fn are_there(socket: &mut RouteSocket) -> Result<bool> {
    for table in TABLES_MESH_GUARD {
        if socket.routes(table)?.iter().any(|route| route.protocol == ROUTE_PROTOCOL) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Takes away what [`apply`] made: first the rules.
///
/// # Errors
/// The kernel refuses.
pub(super) fn remove() -> Result<()> {
    let mut socket = RouteSocket::open()?;
    let rules: Vec<_> = socket.rules()?.iter().filter(|rule| is_own(rule)).map(delete_rule).collect();
    let mut messages = rules;
    for table in TABLES_MESH_GUARD {
        let routes = socket.routes(table)?;
        messages.extend(routes.iter().filter(|it| it.protocol == ROUTE_PROTOCOL).map(delete_route));
    }
    if messages.is_empty() { Ok(()) } else { socket.apply(&messages) }
}

fn is_own(rule: &Rule) -> bool {
    rule.protocol == ROUTE_PROTOCOL && RULE_PRIORITIES_MESH_GUARD.contains(&rule.priority)
}

/// All rules with our protocol and a priority of the guard are ours. A rule of another program with the same effect serves as well.
fn sync_rules(wanted: &[Rule]) -> Result<()> {
    let mut socket = RouteSocket::open()?;
    let present = socket.rules()?;
    let is_there = |rule: &&Rule| present.iter().any(|found| found.same_effect(rule));
    let is_wanted = |found: &&Rule| wanted.iter().any(|rule| rule.same_effect(found));
    let usable = wanted.iter().filter(|rule| rule.family == IpFamily::V4 || has_ipv6());
    let missing: Vec<_> = usable.filter(|rule| !is_there(rule)).map(add_rule).collect();
    let stale = present.iter().filter(|rule| is_own(rule)).filter(|rule| !is_wanted(rule)).map(delete_rule);
    let messages: Vec<_> = missing.into_iter().chain(stale).collect();
    if messages.is_empty() {
        return Ok(());
    }
    let mut outcome = Ok(());
    for done in socket.apply_each(&messages)? {
        match done {
            // Another process has added or deleted the same rule meanwhile.
            Err(error) if error.errno() == Some(libc::EEXIST) || error.is_missing() => {}
            done => outcome = outcome.and(done),
        }
    }
    outcome
}

/// The rules of both families, in the order in which they are to be added: exceptions before what they are exceptions of.
fn rules(state: &MeshState, pods: Option<u32>) -> Vec<Rule> {
    IpFamily::BOTH.into_iter().flat_map(|family| rules_of(family, state, pods)).collect()
}

fn rules_of(family: IpFamily, state: &MeshState, pods: Option<u32>) -> Vec<Rule> {
    let marked = |priority| Rule {
        mark: Some(Mark { value: MARK_TO_WIREGUARD, mask: MARK_MASK }),
        ..Rule::lookup(family, priority, TABLE_MESH, ROUTE_PROTOCOL)
    };
    let lookup = |priority, table| Rule::lookup(family, priority, table, ROUTE_PROTOCOL);
    let iif = Some(LOOPBACK.to_owned());
    let is_of_family = |it: &&SocketAddr| IpFamily::of(it.ip()) == family;
    let mut rules: Vec<Rule> = pods.map(|table| lookup(RULE_PRIORITY_MESH_PODS, table)).into_iter().collect();
    rules.extend([RULE_PRIORITY_MESH_PAST, RULE_PRIORITY_MESH_FIRST].map(marked));
    rules.extend(past_mesh(family, state));
    let servers = state.bypass.servers.iter().filter(is_of_family);
    rules.extend(servers.clone().map(|server| request(family, *server)));
    rules.extend(servers.map(|server| Rule { iif: iif.clone(), ..answer(family, *server) }));
    rules.extend(state.bypass.relays.iter().filter(is_of_family).map(|relay| answer(family, *relay)));
    rules.push(lookup(RULE_PRIORITY_MESH_GUARD, TABLE_MESH_GUARD));
    rules.extend([
        Rule { iif: iif.clone(), ..lookup(RULE_PRIORITY_MESH_NODES, TABLE_MESH_GUARD_NODES_HOST) },
        Rule { iif, is_inverted: true, ..lookup(RULE_PRIORITY_MESH_NODES, TABLE_MESH_GUARD_NODES) },
    ]);
    rules
}

/// A rule by which packets of this host go on past the guard.
fn pass_over(family: IpFamily, priority: u32) -> Rule {
    let rule = Rule::pass_over(family, priority, RULE_PRIORITY_MESH_PAST, ROUTE_PROTOCOL);
    Rule { iif: Some(LOOPBACK.to_owned()), ..rule }
}

/// Exceptions by mark, and for outer packets of IP tunnels.
fn past_mesh(family: IpFamily, state: &MeshState) -> Vec<Rule> {
    let marked = |value, mask| Rule {
        mark: Some(Mark { value, mask }),
        ..pass_over(family, RULE_PRIORITY_MESH_FIRST)
    };
    let wireguard = Rule {
        transport: Some(Transport { source_port: Some(state.listen_port), ..Transport::protocol(UDP) }),
        ..marked(MARK_FROM_WIREGUARD, MARK_MASK)
    };
    let inside = match family {
        IpFamily::V4 => IPV4_INSIDE,
        IpFamily::V6 => IPV6_INSIDE,
    };
    let outer =
        Rule { transport: Some(Transport::protocol(inside)), ..pass_over(family, RULE_PRIORITY_MESH_FIRST) };
    let own = [marked(MARK_FROM_WIREGUARD, u32::MAX), marked(MARK_PAST_MESH, MARK_MASK)];
    (state.listen_port != 0)
        .then_some(wireguard)
        .into_iter()
        .chain(own)
        .chain(state.has_tunnels(family).then_some(outer))
        .collect()
}

/// Rule for this host's connections to the API server.
fn request(family: IpFamily, server: SocketAddr) -> Rule {
    Rule {
        destination: Some(server.ip().into()),
        transport: Some(Transport { destination_port: Some(server.port()), ..Transport::protocol(TCP) }),
        ..pass_over(family, RULE_PRIORITY_MESH_FIRST)
    }
}

/// Rule for answers to other nodes: those to pods have found a route by then.
fn answer(family: IpFamily, server: SocketAddr) -> Rule {
    Rule {
        source: Some(server.ip().into()),
        transport: Some(Transport { source_port: Some(server.port()), ..Transport::protocol(TCP) }),
        iif: None,
        ..pass_over(family, RULE_PRIORITY_MESH_ANSWERS)
    }
}

/// The routes of each table.
fn routes(device: Option<u32>, state: &MeshState, has_ipv6: bool) -> [(u32, Vec<Route>); 3] {
    let targets: PrefixSet = state.targets_v4.iter().chain(&state.targets_v6).collect();
    let nodes: PrefixSet = state.bypass.nodes.iter().copied().map(IpNet::from).collect();
    let rest = targets.subtract(&nodes);
    let nodes = targets.subtract(&rest);
    TABLES_MESH_GUARD.map(|table| {
        let covered = if table == TABLE_MESH_GUARD { &rest } else { &nodes };
        let mut routes = specific(table, device, state, covered);
        for prefix in covered.prefixes() {
            let prefsrc = state.source(IpFamily::of(prefix.addr()));
            let into_mesh = |link| Route { prefsrc, ..Route::onto(table, ROUTE_PROTOCOL, prefix, link) };
            routes.extend(device.map(into_mesh));
            routes.push(last_route(table, prefix));
        }
        routes.retain(|route| has_ipv6 || route.destination.addr().is_ipv4());
        (table, routes)
    })
}

/// Routes of the mesh's table to what a table covers: of two routes to one prefix the first counts.
fn specific(table: u32, device: Option<u32>, state: &MeshState, covered: &PrefixSet) -> Vec<Route> {
    let plain = state.plain.iter().map(plain_route);
    let narrow =
        device.into_iter().flat_map(|link| state.narrow.iter().filter_map(move |it| narrow_route(it, link)));
    let narrow = narrow.map(|it| Route { prefsrc: state.source(it.family()), ..it });
    let is_covered = |route: &Route| covered.contains(route.destination.addr());
    plain.chain(narrow).filter(is_covered).map(|route| Route { table, ..route }).collect()
}

/// Route for what would enter a device that is down or missing.
fn last_route(table: u32, prefix: IpNet) -> Route {
    if table == TABLE_MESH_GUARD_NODES_HOST && prefix.addr().is_ipv4() {
        return Route { metric: LAST_METRIC, ..Route::onto(table, ROUTE_PROTOCOL, prefix, LOOPBACK_INDEX) };
    }
    routes::unreachable(table, ROUTE_PROTOCOL, prefix)
}

impl MeshState {
    /// Whether packets take an IP tunnel the outer packets of which are of this family.
    pub(super) fn has_tunnels(&self, family: IpFamily) -> bool {
        self.plain.iter().any(|route| route.is_tunnel && IpFamily::of(route.gateway) == family)
    }

    /// Source of packets that this host sends into the mesh.
    fn source(&self, family: IpFamily) -> Option<IpAddr> {
        let on_mesh = self.addresses.iter().map(IpNet::addr);
        let on_host = self.sources.iter().filter(|source| source.is_on_host).map(|source| source.address);
        on_host.chain(on_mesh).find(|address| IpFamily::of(*address) == family)
    }
}

#[cfg(test)]
mod tests;

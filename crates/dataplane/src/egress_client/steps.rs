//! Differences between the rules and routes that a client pod has and those that it should have, and the order in which they are
//! changed.
//!
//! Missing items are added in the order in which the kernel looks them up, and stale ones are deleted in the reverse order
//! afterwards. So a packet that falls through a deleted item only meets desired ones, and no packet to a destination that was
//! kept from `eth0` leaves by it in between. Of a table, longer routes are added first and deleted last, so that a packet takes the way
//! that it had until it takes the one that it is to have.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use fairlead_address::IpFamily;
use fairlead_api::client_routing::{ClientRoute, ClientRouting, ClientRule, Target};
use fairlead_api::names::{
    ROUTE_PROTOCOL, RULE_PRIORITIES_EGRESS_IN_CLUSTER, RULE_PRIORITY_EGRESS_LINK_LOCAL,
    RULE_PRIORITY_EGRESS_NARROW, RULE_PRIORITY_EGRESS_PRIVATE, RULE_PRIORITY_EGRESS_WIDE,
    TABLE_EGRESS_NARROW, TABLE_EGRESS_WIDE,
};
use fairlead_netlink::Message;
use fairlead_netlink::route::{
    Route, RouteKind, Rule, Scope, TABLE_MAIN, add_route, add_rule, delete_route, delete_rule, replace_route,
};
use ipnet::IpNet;

use super::{IN_CLUSTER_METRIC, RULE_PROTOCOL};
use crate::routes::unreachable;

/// The rules of one family, and its routes of the tables 117 and 118, in the kernel's order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Present {
    /// All rules.
    pub rules: Vec<Rule>,
    /// Routes of the two tables.
    pub routes: Vec<Route>,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// A route is missing.
    AddRoute(Route),
    /// A rule is missing.
    AddRule(Rule),
    /// A route is stale.
    DeleteRoute(Route),
    /// A rule is stale.
    DeleteRule(Rule),
    /// A route of ours has its destination and metric.
    ReplaceRoute(Route),
}

/// A route that cannot be set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occupied {
    /// The route.
    pub wanted: Route,
    /// Another program's route to the same destination with the same metric.
    pub by: Route,
}

/// Changes that have to be made, in this order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Steps {
    /// Additions and replacements.
    pub set: Vec<Step>,
    /// Deletions, once everything of `set` that protects from `eth0` is in place.
    pub delete: Vec<Step>,
    /// Routes that cannot be set, since another program has one in their place.
    pub occupied: Vec<Occupied>,
}

/// The steps from what is present to what is desired, of one family; without a desired state everything of egress goes.
/// `links` has the indexes of links by name.
pub fn steps(desired: Option<&ClientRouting>, links: &BTreeMap<String, u32>, present: &Present) -> Steps {
    let mut steps = Steps::default();
    if let Some(ClientRouting { rules, routes }) = desired {
        let routes: Vec<Route> = routes.iter().flat_map(|route| kernel_routes(route, links)).collect();
        compare_routes(&routes, &present.routes, &mut steps);
        let rules: Vec<Rule> = rules.iter().map(kernel_rule).collect();
        compare_rules(&rules, &present.rules, &mut steps);
    } else {
        compare_routes(&[], &present.routes, &mut steps);
        compare_rules(&[], &present.rules, &mut steps);
    }
    let desired = desired.map(|desired| desired.rules.iter().map(kernel_rule).collect()).unwrap_or_default();
    let position = |step: &Step| step.position([&present.rules, &desired]);
    // Both sorts are stable: an unreachable route is added before the one into a link and deleted after it.
    steps.set.sort_by_key(position);
    steps.delete.sort_by_key(position);
    steps.delete.reverse();
    steps
}

/// The first rule or route that is not of this family or has other numbers than those of egress.
pub(super) fn foreign(family: IpFamily, desired: &ClientRouting) -> Option<String> {
    let rules =
        desired.rules.iter().map(kernel_rule).filter(|rule| rule.family != family || !is_own_rule(rule));
    let is_own =
        |route: &ClientRoute| IpFamily::of(route.destination.addr()) == family && is_own_table(route.table);
    let routes = desired.routes.iter().filter(|route| !is_own(route));
    let route =
        |it: &ClientRoute| format!("route {} to {:?} in table {}", it.destination, it.target, it.table);
    rules.map(|rule| rule.to_string()).chain(routes.map(route)).next()
}

fn kernel_rule(rule: &ClientRule) -> Rule {
    let family = IpFamily::of(rule.destination.addr());
    let destination = Some(rule.destination.trunc()).filter(|prefix| prefix.prefix_len() > 0);
    Rule { destination, ..Rule::lookup(family, rule.priority, rule.table, RULE_PROTOCOL) }
}

/// The unreachable route, and the one into the link if there is one; of an excluded prefix or a range of the cluster only that which says so.
fn kernel_routes(route: &ClientRoute, links: &BTreeMap<String, u32>) -> Vec<Route> {
    let ClientRoute { table, destination, target, .. } = route;
    let refusing = unreachable(*table, ROUTE_PROTOCOL, *destination);
    let throwing = |metric| vec![Route { kind: RouteKind::THROW, metric, ..refusing.clone() }.canonical()];
    let link = match target {
        Target::Excluded => return throwing(refusing.metric),
        Target::InCluster => return throwing(IN_CLUSTER_METRIC),
        Target::Link(name) => links.get(name),
        Target::Refused => None,
    };
    // As Coil makes it; without a gateway the kernel would take another scope as well.
    let into = |link: &u32| Route {
        scope: Scope::UNIVERSE,
        ..Route::onto(*table, ROUTE_PROTOCOL, *destination, *link)
    };
    let all = [Some(refusing), link.map(into)];
    all.into_iter().flatten().map(|route| route.canonical()).collect()
}

fn compare_routes(desired: &[Route], present: &[Route], steps: &mut Steps) {
    // The kernel compares only these to decide whether a route exists already.
    let place = |route: &Route| (route.table, route.destination, route.metric);
    let mut kept = BTreeSet::new();
    let mut seen = BTreeSet::new();
    for route in desired.iter().filter(|route| seen.insert(place(route))) {
        let mut there = present.iter().enumerate().filter(|(_, found)| place(found) == place(route));
        let equal = there.clone().find(|(_, found)| *found == route);
        // The kernel uses the first of a place, and replaces it.
        match (there.next(), equal) {
            (None, _) => steps.set.push(Step::AddRoute(route.clone())),
            (Some((_, first)), _) if !is_own_route(first) => {
                kept.extend(equal.map(|(index, _)| index));
                if !same_way(first, route) {
                    steps.occupied.push(Occupied { wanted: route.clone(), by: first.clone() });
                }
            }
            (Some(_), Some((index, _))) => drop(kept.insert(index)),
            (Some((index, _)), None) => {
                kept.insert(index);
                steps.set.push(Step::ReplaceRoute(route.clone()));
            }
        }
    }
    let stale =
        present.iter().enumerate().filter(|(index, route)| is_own_route(route) && !kept.contains(index));
    let mut stale: Vec<&Route> = stale.map(|(_, route)| route).collect();
    // Deleted in the reverse order: the unreachable route of a destination goes last.
    stale.sort_by_key(|route| (route.destination, std::cmp::Reverse(route.metric)));
    steps.delete.extend(stale.into_iter().cloned().map(Step::DeleteRoute));
}

fn compare_rules(desired: &[Rule], present: &[Rule], steps: &mut Steps) {
    let is_in = |rules: &[Rule], rule: &Rule| rules.iter().any(|found| found.same_effect(rule));
    // The kernel would take a copy that differs only in protocol.
    let missing = desired.iter().filter(|rule| !is_in(present, rule)).cloned();
    steps.set.extend(missing.map(Step::AddRule));
    // Deleting without a protocol hits the first copy of any. Another program's keeps the effect anyway.
    let has_copy = |rule: &Rule| present.iter().any(|found| found.same_effect(rule) && !is_own_rule(found));
    let stale = present.iter().filter(|rule| is_own_rule(rule) && !is_in(desired, rule) && !has_copy(rule));
    steps.delete.extend(stale.cloned().map(Step::DeleteRule));
}

/// Whether both do the same to packets.
fn same_way(a: &Route, b: &Route) -> bool {
    let way = |route: &Route| (route.kind, route.gateway, route.link, route.next_hops.is_empty());
    way(a) == way(b)
}

fn is_own_table(table: u32) -> bool {
    [TABLE_EGRESS_NARROW, TABLE_EGRESS_WIDE].contains(&table)
}

fn is_own_route(route: &Route) -> bool {
    is_own_table(route.table) && route.protocol == ROUTE_PROTOCOL
}

/// Whether a rule is one of egress: by its numbers, and because it has no other condition than a destination.
fn is_own_rule(rule: &Rule) -> bool {
    let is_own_priority = [RULE_PRIORITY_EGRESS_LINK_LOCAL, RULE_PRIORITY_EGRESS_NARROW]
        .contains(&rule.priority)
        || (RULE_PRIORITY_EGRESS_PRIVATE..=RULE_PRIORITY_EGRESS_WIDE).contains(&rule.priority);
    let plain = Rule {
        destination: rule.destination,
        ..Rule::lookup(rule.family, rule.priority, rule.table, rule.protocol)
    };
    is_own_priority
        && [RULE_PROTOCOL, ROUTE_PROTOCOL].contains(&rule.protocol)
        && (rule.table == TABLE_MAIN || is_own_table(rule.table))
        && *rule == plain
}

/// The range of the cluster of a rule that is for one.
pub(super) fn cluster_range(rule: &Rule) -> Option<IpNet> {
    let is_such = is_own_rule(rule) && RULE_PRIORITIES_EGRESS_IN_CLUSTER.contains(&rule.priority);
    rule.destination.filter(|_| is_such && rule.table == TABLE_MAIN)
}

/// Whether it leaves packets of the first table to the routes of the second one: none of the rules between both has all of them.
fn passes_on(route: &Route, rules: [&Vec<Rule>; 2]) -> bool {
    let keeps = |rule: &&Rule| {
        let is_between = (RULE_PRIORITY_EGRESS_PRIVATE..RULE_PRIORITY_EGRESS_WIDE).contains(&rule.priority);
        is_between && rule.destination.is_some_and(|kept| kept.contains(&route.destination))
    };
    route.kind == RouteKind::THROW && !rules.into_iter().flatten().any(|rule| keeps(&rule))
}

impl Step {
    /// Position at which the kernel meets the item: its priority, and whether it is the rule, or a route that the rule looks up; of routes, the
    /// longest first. Last comes what lets packets pass from one table to the next one, which has to be complete.
    fn position(&self, rules: [&Vec<Rule>; 2]) -> (u32, bool, Reverse<u8>) {
        match self {
            Self::AddRule(rule) | Self::DeleteRule(rule) => (rule.priority, true, Reverse(0)),
            Self::AddRoute(route) | Self::DeleteRoute(route) | Self::ReplaceRoute(route) => {
                let priority = match route.table {
                    TABLE_EGRESS_NARROW if passes_on(route, rules) => u32::MAX,
                    TABLE_EGRESS_NARROW => RULE_PRIORITY_EGRESS_NARROW,
                    _ => RULE_PRIORITY_EGRESS_WIDE,
                };
                (priority, false, Reverse(route.destination.prefix_len()))
            }
        }
    }

    /// Whether it sets a route that leaves packets to the rules after its table.
    pub(super) fn lets_pass(&self) -> bool {
        match self {
            Self::AddRoute(route) | Self::ReplaceRoute(route) => route.kind == RouteKind::THROW,
            Self::AddRule(_) | Self::DeleteRoute(_) | Self::DeleteRule(_) => false,
        }
    }

    /// Whether it sets a route into a link, which has an unreachable one behind it.
    pub(super) fn leads_into_link(&self) -> bool {
        match self {
            Self::AddRoute(route) | Self::ReplaceRoute(route) => route.kind == RouteKind::UNICAST,
            Self::AddRule(_) | Self::DeleteRoute(_) | Self::DeleteRule(_) => false,
        }
    }

    /// The request to the kernel.
    pub(super) fn message(&self) -> Message {
        match self {
            Self::AddRoute(route) => add_route(route),
            Self::AddRule(rule) => add_rule(rule),
            Self::DeleteRoute(route) => delete_route(route),
            Self::DeleteRule(rule) => delete_rule(rule),
            Self::ReplaceRoute(route) => replace_route(route),
        }
    }
}

#[cfg(test)]
mod tests;

//! A packet's way through the rules and routes of a client pod.

use std::net::IpAddr;

use fairlead_address::IpFamily;
use fairlead_api::client_routing::{ClientRoute, ClientRouting, ClientRule, Target};
use fairlead_api::names::{
    RULE_PRIORITIES_EGRESS_IN_CLUSTER, RULE_PRIORITY_EGRESS_LINK_LOCAL, RULE_PRIORITY_EGRESS_PRIVATE,
    TABLE_EGRESS_NARROW,
};

use super::{GatewayPod, GatewayState, Known, PacketWay, PodInfo, ToGateways, Why};
use crate::EgressName;
use crate::client::TABLE_MAIN;
use crate::client::plan::{Plan, PlannedTunnel, usable};
use crate::endpoints::NO_GATEWAY;
use crate::problem::{EgressProblem, EgressReason};

/// Step about refused destinations that the objects do not show.
const KEPT: &str = "an Egress that the pod names is not known any more, or its destinations are not: the last ones that it had are refused, \
                    and may be within this one";

/// Step that explains the rule of `spec.originatingOnly`.
const REPLIES: &str = "rule 1000 (spec.originatingOnly): only connections that the pod opens go this way; replies to those that were opened to the \
                       pod by eth0 leave by eth0";

/// Addresses that a rule of the table `main` is for, in words.
fn kind(priority: u32) -> &'static str {
    match priority {
        RULE_PRIORITY_EGRESS_LINK_LOCAL => "link-local addresses",
        _ if RULE_PRIORITIES_EGRESS_IN_CLUSTER.contains(&priority) => {
            "ranges of the cluster: AddressPools, ServiceCIDRs, Nodes"
        }
        RULE_PRIORITY_EGRESS_PRIVATE.. => "private networks",
        _ => "the table main",
    }
}

/// Destinations of a table of routes to gateways, in words.
fn destinations_of(table: u32) -> &'static str {
    if table == TABLE_EGRESS_NARROW { "destinations in private networks" } else { "all other destinations" }
}

impl Known {
    /// The way by what the pod has of the destination's family.
    pub(super) fn walk(
        &self,
        pod: &PodInfo,
        plan: &Plan,
        destination: IpAddr,
        steps: &mut Vec<String>,
    ) -> PacketWay {
        let routing = match IpFamily::of(destination) {
            IpFamily::V4 => &plan.routing.ipv4,
            IpFamily::V6 => &plan.routing.ipv6,
        };
        let Some(routing) = routing else { return PacketWay::Uplink };
        let mut may_be_kept = false;
        for rules in groups(&routing.rules) {
            let Some(first) = rules.first() else { continue };
            if first.table == TABLE_MAIN {
                let (has_it, step) = by_main(rules, first.priority, destination);
                steps.push(step);
                if has_it {
                    break;
                }
                continue;
            }
            let found = longest(routing, first.table, destination);
            steps.push(by_table(first, found));
            if found.is_some_and(|route| route.originating_only) {
                steps.push(REPLIES.to_owned());
            }
            let Some(route) = found.filter(|route| !route.target.lets_pass()) else {
                may_be_kept |= plan.keeps_destinations;
                continue;
            };
            if plan.keeps_destinations {
                steps.push(KEPT.to_owned());
            }
            return self.by_route(pod, plan, route, destination);
        }
        let is_of_kept = |it: &&EgressProblem| {
            matches!(it.reason, EgressReason::Unknown | EgressReason::DestinationInvalid)
        };
        let problem = plan.problems.iter().find(is_of_kept).or(plan.problems.first());
        problem
            .filter(|_| may_be_kept)
            .map_or(PacketWay::Uplink, |problem| PacketWay::NotKnown(kept(problem)))
    }

    fn by_route(&self, pod: &PodInfo, plan: &Plan, route: &ClientRoute, destination: IpAddr) -> PacketWay {
        let is_of =
            |tunnel: &&PlannedTunnel| matches!(&route.target, Target::Link(name) if *name == tunnel.link);
        let Some(tunnel) = plan.tunnels.iter().find(is_of) else {
            return PacketWay::Refused(self.why_refused(pod, plan, route));
        };
        let egress = &tunnel.egress;
        if self.in_cluster.contains(destination) || is_special(destination) {
            let message = format!(
                "the packet would go to a gateway of Egress {egress} (destination {}), which drops it, as gateways forward nothing to \
                 pods, Services, nodes, link-local and multicast addresses: choose destinations without them",
                route.destination
            );
            return PacketWay::Refused(Why::new("DestinationInCluster", message));
        }
        let gateways = self.used_by(pod.node.as_deref(), egress).map(|mut all| {
            let family = IpFamily::of(destination);
            all.retain(|gateway| {
                let has_family = gateway.addresses.iter().any(|address| IpFamily::of(address) == family);
                has_family && gateway.state != GatewayState::Ended
            });
            all
        });
        if let Some(why) = gateways.as_deref().and_then(|gateways| none_takes_flows(egress, gateways)) {
            return PacketWay::Refused(why);
        }
        PacketWay::Gateways(Box::new(ToGateways {
            egress: egress.clone(),
            table: route.table,
            prefix: route.destination,
            link: tunnel.link.clone(),
            cluster_ip: tunnel.cluster_ip,
            port: tunnel.port,
            by_client: tunnel.by_client,
            gateways,
        }))
    }

    /// A route without a link is to a destination of an Egress that cannot be used.
    fn why_refused(&self, pod: &PodInfo, plan: &Plan, route: &ClientRoute) -> Why {
        // How long the destination of an Egress is that has the route's.
        let length = |egress: &EgressName| {
            let destinations = self.cluster.egresses.get(egress)?.destinations.as_ref().ok()?;
            let around = destinations.used().filter(|prefix| prefix.contains(&route.destination));
            around
                .map(|prefix| prefix.prefix_len())
                .max()
                .filter(|_| !destinations.excludes(&route.destination))
        };
        let asked = self.selection.asked_by(pod).unwrap_or_default();
        let problems = asked.iter().filter_map(|egress| {
            Some((length(egress)?, usable(&self.cluster, &pod.namespace, egress).err()?))
        });
        let longest = problems.max_by_key(|(length, _)| *length).map(|(_, problem)| problem);
        let problem = longest.or_else(|| plan.problems.first().cloned());
        problem.as_ref().map_or_else(|| Why::new("NoGateway", "no gateway can be used"), Why::from)
    }
}

/// Whether one of these rules of the table `main` is for the address, in words, too.
fn by_main(rules: &[ClientRule], priority: u32, destination: IpAddr) -> (bool, String) {
    let kind = kind(priority);
    let found = rules.iter().find(|rule| rule.destination.contains(&destination));
    let step = match found {
        Some(rule) => format!("rule {} ({kind}): {} has it: table main", rule.priority, rule.destination),
        None => format!("{} ({kind}): none has the address", numbers(rules)),
    };
    (found.is_some(), step)
}

/// Effect of a rule for a table of routes to gateways, in words.
fn by_table(rule: &ClientRule, found: Option<&ClientRoute>) -> String {
    let ClientRule { priority, table, .. } = rule;
    let what = match found {
        None => "no route has the address".to_owned(),
        Some(ClientRoute { destination, target: Target::Excluded, .. }) => {
            format!("{destination} has it, which is excluded (spec.excludedDestinations)")
        }
        Some(ClientRoute { destination, target: Target::InCluster, .. }) => {
            format!("{destination} has it, a range of the cluster (status.clusterRanges)")
        }
        Some(ClientRoute { destination, .. }) => format!("{destination} has it"),
    };
    format!("rule {priority}, table {table} ({}): {what}", destinations_of(*table))
}

/// Reason why no gateway of these takes a new flow; `None` if one does.
fn none_takes_flows(egress: &EgressName, gateways: &[GatewayPod]) -> Option<Why> {
    let has = |state| gateways.iter().any(|gateway| gateway.state == state);
    if has(GatewayState::Ready) {
        None
    } else if has(GatewayState::Draining) {
        let message = format!(
            "all gateways of Egress {egress} drain: connections that they have go on, new ones are dropped until another is ready"
        );
        Some(Why::new("GatewaysDrain", message))
    } else {
        Some(Why::new("NoGateway", format!("Egress {egress}: {NO_GATEWAY}")))
    }
}

/// An Egress whose destinations are not known, in the way of a packet that no known destination has.
fn kept(problem: &EgressProblem) -> Why {
    let message = format!(
        "{}. A pod that starts is not started for that. A running one refuses packets to the last destinations that the Egress had, and \
         sends others by eth0: `ip route show table 118` and `table 117` in the pod show which",
        problem.message
    );
    Why { message, ..Why::from(problem) }
}

/// Gateways forward nothing to such an address, whatever its Egress says.
fn is_special(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    is_link_local || address.is_loopback() || address.is_multicast()
}

/// Rules in a row that are for the same.
fn groups(rules: &[ClientRule]) -> impl Iterator<Item = &[ClientRule]> {
    let is_same = |a: &ClientRule, b: &ClientRule| {
        a.table == TABLE_MAIN && b.table == TABLE_MAIN && kind(a.priority) == kind(b.priority)
    };
    rules.chunk_by(is_same)
}

fn numbers(rules: &[ClientRule]) -> String {
    match rules {
        [] => String::new(),
        [one] => format!("rule {}", one.priority),
        [first, .., last] => format!("rules {}–{}", first.priority, last.priority),
    }
}

fn longest(routing: &ClientRouting, table: u32, destination: IpAddr) -> Option<&ClientRoute> {
    let of_table = routing.routes.iter().filter(|route| route.table == table);
    let matching = of_table.filter(|route| route.destination.contains(&destination));
    matching.max_by_key(|route| route.destination.prefix_len())
}

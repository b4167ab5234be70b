//! Replies of a client pod to connections that others have opened to it by its uplink leave by the uplink, also where their destination is one
//! of an Egress (Coil's "originating only").
//!
//! With Coil's numbers: rule 1000 sends packets with the uplink's index as their mark to the table 1000 + index, which has the routes of the table
//! `main` by the uplink. The mark is that of the connection, which the first packet gets by coming in by the uplink; packets in the direction of
//! replies do not change it, so that nothing which comes in by the uplink opens a way by it for connections of the pod.
//!
//! A packet without the mark goes by the other rules: if the table of nftables, rule 1000 or its table is missing, replies go to gateways, which drop
//! them, and no packet of a connection that the pod has opened leaves by the uplink.

use std::collections::BTreeMap;

use fairlead_address::{IntervalSet, IpFamily};
use fairlead_api::names::{
    NFT_TABLE_EGRESS_CLIENT, ROUTE_PROTOCOL, RULE_PRIORITY_EGRESS_REPLIES, TABLE_EGRESS_REPLIES_BASE,
};
use fairlead_netlink::Result as Netlink;
use fairlead_netlink::netns::Netns;
use fairlead_netlink::nftables::{
    AddressEnd, CONNECTION_ORIGINAL, Chain, Comparison, Expression, Hook, Meta, Rule, Table,
};
use fairlead_netlink::route::{
    Mark, Route, RouteKind, RouteSocket, Rule as RoutingRule, TABLE_MAIN, add_rule, delete_rule,
};

use super::{Error, RULE_PROTOCOL};
use crate::nft_table::{self, Applied};
use crate::routes::{send, table_difference};
use crate::uplink::{answer_by_mark, has_ipv6};

/// `NF_IP_PRI_MANGLE` (`linux/netfilter_ipv4.h`)
const PRIORITY_MANGLE: i32 = -150;

/// Hosts whose connections a client pod answers by its uplink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replies {
    /// Name of the uplink.
    pub uplink: String,
    /// Addresses of those who open connections, of each family; without any, everything of this goes.
    pub peers: [IntervalSet; 2],
}

impl Replies {
    /// Whether any connections are answered by the uplink.
    pub fn is_any(&self) -> bool {
        !self.families().is_empty()
    }

    fn of(&self, family: IpFamily) -> Option<&IntervalSet> {
        let found = self.peers.iter().find(|peers| peers.family() == family);
        found.filter(|peers| !peers.is_empty() && (family == IpFamily::V4 || has_ipv6()))
    }

    fn families(&self) -> Vec<IpFamily> {
        IpFamily::BOTH.into_iter().filter(|family| self.of(*family).is_some()).collect()
    }
}

/// Brings a network namespace to what replies need, and returns what was done, one sentence each; nothing is sent where nothing differs.
///
/// # Errors
/// The kernel refuses. What comes before the refusal is in place: settings, routes, rules, then the table of nftables.
pub fn sync_replies(netns: &Netns, replies: &Replies) -> Result<Vec<String>, Error> {
    run(netns, replies, true)
}

/// Reports what [`sync_replies`] would do, one sentence each, without doing it.
///
/// # Errors
/// The kernel cannot be asked.
pub fn reply_differences(netns: &Netns, replies: &Replies) -> Result<Vec<String>, Error> {
    run(netns, replies, false)
}

fn run(netns: &Netns, replies: &Replies, apply: bool) -> Result<Vec<String>, Error> {
    let failed =
        |source| Error::Replies { netns: netns.path().to_owned(), uplink: replies.uplink.clone(), source };
    let mut socket = RouteSocket::open_in(netns).map_err(failed)?;
    let mut present = socket.rules().map_err(failed)?;
    present.retain(is_own_rule);
    if !replies.is_any() && present.is_empty() {
        return Ok(Vec::new());
    }
    let mut settings = Vec::new();
    if replies.is_any() {
        let changed = netns.run(|| answer_by_mark(&replies.uplink, apply)).map_err(failed)?;
        settings = changed.map_err(|source| Error::Sysctl { netns: netns.path().to_owned(), source })?;
    }
    let mut done: Vec<String> = settings.iter().map(|file| format!("set {}", file.display())).collect();
    let inside = || reconcile(&mut socket, replies, &present, apply);
    done.extend(netns.run(inside).map_err(failed)?.map_err(failed)?);
    Ok(done)
}

/// In the namespace of the pod.
fn reconcile(
    socket: &mut RouteSocket,
    replies: &Replies,
    present: &[RoutingRule],
    apply: bool,
) -> Netlink<Vec<String>> {
    let uplink = socket.link_by_name(&replies.uplink)?;
    let index = uplink.as_ref().map(|link| link.index).filter(|_| replies.is_any());
    let mut done = Vec::new();
    if index.is_none() {
        done.extend(set_table(None, apply)?);
    }
    let stale = present.iter().filter(|rule| {
        index.is_none_or(|index| !wanted_rules(replies, index).iter().any(|it| it.same_effect(rule)))
    });
    let stale: Vec<&RoutingRule> = stale.collect();
    if let Some(index) = index {
        done.extend(set_routes(socket, replies, index, apply)?);
        done.extend(add_rules(socket, &wanted_rules(replies, index), present, apply)?);
    }
    done.extend(delete_rules(socket, &stale, index, apply)?);
    if let Some(index) = index {
        done.extend(set_table(Some(&table(replies, index)), apply)?);
    }
    Ok(done)
}

fn table_of(index: u32) -> u32 {
    TABLE_EGRESS_REPLIES_BASE.saturating_add(index)
}

fn rule_of(family: IpFamily, index: u32) -> RoutingRule {
    let rule = RoutingRule::lookup(family, RULE_PRIORITY_EGRESS_REPLIES, table_of(index), RULE_PROTOCOL);
    RoutingRule { mark: Some(Mark { value: index, mask: u32::MAX }), ..rule }
}

fn wanted_rules(replies: &Replies, index: u32) -> Vec<RoutingRule> {
    replies.families().into_iter().map(|family| rule_of(family, index)).collect()
}

/// Whether a rule is ours, by its numbers, whatever the index: the link may have been made anew.
fn is_own_rule(rule: &RoutingRule) -> bool {
    let is_protocol = [RULE_PROTOCOL, ROUTE_PROTOCOL].contains(&rule.protocol);
    let index = rule.mark.filter(|mark| mark.mask == u32::MAX).map(|mark| mark.value);
    is_protocol && index.is_some_and(|index| rule.same_effect(&rule_of(rule.family, index)))
}

fn add_rules(
    socket: &mut RouteSocket,
    wanted: &[RoutingRule],
    present: &[RoutingRule],
    apply: bool,
) -> Netlink<Vec<String>> {
    let missing = wanted.iter().filter(|rule| !present.iter().any(|found| found.same_effect(rule)));
    let missing: Vec<&RoutingRule> = missing.collect();
    let messages: Vec<_> = missing.iter().map(|rule| add_rule(rule)).collect();
    if apply && !messages.is_empty() {
        for outcome in socket.apply_each(&messages)? {
            outcome.or_else(|error| if error.is_existing() { Ok(()) } else { Err(error) })?;
        }
    }
    Ok(missing.iter().map(|rule| format!("add {rule}")).collect())
}

/// Also what is in the tables that they look up.
fn delete_rules(
    socket: &mut RouteSocket,
    stale: &[&RoutingRule],
    index: Option<u32>,
    apply: bool,
) -> Netlink<Vec<String>> {
    let messages: Vec<_> = stale.iter().map(|rule| delete_rule(rule)).collect();
    if apply && !messages.is_empty() {
        for outcome in socket.apply_each(&messages)? {
            outcome.or_else(|error| if error.is_missing() { Ok(()) } else { Err(error) })?;
        }
        let current = index.map(table_of);
        for rule in stale.iter().filter(|rule| Some(rule.table) != current) {
            let mut existing = socket.routes(rule.table)?;
            existing.retain(|route| route.protocol == ROUTE_PROTOCOL);
            send(socket, &table_difference(rule.table, ROUTE_PROTOCOL, &[], &existing))?;
        }
    }
    Ok(stale.iter().map(|rule| format!("delete {rule}")).collect())
}

/// The routes of the table `main` by the uplink; those that others lead through come first.
fn set_routes(socket: &mut RouteSocket, replies: &Replies, index: u32, apply: bool) -> Netlink<Vec<String>> {
    let mut wanted: Vec<Route> = Vec::new();
    for family in replies.families() {
        wanted.extend(socket.routes_of(family, TABLE_MAIN)?);
    }
    let is_by_uplink = |route: &Route| {
        route.kind == RouteKind::UNICAST && route.link == Some(index) && route.next_hops.is_empty()
    };
    wanted.retain(is_by_uplink);
    wanted.sort_by_key(|route| route.gateway.is_some());
    let existing = socket.routes(table_of(index))?;
    let difference = table_difference(table_of(index), ROUTE_PROTOCOL, &wanted, &existing);
    if apply && !difference.is_empty() {
        send(socket, &difference)?;
    }
    let set = difference.add.iter().chain(&difference.replace).map(|route| format!("set {route}"));
    Ok(set.chain(difference.delete.iter().map(|route| format!("delete {route}"))).collect())
}

fn set_table(wanted: Option<&Table>, apply: bool) -> Netlink<Vec<String>> {
    let differs = match (wanted, apply) {
        (Some(table), true) => nft_table::apply(table)? != Applied::Unchanged,
        (Some(table), false) => !nft_table::is_current(table)?,
        (None, true) => nft_table::remove(NFT_TABLE_EGRESS_CLIENT).map(|()| true)?,
        (None, false) => true,
    };
    let what = if wanted.is_some() { "set" } else { "delete" };
    Ok(differs.then(|| format!("{what} table inet {NFT_TABLE_EGRESS_CLIENT}")).into_iter().collect())
}

fn set_of(family: IpFamily) -> &'static str {
    match family {
        IpFamily::V4 => "peers_ipv4",
        IpFamily::V6 => "peers_ipv6",
    }
}

/// The table that should be.
fn table(replies: &Replies, index: u32) -> Table {
    let families = replies.families();
    let mark = index.to_ne_bytes().to_vec();
    let input = families.iter().map(|family| mark_connection(*family, &replies.uplink, &mark));
    let output = families.iter().map(|family| mark_reply(*family, &mark));
    let chain = |hook, rules| Chain { hook, priority: PRIORITY_MANGLE, rules };
    let chains = [
        ("input", chain(Hook::FilterInput, input.collect())),
        ("output", chain(Hook::RouteOutput, output.collect())),
    ];
    let sets =
        families.iter().filter_map(|family| Some((set_of(*family).to_owned(), replies.of(*family)?.clone())));
    Table {
        name: NFT_TABLE_EGRESS_CLIENT.to_owned(),
        sets: sets.collect(),
        maps: BTreeMap::new(),
        timed: BTreeMap::new(),
        chains: chains.map(|(name, chain)| (name.to_owned(), chain)).into(),
    }
}

/// The packet has the mark, too: sockets that are accepted, and what the kernel answers itself, take it over.
fn mark_connection(family: IpFamily, uplink: &str, mark: &[u8]) -> Rule {
    let conditions = [
        vec![Expression::LoadMeta(Meta::InputInterface), Expression::is_interface(uplink)],
        Expression::address_in(family, AddressEnd::Source, set_of(family)),
        vec![
            Expression::LoadConnectionDirection,
            Expression::Compare(Comparison::Equal, vec![CONNECTION_ORIGINAL]),
        ],
    ];
    let store = [
        Expression::LoadConstant(mark.to_vec()),
        Expression::StoreConnectionMark,
        Expression::StoreMeta(Meta::Mark),
    ];
    Rule(conditions.concat().into_iter().chain(store).collect())
}

fn mark_reply(family: IpFamily, mark: &[u8]) -> Rule {
    let store = [
        Expression::LoadConnectionMark,
        Expression::Compare(Comparison::Equal, mark.to_vec()),
        Expression::StoreMeta(Meta::Mark),
    ];
    Rule(
        Expression::address_in(family, AddressEnd::Destination, set_of(family))
            .into_iter()
            .chain(store)
            .collect(),
    )
}

//! Gateways of each location, and the member through which this node reaches each other one.
//!
//! Every node computes the same ordered list of gateways for each location: two of its nodes, or more if administrators
//! name more. All of them always have tunnels with the gateways of all other locations, and forward at once what they
//! are handed. So which of them a node uses is its own choice: it takes the first that it does not know to be down. A
//! packet takes at most three steps, from a node to a gateway of its location, from there to a gateway of the other
//! location, from there to the node; whatever each of them chooses, it never goes back.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

use fairlead_keys::PublicKey;

use crate::member::Member;
use crate::policy::Policy;
use crate::site::{Granularity, Site};

/// Gateways of a location, unless administrators name more: one that is in use, and one that takes its place.
const GATEWAYS: usize = 2;
/// Most gateways of a location. Each adds a tunnel to every gateway of every other location.
const MAX_GATEWAYS: usize = 4;

/// Members through which others are reached, by index among the ranked members. With all granularities but `location`
/// nothing is known: each is reached by itself.
#[derive(Debug, Default)]
pub(crate) struct Gateways {
    /// Members that another one stands for: the one in use, and the others that may.
    behind: BTreeMap<usize, (usize, Vec<usize>)>,
    /// Whether other members are the gateways of this node's location.
    has_gateways: bool,
}

impl Gateways {
    /// `has_peer` are the members with which this node can have a tunnel.
    pub(crate) fn new(ranked: &[&Member], has_peer: &BTreeSet<usize>, policy: &Policy) -> Self {
        let Granularity::Location { down, .. } = &policy.granularity else { return Self::default() };
        let Some(own) = ranked.iter().position(|member| member.name == policy.own) else {
            return Self::default();
        };
        let lists = lists(ranked);
        let list = |member: usize| lists.get(ranked.get(member).and_then(|it| location(it))?);
        let is_gateway = |member: usize| list(member).is_none_or(|list| list.contains(&member));
        let is_down = |member: usize| ranked.get(member).is_some_and(|it| down.contains(&it.name));
        let own_location = ranked.get(own).and_then(|it| location(it));
        let mut found = Self { has_gateways: !is_gateway(own), ..Self::default() };
        for (at, member) in ranked.iter().enumerate() {
            let is_near = at == own || location(member).is_some_and(|it| Some(it) == own_location);
            if is_near || member.external.is_some() {
                continue;
            }
            let through = match (is_gateway(own), is_gateway(at)) {
                (true, true) => continue,
                (true, false) => list(at),
                (false, _) => list(own),
            };
            let through = through.into_iter().flatten().copied().filter(|it| has_peer.contains(it));
            let through: Vec<usize> = through.collect();
            let Some(first) = through.first().copied() else { continue };
            let in_use = through.iter().copied().find(|gateway| !is_down(*gateway)).unwrap_or(first);
            let others = through.into_iter().filter(|gateway| *gateway != in_use).collect();
            found.behind.insert(at, (in_use, others));
        }
        found
    }

    /// The member that gets what is for this one: itself, or a gateway.
    pub(crate) fn in_use(&self, member: usize) -> usize {
        self.behind.get(&member).map_or(member, |(gateway, _)| *gateway)
    }

    /// Whether packets to it go through another one.
    pub(crate) fn is_behind(&self, member: usize) -> bool {
        self.behind.contains_key(&member)
    }

    /// Whether this node has tunnels with nodes of other locations: it is a gateway, or no member stands for another one.
    pub(crate) fn is_own(&self) -> bool {
        !self.has_gateways
    }

    /// The gateways that are not in use, each with the members for which it may send: other nodes may use it.
    pub(crate) fn others(&self) -> BTreeMap<usize, Vec<usize>> {
        let mut found: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (member, (_, others)) in &self.behind {
            others.iter().for_each(|gateway| found.entry(*gateway).or_default().push(*member));
        }
        found
    }
}

/// Location that a member shares with others; `None` unless it is a node that the cluster knows, with an address inside
/// of the location.
pub fn location(member: &Member) -> Option<&str> {
    let is_node = member.external.is_none() && !member.discovery.is_only_source;
    let site = member.site.as_ref().filter(|site| is_node && !site.internal.is_empty())?;
    Some(&site.location)
}

/// The gateways of each location, best first: those that an administrator wants and that have a public address, that an
/// administrator wants, that have a public address; then by name.
fn lists<'a>(ranked: &[&'a Member]) -> BTreeMap<&'a str, Vec<usize>> {
    let mut lists: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, member) in ranked.iter().enumerate() {
        let has_key = member.public_key.is_some_and(|PublicKey(bytes)| bytes != [0; 32]);
        if let Some(location) = location(member).filter(|_| has_key) {
            lists.entry(location).or_default().push(at);
        }
    }
    let order = |at: &usize| {
        let member = ranked.get(*at)?;
        let Site { is_leader, is_public, .. } = *member.site.as_ref()?;
        Some((!(is_leader && is_public), !is_leader, !is_public, &member.name))
    };
    for list in lists.values_mut() {
        list.sort_by(|a, b| order(a).cmp(&order(b)));
        let is_leader =
            |at: &&usize| ranked.get(**at).and_then(|it| it.site.as_ref()).is_some_and(|it| it.is_leader);
        let leaders = list.iter().filter(is_leader).count();
        list.truncate(leaders.clamp(GATEWAYS, MAX_GATEWAYS));
    }
    lists
}

/// The gateways of each location by name, best first: the same on every node.
pub fn gateways<M: Borrow<Member>>(members: &[M]) -> BTreeMap<String, Vec<String>> {
    let ranked: Vec<&Member> = members.iter().map(Borrow::borrow).collect();
    let name = |at: usize| ranked.get(at).map(|member| member.name.clone());
    lists(&ranked)
        .into_iter()
        .map(|(location, list)| (location.to_owned(), list.into_iter().filter_map(name).collect()))
        .collect()
}

#[cfg(test)]
mod tests;

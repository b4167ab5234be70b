//! The plan of a mesh that changes from tunnels between all nodes to gateways of locations, or back.
//!
//! Nodes see such a change at different moments, and each step of a packet is one that the sender of that step decides. So while it lasts a node
//! keeps the tunnels of both, and accepts what comes by any mixture of them: from a node itself, from a gateway of that node's location, which has
//! it from there, and from a gateway of its own location, which has it from another one. What it sends still goes where one of the two says.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fairlead_keys::PublicKey;
use ipnet::IpNet;

use crate::gateways::{gateways, location};
use crate::member::Member;
use crate::peer::PeerPlan;
use crate::plan::{Plan, plan};
use crate::policy::Policy;
use crate::site::Granularity;

/// The plans of a mesh whose granularity changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct United {
    /// Plan that holds while the granularity changes.
    pub plan: Plan,
    /// Plan that follows from the other granularity alone.
    pub other: Plan,
}

/// The plan `used`, which follows from these members and the policy, with the tunnels of the other granularity, to which nothing is sent, and
/// with everything accepted that may come while some nodes follow the one and some the other. `None` if neither of the two has gateways, or
/// both: they have the same tunnels. Takes `O(n log n)`, and plans all members.
pub fn united<M: Borrow<Member>>(
    members: &[M],
    policy: &Policy,
    other: Granularity,
    used: &Plan,
) -> Option<United> {
    let has_gateways = |granularity: &Granularity| matches!(granularity, Granularity::Location { .. });
    if has_gateways(&policy.granularity) == has_gateways(&other) {
        return None;
    }
    let planned = plan(members, &Policy { granularity: other, ..policy.clone() });
    let direct = if has_gateways(&policy.granularity) { &planned } else { used };
    let senders = Senders::new(members, &policy.own, direct);
    let mut united = used.clone();
    for (key, peer) in &direct.peers {
        let Some(mut accepted) = senders.accepted(peer) else { continue };
        let known = [used.peers.get(key), planned.peers.get(key)].into_iter().flatten();
        accepted.extend(known.flat_map(|peer| peer.allowed_ips.iter().chain(&peer.accepted_ips)).copied());
        let of_used = united.peers.get(key).unwrap_or(peer);
        let is_used = united.peers.contains_key(key);
        let allowed_ips = if is_used { of_used.allowed_ips.clone() } else { Vec::new() };
        let accepted_ips = accepted.into_iter().collect();
        let peer = PeerPlan { allowed_ips, accepted_ips, ..(**of_used).clone() };
        united.peers.insert(*key, Arc::new(peer));
    }
    Some(United { plan: united, other: planned })
}

/// Prefixes that nodes send from where each has a tunnel with every other, and the gateways that send for them.
struct Senders<'a> {
    /// Location of each node; `None` for one that is a location of its own.
    locations: BTreeMap<&'a str, Option<&'a str>>,
    own_location: Option<&'a str>,
    gateways: BTreeMap<String, Vec<String>>,
    /// Prefixes of the nodes of each location.
    sent: BTreeMap<Option<&'a str>, BTreeSet<IpNet>>,
}

impl<'a> Senders<'a> {
    fn new<M: Borrow<Member>>(members: &'a [M], own: &str, direct: &Plan) -> Self {
        let nodes = members.iter().map(Borrow::borrow).filter(|member| member.external.is_none());
        let locations: BTreeMap<&str, Option<&str>> =
            nodes.map(|member| (member.name.as_str(), location(member))).collect();
        let mut sent: BTreeMap<Option<&str>, BTreeSet<IpNet>> = BTreeMap::new();
        for peer in direct.peers.values() {
            let named = peer.members.iter().filter_map(|name| locations.get(name.as_str()));
            let places: BTreeSet<Option<&str>> = named.copied().collect();
            places.into_iter().for_each(|at| sent.entry(at).or_default().extend(&peer.allowed_ips));
        }
        let own_location = locations.get(own).copied().flatten();
        Self { locations, own_location, gateways: gateways(members), sent }
    }

    /// Prefixes that the peer may send from for others; `None` if it is no node.
    fn accepted(&self, peer: &PeerPlan) -> Option<BTreeSet<IpNet>> {
        let mut places = peer.members.iter().map(|name| self.locations.get(name.as_str()).copied());
        if places.any(|place| place.is_none()) {
            return None;
        }
        let mut accepted = BTreeSet::new();
        for name in &peer.members {
            let Some(at) = self.locations.get(name.as_str()).copied().flatten() else { continue };
            if !self.gateways.get(at).is_some_and(|gateways| gateways.contains(name)) {
                continue;
            }
            let is_own = self.own_location == Some(at);
            let sent = self.sent.iter().filter(|(place, _)| is_own || **place == Some(at));
            accepted.extend(sent.flat_map(|(_, sent)| sent).copied());
        }
        Some(accepted)
    }
}

/// The keys of peers that a plan has only because of another granularity.
pub fn added(used: &Plan, united: &Plan) -> BTreeSet<PublicKey> {
    united.peers.keys().filter(|key| !used.peers.contains_key(*key)).copied().collect()
}

#[cfg(test)]
mod tests;

//! Peers: the members that each one stands for, and the prefixes it has.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use crate::entry::{EntryNodes, EntryRole};
use crate::gateways::Gateways;
use crate::member::Member;
use crate::policy::Policy;
use crate::prefixes;

/// Configuration of one peer, apart from its endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerPlan {
    /// The members that publish the key, the one that joined first in front.
    pub members: Vec<String>,
    /// Prefixes that the peer may send from and is sent for: sorted. No other peer has the same one, and where one
    /// contains that of another peer, the longer prefix counts.
    pub allowed_ips: Vec<IpNet>,
    /// Prefixes that the peer may send from besides, although another peer is sent for them: it is a gateway of the same
    /// location. Sorted.
    pub accepted_ips: Vec<IpNet>,
    /// Seconds between keepalives; zero sends none.
    pub keepalive: u16,
    /// Role of this node for an external member that names it as an entry node; else `None`.
    pub entry: Option<EntryRole>,
}

/// Holders of all prefixes, who get what is sent there: a member with a peer, one without, or none.
pub(crate) struct Holders(Vec<(IpNet, Option<usize>, bool)>);

impl Holders {
    pub(crate) fn new(
        owned: &[Vec<IpNet>],
        lost_blocks: &BTreeSet<IpNet>,
        has_peer: &BTreeSet<usize>,
    ) -> Self {
        let kept = owned.iter().enumerate().flat_map(|(owner, prefixes)| {
            let has_peer = has_peer.contains(&owner);
            prefixes.iter().map(move |prefix| (*prefix, Some(owner), has_peer))
        });
        let lost = lost_blocks.iter().map(|prefix| (*prefix, None, false));
        let mut all: Vec<_> = kept.chain(lost).collect();
        all.sort_unstable();
        Self(all)
    }

    /// The prefix of `owner`, or the rest of it if something inside has no peer: that would go to the owner of the prefix
    /// around it.
    fn allowed(&self, prefix: IpNet, owner: usize) -> Vec<IpNet> {
        let first = self.0.partition_point(|(other, ..)| *other <= prefix);
        let inside = || self.0.iter().skip(first).take_while(|(other, ..)| prefix.contains(other));
        if inside().all(|(_, _, has_peer)| *has_peer) {
            return vec![prefix];
        }
        let holes = inside().filter(|(_, holder, _)| *holder != Some(owner)).map(|(other, ..)| other);
        prefixes::without(prefix, &holes.collect())
    }
}

/// Members whose peers carry the prefixes of each member: its own, an entry node's or a gateway's.
pub(crate) struct Carriers {
    pub(crate) gateways: Gateways,
    /// Members for which each member is sent packets, by its index.
    sent: BTreeMap<usize, Vec<usize>>,
    /// Members for which each member may send besides, by its index.
    accepted: BTreeMap<usize, Vec<usize>>,
}

impl Carriers {
    pub(crate) fn new(has_peer: &BTreeSet<usize>, entry_nodes: &EntryNodes, gateways: Gateways) -> Self {
        let mut sent: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for owner in has_peer {
            let node =
                if entry_nodes.is_elsewhere(*owner) { entry_nodes.elsewhere(*owner) } else { Some(*owner) };
            if let Some(node) = node {
                sent.entry(gateways.in_use(node)).or_default().push(*owner);
            }
        }
        let behind_entry = |node: usize| entry_nodes.carried_by(node).chain([node]);
        let others = gateways.others().into_iter();
        let accepted = others
            .map(|(gateway, members)| (gateway, members.into_iter().flat_map(behind_entry).collect()))
            .collect();
        Self { gateways, sent, accepted }
    }

    /// Whether none of the members of a key is reached by its own tunnel.
    fn are_behind(&self, owners: &[usize]) -> bool {
        owners.iter().all(|owner| self.gateways.is_behind(*owner))
    }
}

pub(crate) fn peer_plan(
    ranked: &[&Member],
    owned: &[Vec<IpNet>],
    owners: &[usize],
    holders: &Holders,
    policy: &Policy,
    entry_nodes: &EntryNodes,
    carriers: &Carriers,
) -> Option<PeerPlan> {
    let has_prefixes = |owner: &usize| owned.get(*owner).is_some_and(|owned| !owned.is_empty());
    let entry = owners.iter().find_map(|owner| entry_nodes.role(*owner));
    let is_elsewhere = owners.iter().all(|owner| entry_nodes.is_elsewhere(*owner));
    if is_elsewhere && !(entry.is_some() && owners.iter().any(has_prefixes)) || carriers.are_behind(owners) {
        return None;
    }
    let prefixes = |by_carrier: &BTreeMap<usize, Vec<usize>>| {
        let members = owners.iter().filter_map(|owner| by_carrier.get(owner)).flatten();
        let kept = members.flat_map(|owner| {
            owned.get(*owner).into_iter().flatten().flat_map(|prefix| holders.allowed(*prefix, *owner))
        });
        let mut prefixes: Vec<IpNet> = kept.collect();
        prefixes.sort_unstable();
        prefixes.dedup();
        prefixes
    };
    let first = owners.first().and_then(|owner| ranked.get(*owner));
    let keepalive = first.and_then(|member| member.keepalive.interval).unwrap_or(policy.keepalive);
    Some(PeerPlan {
        members: owners.iter().map(|owner| name(ranked, *owner)).collect(),
        allowed_ips: prefixes(&carriers.sent),
        accepted_ips: prefixes(&carriers.accepted),
        // A node that waits for the peer to call must not call it.
        keepalive: if is_elsewhere { 0 } else { keepalive },
        entry,
    })
}

pub(crate) fn name(ranked: &[&Member], owner: usize) -> String {
    ranked.get(owner).map(|member| member.name.clone()).unwrap_or_default()
}

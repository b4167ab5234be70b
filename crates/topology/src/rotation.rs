//! Members that announce a key before they use it.
//!
//! Until it is used, the announced key is a peer without prefixes. Once it has completed a handshake with this node
//! ([`Policy::completed`]), the member is followed to it at once, whether it has published that or not: only the holder of the private
//! key can complete one. A key that two members announce is followed for both, as one that both publish is one peer: a copy takes
//! nothing from its owner. One that another member has now is ignored.

use std::collections::BTreeMap;
use std::sync::Arc;

use fairlead_keys::PublicKey;

use crate::member::Member;
use crate::peer::PeerPlan;
use crate::policy::Policy;
use crate::problem::Problem;

/// A key that a member announces and that is not followed yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NextKey {
    /// The key of its peer now.
    pub current: PublicKey,
    /// Prefixes that it will be sent for: those of the peer with the current key.
    pub allowed_ips: Vec<ipnet::IpNet>,
}

/// The members that announce each key, by their positions. Takes `O(n log n)`.
pub(crate) struct Announced(BTreeMap<PublicKey, Vec<usize>>);

impl Announced {
    /// This node's own next key is no peer.
    pub(crate) fn new(members: &[&Member], policy: &Policy, problems: &mut Vec<Problem>) -> Self {
        let mut announced: BTreeMap<PublicKey, Vec<usize>> = BTreeMap::new();
        if members.iter().all(|member| member.next_key.is_none()) {
            return Self(announced);
        }
        let current: BTreeMap<PublicKey, &str> =
            members.iter().filter_map(|member| Some((member.public_key?, member.name.as_str()))).collect();
        for (position, member) in members.iter().enumerate() {
            let (Some(next), Some(own)) = (member.next_key, member.public_key) else { continue };
            if member.name == policy.own || next == own || next.0 == [0; 32] {
                continue;
            }
            match current.get(&next) {
                Some(other) => {
                    problems
                        .push(Problem::NextKeyTaken { node: member.name.clone(), other: (*other).into() });
                }
                None => announced.entry(next).or_default().push(position),
            }
        }
        Self(announced)
    }

    /// The members that use their next keys already, with these, by their positions.
    pub(crate) fn followed(&self, members: &[&Member], policy: &Policy) -> BTreeMap<usize, Member> {
        let completed = self.0.iter().filter(|(next, _)| policy.completed.contains(*next));
        let positions = completed.flat_map(|(next, positions)| positions.iter().map(move |at| (*next, *at)));
        let followed = |(next, at): (PublicKey, usize)| {
            let member = Member::clone(members.get(at)?);
            Some((at, Member { public_key: Some(next), next_key: None, ..member }))
        };
        positions.filter_map(followed).collect()
    }

    /// The keys to prepare: of members that have a peer.
    pub(crate) fn prepared(
        &self,
        members: &[&Member],
        peers: &BTreeMap<PublicKey, Arc<PeerPlan>>,
        policy: &Policy,
    ) -> BTreeMap<PublicKey, NextKey> {
        let waiting = self.0.iter().filter(|(next, _)| !policy.completed.contains(*next));
        let prepared = waiting.filter_map(|(next, positions)| {
            let current = positions.iter().filter_map(|position| members.get(*position)?.public_key);
            let with_peer = current.filter_map(|key| Some((key, &**peers.get(&key)?)));
            let mut all: Vec<(PublicKey, &PeerPlan)> = with_peer.collect();
            all.dedup_by_key(|(key, _)| *key);
            let (current, _) = *all.first()?;
            let mut allowed_ips: Vec<_> = all.iter().flat_map(|(_, peer)| peer.allowed_ips.clone()).collect();
            allowed_ips.sort_unstable();
            allowed_ips.dedup();
            Some((*next, NextKey { current, allowed_ips }))
        });
        prepared.collect()
    }
}

#[cfg(test)]
mod tests;

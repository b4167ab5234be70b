//! Blocks that a member released, while packets to pods that had been there may still be under way: other nodes hear of it later, and clients of
//! a pod that ended go on for a while.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use fairlead_topology::Member;
use ipnet::IpNet;

/// Most blocks that are remembered: those released last.
const MAX_RELEASED: usize = 4096;

/// Blocks without a member, with the times until which they are guarded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReleasedBlocks(BTreeMap<IpNet, Instant>);

impl ReleasedBlocks {
    /// Blocks that an earlier run of this program remembered.
    pub fn restored(until: BTreeMap<IpNet, Instant>) -> Self {
        Self(until)
    }

    /// Blocks, with the times until which they are guarded.
    pub fn iter(&self) -> impl Iterator<Item = (&IpNet, Instant)> {
        self.0.iter().map(|(block, until)| (block, *until))
    }

    /// Adds the blocks of the `previous` members that none of the `members` has, to be guarded `until` then, and forgets those that one has again.
    pub(super) fn follow(
        &mut self,
        previous: &[Arc<Member>],
        members: &[Member],
        until: Instant,
        now: Instant,
    ) {
        let current: BTreeMap<&str, &[IpNet]> =
            members.iter().map(|member| (member.name.as_str(), member.blocks.as_slice())).collect();
        let of = |name: &str| current.get(name).copied().unwrap_or_default();
        let changed = previous.iter().filter(|member| member.blocks != of(&member.name));
        let lost: Vec<IpNet> = changed
            .flat_map(|member| member.blocks.iter().filter(|block| !of(&member.name).contains(block)))
            .copied()
            .collect();
        if lost.is_empty() && self.0.is_empty() {
            return;
        }
        let held: BTreeSet<&IpNet> = members.iter().flat_map(|member| &member.blocks).collect();
        for block in lost {
            self.0.insert(block, until);
        }
        self.0.retain(|block, until| *until > now && !held.contains(block));
        while self.0.len() > MAX_RELEASED {
            let oldest = self.0.iter().min_by_key(|(_, until)| **until).map(|(block, _)| *block);
            let Some(oldest) = oldest else { break };
            self.0.remove(&oldest);
        }
    }
}

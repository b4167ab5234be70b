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

    /// Blocks that are not inside of one of the `excluded` prefixes, which the mesh does not carry, with the times until which they are guarded.
    pub fn outside(&self, excluded: &[IpNet]) -> Vec<(IpNet, Instant)> {
        let is_excluded = |block: &IpNet| excluded.iter().any(|prefix| prefix.contains(block));
        let all = self.0.iter().map(|(block, until)| (*block, *until));
        all.filter(|(block, _)| !is_excluded(block)).collect()
    }

    /// Time at which the first of them is guarded no more; `None` without any.
    pub(super) fn ends_at(&self) -> Option<Instant> {
        self.0.values().min().copied()
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
        let mut changed = previous.iter().filter(|member| member.blocks != of(&member.name)).peekable();
        if changed.peek().is_none() && self.0.is_empty() {
            return;
        }
        let held: BTreeSet<&IpNet> = members.iter().flat_map(|member| &member.blocks).collect();
        let lost = changed.flat_map(|member| &member.blocks).filter(|block| !held.contains(*block));
        self.0.extend(lost.map(|block| (*block, until)));
        self.0.retain(|block, until| *until > now && !held.contains(block));
        self.forget_oldest();
    }

    fn forget_oldest(&mut self) {
        let excess = self.0.len().saturating_sub(MAX_RELEASED);
        if excess == 0 {
            return;
        }
        let mut oldest: Vec<(Instant, IpNet)> =
            self.0.iter().map(|(block, until)| (*until, *block)).collect();
        oldest.sort_unstable();
        for (_, block) in oldest.iter().take(excess) {
            self.0.remove(block);
        }
    }
}

//! All AddressBlocks, indexed for the controller's decisions: one request costs about the same, however many there are.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use fairlead_address::{DualStackNets, Interval, PrefixSet};
use ipnet::IpNet;

use crate::grant::ExistingBlock;
use crate::pool::Pool;

/// The blocks of all pools by name, with what is needed to find a free one.
#[derive(Debug, Clone, Default)]
pub struct BlockIndex {
    blocks: HashMap<String, ExistingBlock>,
    /// Names by UID of the request.
    answers: HashMap<String, String>,
    /// Names by prefix: those of two blocks made by hand can be the same.
    prefixes: BTreeMap<IpNet, BTreeSet<String>>,
    /// Prefix lengths that blocks have had: whether of IPv6, and the length.
    lengths: BTreeSet<(bool, u8)>,
    pools: HashMap<String, Numbers>,
    /// Grows with every block that goes.
    clock: u64,
}

/// Numbers of one pool.
#[derive(Debug, Clone, Default)]
struct Numbers {
    /// Number of blocks that have each index: two blocks made by hand can have the same.
    allocated: BTreeMap<u32, usize>,
    /// All numbers below are allocated or were freed.
    next: u32,
    /// Freed numbers, by time.
    freed: BTreeMap<u64, u32>,
    /// The reverse of `freed`.
    freed_at: HashMap<u32, u64>,
    /// Number of blocks of each node, by name; nodes without one are left out.
    held: HashMap<String, u32>,
}

impl Numbers {
    fn insert(&mut self, index: u32, node: &str) {
        let allocated = self.allocated.entry(index).or_default();
        *allocated = allocated.saturating_add(1);
        let held = self.held.entry(node.to_owned()).or_default();
        *held = held.saturating_add(1);
        if let Some(time) = self.freed_at.remove(&index) {
            self.freed.remove(&time);
        }
        while self.is_passed(self.next) {
            self.next = self.next.saturating_add(1);
        }
    }

    fn remove(&mut self, index: u32, node: &str, time: u64) {
        if let Some(held) = self.held.get_mut(node) {
            *held = held.saturating_sub(1);
            if *held == 0 {
                self.held.remove(node);
            }
        }
        let Some(count) = self.allocated.get_mut(&index) else { return };
        *count = count.saturating_sub(1);
        if *count == 0 {
            self.allocated.remove(&index);
            self.freed.insert(time, index);
            self.freed_at.insert(index, time);
        }
    }

    fn is_passed(&self, index: u32) -> bool {
        index != u32::MAX && (self.allocated.contains_key(&index) || self.freed_at.contains_key(&index))
    }
}

impl BlockIndex {
    /// Adds a block, or replaces the one of its name.
    pub fn insert(&mut self, block: ExistingBlock) {
        if self.blocks.get(&block.name) == Some(&block) {
            return;
        }
        let present = self.blocks.get(&block.name);
        let moves = present.is_none_or(|present| {
            (&present.pool, present.index, &present.node, present.nets)
                != (&block.pool, block.index, &block.node, block.nets)
        });
        if moves {
            self.remove(&block.name);
            self.pools.entry(block.pool.clone()).or_default().insert(block.index, &block.node);
            for net in block.nets.iter() {
                self.prefixes.entry(net).or_default().insert(block.name.clone());
                self.lengths.insert(length(net));
            }
        } else if let Some(uid) = present.and_then(|present| present.request.as_ref()) {
            self.answers.remove(uid);
        }
        if let Some(uid) = block.request.as_ref().filter(|_| !block.terminating) {
            self.answers.insert(uid.clone(), block.name.clone());
        }
        self.blocks.insert(block.name.clone(), block);
    }

    /// Removes a block: its number was freed.
    pub fn remove(&mut self, name: &str) {
        let Some(block) = self.blocks.remove(name) else { return };
        if let Some(uid) = block.request.filter(|uid| self.answers.get(uid).is_some_and(|of| of == name)) {
            self.answers.remove(&uid);
        }
        for net in block.nets.iter() {
            if let Some(names) = self.prefixes.get_mut(&net) {
                names.remove(name);
                if names.is_empty() {
                    self.prefixes.remove(&net);
                }
            }
        }
        self.clock = self.clock.saturating_add(1);
        if let Some(numbers) = self.pools.get_mut(&block.pool) {
            numbers.remove(block.index, &block.node, self.clock);
        }
    }

    /// Makes it contain exactly these blocks.
    pub fn replace(&mut self, blocks: impl IntoIterator<Item = ExistingBlock>) {
        let mut gone: BTreeSet<String> = self.blocks.keys().cloned().collect();
        for block in blocks {
            gone.remove(&block.name);
            self.insert(block);
        }
        gone.iter().for_each(|name| self.remove(name));
    }

    /// The block of this name.
    pub fn get(&self, name: &str) -> Option<&ExistingBlock> {
        self.blocks.get(name)
    }

    /// Name of the block that answers the request with this UID.
    pub(crate) fn answer_to(&self, uid: &str) -> Option<&str> {
        self.answers.get(uid).filter(|_| !uid.is_empty()).map(String::as_str)
    }

    /// Number of blocks of a pool that a node has.
    pub fn held(&self, pool: &str, node: &str) -> u32 {
        self.pools.get(pool).and_then(|numbers| numbers.held.get(node)).copied().unwrap_or_default()
    }

    /// Number of blocks of a pool by node; blocks without a node are under the empty name.
    pub fn holders(&self, pool: &str) -> impl Iterator<Item = (&str, u32)> {
        let held = self.pools.get(pool).into_iter().flat_map(|numbers| &numbers.held);
        held.map(|(node, count)| (node.as_str(), *count))
    }

    /// A block that shares addresses with these prefixes.
    pub(crate) fn overlapping(&self, nets: DualStackNets) -> Option<&ExistingBlock> {
        let name = nets.iter().find_map(|net| self.prefixes.get(&self.overlap(net)?)?.first())?;
        self.blocks.get(name)
    }

    /// A prefix that shares addresses with this one: inside it, or around it.
    fn overlap(&self, net: IpNet) -> Option<IpNet> {
        let first = IpNet::new(net.network(), 0).ok()?;
        let last = IpNet::new(net.broadcast(), net.max_prefix_len()).ok()?;
        let inside = || self.prefixes.range(first..=last).next().map(|(inside, _)| *inside);
        let around = || {
            let shorter = self.lengths.range((length(net).0, 0)..length(net));
            let prefixes =
                shorter.filter_map(|(_, length)| Some(IpNet::new(net.network(), *length).ok()?.trunc()));
            prefixes.into_iter().find(|around| self.prefixes.contains_key(around))
        };
        inside().or_else(around)
    }

    fn is_allocated(&self, pool: &Pool, index: u32) -> bool {
        let numbered =
            self.pools.get(pool.name()).is_some_and(|numbers| numbers.allocated.contains_key(&index));
        numbered || self.blocks.contains_key(&pool.block_name(index))
    }

    /// A number of a free block: the lowest that was never allocated, else the one freed longest ago. `taken` are
    /// addresses that the pool must not grant.
    pub(crate) fn first_free(&self, pool: &Pool, taken: &PrefixSet) -> Option<u32> {
        let numbers = self.pools.get(pool.name());
        let was_freed = |index: u32| numbers.is_some_and(|numbers| numbers.freed_at.contains_key(&index));
        let last_taken = |net: IpNet| {
            let in_block = self.overlap(net).map(|overlap| Interval::from(overlap).last);
            in_block.max(taken.overlapping(net).map(|interval| interval.last))
        };
        let fresh = pool.first_free(
            numbers.map_or(0, |numbers| numbers.next),
            |index| was_freed(index) || self.is_allocated(pool, index),
            last_taken,
        );
        let is_free = |index: &u32| {
            let clear = |nets: DualStackNets| nets.iter().all(|net| last_taken(net).is_none());
            !self.is_allocated(pool, *index) && pool.block(*index).is_some_and(clear)
        };
        fresh.or_else(|| numbers?.freed.values().copied().find(is_free))
    }

    /// The lowest number without a block, whatever its addresses are.
    pub(crate) fn first_unallocated(&self, pool: &Pool) -> Option<u32> {
        let numbers = self.pools.get(pool.name());
        let freed = numbers.and_then(|numbers| {
            let freed = numbers.freed_at.keys().copied();
            freed.filter(|index| !self.is_allocated(pool, *index) && pool.block(*index).is_some()).min()
        });
        let next = numbers.map_or(0, |numbers| numbers.next);
        freed.or_else(|| pool.first_free(next, |index| self.is_allocated(pool, index), |_| None))
    }
}

impl FromIterator<ExistingBlock> for BlockIndex {
    fn from_iter<I: IntoIterator<Item = ExistingBlock>>(blocks: I) -> Self {
        let mut index = Self::default();
        blocks.into_iter().for_each(|block| index.insert(block));
        index
    }
}

fn length(net: IpNet) -> (bool, u8) {
    (matches!(net, IpNet::V6(_)), net.prefix_len())
}

#[cfg(test)]
mod tests;

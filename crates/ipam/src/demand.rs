//! Number of block requests that a node has under way for one pool.
//!
//! One request after the other would make a hundred pods that start together wait for four answers in a row. Too many
//! would take blocks that no pod needs, and flood the controller.

use std::collections::BTreeMap;

/// Requests of one pool that a node may have under way together.
pub const MAX_REQUESTS: usize = 4;

/// Number of blocks that give each of `waiting` pods an address, with `block_size` addresses in a block; at most
/// [`MAX_REQUESTS`].
pub fn blocks_needed(waiting: usize, block_size: usize) -> usize {
    waiting.div_ceil(block_size.max(1)).min(MAX_REQUESTS)
}

/// Number of requests under way, by pool; pools without one are left out.
#[derive(Debug, Clone, Default)]
pub struct Demand(BTreeMap<String, usize>);

impl Demand {
    /// Begins one more request, unless as many as `needed` are under way, or as many as may be.
    pub fn begin(&mut self, pool: &str, needed: usize) -> bool {
        let under_way = self.0.entry(pool.to_owned()).or_default();
        let begins = *under_way < needed.min(MAX_REQUESTS);
        *under_way = under_way.saturating_add(begins.into());
        if *under_way == 0 {
            self.0.remove(pool);
        }
        begins
    }

    /// Ends a request, whatever came of it, and says whether no other of its pool is under way.
    pub fn end(&mut self, pool: &str) -> bool {
        let Some(under_way) = self.0.get_mut(pool) else { return true };
        *under_way = under_way.saturating_sub(1);
        let last = *under_way == 0;
        if last {
            self.0.remove(pool);
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn begin_all(demand: &mut Demand, pool: &str, needed: usize) -> usize {
        std::iter::from_fn(|| demand.begin(pool, needed).then_some(())).count()
    }

    #[test]
    fn as_many_requests_are_under_way_as_are_needed_and_allowed() {
        let mut demand = Demand::default();
        assert_eq!(begin_all(&mut demand, "a", 1), 1);
        assert_eq!(begin_all(&mut demand, "a", 1), 0);
        assert_eq!(begin_all(&mut demand, "a", 3), 2);
        assert_eq!(begin_all(&mut demand, "b", 9), MAX_REQUESTS);
        assert!(!demand.end("a"), "two more are under way");
        assert_eq!(begin_all(&mut demand, "a", 3), 1);
        assert_eq!(begin_all(&mut demand, "a", 0), 0);
        assert!(!demand.end("a") && !demand.end("a") && demand.end("a") && demand.end("a"));
    }

    #[test]
    fn a_hundred_pods_need_four_blocks_of_thirty_two() {
        assert_eq!(blocks_needed(100, 32), 4);
        assert_eq!(blocks_needed(32, 32), 1);
        assert_eq!(blocks_needed(33, 32), 2);
        assert_eq!(blocks_needed(1, 1), 1);
        assert_eq!(blocks_needed(0, 32), 0);
        assert_eq!(blocks_needed(usize::MAX, 0), MAX_REQUESTS);
    }

    proptest! {
        /// Property: the requested blocks are enough, and one less would not be, unless the limit cuts them.
        #[test]
        fn the_needed_blocks_are_enough_and_no_more(waiting in 0..10_000usize, bits in 0..8u32) {
            let size = 1usize << bits;
            let needed = blocks_needed(waiting, size);
            prop_assert!(needed <= MAX_REQUESTS);
            prop_assert!(needed == MAX_REQUESTS || needed * size >= waiting);
            prop_assert!(needed == 0 || (needed - 1) * size < waiting);
        }
    }
}

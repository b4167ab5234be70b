//! How many blocks of a pool a node requests at the same time.
//!
//! One request after the other would make a hundred pods that start together wait for four answers in a row. Too many
//! would take blocks that no pod needs, and flood the controller.

use std::collections::{BTreeMap, BTreeSet};

/// Requests of one pool that a node may have under way together.
pub const MAX_REQUESTS: usize = 4;

/// How many blocks have to come so that each of `waiting` pods gets an address, when one has `block_size` of them:
/// never more than [`MAX_REQUESTS`].
pub fn blocks_needed(waiting: usize, block_size: usize) -> usize {
    waiting.div_ceil(block_size.max(1)).min(MAX_REQUESTS)
}

/// Which requests of each pool are under way, by number.
#[derive(Debug, Clone, Default)]
pub struct Demand(BTreeMap<String, BTreeSet<usize>>);

impl Demand {
    /// Begins one more request and returns the lowest free number, unless as many requests as `needed` are under way, or as
    /// many as may be.
    pub fn begin(&mut self, pool: &str, needed: usize) -> Option<usize> {
        let under_way = self.0.get(pool);
        if under_way.map_or(0, BTreeSet::len) >= needed {
            return None;
        }
        let free = |number: &usize| under_way.is_none_or(|numbers| !numbers.contains(number));
        let number = (0..MAX_REQUESTS).find(free)?;
        self.0.entry(pool.to_owned()).or_default().insert(number);
        Some(number)
    }

    /// Ends a request, whatever came of it, and says whether no other of its pool is under way.
    pub fn end(&mut self, pool: &str, number: usize) -> bool {
        let Some(numbers) = self.0.get_mut(pool) else { return true };
        numbers.remove(&number);
        let last = numbers.is_empty();
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

    fn begin_all(demand: &mut Demand, pool: &str, needed: usize) -> Vec<usize> {
        std::iter::from_fn(|| demand.begin(pool, needed)).collect()
    }

    #[test]
    fn as_many_requests_are_under_way_as_are_needed_and_allowed() {
        let mut demand = Demand::default();
        assert_eq!(begin_all(&mut demand, "a", 1), [0]);
        assert!(begin_all(&mut demand, "a", 1).is_empty());
        assert_eq!(begin_all(&mut demand, "a", 3), [1, 2]);
        assert_eq!(begin_all(&mut demand, "b", 9), [0, 1, 2, 3]);
        assert!(!demand.end("a", 1), "two more are under way");
        assert_eq!(begin_all(&mut demand, "a", 3), [1]);
        assert!(begin_all(&mut demand, "a", 0).is_empty());
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
        /// What is requested is enough, and one less would not be, unless the limit says so.
        #[test]
        fn the_needed_blocks_are_enough_and_no_more(waiting in 0..10_000usize, bits in 0..8u32) {
            let size = 1usize << bits;
            let needed = blocks_needed(waiting, size);
            prop_assert!(needed <= MAX_REQUESTS);
            prop_assert!(needed == MAX_REQUESTS || needed * size >= waiting);
            prop_assert!(needed == 0 || (needed - 1) * size < waiting);
        }

        /// Whatever comes and goes, no number is used twice at once, and no pool has more than it may.
        #[test]
        fn numbers_are_never_used_twice(steps in prop::collection::vec((any::<bool>(), "[ab]", 0..6usize), 0..60)) {
            let (mut demand, mut used) = (Demand::default(), BTreeSet::new());
            for (begins, pool, figure) in steps {
                if begins {
                    if let Some(number) = demand.begin(&pool, figure) {
                        prop_assert!(used.insert((pool.clone(), number)));
                    }
                    let of_pool = used.iter().filter(|(its, _)| *its == pool).count();
                    prop_assert!(of_pool <= MAX_REQUESTS);
                    prop_assert!(of_pool >= figure.min(1));
                } else {
                    let last = demand.end(&pool, figure);
                    used.remove(&(pool.clone(), figure));
                    prop_assert_eq!(last, !used.iter().any(|(its, _)| *its == pool));
                }
            }
        }
    }
}

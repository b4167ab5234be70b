//! How many blocks of a pool a node asks for at the same time.
//!
//! One request after the other would make a hundred pods that start together wait for four answers in a row. Too many
//! would take blocks that nobody needs, and flood the controller.

use std::collections::{BTreeMap, BTreeSet};

/// Requests of one pool that a node may have under way together.
pub const REQUESTS_AT_ONCE: usize = 4;

/// How many blocks have to come so that each of `waiting` pods gets an address, when one has `block_size` of them:
/// never more than [`REQUESTS_AT_ONCE`].
pub fn blocks_wanted(waiting: usize, block_size: usize) -> usize {
    waiting.div_ceil(block_size.max(1)).min(REQUESTS_AT_ONCE)
}

/// Which requests of each pool are under way, by number.
#[derive(Debug, Clone, Default)]
pub struct Demand(BTreeMap<String, BTreeSet<usize>>);

impl Demand {
    /// Begins one more request: the lowest free number, unless as many blocks as are `wanted` are on their way, or as
    /// many as may be.
    pub fn begin(&mut self, pool: &str, wanted: usize) -> Option<usize> {
        let under_way = self.0.get(pool);
        if under_way.map_or(0, BTreeSet::len) >= wanted {
            return None;
        }
        let free = |number: &usize| under_way.is_none_or(|numbers| !numbers.contains(number));
        let number = (0..REQUESTS_AT_ONCE).find(free)?;
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

    fn begin_all(demand: &mut Demand, pool: &str, wanted: usize) -> Vec<usize> {
        std::iter::from_fn(|| demand.begin(pool, wanted)).collect()
    }

    #[test]
    fn as_many_requests_are_under_way_as_are_wanted_and_allowed() {
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
    fn a_hundred_pods_want_four_blocks_of_thirty_two() {
        assert_eq!(blocks_wanted(100, 32), 4);
        assert_eq!(blocks_wanted(32, 32), 1);
        assert_eq!(blocks_wanted(33, 32), 2);
        assert_eq!(blocks_wanted(1, 1), 1);
        assert_eq!(blocks_wanted(0, 32), 0);
        assert_eq!(blocks_wanted(usize::MAX, 0), REQUESTS_AT_ONCE);
    }

    proptest! {
        /// What is asked for is enough, and one less would not be, unless the limit says so.
        #[test]
        fn what_is_wanted_is_enough_and_no_more(waiting in 0..10_000usize, bits in 0..8u32) {
            let size = 1usize << bits;
            let wanted = blocks_wanted(waiting, size);
            prop_assert!(wanted <= REQUESTS_AT_ONCE);
            prop_assert!(wanted == REQUESTS_AT_ONCE || wanted * size >= waiting);
            prop_assert!(wanted == 0 || (wanted - 1) * size < waiting);
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
                    prop_assert!(of_pool <= REQUESTS_AT_ONCE);
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

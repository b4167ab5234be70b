//! Differences between the desired entries of a map and those the kernel has.

use std::collections::BTreeMap;

/// Changes that make one set of entries another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Difference<K, V> {
    /// Entries that are missing or have another value.
    pub(crate) set: Vec<(K, V)>,
    /// Keys that should not be there.
    pub(crate) remove: Vec<K>,
}

impl<K, V> Difference<K, V> {
    /// Number of changes.
    pub(crate) fn len(&self) -> usize {
        self.set.len().saturating_add(self.remove.len())
    }
}

/// Compares what is there with what should be.
pub(crate) fn difference<K: Ord + Copy, V: PartialEq + Copy>(
    actual: &BTreeMap<K, V>,
    wanted: &BTreeMap<K, V>,
) -> Difference<K, V> {
    Difference {
        set: wanted
            .iter()
            .filter(|(key, value)| actual.get(key) != Some(value))
            .map(|(key, value)| (*key, *value))
            .collect(),
        remove: actual.keys().filter(|key| !wanted.contains_key(key)).copied().collect(),
    }
}

/// One change of the destinations that clients may send to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step<K> {
    Allow(K),
    Forbid(K),
    Remove(K),
}

/// The order in which allowed (`true`) and forbidden (`false`) prefixes are changed one by one, so that at no moment a
/// destination is allowed that is allowed neither before nor after: the first two groups only narrow what was allowed, and
/// after each change of the last two, nothing is allowed that will not be at the end.
pub(crate) fn steps<K: Ord + Copy>(actual: &BTreeMap<K, bool>, wanted: &BTreeMap<K, bool>) -> Vec<Step<K>> {
    let Difference { set, remove } = difference(actual, wanted);
    let removed = |allowed: bool| {
        remove.iter().filter(move |key| actual.get(key) == Some(&allowed)).map(|key| Step::Remove(*key))
    };
    let forbidden = set.iter().filter(|(_, allowed)| !allowed).map(|(key, _)| Step::Forbid(*key));
    let allowed = set.iter().filter(|(_, allowed)| *allowed).map(|(key, _)| Step::Allow(*key));
    forbidden.chain(removed(true)).chain(allowed).chain(removed(false)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Prefixes of addresses of four bits: length and leading bits.
    type Prefix = (u8, u8);

    fn is_allowed(prefixes: &BTreeMap<Prefix, bool>, address: u8) -> bool {
        let matching = prefixes.iter().filter(|((length, bits), _)| (address ^ bits) >> (4 - length) == 0);
        matching.max_by_key(|((length, _), _)| *length).is_some_and(|(_, allowed)| *allowed)
    }

    fn prefixes() -> impl Strategy<Value = BTreeMap<Prefix, bool>> {
        let prefix =
            (0..=4u8, 0..16u8).prop_map(|(length, bits)| (length, (bits >> (4 - length)) << (4 - length)));
        proptest::collection::btree_map(prefix, any::<bool>(), 0..8)
    }

    #[test]
    fn only_what_differs_is_changed() {
        let actual = BTreeMap::from([(1, 'a'), (2, 'b'), (3, 'c')]);
        let wanted = BTreeMap::from([(1, 'a'), (2, 'x'), (4, 'd')]);
        let found = difference(&actual, &wanted);
        assert_eq!(found, Difference { set: vec![(2, 'x'), (4, 'd')], remove: vec![3] });
        assert_eq!(found.len(), 3);
        assert_eq!(difference(&wanted, &wanted).len(), 0);
    }

    proptest! {
        #[test]
        fn applying_the_difference_gives_what_is_wanted(
            actual: BTreeMap<u8, u8>,
            wanted: BTreeMap<u8, u8>,
        ) {
            let Difference { set, remove } = difference(&actual, &wanted);
            let mut state = actual;
            state.extend(set);
            state.retain(|key, _| !remove.contains(key));
            prop_assert_eq!(state, wanted);
        }

        #[test]
        fn no_step_allows_what_is_allowed_neither_before_nor_after(actual in prefixes(), wanted in prefixes()) {
            let mut state = actual.clone();
            for step in steps(&actual, &wanted) {
                match step {
                    Step::Allow(key) => drop(state.insert(key, true)),
                    Step::Forbid(key) => drop(state.insert(key, false)),
                    Step::Remove(key) => drop(state.remove(&key)),
                }
                for address in 0..16 {
                    let may_be = is_allowed(&actual, address) || is_allowed(&wanted, address);
                    prop_assert!(may_be || !is_allowed(&state, address), "{address} after {step:?}");
                }
            }
            prop_assert_eq!(state, wanted);
        }
    }
}

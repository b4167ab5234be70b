//! Addresses that are still allocated although their pod is gone.
//!
//! A DEL can be lost: a runtime that is reinstalled, a machine that loses power between the deletion of the namespace
//! and the call. The pod's link is gone then, and no call will ever free its address.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::table::Key;

/// Keys that have an address but no link, and since when.
///
/// One observation proves nothing: an ADD allocates its address before it makes the link. So a key is reported only when
/// it had no link in two observations at least the grace apart and in every one in between. A key is a container, not a
/// pod's name, so a new pod of the same name is another key.
#[derive(Debug, Clone, Default)]
pub struct Suspects {
    since: BTreeMap<Key, Instant>,
}

impl Suspects {
    /// Returns the keys whose addresses have leaked: in `allocated` but not in `linked`, for at least `grace`.
    ///
    /// CNI operations may have run since the lists were made. Before freeing a key, the caller checks it once more while
    /// it holds the container's lock.
    pub fn observe<'a>(
        &mut self,
        now: Instant,
        grace: Duration,
        allocated: impl IntoIterator<Item = &'a Key>,
        linked: &BTreeSet<Key>,
    ) -> Vec<Key> {
        let before = std::mem::take(&mut self.since);
        for key in allocated.into_iter().filter(|key| !linked.contains(*key)) {
            self.since.insert(key.clone(), before.get(key).copied().unwrap_or(now));
        }
        let leaked = |(key, since): (&Key, &Instant)| {
            let long_ago = before.contains_key(key) && now.saturating_duration_since(*since) >= grace;
            long_ago.then(|| key.clone())
        };
        self.since.iter().filter_map(leaked).collect()
    }

    /// Number of suspected keys.
    pub fn len(&self) -> usize {
        self.since.len()
    }

    /// Whether no key is suspected.
    pub fn is_empty(&self) -> bool {
        self.since.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(60);

    fn key(id: &str) -> Key {
        Key { container_id: id.to_owned(), ifname: "eth0".to_owned() }
    }

    #[test]
    fn a_leak_is_reported_by_the_second_observation_after_the_grace() {
        let (mut suspects, start, gone) = (Suspects::default(), Instant::now(), key("gone"));
        let mut observe = |seconds| {
            suspects.observe(start + Duration::from_secs(seconds), GRACE, [&gone], &BTreeSet::new())
        };
        assert_eq!(observe(0), []);
        assert_eq!(observe(59), []);
        assert_eq!(observe(60), std::slice::from_ref(&gone));
        assert_eq!(observe(61), std::slice::from_ref(&gone), "until it is freed");
    }

    #[test]
    fn one_observation_is_never_enough_even_without_a_grace() {
        let gone = key("gone");
        assert_eq!(
            Suspects::default().observe(Instant::now(), Duration::ZERO, [&gone], &BTreeSet::new()),
            []
        );
    }

    #[test]
    fn a_link_seen_in_between_clears_the_suspicion() {
        let (mut suspects, start, slow) = (Suspects::default(), Instant::now(), key("slow"));
        let linked = BTreeSet::from([slow.clone()]);
        suspects.observe(start, GRACE, [&slow], &BTreeSet::new());
        assert_eq!(suspects.observe(start + GRACE / 2, GRACE, [&slow], &linked), []);
        assert!(suspects.is_empty());
        assert_eq!(suspects.observe(start + GRACE, GRACE, [&slow], &BTreeSet::new()), []);
    }

    #[test]
    fn a_released_key_is_forgotten_and_another_interface_is_another_suspect() {
        let (mut suspects, start, one) = (Suspects::default(), Instant::now(), key("one"));
        let second = Key { ifname: "net1".to_owned(), ..one.clone() };
        suspects.observe(start, GRACE, [&one], &BTreeSet::new());
        assert_eq!(suspects.observe(start + GRACE, GRACE, [&second], &BTreeSet::new()), []);
        assert_eq!(suspects.len(), 1);
    }
}

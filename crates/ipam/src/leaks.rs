//! Addresses that are in the book although their pod is gone.
//!
//! A DEL can be lost: a runtime that is reinstalled, a machine that loses power between the deletion of the namespace
//! and the call. The pod's link is gone then, and nobody will ever give its address back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::node::Key;

/// Keys that hold an address without having a link, and since when.
///
/// One look proves nothing: an ADD takes its address before it makes the link. So a key is reported only when it was
/// without a link at two looks at least the grace apart and at every look in between. It is a container, not a pod's
/// name, so a new pod of the same name is somebody else.
#[derive(Debug, Clone, Default)]
pub struct Suspects {
    since: BTreeMap<Key, Instant>,
}

impl Suspects {
    /// Takes a look and returns the keys whose addresses have leaked: in `held`, not in `linked`, and so for `grace`.
    ///
    /// Verbs may have run since the lists were made. Whoever frees a key looks once more while no verb of its
    /// container can run.
    pub fn look<'a>(
        &mut self,
        now: Instant,
        grace: Duration,
        held: impl IntoIterator<Item = &'a Key>,
        linked: &BTreeSet<Key>,
    ) -> Vec<Key> {
        let before = std::mem::take(&mut self.since);
        for key in held.into_iter().filter(|key| !linked.contains(*key)) {
            self.since.insert(key.clone(), before.get(key).copied().unwrap_or(now));
        }
        let leaked = |(key, since): (&Key, &Instant)| {
            let long_ago = before.contains_key(key) && now.saturating_duration_since(*since) >= grace;
            long_ago.then(|| key.clone())
        };
        self.since.iter().filter_map(leaked).collect()
    }

    /// How many keys are under suspicion.
    pub fn len(&self) -> usize {
        self.since.len()
    }

    /// Whether nobody is under suspicion.
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
    fn a_leak_is_reported_at_the_second_look_after_the_grace() {
        let (mut suspects, start, gone) = (Suspects::default(), Instant::now(), key("gone"));
        let mut look =
            |seconds| suspects.look(start + Duration::from_secs(seconds), GRACE, [&gone], &BTreeSet::new());
        assert_eq!(look(0), []);
        assert_eq!(look(59), []);
        assert_eq!(look(60), std::slice::from_ref(&gone));
        assert_eq!(look(61), std::slice::from_ref(&gone), "until it is freed");
    }

    #[test]
    fn one_look_is_never_enough_even_without_a_grace() {
        let gone = key("gone");
        assert_eq!(Suspects::default().look(Instant::now(), Duration::ZERO, [&gone], &BTreeSet::new()), []);
    }

    #[test]
    fn a_link_seen_in_between_clears_the_suspicion() {
        let (mut suspects, start, slow) = (Suspects::default(), Instant::now(), key("slow"));
        let linked = BTreeSet::from([slow.clone()]);
        suspects.look(start, GRACE, [&slow], &BTreeSet::new());
        assert_eq!(suspects.look(start + GRACE / 2, GRACE, [&slow], &linked), []);
        assert!(suspects.is_empty());
        assert_eq!(suspects.look(start + GRACE, GRACE, [&slow], &BTreeSet::new()), []);
    }

    #[test]
    fn a_released_key_is_forgotten_and_another_interface_is_another_suspect() {
        let (mut suspects, start, one) = (Suspects::default(), Instant::now(), key("one"));
        let second = Key { ifname: "net1".to_owned(), ..one.clone() };
        suspects.look(start, GRACE, [&one], &BTreeSet::new());
        assert_eq!(suspects.look(start + GRACE, GRACE, [&second], &BTreeSet::new()), []);
        assert_eq!(suspects.len(), 1);
    }
}

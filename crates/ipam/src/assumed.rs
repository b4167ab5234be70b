//! Blocks that are in use before the watch shows them, as kube-scheduler assumes pods it has just bound.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Blocks that were created or granted, by name, until the watch shows them. What the watch last showed is older than
/// they are: that a name is missing from it, or belongs to another object in it, says nothing about an assumed block.
#[derive(Debug, Clone)]
pub struct AssumedBlocks<T = ()>(BTreeMap<String, Assumed<T>>);

/// One assumed block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assumed<T> {
    /// The UID of its object; `None` while the API server has not answered the creation.
    pub uid: Option<String>,
    /// Time at which it was assumed.
    pub since: Instant,
    /// Details of the block, as far as the caller needs them.
    pub block: T,
}

impl<T> Default for AssumedBlocks<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> AssumedBlocks<T> {
    /// Assumes a block. Without a UID, any object of its name counts as this block.
    pub fn assume(&mut self, now: Instant, name: &str, uid: Option<String>, block: T) {
        self.0.insert(name.to_owned(), Assumed { uid, since: now, block });
    }

    /// Forgets the blocks that the watch shows, by name and UID: it is not behind them any more.
    pub fn observe<'a>(&mut self, shown: impl IntoIterator<Item = (&'a str, &'a str)>) {
        for (name, uid) in shown {
            let is_shown = |assumed: &Assumed<T>| assumed.uid.as_deref().is_none_or(|own| own == uid);
            if self.0.get(name).is_some_and(is_shown) {
                self.0.remove(name);
            }
        }
    }

    /// Forgets blocks that were assumed `lifetime` ago, and returns their names.
    pub fn expire(&mut self, now: Instant, lifetime: Duration) -> Vec<String> {
        let is_old = |assumed: &mut Assumed<T>| now.saturating_duration_since(assumed.since) >= lifetime;
        self.0.extract_if(.., |_, assumed| is_old(assumed)).map(|(name, _)| name).collect()
    }

    /// Forgets one block.
    pub fn forget(&mut self, name: &str) -> Option<Assumed<T>> {
        self.0.remove(name)
    }

    /// The assumed block of this name.
    pub fn get(&self, name: &str) -> Option<&Assumed<T>> {
        self.0.get(name)
    }

    /// The assumed block of this name.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut Assumed<T>> {
        self.0.get_mut(name)
    }

    /// All assumed blocks, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Assumed<T>)> {
        self.0.iter().map(|(name, assumed)| (name.as_str(), assumed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(assumed: &AssumedBlocks<u8>) -> Vec<&str> {
        assumed.iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn a_block_is_assumed_until_the_watch_shows_this_very_object() {
        let mut assumed = AssumedBlocks::default();
        assumed.assume(Instant::now(), "a-0", Some("new".to_owned()), 0);
        assumed.observe([("a-0", "old"), ("a-1", "new")]);
        assert_eq!(names(&assumed), ["a-0"]);
        assumed.observe([("a-0", "new")]);
        assert!(names(&assumed).is_empty());
    }

    #[test]
    fn without_a_uid_the_name_is_enough() {
        let mut assumed = AssumedBlocks::default();
        assumed.assume(Instant::now(), "a-0", None, 0);
        assumed.observe([("a-0", "any")]);
        assert!(names(&assumed).is_empty());
    }

    #[test]
    fn a_block_expires_by_its_age_or_is_forgotten_by_its_name() {
        let (mut assumed, start) = (AssumedBlocks::default(), Instant::now());
        let lifetime = Duration::from_secs(60);
        assumed.assume(start, "a-0", None, 7);
        assumed.assume(start + lifetime / 2, "a-1", None, 8);
        assert_eq!(assumed.expire(start + lifetime, lifetime), ["a-0"]);
        assert_eq!(names(&assumed), ["a-1"]);
        assert_eq!(assumed.forget("a-1").map(|assumed| assumed.block), Some(8));
        assert_eq!(assumed.forget("a-1"), None);
    }
}

//! All blocks that the API server has: those that the watch shows, and those just created.

use std::time::{Duration, Instant};

use fairlead_api::resources::AddressBlock;
use fairlead_ipam::{AssumedBlocks, BlockIndex, ExistingBlock};
use kube::ResourceExt;
use kube::runtime::watcher::Event;

/// Time for which a block is assumed to exist although the watch does not show it. The watch shows it within a second;
/// one that was deleted in between must not be assumed forever, and the API server refuses a name that is taken after
/// all.
const ASSUMED_LIFETIME: Duration = Duration::from_secs(60);

/// Kept current by the events of the watch, one by one: with 100,000 blocks, an answer must not begin with a copy of all.
#[derive(Debug, Default)]
pub(crate) struct KnownBlocks {
    index: BlockIndex,
    /// The list that is being received.
    listing: Vec<AddressBlock>,
    assumed: AssumedBlocks<ExistingBlock>,
    /// Time at which the last list was complete.
    listed: Option<Instant>,
}

impl KnownBlocks {
    /// Takes an event of the watch.
    pub(crate) fn observe(&mut self, now: Instant, event: &Event<AddressBlock>) {
        match event {
            Event::Init => self.listing.clear(),
            Event::InitApply(block) => self.listing.push(block.clone()),
            Event::InitDone => {
                let shown = std::mem::take(&mut self.listing);
                shown.iter().for_each(|block| self.show(block));
                let assumed = self.assumed.iter().map(|(_, assumed)| assumed.block.clone());
                self.index.replace(shown.iter().map(ExistingBlock::from).chain(assumed));
                self.listed = Some(now);
            }
            Event::Apply(block) => {
                self.show(block);
                if self.assumed.get(&block.name_any()).is_none() {
                    self.index.insert(block.into());
                }
            }
            // The deletion of an older block says nothing about one just created under its name.
            Event::Delete(block) => {
                if self.assumed.get(&block.name_any()).is_none() {
                    self.index.remove(&block.name_any());
                }
            }
        }
    }

    fn show(&mut self, block: &AddressBlock) {
        self.assumed
            .observe([(block.name_any().as_str(), block.metadata.uid.as_deref().unwrap_or_default())]);
    }

    /// All blocks, after those were forgotten that the watch should have shown long ago.
    pub(crate) fn current(&mut self, now: Instant) -> &BlockIndex {
        for name in self.assumed.expire(now, ASSUMED_LIFETIME) {
            self.index.remove(&name);
        }
        &self.index
    }

    /// Time at which the last list was complete.
    pub(crate) fn listed(&self) -> Option<Instant> {
        self.listed
    }

    /// A block is about to be created.
    pub(crate) fn assume(&mut self, now: Instant, block: ExistingBlock) {
        self.assumed.assume(now, &block.name, None, block.clone());
        self.index.insert(block);
    }

    /// A block was not created.
    pub(crate) fn forget(&mut self, name: &str) {
        if self.assumed.forget(name).is_some() {
            self.index.remove(name);
        }
    }

    /// A block of this name exists, but was not created for the request at hand.
    pub(crate) fn assume_of_another(&mut self, name: &str) {
        if let Some(assumed) = self.assumed.get_mut(name) {
            assumed.block.request = None;
            self.index.insert(assumed.block.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(pool: &str) -> AddressBlock {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "index": 0, "ipv4": "10.0.0.0/30",
            "metadata": { "name": "p1-0", "labels": { "coil.cybozu.com/pool": pool } },
        }))
        .unwrap()
    }

    fn pool(known: &mut KnownBlocks, now: Instant) -> Option<String> {
        known.current(now).get("p1-0").map(|block| block.pool.clone())
    }

    #[test]
    fn a_block_is_known_from_its_grant_and_then_as_the_watch_shows_it() {
        let (mut known, now) = (KnownBlocks::default(), Instant::now());
        known.assume(now, ExistingBlock::from(&block("assumed")));
        known.observe(now, &Event::Init);
        known.observe(now, &Event::InitDone);
        assert_eq!(known.listed(), Some(now));
        known.observe(now, &Event::Delete(block("older")));
        assert_eq!(pool(&mut known, now).as_deref(), Some("assumed"));
        known.observe(now, &Event::Apply(block("p1")));
        assert_eq!(pool(&mut known, now).as_deref(), Some("p1"));
        known.observe(now, &Event::Apply(block("changed")));
        assert_eq!(pool(&mut known, now).as_deref(), Some("changed"));
        known.observe(now, &Event::Delete(block("changed")));
        assert_eq!(pool(&mut known, now), None);
    }

    #[test]
    fn a_list_replaces_what_was_known() {
        let (mut known, now) = (KnownBlocks::default(), Instant::now());
        for event in [Event::Init, Event::InitApply(block("p1")), Event::InitDone] {
            known.observe(now, &event);
        }
        assert_eq!(pool(&mut known, now).as_deref(), Some("p1"));
        known.observe(now, &Event::Init);
        assert_eq!(pool(&mut known, now).as_deref(), Some("p1"), "until the list is complete");
        known.observe(now, &Event::InitDone);
        assert_eq!(pool(&mut known, now), None);
    }

    #[test]
    fn a_block_that_is_never_shown_is_forgotten() {
        let (mut known, now) = (KnownBlocks::default(), Instant::now());
        known.assume(now, ExistingBlock::from(&block("p1")));
        assert!(pool(&mut known, now + ASSUMED_LIFETIME / 2).is_some());
        assert_eq!(pool(&mut known, now + ASSUMED_LIFETIME), None);
    }
}

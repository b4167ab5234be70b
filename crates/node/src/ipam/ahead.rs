//! Blocks that were taken into use when they were granted, before the watch showed them.

use std::collections::BTreeMap;
use std::sync::Arc;

use fairlead_api::resources::AddressBlock;
use kube::ResourceExt;

/// Their UIDs, by name. What the watch last showed is older than they are: that one of them is not in it, or that
/// another of its name is, says nothing about it.
#[derive(Debug, Default)]
pub(super) struct Ahead(BTreeMap<String, String>);

impl Ahead {
    /// A block was granted.
    pub(super) fn enter(&mut self, block: &AddressBlock) {
        self.0.insert(block.name_any(), block.uid().unwrap_or_default());
    }

    /// The watch is no longer behind those that it shows.
    pub(super) fn see(&mut self, shown: &[Arc<AddressBlock>]) {
        for block in shown {
            if self.0.get(&block.name_any()) == Some(&block.uid().unwrap_or_default()) {
                self.0.remove(&block.name_any());
            }
        }
    }

    /// Whether the watch is behind this one.
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// A block is out of use.
    pub(super) fn leave(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// Name and UID of each.
    pub(super) fn list(&self) -> Vec<(String, String)> {
        self.0.iter().map(|(name, uid)| (name.clone(), uid.clone())).collect()
    }
}

//! Running pods whose addresses are not known: what they may have is given to no other pod.

use std::collections::{BTreeMap, BTreeSet};

use super::{AllocationTable, Block, Key};

/// Attachments without known addresses, and the blocks that cannot contain their addresses.
#[derive(Debug, Clone, Default)]
pub(super) struct UnclearAttachments {
    attachments: BTreeMap<Key, Unclear>,
    /// UIDs of blocks that were granted after the attachments were made.
    newer: BTreeSet<String>,
}

/// An attachment whose addresses are not known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unclear {
    /// Name of the pool that the addresses are from.
    pub pool: String,
    /// Reason why the addresses are not known.
    pub why: String,
}

impl UnclearAttachments {
    /// Whether the block may contain an address of an unclear attachment.
    pub(super) fn may_be_in(&self, block: &Block) -> bool {
        self.attachments.values().any(|unclear| unclear.pool == block.pool)
            && !self.newer.contains(&block.uid)
    }
}

impl AllocationTable {
    /// Records an attachment whose addresses are not known. Until it is released, blocks of its pool give no address to
    /// other pods and are not released, but for those of [`Self::mark_newer`].
    pub fn hold_back(&mut self, key: Key, unclear: Unclear) {
        self.unclear.attachments.insert(key, unclear);
    }

    /// A block that is granted now contains no address of a pod that runs already.
    pub fn mark_newer(&mut self, uid: &str) {
        if !self.unclear.attachments.is_empty() {
            self.unclear.newer.insert(uid.to_owned());
        }
    }

    /// Ends [`Self::hold_back`]; `false` if there was nothing to end.
    pub fn release_unclear(&mut self, key: &Key) -> bool {
        let was = self.unclear.attachments.remove(key).is_some();
        if self.unclear.attachments.is_empty() {
            self.unclear.newer.clear();
        }
        was
    }

    /// The known blocks that give addresses to new pods, by name.
    pub fn open_blocks(&self) -> impl Iterator<Item = &Block> {
        self.blocks.values().filter(|known| self.open(known)).map(|known| &known.block)
    }

    /// Attachments whose addresses are not known.
    pub fn unclear(&self) -> impl Iterator<Item = (&Key, &Unclear)> {
        self.unclear.attachments.iter()
    }
}

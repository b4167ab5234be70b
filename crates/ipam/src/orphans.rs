//! Blocks of deleted Nodes, and the time at which they may be freed.
//!
//! Pods run on without their Node object: an operator deletes it to register the kubelet anew, a cloud provider's
//! controller takes a machine that does not answer for a deleted one. Blocks that were freed then would be granted to
//! another node while the pods still use them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// A block that names a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct OwnedBlock<'a> {
    /// UID of the AddressBlock.
    pub uid: &'a str,
    /// Name of the Node that the block is for.
    pub node: &'a str,
    /// Whether it was granted for a BlockRequest, and not made by hand.
    pub granted: bool,
}

/// Time that a Node has to be absent before its blocks are freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Graces {
    /// A Node that may have existed while the block did.
    pub deleted: Duration,
    /// A Node that has not existed since the block was made by hand.
    pub never_existed: Duration,
}

/// Absent Nodes that blocks name, with the time since when each is absent.
#[derive(Debug, Clone, Default)]
pub struct Absences {
    /// Time since when each Node that a block names is absent, by name.
    since: BTreeMap<String, Instant>,
    /// Whether the Node of each block has never existed since the block was made, by UID of the block.
    blocks: BTreeMap<String, bool>,
    /// Whether anything was observed before: only later can a block be new.
    observed: bool,
}

impl Absences {
    /// Takes note of all blocks and Nodes, and returns the UIDs of the blocks to free.
    pub fn observe(
        &mut self,
        now: Instant,
        graces: Graces,
        blocks: &[OwnedBlock<'_>],
        exists: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let absent: BTreeSet<&str> =
            blocks.iter().map(|block| block.node).filter(|node| !exists(node)).collect();
        self.since.retain(|node, _| absent.contains(node.as_str()));
        for node in &absent {
            self.since.entry((*node).to_owned()).or_insert(now);
        }
        let before = std::mem::take(&mut self.blocks);
        for block in blocks {
            let is_new = self.observed && !block.granted;
            let orphan = before.get(block.uid).copied().unwrap_or(is_new) && absent.contains(block.node);
            self.blocks.insert(block.uid.to_owned(), orphan);
        }
        self.observed = true;
        let due = blocks.iter().filter(|block| self.due_at(graces, block).is_some_and(|due| due <= now));
        due.map(|block| block.uid.to_owned()).collect()
    }

    /// Time at which a block of an absent node is to be freed.
    fn due_at(&self, graces: Graces, block: &OwnedBlock<'_>) -> Option<Instant> {
        let since = self.since.get(block.node)?;
        let born_orphan = self.blocks.get(block.uid).copied().unwrap_or_default();
        since.checked_add(if born_orphan { graces.never_existed } else { graces.deleted })
    }

    /// Time at which the next block is to be freed.
    pub fn next_due(&self, now: Instant, graces: Graces, blocks: &[OwnedBlock<'_>]) -> Option<Instant> {
        blocks.iter().filter_map(|block| self.due_at(graces, block)).filter(|due| *due > now).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACES: Graces =
        Graces { deleted: Duration::from_secs(300), never_existed: Duration::from_secs(10) };

    const OLD: OwnedBlock<'static> = OwnedBlock { uid: "old", node: "n", granted: true };
    const NEW: OwnedBlock<'static> = OwnedBlock { uid: "new", node: "m", granted: false };

    #[test]
    fn a_block_is_freed_after_its_node_was_absent_all_the_time() {
        let (mut absences, start) = (Absences::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(absences.observe(start, GRACES, &[OLD], |_| true).is_empty());
        assert!(absences.observe(at(10), GRACES, &[OLD], |_| false).is_empty());
        assert_eq!(absences.next_due(at(10), GRACES, &[OLD]), Some(at(310)));
        // It registers again.
        assert!(absences.observe(at(300), GRACES, &[OLD], |_| true).is_empty());
        assert!(absences.observe(at(320), GRACES, &[OLD], |_| false).is_empty());
        assert!(absences.observe(at(619), GRACES, &[OLD], |_| false).is_empty());
        assert_eq!(absences.observe(at(620), GRACES, &[OLD], |_| false), ["old"]);
    }

    /// A leader that has just been elected has not seen what came before.
    #[test]
    fn the_first_list_tells_nothing_of_the_past() {
        let (mut absences, start) = (Absences::default(), Instant::now());
        assert!(absences.observe(start, GRACES, &[OLD], |_| false).is_empty());
        assert!(absences.observe(start + GRACES.never_existed, GRACES, &[OLD], |_| false).is_empty());
        assert_eq!(absences.observe(start + GRACES.deleted, GRACES, &[OLD], |_| false), ["old"]);
    }

    #[test]
    fn a_block_of_a_node_that_never_existed_is_freed_soon() {
        let (mut absences, start) = (Absences::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let none = |_: &str| false;
        absences.observe(start, GRACES, &[], none);
        assert!(absences.observe(at(1), GRACES, &[NEW], none).is_empty());
        assert_eq!(absences.next_due(at(1), GRACES, &[NEW]), Some(at(11)));
        assert_eq!(absences.observe(at(11), GRACES, &[NEW], none), ["new"]);
        // A node may ask for a block while its Node is being deleted.
        let granted = OwnedBlock { granted: true, uid: "granted", ..NEW };
        assert!(absences.observe(at(11), GRACES, &[granted], none).is_empty());
        assert_eq!(absences.next_due(at(11), GRACES, &[granted]), Some(at(301)));
        absences.observe(at(12), GRACES, &[], none);
        absences.observe(at(12), GRACES, &[NEW], none);
        // Once its Node has existed, the block may be in use.
        absences.observe(at(13), GRACES, &[NEW], |_| true);
        assert!(absences.observe(at(30), GRACES, &[NEW], none).is_empty());
        assert_eq!(absences.next_due(at(30), GRACES, &[NEW]), Some(at(330)));
    }
}

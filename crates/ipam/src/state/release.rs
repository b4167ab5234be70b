//! Release of blocks, and the meaning of the API server's answers for them.

use std::time::{Duration, Instant};

use super::NodeState;

/// The deletion of one block, exactly as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockDeletion {
    /// Name of the object.
    pub name: String,
    /// UID of the object: a precondition of the deletion.
    pub uid: String,
    /// Resource version of the object: a precondition of the deletion.
    pub version: String,
}

/// Answer of the API server to a deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeletionAnswer {
    /// The block is gone or, with finalizers, about to go.
    Accepted,
    /// The server refused before it changed anything.
    Refused,
    /// There was no answer, or one that leaves open whether the block exists.
    Unknown,
}

impl<W: Clone> NodeState<W> {
    /// Blocks that have been releasable for `grace`, and empty ones of cordoned pools at once. Each has to be read before
    /// [`Self::close_block`].
    pub fn due_releases(&mut self, now: Instant, grace: Duration) -> Vec<String> {
        let before = std::mem::take(&mut self.releasable_since);
        let mut due = Vec::new();
        for name in self.table.releasable_blocks() {
            let since = before.get(&name).copied().unwrap_or(now);
            let pool = self.table.block(&name).map(|block| block.pool());
            let drains = pool.is_some_and(|pool| self.table.is_cordoned(pool));
            if drains || now.saturating_duration_since(since) >= grace {
                due.push(name.clone());
            }
            self.releasable_since.insert(name, since);
        }
        due
    }

    /// Closes an empty block and returns the deletion to send. `present` is the object that the API server has, if it
    /// belongs to this node.
    ///
    /// `None` when a pod was quicker; also when the block is gone or replaced by another of its name: then it stays closed
    /// until the watch shows that.
    pub fn close_block(&mut self, name: &str, present: Option<BlockDeletion>) -> Option<BlockDeletion> {
        if !self.table.close_block(name) {
            return None;
        }
        present.filter(|present| self.is_block(name, &present.uid))
    }

    /// Takes note of the answer to a deletion, and says whether to remove the finalizer. Without an answer the block stays
    /// closed: another node may have its addresses by now.
    pub fn deletion_answered(&mut self, deletion: &BlockDeletion, answer: DeletionAnswer) -> bool {
        if answer == DeletionAnswer::Refused && self.is_block(&deletion.name, &deletion.uid) {
            self.table.reopen_block(&deletion.name);
            self.wake_where_free();
        }
        answer == DeletionAnswer::Accepted
    }
}

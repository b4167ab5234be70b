//! Which BlockRequests to make.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::NodeState;
use crate::demand::{Demand, blocks_needed};
use crate::grant::RefusalReason;
use crate::table::Block;

/// How long a failure counts for pods that need a block; then the controller is asked again.
pub const REFUSAL_LIFETIME: Duration = Duration::from_secs(3);

/// One BlockRequest to be made.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockDemand {
    /// The pool.
    pub pool: String,
    /// Its number among those of the pool: no other under way has it.
    pub number: usize,
    /// Whether the last one of this number was answered, so that it can be deleted without being read.
    pub replaces_answered: bool,
}

/// Why a request brought no block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestFailure {
    /// The controller's reason; `None` when it was not this controller that refused.
    pub reason: Option<RefusalReason>,
    /// In a sentence.
    pub message: String,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Requests {
    /// Pools whose demand has to be computed, with the addresses in one block.
    wanted: BTreeMap<String, usize>,
    under_way: Demand,
    /// Pools and numbers of the requests that were answered with a block.
    answered: BTreeSet<(String, usize)>,
    /// Pools of which a request failed while others were under way. Nothing more is requested of them until those have
    /// ended: otherwise requests that replace each other would keep the failure from the pods that wait.
    failing: BTreeMap<String, RequestFailure>,
    /// The latest failure of each pool.
    failed: BTreeMap<String, (Instant, RequestFailure)>,
}

impl Requests {
    pub(super) fn failure(&mut self, pool: &str, now: Instant) -> Option<RequestFailure> {
        self.failed.retain(|_, (at, _)| now.saturating_duration_since(*at) < REFUSAL_LIFETIME);
        self.failed.get(pool).map(|(_, failure)| failure.clone())
    }
}

impl<W: Clone> NodeState<W> {
    pub(super) fn request(&mut self, pool: &str, block_size: usize) {
        let size = self.requests.wanted.entry(pool.to_owned()).or_insert(block_size);
        *size = block_size.min(*size);
        self.effects.request = true;
    }

    /// The next request to make. Demand is computed when this is called, not when a pod began to wait: the block may
    /// have come in between.
    pub fn next_request(&mut self) -> Option<BlockDemand> {
        while let Some((pool, block_size)) = self.requests.wanted.pop_first() {
            let needed = blocks_needed(self.missing(&pool), block_size);
            if self.requests.failing.contains_key(&pool) {
                continue;
            }
            if let Some(number) = self.requests.under_way.begin(&pool, needed) {
                self.requests.wanted.insert(pool.clone(), block_size);
                let replaces_answered = self.requests.answered.contains(&(pool.clone(), number));
                return Some(BlockDemand { pool, number, replaces_answered });
            }
        }
        None
    }

    /// Pods that wait for a block beyond those for which an address is free by now; at least one while a spare block is
    /// wanted.
    fn missing(&self, pool: &str) -> usize {
        let waiting = self.waiting.values().filter(|waiter| waiter.pool == pool).count();
        let free = usize::try_from(self.table.free(pool)).unwrap_or(usize::MAX);
        waiting.saturating_sub(free).max(self.table.wants_spare_block(pool).into())
    }

    /// Ends a request. A granted block is used at once, before the watch shows it; `None` is one that is not this node's or
    /// not usable.
    pub fn end_request(
        &mut self,
        now: Instant,
        demand: &BlockDemand,
        outcome: Result<Option<Block>, RequestFailure>,
    ) {
        let BlockDemand { pool, number, .. } = demand;
        match outcome {
            Ok(block) => {
                self.requests.answered.insert((pool.clone(), *number));
                self.requests.failing.remove(pool);
                self.requests.failed.remove(pool);
                if let Some(block) = block {
                    self.assume_block(now, block);
                }
            }
            Err(failure) => {
                self.requests.answered.remove(&(pool.clone(), *number));
                self.requests.failing.insert(pool.clone(), failure);
            }
        }
        if self.requests.under_way.end(pool, *number)
            && let Some(failure) = self.requests.failing.remove(pool)
        {
            self.requests.failed.insert(pool.clone(), (now, failure));
        }
        self.wake(pool);
    }

    /// Uses a granted block before the watch shows it.
    pub fn assume_block(&mut self, now: Instant, block: Block) {
        self.assumed.assume(now, block.name(), Some(block.uid().to_owned()), ());
        self.table.upsert_block(block);
        self.wake_where_free();
    }
}

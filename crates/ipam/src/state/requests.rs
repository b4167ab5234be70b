//! BlockRequests that a node makes, and their failures.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fairlead_address::DualStackAddrs;

use super::NodeState;
use crate::demand::{Demand, blocks_needed};
use crate::grant::ClaimedBlock;
use crate::pool::Pool;
use crate::refusal::RefusalReason;
use crate::table::Block;

/// Time for which a failure is reported to pods that need a block; then the controller is asked again.
pub const REFUSAL_LIFETIME: Duration = Duration::from_secs(3);

/// Pause after a claim that brought no block.
pub const CLAIM_INTERVAL: Duration = Duration::from_secs(30);

/// One BlockRequest to be made.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockDemand {
    /// The pool.
    pub pool: String,
    /// The block that addresses in use are from and that the API server does not have; `None` for any.
    pub claim: Option<ClaimedBlock>,
}

/// Reason why a request brought no block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestFailure {
    /// The controller's reason; `None` when it was not this controller that refused.
    pub reason: Option<RefusalReason>,
    /// Explanation in a sentence.
    pub message: String,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Requests {
    /// Pools whose demand has to be computed, with the addresses in one block.
    wanted: BTreeMap<String, usize>,
    under_way: Demand,
    /// Claims: when each may be made again; `None` while it is under way.
    claims: BTreeMap<BlockDemand, Option<Instant>>,
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
            if self.requests.under_way.begin(&pool, needed) {
                self.requests.wanted.insert(pool.clone(), block_size);
                return Some(BlockDemand { pool, claim: None });
            }
        }
        None
    }

    /// The next claim to make: a block that addresses in use are from, although the API server does not have it. It was
    /// deleted by hand, or etcd was restored from a backup; the controller may grant it to another node at any time.
    ///
    /// None until the API server has listed the blocks.
    pub fn next_claim(&mut self, now: Instant, pool: impl Fn(&str) -> Option<Pool>) -> Option<BlockDemand> {
        let mut pools = BTreeMap::new();
        let claim = |(_, allocated): (&_, &crate::Allocated)| {
            let pool: &Option<Pool> =
                pools.entry(allocated.pool.clone()).or_insert_with(|| pool(&allocated.pool));
            let addresses = DualStackAddrs { ipv4: allocated.ipv4, ipv6: allocated.ipv6 };
            let (index, nets) = pool.as_ref()?.containing(addresses)?;
            Some(BlockDemand { pool: allocated.pool.clone(), claim: Some(ClaimedBlock { index, nets }) })
        };
        let claims: Vec<BlockDemand> = self.without_block().filter_map(claim).collect();
        self.requests.claims.retain(|claim, again| again.is_none() || claims.contains(claim));
        let is_due = |claim: &BlockDemand| match self.requests.claims.get(claim) {
            None => true,
            Some(again) => again.is_some_and(|again| again <= now),
        };
        let claim = claims.into_iter().find(is_due)?;
        self.requests.claims.insert(claim.clone(), None);
        Some(claim)
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
        let pool = &demand.pool;
        if demand.claim.is_some() {
            let again = outcome.is_err().then(|| now.checked_add(CLAIM_INTERVAL)).flatten();
            self.requests.claims.remove(demand);
            self.requests.claims.extend(again.map(|again| (demand.clone(), Some(again))));
            if let Ok(Some(block)) = outcome {
                self.assume_block(now, block);
            }
            return;
        }
        match outcome {
            Ok(block) => {
                self.requests.failing.remove(pool);
                self.requests.failed.remove(pool);
                if let Some(block) = block {
                    self.assume_block(now, block);
                }
            }
            Err(failure) => drop(self.requests.failing.insert(pool.clone(), failure)),
        }
        if self.requests.under_way.end(pool)
            && let Some(failure) = self.requests.failing.remove(pool)
        {
            self.requests.failed.insert(pool.clone(), (now, failure));
        }
        self.wake(pool);
    }

    /// Uses a granted block before the watch shows it.
    pub fn assume_block(&mut self, now: Instant, block: Block) {
        if self.blocks_known && !self.is_block(block.name(), block.uid()) {
            self.table.mark_newer(block.uid());
        }
        self.assumed.assume(now, block.name(), Some(block.uid().to_owned()), ());
        self.table.upsert_block(block);
        self.wake_where_free();
    }
}

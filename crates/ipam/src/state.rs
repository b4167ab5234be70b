//! Decisions of one node about its addresses: [`NodeState`].
//!
//! The node program keeps it behind one lock. It calls a method, applies the [`Effects`], and does the I/O that the
//! answer asks for; nothing is decided outside, and nothing waits inside. The model in `tests/model` drives the same
//! methods.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

mod error;
mod release;
mod requests;

pub use error::AllocationError;
pub use release::{BlockDeletion, DeletionAnswer};
pub use requests::{BlockDemand, CLAIM_INTERVAL, REFUSAL_LIFETIME, RequestFailure};

use self::requests::Requests;
use crate::assumed::AssumedBlocks;
use crate::check::Owner;
use crate::leaks::Suspects;
use crate::table::{AdoptError, Allocated, Allocation, AllocationTable, Answer, Block, Key, Unclear};

/// State of a pool as far as the node knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolInfo {
    /// The pool has a deletion timestamp.
    Deleting,
    /// `spec.disabled` is true.
    Disabled,
    /// The API server has no such pool.
    Missing,
    /// The API server did not answer.
    Unavailable,
    /// The pool may have blocks.
    Usable {
        /// Addresses in one block.
        block_size: usize,
    },
}

impl PoolInfo {
    /// Whether pods get nothing from it, whatever blocks this node has.
    pub fn is_cordoned(self) -> bool {
        matches!(self, Self::Deleting | Self::Disabled)
    }
}

/// The result of one attempt to allocate an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attempt {
    /// The key has these addresses.
    Allocated(Allocation),
    /// The key gets no address.
    Failed(AllocationError),
    /// No block has a free address, and nothing is known of the pool: read it and try again.
    ReadPool,
    /// A block is being requested: try again when woken.
    Wait,
}

/// Work for the caller of a method, due as soon as it has released the lock.
#[derive(Debug, Clone)]
pub struct Effects<W> {
    /// Waiters that try again.
    pub wake: Vec<W>,
    /// Whether [`NodeState::next_request`] or [`NodeState::next_claim`] may have a request.
    pub request: bool,
    /// Whether [`NodeState::due_releases`] may have a block that need not become older.
    pub release: bool,
    /// Whether [`AllocationTable::search_positions`] have changed.
    pub positions: bool,
}

impl<W> Default for Effects<W> {
    fn default() -> Self {
        Self { wake: Vec::new(), request: false, release: false, positions: false }
    }
}

/// A block as the watch shows it.
#[derive(Debug, Clone)]
pub struct ShownBlock<'a> {
    /// Name of the object.
    pub name: &'a str,
    /// UID of the object.
    pub uid: &'a str,
    /// The block, if it is this node's and usable.
    pub own: Option<Block>,
}

/// Addresses of one interface of one container, with their origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// The interface.
    pub key: Key,
    /// Addresses of the interface, and their pool.
    pub allocated: Allocated,
    /// The block of this node that they are from.
    pub block: Option<String>,
    /// The pod, if it was attached since the start of this program.
    pub owner: Option<Owner>,
}

#[derive(Debug, Clone)]
struct Waiter<W> {
    pool: String,
    waker: W,
}

/// Addresses, blocks, block requests and waiting pods of one node. `W` is what wakes a waiting pod.
#[derive(Debug, Clone)]
pub struct NodeState<W> {
    table: AllocationTable,
    assumed: AssumedBlocks,
    /// Reported to users; no decision depends on it. Only of keys that have an address.
    owners: BTreeMap<Key, Owner>,
    waiting: BTreeMap<Key, Waiter<W>>,
    requests: Requests,
    /// Whether the API server has listed the blocks since the start.
    blocks_known: bool,
    /// UIDs of blocks that the watch still shows although the API server does not have them.
    lost: BTreeSet<String>,
    /// Time since which each releasable block is releasable, by name of the block.
    releasable_since: BTreeMap<String, Instant>,
    suspects: Suspects,
    effects: Effects<W>,
}

impl<W> Default for NodeState<W> {
    fn default() -> Self {
        Self {
            table: AllocationTable::default(),
            assumed: AssumedBlocks::default(),
            owners: BTreeMap::new(),
            waiting: BTreeMap::new(),
            requests: Requests::default(),
            blocks_known: false,
            lost: BTreeSet::new(),
            releasable_since: BTreeMap::new(),
            suspects: Suspects::default(),
            effects: Effects::default(),
        }
    }
}

impl<W: Clone> NodeState<W> {
    /// Returns the effects of all calls since the last one of this method, and forgets them.
    pub fn take_effects(&mut self) -> Effects<W> {
        std::mem::take(&mut self.effects)
    }

    /// Addresses and blocks.
    pub fn table(&self) -> &AllocationTable {
        &self.table
    }

    /// See [`AllocationTable::allocate_ipv4_only`].
    pub fn allocate_ipv4_only(&mut self) {
        self.table.allocate_ipv4_only();
    }

    /// Records what a running pod has, as found in the kernel at the start.
    ///
    /// # Errors
    /// See [`AllocationTable::adopt`].
    pub fn adopt(
        &mut self,
        key: Key,
        pool: &str,
        ipv4: Option<Ipv4Addr>,
        ipv6: Option<Ipv6Addr>,
    ) -> Result<(), AdoptError> {
        self.table.adopt(key, pool, ipv4, ipv6)
    }

    /// Records a running pod whose addresses are not known; see [`AllocationTable::hold_back`].
    pub fn hold_back(&mut self, key: Key, unclear: Unclear) {
        self.table.hold_back(key, unclear);
    }

    /// Uses a block that an earlier program of this node had, until the API server lists the blocks: what it does not list goes then.
    /// No other node can have it, as the caller knows.
    pub fn restore_block(&mut self, block: Block) {
        if !self.blocks_known {
            self.table.upsert_block(block);
        }
    }

    /// Tries to allocate an address. `pool_info` is `None` until the pool was read. Only one attempt of a key is under way
    /// at a time; the container's lock ensures that. After [`Attempt::Wait`] the caller tries again when woken, or
    /// calls [`Self::stop_waiting`].
    pub fn allocate(
        &mut self,
        now: Instant,
        pool: &str,
        key: &Key,
        pool_info: Option<PoolInfo>,
        waker: &W,
    ) -> Attempt {
        self.table.set_cordoned(pool, pool_info.is_some_and(PoolInfo::is_cordoned));
        if let Answer::Allocated(allocation) = self.table.allocate(pool, key) {
            self.stop_waiting(key);
            self.effects.positions |= allocation.is_new;
            if self.table.wants_spare_block(pool) {
                self.request(pool, usize::MAX);
            }
            return Attempt::Allocated(allocation);
        }
        let name = || pool.to_owned();
        let failure = match pool_info {
            None => return Attempt::ReadPool,
            Some(PoolInfo::Deleting) => Some(AllocationError::Terminating { pool: name() }),
            Some(PoolInfo::Disabled) => Some(AllocationError::Disabled { pool: name() }),
            Some(PoolInfo::Missing) => Some(AllocationError::UnknownPool { pool: name() }),
            Some(PoolInfo::Unavailable | PoolInfo::Usable { .. }) => {
                self.requests.failure(pool, now).map(AllocationError::NoBlock)
            }
        };
        if let Some(failure) = failure {
            self.stop_waiting(key);
            return Attempt::Failed(failure);
        }
        self.waiting.insert(key.clone(), Waiter { pool: name(), waker: waker.clone() });
        // Without an answer about the pool, one block at a time.
        let block_size = match pool_info {
            Some(PoolInfo::Usable { block_size }) => block_size,
            _ => usize::MAX,
        };
        self.request(pool, block_size);
        Attempt::Wait
    }

    /// Ends the wait of a key that has timed out or was cancelled.
    pub fn stop_waiting(&mut self, key: &Key) {
        self.waiting.remove(key);
    }

    /// Remembers which pod an attachment was made for.
    pub fn set_owner(&mut self, key: &Key, owner: Owner) {
        self.owners.insert(key.clone(), owner);
    }

    /// Frees the addresses of a key, if it has any.
    pub fn release(&mut self, key: &Key) {
        self.owners.remove(key);
        if self.table.release_unclear(key) {
            self.wake_where_free();
        }
        let Some(released) = self.table.release(key) else { return };
        self.effects.release |= released.now_empty && self.table.is_cordoned(&released.allocated.pool);
        self.wake_where_free();
    }

    /// Whether the watch has shown the blocks since the start.
    pub fn are_blocks_known(&self) -> bool {
        self.blocks_known
    }

    /// Updates the blocks to what the watch shows; those of other nodes can be left out. Assumed blocks stay.
    pub fn sync_blocks(&mut self, shown: Vec<ShownBlock<'_>>) {
        self.assumed.observe(shown.iter().map(|block| (block.name, block.uid)));
        let uids: BTreeSet<&str> = shown.iter().map(|block| block.uid).collect();
        self.lost.retain(|uid| uids.contains(uid.as_str()));
        self.table.retain_positions(|uid| uids.contains(uid));
        let own = shown.into_iter().filter_map(|block| block.own);
        let counts =
            |block: &Block| self.assumed.get(block.name()).is_none() && !self.lost.contains(block.uid());
        let own: Vec<Block> = own.filter(counts).collect();
        let shown: BTreeSet<&str> = own.iter().map(Block::name).collect();
        let names = self.table.blocks().map(Block::name);
        let gone = names.filter(|name| self.assumed.get(name).is_none() && !shown.contains(name));
        let gone: Vec<String> = gone.map(str::to_owned).collect();
        for name in gone {
            self.table.remove_block(&name);
        }
        for block in own {
            self.table.upsert_block(block);
        }
        self.blocks_known = true;
        self.claim_lost_blocks();
        self.wake_where_free();
    }

    /// Cordons the pools of which `is_cordoned` says so, among those with blocks or waiting pods, and uncordons the others.
    pub fn sync_pools(&mut self, is_cordoned: impl Fn(&str) -> bool) {
        let pools = self.table.blocks().map(Block::pool);
        let pools = pools.chain(self.waiting.values().map(|waiter| waiter.pool.as_str()));
        let pools: BTreeSet<String> = pools.map(str::to_owned).collect();
        for pool in pools {
            let cordoned = is_cordoned(&pool);
            self.table.set_cordoned(&pool, cordoned);
            if cordoned {
                self.wake(&pool);
            }
        }
        self.wake_where_free();
    }

    /// Name and UID of the blocks in use that the watch has not shown yet. They may be gone without the watch ever showing
    /// them; only the API server knows.
    pub fn assumed(&self) -> Vec<(String, String)> {
        let pair = |(name, assumed): (&str, &crate::Assumed<()>)| {
            (name.to_owned(), assumed.uid.clone().unwrap_or_default())
        };
        self.assumed.iter().map(pair).collect()
    }

    /// Restores [`AllocationTable::search_positions`] at the start.
    pub fn restore_positions(&mut self, positions: BTreeMap<String, u32>) {
        self.table.restore_positions(positions);
    }

    /// Removes a block that the API server has lost although the watch may still show it: a watch that goes on across the
    /// restoration of a backup shows nothing for a long time.
    pub fn lose_block(&mut self, name: &str, uid: &str) {
        self.lost.insert(uid.to_owned());
        self.forget_block(name, uid);
    }

    /// Name and UID of all blocks.
    pub fn blocks(&self) -> Vec<(String, String)> {
        self.table.blocks().map(|block| (block.name().to_owned(), block.uid().to_owned())).collect()
    }

    /// Removes a block that the API server no longer has. Another block of the same name stays.
    pub fn forget_block(&mut self, name: &str, uid: &str) {
        if self.assumed.get(name).is_some_and(|assumed| assumed.uid.as_deref() == Some(uid)) {
            self.assumed.forget(name);
        }
        if self.is_block(name, uid) {
            self.table.remove_block(name);
            self.claim_lost_blocks();
        }
    }

    /// Keys whose addresses have leaked; see [`Suspects::observe`].
    pub fn leaked(&mut self, now: Instant, grace: Duration, linked: &BTreeSet<Key>) -> Vec<Key> {
        let allocated = self.table.allocated().map(|(key, _)| key);
        let attached = allocated.chain(self.table.unclear().map(|(key, _)| key));
        self.suspects.observe(now, grace, attached, linked)
    }

    /// All attachments, by key.
    pub fn attachments(&self) -> Vec<Attachment> {
        let attachment = |(key, allocated): (&Key, &Allocated)| Attachment {
            key: key.clone(),
            allocated: allocated.clone(),
            block: self.table.block_of(allocated).map(|block| block.name().to_owned()),
            owner: self.owners.get(key).cloned(),
        };
        self.table.allocated().map(attachment).collect()
    }

    /// Attachments with addresses in no block of this node. None until the API server has listed the blocks: no pod must
    /// be deleted because of an outage.
    pub fn without_block(&self) -> impl Iterator<Item = (&Key, &Allocated)> {
        self.table.without_block().filter(|_| self.blocks_known)
    }

    fn claim_lost_blocks(&mut self) {
        let lost = self.without_block().next().is_some();
        self.effects.request |= lost;
    }

    fn is_block(&self, name: &str, uid: &str) -> bool {
        self.table.block(name).is_some_and(|block| block.uid() == uid)
    }

    fn wake(&mut self, pool: &str) {
        let waiters = self.waiting.values().filter(|waiter| waiter.pool == pool);
        self.effects.wake.extend(waiters.map(|waiter| waiter.waker.clone()));
    }

    fn wake_where_free(&mut self) {
        let waiters = self.waiting.values().filter(|waiter| self.table.free(&waiter.pool) > 0);
        self.effects.wake.extend(waiters.map(|waiter| waiter.waker.clone()));
    }
}

#[cfg(test)]
mod tests;

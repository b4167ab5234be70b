//! Addresses within the blocks of one node.
//!
//! The allocated addresses are the only state: whether an address is free is derived from them, never stored beside them.
//! So blocks may be added, removed and added again in any order relative to the pods that use them, and an address of a
//! removed block stays allocated.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

mod block;
mod search;
mod unclear;

pub use block::{Block, BlockError};
pub use unclear::Unclear;
use unclear::UnclearAttachments;

/// The attachment that an address is allocated to: one interface of one container. Never a pod's name, which can be reused.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// CNI container ID.
    pub container_id: String,
    /// Interface name inside the container.
    pub ifname: String,
}

/// The addresses of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocated {
    /// The pool they were requested from.
    pub pool: String,
    /// IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
}

impl Allocated {
    /// The addresses of either family.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        self.ipv4.map(IpAddr::V4).into_iter().chain(self.ipv6.map(IpAddr::V6))
    }
}

/// The answer to a key that requested addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// The pool they are from: another than the one asked for if the key has had them since before the namespace
    /// was given another pool.
    pub pool: String,
    /// IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
    /// The block they are from; `None` if the key was adopted and its block is not known, or was removed.
    pub block: Option<String>,
    /// Whether they were allocated by this request; `false` when the key had them already.
    pub is_new: bool,
}

/// The answer to a request for addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The key has these.
    Allocated(Allocation),
    /// No block of this pool has a free address.
    NeedBlock,
}

/// Addresses that a release has freed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Released {
    /// Addresses that the key had, and their pool.
    pub allocated: Allocated,
    /// Name of the block that they were in; `None` if it is gone.
    pub block: Option<String>,
    /// Whether that block has no address in use now. See [`AllocationTable::releasable_blocks`] for whether to release it.
    pub now_empty: bool,
}

/// Reason why an attachment found at start was not adopted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// There is no address to adopt.
    #[error("interface {} of container {} has no address", key.ifname, key.container_id)]
    NoAddress {
        /// The interface.
        key: Key,
    },
    /// The address is allocated to another key.
    #[error(
        "{address} of container {} is already held by container {}: \
         two pods with one address; delete one of them", key.container_id, holder.container_id
    )]
    AddressTaken {
        /// The address.
        address: IpAddr,
        /// The key that was to adopt it.
        key: Key,
        /// The key that has it.
        holder: Key,
    },
    /// The key has other addresses.
    #[error("interface {} of container {} already has other addresses", key.ifname, key.container_id)]
    HoldsOthers {
        /// The interface.
        key: Key,
        /// Addresses that the key has already.
        allocated: Allocated,
    },
}

/// Use of a block: how many of its offsets are taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockUsage {
    /// Name of the block.
    pub block: String,
    /// Name of its pool.
    pub pool: String,
    /// Offsets in use.
    pub used: u32,
    /// Offsets in total.
    pub capacity: u32,
    /// Whether new pods may get addresses from it: neither reserved, nor being deleted, nor closed, nor of a pool
    /// that is cordoned.
    pub open: bool,
}

#[derive(Debug, Clone)]
struct Known {
    block: Block,
    /// Offset allocated last; the search for the next one starts behind it.
    last: Option<u32>,
    /// Being released: no new addresses from it.
    closed: bool,
}

impl Known {
    fn open(&self) -> bool {
        !self.block.reserved && !self.block.deleting && !self.closed
    }
}

/// The addresses and blocks of one node.
#[derive(Debug, Clone, Default)]
pub struct AllocationTable {
    blocks: BTreeMap<String, Known>,
    allocated: BTreeMap<Key, Allocated>,
    holders: BTreeMap<IpAddr, Key>,
    /// Pools that allocate nothing to new pods.
    cordoned: BTreeSet<String>,
    /// UIDs of blocks that were closed, the latest last.
    closed: VecDeque<String>,
    unclear: UnclearAttachments,
    /// Offsets allocated last before the program was restarted, by UID of the block, until the block is known.
    restored: BTreeMap<String, u32>,
    ipv4_only: bool,
}

/// Number of closed blocks that are remembered after they are gone. A block closes after minutes without use, and a
/// watch lags by a minute at most.
const MAX_CLOSED_UIDS: usize = 256;

impl AllocationTable {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Allocates only the IPv4 address of each pair from now on: the kernel has no IPv6. A block without IPv4 is not affected.
    pub fn allocate_ipv4_only(&mut self) {
        self.ipv4_only = true;
    }

    /// Adds or updates a block.
    ///
    /// A block that was closed stays closed, even when it was removed in between: a watch that lags must not reopen what
    /// may belong to another node by now. A new block of the same name is open; the UID tells them apart.
    pub fn upsert_block(&mut self, block: Block) {
        let same = self.blocks.get(&block.name).filter(|known| known.block.nets == block.nets);
        // Of a block that was not known, the search starts where it was before a restart, else behind the highest address
        // in use.
        let first = || {
            let restored = self.restored.get(&block.uid).copied().filter(|offset| *offset < block.size);
            restored.or_else(|| self.used_offsets(&block).last().copied())
        };
        let last = same.map_or_else(first, |known| known.last);
        self.restored.remove(&block.uid);
        let closed = same.is_some_and(|known| known.closed && known.block.uid == block.uid)
            || (!block.uid.is_empty() && self.closed.contains(&block.uid));
        self.blocks.insert(block.name.clone(), Known { block, last, closed });
    }

    /// Positions of the search for a free address: the offset allocated last, by UID of the block. An address that was
    /// freed is allocated again only after all others, so the positions have to survive a restart.
    pub fn search_positions(&self) -> BTreeMap<String, u32> {
        let known = self.blocks.values().filter_map(|known| Some((known.block.uid.clone(), known.last?)));
        self.restored.clone().into_iter().chain(known).collect()
    }

    /// Restores [`Self::search_positions`] of blocks that will become known.
    pub fn restore_positions(&mut self, positions: BTreeMap<String, u32>) {
        self.restored = positions;
    }

    /// Forgets restored positions of blocks that do not exist any more, by UID.
    pub(crate) fn retain_positions(&mut self, exists: impl Fn(&str) -> bool) {
        self.restored.retain(|uid, _| exists(uid));
    }

    /// Removes a block that is no longer this node's. Addresses in use stay allocated.
    pub fn remove_block(&mut self, name: &str) -> Option<Block> {
        self.blocks.remove(name).map(|known| known.block)
    }

    /// One known block.
    pub fn block(&self, name: &str) -> Option<&Block> {
        self.blocks.get(name).map(|known| &known.block)
    }

    /// The known blocks, by name.
    pub fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.blocks.values().map(|known| &known.block)
    }

    /// The known blocks without those that are closed, by name: another node may have their addresses.
    pub fn kept_blocks(&self) -> impl Iterator<Item = &Block> {
        self.blocks.values().filter(|known| !known.closed).map(|known| &known.block)
    }

    /// Allocates addresses to a key: those it has, whatever the pool, or new ones.
    ///
    /// If several blocks have room, the fullest is used, the first by name among equals. So pods gather in few blocks,
    /// and the others become empty and can be released.
    pub fn allocate(&mut self, pool: &str, key: &Key) -> Answer {
        if let Some(allocated) = self.allocated.get(key) {
            let ipv4 = allocated.ipv4;
            let ipv6 = allocated.ipv6;
            let block = self.block_of(allocated).map(|block| block.name.clone());
            let pool = allocated.pool.clone();
            return Answer::Allocated(Allocation { pool, ipv4, ipv6, block, is_new: false });
        }
        let mut best: Option<(usize, &str, u32)> = None;
        for known in self.blocks.values().filter(|known| self.open(known) && known.block.pool == pool) {
            let used = self.used_offsets(&known.block);
            if best.is_none_or(|(most, ..)| used.len() > most)
                && let Some(offset) = search::next_free(&used, known.block.size, known.last)
            {
                best = Some((used.len(), &known.block.name, offset));
            }
        }
        let Some((_, name, offset)) = best else { return Answer::NeedBlock };
        let name = name.to_owned();
        let Some(known) = self.blocks.get_mut(&name) else { return Answer::NeedBlock };
        known.last = Some(offset);
        let (ipv4, ipv6) = known.block.addresses_at(offset);
        let ipv6 = ipv6.filter(|_| !self.ipv4_only || ipv4.is_none());
        let pool = pool.to_owned();
        self.insert(key.clone(), Allocated { pool: pool.clone(), ipv4, ipv6 });
        Answer::Allocated(Allocation { pool, ipv4, ipv6, block: Some(name), is_new: true })
    }

    /// Frees the addresses of a key. `None` when it has none: a late or repeated release changes nothing.
    pub fn release(&mut self, key: &Key) -> Option<Released> {
        let allocated = self.allocated.remove(key)?;
        for address in allocated.addresses() {
            self.holders.remove(&address);
        }
        let block = self.block_of(&allocated);
        let now_empty = block.is_some_and(|block| self.used_offsets(block).is_empty());
        let block = block.map(|block| block.name.clone());
        Some(Released { allocated, block, now_empty })
    }

    /// Records what a running pod has, as found in the kernel. Its block may be known already, later, or never.
    ///
    /// # Errors
    /// When the addresses cannot be its own; nothing is changed then.
    pub fn adopt(
        &mut self,
        key: Key,
        pool: &str,
        ipv4: Option<Ipv4Addr>,
        ipv6: Option<Ipv6Addr>,
    ) -> Result<(), AdoptError> {
        let adopted = Allocated { pool: pool.to_owned(), ipv4, ipv6 };
        if adopted.addresses().next().is_none() {
            return Err(AdoptError::NoAddress { key });
        }
        if let Some(allocated) = self.allocated.get(&key) {
            let same = (allocated.ipv4, allocated.ipv6) == (ipv4, ipv6);
            return if same {
                Ok(())
            } else {
                Err(AdoptError::HoldsOthers { key, allocated: allocated.clone() })
            };
        }
        for address in adopted.addresses() {
            if let Some(holder) = self.holders.get(&address) {
                return Err(AdoptError::AddressTaken { address, key, holder: holder.clone() });
            }
        }
        for known in self.blocks.values_mut() {
            let highest = adopted.addresses().filter_map(|address| known.block.offset_of(address)).max();
            known.last = known.last.max(highest);
        }
        self.insert(key, adopted);
        Ok(())
    }

    fn insert(&mut self, key: Key, allocated: Allocated) {
        for address in allocated.addresses() {
            self.holders.insert(address, key.clone());
        }
        self.allocated.insert(key, allocated);
    }

    /// Addresses of a key, with their pool.
    pub fn get(&self, key: &Key) -> Option<&Allocated> {
        self.allocated.get(key)
    }

    /// The key that has an address.
    pub fn holder(&self, address: IpAddr) -> Option<&Key> {
        self.holders.get(&address)
    }

    /// All keys and what they have, by key.
    pub fn allocated(&self) -> impl Iterator<Item = (&Key, &Allocated)> {
        self.allocated.iter()
    }

    /// Keys with addresses that are in no known block: no node announces them, and the controller may grant them to
    /// another node. To be reported.
    pub fn without_block(&self) -> impl Iterator<Item = (&Key, &Allocated)> {
        self.allocated.iter().filter(|(_, allocated)| self.block_of(allocated).is_none())
    }

    /// Cordons a pool that is disabled or being deleted: new keys get nothing from its blocks, and those that have
    /// addresses keep them. Or uncordons it.
    pub fn set_cordoned(&mut self, pool: &str, cordoned: bool) {
        if !cordoned {
            self.cordoned.remove(pool);
        } else if !self.cordoned.contains(pool) {
            self.cordoned.insert(pool.to_owned());
        }
    }

    /// Whether a pool is cordoned.
    pub fn is_cordoned(&self, pool: &str) -> bool {
        self.cordoned.contains(pool)
    }

    fn open(&self, known: &Known) -> bool {
        known.open() && !self.is_cordoned(&known.block.pool) && !self.unclear.may_be_in(&known.block)
    }

    /// Free addresses of this pool.
    pub fn free(&self, pool: &str) -> u64 {
        self.room(pool).free
    }

    /// Whether to request a block of this pool before a pod needs it: pods use it, and less than a quarter of a block or
    /// no address is free. True until the block is there; the caller avoids a second request.
    ///
    /// Never for blocks of a single address: pools are cut that small because their addresses are scarce, and a
    /// spare one on every node would use them up.
    pub fn wants_spare_block(&self, pool: &str) -> bool {
        let room = self.room(pool);
        !self.is_cordoned(pool) && room.used > 0 && room.size > 1 && room.free < room.spare()
    }

    /// Blocks to release, by name: empty ones that are being deleted or were closed, and empty ones whose loss would
    /// not soon make [`Self::wants_spare_block`] request another. When no pod uses a pool, all of its blocks. All empty
    /// ones of a cordoned pool. Reserved ones stay.
    ///
    /// To keep what the next pod needs, wait some time, then [`Self::close_block`] each.
    pub fn releasable_blocks(&self) -> Vec<String> {
        let mut rooms: BTreeMap<&str, Room> = BTreeMap::new();
        let mut names = Vec::new();
        for known in self.blocks.values() {
            let block = &known.block;
            if !self.used_offsets(block).is_empty() || self.unclear.may_be_in(block) {
                continue;
            }
            let room = rooms.entry(&block.pool).or_insert_with(|| self.room(&block.pool));
            let left = room.free.saturating_sub(block.size.into());
            let spare = room.used > 0 && room.size > 1 && left < room.spare().saturating_mul(2);
            let surplus = self.open(known) && !spare;
            if surplus {
                room.free = left;
            }
            let drains = self.is_cordoned(&block.pool) && !block.reserved;
            if known.closed || block.deleting || surplus || drains {
                names.push(block.name.clone());
            }
        }
        names
    }

    /// Closes a block: no pod gets an address from it while it is being deleted.
    /// `false`, and nothing changed, when an address of it is in use or it is not known.
    pub fn close_block(&mut self, name: &str) -> bool {
        let empty = self.blocks.get(name).is_some_and(|known| {
            self.used_offsets(&known.block).is_empty() && !self.unclear.may_be_in(&known.block)
        });
        if empty
            && let Some(known) = self.blocks.get_mut(name)
            && !known.closed
        {
            known.closed = true;
            self.closed.push_back(known.block.uid.clone());
            if self.closed.len() > MAX_CLOSED_UIDS {
                self.closed.pop_front();
            }
        }
        empty
    }

    /// Reopens a closed block that was certainly not deleted. When that is unknown it must stay closed: another node
    /// may have its addresses.
    pub fn reopen_block(&mut self, name: &str) {
        if let Some(known) = self.blocks.get_mut(name) {
            known.closed = false;
            self.closed.retain(|uid| *uid != known.block.uid);
        }
    }

    /// Use of each block, ordered by name.
    pub fn usage(&self) -> Vec<BlockUsage> {
        self.blocks
            .values()
            .map(|known| BlockUsage {
                block: known.block.name.clone(),
                pool: known.block.pool.clone(),
                used: count(self.used_offsets(&known.block).len()),
                capacity: known.block.size,
                open: self.open(known),
            })
            .collect()
    }

    fn room(&self, pool: &str) -> Room {
        let mut room = Room::default();
        for known in self.blocks.values().filter(|known| known.block.pool == pool) {
            let used = count(self.used_offsets(&known.block).len());
            room.used = room.used.saturating_add(used.into());
            if self.open(known) {
                room.free = room.free.saturating_add(known.block.size.saturating_sub(used).into());
                room.size = room.size.max(known.block.size);
            }
        }
        room
    }

    /// The block of the key's pool that contains the address, else any that does.
    pub fn block_of(&self, allocated: &Allocated) -> Option<&Block> {
        let contains =
            |block: &&Block| allocated.addresses().any(|address| block.offset_of(address).is_some());
        let mut of_pool = self.blocks().filter(|block| block.pool == allocated.pool);
        of_pool.find(contains).or_else(|| self.blocks().find(contains))
    }

    fn used_offsets(&self, block: &Block) -> BTreeSet<u32> {
        let ipv4 = block.nets.ipv4.map(|net| IpAddr::V4(net.network())..=IpAddr::V4(net.broadcast()));
        let ipv6 = block.nets.ipv6.map(|net| IpAddr::V6(net.network())..=IpAddr::V6(net.broadcast()));
        ipv4.into_iter()
            .chain(ipv6)
            .flat_map(|range| self.holders.range(range))
            .filter_map(|(address, _)| block.offset_of(*address))
            .collect()
    }
}

/// Sums over the blocks of a pool.
#[derive(Debug, Clone, Copy, Default)]
struct Room {
    used: u64,
    /// Free addresses of open blocks.
    free: u64,
    /// Addresses in the largest open block.
    size: u32,
}

impl Room {
    /// Another block is requested when fewer addresses than these are free: a quarter of a block.
    fn spare(&self) -> u64 {
        u64::from(self.size / 4).max(1)
    }
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;

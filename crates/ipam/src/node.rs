//! Addresses within the blocks of one node.
//!
//! The table of held addresses is the only truth: whether an address is free is read from it, never remembered beside
//! it. So blocks may come, go and come back in any order relative to the pods that use them, and an address of a
//! vanished block stays with its pod.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

mod block;

pub use block::{Block, BlockError};

/// Who holds an address: one interface of one container. Never a pod's name, which can be reused.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// CNI container ID.
    pub container_id: String,
    /// Interface name inside the container.
    pub ifname: String,
}

/// What a key holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The pool it was asked from.
    pub pool: String,
    /// IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
}

impl Held {
    fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        self.ipv4.map(IpAddr::V4).into_iter().chain(self.ipv6.map(IpAddr::V6))
    }
}

/// Addresses given to a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// The pool they are from: another than the one asked for if the key has had them since before the namespace
    /// was given another pool.
    pub pool: String,
    /// IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
    /// The block they are from; `None` if the key was adopted and its block is not known (any more).
    pub block: Option<String>,
    /// Whether they were given just now; `false` when the key had them already.
    pub fresh: bool,
}

/// The answer to a wish for addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Here they are.
    Allocated(Allocation),
    /// No block of this pool has a free address: request one, [`NodeIpam::upsert_block`] it, ask again.
    NeedBlock,
}

/// What a release gave back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Released {
    /// What the key held.
    pub held: Held,
    /// The block it was in; `None` if that block is gone.
    pub block: Option<String>,
    /// Whether that block has no address in use now. See [`NodeIpam::releasable_blocks`] for whether to give it back.
    pub now_empty: bool,
}

/// Why something found at start was not adopted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// Nothing to adopt.
    #[error("interface {} of container {} has no address", key.ifname, key.container_id)]
    NoAddress {
        /// The interface.
        key: Key,
    },
    /// Somebody else has the address.
    #[error(
        "{address} of container {} is already held by container {}: \
         two pods with one address; delete one of them", key.container_id, holder.container_id
    )]
    AddressTaken {
        /// The address.
        address: IpAddr,
        /// Who was to adopt it.
        key: Key,
        /// Who has it.
        holder: Key,
    },
    /// The key has other addresses.
    #[error("interface {} of container {} already holds other addresses", key.ifname, key.container_id)]
    HoldsOthers {
        /// The interface.
        key: Key,
        /// What it holds.
        held: Held,
    },
}

/// How full a block is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockUsage {
    /// Name of the block.
    pub block: String,
    /// Its pool.
    pub pool: String,
    /// Offsets in use.
    pub used: u32,
    /// Offsets there are.
    pub capacity: u32,
    /// Whether new pods may get addresses from it: neither reserved, nor being deleted, nor closed, nor of a pool
    /// that was withdrawn.
    pub open: bool,
}

#[derive(Debug, Clone)]
struct Known {
    block: Block,
    /// Offset given last; where the search for the next one starts.
    last: Option<u32>,
    /// Being given back: no new addresses from it.
    closed: bool,
}

impl Known {
    fn open(&self) -> bool {
        !self.block.reserved && !self.block.deleting && !self.closed
    }
}

/// Address management of one node. Plain state: the caller serialises access and never holds it across a wait.
#[derive(Debug, Clone, Default)]
pub struct NodeIpam {
    blocks: BTreeMap<String, Known>,
    held: BTreeMap<Key, Held>,
    holders: BTreeMap<IpAddr, Key>,
    /// Pools that give nothing to new pods.
    withdrawn: BTreeSet<String>,
    /// UIDs of blocks that were closed, the latest last.
    closed: VecDeque<String>,
}

/// How many closed blocks are remembered after they are gone. A block closes after minutes of not being used, and
/// news of it that are late are late by a minute.
const REMEMBERED: usize = 256;

impl NodeIpam {
    /// Knows nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Learns of a block, or of a change of it.
    ///
    /// A block that was closed stays closed, even when it was forgotten in between: late news must not bring back what
    /// may belong to another node by now. A new block of the same name is open; the UID tells them apart.
    pub fn upsert_block(&mut self, block: Block) {
        let same = self.blocks.get(&block.name).filter(|known| known.block.nets == block.nets);
        // Without memory of its own, the search starts behind the highest address in use.
        let last = same.map_or_else(|| self.used_offsets(&block).last().copied(), |known| known.last);
        let closed = same.is_some_and(|known| known.closed && known.block.uid == block.uid)
            || (!block.uid.is_empty() && self.closed.contains(&block.uid));
        self.blocks.insert(block.name.clone(), Known { block, last, closed });
    }

    /// Forgets a block that is no longer this node's. Addresses in use stay with their holders.
    pub fn remove_block(&mut self, name: &str) -> Option<Block> {
        self.blocks.remove(name).map(|known| known.block)
    }

    /// The known blocks, by name.
    pub fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.blocks.values().map(|known| &known.block)
    }

    /// Gives a key its addresses: those it has, whatever the pool, or new ones.
    ///
    /// Of several blocks the fullest that has room is used, the first by name among equals: so pods gather in few
    /// blocks and the others become empty and can be given back.
    pub fn allocate(&mut self, pool: &str, key: &Key) -> Answer {
        if let Some(held) = self.held.get(key) {
            let (ipv4, ipv6) = (held.ipv4, held.ipv6);
            let block = self.block_of(held).map(|block| block.name.clone());
            let pool = held.pool.clone();
            return Answer::Allocated(Allocation { pool, ipv4, ipv6, block, fresh: false });
        }
        let mut best: Option<(usize, &str, u32)> = None;
        for known in self.blocks.values().filter(|known| self.open(known) && known.block.pool == pool) {
            let used = self.used_offsets(&known.block);
            if best.is_none_or(|(most, ..)| used.len() > most)
                && let Some(offset) = next_free(&used, known.block.size, known.last)
            {
                best = Some((used.len(), &known.block.name, offset));
            }
        }
        let Some((_, name, offset)) = best else { return Answer::NeedBlock };
        let name = name.to_owned();
        let Some(known) = self.blocks.get_mut(&name) else { return Answer::NeedBlock };
        known.last = Some(offset);
        let (ipv4, ipv6) = known.block.addresses_at(offset);
        let pool = pool.to_owned();
        self.hold(key.clone(), Held { pool: pool.clone(), ipv4, ipv6 });
        Answer::Allocated(Allocation { pool, ipv4, ipv6, block: Some(name), fresh: true })
    }

    /// Takes a key's addresses back. `None` when it holds none: a late or repeated release changes nothing.
    pub fn release(&mut self, key: &Key) -> Option<Released> {
        let held = self.held.remove(key)?;
        for address in held.addresses() {
            self.holders.remove(&address);
        }
        let block = self.block_of(&held);
        let now_empty = block.is_some_and(|block| self.used_offsets(block).is_empty());
        let block = block.map(|block| block.name.clone());
        Some(Released { held, block, now_empty })
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
        let wanted = Held { pool: pool.to_owned(), ipv4, ipv6 };
        if wanted.addresses().next().is_none() {
            return Err(AdoptError::NoAddress { key });
        }
        if let Some(held) = self.held.get(&key) {
            let same = (held.ipv4, held.ipv6) == (ipv4, ipv6);
            return if same { Ok(()) } else { Err(AdoptError::HoldsOthers { key, held: held.clone() }) };
        }
        for address in wanted.addresses() {
            if let Some(holder) = self.holders.get(&address) {
                return Err(AdoptError::AddressTaken { address, key, holder: holder.clone() });
            }
        }
        for known in self.blocks.values_mut() {
            let highest = wanted.addresses().filter_map(|address| known.block.offset_of(address)).max();
            known.last = known.last.max(highest);
        }
        self.hold(key, wanted);
        Ok(())
    }

    fn hold(&mut self, key: Key, held: Held) {
        for address in held.addresses() {
            self.holders.insert(address, key.clone());
        }
        self.held.insert(key, held);
    }

    /// What a key holds.
    pub fn get(&self, key: &Key) -> Option<&Held> {
        self.held.get(key)
    }

    /// Who holds an address.
    pub fn holder(&self, address: IpAddr) -> Option<&Key> {
        self.holders.get(&address)
    }

    /// All keys and what they hold, by key.
    pub fn held(&self) -> impl Iterator<Item = (&Key, &Held)> {
        self.held.iter()
    }

    /// Keys with addresses that are in no known block: their routes have no owner in the cluster, and the controller
    /// may give the addresses to another node. To be reported.
    pub fn homeless(&self) -> impl Iterator<Item = (&Key, &Held)> {
        self.held.iter().filter(|(_, held)| self.block_of(held).is_none())
    }

    /// Says whether a pool is disabled or being deleted: then new keys get nothing from its blocks either, and those
    /// that have addresses keep them.
    pub fn set_withdrawn(&mut self, pool: &str, withdrawn: bool) {
        if !withdrawn {
            self.withdrawn.remove(pool);
        } else if !self.withdrawn.contains(pool) {
            self.withdrawn.insert(pool.to_owned());
        }
    }

    /// Whether a pool was withdrawn.
    pub fn is_withdrawn(&self, pool: &str) -> bool {
        self.withdrawn.contains(pool)
    }

    fn open(&self, known: &Known) -> bool {
        known.open() && !self.is_withdrawn(&known.block.pool)
    }

    /// Addresses of this pool that pods could have at once.
    pub fn free(&self, pool: &str) -> u64 {
        self.room(pool).free
    }

    /// Whether to ask for a block of this pool ahead of need: pods use it, and a quarter of a block or less than one
    /// address is left free. It says so until the block is there; asking twice is for the caller to avoid.
    ///
    /// Never for blocks of a single address: pools are cut that small because their addresses are scarce, and a
    /// spare one on every node would use them up.
    pub fn wants_block(&self, pool: &str) -> bool {
        let room = self.room(pool);
        !self.is_withdrawn(pool) && room.used > 0 && room.size > 1 && room.free < room.spare()
    }

    /// Blocks to give back, by name: empty ones that are being deleted or were closed, and empty ones whose loss
    /// would not soon make [`Self::wants_block`] ask for another. When no pod uses a pool, all of its blocks. All empty
    /// ones of a withdrawn pool. Reserved ones stay.
    ///
    /// To avoid giving back what the next pod needs, wait some seconds, then [`Self::close_block`] each.
    pub fn releasable_blocks(&self) -> Vec<String> {
        let mut rooms: BTreeMap<&str, Room> = BTreeMap::new();
        let mut names = Vec::new();
        for known in self.blocks.values() {
            let block = &known.block;
            if !self.used_offsets(block).is_empty() {
                continue;
            }
            let room = rooms.entry(&block.pool).or_insert_with(|| self.room(&block.pool));
            let left = room.free.saturating_sub(block.size.into());
            let spare = room.used > 0 && room.size > 1 && left < room.spare().saturating_mul(2);
            let surplus = self.open(known) && !spare;
            if surplus {
                room.free = left;
            }
            let drains = self.is_withdrawn(&block.pool) && !block.reserved;
            if known.closed || block.deleting || surplus || drains {
                names.push(block.name.clone());
            }
        }
        names
    }

    /// Takes a block out of use, so that it can be deleted without a pod getting an address from it meanwhile.
    /// `false`, and nothing changed, when an address of it is in use or it is not known.
    pub fn close_block(&mut self, name: &str) -> bool {
        let empty = self.blocks.get(name).is_some_and(|known| self.used_offsets(&known.block).is_empty());
        if empty
            && let Some(known) = self.blocks.get_mut(name)
            && !known.closed
        {
            known.closed = true;
            self.closed.push_back(known.block.uid.clone());
            if self.closed.len() > REMEMBERED {
                self.closed.pop_front();
            }
        }
        empty
    }

    /// Takes a closed block into use again, because it was certainly not deleted: when nobody knows, it must stay
    /// closed, for another node may have its addresses.
    pub fn reopen_block(&mut self, name: &str) {
        if let Some(known) = self.blocks.get_mut(name) {
            known.closed = false;
            self.closed.retain(|uid| *uid != known.block.uid);
        }
    }

    /// How full each block is, by name.
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

    /// The block of the key's pool that has its address, else any that has.
    fn block_of(&self, held: &Held) -> Option<&Block> {
        let having = |block: &&Block| held.addresses().any(|address| block.offset_of(address).is_some());
        let mut of_pool = self.blocks().filter(|block| block.pool == held.pool);
        of_pool.find(having).or_else(|| self.blocks().find(having))
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
    /// Free addresses below which another block is asked for: a quarter of one.
    fn spare(&self) -> u64 {
        u64::from(self.size / 4).max(1)
    }
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// First offset behind `last` that is not used, going round once.
fn next_free(used: &BTreeSet<u32>, size: u32, last: Option<u32>) -> Option<u32> {
    let start = last.and_then(|last| last.checked_add(1)).filter(|start| *start < size).unwrap_or(0);
    first_gap(used, start, size).or_else(|| first_gap(used, 0, start))
}

fn first_gap(used: &BTreeSet<u32>, from: u32, to: u32) -> Option<u32> {
    let mut gap = from;
    for offset in used.range(from..) {
        if *offset != gap {
            break;
        }
        gap = gap.checked_add(1)?;
    }
    (gap < to).then_some(gap)
}

#[cfg(test)]
mod tests;

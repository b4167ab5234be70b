//! IP address management: blocks for nodes, and addresses for pods.
//!
//! * [`pool`]: an AddressPool parsed: subnets cut into numbered blocks.
//! * [`mod@grant`]: the controller's answer to one BlockRequest; [`refusal`]: why it is no block.
//! * [`index`]: all blocks, indexed for these answers.
//! * [`queue`]: which BlockRequests the controller answers next.
//! * [`orphans`]: blocks whose Node is gone, and when to free them.
//! * [`assumed`]: blocks in use before the watch shows them.
//! * [`table`]: addresses within the blocks of one node.
//! * [`leaks`]: addresses whose pod is gone although no DEL came.
//! * [`demand`]: how many blocks to ask for at once.
//! * [`state`]: all of it together, for one node.
//! * `resources` (feature `resources`): the conversions from AddressPool and AddressBlock.
//! * [`check`]: where kernel, blocks and pods disagree.
//! * [`used`]: ranges that something else uses than the pools.
//!
//! Order and numbering are those of Coil v2, so that existing AddressBlocks keep their meaning: blocks are
//! numbered through the subnets in order, the lowest number that was never granted is next (then those freed, the oldest
//! first), and within a block the address after the last one allocated (first and last address included; both families
//! share one offset).
//!
//! Everything is pure: the shells read custom resources and links, call in here, and write what comes out. Nothing
//! waits: [`table::AllocationTable`] answers "a block is needed" instead of fetching one, so no lock has to be held while
//! the controller is asked. No input can make it panic or allocate an address twice.
//!
//! Not here: Kubernetes objects, finalizers, timing of requests and releases, routes.

pub mod assumed;
pub mod check;
pub mod demand;
pub mod grant;
pub mod index;
pub mod leaks;
pub mod orphans;
pub mod pool;
pub mod queue;
pub mod refusal;
#[cfg(feature = "resources")]
pub mod resources;
pub mod state;
pub mod table;
pub mod used;

pub use assumed::{Assumed, AssumedBlocks};
pub use fairlead_address::DualStackNets;
pub use grant::{ClaimedBlock, ExistingBlock, Grant, PoolState, Request, block_limit, grant};
pub use index::BlockIndex;
pub use pool::{MAX_BLOCK_SIZE_BITS, MAX_INDEX, Overlap, Pool, PoolError, admit, overlaps};
pub use refusal::{ClaimConflict, Refusal, RefusalReason};
pub use table::{
    AdoptError, Allocated, Allocation, AllocationTable, Answer, Block, BlockError, BlockUsage, Key, Released,
    Unclear,
};

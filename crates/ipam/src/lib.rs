//! Which block a node gets, and which address a pod gets.
//!
//! * [`pool`]: an AddressPool parsed: subnets cut into numbered blocks.
//! * [`mod@grant`]: the controller's answer to one BlockRequest.
//! * [`assumed`]: blocks in use before the watch shows them.
//! * [`table`]: addresses within the blocks of one node.
//! * [`leaks`]: addresses whose pod is gone although no DEL came.
//! * [`demand`]: how many blocks to ask for at once.
//! * [`addresses`]: sets of addresses that must not be granted.
//! * [`request`]: one BlockRequest, call by call.
//! * [`state`]: all of it together, for one node.
//! * `resources` (feature `resources`): the conversions from AddressPool and AddressBlock.
//! * [`check`]: where kernel, blocks and pods disagree.
//!
//! Order and numbering are those of Coil v2, so that existing AddressBlocks keep their meaning: blocks are
//! numbered through the subnets in order, the lowest free number is granted, and within a block the address after
//! the last one allocated is next (first and last address included; both families share one offset).
//!
//! Everything is pure: the shells read custom resources and links, call in here, and write what comes out. Nothing
//! waits: [`table::AllocationTable`] answers "a block is needed" instead of fetching one, so no lock has to be held while
//! the controller is asked. No input can make it panic or allocate an address twice.
//!
//! Not here: Kubernetes objects, finalizers, timing of requests and releases, routes.

pub mod addresses;
pub mod assumed;
pub mod check;
pub mod demand;
pub mod grant;
pub mod leaks;
pub mod pool;
pub mod request;
#[cfg(feature = "resources")]
pub mod resources;
pub mod state;
pub mod table;

pub use addresses::AddressSet;
pub use assumed::{Assumed, AssumedBlocks};
pub use grant::{ExistingBlock, Grant, PoolState, Refusal, RefusalReason, Request, grant};
pub use pool::{BlockNets, MAX_BLOCK_SIZE_BITS, MAX_INDEX, Overlap, Pool, PoolError, admit, overlaps};
pub use table::{
    AdoptError, Allocated, Allocation, AllocationTable, Answer, Block, BlockError, BlockUsage, Key, Released,
};

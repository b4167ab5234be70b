//! Which block a node gets, and which address a pod gets.
//!
//! * [`pool`]: an AddressPool parsed: subnets cut into numbered blocks.
//! * [`mod@grant`]: the controller's answer to one BlockRequest.
//! * [`assumed`]: blocks in use before the watch shows them.
//! * [`node`]: addresses within the blocks of one node.
//! * [`leaks`]: addresses whose pod is gone although nobody said so.
//! * [`demand`]: how many blocks to ask for at once.
//! * [`addresses`]: sets of addresses that must not be given out.
//! * `resources` (feature `resources`): the conversions from AddressPool and AddressBlock.
//! * [`check`]: where kernel, blocks and pods disagree.
//!
//! Order and numbering are those of Coil v2, so that existing AddressBlocks keep their meaning: blocks are
//! numbered through the subnets in order, the lowest free number is given, and within a block the address after
//! the last one given is next (first and last address included; both families share one offset).
//!
//! Everything is pure: the shells read custom resources and links, call in here, and write what comes out. Nothing
//! waits: [`node::NodeIpam`] answers "a block is needed" instead of fetching one, so no lock has to be held while
//! the controller is asked. No input can make it panic or hand out an address twice.
//!
//! Not here: Kubernetes objects, finalizers, timing of requests and releases, routes.

pub mod addresses;
pub mod assumed;
pub mod check;
pub mod demand;
pub mod grant;
pub mod leaks;
pub mod node;
pub mod pool;
#[cfg(feature = "resources")]
pub mod resources;

pub use addresses::AddressSet;
pub use assumed::{Assumed, AssumedBlocks};
pub use grant::{ExistingBlock, Grant, PoolState, Refusal, RefusalReason, Request, grant};
pub use node::{
    AdoptError, Allocation, Answer, Block, BlockError, BlockUsage, Held, Key, NodeIpam, Released,
};
pub use pool::{BlockNets, MAX_BLOCK_SIZE_BITS, MAX_INDEX, Overlap, Pool, PoolError, admit, overlaps};

//! Reasons why the controller grants no block.

use fairlead_address::DualStackNets;

use crate::pool::PoolError;

/// Reason why there is no block. `Display` is the condition's message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No such AddressPool.
    #[error(
        "there is no pool {pool}: create the AddressPool, \
         or correct the annotation coil.cybozu.com/pool of the pod's namespace"
    )]
    UnknownPool {
        /// The name asked for.
        pool: String,
    },
    /// The AddressPool cannot be used.
    #[error("pool {pool} cannot be used: {error}")]
    InvalidPool {
        /// Name of the pool.
        pool: String,
        /// Reason why the pool cannot be used.
        error: PoolError,
    },
    /// The AddressPool is being deleted.
    #[error("pool {pool} is being deleted and allocates no more blocks")]
    Terminating {
        /// Name of the pool.
        pool: String,
    },
    /// The AddressPool is disabled.
    #[error(
        "pool {pool} is disabled and allocates no more blocks: set spec.disabled to false, or use another pool"
    )]
    Disabled {
        /// Name of the pool.
        pool: String,
    },
    /// Every block is granted.
    #[error("pool {pool} does not have free blocks")]
    OutOfBlocks {
        /// Name of the pool.
        pool: String,
    },
    /// The node has as many blocks of the pool as it may.
    #[error(
        "node {node} has {blocks} blocks of pool {pool} and may have {limit}: the limit follows from the pod capacity of \
         the Node and the pool's block size"
    )]
    BlockLimit {
        /// Name of the pool.
        pool: String,
        /// The node.
        node: String,
        /// Number of blocks of the pool that the node has.
        blocks: u32,
        /// Largest number of blocks of the pool that the node may have; see [`block_limit`](crate::block_limit).
        limit: u32,
    },
    /// The block that the node says it uses cannot be its own.
    #[error(
        "node {node} uses {nets} and cannot have it as block {index} of pool {pool}, because {cause}: two pods may have \
         one address; delete the node's pods with these addresses"
    )]
    ClaimConflict {
        /// Name of the pool.
        pool: String,
        /// The node.
        node: String,
        /// Number of the block.
        index: u32,
        /// Prefixes of the block, as the node claims them.
        nets: DualStackNets,
        /// Reason why the node cannot have the block.
        cause: ClaimConflict,
    },
    /// The request has a field that an older schema let in.
    #[error("spec.{field} of the BlockRequest is {text:?}, which is invalid; delete it")]
    InvalidRequest {
        /// The field.
        field: &'static str,
        /// Value of the field.
        text: String,
    },
    /// Numbers are free, but their addresses are in blocks with other names, or in older pools.
    #[error(
        "pool {pool} does not have free blocks: the addresses of all that are left, such as {nets}, \
         belong to older pools or are in blocks of others; remove the overlap"
    )]
    Overlap {
        /// Name of the pool.
        pool: String,
        /// The first block that would be free.
        nets: DualStackNets,
    },
}

impl Refusal {
    /// The reason in one word.
    pub fn reason(&self) -> RefusalReason {
        match self {
            Self::BlockLimit { .. } => RefusalReason::BlockLimitReached,
            Self::ClaimConflict { .. } => RefusalReason::ClaimConflict,
            Self::Disabled { .. } => RefusalReason::PoolDisabled,
            Self::InvalidPool { .. } => RefusalReason::InvalidPool,
            Self::InvalidRequest { .. } => RefusalReason::InvalidRequest,
            Self::OutOfBlocks { .. } => RefusalReason::PoolExhausted,
            Self::Overlap { .. } => RefusalReason::PoolOverlap,
            Self::Terminating { .. } => RefusalReason::PoolTerminating,
            Self::UnknownPool { .. } => RefusalReason::UnknownPool,
        }
    }
}

/// Reason why a node cannot have the block that it says it uses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimConflict {
    /// Another object has the name or addresses of it.
    #[error("AddressBlock {0} has these addresses or this number")]
    Block(String),
    /// The pool has other addresses under this number.
    #[error("the pool has no such block")]
    NotInPool,
    /// The addresses belong to an older pool.
    #[error("an older pool has these addresses")]
    OlderPool,
}

/// Reason why there is no block, without the details.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalReason {
    /// [`Refusal::BlockLimit`].
    BlockLimitReached,
    /// [`Refusal::ClaimConflict`].
    ClaimConflict,
    /// [`Refusal::InvalidPool`].
    InvalidPool,
    /// [`Refusal::InvalidRequest`].
    InvalidRequest,
    /// [`Refusal::Disabled`].
    PoolDisabled,
    /// [`Refusal::OutOfBlocks`].
    PoolExhausted,
    /// [`Refusal::Overlap`].
    PoolOverlap,
    /// [`Refusal::Terminating`].
    PoolTerminating,
    /// [`Refusal::UnknownPool`].
    UnknownPool,
}

impl RefusalReason {
    pub(crate) const ALL: [Self; 9] = [
        Self::BlockLimitReached,
        Self::ClaimConflict,
        Self::InvalidPool,
        Self::InvalidRequest,
        Self::PoolDisabled,
        Self::PoolExhausted,
        Self::PoolOverlap,
        Self::PoolTerminating,
        Self::UnknownPool,
    ];

    /// The word in Events and status.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BlockLimitReached => "BlockLimitReached",
            Self::ClaimConflict => "ClaimConflict",
            Self::InvalidPool => "InvalidPool",
            Self::InvalidRequest => "InvalidRequest",
            Self::PoolDisabled => "PoolDisabled",
            Self::PoolExhausted => "PoolExhausted",
            Self::PoolOverlap => "PoolOverlap",
            Self::PoolTerminating => "PoolTerminating",
            Self::UnknownPool => "UnknownPool",
        }
    }

    /// The reason of a BlockRequest's condition: the same word, except for the one reason that Coil v2 has.
    pub fn as_condition(self) -> &'static str {
        match self {
            Self::PoolExhausted => "out of blocks",
            other => other.as_str(),
        }
    }

    /// The reason that a condition gives; `None` for words of another controller.
    pub fn from_condition(reason: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.as_condition() == reason)
    }
}

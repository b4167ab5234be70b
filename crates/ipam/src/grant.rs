//! The controller's decision about one BlockRequest.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use ipnet::IpNet;

use crate::addresses::AddressSet;
use crate::pool::{BlockNets, Pool, PoolError};

/// Reason of the condition `Complete` when a block was granted (Coil v2).
pub const REASON_ALLOCATED: &str = "allocated";

/// A BlockRequest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request<'a> {
    /// UID of the object: what makes the answer idempotent.
    pub uid: &'a str,
    /// `spec.poolName`.
    pub pool: &'a str,
    /// `spec.nodeName`.
    pub node: &'a str,
}

/// An AddressPool as the controller knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolState {
    /// The pool, or why it cannot be used.
    pub parsed: Result<Pool, PoolError>,
    /// Whether it has a deletion timestamp.
    pub terminating: bool,
    /// `spec.disabled`.
    pub disabled: bool,
    /// When it was made, in seconds since 1970: of pools that overlap, the oldest has the addresses.
    pub created: i64,
}

/// An AddressBlock as the controller knows it. Blocks of all pools count, also those made by hand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExistingBlock {
    /// Name of the object.
    pub name: String,
    /// Pool label.
    pub pool: String,
    /// `index`.
    pub index: u32,
    /// `ipv4` and `ipv6`.
    pub nets: BlockNets,
    /// Request label: UID of the BlockRequest it was made for.
    pub request: Option<String>,
    /// Whether it has a deletion timestamp.
    pub terminating: bool,
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Grant {
    /// The request was answered before, but its status was not written: this block is it.
    Existing {
        /// Name of the AddressBlock.
        name: String,
    },
    /// A block to create.
    New {
        /// Its number.
        index: u32,
        /// Name of its AddressBlock.
        name: String,
        /// Its prefixes.
        nets: BlockNets,
    },
    /// No block; the request has failed.
    Refused(Refusal),
}

impl fmt::Display for Grant {
    /// The condition's message.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Existing { name } | Self::New { name, .. } => write!(f, "allocated a block {name}"),
            Self::Refused(refusal) => refusal.fmt(f),
        }
    }
}

/// Why there is no block. `Display` is the condition's message.
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
        /// Its name.
        pool: String,
        /// What is wrong with it.
        error: PoolError,
    },
    /// The AddressPool is being deleted.
    #[error("pool {pool} is being deleted and gives no more blocks")]
    Terminating {
        /// Its name.
        pool: String,
    },
    /// The AddressPool is disabled.
    #[error(
        "pool {pool} is disabled and gives no more blocks: set spec.disabled to false, or use another pool"
    )]
    Disabled {
        /// Its name.
        pool: String,
    },
    /// Every block is granted.
    #[error("pool {pool} does not have free blocks")]
    OutOfBlocks {
        /// Its name.
        pool: String,
    },
    /// Numbers are free, but their addresses are in blocks with other names, or in older pools.
    #[error(
        "pool {pool} does not have free blocks: the addresses of all that are left, such as {nets}, \
         belong to older pools or are in blocks of others; remove the overlap"
    )]
    Overlap {
        /// Its name.
        pool: String,
        /// The first block that would be free.
        nets: BlockNets,
    },
}

impl Refusal {
    /// The reason in one word.
    pub fn reason(&self) -> RefusalReason {
        match self {
            Self::Disabled { .. } => RefusalReason::PoolDisabled,
            Self::InvalidPool { .. } => RefusalReason::InvalidPool,
            Self::OutOfBlocks { .. } => RefusalReason::PoolExhausted,
            Self::Overlap { .. } => RefusalReason::PoolOverlap,
            Self::Terminating { .. } => RefusalReason::PoolTerminating,
            Self::UnknownPool { .. } => RefusalReason::UnknownPool,
        }
    }
}

/// Why there is no block, without the details.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalReason {
    /// [`Refusal::InvalidPool`].
    InvalidPool,
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
    const ALL: [Self; 6] = [
        Self::InvalidPool,
        Self::PoolDisabled,
        Self::PoolExhausted,
        Self::PoolOverlap,
        Self::PoolTerminating,
        Self::UnknownPool,
    ];

    /// The word in Events and status.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidPool => "InvalidPool",
            Self::PoolDisabled => "PoolDisabled",
            Self::PoolExhausted => "PoolExhausted",
            Self::PoolOverlap => "PoolOverlap",
            Self::PoolTerminating => "PoolTerminating",
            Self::UnknownPool => "UnknownPool",
        }
    }

    /// The reason of a BlockRequest's condition, in the style of Coil v2, whose only one is "out of blocks".
    pub fn as_condition(self) -> &'static str {
        match self {
            Self::InvalidPool => "invalid pool",
            Self::PoolDisabled => "pool is disabled",
            Self::PoolExhausted => "out of blocks",
            Self::PoolOverlap => "overlapping pools",
            Self::PoolTerminating => "pool is being deleted",
            Self::UnknownPool => "unknown pool",
        }
    }

    /// The reason that a condition gives; `None` for words of another controller.
    pub fn from_condition(reason: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.as_condition() == reason)
    }
}

/// Answers a request. Asking again with the same UID names the same block as long as it exists, so a crash between
/// creating the block and writing the status costs nothing.
///
/// A number is free when no object has its name and none of its addresses is in any block, so a block made by hand or
/// left by an earlier pool of that name is skipped instead of colliding forever.
///
/// Addresses in several pools are granted by the oldest only, even while it is disabled or being deleted: the watch may
/// not show yet what another controller granted a moment ago, and two blocks of different pools have different names, so
/// the API server would accept both.
pub fn grant(
    request: &Request<'_>,
    pools: &BTreeMap<String, PoolState>,
    blocks: &[impl Borrow<ExistingBlock>],
) -> Grant {
    let answered = blocks.iter().map(Borrow::borrow).find(|block| {
        !request.uid.is_empty() && block.request.as_deref() == Some(request.uid) && !block.terminating
    });
    if let Some(block) = answered {
        return Grant::Existing { name: block.name.clone() };
    }
    match new_block(request.pool, pools, blocks) {
        Ok(grant) => grant,
        Err(refusal) => Grant::Refused(refusal),
    }
}

fn new_block(
    name: &str,
    pools: &BTreeMap<String, PoolState>,
    blocks: &[impl Borrow<ExistingBlock>],
) -> Result<Grant, Refusal> {
    let pool_name = || name.to_owned();
    let state = pools.get(name).ok_or_else(|| Refusal::UnknownPool { pool: pool_name() })?;
    if state.terminating {
        return Err(Refusal::Terminating { pool: pool_name() });
    }
    if state.disabled {
        return Err(Refusal::Disabled { pool: pool_name() });
    }
    let pool = state
        .parsed
        .as_ref()
        .map_err(|error| Refusal::InvalidPool { pool: pool_name(), error: error.clone() })?;
    let blocks = || blocks.iter().map(Borrow::borrow);
    let of_pool = blocks().filter(|block| block.pool == name).map(|block| block.index);
    let by_name = blocks().filter_map(|block| pool.index_of(&block.name));
    let allocated: BTreeSet<u32> = of_pool.chain(by_name).collect();
    let in_blocks = blocks().flat_map(|block| block.nets.nets());
    let taken: AddressSet = in_blocks.chain(nets_of_older(name, state, pools)).collect();

    let free = pool.first_free(&allocated, &taken).and_then(|index| Some((index, pool.block(index)?)));
    if let Some((index, nets)) = free {
        return Ok(Grant::New { index, name: pool.block_name(index), nets });
    }
    let but_for_overlap = pool.first_free(&allocated, &AddressSet::default());
    Err(match but_for_overlap.and_then(|index| pool.block(index)) {
        Some(nets) => Refusal::Overlap { pool: pool_name(), nets },
        None => Refusal::OutOfBlocks { pool: pool_name() },
    })
}

/// The subnets of all pools that come before this one. The name decides between pools of the same second.
fn nets_of_older<'a>(
    name: &'a str,
    state: &'a PoolState,
    pools: &'a BTreeMap<String, PoolState>,
) -> impl Iterator<Item = IpNet> + 'a {
    let older = move |(other, of_other): &(&'a String, &'a PoolState)| {
        (of_other.created, other.as_str()) < (state.created, name)
    };
    pools.iter().filter(older).filter_map(|(_, other)| other.parsed.as_ref().ok()).flat_map(Pool::nets)
}

#[cfg(test)]
mod tests;

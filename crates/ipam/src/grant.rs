//! The controller's decision about one BlockRequest.

use std::collections::BTreeMap;
use std::fmt;

use fairlead_address::{DualStackNets, PrefixSet};
use ipnet::IpNet;

use crate::index::BlockIndex;
use crate::pool::{Pool, PoolError};
use crate::refusal::{ClaimConflict, Refusal};

/// Reason of the condition `Complete` when a block was granted (Coil v2).
pub const REASON_ALLOCATED: &str = "allocated";

/// Pods on a Node that does not say how many it can run: the default of kubelet's `maxPods`.
const DEFAULT_PODS: u32 = 110;
/// Pods that are counted at most, whatever a Node says: more than any kubelet runs.
const MAX_PODS: u32 = 4096;
/// Blocks beyond those for twice the pods of a node: requests under way, reserved blocks.
const MIN_BLOCKS: u32 = 4;

/// A BlockRequest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request<'a> {
    /// UID of the object: what makes the answer idempotent.
    pub uid: &'a str,
    /// `spec.poolName`.
    pub pool: &'a str,
    /// `spec.nodeName`; empty for the question whether any node would get a block.
    pub node: &'a str,
    /// `status.capacity.pods` of the Node, if it says so.
    pub pod_capacity: Option<u32>,
    /// The block that the node uses already: this one or none.
    pub claim: Option<ClaimedBlock>,
}

/// A block that pods of a node use, and that the API server did not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimedBlock {
    /// Number of the block in its pool, from 0.
    pub index: u32,
    /// Prefixes of the block, one or none of each family.
    pub nets: DualStackNets,
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
    /// Time of creation, in seconds since 1970: of pools that overlap, the oldest has the addresses.
    pub created: i64,
}

/// An AddressBlock as the controller knows it. Blocks of all pools count, also those made by hand.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExistingBlock {
    /// Name of the object.
    pub name: String,
    /// Pool label.
    pub pool: String,
    /// Node label.
    pub node: String,
    /// `index`.
    pub index: u32,
    /// `ipv4` and `ipv6`.
    pub nets: DualStackNets,
    /// Request label: UID of the BlockRequest it was made for.
    pub request: Option<String>,
    /// Whether it has a deletion timestamp.
    pub terminating: bool,
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Grant {
    /// The request was answered before, but its status was not written, or the node claims a block that it has: this
    /// block is it.
    Existing {
        /// Name of the AddressBlock.
        name: String,
    },
    /// A block to create.
    New {
        /// Number of the block in its pool, from 0.
        index: u32,
        /// Name of the AddressBlock: `<pool>-<index>`.
        name: String,
        /// Prefixes of the block, one or none of each family.
        nets: DualStackNets,
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

/// Largest number of blocks of a pool for one node: enough for twice as many pods as it can run, so that a stolen token
/// of a node cannot use up a pool.
pub fn block_limit(pod_capacity: Option<u32>, block_size_bits: u8) -> u32 {
    let pods = pod_capacity.unwrap_or(DEFAULT_PODS).min(MAX_PODS);
    let block_size = 1u32.checked_shl(block_size_bits.into()).unwrap_or(u32::MAX);
    pods.div_ceil(block_size).saturating_mul(2).saturating_add(MIN_BLOCKS)
}

/// Answers a request. Asking again with the same UID names the same block as long as it exists, so a crash between
/// creating the block and writing the status costs nothing.
///
/// A number is free when no object has its name and none of its addresses is in any block, so a block made by hand or
/// left by an earlier pool of that name is skipped instead of colliding forever. Numbers that were freed are granted last.
///
/// Addresses in several pools are granted by the oldest only, even while it is disabled or being deleted: the watch may
/// not show yet what another controller granted a moment ago, and two blocks of different pools have different names, so
/// the API server would accept both.
///
/// A claimed block is granted even if the pool is disabled or being deleted: pods have its addresses.
pub fn grant(request: &Request<'_>, pools: &BTreeMap<String, PoolState>, blocks: &BlockIndex) -> Grant {
    if let Some(name) = blocks.answer_to(request.uid) {
        return Grant::Existing { name: name.to_owned() };
    }
    decide(request, pools, blocks).unwrap_or_else(Grant::Refused)
}

fn decide(
    request: &Request<'_>,
    pools: &BTreeMap<String, PoolState>,
    blocks: &BlockIndex,
) -> Result<Grant, Refusal> {
    let name = || request.pool.to_owned();
    let state = pools.get(request.pool).ok_or_else(|| Refusal::UnknownPool { pool: name() })?;
    if request.claim.is_none() && state.terminating {
        return Err(Refusal::Terminating { pool: name() });
    }
    if request.claim.is_none() && state.disabled {
        return Err(Refusal::Disabled { pool: name() });
    }
    let pool =
        state.parsed.as_ref().map_err(|error| Refusal::InvalidPool { pool: name(), error: error.clone() })?;
    let older: PrefixSet = nets_of_older(request.pool, state, pools).collect();
    let found = match request.claim {
        Some(claim) => match claimed(request, claim, pool, &older, blocks)? {
            Claimed::Held(name) => return Ok(Grant::Existing { name }),
            Claimed::Free => Some(claim.index),
        },
        None => blocks.first_free(pool, &older),
    };
    let Some((index, nets)) = found.and_then(|index| Some((index, pool.block(index)?))) else {
        return Err(match blocks.first_unallocated(pool).and_then(|index| pool.block(index)) {
            Some(nets) => Refusal::Overlap { pool: name(), nets },
            None => Refusal::OutOfBlocks { pool: name() },
        });
    };
    check_limit(request, pool, blocks)?;
    Ok(Grant::New { index, name: pool.block_name(index), nets })
}

fn check_limit(request: &Request<'_>, pool: &Pool, blocks: &BlockIndex) -> Result<(), Refusal> {
    let limit = block_limit(request.pod_capacity, pool.block_size_bits());
    let held = blocks.held(request.pool, request.node);
    if request.node.is_empty() || held < limit {
        return Ok(());
    }
    let pool = request.pool.to_owned();
    let node = request.node.to_owned();
    Err(Refusal::BlockLimit { pool, node, blocks: held, limit })
}

enum Claimed {
    Free,
    /// The node has it: the name of the block.
    Held(String),
}

fn claimed(
    request: &Request<'_>,
    claim: ClaimedBlock,
    pool: &Pool,
    older: &PrefixSet,
    blocks: &BlockIndex,
) -> Result<Claimed, Refusal> {
    let ClaimedBlock { index, nets } = claim;
    let conflict = |cause| {
        let pool = request.pool.to_owned();
        let node = request.node.to_owned();
        Refusal::ClaimConflict { pool, node, index, nets, cause }
    };
    if pool.block(index) != Some(nets) {
        return Err(conflict(ClaimConflict::NotInPool));
    }
    let present = blocks.get(&pool.block_name(index)).or_else(|| blocks.overlapping(nets));
    if let Some(present) = present {
        let same = (present.pool.as_str(), present.node.as_str(), present.nets)
            == (request.pool, request.node, nets);
        return match same && !present.terminating {
            true => Ok(Claimed::Held(present.name.clone())),
            false => Err(conflict(ClaimConflict::Block(present.name.clone()))),
        };
    }
    match nets.iter().any(|net| older.overlapping(net).is_some()) {
        true => Err(conflict(ClaimConflict::OlderPool)),
        false => Ok(Claimed::Free),
    }
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

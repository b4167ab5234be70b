//! The status of an AddressPool: how full it is, which nodes own its blocks, and why none is granted. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use fairlead_api::conditions::{Finding, RANGE_IN_USE, condition};
use fairlead_api::resources::{AddressPool, AddressPoolStatus, MAX_LISTED_NODES, NodeBlocks};
use fairlead_cluster::naming::some_of;
use fairlead_ipam::used::{Harm, UsedRange};
use fairlead_ipam::{BlockIndex, Grant, PoolState, Refusal, Request, block_limit, grant, overlaps};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::ResourceExt;

use crate::{grants, used_ranges};

/// Whether a block can be granted.
const READY: &str = "Ready";
/// Whether `spec.disabled` is true.
const DISABLED: &str = "Disabled";
/// Whether no block is left.
pub(crate) const EXHAUSTED: &str = "Exhausted";
/// Whether nodes have as many blocks as they may, and get no more.
pub(crate) const LIMITED: &str = "BlockLimitReached";
/// Nodes that the message of this condition names at most.
const MAX_NAMED_NODES: usize = 5;
/// Whether another pool contains addresses of this one.
pub(crate) const OVERLAPPING: &str = "Overlapping";

/// Reason why a condition of a pool is true or false. Events carry the same word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    Available,
    BlocksLeft,
    Disabled,
    Exhausted,
    Invalid,
    NoOverlap,
    NodesAtLimit,
    NodesBelowLimit,
    OutOfBlocks,
    Overlap,
    RangeFree,
    RangeInUse(Harm),
    SpecDisabled,
    SpecEnabled,
    Terminating,
    Unknown,
}

impl Reason {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Available => "Available",
            Self::BlocksLeft => "BlocksLeft",
            Self::Disabled => "Disabled",
            Self::Exhausted => "Exhausted",
            Self::Invalid => "Invalid",
            Self::NoOverlap => "NoOverlap",
            Self::NodesAtLimit => "NodesAtLimit",
            Self::NodesBelowLimit => "NodesBelowLimit",
            Self::OutOfBlocks => "OutOfBlocks",
            Self::Overlap => "Overlap",
            Self::RangeFree => used_ranges::FREE,
            Self::RangeInUse(harm) => used_ranges::reason(harm),
            Self::SpecDisabled => "SpecDisabled",
            Self::SpecEnabled => "SpecEnabled",
            Self::Terminating => "Terminating",
            Self::Unknown => "Unknown",
        }
    }
}

/// All pools and blocks.
pub(crate) struct Cluster<'a> {
    pools: BTreeMap<String, PoolState>,
    blocks: &'a BlockIndex,
    pod_capacities: &'a BTreeMap<String, u32>,
    /// Ranges that something else uses than the pools.
    used: &'a [UsedRange],
}

/// Whether a condition is true, the reason, and the message.
type Verdict = (bool, Reason, String);

impl<'a> Cluster<'a> {
    pub(crate) fn new(
        pools: &[Arc<AddressPool>],
        blocks: &'a BlockIndex,
        pod_capacities: &'a BTreeMap<String, u32>,
        used: &'a [UsedRange],
    ) -> Self {
        Self { pools: grants::pool_states(pools), blocks, pod_capacities, used }
    }

    /// Numbers of blocks of a pool by node; those without a node are under the empty name.
    pub(crate) fn blocks_by_node(&self, pool: &str) -> BTreeMap<&'a str, i64> {
        self.blocks.holders(pool).map(|(node, count)| (node, i64::from(count))).collect()
    }

    /// The desired status of a pool.
    pub(crate) fn status(&self, pool: &AddressPool, now: jiff::Timestamp) -> AddressPoolStatus {
        let name = pool.name_any();
        let by_node = self.blocks_by_node(&name);
        let blocks: i64 = by_node.values().sum();
        let clamp = |count: u128| i64::try_from(count).unwrap_or(i64::MAX);
        let block_size = 1u128 << u32::from(pool.spec.block_size_bits).min(64);
        let parsed = self.pools.get(&name).and_then(|state| state.parsed.as_ref().ok());
        let capacity = parsed.map(|pool| pool.capacity().saturating_mul(block_size));
        let used = u128::try_from(blocks).unwrap_or_default().saturating_mul(block_size);
        let nodes: Vec<NodeBlocks> = by_node
            .iter()
            .filter(|(node, _)| !node.is_empty())
            .map(|(node, blocks)| NodeBlocks { name: (*node).to_owned(), blocks: *blocks })
            .collect();
        AddressPoolStatus {
            observed_generation: pool.metadata.generation,
            blocks: Some(blocks),
            capacity: capacity.map(clamp),
            used: Some(clamp(used)),
            free: capacity.map(|capacity| clamp(capacity.saturating_sub(used))),
            node_count: Some(i64::try_from(nodes.len()).unwrap_or(i64::MAX)),
            nodes: nodes.into_iter().take(MAX_LISTED_NODES).collect(),
            conditions: self.conditions(pool, blocks, &by_node, now),
        }
    }

    fn conditions(
        &self,
        pool: &AddressPool,
        blocks: i64,
        by_node: &BTreeMap<&str, i64>,
        now: jiff::Timestamp,
    ) -> Vec<Condition> {
        let name = pool.name_any();
        let request = Request { uid: "", pool: &name, node: "", pod_capacity: None, claim: None };
        let refusal = match grant(&request, &self.pools, self.blocks) {
            Grant::Refused(refusal) => Some(refusal),
            Grant::Existing { .. } | Grant::New { .. } => None,
        };
        let present = pool.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        [
            (READY, ready(refusal.as_ref(), blocks)),
            (DISABLED, disabled(pool)),
            (EXHAUSTED, self.exhausted(&name, refusal.as_ref(), blocks)),
            (OVERLAPPING, self.overlapping(&name)),
            (RANGE_IN_USE, self.range_in_use(&name)),
            (LIMITED, self.limited(pool, by_node)),
        ]
        .map(|(type_, (holds, reason, message))| {
            let finding = Finding { type_, holds, reason: reason.as_str(), message };
            condition(present, finding, pool.metadata.generation, Time(now))
        })
        .to_vec()
    }

    fn exhausted(&self, pool: &str, refusal: Option<&Refusal>, blocks: i64) -> Verdict {
        let none_left = match refusal {
            None => false,
            Some(Refusal::OutOfBlocks { .. } | Refusal::Overlap { .. }) => true,
            // It grants none for another reason; this says whether it could.
            Some(_) => self
                .pools
                .get(pool)
                .and_then(|state| state.parsed.as_ref().ok())
                .is_some_and(|parsed| u128::try_from(blocks).unwrap_or_default() >= parsed.capacity()),
        };
        if none_left {
            let message = format!("all {blocks} blocks are granted; append a subnet to spec.subnets");
            return (true, Reason::OutOfBlocks, message);
        }
        (false, Reason::BlocksLeft, "not all blocks are granted".to_owned())
    }

    /// A node that runs many pods of other pools, or an attacker who has its token, can reach the limit.
    fn limited(&self, pool: &AddressPool, by_node: &BTreeMap<&str, i64>) -> Verdict {
        let at_limit = |(node, blocks): &(&&str, &i64)| {
            let pods = self.pod_capacities.get(**node).copied();
            !node.is_empty() && **blocks >= i64::from(block_limit(pods, pool.spec.block_size_bits))
        };
        let nodes: Vec<&str> = by_node.iter().filter(at_limit).map(|(node, _)| *node).collect();
        if nodes.is_empty() {
            let message = "every node has fewer blocks than its pod capacity allows";
            return (false, Reason::NodesBelowLimit, message.to_owned());
        }
        let named = some_of(&nodes, MAX_NAMED_NODES);
        let message =
            format!("{named}: as many blocks as the pod capacity allows; no more are granted to them");
        (true, Reason::NodesAtLimit, message)
    }

    fn range_in_use(&self, name: &str) -> Verdict {
        let nets = self.pools.get(name).and_then(|state| state.parsed.as_ref().ok());
        let found = nets.and_then(|pool| used_ranges::conflict(pool.nets(), self.used));
        let Some((message, harm)) = found else {
            let message = "nothing else uses addresses of this pool".to_owned();
            return (false, Reason::RangeFree, message);
        };
        let advice = "choose other addresses there or make another pool: subnets cannot be removed from a pool, so disable this one and delete it \
                      when it is empty";
        (true, Reason::RangeInUse(harm), format!("{message}; {advice}"))
    }

    fn overlapping(&self, name: &str) -> Verdict {
        let found = self.pools.get(name).and_then(|state| {
            let pool = state.parsed.as_ref().ok()?;
            self.pools.iter().filter(|(other, _)| *other != name).find_map(|(other, of_other)| {
                let overlap = overlaps(pool, of_other.parsed.as_ref().ok()?)?;
                let older = (of_other.created, other.as_str()) < (state.created, name);
                Some((overlap, if older { other.as_str() } else { name }))
            })
        });
        match found {
            None => (false, Reason::NoOverlap, "no other pool contains addresses of this one".to_owned()),
            Some((overlap, older)) => {
                let message = format!(
                    "{overlap}: only {older}, the older one, grants these addresses; \
                     subnets cannot be removed from a pool, so disable one of the pools and delete it when it is empty"
                );
                (true, Reason::Overlap, message)
            }
        }
    }
}

fn ready(refusal: Option<&Refusal>, blocks: i64) -> Verdict {
    let Some(refusal) = refusal else { return (true, Reason::Available, "blocks are available".to_owned()) };
    let (reason, message) = match refusal {
        Refusal::Terminating { .. } => (
            Reason::Terminating,
            format!("the pool is being deleted and waits for {blocks} blocks that pods still use"),
        ),
        Refusal::Disabled { .. } => {
            (Reason::Disabled, format!("spec.disabled is true; nodes still own {blocks} blocks"))
        }
        Refusal::OutOfBlocks { .. } => {
            (Reason::Exhausted, format!("all {blocks} blocks are granted; append a subnet to spec.subnets"))
        }
        Refusal::Overlap { .. } => (Reason::Overlap, refusal.to_string()),
        Refusal::InvalidPool { error, .. } => (Reason::Invalid, error.to_string()),
        // Those of one request; the question whether the pool grants blocks is of no node.
        Refusal::BlockLimit { .. }
        | Refusal::ClaimConflict { .. }
        | Refusal::InvalidRequest { .. }
        | Refusal::UnknownPool { .. } => (Reason::Unknown, refusal.to_string()),
    };
    (false, reason, message)
}

fn disabled(pool: &AddressPool) -> Verdict {
    match pool.spec.disabled {
        true => (true, Reason::SpecDisabled, "spec.disabled is true".to_owned()),
        false => (false, Reason::SpecEnabled, "spec.disabled is not set".to_owned()),
    }
}

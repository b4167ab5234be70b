//! What the status of a pool says: how full it is, who has its blocks, and why it gives none. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use fairlead_api::resources::{AddressBlock, AddressPool, AddressPoolStatus, MAX_LISTED_NODES, NodeBlocks};
use fairlead_ipam::{ExistingBlock, Grant, PoolState, Refusal, Request, grant, overlaps};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::ResourceExt;

use crate::grants;

/// Whether a block can be taken from the pool.
const READY: &str = "Ready";
/// Whether an administrator stopped it.
const DISABLED: &str = "Disabled";
/// Whether no block is left.
pub(crate) const EXHAUSTED: &str = "Exhausted";
/// Whether other pools have addresses of it.
pub(crate) const OVERLAPPING: &str = "Overlapping";

/// All pools and blocks, as decisions see them.
pub(crate) struct Cluster<'a> {
    pools: BTreeMap<String, PoolState>,
    blocks: Vec<ExistingBlock>,
    objects: &'a [Arc<AddressBlock>],
}

/// Whether a condition holds, why in one word, and why in a sentence.
type Finding = (bool, &'static str, String);

impl<'a> Cluster<'a> {
    pub(crate) fn new(pools: &[Arc<AddressPool>], blocks: &'a [Arc<AddressBlock>]) -> Self {
        let existing = blocks.iter().map(|block| block.as_ref().into()).collect();
        Self { pools: grants::pool_states(pools), blocks: existing, objects: blocks }
    }

    /// Blocks of a pool, by the node that holds them. Those without a node are under the empty name.
    pub(crate) fn held(&self, pool: &str) -> BTreeMap<&'a str, i64> {
        let mut held = BTreeMap::new();
        for block in self.objects.iter().filter(|block| block.pool() == Some(pool)) {
            let count: &mut i64 = held.entry(block.node().unwrap_or_default()).or_default();
            *count = count.saturating_add(1);
        }
        held
    }

    /// The status a pool should have.
    pub(crate) fn status(&self, pool: &AddressPool, now: jiff::Timestamp) -> AddressPoolStatus {
        let name = pool.name_any();
        let by_node = self.held(&name);
        let held: i64 = by_node.values().sum();
        let clamp = |count: u128| i64::try_from(count).unwrap_or(i64::MAX);
        let block_size = 1u128 << u32::from(pool.spec.block_size_bits).min(64);
        let usable = self.pools.get(&name).and_then(|state| state.parsed.as_ref().ok());
        let capacity = usable.map(|pool| pool.capacity().saturating_mul(block_size));
        let granted = u128::try_from(held).unwrap_or_default().saturating_mul(block_size);
        let nodes = by_node.iter().filter(|(node, _)| !node.is_empty());
        let nodes: Vec<NodeBlocks> =
            nodes.map(|(node, blocks)| NodeBlocks { name: (*node).to_owned(), blocks: *blocks }).collect();
        AddressPoolStatus {
            observed_generation: pool.metadata.generation,
            blocks: Some(held),
            capacity: capacity.map(clamp),
            used: Some(clamp(granted)),
            free: capacity.map(|capacity| clamp(capacity.saturating_sub(granted))),
            node_count: Some(i64::try_from(nodes.len()).unwrap_or(i64::MAX)),
            nodes: nodes.into_iter().take(MAX_LISTED_NODES).collect(),
            conditions: self.conditions(pool, held, now),
        }
    }

    fn conditions(&self, pool: &AddressPool, held: i64, now: jiff::Timestamp) -> Vec<Condition> {
        let name = pool.name_any();
        let refusal = match grant(&Request { uid: "", pool: &name, node: "" }, &self.pools, &self.blocks) {
            Grant::Refused(refusal) => Some(refusal),
            Grant::Existing { .. } | Grant::New { .. } => None,
        };
        let present = pool.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        [
            (READY, ready(refusal.as_ref(), held)),
            (DISABLED, disabled(pool)),
            (EXHAUSTED, self.exhausted(&name, refusal.as_ref(), held)),
            (OVERLAPPING, self.overlapping(&name)),
        ]
        .map(|(type_, finding)| condition(present, type_, finding, pool.metadata.generation, now))
        .to_vec()
    }

    fn exhausted(&self, pool: &str, refusal: Option<&Refusal>, held: i64) -> Finding {
        let none_left = match refusal {
            None => false,
            Some(Refusal::OutOfBlocks { .. } | Refusal::Overlap { .. }) => true,
            // Then it gives none anyway; this tells whether it would.
            Some(_) => self
                .pools
                .get(pool)
                .and_then(|state| state.parsed.as_ref().ok())
                .is_some_and(|usable| u128::try_from(held).unwrap_or_default() >= usable.capacity()),
        };
        if none_left {
            let message = format!("all blocks are given ({held}); add a subnet at the end of spec.subnets");
            return (true, "OutOfBlocks", message);
        }
        (false, "BlocksLeft", "not all blocks are given".to_owned())
    }

    fn overlapping(&self, name: &str) -> Finding {
        let found = self.pools.get(name).and_then(|state| {
            let pool = state.parsed.as_ref().ok()?;
            self.pools.iter().filter(|(other, _)| *other != name).find_map(|(other, of_other)| {
                let overlap = overlaps(pool, of_other.parsed.as_ref().ok()?)?;
                let older = (of_other.created, other.as_str()) < (state.created, name);
                Some((overlap, if older { other.as_str() } else { name }))
            })
        });
        match found {
            None => (false, "NoOverlap", "no other pool has addresses of this one".to_owned()),
            Some((overlap, older)) => {
                let message = format!(
                    "{overlap}: only {older}, the older one, gives these addresses; \
                     no subnet can be taken out of a pool, so disable one of the pools and delete it when it is empty"
                );
                (true, "Overlap", message)
            }
        }
    }
}

fn ready(refusal: Option<&Refusal>, held: i64) -> Finding {
    let Some(refusal) = refusal else { return (true, "Available", "blocks can be taken".to_owned()) };
    match refusal {
        Refusal::Terminating { .. } => (
            false,
            "Terminating",
            format!("is being deleted and waits for {held} blocks that pods still use"),
        ),
        Refusal::Disabled { .. } => {
            (false, "Disabled", format!("spec.disabled is true; {held} blocks are left on nodes"))
        }
        Refusal::OutOfBlocks { .. } => (
            false,
            EXHAUSTED,
            format!("all {held} blocks are given; add a subnet at the end of spec.subnets"),
        ),
        Refusal::Overlap { .. } => (false, "Overlap", refusal.to_string()),
        Refusal::InvalidPool { error, .. } => (false, "Invalid", error.to_string()),
        Refusal::UnknownPool { .. } => (false, "Unknown", refusal.to_string()),
    }
}

fn disabled(pool: &AddressPool) -> Finding {
    match pool.spec.disabled {
        true => (true, "SpecDisabled", "spec.disabled is true".to_owned()),
        false => (false, "SpecEnabled", "spec.disabled is not set".to_owned()),
    }
}

/// Its transition time moves only when it changes sides.
fn condition(
    present: &[Condition],
    type_: &str,
    (holds, reason, message): Finding,
    generation: Option<i64>,
    now: jiff::Timestamp,
) -> Condition {
    let status = if holds { "True" } else { "False" };
    let before = present.iter().find(|condition| condition.type_ == type_);
    let since =
        before.filter(|before| before.status == status).map(|before| before.last_transition_time.clone());
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: generation,
        last_transition_time: since.unwrap_or(Time(now)),
    }
}

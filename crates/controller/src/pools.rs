//! AddressPools: finalizers, and a status that says how full they are and what is wrong with them.

use std::sync::Arc;
use std::time::Duration;

use fairlead_api::names::COIL_FINALIZER;
use fairlead_api::resources::{AddressBlock, AddressPool, AddressPoolStatus};
use fairlead_ipam::{Pool, overlaps};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::api::{Patch, PatchParams};
use kube::runtime::reflector::Store;
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;

use crate::grants;

/// Changes are gathered this long, so that a thousand new blocks cost a few status writes.
const GATHER: Duration = Duration::from_millis(500);
/// How often pools are looked at without a change, for writes that failed.
const SWEEP: Duration = Duration::from_secs(10);

/// One thing to write.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// The finalizers of a pool, all of them.
    Finalizers {
        /// The pool.
        pool: String,
        /// Its finalizers as they should be.
        finalizers: Vec<String>,
        /// The version that was looked at.
        version: Option<String>,
    },
    /// The status of a pool.
    Status {
        /// The pool.
        pool: String,
        /// Its status as it should be.
        status: Box<AddressPoolStatus>,
    },
}

/// Everything that has to be written for these pools and blocks. Pure.
pub fn actions(
    pools: &[Arc<AddressPool>],
    blocks: &[Arc<AddressBlock>],
    now: jiff::Timestamp,
) -> Vec<Action> {
    let parsed: Vec<(String, Pool)> =
        pools.iter().filter_map(|pool| Some((pool.name_any(), grants::parse(pool).ok()?))).collect();
    pools
        .iter()
        .flat_map(|pool| {
            let held = blocks.iter().filter(|block| block.pool() == Some(&pool.name_any())).count();
            [finalizers(pool, held), status(pool, &parsed, held, now)]
        })
        .flatten()
        .collect()
}

/// A pool keeps our finalizer until its last block is gone.
fn finalizers(pool: &AddressPool, held: usize) -> Option<Action> {
    let has = pool.finalizers().iter().any(|finalizer| finalizer == COIL_FINALIZER);
    let wants = pool.metadata.deletion_timestamp.is_none() || held > 0;
    // The API server takes no new finalizer on an object that is being deleted.
    if has == wants || (wants && pool.metadata.deletion_timestamp.is_some()) {
        return None;
    }
    let mut finalizers: Vec<String> =
        pool.finalizers().iter().filter(|finalizer| *finalizer != COIL_FINALIZER).cloned().collect();
    finalizers.extend(wants.then(|| COIL_FINALIZER.to_owned()));
    Some(Action::Finalizers { pool: pool.name_any(), finalizers, version: pool.resource_version() })
}

fn status(
    pool: &AddressPool,
    parsed: &[(String, Pool)],
    held: usize,
    now: jiff::Timestamp,
) -> Option<Action> {
    let name = pool.name_any();
    let present = pool.status.clone().unwrap_or_default();
    let clamp = |count: u128| i64::try_from(count).unwrap_or(i64::MAX);
    let usable = parsed.iter().find(|(other, _)| *other == name).map(|(_, pool)| pool);
    let block_size = 1u128 << u32::from(pool.spec.block_size_bits).min(64);
    let capacity = usable.map(|pool| pool.capacity().saturating_mul(block_size));
    let granted = (held as u128).saturating_mul(block_size);
    let (ready, reason, message) = readiness(pool, parsed, held);
    let condition = condition(&present, ready, reason, message, pool.metadata.generation, now);
    let status = AddressPoolStatus {
        observed_generation: pool.metadata.generation,
        blocks: Some(held as i64),
        capacity: capacity.map(clamp),
        used: Some(clamp(granted)),
        free: capacity.map(|capacity| clamp(capacity.saturating_sub(granted))),
        conditions: vec![condition],
    };
    (present != status).then(|| Action::Status { pool: name, status: Box::new(status) })
}

fn readiness(pool: &AddressPool, parsed: &[(String, Pool)], held: usize) -> (bool, &'static str, String) {
    let name = pool.name_any();
    if pool.metadata.deletion_timestamp.is_some() {
        return (false, "Terminating", format!("waits for {held} blocks that pods still use"));
    }
    let own = match grants::parse(pool) {
        Ok(own) => own,
        Err(error) => return (false, "Invalid", error.to_string()),
    };
    let overlap =
        parsed.iter().filter(|(other, _)| *other != name).find_map(|(_, other)| overlaps(&own, other));
    if let Some(overlap) = overlap {
        return (
            false,
            "Overlap",
            format!("{overlap}; until then the addresses in both are given only once"),
        );
    }
    if held as u128 >= own.capacity() {
        return (
            false,
            "Exhausted",
            format!("all {held} blocks are given; add a subnet at the end of spec.subnets"),
        );
    }
    (true, "Available", "blocks can be taken".to_owned())
}

/// The `Ready` condition; its transition time moves only when it changes sides.
fn condition(
    present: &AddressPoolStatus,
    ready: bool,
    reason: &str,
    message: String,
    generation: Option<i64>,
    now: jiff::Timestamp,
) -> Condition {
    let status = if ready { "True" } else { "False" };
    let before = present.conditions.iter().find(|condition| condition.type_ == "Ready");
    let since =
        before.filter(|before| before.status == status).map(|before| before.last_transition_time.clone());
    Condition {
        type_: "Ready".to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: generation,
        last_transition_time: since.unwrap_or(Time(now)),
    }
}

/// Keeps pools as they should be for ever.
pub async fn run(
    client: Client,
    pools: Store<AddressPool>,
    blocks: Store<AddressBlock>,
    mut pools_changed: watch::Receiver<u64>,
    mut blocks_changed: watch::Receiver<u64>,
) {
    let api: Api<AddressPool> = Api::all(client);
    loop {
        for action in actions(&pools.state(), &blocks.state(), jiff::Timestamp::now()) {
            if let Err(error) = carry_out(&api, &action).await {
                tracing::warn!(?action, %error, "cannot write; will try again");
            }
        }
        let changed = async {
            tokio::select! {
                _ = pools_changed.changed() => {}
                _ = blocks_changed.changed() => {}
            }
        };
        let _ = tokio::time::timeout(SWEEP, changed).await;
        tokio::time::sleep(GATHER).await;
    }
}

async fn carry_out(pools: &Api<AddressPool>, action: &Action) -> Result<(), kube::Error> {
    let parameters = PatchParams::default();
    let outcome = match action {
        Action::Finalizers { pool, finalizers, version } => {
            let patch =
                serde_json::json!({ "metadata": { "finalizers": finalizers, "resourceVersion": version } });
            pools.patch(pool, &parameters, &Patch::Merge(&patch)).await
        }
        Action::Status { pool, status } => {
            let patch = serde_json::json!({ "status": status });
            pools.patch_status(pool, &parameters, &Patch::Merge(&patch)).await
        }
    };
    match outcome {
        Ok(_) => Ok(()),
        // Gone, or changed since we looked: the watch brings what it is now.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(name: &str, subnet: &str, deleting: bool, finalizer: bool) -> Arc<AddressPool> {
        let finalizers: Vec<&str> = finalizer.then_some(COIL_FINALIZER).into_iter().collect();
        let deletion = deleting.then_some("2026-01-01T00:00:00Z");
        Arc::new(
            serde_json::from_value(serde_json::json!({
                "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool",
                "metadata": { "name": name, "finalizers": finalizers, "deletionTimestamp": deletion },
                "spec": { "blockSizeBits": 2, "subnets": [{ "ipv4": subnet }] },
            }))
            .unwrap(),
        )
    }

    fn block(pool: &str) -> Arc<AddressBlock> {
        Arc::new(
            serde_json::from_value(serde_json::json!({
                "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock",
                "metadata": { "name": "b", "labels": { "coil.cybozu.com/pool": pool } }, "index": 0,
            }))
            .unwrap(),
        )
    }

    fn ready(actions: &[Action], name: &str) -> (String, String) {
        let found = actions.iter().find_map(|action| match action {
            Action::Status { pool, status } if pool == name => status.conditions.first().cloned(),
            _ => None,
        });
        found.map(|condition| (condition.status, condition.reason)).unwrap()
    }

    #[test]
    fn a_new_pool_gets_a_finalizer_and_a_status() {
        let actions = actions(&[pool("p", "10.0.0.0/24", false, false)], &[], jiff::Timestamp::UNIX_EPOCH);
        assert!(
            matches!(&actions[0], Action::Finalizers { finalizers, .. } if finalizers == &[COIL_FINALIZER])
        );
        assert_eq!(ready(&actions, "p"), ("True".into(), "Available".into()));
    }

    #[test]
    fn a_pool_leaves_when_its_last_block_has_left() {
        let dying = pool("p", "10.0.0.0/24", true, true);
        let held = actions(std::slice::from_ref(&dying), &[block("p")], jiff::Timestamp::UNIX_EPOCH);
        assert!(!held.iter().any(|action| matches!(action, Action::Finalizers { .. })));
        assert_eq!(ready(&held, "p").1, "Terminating");
        let free = actions(&[dying], &[], jiff::Timestamp::UNIX_EPOCH);
        assert!(
            free.iter().any(|a| matches!(a, Action::Finalizers { finalizers, .. } if finalizers.is_empty()))
        );
    }

    #[test]
    fn overlapping_pools_are_both_told() {
        let pools = [pool("a", "10.0.0.0/24", false, true), pool("b", "10.0.0.128/25", false, true)];
        let actions = actions(&pools, &[], jiff::Timestamp::UNIX_EPOCH);
        assert_eq!(ready(&actions, "a").1, "Overlap");
        assert_eq!(ready(&actions, "b").1, "Overlap");
    }

    #[test]
    fn what_is_right_is_not_written_again() {
        let pool = pool("p", "10.0.0.0/24", false, true);
        let first = actions(std::slice::from_ref(&pool), &[], jiff::Timestamp::UNIX_EPOCH);
        let Action::Status { status, .. } = &first[0] else { panic!("no status") };
        let written = Arc::new(AddressPool { status: Some((**status).clone()), ..(*pool).clone() });
        let later = jiff::Timestamp::from_second(1000).unwrap();
        assert_eq!(actions(&[written], &[], later), Vec::new());
    }
}

//! AddressPools: finalizers, a status that says how full they are and what is wrong with them, and Events.

use std::sync::Arc;
use std::time::Duration;

use fairlead_api::names::COIL_FINALIZER;
use fairlead_api::resources::{AddressBlock, AddressPool, AddressPoolStatus};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{Patch, PatchParams};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::runtime::reflector::Store;
use kube::{Api, Client, Resource, ResourceExt};
use tokio::sync::watch;

use crate::pool_status::{Cluster, EXHAUSTED, OVERLAPPING};

/// Changes are gathered this long, so that a thousand new blocks cost a few status writes.
const GATHER: Duration = Duration::from_millis(500);
/// How often pools are looked at without a change, for writes that failed.
const SWEEP: Duration = Duration::from_secs(10);

/// One thing to write.
#[derive(Debug, Clone, PartialEq)]
enum Action {
    /// The finalizers of a pool, all of them.
    Finalizers {
        pool: String,
        finalizers: Vec<String>,
        /// The version that was looked at.
        version: Option<String>,
    },
    /// The status of a pool.
    Status {
        pool: Box<ObjectReference>,
        status: Box<AddressPoolStatus>,
        /// Conditions that hold now and did not before, and that somebody should look at.
        news: Vec<Condition>,
    },
}

/// Everything that has to be written for these pools and blocks. Pure.
fn actions(pools: &[Arc<AddressPool>], blocks: &[Arc<AddressBlock>], now: jiff::Timestamp) -> Vec<Action> {
    let cluster = Cluster::new(pools, blocks);
    pools
        .iter()
        .flat_map(|pool| [finalizers(pool, &cluster), status(pool, &cluster, now)])
        .flatten()
        .collect()
}

/// A pool keeps our finalizer until its last block is gone.
fn finalizers(pool: &AddressPool, cluster: &Cluster<'_>) -> Option<Action> {
    let has = pool.finalizers().iter().any(|finalizer| finalizer == COIL_FINALIZER);
    let deleting = pool.metadata.deletion_timestamp.is_some();
    let wants = !deleting || !cluster.held(&pool.name_any()).is_empty();
    // The API server takes no new finalizer on an object that is being deleted.
    if has == wants || (wants && deleting) {
        return None;
    }
    let mut finalizers: Vec<String> =
        pool.finalizers().iter().filter(|finalizer| *finalizer != COIL_FINALIZER).cloned().collect();
    finalizers.extend(wants.then(|| COIL_FINALIZER.to_owned()));
    Some(Action::Finalizers { pool: pool.name_any(), finalizers, version: pool.resource_version() })
}

fn status(pool: &AddressPool, cluster: &Cluster<'_>, now: jiff::Timestamp) -> Option<Action> {
    let status = cluster.status(pool, now);
    let before = pool.status.as_ref();
    if before == Some(&status) {
        return None;
    }
    let held_before = |type_: &str| {
        let conditions = before.map(|status| status.conditions.as_slice()).unwrap_or_default();
        conditions.iter().any(|condition| condition.type_ == type_ && condition.status == "True")
    };
    let is_news = |condition: &&Condition| {
        [EXHAUSTED, OVERLAPPING].contains(&condition.type_.as_str())
            && condition.status == "True"
            && !held_before(&condition.type_)
    };
    let news = status.conditions.iter().filter(is_news).cloned().collect();
    Some(Action::Status { pool: Box::new(pool.object_ref(&())), status: Box::new(status), news })
}

/// Keeps pools as they should be for ever.
pub(crate) async fn run(
    client: Client,
    pools: Store<AddressPool>,
    blocks: Store<AddressBlock>,
    mut pools_changed: watch::Receiver<u64>,
    mut blocks_changed: watch::Receiver<u64>,
) {
    let recorder = Recorder::new(client.clone(), Reporter::from("fairlead-controller"));
    let api: Api<AddressPool> = Api::all(client);
    loop {
        for action in actions(&pools.state(), &blocks.state(), jiff::Timestamp::now()) {
            if let Err(error) = carry_out(&api, &recorder, &action).await {
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

async fn carry_out(
    pools: &Api<AddressPool>,
    recorder: &Recorder,
    action: &Action,
) -> Result<(), kube::Error> {
    let parameters = PatchParams::default();
    let outcome = match action {
        Action::Finalizers { pool, finalizers, version } => {
            let patch =
                serde_json::json!({ "metadata": { "finalizers": finalizers, "resourceVersion": version } });
            pools.patch(pool, &parameters, &Patch::Merge(&patch)).await
        }
        Action::Status { pool, status, .. } => {
            // A merge patch leaves alone what is left out, and an empty list must be written as such.
            let mut patch = serde_json::json!({ "status": status });
            if let Some(status) = patch.get_mut("status").and_then(serde_json::Value::as_object_mut) {
                status.entry("nodes").or_insert_with(|| serde_json::json!([]));
                for field in ["capacity", "free"] {
                    status.entry(field).or_insert(serde_json::Value::Null);
                }
            }
            let name = pool.name.clone().unwrap_or_default();
            pools.patch_status(&name, &parameters, &Patch::Merge(&patch)).await
        }
    };
    match outcome {
        Ok(_) => {}
        // Gone, or changed since we looked: the watch brings what it is now.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => return Ok(()),
        Err(error) => return Err(error),
    }
    if let Action::Status { pool, news, .. } = action {
        for condition in news {
            recorder.publish(&event(condition), pool).await?;
        }
    }
    Ok(())
}

fn event(condition: &Condition) -> Event {
    Event {
        type_: EventType::Warning,
        reason: condition.reason.clone(),
        note: Some(condition.message.clone()),
        action: "Grant".to_owned(),
        secondary: None,
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
                "metadata": { "name": name, "finalizers": finalizers, "deletionTimestamp": deletion, "uid": name,
                    "creationTimestamp": "2026-01-01T00:00:00Z", "generation": 3 },
                "spec": { "blockSizeBits": 2, "subnets": [{ "ipv4": subnet }] },
            }))
            .unwrap(),
        )
    }

    fn block(pool: &str) -> Arc<AddressBlock> {
        Arc::new(
            serde_json::from_value(serde_json::json!({
                "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock",
                "metadata": { "name": "b", "labels": { "coil.cybozu.com/pool": pool, "coil.cybozu.com/node": "n1" } }, "index": 0,
            }))
            .unwrap(),
        )
    }

    fn ready(actions: &[Action], name: &str) -> (String, String) {
        let found = actions.iter().find_map(|action| match action {
            Action::Status { pool, status, .. } if pool.name.as_deref() == Some(name) => {
                status.conditions.first().cloned()
            }
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

    fn holds(actions: &[Action], name: &str, type_: &str) -> (bool, String) {
        let found = actions.iter().find_map(|action| match action {
            Action::Status { pool, status, .. } if pool.name.as_deref() == Some(name) => {
                status.conditions.iter().find(|condition| condition.type_ == type_).cloned()
            }
            _ => None,
        });
        found.map(|condition| (condition.status == "True", condition.message)).unwrap()
    }

    #[test]
    fn overlapping_pools_are_both_told_and_the_younger_gives_nothing_of_it() {
        let pools = [pool("a", "10.0.0.0/24", false, true), pool("b", "10.0.0.128/25", false, true)];
        let actions = actions(&pools, &[], jiff::Timestamp::UNIX_EPOCH);
        assert_eq!(ready(&actions, "a"), ("True".into(), "Available".into()));
        assert_eq!(ready(&actions, "b"), ("False".into(), "Overlap".into()));
        for name in ["a", "b"] {
            let (overlapping, message) = holds(&actions, name, "Overlapping");
            assert!(overlapping && message.contains("only a, the older one"), "{message}");
        }
    }

    #[test]
    fn a_pool_that_gave_its_last_block_says_so_once() {
        let one = pool("p", "10.0.0.0/30", false, true);
        let first = actions(std::slice::from_ref(&one), &[block("p")], jiff::Timestamp::UNIX_EPOCH);
        let Action::Status { status, news, .. } = &first[0] else { panic!("no status") };
        assert_eq!(ready(&first, "p"), ("False".into(), "Exhausted".into()));
        assert!(holds(&first, "p", "Exhausted").0);
        assert_eq!((status.used, status.free, status.node_count), (Some(4), Some(0), Some(1)));
        assert_eq!((status.nodes[0].name.as_str(), status.nodes[0].blocks), ("n1", 1));
        let told: Vec<&str> = news.iter().map(|condition| condition.reason.as_str()).collect();
        assert_eq!(told, ["OutOfBlocks"]);
        // Another block beside it changes the numbers, and is no news.
        let written = Arc::new(AddressPool { status: Some((**status).clone()), ..(*one).clone() });
        let second = actions(&[written], &[block("p"), block("p")], jiff::Timestamp::UNIX_EPOCH);
        assert!(matches!(&second[0], Action::Status { news, .. } if news.is_empty()), "{second:?}");
    }

    #[test]
    fn a_disabled_pool_says_so_and_for_which_generation() {
        let mut disabled = (*pool("p", "10.0.0.0/24", false, true)).clone();
        disabled.spec.disabled = true;
        let actions = actions(&[Arc::new(disabled)], &[block("p")], jiff::Timestamp::UNIX_EPOCH);
        assert_eq!(ready(&actions, "p"), ("False".into(), "Disabled".into()));
        assert!(holds(&actions, "p", "Disabled").0 && !holds(&actions, "p", "Exhausted").0);
        let Action::Status { status, .. } = &actions[0] else { panic!("no status") };
        assert!(status.conditions.iter().all(|condition| condition.observed_generation == Some(3)));
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

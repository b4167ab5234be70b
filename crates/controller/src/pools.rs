//! Maintains AddressPools: the finalizer, the status with its conditions, and Events.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::conditions::{RANGE_IN_USE, is_news};
use fairlead_api::names::COIL_FINALIZER;
use fairlead_api::resources::{AddressPool, AddressPoolStatus};
use fairlead_cluster::events::{EventPublisher, PendingEvent};
use fairlead_cluster::writes::{self, is_stale};
use fairlead_ipam::BlockIndex;
use fairlead_ipam::used::{Harm, UsedRange};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource, ResourceExt};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::changes::Changes;
use crate::grants::{lock, pod_capacity};
use crate::pool_status::{Cluster, EXHAUSTED, LIMITED, OVERLAPPING, Reason};
use crate::stores::Stores;
use crate::used_ranges::Used;
use crate::work_queue::ReconcileMetrics;

/// Changes are collected this long, so that a thousand new blocks cost a few status writes.
const DEBOUNCE: Duration = Duration::from_millis(500);
/// Interval without a change, for writes that failed.
const RESYNC_INTERVAL: Duration = Duration::from_secs(10);
/// Time that the first look waits for the ranges that something else uses.
const RANGES: Duration = Duration::from_secs(5);

/// One write.
#[derive(Debug, Clone, PartialEq)]
enum Action {
    /// All finalizers of a pool.
    Finalizers {
        pool: String,
        finalizers: Vec<String>,
        /// The resource version that was read.
        version: Option<String>,
    },
    /// The status of a pool.
    Status {
        pool: String,
        status: Box<AddressPoolStatus>,
        /// Conditions that have become true, or worse, and need attention.
        events: Vec<PendingEvent>,
    },
}

/// All writes that these pools and blocks need. Pure.
fn actions(
    pools: &[Arc<AddressPool>],
    blocks: &BlockIndex,
    pod_capacities: &BTreeMap<String, u32>,
    used: &[UsedRange],
    now: jiff::Timestamp,
) -> Vec<Action> {
    let cluster = Cluster::new(pools, blocks, pod_capacities, used);
    pools
        .iter()
        .flat_map(|pool| [finalizers(pool, &cluster), status(pool, &cluster, now)])
        .flatten()
        .collect()
}

/// A pool keeps our finalizer until its last block is deleted.
fn finalizers(pool: &AddressPool, cluster: &Cluster<'_>) -> Option<Action> {
    let present = pool.finalizers().iter().any(|finalizer| finalizer == COIL_FINALIZER);
    let deleting = pool.metadata.deletion_timestamp.is_some();
    let desired = !deleting || !cluster.blocks_by_node(&pool.name_any()).is_empty();
    // The API server takes no new finalizer on an object that is being deleted.
    if present == desired || (desired && deleting) {
        return None;
    }
    let mut finalizers = writes::other_finalizers(pool, COIL_FINALIZER);
    finalizers.extend(desired.then(|| COIL_FINALIZER.to_owned()));
    Some(Action::Finalizers { pool: pool.name_any(), finalizers, version: pool.resource_version() })
}

fn status(pool: &AddressPool, cluster: &Cluster<'_>, now: jiff::Timestamp) -> Option<Action> {
    let status = cluster.status(pool, now);
    let before = pool.status.as_ref();
    if before == Some(&status) {
        return None;
    }
    let present = before.map(|before| before.conditions.as_slice()).unwrap_or_default();
    let event = |(type_, reason): (&str, Reason)| {
        let condition = status.conditions.iter().find(|condition| condition.type_ == type_)?;
        is_news(present, condition, reason.as_str()).then(|| PendingEvent {
            regarding: pool.object_ref(&()),
            reason: reason.as_str(),
            action: "Grant",
            note: condition.message.clone(),
        })
    };
    let conditions = [
        (EXHAUSTED, Reason::OutOfBlocks),
        (LIMITED, Reason::NodesAtLimit),
        (OVERLAPPING, Reason::Overlap),
        (RANGE_IN_USE, Reason::RangeInUse(Harm::Certain)),
    ];
    let events = conditions.into_iter().filter_map(event).collect();
    Some(Action::Status { pool: pool.name_any(), status: Box::new(status), events })
}

/// Maintains pools forever.
pub(crate) async fn run(
    client: Client,
    stores: Stores,
    watches: [watch::Receiver<u64>; 3],
    mut used: watch::Receiver<Used>,
    publisher: EventPublisher,
    metrics: ReconcileMetrics,
) {
    let api: Api<AddressPool> = Api::all(client);
    // Without them a range that is in use would seem to be free for a moment.
    let _ = timeout(RANGES, used.wait_for(Option::is_some)).await;
    let mut changes = Changes { watches, resync: RESYNC_INTERVAL, debounce: DEBOUNCE };
    loop {
        let start = Instant::now();
        let mut ok = true;
        let nodes = stores.nodes.state();
        let capacities = nodes.iter().filter_map(|node| Some((node.name_any(), pod_capacity(node)?)));
        let capacities = capacities.collect();
        let now = jiff::Timestamp::now();
        let pools = stores.pools.state();
        let used = used.borrow().clone().unwrap_or_default();
        // Grants wait meanwhile: of the index of all blocks only counts are read, which takes as long as one grant.
        let actions = actions(&pools, lock(&stores.known).current(start), &capacities, &used, now);
        for action in actions {
            match apply(&api, &publisher, action).await {
                Err(error) if !is_stale(&error) => {
                    ok = false;
                    tracing::warn!(%error, "cannot update an AddressPool; retrying")
                }
                _ => {}
            }
        }
        metrics.ended("addresspool", start.elapsed(), ok);
        changes.next().await;
    }
}

async fn apply(
    pools: &Api<AddressPool>,
    publisher: &EventPublisher,
    action: Action,
) -> Result<(), kube::Error> {
    match action {
        Action::Finalizers { pool, finalizers, version } => {
            writes::replace_finalizers(pools, &pool, &finalizers, version.as_deref()).await?;
        }
        Action::Status { pool, status, events } => {
            // A merge patch leaves absent fields alone, so empty ones are written explicitly.
            let mut patch = serde_json::json!({ "status": status });
            if let Some(status) = patch.get_mut("status").and_then(serde_json::Value::as_object_mut) {
                status.entry("nodes").or_insert_with(|| serde_json::json!([]));
                for field in ["capacity", "free"] {
                    status.entry(field).or_insert(serde_json::Value::Null);
                }
            }
            pools.patch_status(&pool, &PatchParams::default(), &Patch::Merge(&patch)).await?;
            events.into_iter().for_each(|event| publisher.warn(event));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use fairlead_api::resources::AddressBlock;
    use fairlead_ipam::ExistingBlock;
    use fairlead_ipam::used::RangeUser;

    use super::*;

    /// Actions of [`super::actions`] for these blocks, each of which gets a name of its own.
    fn actions(
        pools: &[Arc<AddressPool>],
        blocks: &[Arc<AddressBlock>],
        pod_capacities: &BTreeMap<String, u32>,
        now: jiff::Timestamp,
    ) -> Vec<Action> {
        let named = blocks.iter().enumerate().map(|(number, block)| ExistingBlock {
            name: number.to_string(),
            ..ExistingBlock::from(block.as_ref())
        });
        super::actions(pools, &named.collect(), pod_capacities, &[], now)
    }

    const NO_NODES: BTreeMap<String, u32> = BTreeMap::new();

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
            Action::Status { pool, status, .. } if pool == name => status.conditions.first().cloned(),
            _ => None,
        });
        found.map(|condition| (condition.status, condition.reason)).unwrap()
    }

    #[test]
    fn a_new_pool_gets_a_finalizer_and_a_status() {
        let actions =
            actions(&[pool("p", "10.0.0.0/24", false, false)], &[], &NO_NODES, jiff::Timestamp::UNIX_EPOCH);
        assert!(
            matches!(&actions[0], Action::Finalizers { finalizers, .. } if finalizers == &[COIL_FINALIZER])
        );
        assert_eq!(ready(&actions, "p"), ("True".into(), "Available".into()));
    }

    #[test]
    fn a_pool_is_deleted_after_its_last_block() {
        let dying = pool("p", "10.0.0.0/24", true, true);
        let in_use =
            actions(std::slice::from_ref(&dying), &[block("p")], &NO_NODES, jiff::Timestamp::UNIX_EPOCH);
        assert!(!in_use.iter().any(|action| matches!(action, Action::Finalizers { .. })));
        assert_eq!(ready(&in_use, "p").1, "Terminating");
        let free = actions(&[dying], &[], &NO_NODES, jiff::Timestamp::UNIX_EPOCH);
        assert!(
            free.iter().any(|a| matches!(a, Action::Finalizers { finalizers, .. } if finalizers.is_empty()))
        );
    }

    fn holds(actions: &[Action], name: &str, type_: &str) -> (bool, String) {
        let found = actions.iter().find_map(|action| match action {
            Action::Status { pool, status, .. } if pool == name => {
                status.conditions.iter().find(|condition| condition.type_ == type_).cloned()
            }
            _ => None,
        });
        found.map(|condition| (condition.status == "True", condition.message)).unwrap()
    }

    #[test]
    fn overlapping_pools_are_both_reported_and_the_younger_grants_none_of_the_overlap() {
        let pools = [pool("a", "10.0.0.0/24", false, true), pool("b", "10.0.0.128/25", false, true)];
        let actions = actions(&pools, &[], &NO_NODES, jiff::Timestamp::UNIX_EPOCH);
        assert_eq!(ready(&actions, "a"), ("True".into(), "Available".into()));
        assert_eq!(ready(&actions, "b"), ("False".into(), "Overlap".into()));
        for name in ["a", "b"] {
            let (overlapping, message) = holds(&actions, name, "Overlapping");
            assert!(overlapping && message.contains("only a, the older one"), "{message}");
        }
    }

    /// Actions for a pool without blocks, beside these ranges.
    fn look(pool: &Arc<AddressPool>, used: &[UsedRange]) -> Vec<Action> {
        let blocks = std::iter::empty::<ExistingBlock>().collect();
        super::actions(std::slice::from_ref(pool), &blocks, &NO_NODES, used, jiff::Timestamp::UNIX_EPOCH)
    }

    #[test]
    fn a_pool_in_a_range_of_services_says_so_with_an_event_and_stays_as_it_is() {
        let pool = pool("p", "10.96.8.0/24", false, true);
        let user = RangeUser::Services("kubernetes".to_owned());
        let used = [UsedRange { user, net: "10.96.0.0/12".parse().unwrap() }];
        let found = look(&pool, &used);
        let (in_use, message) = holds(&found, "p", "RangeInUse");
        assert!(in_use && message.contains("10.96.0.0/12 of ServiceCIDR kubernetes"), "{message}");
        assert_eq!(ready(&found, "p"), ("True".into(), "Available".into()));
        let Action::Status { status, events, .. } = &found[0] else { panic!("no status") };
        assert_eq!(events.iter().map(|event| event.reason).collect::<Vec<_>>(), ["RangeInUse"]);
        let written = Arc::new(AddressPool { status: Some((**status).clone()), ..(*pool).clone() });
        assert_eq!(look(&written, &used), Vec::new(), "said once");
        assert!(!holds(&look(&written, &[]), "p", "RangeInUse").0);
    }

    #[test]
    fn a_harm_that_becomes_certain_has_an_event_of_its_own() {
        let pool = pool("p", "10.64.0.0/16", false, true);
        let peer = |net: &str| {
            let user = RangeUser::Peer("office".to_owned());
            UsedRange { user, net: net.parse().unwrap() }
        };
        let around = look(&pool, &[peer("10.0.0.0/8")]);
        let Action::Status { status, events, .. } = &around[0] else { panic!("no status") };
        assert_eq!(events.len(), 1, "{events:?}");
        let written = Arc::new(AddressPool { status: Some((**status).clone()), ..(*pool).clone() });
        let within = look(&written, &[peer("10.0.0.0/8"), peer("10.64.1.1/32")]);
        let Action::Status { events, .. } = &within[0] else { panic!("no status") };
        assert!(
            matches!(&events[..], [event] if event.note.contains("10.64.1.1/32 of spec.allowedIPs of Peer office")),
            "{events:?}"
        );
    }

    #[test]
    fn one_more_of_a_thousand_ranges_within_a_pool_is_one_write_without_an_event() {
        let pool = pool("p", "10.64.0.0/16", false, true);
        let peers = |count: u32| -> Vec<UsedRange> {
            let net = |number: u32| {
                let address = std::net::Ipv4Addr::from_bits(0x0a40_0000 + number);
                let user = RangeUser::Peer(format!("peer-{number:04}"));
                UsedRange { user, net: std::net::IpAddr::from(address).into() }
            };
            (0..count).map(net).collect()
        };
        let first = look(&pool, &peers(1000));
        let (in_use, message) = holds(&first, "p", "RangeInUse");
        assert!(in_use && message.contains("Peer peer-0002 and 997 more: "), "{message}");
        let Action::Status { status, .. } = &first[0] else { panic!("no status") };
        let written = Arc::new(AddressPool { status: Some((**status).clone()), ..(*pool).clone() });
        assert_eq!(look(&written, &peers(1000)), Vec::new());
        let second = look(&written, &peers(1001));
        assert!(matches!(&second[..], [Action::Status { events, .. }] if events.is_empty()), "{second:?}");
    }

    #[test]
    fn an_exhausted_pool_is_reported_once() {
        let one = pool("p", "10.0.0.0/30", false, true);
        let first =
            actions(std::slice::from_ref(&one), &[block("p")], &NO_NODES, jiff::Timestamp::UNIX_EPOCH);
        let Action::Status { status, events, .. } = &first[0] else { panic!("no status") };
        assert_eq!(ready(&first, "p"), ("False".into(), "Exhausted".into()));
        assert!(holds(&first, "p", "Exhausted").0);
        assert_eq!((status.used, status.free, status.node_count), (Some(4), Some(0), Some(1)));
        assert_eq!((status.nodes[0].name.as_str(), status.nodes[0].blocks), ("n1", 1));
        let reasons: Vec<&str> = events.iter().map(|event| event.reason).collect();
        assert_eq!(reasons, ["OutOfBlocks"]);
        // Another block changes the numbers, and causes no Event.
        let written = Arc::new(AddressPool { status: Some((**status).clone()), ..(*one).clone() });
        let second = actions(&[written], &[block("p"), block("p")], &NO_NODES, jiff::Timestamp::UNIX_EPOCH);
        assert!(matches!(&second[0], Action::Status { events, .. } if events.is_empty()), "{second:?}");
    }

    #[test]
    fn a_disabled_pool_is_reported_with_its_generation() {
        let mut disabled = (*pool("p", "10.0.0.0/24", false, true)).clone();
        disabled.spec.disabled = true;
        let actions = actions(&[Arc::new(disabled)], &[block("p")], &NO_NODES, jiff::Timestamp::UNIX_EPOCH);
        assert_eq!(ready(&actions, "p"), ("False".into(), "Disabled".into()));
        assert!(holds(&actions, "p", "Disabled").0 && !holds(&actions, "p", "Exhausted").0);
        let Action::Status { status, .. } = &actions[0] else { panic!("no status") };
        assert!(status.conditions.iter().all(|condition| condition.observed_generation == Some(3)));
    }

    #[test]
    fn an_unchanged_status_is_not_written() {
        let pool = pool("p", "10.0.0.0/24", false, true);
        let first = actions(std::slice::from_ref(&pool), &[], &NO_NODES, jiff::Timestamp::UNIX_EPOCH);
        let Action::Status { status, .. } = &first[0] else { panic!("no status") };
        let written = Arc::new(AddressPool { status: Some((**status).clone()), ..(*pool).clone() });
        let later = jiff::Timestamp::from_second(1000).unwrap();
        assert_eq!(actions(&[written], &[], &NO_NODES, later), Vec::new());
    }

    #[test]
    fn a_node_that_has_as_many_blocks_as_it_may_is_named() {
        let one = pool("p", "10.0.0.0/16", false, true);
        let capacities = BTreeMap::from([("n1".to_owned(), 1)]);
        let with = |count: usize| {
            let blocks: Vec<_> = (0..count).map(|_| block("p")).collect();
            let now = jiff::Timestamp::UNIX_EPOCH;
            holds(&actions(std::slice::from_ref(&one), &blocks, &capacities, now), "p", "BlockLimitReached")
        };
        assert!(!with(5).0);
        let (limited, message) = with(6);
        assert!(limited && message.starts_with("n1: as many blocks"), "{message}");
    }
}

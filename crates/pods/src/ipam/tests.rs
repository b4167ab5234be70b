//! Defects of Coil v2 that are about waiting, locks and wake-ups: none may be ours. The API server is a function.

use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use fairlead_api::resources::AddressBlock;
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_ipam::Key;
use fairlead_ipam::state::{BlockDeletion, DeletionAnswer};
use futures::FutureExt;
use futures::future::join_all;
use kube::runtime::reflector;
use kube::runtime::watcher::Event;
use kube::{Api, Client, ResourceExt};
use testbed_api::server::client;
use tokio::task::JoinSet;

use super::*;

/// The list of leftovers, and the Node.
const NO_REQUESTS: &str =
    r#"{"kind":"List","apiVersion":"v1","metadata":{"name":"n1","uid":"n"},"items":[]}"#;

/// Never says anything: a controller and a server that are both away.
fn silent() -> Client {
    client(|_| futures::future::pending().boxed())
}

/// The node's addresses, with these pools in the cache, and the task that requests blocks.
pub(crate) fn node(client: Client, pools: &[&str], tasks: &mut JoinSet<()>) -> Arc<Ipam> {
    following(OwnBlocks::of("n1").1, client, pools, tasks)
}

/// The same, with a watch of blocks.
fn following(blocks: OwnBlocks, client: Client, pools: &[&str], tasks: &mut JoinSet<()>) -> Arc<Ipam> {
    let (store, mut writer) = reflector::store();
    for name in pools {
        let pool = serde_json::json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": name },
            "spec": { "blockSizeBits": 2, "subnets": [{ "ipv4": "10.0.0.0/8" }] },
        });
        let pool: AddressPool = serde_json::from_value(pool).unwrap();
        writer.apply_watcher_event(&Event::Apply(pool));
    }
    let ipam = Arc::new(Ipam::new("n1", RoutingIds::default(), store, Api::all(client.clone())));
    let requests = requests::Requests {
        client,
        ipam: Arc::clone(&ipam),
        nodes: reflector::store().0,
        blocks,
        refused: Mutex::default(),
    };
    tasks.spawn(requests::run(requests));
    ipam
}

/// A block is granted.
pub(crate) fn assume(ipam: &Ipam, block: &AddressBlock) {
    let own = ipam.own_block(block).unwrap();
    ipam.update(|state| state.assume_block(Instant::now(), own));
}

fn releasable(ipam: &Ipam) -> Vec<String> {
    ipam.lock().table().releasable_blocks()
}

pub(crate) fn block(name: &str, pool: &str, ipv4: &str) -> AddressBlock {
    serde_json::from_value(serde_json::json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "index": 0, "ipv4": ipv4,
        "metadata": {
            "name": name, "uid": name,
            "labels": { "coil.cybozu.com/pool": pool, "coil.cybozu.com/node": "n1" },
        },
    }))
    .unwrap()
}

fn key(id: impl ToString) -> Key {
    Key { container_id: id.to_string(), ifname: "eth0".to_owned() }
}

fn far() -> tokio::time::Instant {
    tokio::time::Instant::now() + Duration::from_secs(600)
}

/// Numbers 1 and 2: while pods wait for a block of one pool, nothing else waits: not the release of empty blocks, not
/// block events, not another pool, not a DEL of the same pool.
#[tokio::test]
async fn a_pod_that_waits_for_a_block_holds_up_nothing_else() {
    let mut tasks = JoinSet::new();
    let ipam = node(silent(), &["a", "b"], &mut tasks);
    assume(&ipam, &block("a-0", "a", "10.0.0.0/32"));
    assume(&ipam, &block("b-0", "b", "10.0.1.0/30"));
    let first = ipam.allocate("a", &key("first"), far()).await.unwrap();
    let (waiting, other) = (key("waiting"), key("other"));
    let mut waits = Box::pin(ipam.allocate("a", &waiting, far()));
    assert!(futures::poll!(&mut waits).is_pending());

    assert_eq!(releasable(&ipam), ["b-0"]);
    ipam.sync_blocks(&[
        Arc::new(block("a-0", "a", "10.0.0.0/32")),
        Arc::new(block("b-0", "b", "10.0.1.0/30")),
    ]);
    assert!(futures::poll!(Box::pin(ipam.allocate("b", &other, far()))).is_ready());
    assert!(futures::poll!(&mut waits).is_pending());
    // The freed address is the one the other pod waits for, and it hears of it.
    ipam.release(&key("first"));
    assert_eq!(waits.await.unwrap().ipv4, first.ipv4);
}

/// Demand is computed after its block has come: nothing is requested.
#[tokio::test]
async fn a_demand_that_is_met_already_makes_no_request() {
    let mut tasks = JoinSet::new();
    let asked = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&asked);
    let server = client(move |call| match call.starts_with("POST ") {
        true => {
            seen.store(true, Ordering::Release);
            futures::future::pending().boxed()
        }
        false => std::future::ready((200, NO_REQUESTS.to_owned())).boxed(),
    });
    let ipam = node(server, &["a"], &mut tasks);
    let pod = key("pod");
    let mut waits = Box::pin(ipam.allocate("a", &pod, far()));
    // The request task is notified; before it runs, the block is there.
    assert!(futures::poll!(&mut waits).is_pending());
    assume(&ipam, &block("a-0", "a", "10.0.0.0/28"));
    waits.await.unwrap();
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
    assert!(!asked.load(Ordering::Acquire), "one more block was asked for");
    // A pod that does need one gets a request.
    let keys: Vec<Key> = (0..16).map(key).collect();
    let more: Vec<_> = keys.iter().map(|key| ipam.allocate("a", key, far())).collect();
    let _ = tokio::time::timeout(Duration::from_millis(200), join_all(more)).await;
    assert!(asked.load(Ordering::Acquire));
}

/// Number 2: pods that wait do so side by side, and each only as long as it may.
#[tokio::test]
async fn pods_wait_side_by_side_and_each_to_its_own_deadline() {
    let mut tasks = JoinSet::new();
    let ipam = node(silent(), &["a"], &mut tasks);
    let keys: Vec<Key> = (0..24).map(key).collect();
    let late = tokio::time::Instant::now();
    let impatient = keys.iter().take(20).map(|key| ipam.allocate("a", key, late));
    let mut patient: Vec<_> =
        keys.iter().skip(20).map(|key| Box::pin(ipam.allocate("a", key, far()))).collect();
    for waits in &mut patient {
        assert!(futures::poll!(waits).is_pending());
    }
    for outcome in join_all(impatient).await {
        assert!(matches!(outcome, Err(AllocationError::TimedOut { .. })), "{outcome:?}");
    }
    assume(&ipam, &block("a-0", "a", "10.0.0.0/30"));
    assert!(join_all(patient).await.iter().all(Result::is_ok), "one block of four serves all four at once");
}

/// Number 3: the block comes after the pod has seen that there is none and before it begins to wait.
#[tokio::test]
async fn a_block_that_comes_just_before_the_wait_is_not_missed() {
    let mut tasks = JoinSet::new();
    let slot: Arc<OnceLock<Arc<Ipam>>> = Arc::default();
    let inside = Arc::clone(&slot);
    // The pool is not in the cache, so the server is asked, between the attempt and the wait.
    let server = client(move |path| {
        if !path.ends_with("/addresspools/a") {
            return futures::future::pending().boxed();
        }
        assume(inside.get().unwrap(), &block("a-0", "a", "10.0.0.0/30"));
        let pool = serde_json::json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": "a" },
            "spec": { "blockSizeBits": 2, "subnets": [{ "ipv4": "10.0.0.0/24" }] },
        });
        std::future::ready((200, pool.to_string())).boxed()
    });
    let ipam = node(server, &[], &mut tasks);
    assert!(slot.set(Arc::clone(&ipam)).is_ok());
    let pod = key("pod");
    let given = tokio::time::timeout(Duration::from_secs(60), ipam.allocate("a", &pod, far()));
    assert_eq!(given.await.unwrap().unwrap().ipv4, Some("10.0.0.0".parse().unwrap()));
}

/// The request of node n1 for a block of pool a, with this status.
fn block_request(status: serde_json::Value) -> String {
    serde_json::json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "BlockRequest",
        "metadata": { "name": "req-a-n1-x", "uid": "u", "resourceVersion": "1" },
        "spec": { "nodeName": "n1", "poolName": "a" }, "status": status,
    })
    .to_string()
}

fn condition(type_: &str, reason: &str) -> serde_json::Value {
    serde_json::json!({ "type": type_, "status": "True", "reason": reason, "message": reason })
}

/// Accepts a request, and says `status` when it is read. Blocks do not exist.
fn controlled(status: serde_json::Value) -> Client {
    client(move |path| {
        let (code, body) = match path {
            path if path.starts_with("POST ") && path.ends_with("/blockrequests") => {
                (201, block_request(serde_json::json!({})))
            }
            path if path.starts_with("GET ") && path.ends_with("/blockrequests/req-a-n1-x") => {
                (200, block_request(status.clone()))
            }
            path if path.ends_with("/nodes/n1") => {
                (200, r#"{"apiVersion":"meta.k8s.io/v1","kind":"PartialObjectMetadata","metadata":{"name":"n1","uid":"n"}}"#.into())
            }
            _ => (404, r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","message":"none such","code":404}"#.into()),
        };
        std::future::ready((code, body)).boxed()
    })
}

/// Number 5: the controller says which block it granted, and that block cannot be read. The pod gets a reason, and
/// nothing ends.
#[tokio::test]
async fn a_granted_block_that_cannot_be_read_is_a_reason_and_no_panic() {
    let mut tasks = JoinSet::new();
    let conditions = [condition("Complete", "allocated")];
    let status = serde_json::json!({ "addressBlockName": "a-7", "conditions": conditions });
    let ipam = node(controlled(status), &["a"], &mut tasks);
    let failure = ipam.allocate("a", &key("pod"), far()).await.unwrap_err();
    assert!(failure.to_string().contains("read AddressBlock a-7"), "{failure}");
    assert_eq!(tasks.len(), 1, "the request task lives on");
}

#[tokio::test]
async fn a_refusal_is_read_and_is_the_reason_of_the_pod() {
    let mut tasks = JoinSet::new();
    let conditions = [condition("Complete", "out of blocks"), condition("Failed", "out of blocks")];
    let ipam = node(controlled(serde_json::json!({ "conditions": conditions })), &["a"], &mut tasks);
    let failure = ipam.allocate("a", &key("pod"), far()).await.unwrap_err();
    assert!(failure.to_string().contains("out of blocks"), "{failure}");
}

/// The request is never seen to be answered, and no block is read.
#[tokio::test]
async fn a_block_that_the_watch_shows_answers_its_request() {
    let mut tasks = JoinSet::new();
    let (mut follower, blocks) = OwnBlocks::of("n1");
    let ipam = following(blocks, controlled(serde_json::json!({})), &["a"], &mut tasks);
    let pod = key("pod");
    let mut waits = Box::pin(ipam.allocate("a", &pod, far()));
    let granted_for = |request: &str, name: &str, ipv4: &str| {
        let mut block = block(name, "a", ipv4);
        block.labels_mut().insert("coil.cybozu.com/request".to_owned(), request.to_owned());
        Event::Apply(block)
    };
    follower.observe(&granted_for("another", "a-0", "10.0.0.0/30"));
    assert!(tokio::time::timeout(Duration::from_millis(50), &mut waits).await.is_err());
    follower.observe(&granted_for("u", "a-1", "10.0.0.4/30"));
    assert_eq!(waits.await.unwrap().ipv4, Some("10.0.0.4".parse().unwrap()));
}

/// Numbers 4 and 6: CNI operations, block events and the release of empty ones from many threads at once.
#[test]
fn operations_and_events_from_many_threads_never_share_an_address() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
    runtime.block_on(async {
        let mut tasks = JoinSet::new();
        let ipam = node(silent(), &["a"], &mut tasks);
        let blocks: Vec<Arc<AddressBlock>> =
            (0..8).map(|n| Arc::new(block(&format!("a-{n}"), "a", &format!("10.0.{n}.0/28")))).collect();
        ipam.sync_blocks(&blocks);
        let mut operations = JoinSet::new();
        for pod in 0..64u32 {
            let ipam = Arc::clone(&ipam);
            operations.spawn(async move {
                for _ in 0..50 {
                    let given = ipam.allocate("a", &key(pod), far()).await.unwrap();
                    let again = ipam.allocate("a", &key(pod), far()).await.unwrap();
                    assert_eq!(given.ipv4, again.ipv4);
                    ipam.release(&key(pod));
                    ipam.release(&key(pod));
                }
                ipam.allocate("a", &key(pod), far()).await.unwrap().ipv4
            });
        }
        for _ in 0..100 {
            ipam.sync_blocks(&blocks);
            for name in releasable(&ipam) {
                let deletion = BlockDeletion { name: name.clone(), uid: name.clone(), version: "1".into() };
                ipam.update(|state| {
                    if let Some(deletion) = state.close_block(&name, Some(deletion)) {
                        state.deletion_answered(&deletion, DeletionAnswer::Refused);
                    }
                });
            }
            tokio::task::yield_now().await;
        }
        let given: BTreeSet<_> = operations.join_all().await.into_iter().collect();
        assert_eq!(given.len(), 64);
        assert_eq!(ipam.usage().iter().map(|block| block.used).sum::<u32>(), 64);
    });
}

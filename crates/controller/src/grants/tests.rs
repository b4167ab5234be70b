use fairlead_api::names::{COIL_FINALIZER, LABEL_REQUEST};
use fairlead_ipam::{BlockIndex, RefusalReason};
use kube::runtime::reflector;
use kube::runtime::watcher::Event;
use prometheus_client::registry::Registry;

use super::objects::{conditions, new_block, parse};
use super::*;
use crate::work_queue::{ReconcileMetrics, WorkQueueMetrics};

fn pool(name: &str, ipv4: &str) -> Arc<AddressPool> {
    Arc::new(
        serde_json::from_value(serde_json::json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": name, "uid": "p" },
            "spec": { "blockSizeBits": 2, "subnets": [{ "ipv4": ipv4 }] },
        }))
        .unwrap(),
    )
}

#[test]
fn a_refusal_is_complete_and_failed_with_the_reason_of_coil() {
    let refused = conditions(&Err(Refusal::OutOfBlocks { pool: "p".into() }), jiff::Timestamp::UNIX_EPOCH);
    assert_eq!(refused.len(), 2);
    assert!(
        refused
            .iter()
            .all(|c| c.reason == "out of blocks" && c.message == "pool p does not have free blocks")
    );
}

#[test]
fn names_that_would_change_the_url_are_refused_for_good() {
    for (pool, node, field) in
        [("default?", "n1", "poolName"), ("default/status", "n1", "poolName"), ("p1", "../n1", "nodeName")]
    {
        let spec = serde_json::json!({ "spec": { "nodeName": node, "poolName": pool } });
        let refusal = parse(&request("r", 0, spec)).unwrap_err();
        assert!(refusal.to_string().contains(field), "{refusal}");
        assert_eq!(refusal.reason(), RefusalReason::InvalidRequest);
    }
    let claim = |ipv4: &str| {
        let in_use = serde_json::json!({ "index": 3, "ipv4": ipv4 });
        let spec = serde_json::json!({ "nodeName": "n1", "poolName": "p1", "inUse": in_use });
        parse(&request("r", 0, serde_json::json!({ "spec": spec })))
    };
    assert_eq!(claim("10.0.0.12/30").unwrap().map(|claim| claim.index), Some(3));
    assert_eq!(claim("10.0.0.12").unwrap_err().reason(), RefusalReason::InvalidRequest);
    assert_eq!(parse(&request("r", 0, serde_json::Value::Null)).unwrap(), None);
}

#[test]
fn the_pod_capacity_of_a_node_is_a_number_or_unknown() {
    let capacity = |pods: &str| {
        let node = serde_json::json!({ "metadata": {}, "status": { "capacity": { "pods": pods } } });
        pod_capacity(&serde_json::from_value(node).unwrap())
    };
    assert_eq!((capacity("250"), capacity("many"), capacity("-1")), (Some(250), None, None));
    // As the API server writes them.
    assert_eq!((capacity("1k"), capacity("2Ki")), (Some(1000), Some(2048)));
    assert_eq!(pod_capacity(&Node::default()), None);
}

fn request(name: &str, second: u8, more: serde_json::Value) -> Arc<BlockRequest> {
    let mut request = serde_json::json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "BlockRequest",
        "metadata": { "name": name, "uid": name, "creationTimestamp": format!("2026-01-01T00:00:0{second}Z") },
        "spec": { "nodeName": "n1", "poolName": "p1" },
    });
    if let (Some(request), serde_json::Value::Object(more)) = (request.as_object_mut(), more) {
        request.extend(more);
    }
    Arc::new(serde_json::from_value(request).unwrap())
}

#[test]
fn the_oldest_pending_request_is_answered_first() {
    let done = serde_json::json!({ "status": { "conditions": [{
        "type": "Complete", "status": "True", "reason": "allocated", "message": "",
        "lastProbeTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z",
    }], "addressBlockName": "p1-0" } });
    let none = serde_json::Value::Null;
    let requests = vec![
        request("late", 3, none.clone()),
        request("answered", 0, done),
        request("early", 1, none.clone()),
        request("also", 3, none),
    ];
    let order: Vec<String> = pending(requests).into_iter().map(|(uid, _)| uid).collect();
    assert_eq!(order, ["early", "also", "late"]);
}

#[test]
fn a_new_block_has_the_fields_of_coil() {
    let request: BlockRequest = serde_json::from_value(serde_json::json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "BlockRequest", "metadata": { "name": "r", "uid": "u" },
        "spec": { "nodeName": "n1", "poolName": "p1" },
    }))
    .unwrap();
    let pool = pool("p1", "10.0.0.0/24");
    let states = pool_states(std::slice::from_ref(&pool));
    let question = Request { uid: "u", pool: "p1", node: "n1", pod_capacity: None, claim: None };
    let Grant::New { index, name, nets } = grant(&question, &states, &BlockIndex::default()) else {
        panic!("no block")
    };
    let json = serde_json::to_value(new_block(&request, &pool, index, &name, &nets)).unwrap();
    assert_eq!(json["metadata"]["name"], "p1-0");
    assert_eq!(json["index"], 0);
    assert_eq!(json["ipv4"], "10.0.0.0/30");
    assert_eq!(json["metadata"]["labels"][LABEL_REQUEST], "u");
    assert_eq!(json["metadata"]["finalizers"][0], COIL_FINALIZER);
    let owner = serde_json::json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "name": "p1", "uid": "p",
        "controller": true, "blockOwnerDeletion": true,
    });
    assert_eq!(json["metadata"]["ownerReferences"], serde_json::json!([owner]));
}

#[test]
fn an_invalid_pool_is_refused_with_its_error() {
    let states = pool_states(&[pool("p1", "10.0.0.0/31")]);
    let question = Request { uid: "u", pool: "p1", node: "n1", pod_capacity: None, claim: None };
    let Grant::Refused(refusal) = grant(&question, &states, &BlockIndex::default()) else {
        panic!("granted")
    };
    assert!(refusal.to_string().contains("10.0.0.0/31"), "{refusal}");
}

/// A granter whose watch shows this request, and the statuses that the API server is sent; it fails the first `failures`.
fn granter(request: Option<&BlockRequest>, failures: usize) -> (Granter, Arc<Mutex<Vec<serde_json::Value>>>) {
    let sent: Arc<Mutex<Vec<serde_json::Value>>> = Arc::default();
    let answer = {
        let sent = Arc::clone(&sent);
        async move |body: axum::body::Bytes| {
            let mut sent = sent.lock().unwrap();
            sent.push(serde_json::from_slice(&body).unwrap());
            if sent.len() <= failures {
                return Err(axum::http::StatusCode::SERVICE_UNAVAILABLE);
            }
            Ok(serde_json::to_string(&*self::request("r", 0, serde_json::Value::Null)).unwrap())
        }
    };
    let path = "/apis/coil.cybozu.com/v2/blockrequests/r/status";
    let router = axum::Router::new().route(path, axum::routing::patch(answer));
    let (requests, mut writer) = reflector::store();
    if let Some(request) = request {
        writer.apply_watcher_event(&Event::Apply(request.clone()));
    }
    let mut registry = Registry::default();
    let reconciles = ReconcileMetrics::register(&mut registry);
    let queue = WorkQueueMetrics::register(&mut registry, "blockrequest", reconciles);
    let stores = Stores {
        blocks: reflector::store().0,
        nodes: reflector::store().0,
        pools: reflector::store().0,
        requests,
        known: Arc::default(),
        generations: [(); 4].map(|()| watch::channel(0).1),
    };
    let metrics = GrantMetrics::register(&mut registry, queue);
    (Granter { client: Client::new(router, "default"), stores, metrics }, sent)
}

#[tokio::test]
async fn the_status_of_a_grant_is_written_unless_the_node_has_deleted_the_request() {
    let granted = request("r", 0, serde_json::Value::Null);
    let status = BlockRequestStatus { address_block_name: Some("p1-0".to_owned()), ..Default::default() };
    let (kept, sent) = granter(Some(&granted), 1);
    kept.write_unless_deleted(&granted, &status).await;
    let sent = sent.lock().unwrap().clone();
    assert_eq!(sent.len(), 2, "a failure is tried again: {sent:?}");
    let desired = serde_json::json!({ "metadata": { "uid": "r" }, "status": { "addressBlockName": "p1-0" } });
    assert_eq!(sent[1], desired);

    let mut another = granted.as_ref().clone();
    another.metadata.uid = Some("another of this name".to_owned());
    for shown in [None, Some(&another)] {
        let (deleted, sent) = granter(shown, 0);
        deleted.write_unless_deleted(&granted, &status).await;
        assert_eq!(sent.lock().unwrap().len(), 0, "{shown:?}");
    }
}

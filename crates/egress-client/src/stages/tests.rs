use std::sync::Mutex;

use fairlead_egress::problem::EgressReason;
use futures::FutureExt;
use serde_json::json;
use testbed_api::server::client;

use super::*;
use crate::tests::bed::{self, Bed, GATEWAY, Objects, Pod as Sandbox, SERVICE, egress, service};

const ANNOTATION: &str = "egress.coil.cybozu.com/internet";

fn pod(name: &str, annotation: &str) -> SlimPod {
    let metadata =
        json!({ "name": name, "namespace": "shop", "uid": "u1", "annotations": { annotation: "nat" } });
    let mut pod =
        serde_json::from_value(json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata })).unwrap();
    fairlead_cluster::pods::trimmed(&mut pod);
    pod
}

/// A first stage with these pods in its cache, and the paths it asks the API server for, which answers with `answer`.
fn stage(cached: &[SlimPod], answer: (u16, String)) -> (Bed, EgressRequestStage, Arc<Mutex<Vec<String>>>) {
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let calls = Arc::clone(&asked);
    let client = client(move |call| {
        calls.lock().unwrap().push(call.to_owned());
        std::future::ready(answer.clone()).boxed()
    });
    let bed = Bed::new(Objects { pods: cached.to_vec(), ..Objects::default() });
    let (egress, events) = (bed.egress.clone(), bed.events.clone());
    let stage = EgressRequestStage { pods: Arc::clone(&bed.cached_pods), client, egress, events };
    (bed, stage, asked)
}

fn attachment(name: &str, uid: &str, netns: &str) -> Attachment {
    Attachment {
        key: Key { container_id: "c1".to_owned(), ifname: "eth0".to_owned() },
        netns: netns.into(),
        pod: Owner {
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            uid: (!uid.is_empty()).then(|| uid.to_owned()),
        },
    }
}

async fn attach(stage: &EgressRequestStage, name: &str) -> Result<EgressRequest, Failure> {
    attach_with(stage, name, "u1").await
}

/// Without a UID if it is empty.
async fn attach_with(stage: &EgressRequestStage, name: &str, uid: &str) -> Result<EgressRequest, Failure> {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    stage.find(&attachment(name, uid, "/ns")).await
}

#[tokio::test]
async fn a_pod_that_asks_for_an_unknown_egress_is_refused_before_anything_is_made() {
    let there = (200, serde_json::to_string(&pod("new", ANNOTATION)).unwrap());
    let (_bed, stage, asked) = stage(&[pod("known", ANNOTATION)], there);
    for name in ["known", "new"] {
        let failure = attach(&stage, name).await.unwrap_err();
        assert_eq!(failure.reason, Reason::Egress(EgressReason::Unknown));
        assert!(failure.message.contains("internet/nat"), "{failure}");
    }
    assert_eq!(*asked.lock().unwrap(), ["GET /api/v1/namespaces/shop/pods/new"]);
}

#[tokio::test]
async fn a_pod_in_the_cache_needs_no_api_server_and_another_is_read_there() {
    let outage = (503, r#"{"kind":"Status","apiVersion":"v1","status":"Failure","code":503}"#.to_owned());
    let (_bed, stage, asked) = stage(&[pod("known", "note")], outage);
    let nothing = EgressRequest { uid: Some("u1".to_owned()), ..EgressRequest::default() };
    assert_eq!(attach(&stage, "known").await, Ok(nothing.clone()));
    assert!(asked.lock().unwrap().is_empty());
    assert_eq!(attach(&stage, "new").await.unwrap_err().reason, Reason::ApiServerUnavailable);
    let another_life = attach_with(&stage, "known", "u2").await.unwrap_err();
    assert_eq!(another_life.reason, Reason::ApiServerUnavailable);
    assert_eq!(attach_with(&stage, "known", "").await, Ok(nothing), "a runtime that passes no UID");
}

/// A program that starts while the API server is away knows nothing else of the pod, whose sandbox is made anew.
#[tokio::test]
async fn a_pod_that_asked_for_nothing_before_needs_no_api_server() {
    let outage = (503, r#"{"kind":"Status","apiVersion":"v1","status":"Failure","code":503}"#.to_owned());
    let (bed, stage, _) = stage(&[pod("client", ANNOTATION)], outage);
    let earlier = |uid, asks| bed.egress.0.sandboxes.without_egress().record(uid, asks);
    assert!(attach_with(&stage, "plain", "u2").await.is_err());
    earlier("u2", false);
    let nothing = EgressRequest { uid: Some("u2".to_owned()), ..EgressRequest::default() };
    assert_eq!(attach_with(&stage, "plain", "u2").await, Ok(nothing));
    assert!(attach_with(&stage, "plain", "u3").await.is_err(), "a later pod of the same name");
    earlier("u2", true);
    assert!(attach_with(&stage, "plain", "u2").await.is_err(), "it has asked since");
    // What the cache shows of the pod counts, whatever it asked for before.
    earlier("u1", false);
    assert!(attach_with(&stage, "client", "u1").await.is_err());
}

#[tokio::test]
async fn a_second_interface_leaves_the_egress_of_the_first_alone() {
    let bed = Bed::new(Objects::default());
    let stage = EgressStage { egress: bed.egress.clone(), events: bed.events.clone() };
    let first = attachment("web", "u1", "/ns");
    let second = Attachment { key: Key { ifname: "net1".to_owned(), ..first.key.clone() }, ..first.clone() };
    let request = || EgressRequest { uid: Some("u1".to_owned()), ..EgressRequest::default() };
    let interface = |address: &str| PodInterface {
        addresses: [address.parse().unwrap()].into_iter().collect(),
        mtu: Some(1420),
    };
    stage.set_up(&first, interface("10.1.0.5"), request()).await.unwrap();
    let before = bed.egress.0.sandboxes.all();
    assert_eq!(before.keys().collect::<Vec<_>>(), [&first.key]);
    stage.set_up(&second, interface("10.1.0.6"), request()).await.unwrap();
    assert_eq!(bed.egress.0.sandboxes.all(), before);
    assert_eq!(stage.check(&second.key).await, Ok(Vec::new()));
    stage.detach(&second.key).await.unwrap();
    assert_eq!(bed.egress.0.sandboxes.all(), before);
    stage.detach(&first.key).await.unwrap();
    assert!(bed.egress.0.sandboxes.all().is_empty());
}

#[tokio::test]
async fn a_pod_that_the_api_server_does_not_have_asks_for_nothing() {
    let missing = r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}"#;
    let (_bed, stage, _) = stage(&[], (404, missing.to_owned()));
    let nothing = EgressRequest { uid: Some("u1".to_owned()), ..EgressRequest::default() };
    assert_eq!(attach(&stage, "static").await, Ok(nothing));
}

#[tokio::test]
async fn a_gateway_is_known_by_its_labels_and_cannot_be_a_client() {
    let mut gateway = serde_json::to_value(pod("gateway", ANNOTATION)).unwrap();
    gateway["metadata"]["labels"] = json!({
        "app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress",
        "app.kubernetes.io/instance": "nat",
    });
    let client = serde_json::from_value(gateway.clone()).unwrap();
    gateway["metadata"]["annotations"] = json!({});
    let (_bed, stage, _) = stage(&[client], (200, gateway.to_string()));
    let refused = attach(&stage, "gateway").await.unwrap_err();
    assert_eq!(refused.reason, Reason::Egress(EgressReason::GatewayIsClient));
    assert_eq!(attach(&stage, "other").await.unwrap().gateway_of.as_deref(), Some("nat"));
}

/// Behind another plugin: addresses are those of its result, and the MTU is that of the interface.
#[tokio::test(flavor = "multi_thread")]
async fn behind_another_plugin_the_addresses_of_its_result_count() {
    let bed = Bed::new(Objects {
        egresses: vec![egress("internet/nat", &["0.0.0.0/0"])],
        services: vec![service("internet/nat", &SERVICE)],
        ..Objects::default()
    });
    bed.gateways.set("internet/nat", bed::gateways(&GATEWAY));
    let pod = Sandbox::new();
    let stage = EgressStage { egress: bed.egress.clone(), events: bed.events.clone() };
    let annotations = [(ANNOTATION.to_owned(), "nat".to_owned())].into();
    let request = EgressRequest { uid: Some("u1".to_owned()), annotations, ..EgressRequest::default() };
    let addresses = ["10.20.30.40".parse().unwrap()].into_iter().collect();
    let attachment = attachment("web", "u1", &pod.inside.path());
    // As the CNI server has it: the reconciler leaves the container alone meanwhile.
    let _guard = bed.locks.lock("c1").await;
    stage.set_up(&attachment, PodInterface { addresses, mtu: None }, request).await.unwrap();
    assert_eq!(pod.shown("ip route show table 118"), "default dev fou4_0a447c91 proto 30");
    assert_eq!(pod.send("203.0.113.1:9"), None);
    assert_eq!((pod.counted("encapsulated"), pod.counted("in_clear")), (1, 0));
    stage.detach(&attachment.key).await.unwrap();
    assert!(bed.gateways.clients("internet/nat").is_empty());
}

//! Pods that Egresses select by labels, and nodes on which egress is off.

use fairlead_api::names::ANNOTATION_EGRESS_ALLOW_SELECTORS;
use fairlead_api::resources::Egress;
use fairlead_cluster::pods::SlimPod;
use fairlead_egress::problem::EgressReason;
use fairlead_pods::cni::Reason;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::PartialObjectMeta;
use serde_json::{Value, json};

use super::bed::{Bed, GATEWAY, Objects, Pod, SERVICE, egress, gateways, service, shown, within};
use super::{DOMESTIC, DOMESTIC_SERVICE, INTERNET, SECOND, has_what_the_article_prints, reaches_gateways};
use crate::EgressSwitches;

const WEB: &[(&str, &str)] = &[("app", "web")];

/// The namespace of the pod.
fn shop(team: &str, consent: &str) -> PartialObjectMeta<Namespace> {
    let metadata = json!({
        "name": "shop", "labels": { "team": team }, "annotations": { ANNOTATION_EGRESS_ALLOW_SELECTORS: consent },
    });
    serde_json::from_value(json!({ "metadata": metadata })).unwrap()
}

fn selecting(of: &str, destinations: &[&str], team: &str) -> Egress {
    let mut egress = egress(of, destinations);
    let selectors = json!([{
        "namespaceSelector": { "matchLabels": { "team": team } }, "podSelector": { "matchLabels": { "app": "web" } },
    }]);
    egress.spec.selectors = Some(serde_json::from_value(selectors).unwrap());
    egress
}

/// The pod with labels, and the annotation for the domestic Egress.
fn labelled(app: &str) -> SlimPod {
    let mut pod: Value = serde_json::to_value(shown(&[("domestic", "nat")], &json!({}))).unwrap();
    pod["metadata"]["labels"] = json!({ "app": app });
    serde_json::from_value(pod).unwrap()
}

fn bed(namespace: PartialObjectMeta<Namespace>) -> Bed {
    let bed = Bed::new(Objects {
        egresses: vec![
            selecting(INTERNET, &["0.0.0.0/0", "::/0"], "a"),
            egress(DOMESTIC, &["192.168.10.0/24"]),
        ],
        services: vec![service(INTERNET, &SERVICE), service(DOMESTIC, &DOMESTIC_SERVICE)],
        pods: vec![labelled("web")],
        namespaces: vec![namespace],
        ..Objects::default()
    });
    bed.gateways.set(INTERNET, gateways(&GATEWAY));
    bed.gateways.set(DOMESTIC, gateways(&GATEWAY));
    bed
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_selected_at_its_start_and_while_it_runs() {
    let (bed, pod) = (bed(shop("a", "internet/nat")), Pod::new());
    bed.add_labelled(&pod, &[("domestic", "nat")], WEB).await.unwrap();
    assert!(has_what_the_article_prints(&pod), "{}", pod.egress_state());
    reaches_gateways(&pod);
    let is_out =
        || pod.shown("ip route show table 118").is_empty() && bed.gateways.clients(INTERNET).is_empty();
    let is_in = || has_what_the_article_prints(&pod) && bed.gateways.clients(INTERNET) == ["u1"];
    for (what, out, back) in [
        ("consent", shop("a", ""), shop("a", "internet/*")),
        ("labels of the Namespace", shop("b", "internet/nat"), shop("a", "internet/nat")),
    ] {
        bed.namespaces.apply(out);
        within(2 * SECOND, what, is_out).await;
        bed.namespaces.apply(back);
        within(2 * SECOND, what, is_in).await;
    }
    bed.pods.apply(labelled("db"));
    within(2 * SECOND, "labels of the pod", is_out).await;
    bed.pods.apply(labelled("web"));
    within(2 * SECOND, "labels of the pod", is_in).await;
    bed.egresses.apply(selecting(INTERNET, &["0.0.0.0/0", "::/0"], "c"));
    within(2 * SECOND, "the selector", is_out).await;
    assert_eq!(bed.gateways.clients(DOMESTIC), ["u1"], "the annotation still counts");
    assert!(bed.problems.get().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_not_selected_without_consent_and_waits_for_its_namespace() {
    let (bed, pod) = (bed(shop("a", "other/nat")), Pod::new());
    bed.add_labelled(&pod, &[], WEB).await.unwrap();
    assert!(bed.gateways.clients(INTERNET).is_empty());
    bed.egress.detach(&pod.key);
    // Its Namespace is not known yet: it may consent.
    bed.namespaces.delete(shop("a", ""));
    tokio::time::sleep(SECOND / 10).await;
    let refused = bed.add_labelled(&pod, &[], WEB).await.unwrap_err();
    assert_eq!(refused.reason, Reason::ApiServerUnavailable, "{refused}");
    assert!(refused.message.contains("selects"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_destination_by_annotation_and_by_selector_is_refused_with_both_names() {
    let (bed, pod) = (bed(shop("a", "internet/nat")), Pod::new());
    bed.egresses.apply(egress(DOMESTIC, &["0.0.0.0/0"]));
    tokio::time::sleep(SECOND / 10).await;
    let refused = bed.add_labelled(&pod, &[("domestic", "nat")], WEB).await.unwrap_err();
    assert_eq!(refused.reason, Reason::Egress(EgressReason::SamePrefix));
    assert!(refused.message.contains(INTERNET) && refused.message.contains(DOMESTIC), "{refused}");
    // A running pod keeps what it has.
    bed.egresses.apply(egress(DOMESTIC, &["192.168.10.0/24"]));
    tokio::time::sleep(SECOND / 10).await;
    bed.add_labelled(&pod, &[("domestic", "nat")], WEB).await.unwrap();
    bed.egresses.apply(egress(DOMESTIC, &["0.0.0.0/0"]));
    let is_said = || bed.problems.get().iter().any(|it| it.contains(INTERNET) && it.contains(DOMESTIC));
    within(2 * SECOND, "the problem", is_said).await;
    assert!(has_what_the_article_prints(&pod), "{}", pod.egress_state());
}

#[tokio::test(flavor = "multi_thread")]
async fn where_egress_is_off_a_pod_that_asks_for_it_does_not_start_and_others_do() {
    let off = EgressSwitches { enabled: false, ..EgressSwitches::default() };
    let (bed, pod) = (Bed::new(Objects { switches: off, ..Objects::default() }), Pod::new());
    bed.add(&pod, &[]).await.unwrap();
    let refused = bed.add(&pod, &[("internet", "nat")]).await.unwrap_err();
    assert_eq!(refused.reason, Reason::Egress(EgressReason::Disabled), "{refused}");
    bed.pods.apply(shown(&[("internet", "nat")], &json!({})));
    let is_said = || bed.problems.get().iter().any(|it| it.contains("--enable-egress=false"));
    within(2 * SECOND, "the problem", is_said).await;
}

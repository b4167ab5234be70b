//! What is to be done with an attachment, by its pod and the cluster. Pure.

use std::collections::BTreeMap;

use fairlead_cluster::pods::SlimPod;
use fairlead_egress::EgressName;
use fairlead_egress::annotation::chosen;

use super::egress_annotations;
use super::plan::{Asking, Cluster, Plan, plan};
use super::problem::EgressProblem;
use super::sandboxes::Sandbox;

/// What is to be done with an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Intent {
    /// It should have this.
    Client(Plan),
    /// The pod has ended: no gateway may take its packets any more.
    Ended,
    /// It forwards for clients.
    Gateway(Option<EgressProblem>),
    /// What it has stays, for what it asks for now cannot be.
    Keep(EgressProblem),
    /// It should have nothing of egress.
    Nothing,
    /// The cluster is not known yet.
    Unknown,
}

/// The egress annotations of an attachment's pod: those of the watch, or as long as it does not show the pod, those of the ADD.
pub(crate) fn annotations(sandbox: &Sandbox, pod: Option<&SlimPod>) -> BTreeMap<String, String> {
    pod.map_or_else(
        || sandbox.annotations.clone(),
        |pod| egress_annotations(pod.metadata.annotations.as_ref()),
    )
}

/// What is to be done. Without a `cluster` it is not known yet.
pub(crate) fn intent(sandbox: &Sandbox, pod: Option<&SlimPod>, cluster: Option<&Cluster>) -> Intent {
    let annotations = annotations(sandbox, pod);
    let gateway_of = pod.map_or(sandbox.gateway_of.as_deref(), SlimPod::gateway_of);
    if pod.is_some_and(SlimPod::has_ended) {
        return Intent::Ended;
    }
    if let Some(name) = gateway_of {
        let egress = EgressName { namespace: sandbox.namespace.clone(), name: name.to_owned() };
        return Intent::Gateway((!annotations.is_empty()).then(|| EgressProblem::gateway(&egress)));
    }
    if annotations.is_empty() {
        return Intent::Nothing;
    }
    let Some(cluster) = cluster else { return Intent::Unknown };
    let planned = chosen(&annotations).map_err(EgressProblem::from).and_then(|chosen| {
        let (namespace, addresses, mtu) = (sandbox.namespace.clone(), sandbox.addresses(), sandbox.mtu);
        plan(cluster, &Asking { namespace, chosen, addresses, mtu })
    });
    planned.map_or_else(Intent::Keep, Intent::Client)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::{Value, json};

    use super::*;
    use crate::egress::EgressReason;

    fn sandbox(annotation: Option<&str>) -> Sandbox {
        let annotation = annotation.map(|value| ("egress.coil.cybozu.com/n".to_owned(), value.to_owned()));
        Sandbox {
            namespace: "shop".to_owned(),
            pod: "web".to_owned(),
            uid: Some("u1".to_owned()),
            netns: PathBuf::from("/ns"),
            ifname: "eth0".to_owned(),
            addresses: vec!["10.1.0.5".parse().unwrap()],
            mtu: 1500,
            annotations: annotation.into_iter().collect(),
            gateway_of: None,
        }
    }

    fn pod(annotation: Option<&str>, more: Value) -> SlimPod {
        let mut pod = json!({ "metadata": { "name": "web", "namespace": "shop", "uid": "u1" } });
        if let Some(annotation) = annotation {
            pod["metadata"]["annotations"] = json!({ "egress.coil.cybozu.com/n": annotation });
        }
        pod.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn the_watch_counts_once_it_shows_the_pod() {
        let (with, without) = (sandbox(Some("a")), sandbox(None));
        assert_eq!(intent(&with, None, None), Intent::Unknown);
        assert_eq!(intent(&without, None, None), Intent::Nothing);
        assert_eq!(intent(&with, Some(&pod(None, json!({}))), None), Intent::Nothing);
        assert_eq!(intent(&without, Some(&pod(Some("a"), json!({}))), None), Intent::Unknown);
    }

    #[test]
    fn an_unknown_egress_is_planned_as_one_that_refuses_and_an_invalid_annotation_changes_nothing() {
        let cluster = Cluster::default();
        let Intent::Client(plan) = intent(&sandbox(Some("a")), None, Some(&cluster)) else { panic!() };
        assert_eq!(plan.problems[0].reason, EgressReason::Unknown);
        let Intent::Keep(problem) = intent(&sandbox(Some("A")), None, Some(&cluster)) else { panic!() };
        assert_eq!(problem.reason, EgressReason::AnnotationInvalid);
    }

    #[test]
    fn a_pod_that_has_ended_is_no_client_and_a_gateway_never_is() {
        let ended = pod(Some("a"), json!({ "status": { "phase": "Succeeded" } }));
        assert_eq!(intent(&sandbox(None), Some(&ended), None), Intent::Ended);
        let mut gateway = sandbox(None);
        gateway.gateway_of = Some("nat".to_owned());
        assert_eq!(intent(&gateway, None, None), Intent::Gateway(None));
        gateway.annotations = sandbox(Some("a")).annotations;
        let Intent::Gateway(Some(problem)) = intent(&gateway, None, None) else { panic!() };
        assert_eq!(problem.reason, EgressReason::GatewayIsClient);
        assert!(problem.message.contains("shop/nat"), "{problem}");
    }
}

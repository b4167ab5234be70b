//! What is to be done with an attachment, by its pod and the cluster. Pure.

use std::collections::{BTreeMap, BTreeSet};

use fairlead_cluster::pods::SlimPod;
use fairlead_egress::EgressName;
use fairlead_egress::annotation::chosen;
use fairlead_egress::client::plan::{Asking, Cluster, Plan, plan};
use fairlead_egress::problem::EgressProblem;

use super::annotations::egress_annotations;
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

/// What is known beside the pod.
#[derive(Debug, Clone, Default)]
pub(crate) struct Knowledge<'a> {
    /// Pods may not have egress gateways on this node.
    pub(crate) is_disabled: bool,
    /// The Egresses that select the pod; `None` is not known yet.
    pub(crate) selected: Option<BTreeSet<EgressName>>,
    /// `None` is not known yet.
    pub(crate) cluster: Option<&'a Cluster>,
}

/// What is to be done.
pub(crate) fn intent(sandbox: &Sandbox, pod: Option<&SlimPod>, knowledge: Knowledge<'_>) -> Intent {
    let annotations = annotations(sandbox, pod);
    let gateway_of = pod.map_or(sandbox.gateway_of.as_deref(), SlimPod::gateway_of);
    if pod.is_some_and(SlimPod::has_ended) {
        return Intent::Ended;
    }
    if let Some(name) = gateway_of {
        let egress = EgressName { namespace: sandbox.namespace.clone(), name: name.to_owned() };
        return Intent::Gateway((!annotations.is_empty()).then(|| EgressProblem::gateway(&egress)));
    }
    if knowledge.is_disabled {
        let is_selected = knowledge.selected.is_some_and(|selected| !selected.is_empty());
        let asks = is_selected || !annotations.is_empty();
        return if asks { Intent::Keep(EgressProblem::disabled()) } else { Intent::Nothing };
    }
    let Some(selected) = knowledge.selected else { return Intent::Unknown };
    if annotations.is_empty() && selected.is_empty() {
        return Intent::Nothing;
    }
    let Some(cluster) = knowledge.cluster else { return Intent::Unknown };
    let planned = chosen(&annotations).map_err(EgressProblem::from).and_then(|mut chosen| {
        chosen.extend(selected);
        let (namespace, addresses, mtu) = (sandbox.namespace.clone(), sandbox.addresses(), sandbox.mtu);
        plan(cluster, &Asking { namespace, chosen, addresses, mtu })
    });
    planned.map_or_else(Intent::Keep, Intent::Client)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use fairlead_egress::problem::EgressReason;
    use serde_json::{Value, json};

    use super::*;

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
            selected: BTreeSet::new(),
            clients_of: BTreeSet::new(),
        }
    }

    /// No Egress selects the pod.
    fn intent(sandbox: &Sandbox, pod: Option<&SlimPod>, cluster: Option<&Cluster>) -> Intent {
        super::intent(
            sandbox,
            pod,
            Knowledge { selected: Some(BTreeSet::new()), cluster, is_disabled: false },
        )
    }

    #[test]
    fn a_pod_that_is_selected_is_a_client_as_one_with_the_annotation_and_both_are_joined() {
        let name = |name: &str| EgressName { namespace: "n".to_owned(), name: name.to_owned() };
        let known = |selected: &[&str], cluster| Knowledge {
            selected: Some(selected.iter().map(|it| name(it)).collect()),
            cluster,
            is_disabled: false,
        };
        let cluster = Cluster::default();
        let plain = sandbox(None);
        assert_eq!(super::intent(&plain, None, Knowledge::default()), Intent::Unknown);
        assert_eq!(super::intent(&plain, None, known(&["b"], None)), Intent::Unknown);
        let of = |sandbox: &Sandbox, selected: &[&str]| match super::intent(
            sandbox,
            None,
            known(selected, Some(&cluster)),
        ) {
            Intent::Client(plan) => {
                plan.problems.iter().map(|it| it.message.clone()).collect::<Vec<_>>().join(" ")
            }
            other => panic!("{other:?}"),
        };
        assert!(of(&plain, &["b"]).contains("n/b"));
        let both = of(&sandbox(Some("a")), &["b"]);
        assert!(both.contains("n/a") && both.contains("n/b"), "{both}");
    }

    #[test]
    fn where_egress_is_off_a_pod_that_asks_for_it_keeps_what_it_has() {
        let off = || Knowledge { is_disabled: true, ..Knowledge::default() };
        assert_eq!(super::intent(&sandbox(None), None, off()), Intent::Nothing);
        let Intent::Keep(problem) = super::intent(&sandbox(Some("a")), None, off()) else { panic!() };
        assert_eq!(problem.reason, EgressReason::Disabled);
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

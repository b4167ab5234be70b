//! Intent for an attachment, by its pod and the cluster.

use std::collections::{BTreeMap, BTreeSet};

use fairlead_address::DualStackAddrs;

use super::plan::{Asking, Cluster, Plan, plan};
use crate::EgressName;
use crate::annotation::chosen;
use crate::problem::EgressProblem;

/// Work that an attachment calls for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Intent {
    /// It should have this.
    Client(Plan),
    /// The pod has ended: no gateway may take its packets any more.
    Ended,
    /// It forwards for clients.
    Gateway(Option<EgressProblem>),
    /// The present state stays, for what the pod asks for now cannot be.
    Keep(EgressProblem),
    /// It should have nothing of egress.
    Nothing,
    /// The cluster is not known yet.
    Unknown,
}

/// Facts of an attached pod by which its use of gateways is decided.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AttachedPod {
    /// Namespace of the pod.
    pub namespace: String,
    /// Addresses of the interface.
    pub addresses: DualStackAddrs,
    /// MTU of the interface in bytes.
    pub mtu: u32,
    /// Annotations of the pod by which it asks for gateways.
    pub annotations: BTreeMap<String, String>,
    /// Name of the Egress of which the pod is a gateway; `None` for other pods.
    pub gateway_of: Option<String>,
    /// The pod has ended (Succeeded or Failed).
    pub has_ended: bool,
}

/// Facts that are known beside the pod.
#[derive(Debug, Clone, Default)]
pub struct Knowledge<'a> {
    /// Pods may not have egress gateways on this node.
    pub is_disabled: bool,
    /// The Egresses that select the pod; `None` is not known yet.
    pub selected: Option<BTreeSet<EgressName>>,
    /// Egresses and Services of the cluster; `None` is not known yet.
    pub cluster: Option<&'a Cluster>,
}

/// Decides what is to be done.
pub fn intent(attachment: &AttachedPod, knowledge: Knowledge<'_>) -> Intent {
    if attachment.has_ended {
        return Intent::Ended;
    }
    if let Some(name) = &attachment.gateway_of {
        let egress = EgressName { namespace: attachment.namespace.clone(), name: name.clone() };
        return Intent::Gateway(
            (!attachment.annotations.is_empty()).then(|| EgressProblem::gateway(&egress)),
        );
    }
    if knowledge.is_disabled {
        let is_selected = knowledge.selected.is_some_and(|selected| !selected.is_empty());
        let asks = is_selected || !attachment.annotations.is_empty();
        return if asks { Intent::Keep(EgressProblem::disabled()) } else { Intent::Nothing };
    }
    let Some(selected) = knowledge.selected else { return Intent::Unknown };
    if attachment.annotations.is_empty() && selected.is_empty() {
        return Intent::Nothing;
    }
    let Some(cluster) = knowledge.cluster else { return Intent::Unknown };
    let planned = chosen(&attachment.annotations).map_err(EgressProblem::from).and_then(|mut chosen| {
        chosen.extend(selected);
        let (namespace, addresses, mtu) =
            (attachment.namespace.clone(), attachment.addresses, attachment.mtu);
        plan(cluster, &Asking { namespace, chosen, addresses, mtu })
    });
    planned.map_or_else(Intent::Keep, Intent::Client)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::EgressReason;

    fn attachment(annotation: Option<&str>) -> AttachedPod {
        let annotation = annotation.map(|value| ("egress.coil.cybozu.com/n".to_owned(), value.to_owned()));
        AttachedPod {
            namespace: "shop".to_owned(),
            addresses: DualStackAddrs { ipv4: Some([10, 1, 0, 5].into()), ipv6: None },
            mtu: 1500,
            annotations: annotation.into_iter().collect(),
            ..AttachedPod::default()
        }
    }

    /// No Egress selects the pod.
    fn intent(attachment: &AttachedPod, cluster: Option<&Cluster>) -> Intent {
        super::intent(attachment, Knowledge { selected: Some(BTreeSet::new()), cluster, is_disabled: false })
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
        let plain = attachment(None);
        assert_eq!(super::intent(&plain, Knowledge::default()), Intent::Unknown);
        assert_eq!(super::intent(&plain, known(&["b"], None)), Intent::Unknown);
        let of = |attachment: &AttachedPod, selected: &[&str]| match super::intent(
            attachment,
            known(selected, Some(&cluster)),
        ) {
            Intent::Client(plan) => {
                plan.problems.iter().map(|it| it.message.clone()).collect::<Vec<_>>().join(" ")
            }
            other => panic!("{other:?}"),
        };
        assert!(of(&plain, &["b"]).contains("n/b"));
        let both = of(&attachment(Some("a")), &["b"]);
        assert!(both.contains("n/a") && both.contains("n/b"), "{both}");
    }

    #[test]
    fn where_egress_is_off_a_pod_that_asks_for_it_keeps_what_it_has() {
        let off = || Knowledge { is_disabled: true, ..Knowledge::default() };
        assert_eq!(super::intent(&attachment(None), off()), Intent::Nothing);
        let Intent::Keep(problem) = super::intent(&attachment(Some("a")), off()) else { panic!() };
        assert_eq!(problem.reason, EgressReason::Disabled);
    }

    #[test]
    fn an_unknown_egress_is_planned_as_one_that_refuses_and_an_invalid_annotation_changes_nothing() {
        let cluster = Cluster::default();
        let Intent::Client(plan) = intent(&attachment(Some("a")), Some(&cluster)) else { panic!() };
        assert_eq!(plan.problems[0].reason, EgressReason::Unknown);
        let Intent::Keep(problem) = intent(&attachment(Some("A")), Some(&cluster)) else { panic!() };
        assert_eq!(problem.reason, EgressReason::AnnotationInvalid);
    }

    #[test]
    fn a_pod_that_has_ended_is_no_client_and_a_gateway_never_is() {
        let ended = AttachedPod { has_ended: true, ..attachment(Some("a")) };
        assert_eq!(intent(&ended, None), Intent::Ended);
        let mut gateway = attachment(None);
        gateway.gateway_of = Some("nat".to_owned());
        assert_eq!(intent(&gateway, None), Intent::Gateway(None));
        gateway.annotations = attachment(Some("a")).annotations;
        let Intent::Gateway(Some(problem)) = intent(&gateway, None) else { panic!() };
        assert_eq!(problem.reason, EgressReason::GatewayIsClient);
        assert!(problem.message.contains("shop/nat"), "{problem}");
    }
}

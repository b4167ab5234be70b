//! Attachments as [`fairlead_egress::client::intent`] decides by them. Pure.

use std::collections::BTreeMap;

use fairlead_cluster::pods::SlimPod;
use fairlead_egress::client::intent::AttachedPod;

use super::annotations::egress_annotations;
use super::sandboxes::Sandbox;

/// An attachment by its pod: as the watch shows it, or as long as it does not, as it was at the ADD.
pub(crate) fn attached_pod(sandbox: &Sandbox, pod: Option<&SlimPod>) -> AttachedPod {
    AttachedPod {
        namespace: sandbox.namespace.clone(),
        addresses: sandbox.addresses(),
        mtu: sandbox.mtu,
        annotations: annotations(sandbox, pod),
        gateway_of: pod.map_or(sandbox.gateway_of.as_deref(), SlimPod::gateway_of).map(str::to_owned),
        has_ended: pod.is_some_and(SlimPod::has_ended),
    }
}

/// The egress annotations of an attachment's pod: those of the watch, or as long as it does not show the pod, those of the ADD.
pub(crate) fn annotations(sandbox: &Sandbox, pod: Option<&SlimPod>) -> BTreeMap<String, String> {
    pod.map_or_else(
        || sandbox.annotations.clone(),
        |pod| egress_annotations(pod.metadata.annotations.as_ref()),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    use fairlead_egress::client::intent::{Intent, Knowledge};
    use fairlead_egress::client::plan::Cluster;
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
            planned: None,
        }
    }

    /// No Egress selects the pod.
    fn intent(sandbox: &Sandbox, pod: Option<&SlimPod>, cluster: Option<&Cluster>) -> Intent {
        let knowledge = Knowledge { selected: Some(BTreeSet::new()), cluster, is_disabled: false };
        fairlead_egress::client::intent::intent(&attached_pod(sandbox, pod), knowledge)
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

//! The DaemonSet that cleans nodes up, made of the node program's: the same image, settings, nodes and mounts. Pure.

use std::collections::BTreeMap;

use fairlead_api::names::{NODE_PROGRAM, SYSTEM_NAMESPACE};
use k8s_openapi::api::apps::v1::{DaemonSet, DaemonSetSpec};
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt as _;
use kube::api::ObjectMeta;
use serde_json::{Value, json};

use crate::api::is_ready;

/// Name of the DaemonSet that cleans up.
pub(super) const CLEANUP: &str = "fairlead-cleanup";
/// Label selector of the pods of the DaemonSet.
pub(super) const SELECTOR: &str = "app.kubernetes.io/name=fairlead,app.kubernetes.io/component=cleanup";
/// No node has this label: the DaemonSet runs nowhere until the selector is removed.
const HELD: &str = "fairlead.io/held-until-the-node-programs-have-ended";
/// Flags of the node program that `fairlead cleanup` has too.
const SHARED_FLAGS: [&str; 6] =
    ["--socket", "--state-dir", "--pod-table-id", "--pod-rule-prio", "--export-table-id", "--protocol-id"];

/// The DaemonSet that cleans up after `program`; `None` if that is not Fairlead's.
pub(super) fn cleanup(program: &DaemonSet, mesh_devices: &[String]) -> Option<DaemonSet> {
    let pod = program.spec.as_ref()?.template.spec.as_ref()?;
    let node = pod.containers.iter().find(|container| container.name == NODE_PROGRAM)?;
    let labels: BTreeMap<String, String> = SELECTOR
        .split(',')
        .filter_map(|label| label.split_once('='))
        .map(|(key, value)| (key.into(), value.into()))
        .collect();
    let template = PodTemplateSpec {
        metadata: Some(ObjectMeta { labels: Some(labels.clone()), ..ObjectMeta::default() }),
        spec: Some(cleanup_pod(pod, node, mesh_devices)),
    };
    let selector = LabelSelector { match_labels: Some(labels.clone()), ..LabelSelector::default() };
    Some(DaemonSet {
        metadata: ObjectMeta {
            name: Some(CLEANUP.to_owned()),
            namespace: Some(SYSTEM_NAMESPACE.to_owned()),
            labels: Some(labels),
            ..ObjectMeta::default()
        },
        spec: Some(DaemonSetSpec { selector, template, ..DaemonSetSpec::default() }),
        status: None,
    })
}

/// A pod on each node that the node program's pods run on, once it is released.
fn cleanup_pod(pod: &PodSpec, node: &Container, mesh_devices: &[String]) -> PodSpec {
    let installer = pod.init_containers.iter().flatten().next();
    let mut node_selector = pod.node_selector.clone().unwrap_or_default();
    node_selector.insert(HELD.to_owned(), "true".to_owned());
    PodSpec {
        automount_service_account_token: Some(false),
        init_containers: Some(vec![cleaner(node, installer, mesh_devices)]),
        containers: vec![waiter(node)],
        host_network: Some(true),
        image_pull_secrets: pod.image_pull_secrets.clone(),
        node_selector: Some(node_selector),
        priority_class_name: pod.priority_class_name.clone(),
        termination_grace_period_seconds: Some(1),
        tolerations: pod.tolerations.clone(),
        volumes: pod.volumes.clone(),
        ..PodSpec::default()
    }
}

/// The container that cleans up, with mounts and settings of the node program and of the installer of the plugin.
fn cleaner(node: &Container, installer: Option<&Container>, mesh_devices: &[String]) -> Container {
    let mounts =
        [Some(node), installer].into_iter().flatten().flat_map(|container| container.volume_mounts.clone());
    let literal = |container: &Container| {
        let variables = container.env.iter().flatten();
        variables.filter(|variable| variable.value_from.is_none()).cloned().collect::<Vec<_>>()
    };
    Container {
        name: "cleanup".to_owned(),
        image: node.image.clone(),
        image_pull_policy: node.image_pull_policy.clone(),
        args: Some(arguments(node, mesh_devices)),
        env: Some([Some(node), installer].into_iter().flatten().flat_map(literal).collect()),
        security_context: node.security_context.clone(),
        resources: node.resources.clone(),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(mounts.flatten().collect()),
        ..Container::default()
    }
}

/// The pod is ready when the init container has ended; this one keeps it so.
fn waiter(node: &Container) -> Container {
    Container {
        name: "done".to_owned(),
        image: node.image.clone(),
        image_pull_policy: node.image_pull_policy.clone(),
        command: Some(vec!["sleep".to_owned(), "1000000000".to_owned()]),
        ..Container::default()
    }
}

fn arguments(node: &Container, mesh_devices: &[String]) -> Vec<String> {
    let mut arguments = vec!["cleanup".to_owned()];
    let mut given = node.args.iter().flatten().peekable();
    while let Some(argument) = given.next() {
        let name = argument.split('=').next().unwrap_or_default();
        if SHARED_FLAGS.contains(&name) {
            arguments.push(argument.clone());
            arguments.extend(given.next_if(|_| !argument.contains('=')).cloned());
        }
    }
    arguments.extend(mesh_devices.iter().map(|device| format!("--mesh-device={device}")));
    arguments
}

/// A merge patch by which the DaemonSet begins.
pub(super) fn release() -> Value {
    json!({ "spec": { "template": { "spec": { "nodeSelector": { HELD: null } } } } })
}

/// Nodes that are not cleaned up yet, each with the reason.
pub(super) fn left(set: &DaemonSet, pods: &[Pod]) -> Vec<String> {
    let status = set.status.clone().unwrap_or_default();
    if status.observed_generation != set.metadata.generation {
        return vec!["the DaemonSet controller has not seen the change yet".to_owned()];
    }
    let mut left: Vec<String> = pods.iter().filter(|pod| !is_ready(pod)).map(describe).collect();
    let missing = usize::try_from(status.desired_number_scheduled).unwrap_or(0).saturating_sub(pods.len());
    left.extend((missing > 0).then(|| format!("{missing} nodes without a pod yet")));
    left
}

fn describe(pod: &Pod) -> String {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or("-");
    let states = pod.status.iter().flat_map(|status| status.init_container_statuses.iter().flatten());
    let mut reasons = states.filter_map(|status| {
        let ended = status.last_state.as_ref().and_then(|state| state.terminated.as_ref());
        let waiting = status.state.as_ref().and_then(|state| state.waiting.as_ref());
        let message = ended.and_then(|ended| ended.message.clone());
        message.or_else(|| waiting.and_then(|waiting| waiting.message.clone().or(waiting.reason.clone())))
    });
    format!(
        "node {node} (pod {}): {}",
        pod.name_any(),
        reasons.next().as_deref().unwrap_or("not ready yet").trim()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program() -> DaemonSet {
        let text = include_str!("../../../../deploy/node/daemonset.yaml");
        serde_saphyr::from_str(text).unwrap()
    }

    #[test]
    fn it_has_image_mounts_nodes_and_settings_of_the_node_program() {
        let mut program = program();
        let pod = program.spec.as_mut().unwrap().template.spec.as_mut().unwrap();
        pod.containers[0].args = Some(
            ["node", "--pod-table-id", "1116", "--router", "--socket=/run/x.sock"]
                .map(str::to_owned)
                .to_vec(),
        );
        let set = cleanup(&program, &["wg9".to_owned()]).unwrap();
        let spec = set.spec.unwrap().template.spec.unwrap();
        let cleaner = &spec.init_containers.unwrap()[0];
        let arguments = cleaner.args.clone().unwrap().join(" ");
        assert_eq!(arguments, "cleanup --pod-table-id 1116 --socket=/run/x.sock --mesh-device=wg9");
        let mounts: Vec<&str> =
            cleaner.volume_mounts.iter().flatten().map(|mount| mount.mount_path.as_str()).collect();
        assert_eq!(mounts, ["/run", "/var/lib/fairlead", "/host/opt/cni/bin", "/host/etc/cni/net.d"]);
        assert_eq!(cleaner.image.as_deref(), Some("fairlead"));
        assert_eq!(spec.tolerations.unwrap().len(), 1);
        assert!(spec.node_selector.unwrap().contains_key(HELD));
    }

    #[test]
    fn a_foreign_daemon_set_is_not_taken() {
        assert_eq!(cleanup(&DaemonSet::default(), &[]), None);
    }

    #[test]
    fn a_node_is_left_until_its_pod_is_ready_and_says_why() {
        let pod = |ready: bool| -> Pod {
            serde_json::from_value(json!({
                "metadata": { "name": "p" }, "spec": { "nodeName": "n1", "containers": [] },
                "status": {
                    "conditions": [{ "type": "Ready", "status": if ready { "True" } else { "False" } }],
                    "initContainerStatuses": [{
                        "name": "cleanup", "image": "", "imageID": "", "ready": false, "restartCount": 1,
                        "lastState": { "terminated": { "exitCode": 1, "message": "error: no\n" } },
                    }],
                },
            }))
            .unwrap()
        };
        let set = |desired: i32, observed: i64| -> DaemonSet {
            serde_json::from_value(json!({
                "metadata": { "generation": 2 },
                "status": { "currentNumberScheduled": 0, "desiredNumberScheduled": desired, "numberMisscheduled": 0,
                    "numberReady": 0, "observedGeneration": observed },
            }))
            .unwrap()
        };
        assert_eq!(left(&set(1, 2), &[pod(true)]), Vec::<String>::new());
        assert_eq!(left(&set(1, 2), &[pod(false)]), ["node n1 (pod p): error: no"]);
        assert_eq!(left(&set(2, 2), &[pod(true)]), ["1 nodes without a pod yet"]);
        assert_eq!(left(&set(0, 1), &[]).len(), 1, "the old status counts nothing");
    }
}

//! Causes why gateways are not available: from Kubernetes, about their pods, and from the gateways themselves. A Deployment says that it
//! does not progress only after ten minutes, and not why.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use fairlead_api::resources::Egress;
use fairlead_cluster::subsystem::Subsystem;
use fairlead_egress::objects::health_port;
use fairlead_wire::http::Response;
use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Client, ResourceExt as _};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::findings::{Cause, Causes, Findings};
use super::pods::{address, ask, gateway_pods};

/// Interval of looks at gateways that are not available.
const INTERVAL: Duration = Duration::from_secs(10);
/// Time limit of the look at one Egress; after that its cause stays as it was.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Most pods of an Egress that are looked at.
const PODS: usize = 4;
/// Seconds for which a pod may just be starting.
const STARTING: i64 = 20;
/// Most characters of a message.
const MAX_MESSAGE: usize = 400;
/// Reasons for which containers wait that do not fail.
const NO_FAILURES: [&str; 2] = ["ContainerCreating", "PodInitializing"];

/// Starts the task, and returns what it finds, and a signal of changes.
pub(super) fn start(
    subsystem: &mut Subsystem,
    client: Client,
    egresses: Store<Egress>,
    deployments: Store<Deployment>,
) -> (watch::Receiver<Causes>, watch::Receiver<u64>) {
    let (findings, receivers) = Findings::new();
    subsystem.spawn("causes", run(client, egresses, deployments, findings));
    receivers
}

async fn run(
    client: Client,
    egresses: Store<Egress>,
    deployments: Store<Deployment>,
    findings: Findings,
) -> Infallible {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let lacking = egresses.state().into_iter().filter(|egress| is_lacking(egress, &deployments));
        let look = |egress: Arc<Egress>| {
            let client = &client;
            async move { timeout(TIMEOUT, cause(client, &egress)).await.map_err(drop)?.map_err(drop) }
        };
        findings.renew(lacking, look).await;
    }
}

/// Whether it has fewer gateways than it wants, or some that are not available.
fn is_lacking(egress: &Egress, deployments: &Store<Deployment>) -> bool {
    let of = ObjectRef::new(&egress.name_any()).within(&egress.namespace().unwrap_or_default());
    let deployment = deployments.get(&of);
    let status = deployment.as_ref().and_then(|deployment| deployment.status.as_ref());
    let available = status.and_then(|status| status.available_replicas).unwrap_or_default();
    // Of a rollout that does not get on: those of before are still available.
    let unavailable = status.and_then(|status| status.unavailable_replicas).unwrap_or_default();
    let is_lacking = available < egress.spec.replicas || unavailable > 0;
    egress.metadata.deletion_timestamp.is_none() && deployment.is_some() && is_lacking
}

async fn cause(client: &Client, egress: &Egress) -> kube::Result<Option<Cause>> {
    let pods = match gateway_pods(client, egress).await {
        Ok(pods) => pods,
        Err(error) => {
            let namespace = egress.namespace();
            let egress = egress.name_any();
            tracing::debug!(namespace, egress, %error, "cannot list gateway pods");
            return Err(error);
        }
    };
    let now = Timestamp::now();
    let failing: Vec<&Pod> = pods.iter().filter(|pod| is_due(pod, now)).take(PODS).collect();
    if let Some(cause) = failing.iter().find_map(|pod| of_pod(pod)) {
        return Ok(Some(cause));
    }
    let asked = join_all(failing.iter().map(|pod| of_itself(pod))).await;
    Ok(asked.into_iter().flatten().next().or_else(|| failing.iter().find_map(|pod| of_last_end(pod))))
}

/// Cause that a running gateway reports itself.
async fn of_itself(pod: &Pod) -> Option<Cause> {
    of_answer(pod, &ask(address(pod)?, health_port(pod), "/readyz").await?)
}

/// Whether a pod should be ready by now, and is not.
fn is_due(pod: &Pod, now: Timestamp) -> bool {
    let made = pod.metadata.creation_timestamp.as_ref();
    // One of the clocks may be wrong: it cannot be so new as to be made in the future.
    let is_old = made.is_some_and(|made| now.duration_since(made.0).as_secs().saturating_abs() >= STARTING);
    let is_ready = condition(pod, "Ready").is_some_and(|ready| ready.status == "True");
    // One that was evicted stays, and another one takes its place.
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let has_ended = matches!(phase, Some("Failed" | "Succeeded"));
    is_old && !is_ready && !has_ended && pod.metadata.deletion_timestamp.is_none()
}

fn condition<'a>(pod: &'a Pod, type_: &str) -> Option<&'a PodCondition> {
    pod.status.as_ref()?.conditions.iter().flatten().find(|condition| condition.type_ == type_)
}

/// Cause that the API server shows of a pod that cannot run.
fn of_pod(pod: &Pod) -> Option<Cause> {
    let status = pod.status.as_ref()?;
    if let Some(scheduled) = condition(pod, "PodScheduled").filter(|scheduled| scheduled.status == "False") {
        return Some(of(pod, "GatewayUnschedulable", scheduled.message.as_deref().unwrap_or_default()));
    }
    let init = status.init_container_statuses.iter();
    let others = status.container_statuses.iter();
    let text = init.chain(others).flatten().find_map(of_container)?;
    Some(of(pod, "GatewayPodFails", &text))
}

fn of_container(status: &ContainerStatus) -> Option<String> {
    let state = status.state.as_ref()?;
    let (reason, message) = match (&state.waiting, &state.terminated) {
        (Some(waiting), _) => {
            (waiting.reason.clone().unwrap_or_default(), waiting.message.clone().unwrap_or_default())
        }
        (None, Some(ended)) if ended.exit_code != 0 => {
            let reason = ended.reason.clone().unwrap_or_default();
            (reason, ended.message.clone().unwrap_or_else(|| format!("exit code {}", ended.exit_code)))
        }
        _ => return None,
    };
    let is_failure = !reason.is_empty() && !NO_FAILURES.contains(&reason.as_str());
    is_failure.then(|| format!("container {}: {reason}: {message}", status.name))
}

/// Cause from the last end of a container that runs again and is not ready yet.
fn of_last_end(pod: &Pod) -> Option<Cause> {
    let all = pod.status.as_ref()?.container_statuses.iter().flatten().filter(|status| !status.ready);
    let mut ended = all.filter_map(|status| Some((status, status.last_state.as_ref()?.terminated.as_ref()?)));
    let (status, ended) = ended.find(|(_, ended)| ended.exit_code != 0)?;
    let text = format!("container {}: ended with exit code {}, and runs again", status.name, ended.exit_code);
    Some(of(pod, "GatewayPodFails", &text))
}

/// Cause in the answer of a running gateway to `/readyz`; `None` if it is ready or names no failed check.
pub(super) fn of_answer(pod: &Pod, answer: &Response) -> Option<Cause> {
    if answer.status == 200 {
        return None;
    }
    let body = String::from_utf8_lossy(&answer.body);
    let failed: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("[-]")).collect();
    (!failed.is_empty()).then(|| of(pod, "GatewayNotReady", &failed.join("; ")))
}

fn of(pod: &Pod, reason: &'static str, text: &str) -> Cause {
    let text: String = text.chars().filter(|it| !it.is_control()).take(MAX_MESSAGE).collect();
    Cause { reason, message: format!("gateway {}: {text}", pod.name_any()) }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(status: Value) -> Pod {
        let metadata = json!({ "name": "nat-a", "creationTimestamp": "2026-01-01T00:00:00Z" });
        serde_json::from_value(json!({ "metadata": metadata, "status": status })).unwrap()
    }

    #[test]
    fn what_keeps_a_pod_from_running_is_named() {
        let waiting = |reason: &str| {
            json!({ "containerStatuses": [
                { "name": "sidecar", "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": { "running": {} } },
                { "name": "egress", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                  "state": { "waiting": { "reason": reason, "message": "Back-off\npulling image" } } },
            ] })
        };
        let cause = of_pod(&pod(waiting("ImagePullBackOff"))).unwrap();
        assert_eq!(cause.reason, "GatewayPodFails");
        assert_eq!(cause.message, "gateway nat-a: container egress: ImagePullBackOff: Back-offpulling image");
        assert_eq!(of_pod(&pod(waiting("ContainerCreating"))), None);
        let unscheduled =
            json!({ "conditions": [{ "type": "PodScheduled", "status": "False", "message": "0/3 nodes" }] });
        let cause = of_pod(&pod(unscheduled)).unwrap();
        assert_eq!(
            (cause.reason, cause.message.as_str()),
            ("GatewayUnschedulable", "gateway nat-a: 0/3 nodes")
        );
        let ended = json!({ "initContainerStatuses": [{ "name": "init", "image": "", "imageID": "", "ready": false, "restartCount": 1,
            "state": { "terminated": { "exitCode": 2, "reason": "Error" } } }] });
        assert_eq!(of_pod(&pod(ended)).unwrap().message, "gateway nat-a: container init: Error: exit code 2");
        assert_eq!(of_pod(&Pod::default()), None);
    }

    #[test]
    fn what_a_gateway_says_of_itself_is_a_cause_and_hostile_answers_are_short() {
        let answer = |status, body: &str| Response { status, body: body.as_bytes().to_vec() };
        let body = "[-]data path failed: DataPathRefused: no\n[+]caches ok\n[-]caches failed: waiting\nreadyz check failed\n";
        let cause = of_answer(&pod(json!({})), &answer(503, body)).unwrap();
        assert_eq!(cause.reason, "GatewayNotReady");
        assert_eq!(
            cause.message,
            "gateway nat-a: data path failed: DataPathRefused: no; caches failed: waiting"
        );
        assert_eq!(of_answer(&pod(json!({})), &answer(200, body)), None);
        assert_eq!(of_answer(&pod(json!({})), &answer(503, "<html>")), None);
        let long = of_answer(&pod(json!({})), &answer(503, &format!("[-]{}", "x".repeat(5000)))).unwrap();
        assert!(long.message.len() < 500);
    }

    #[test]
    fn a_pod_that_is_ready_young_or_ending_is_not_looked_at() {
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let ready = json!({ "conditions": [{ "type": "Ready", "status": "True" }] });
        assert!(is_due(&pod(json!({})), at("2026-01-01T00:00:20Z")));
        assert!(!is_due(&pod(json!({})), at("2026-01-01T00:00:19Z")));
        assert!(!is_due(&pod(ready), at("2026-01-01T01:00:00Z")));
        let mut ending = pod(json!({}));
        ending.metadata.deletion_timestamp = ending.metadata.creation_timestamp.clone();
        assert!(!is_due(&ending, at("2026-01-01T01:00:00Z")));
    }
}

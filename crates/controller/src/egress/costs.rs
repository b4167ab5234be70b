//! Choice of the gateways that a scale-down takes: those with the least to do. The controller of ReplicaSets deletes pods of the lowest
//! `controller.kubernetes.io/pod-deletion-cost` first, so gateways are asked now and then how many connections they have. Their answers
//! say, too, whether their clock is wrong.

mod ask;
mod order;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use fairlead_api::resources::Egress;
use fairlead_cluster::subsystem::Subsystem;
use fairlead_cluster::writes::is_stale;
use fairlead_egress::objects::metrics_port;
use fairlead_wire::http::Response;
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::runtime::reflector::Store;
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use self::order::{Gateway, Load, changes, cost};
use super::findings::{Cause, Causes, Findings};
use super::pods::{address, gateway_pods};

/// Interval of requests to gateways.
const INTERVAL: Duration = Duration::from_secs(30);
/// Gateways that are asked at the same time.
const CONCURRENCY: usize = 16;
/// Gateways that are asked beyond twice the replicas: those that are being replaced.
const MORE: usize = 8;
/// The annotation of pods that the controller of ReplicaSets reads (k8s.io/kubernetes/pkg/apis/core, `PodDeletionCost`).
const ANNOTATION: &str = "controller.kubernetes.io/pod-deletion-cost";

/// Starts the task, and returns which gateways have wrong clocks, and a signal of changes.
pub(super) fn start(
    subsystem: &mut Subsystem,
    client: Client,
    egresses: Store<Egress>,
) -> (watch::Receiver<Causes>, watch::Receiver<u64>) {
    let (findings, receivers) = Findings::new();
    subsystem.spawn("deletion costs", run(client, egresses, findings));
    receivers
}

/// `egresses` may be empty at first.
async fn run(client: Client, egresses: Store<Egress>, findings: Findings) -> Infallible {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let is_there = |egress: &Arc<Egress>| egress.metadata.deletion_timestamp.is_none();
        let egresses = egresses.state().into_iter().filter(is_there);
        let look = |egress: Arc<Egress>| {
            let client = &client;
            async move { look(client, &egress).await }
        };
        findings.renew(egresses, look).await;
    }
}

/// Asks the gateways of an Egress, and writes what differs. What cannot be written is tried again by the next look.
///
/// # Errors
/// The API server does not list the gateways.
async fn look(client: &Client, egress: &Egress) -> kube::Result<Option<Cause>> {
    let namespace = egress.namespace().unwrap_or_default();
    let name = egress.name_any();
    let pods = gateway_pods(client, egress).await.inspect_err(|error| {
        tracing::warn!(namespace, egress = name, %error, "cannot list gateway pods; their deletion costs stay");
    })?;
    let most =
        usize::try_from(egress.spec.replicas).unwrap_or_default().saturating_mul(2).saturating_add(MORE);
    let pods: Vec<Pod> = pods.into_iter().filter(is_running).take(most).collect();
    let loads: Vec<Option<Load>> = stream::iter(&pods).map(load).buffered(CONCURRENCY).collect().await;
    // Of one gateway there is no order.
    if egress.spec.replicas > 1 {
        write(client, egress, &pods, &loads).await;
    }
    Ok(pods.iter().zip(&loads).find_map(|(pod, load)| clock(pod, (*load)?)))
}

/// That the clock of a gateway is wrong.
fn clock(pod: &Pod, load: Load) -> Option<Cause> {
    let seconds = load.clock_error_seconds?;
    let direction = if seconds > 0 { "ahead of" } else { "behind" };
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or("its node");
    // Without the seconds: each token shows others, and each change would be written to the status.
    let message = format!(
        "pod {}: the clock of {node} is at least a minute {direction} the API server's; set its time",
        pod.name_any()
    );
    Some(Cause { reason: "ClockWrong", message })
}

async fn write(client: &Client, egress: &Egress, pods: &[Pod], loads: &[Option<Load>]) {
    let namespace = egress.namespace().unwrap_or_default();
    let name = egress.name_any();
    let api = Api::<Pod>::namespaced(client.clone(), &namespace);
    let present = |pod: &Pod| pod.annotations().get(ANNOTATION).and_then(|cost| cost.parse().ok());
    let gateway =
        |(pod, load): (&Pod, &Option<Load>)| Gateway { present: present(pod), wanted: load.and_then(cost) };
    let gateways: Vec<Gateway> = pods.iter().zip(loads).map(gateway).collect();
    for (index, cost) in changes(&gateways) {
        let Some(pod) = pods.get(index) else { continue };
        let patch =
            json!({ "metadata": { "uid": pod.uid(), "annotations": { ANNOTATION: cost.to_string() } } });
        let pod = pod.name_any();
        match api.patch(&pod, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => {
                tracing::debug!(namespace, egress = name, pod, cost, "set the deletion cost of a gateway")
            }
            Err(error) if is_stale(&error) => {}
            Err(error) => {
                tracing::warn!(namespace, egress = name, pod, %error, "cannot set the deletion cost of a gateway");
            }
        }
    }
}

/// Whether it can be asked, and a scale-down could take it.
fn is_running(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    phase == Some("Running") && pod.metadata.deletion_timestamp.is_none()
}

/// The cost of a gateway that answers this.
pub(super) fn of_answer(answer: &Response) -> Option<i32> {
    ask::of_answer(answer).and_then(cost)
}

async fn load(pod: &Pod) -> Option<Load> {
    ask::load(address(pod)?, metrics_port(pod)).await
}

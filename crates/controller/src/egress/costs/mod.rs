//! Which gateways a scale-down takes: those with the least to do. The controller of ReplicaSets deletes pods of the lowest
//! `controller.kubernetes.io/pod-deletion-cost` first, so gateways are asked now and then how many connections they have.

mod ask;
mod order;

use std::sync::Arc;
use std::time::Duration;

use fairlead_api::resources::Egress;
use fairlead_cluster::writes::is_stale;
use fairlead_egress::objects::metrics_port;
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::runtime::reflector::Store;
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio::time::{MissedTickBehavior, interval};

use self::order::{Gateway, changes, cost};
use super::pods::{address, gateway_pods};

/// How often gateways are asked.
const INTERVAL: Duration = Duration::from_secs(30);
/// Gateways that are asked at the same time.
const CONCURRENCY: usize = 16;
/// Gateways that are asked beyond twice the replicas: those that are being replaced.
const MORE: usize = 8;
/// Egresses that are looked at at the same time: one with silent gateways does not hold up the others.
const EGRESSES: usize = 4;
/// The annotation of pods that the controller of ReplicaSets reads (k8s.io/kubernetes/pkg/apis/core, `PodDeletionCost`).
const ANNOTATION: &str = "controller.kubernetes.io/pod-deletion-cost";

/// Runs until it is dropped. `egresses` may be empty at first.
pub(super) async fn run(client: Client, egresses: Store<Egress>) -> std::convert::Infallible {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let has_order =
            |egress: &Arc<Egress>| egress.spec.replicas > 1 && egress.metadata.deletion_timestamp.is_none();
        let due = stream::iter(egresses.state().into_iter().filter(has_order));
        due.for_each_concurrent(EGRESSES, async |egress| look(&client, &egress).await).await;
    }
}

/// Asks the gateways of an Egress, and writes what differs. What fails is tried again by the next look.
async fn look(client: &Client, egress: &Egress) {
    let (namespace, name) = (egress.namespace().unwrap_or_default(), egress.name_any());
    let api = Api::<Pod>::namespaced(client.clone(), &namespace);
    let pods = match gateway_pods(client, egress).await {
        Ok(pods) => pods,
        Err(error) => {
            return tracing::warn!(namespace, egress = name, %error, "cannot list gateway pods; their deletion costs stay");
        }
    };
    let most =
        usize::try_from(egress.spec.replicas).unwrap_or_default().saturating_mul(2).saturating_add(MORE);
    let pods: Vec<Pod> = pods.into_iter().filter(is_running).take(most).collect();
    let gateways: Vec<Gateway> = stream::iter(&pods).map(gateway).buffered(CONCURRENCY).collect().await;
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

async fn gateway(pod: &Pod) -> Gateway {
    let present = pod.annotations().get(ANNOTATION).and_then(|cost| cost.parse().ok());
    let load = match address(pod) {
        Some(address) => ask::load(address, metrics_port(pod)).await,
        None => None,
    };
    Gateway { present, wanted: load.and_then(cost) }
}

//! The program that runs the gateways of Egresses: a leader, elected by a Lease of its own, applies Deployment, Service and the other
//! objects of each Egress, as `fairlead-egress` decides, and writes its status.
//!
//! Objects are written by server-side apply; only ports that others have added to a Service are taken back by another patch. They
//! are compared with what was applied last: one that others change or delete is applied again, and nothing is sent while all is as
//! it should be. An object of the same name that belongs to another owner stays as it is.
//!
//! It also asks gateways what they have to do, so that a scale-down takes those with the least: `costs`, and looks why gateways are not
//! available: `causes`.

mod causes;
mod costs;
mod findings;
mod leader;
mod pods;
mod ranges;
mod reconcile;
mod source_addresses;
mod write;

use std::net::SocketAddr;

use fairlead_api::names::LEASE_EGRESS;
use fairlead_cluster::events::EventMetrics;
use fairlead_cluster::http::MetricsAddress;
use fairlead_cluster::metrics::declare;
use fairlead_cluster::subsystem::Supervisor;
pub use fairlead_egress::objects::SeccompDefault;
use k8s_openapi::api::core::v1::Pod;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::leadership::{self, Changes, lead_while_elected};
use crate::work_queue::{ReconcileMetrics, WorkQueueMetrics};
use crate::{election, replica};

/// The deletion cost of a gateway that answers a request for `/load` with this; `None` if that says none. For fuzz targets and recorded
/// answers; the program parses the answers of gateways in the same way.
pub fn cost_of_answer(answer: &[u8]) -> Option<i32> {
    costs::of_answer(&pods::parse(answer)?)
}

/// Cause that is reported for a gateway which answers a request for `/readyz` with this; `None` if the answer names none. For fuzz
/// targets and recorded answers, as [`cost_of_answer`].
pub fn cause_of_answer(answer: &[u8]) -> Option<String> {
    Some(causes::of_answer(&Pod::default(), &pods::parse(answer)?)?.message)
}

/// Settings of the egress controller.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Identity of this replica in the Lease.
    pub identity: String,
    /// Address of the metrics endpoint, and who may read it.
    pub metrics: MetricsAddress,
    /// Address of `/healthz` and `/readyz`.
    pub health: SocketAddr,
    /// UDP port of Services and gateways.
    pub port: u16,
    /// The image of gateways; that of the first container of `pod` if not given.
    pub image: Option<String>,
    /// Seccomp profile of gateways whose template names none.
    pub seccomp: SeccompDefault,
    /// The only prefixes in which Egresses may have source addresses.
    pub source_addresses: Vec<ipnet::IpNet>,
    /// The pod of this replica, if it is known.
    pub pod: Option<OwnPod>,
}

/// The pod of this replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnPod {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
}

/// Runs the program until `stop` resolves.
///
/// # Errors
/// The client configuration is invalid, or a task ended before `stop`.
pub async fn run(
    settings: Settings,
    config: kube::Config,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let mut registry = Registry::default();
    let client = replica::client(config, &mut registry)?;
    let own_metrics = Metrics::register(&mut registry);
    let mut supervisor = replica::serve(registry, settings.metrics, settings.health, &client)?;
    let outcome = election::start(&mut supervisor, client.clone(), LEASE_EGRESS, settings.identity.clone());

    let lead = |supervisor: &mut Supervisor, _| {
        own_metrics.leader.set(1);
        leader::start(supervisor.subsystem(leadership::NAME), &client, &settings, &own_metrics);
    };
    let ended = || {
        own_metrics.leader.set(0);
        own_metrics.queue.clear();
    };
    let outcome = lead_while_elected(&mut supervisor, Changes::new(outcome), stop, lead, ended).await;
    replica::stop(supervisor).await;
    Ok(outcome?)
}

/// Counts since the start of this replica.
#[derive(Debug, Clone)]
struct Metrics {
    leader: Gauge,
    events: EventMetrics,
    queue: WorkQueueMetrics,
}

impl Metrics {
    /// Declares them in the registry of all metrics.
    fn register(registry: &mut Registry) -> Self {
        let reconciles = ReconcileMetrics::register(registry);
        let queue = WorkQueueMetrics::register(registry, "egress", reconciles);
        let ours = registry.sub_registry_with_prefix("fairlead_egress_controller");
        Self {
            leader: declare(ours, "leader", "Whether this replica is the leader"),
            events: EventMetrics::register(ours),
            queue,
        }
    }
}

//! Publishes this node's WireKubePeer and Events about problems of the mesh, fed by reports.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::resources::WireKubePeer;
use fairlead_api::wireguard::PublicKey;
use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::{EventPublisher, ProblemEvent, ProblemEvents, node_reference};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::reflector::ObjectRef;
use kube::{Client, ResourceExt};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::publish;
use super::report::Report;
use crate::members::annotations;

/// Longest an API call may take before it is given up and retried.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failure.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// How often what is published is compared without news; only what differs is written.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);

/// Problems of the mesh as Events on the Node.
const PROBLEM_EVENT: ProblemEvent = ProblemEvent {
    reason: "MeshProblem",
    resolved: "MeshProblemsGone",
    resolved_note: "the mesh has no problems any more",
    action: "JoinMesh",
};

/// Publishes what this node says of itself.
pub(super) struct Publisher {
    pub(super) client: Client,
    pub(super) node: String,
    pub(super) public_key: PublicKey,
    pub(super) nodes: Arc<Cache<Node>>,
    pub(super) peers: Arc<Cache<WireKubePeer>>,
    pub(super) events: EventPublisher,
}

impl Publisher {
    /// Publishes what reports say, one write at a time; while the API server is away the latest report waits.
    pub(super) async fn run(self, mut inbox: watch::Receiver<Option<Arc<Report>>>) -> Infallible {
        let mut peers = self.peers.subscribe();
        let regarding = node_reference(&self.node);
        let mut events = ProblemEvents::new(self.events.clone(), regarding, PROBLEM_EVENT);
        loop {
            tokio::select! {
                Ok(()) = inbox.changed() => {}
                _ = peers.changed() => {}
                () = sleep(REFRESH_INTERVAL) => {}
            }
            let Some(report) = inbox.borrow_and_update().clone() else { continue };
            match timeout(TIMEOUT, self.publish(&report)).await {
                Ok(Ok(())) => {
                    let problems: Vec<String> = report.problems.iter().map(ToString::to_string).collect();
                    events.update(&problems, Instant::now());
                }
                Ok(Err(error)) => {
                    tracing::warn!(%error, "cannot publish this node's WireKubePeer");
                    sleep(RETRY_INTERVAL).await;
                }
                Err(_) => tracing::warn!(
                    "publishing this node's WireKubePeer took more than {} s",
                    TIMEOUT.as_secs()
                ),
            }
        }
    }

    async fn publish(&self, report: &Report) -> Result<(), kube::Error> {
        let own = ObjectRef::new(&self.node);
        let Some(node) = self.nodes.store.get(&ObjectRef::new(&self.node)) else { return Ok(()) };
        let others: Vec<Arc<WireKubePeer>> = self.peers.store.state();
        let reported = |peer: &str, endpoint: SocketAddr| {
            let text = endpoint.to_string();
            others
                .iter()
                // The first by name report; counting only those keeps the choice from swinging.
                .filter(|other| other.name_any() < self.node)
                .filter_map(|other| other.status.as_ref()?.observed_endpoints.get(peer))
                .filter(|seen| seen.endpoint == text)
                .count()
        };
        let desired = publish::desired(&publish::Facts {
            public_key: self.public_key,
            report,
            manual: annotations::manual_endpoint(&node),
            claims: report.claims.iter().map(|address| IpNet::from(*address).to_string()).collect(),
            keepalive: annotations::keepalive(&node).ok().flatten(),
            reported: &reported,
        });
        let present = self.peers.store.get(&own);
        publish::publish(&self.client, &node, present.as_deref(), &desired).await
    }
}

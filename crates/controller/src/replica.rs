//! Duties of every replica of a controller, leader or not: it asks the API server, serves metrics and health, and ends in
//! order.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use fairlead_cluster::http::{Limits, MetricsAddress, Plain};
use fairlead_cluster::requests::{RequestMetrics, counting_client};
use fairlead_cluster::subsystem::Supervisor;
use fairlead_cluster::{http, metrics, process, resumption};
use kube::Client;
use prometheus_client::registry::Registry;

use crate::leadership::STOP_TIMEOUT;
use crate::{election, leadership};

/// A client whose requests are counted in the registry, which gets the metrics of the process, too.
///
/// # Errors
/// The configuration is invalid.
pub(crate) fn client(config: kube::Config, registry: &mut Registry) -> anyhow::Result<Client> {
    process::register_process(registry);
    let request_metrics = RequestMetrics::register(registry.sub_registry_with_prefix("fairlead"));
    let client = counting_client(config, request_metrics).context("cannot create a Kubernetes client")?;
    Ok(resumption::checking_client(client))
}

/// Begins to serve the metrics of the registry, and `/healthz` and `/readyz` at `health`.
///
/// # Errors
/// Metrics cannot be protected as `address` wants it.
pub(crate) fn serve(
    registry: Registry,
    address: MetricsAddress,
    health: SocketAddr,
    client: &Client,
) -> anyhow::Result<Supervisor> {
    let registry = Arc::new(registry);
    let mut supervisor = Supervisor::default();
    let scrape = http::metrics(move |exposition| metrics::text(&registry, exposition));
    http::serve_metrics(supervisor.subsystem("metrics"), address, scrape, client)?;
    let probes = http::serve("health", health, Limits::PROBES, Plain, http::probes(supervisor.health()));
    supervisor.subsystem("health").spawn("server", probes);
    Ok(supervisor)
}

/// Ends everything: the leader's last write comes before another replica may acquire the Lease.
pub(crate) async fn stop(mut supervisor: Supervisor) {
    supervisor.stop(leadership::NAME, STOP_TIMEOUT).await;
    supervisor.stop(election::NAME, STOP_TIMEOUT).await;
    supervisor.shutdown(&[], STOP_TIMEOUT).await;
}

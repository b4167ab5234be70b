//! The program: its subsystems, the leader's work while this replica leads, and the order of shutdown.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use fairlead_cluster::subsystem::{Failure, Supervisor};
use fairlead_cluster::{http, metrics};
use kube::Client;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::leader::LeaderMetrics;
use crate::webhook::{self, WebhookMetrics};
use crate::{election, leader};

/// How long the webhook is served after SIGTERM: API servers learn later that this replica is going.
const DRAIN_PERIOD: Duration = Duration::from_secs(3);
/// Time for a subsystem to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// How the program is to run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Identity of this replica in the Lease.
    pub identity: String,
    /// Address of `/metrics`.
    pub metrics: SocketAddr,
    /// Address of `/healthz` and `/readyz`.
    pub health: SocketAddr,
    /// Interval for releasing the blocks of deleted Nodes, in addition to every change of a Node.
    pub sweep_interval: Duration,
    /// The admission webhook.
    pub webhook: webhook::Settings,
}

/// Runs the controller until `stop` resolves.
///
/// # Errors
/// The client configuration is invalid, or a task ended before `stop`.
pub async fn run(
    settings: Settings,
    config: kube::Config,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let client = Client::try_from(config).context("cannot create a Kubernetes client")?;
    let mut registry = Registry::default();
    let leader_metrics = LeaderMetrics::register(&mut registry);
    let webhook_metrics = WebhookMetrics::register(&mut registry);
    let registry = Arc::new(registry);

    let mut supervisor = Supervisor::default();
    let scrape = http::metrics(move || metrics::text(&registry));
    supervisor.subsystem("metrics").spawn("server", http::serve("metrics", settings.metrics, scrape));
    let probes = http::probes(supervisor.health());
    supervisor.subsystem("health").spawn("server", http::serve("health", settings.health, probes));
    webhook::start(&mut supervisor, &settings.webhook, &client, &webhook_metrics);
    let leading = election::start(&mut supervisor, client.clone(), settings.identity);

    let lead = |supervisor: &mut Supervisor| {
        leader::start(supervisor, &client, &leader_metrics, settings.sweep_interval);
    };
    let outcome = lead_while_elected(&mut supervisor, leading, stop, lead, &leader_metrics).await;

    // The leader's last write comes before another replica may acquire the Lease.
    supervisor.stop(leader::NAME, STOP_TIMEOUT).await;
    supervisor.stop(election::NAME, STOP_TIMEOUT).await;
    tokio::time::sleep(DRAIN_PERIOD).await;
    supervisor.shutdown(&[webhook::NAME], STOP_TIMEOUT).await;
    Ok(outcome?)
}

/// Starts and stops the leader's work with the election, until `stop` or a failure.
async fn lead_while_elected(
    supervisor: &mut Supervisor,
    mut leading: watch::Receiver<bool>,
    stop: impl Future<Output = ()>,
    lead: impl Fn(&mut Supervisor),
    metrics: &LeaderMetrics,
) -> Result<(), Failure> {
    let mut stop = std::pin::pin!(stop);
    loop {
        let change = async {
            tokio::select! {
                changed = leading.changed() => match changed {
                    Ok(()) => Some(*leading.borrow_and_update()),
                    // The election ended, which is a failure of its own.
                    Err(_) => std::future::pending().await,
                },
                () = &mut stop => None,
            }
        };
        let Some(leads) = supervisor.run_until(change).await? else { return Ok(()) };
        // Also when leadership was lost and won again in between.
        supervisor.stop(leader::NAME, STOP_TIMEOUT).await;
        metrics.leads(None);
        if leads {
            tracing::info!("elected");
            lead(supervisor);
        } else {
            tracing::warn!("lost the Lease; waiting for the next election");
        }
    }
}

//! The program: its subsystems, the leader's work while this replica leads, and the order of shutdown.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use fairlead_cluster::http::{Limits, MetricsAddress, Plain};
use fairlead_cluster::requests::{RequestMetrics, counting_client};
use fairlead_cluster::subsystem::{Failure, Supervisor};
use fairlead_cluster::{http, metrics, process, resumption};
use fairlead_ipam::orphans::Graces;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::leader::{LeaderMetrics, Pauses};
use crate::{election, leader};

/// For this long after a list of all blocks, only blocks that nodes claim are granted. Nodes claim within a second what the
/// API server has lost.
const HOLD_OFF: Duration = Duration::from_secs(3);
/// The same after etcd was restored from a backup: the watches of nodes are retried every 30 s by then.
const RESTORATION_HOLD_OFF: Duration = Duration::from_secs(60);
/// How long a block made by hand may name a Node that never existed.
const NEVER_EXISTED_GRACE: Duration = Duration::from_secs(10);
/// Time for a subsystem to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// How the program is to run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Identity of this replica in the Lease.
    pub identity: String,
    /// Where metrics are served, and for whom.
    pub metrics: MetricsAddress,
    /// Address of `/healthz` and `/readyz`.
    pub health: SocketAddr,
    /// Interval of attempts to release the blocks of deleted Nodes, in addition to every change of a Node.
    pub sweep_interval: Duration,
    /// How long a Node must have been deleted before its blocks are released.
    pub deleted_node_grace: Duration,
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
    let mut registry = Registry::default();
    process::register_process(&mut registry);
    let request_metrics = RequestMetrics::register(registry.sub_registry_with_prefix("fairlead"));
    let client = counting_client(config, request_metrics).context("cannot create a Kubernetes client")?;
    let client = resumption::checking_client(client);
    let leader_metrics = LeaderMetrics::register(&mut registry);
    let registry = Arc::new(registry);

    let mut supervisor = Supervisor::default();
    let scrape = http::metrics(move |exposition| metrics::text(&registry, exposition));
    http::serve_metrics(supervisor.subsystem("metrics"), settings.metrics, scrape, &client)?;
    let probes =
        http::serve("health", settings.health, Limits::PROBES, Plain, http::probes(supervisor.health()));
    supervisor.subsystem("health").spawn("server", probes);
    let election::Outcome { leading, restorations } =
        election::start(&mut supervisor, client.clone(), settings.identity.clone());

    let graces = Graces { deleted: settings.deleted_node_grace, never_existed: NEVER_EXISTED_GRACE };
    let lead = |supervisor: &mut Supervisor, hold_off: Duration| {
        let pauses = Pauses { hold_off, graces, sweep_interval: settings.sweep_interval };
        leader::start(supervisor, &client, &settings.identity, &leader_metrics, pauses);
    };
    let changes = Changes { leading, restorations, restored: None };
    let outcome = lead_while_elected(&mut supervisor, changes, stop, lead, &leader_metrics).await;

    // The leader's last write comes before another replica may acquire the Lease.
    supervisor.stop(leader::NAME, STOP_TIMEOUT).await;
    supervisor.stop(election::NAME, STOP_TIMEOUT).await;
    supervisor.shutdown(&[], STOP_TIMEOUT).await;
    Ok(outcome?)
}

/// What the leader's work is started and stopped for.
struct Changes {
    leading: watch::Receiver<bool>,
    restorations: watch::Receiver<u64>,
    /// When etcd was last restored from a backup.
    restored: Option<Instant>,
}

impl Changes {
    /// Waits for the next one, and says whether this replica leads.
    async fn next(&mut self) -> bool {
        tokio::select! {
            changed = self.leading.changed() => match changed {
                Ok(()) => {}
                // The election ended, which is a failure of its own.
                Err(_) => std::future::pending().await,
            },
            Ok(()) = self.restorations.changed() => self.restored = Some(Instant::now()),
        }
        *self.leading.borrow_and_update()
    }

    fn hold_off(&self) -> Duration {
        let left = self.restored.map(|restored| RESTORATION_HOLD_OFF.saturating_sub(restored.elapsed()));
        left.map_or(HOLD_OFF, |left| left.max(HOLD_OFF))
    }
}

/// Starts and stops the leader's work with the election, until `stop` or a failure. After a restoration of etcd it begins
/// again, with new lists of everything.
async fn lead_while_elected(
    supervisor: &mut Supervisor,
    mut changes: Changes,
    stop: impl Future<Output = ()>,
    lead: impl Fn(&mut Supervisor, Duration),
    metrics: &LeaderMetrics,
) -> Result<(), Failure> {
    let mut stop = std::pin::pin!(stop);
    loop {
        let change = async {
            tokio::select! {
                leads = changes.next() => Some(leads),
                () = &mut stop => None,
            }
        };
        let Some(leads) = supervisor.run_until(change).await? else { return Ok(()) };
        // Also when leadership was lost and won again in between.
        supervisor.stop(leader::NAME, STOP_TIMEOUT).await;
        metrics.leads(None);
        if leads {
            tracing::info!("elected");
            lead(supervisor, changes.hold_off());
        } else {
            tracing::warn!("lost the Lease; waiting for the next election");
        }
    }
}

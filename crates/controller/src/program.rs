//! The program: its subsystems and the order of shutdown.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fairlead_api::names::LEASE_IPAM;
use fairlead_cluster::http::MetricsAddress;
use fairlead_cluster::subsystem::Supervisor;
use fairlead_ipam::orphans::Graces;
use prometheus_client::registry::Registry;

use crate::leader::{LeaderMetrics, Pauses};
use crate::leadership::{Changes, lead_while_elected};
use crate::{election, leader, replica};

/// Time after a list of all blocks in which only blocks that nodes claim are granted. Nodes claim within a second what the
/// API server has lost.
const HOLD_OFF: Duration = Duration::from_secs(3);
/// Time of this kind after etcd was restored from a backup: the watches of nodes are retried every 30 s by then.
const RESTORATION_HOLD_OFF: Duration = Duration::from_secs(60);
/// Age at which a block that was made by hand is released if its Node never existed.
const NEVER_EXISTED_GRACE: Duration = Duration::from_secs(10);
/// Settings of the controller.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Identity of this replica in the Lease.
    pub identity: String,
    /// Address of the metrics endpoint, and who may read it.
    pub metrics: MetricsAddress,
    /// Address of `/healthz` and `/readyz`.
    pub health: SocketAddr,
    /// Interval of attempts to release the blocks of deleted Nodes, in addition to every change of a Node.
    pub sweep_interval: Duration,
    /// Time between the deletion of a Node and the release of its blocks.
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
    let client = replica::client(config, &mut registry)?;
    let leader_metrics = LeaderMetrics::register(&mut registry);
    let mut supervisor = replica::serve(registry, settings.metrics, settings.health, &client)?;
    let outcome = election::start(&mut supervisor, client.clone(), LEASE_IPAM, settings.identity.clone());

    let graces = Graces { deleted: settings.deleted_node_grace, never_existed: NEVER_EXISTED_GRACE };
    let lead = |supervisor: &mut Supervisor, restored: Option<Instant>| {
        let hold_off = hold_off(restored);
        let pauses = Pauses { hold_off, graces, sweep_interval: settings.sweep_interval };
        leader::start(supervisor, &client, &settings.identity, &leader_metrics, pauses);
    };
    let ended = || leader_metrics.leads(None);
    let outcome = lead_while_elected(&mut supervisor, Changes::new(outcome), stop, lead, ended).await;
    replica::stop(supervisor).await;
    Ok(outcome?)
}

/// Time after an election, or longer after a restoration of etcd, in which blocks are granted only to nodes that claim
/// them.
fn hold_off(restored: Option<Instant>) -> Duration {
    let left = restored.map(|restored| RESTORATION_HOLD_OFF.saturating_sub(restored.elapsed()));
    left.map_or(HOLD_OFF, |left| left.max(HOLD_OFF))
}

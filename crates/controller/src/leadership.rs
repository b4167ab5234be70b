//! The leader's work while this replica leads.

use std::time::{Duration, Instant};

use fairlead_cluster::subsystem::{Failure, Supervisor};
use tokio::sync::watch;

use crate::election;

/// Name of the subsystem of the leader's work.
pub(crate) const NAME: &str = "leader";
/// Time for a subsystem to stop.
pub(crate) const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// Signals that start and stop the leader's work: elections, and restorations of etcd.
pub(crate) struct Changes {
    leading: watch::Receiver<bool>,
    restorations: watch::Receiver<u64>,
    /// Time of the last restoration of etcd from a backup.
    restored: Option<Instant>,
}

impl Changes {
    pub(crate) fn new(election::Outcome { leading, restorations }: election::Outcome) -> Self {
        Self { leading, restorations, restored: None }
    }

    /// Waits for the next signal, and says whether this replica leads.
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
}

/// Starts and stops the leader's work, the subsystem [`NAME`], with the election, until `stop` or a failure. After a restoration
/// of etcd it begins again, with new lists of everything. `lead` starts the work and is told when etcd was last restored; `ended`
/// is called when the work is stopped.
pub(crate) async fn lead_while_elected(
    supervisor: &mut Supervisor,
    mut changes: Changes,
    stop: impl Future<Output = ()>,
    lead: impl Fn(&mut Supervisor, Option<Instant>),
    ended: impl Fn(),
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
        supervisor.stop(NAME, STOP_TIMEOUT).await;
        ended();
        if leads {
            tracing::info!("elected");
            lead(supervisor, changes.restored);
        } else {
            tracing::warn!("lost the Lease; waiting for the next election");
        }
    }
}

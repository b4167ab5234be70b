//! The election: reads and writes the Lease as [`crate::lease`] decides.

use std::time::{Duration, Instant};

use fairlead_api::names::SYSTEM_NAMESPACE;
use fairlead_cluster::subsystem::Supervisor;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::lease::{Elector, RENEW_DEADLINE, RETRY_PERIOD};

/// Name of the subsystem.
pub(crate) const NAME: &str = "election";

/// Time for the write that releases the Lease on shutdown.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// Results of the election, current while the subsystem runs.
pub(crate) struct Outcome {
    /// Whether this replica leads.
    pub(crate) leading: watch::Receiver<bool>,
    /// Number of times that etcd was restored from a backup, as seen by this replica.
    pub(crate) restorations: watch::Receiver<u64>,
}

/// Takes part in the election by the Lease of this name. Stopping the subsystem releases the Lease.
pub(crate) fn start(
    supervisor: &mut Supervisor,
    client: Client,
    lease: &'static str,
    identity: String,
) -> Outcome {
    let (sender, leading) = watch::channel(false);
    let (restored, restorations) = watch::channel(0);
    let leases = Api::namespaced(client, SYSTEM_NAMESPACE);
    let election = Election { leases, lease, elector: Elector::new(identity), restored };
    supervisor.subsystem(NAME).spawn_graceful("lease", |stop| election.run(sender, stop));
    Outcome { leading, restorations }
}

struct Election {
    leases: Api<Lease>,
    /// Name of the Lease.
    lease: &'static str,
    elector: Elector,
    restored: watch::Sender<u64>,
}

impl Election {
    async fn run(mut self, leading: watch::Sender<bool>, stop: CancellationToken) {
        if stop.run_until_cancelled(self.campaign(&leading)).await.is_none() {
            leading.send_replace(false);
            self.release().await;
        }
    }

    /// Acquires and renews the Lease forever.
    async fn campaign(&mut self, leading: &watch::Sender<bool>) {
        let mut failed = false;
        loop {
            // A request that hangs must not outlast the right to lead.
            let limit = self.time_left().unwrap_or(RENEW_DEADLINE);
            let error = match timeout(limit, self.attempt()).await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some("the API server does not answer".to_owned()),
            };
            match &error {
                Some(error) if !failed => {
                    tracing::warn!(error, lease = self.lease, "cannot acquire or renew the Lease; retrying");
                }
                Some(error) => tracing::debug!(error, lease = self.lease, "still no access to the Lease"),
                None => {}
            }
            failed = error.is_some();
            self.publish(leading);
            sleep(self.time_left().map_or(RETRY_PERIOD, |left| left.min(RETRY_PERIOD))).await;
            self.publish(leading);
        }
    }

    async fn attempt(&mut self) -> Result<(), kube::Error> {
        let lease = self.leases.get_opt(self.lease).await?;
        let now = Instant::now();
        if self.elector.observe(now, lease) {
            tracing::warn!(lease = self.lease, "etcd was restored from a backup, or the Lease was deleted");
            self.restored.send_modify(|count| *count = count.saturating_add(1));
        }
        let Some(mut claim) = self.elector.claim(now, Timestamp::now()) else { return Ok(()) };
        let parameters = PostParams::default();
        let stored = if claim.metadata.resource_version.is_some() {
            self.leases.replace(self.lease, &parameters, &claim).await
        } else {
            claim.metadata.name = Some(self.lease.to_owned());
            self.leases.create(&parameters, &claim).await
        };
        match stored {
            Ok(lease) => self.elector.accepted(now, lease),
            // Another replica wrote first; the next attempt reads what it wrote.
            Err(kube::Error::Api(status)) if status.is_conflict() || status.is_already_exists() => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn time_left(&self) -> Option<Duration> {
        let now = Instant::now();
        let deadline = self.elector.deadline().filter(|_| self.elector.leads(now));
        deadline.map(|deadline| deadline.saturating_duration_since(now))
    }

    fn publish(&self, leading: &watch::Sender<bool>) {
        let leads = self.elector.leads(Instant::now());
        leading.send_if_modified(|before| std::mem::replace(before, leads) != leads);
    }

    async fn release(&mut self) {
        let Some(lease) = self.elector.release(Timestamp::now()) else { return };
        let parameters = PostParams::default();
        let written = timeout(RELEASE_TIMEOUT, self.leases.replace(self.lease, &parameters, &lease)).await;
        if !matches!(written, Ok(Ok(_))) {
            tracing::warn!(
                lease = self.lease,
                "cannot release the Lease: the next leader waits until it expires"
            );
        }
    }
}

//! The Lease `NAME-gateways`: who the gateways are, and that this one is among them. The controller makes it.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use fairlead_cluster::caches::{self, Cache};
use fairlead_cluster::subsystem::Subsystem;
use fairlead_egress::EgressName;
use fairlead_source_addresses::leases::{ANNOTATION_MEMBER_PREFIX, members_lease};
use fairlead_source_addresses::members::{self, Member, Members};
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Pause after a write that failed, or was undone by another program.
const RETRY: Duration = Duration::from_secs(1);
/// Longest attempt at the end to remove the own annotation.
const REMOVAL: Duration = Duration::from_secs(2);

/// This gateway in the Lease.
pub struct Membership {
    leases: Api<Lease>,
    name: String,
    pod: String,
    member: Member,
    cache: Cache<Lease>,
    members: watch::Sender<Option<Arc<Members>>>,
    joined: watch::Sender<bool>,
    leaves: watch::Sender<bool>,
}

impl Membership {
    /// Begins to watch the Lease.
    pub fn start(
        subsystem: &mut Subsystem,
        client: &Client,
        egress: &EgressName,
        pod: String,
        member: Member,
    ) -> Self {
        let leases: Api<Lease> = Api::namespaced(client.clone(), &egress.namespace);
        let name = members_lease(&egress.name);
        let config = caches::config().fields(&format!("metadata.name={name}"));
        let cache = caches::start(subsystem, "Lease of gateways", watcher(leases.clone(), config));
        Self {
            leases,
            name,
            pod,
            member,
            cache,
            members: watch::Sender::default(),
            joined: watch::Sender::default(),
            leaves: watch::Sender::default(),
        }
    }

    /// The other gateways; `None` until the Lease has been read once.
    pub fn members(&self) -> watch::Receiver<Option<Arc<Members>>> {
        self.members.subscribe()
    }

    /// Whether this gateway is in the Lease.
    pub fn joined(&self) -> watch::Receiver<bool> {
        self.joined.subscribe()
    }

    /// Whether the controller asks this gateway to leave the others the source addresses.
    pub fn leaves(&self) -> watch::Receiver<bool> {
        self.leaves.subscribe()
    }

    /// Follows the Lease, and keeps the own annotation in it. Cancelled, it removes that and returns.
    pub async fn run(self, stop: CancellationToken) {
        let _cancelled: Option<Infallible> = stop.run_until_cancelled(self.follow()).await;
        let removed = timeout(REMOVAL, self.annotate(None)).await;
        if let Ok(Err(error)) = removed {
            tracing::warn!(lease = self.name, %error, "cannot remove this gateway from its Lease; the controller does");
        }
    }

    async fn follow(&self) -> Infallible {
        let mut changes = self.cache.subscribe();
        let mut reported = Vec::new();
        loop {
            changes.mark_unchanged();
            let is_written = self.read(&mut reported);
            if !is_written {
                if let Err(error) = self.annotate(Some(self.member.encode())).await {
                    tracing::warn!(lease = self.name, %error, "cannot write this gateway into its Lease; trying again");
                }
                // Its own write comes back within this time.
                tokio::select! {
                    () = sleep(RETRY) => {}
                    _ = changes.changed() => sleep(Duration::from_millis(50)).await,
                }
            } else if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Hands on who the others are. Whether the own annotation needs no write now.
    fn read(&self, reported: &mut Vec<String>) -> bool {
        if !self.cache.is_ready() {
            return true;
        }
        let leases = self.cache.store.state();
        let lease = leases.iter().find(|lease| lease.metadata.name.as_deref() == Some(&self.name));
        let annotations = lease.and_then(|lease| lease.metadata.annotations.clone()).unwrap_or_default();
        let (mut members, wrong) = members::members(&annotations);
        if *reported != wrong {
            for reason in &wrong {
                tracing::warn!(lease = self.name, reason, "a gateway is left out");
            }
            *reported = wrong;
        }
        let joined = members.remove(&self.pod).is_some();
        self.joined.send_if_modified(|known| std::mem::replace(known, joined) != joined);
        self.members.send_if_modified(|known| {
            let is_new = known.as_deref() != Some(&members);
            if is_new {
                *known = Some(Arc::new(members));
            }
            is_new
        });
        let own = annotations.get(&self.key());
        let asked = own.filter(|text| members::is_asked_to_leave(text));
        let leaves = asked.is_some_and(|text| Member::decode(text).as_ref() == Ok(&self.member));
        self.leaves.send_if_modified(|known| std::mem::replace(known, leaves) != leaves);
        // Without a Lease the controller permits no address, and there is nothing to write to.
        lease.is_none() || leaves || own == Some(&self.member.encode())
    }

    fn key(&self) -> String {
        format!("{ANNOTATION_MEMBER_PREFIX}{}", self.pod)
    }

    async fn annotate(&self, value: Option<String>) -> kube::Result<()> {
        let annotations = BTreeMap::from([(self.key(), value)]);
        let patch = Patch::Merge(json!({ "metadata": { "annotations": annotations } }));
        self.leases.patch_metadata(&self.name, &PatchParams::default(), &patch).await.map(drop)
    }
}

//! The Leases of slots: watched one by one, since a Role can only name single ones, and written by compare-and-swap.

use std::time::Duration;

use fairlead_cluster::caches;
use fairlead_egress::EgressName;
use fairlead_source_addresses::hold::{Outcome, Write};
use fairlead_source_addresses::leases::{SlotLease, lease_patch, slot_lease, source_lease};
use futures::stream::{BoxStream, select_all};
use futures::{StreamExt as _, stream};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher::Event;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};
use tokio::time::timeout;

/// Longest wait for an answer of the API server. A renewal counts for 1.8 s from its beginning.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The Leases of an Egress.
#[derive(Clone)]
pub(crate) struct Leases {
    api: Api<Lease>,
    egress: String,
}

/// A slot's Lease was read.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) slot: u32,
    /// `None` if there is none.
    pub(super) lease: Option<SlotLease>,
}

impl Leases {
    pub(crate) fn new(client: &Client, egress: &EgressName) -> Self {
        let api = Api::namespaced(client.clone(), &egress.namespace);
        Self { api, egress: egress.name.clone() }
    }

    /// Stream of the changes of the Leases of that many slots. It never ends while there are some, and nothing comes of none.
    pub(super) fn watch(&self, count: u32) -> BoxStream<'static, Watched> {
        let one = |slot: u32| {
            let name = source_lease(&self.egress, slot);
            let config = caches::config().fields(&format!("metadata.name={name}"));
            let events = watcher(self.api.clone(), config).default_backoff();
            let mut is_listed = false;
            let read = move |event: watcher::Result<Event<Lease>>| {
                let lease = match event {
                    Ok(Event::Init) => {
                        is_listed = false;
                        None
                    }
                    Ok(Event::InitApply(lease)) => {
                        is_listed = true;
                        Some(slot_lease(&lease))
                    }
                    Ok(Event::InitDone) => (!is_listed).then_some(None),
                    Ok(Event::Apply(lease)) => Some(slot_lease(&lease)),
                    Ok(Event::Delete(_)) => Some(None),
                    Err(error) => {
                        tracing::debug!(slot, %error, "cannot watch the Lease of a source address");
                        None
                    }
                };
                std::future::ready(lease.map(|lease| Watched { slot, lease }))
            };
            events.filter_map(read).boxed()
        };
        let all: Vec<_> = (0..count).map(one).collect();
        select_all(all).chain(stream::pending()).boxed()
    }

    /// Reads a slot's Lease: one that is as recent as etcd, since no version is asked for. `None` without an answer.
    pub(super) fn read(&self, slot: u32) -> impl Future<Output = Option<Watched>> + Send + 'static {
        let api = self.api.clone();
        let name = source_lease(&self.egress, slot);
        async move {
            let found = timeout(TIMEOUT, api.get_opt(&name)).await.ok()?.ok()?;
            Some(Watched { slot, lease: found.as_ref().and_then(slot_lease) })
        }
    }

    /// Tries a write.
    pub(super) fn write(&self, write: Write) -> impl Future<Output = (Write, Outcome)> + Send + 'static {
        let api = self.api.clone();
        let name = source_lease(&self.egress, write.slot);
        async move {
            let Some(patch) = lease_patch(&write, MicroTime(Timestamp::now())) else {
                return (write, Outcome::Refused);
            };
            let parameters = PatchParams::default();
            let patch = Patch::Merge(patch);
            let outcome = match timeout(TIMEOUT, api.patch(&name, &parameters, &patch)).await {
                Ok(Ok(lease)) => {
                    let version = lease.metadata.resource_version.and_then(|version| version.parse().ok());
                    // It was written; the watch will show it.
                    version.map_or(Outcome::Unknown, Outcome::Done)
                }
                Ok(Err(kube::Error::Api(status))) if is_refusal(status.code) => {
                    if status.code != 409 {
                        tracing::warn!(
                            lease = name,
                            error = status.message,
                            "the API server refuses a write of a Lease"
                        );
                    }
                    Outcome::Refused
                }
                Ok(Err(error)) => {
                    tracing::debug!(lease = name, %error, "cannot write a Lease");
                    Outcome::Unknown
                }
                Err(_) => Outcome::Unknown,
            };
            (write, outcome)
        }
    }
}

/// Whether a status says that nothing was written. Too many requests (429) are refused before anything is done.
fn is_refusal(code: u16) -> bool {
    (400..500).contains(&code)
}

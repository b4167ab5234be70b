//! State of the cluster that the watches have read, handed on to the tasks that follow it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use fairlead_dataplane::egress_gateway::SourceTable;
use fairlead_egress::options::Options;
use ipnet::IpNet;
use tokio::sync::watch;

use crate::condition::Conditions;
use crate::registry::store::Store;
use crate::source_addresses::holds::announced::{Announcer, sources};
use crate::watches::Watches;

/// The addresses of each slot, as the status of the Egress says; `None` without `spec.sourceAddresses`.
pub(crate) type SlotAddresses = Option<Arc<Vec<Vec<IpAddr>>>>;

/// State of the cluster, in channels.
#[derive(Clone)]
pub(crate) struct Cluster {
    /// Prefixes, and whether clients may send to them.
    pub(crate) destinations: watch::Receiver<Arc<BTreeMap<IpNet, bool>>>,
    pub(crate) options: watch::Receiver<Arc<Options>>,
    pub(crate) slots: watch::Receiver<SlotAddresses>,
    /// Whether the watches have said everything once.
    pub(crate) is_known: watch::Receiver<bool>,
}

/// Says it.
#[derive(Default)]
pub(crate) struct Follower {
    destinations: watch::Sender<Arc<BTreeMap<IpNet, bool>>>,
    options: watch::Sender<Arc<Options>>,
    slots: watch::Sender<SlotAddresses>,
    is_known: watch::Sender<bool>,
}

impl Follower {
    pub(crate) fn cluster(&self) -> Cluster {
        Cluster {
            destinations: self.destinations.subscribe(),
            options: self.options.subscribe(),
            slots: self.slots.subscribe(),
            is_known: self.is_known.subscribe(),
        }
    }

    /// Never ends. Where the watches say nothing of use, what was said last counts.
    pub(crate) async fn run(
        self,
        watches: Arc<Watches>,
        store: Arc<Store>,
        conditions: Arc<Conditions>,
        announcer: Arc<Announcer>,
        table: SourceTable,
    ) {
        let mut seen = 0;
        let mut last = None;
        let mut invalid = Vec::new();
        loop {
            match watches.read() {
                Ok(cluster) => {
                    last = None;
                    if cluster.invalid != invalid {
                        cluster
                            .invalid
                            .iter()
                            .for_each(|error| tracing::warn!(%error, "a target is not probed"));
                        invalid = cluster.invalid;
                    }
                    tell(&self.options, Arc::new(cluster.options));
                    if let (Some(slots), false) = (&cluster.slots, *self.is_known.borrow()) {
                        // The data path begins with what an earlier process held.
                        let held = table.held();
                        conditions.set_standby(held.is_empty());
                        announcer.set_sources(Some(sources(slots, &held, &BTreeMap::new())));
                    }
                    tell(&self.slots, cluster.slots.map(Arc::new));
                    tell(&self.destinations, Arc::new(cluster.destinations));
                    store.update(|registry| registry.set_facts(cluster.facts));
                    self.is_known.send_replace(true);
                }
                Err(reason) => {
                    if last.as_ref() != Some(&reason) {
                        tracing::info!(reason, "the cluster is not known; what was known last counts");
                    }
                    last = Some(reason);
                }
            }
            watches.changed(&mut seen).await;
        }
    }
}

fn tell<T: PartialEq>(sender: &watch::Sender<T>, value: T) {
    sender.send_if_modified(|known| {
        let is_new = *known != value;
        *known = value;
        is_new
    });
}

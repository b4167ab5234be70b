//! Announces the source addresses that gateways on this node hold.
//!
//! * [`facts`]: what the API server says: which addresses an Egress may have, which gateways hold them, and where these run. Pure.
//! * [`pace`]: how often an Egress may change who holds its addresses. Pure.
//! * [`plan`]: which addresses are announced, and why others are not. Pure.
//! * [`schedule`]: when hosts beside this node are told. Pure.
//! * [`run`]: hears holds from the gateways on this node ([`super::registrar`]), and brings routes and entries to the kernel
//!   ([`fairlead_dataplane::source_addresses`]).
//!
//! [`SourceAddresses`] is what other subsystems see of it: the mesh claims what is announced, the network of the pods does not masquerade
//! it, and mesh and router learn which nodes may have such an address.

mod facts;
pub(crate) mod metrics;
mod pace;
mod plan;
mod run;
mod schedule;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use fairlead_cluster::caches::Cache;
use fairlead_cluster::pods::SlimPod;
use fairlead_cluster::subsystem::Subsystem;
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_topology::SourceNodes;
use tokio::sync::watch;

use self::metrics::AnnounceMetrics;
use super::objects::CachedEgress;
use super::registrar::Registrar;
use super::registrar::endpoints::CachedSlice;

/// Which nodes may have each source address of the cluster.
pub(crate) type Nodes = BTreeMap<IpAddr, SourceNodes>;

/// What is known of source addresses; cheap to clone.
#[derive(Clone)]
pub struct SourceAddresses {
    announced: watch::Sender<BTreeSet<IpAddr>>,
    nodes: watch::Sender<Option<Arc<Nodes>>>,
    report: Arc<Mutex<Report>>,
}

/// Source addresses that are announced, and those that are not, for the status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// What is announced.
    pub announced: Vec<Shown>,
    /// Why other addresses are not, one sentence each, with its reason in front.
    pub problems: Vec<String>,
}

/// An address that is announced, for status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// The address.
    pub address: IpAddr,
    /// Namespace and name of the Egress.
    pub egress: String,
    /// Name of the gateway pod that holds it.
    pub gateway: String,
    /// Term of the hold.
    pub term: u64,
    /// Links by which hosts beside this node find it.
    pub links: Vec<String>,
}

impl Default for SourceAddresses {
    fn default() -> Self {
        let (announced, nodes) = (watch::Sender::new(BTreeSet::new()), watch::Sender::new(None));
        Self { announced, nodes, report: Arc::default() }
    }
}

impl SourceAddresses {
    /// Takes what the kernel has from before the start.
    pub fn adopt(&self, addresses: BTreeSet<IpAddr>) {
        self.set_announced(addresses);
    }

    /// The addresses that this node announces.
    pub fn announced(&self) -> watch::Receiver<BTreeSet<IpAddr>> {
        self.announced.subscribe()
    }

    /// Which nodes may have which address; `None` until the API server has said it.
    pub fn nodes(&self) -> watch::Receiver<Option<Arc<Nodes>>> {
        self.nodes.subscribe()
    }

    /// What is announced, and what is not.
    pub fn report(&self) -> Report {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_announced(&self, addresses: BTreeSet<IpAddr>) {
        self.announced.send_if_modified(|known| {
            let differs = *known != addresses;
            *known = addresses;
            differs
        });
    }

    fn set_nodes(&self, nodes: Nodes) {
        self.nodes.send_if_modified(|known| {
            let differs = known.as_deref() != Some(&nodes);
            if differs {
                *known = Some(Arc::new(nodes));
            }
            differs
        });
    }

    fn set_report(&self, report: Report) {
        let mut known = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        if known.problems != report.problems {
            tracing::warn!(problems = ?report.problems, "source addresses of egress gateways have other problems than before");
        }
        *known = report;
    }
}

/// What announcing needs.
pub(crate) struct AnnounceDeps {
    pub(crate) registrar: Registrar,
    pub(crate) egresses: Arc<Cache<CachedEgress>>,
    /// The gateways of all Egresses.
    pub(crate) slices: Arc<Cache<CachedSlice>>,
    /// The pods of this node.
    pub(crate) pods: Arc<Cache<SlimPod>>,
    pub(crate) sources: SourceAddresses,
    pub(crate) ids: RoutingIds,
    pub(crate) metrics: AnnounceMetrics,
    /// Names of the mesh's devices, which are no uplinks.
    pub(crate) mesh_devices: Box<dyn Fn() -> Vec<String> + Send + Sync>,
}

/// Starts to announce.
pub(crate) fn start(deps: AnnounceDeps, subsystem: &mut Subsystem) {
    subsystem.spawn("source addresses", run::run(deps));
}

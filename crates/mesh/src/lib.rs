//! The mesh: tunnels to all members, and what leads packets into them.
//!
//! Data goes one way. [`inputs`] reads the cluster's objects: members by way of [`fairlead_members`], settings, this Node.
//! [`desired`] plans with [`fairlead_topology`] and lists the endpoints of each peer; it is pure. [`reconciler`] brings the
//! kernel there, by `fairlead-dataplane` and, where the kernel has no WireGuard, `fairlead-tunnel`. [`path_port`] drives
//! [`fairlead_path`] and chooses endpoints; a timer of a path reads neither the cluster's objects nor links, routes or nftables.
//! [`relay`], [`fairlead_port_mapping`] and others ask servers beside all of this, and are read as inputs.
//!
//! Results go to this node's own WireKubePeer ([`publish`]), to metrics, and by [`MeshView`] to the status. What must outlive the
//! API server stands in the state directory: keys ([`identity`]), and what was last known of the cluster.
//!
//! It does not know pods or egress gateways: prefixes of this node's pods are those of its AddressBlocks, and source addresses
//! of gateways are handed to it.

mod deps;
pub mod desired;
pub mod down_peers;
pub mod encapsulation;
pub mod entries;
pub mod external;
pub mod gateways;
mod granted;
mod granularity;
pub mod identity;
pub mod inputs;
pub mod kernel;
mod key_changes;
mod key_rotation;
pub mod keys;
mod local_node;
pub mod metrics;
pub mod nat64;
mod observers;
pub mod path_port;
mod paths;
pub mod problem;
pub mod publish;
mod publisher;
pub mod reconciler;
pub mod relay;
pub mod relay_reason;
pub mod report;
mod reports;
mod run;
mod start;
#[cfg(test)]
mod tests;
pub mod write_budget;

use std::sync::Arc;
use std::time::Instant;

use fairlead_members::provenance::{DiscoveryStatus, Heard, Provenance};
use tokio::sync::{oneshot, watch};

pub use self::deps::{MeshCaches, MeshDeps, MeshNode, MeshOutputs, SourceWatches};
use self::keys::KeyStore;
use self::path_port::PathPort;
use self::problem::MeshFailure;
pub use self::publisher::pause_after_write;
use self::reconciler::DeviceSlot;
use self::reports::Reports;
pub use self::reports::Snapshot;
pub use self::start::start;

/// The mesh of this node, for the program that runs it.
pub struct MeshHandle {
    view: MeshView,
    device: oneshot::Receiver<DeviceSlot>,
}

impl MeshHandle {
    /// The handle of a node that stays outside of the mesh.
    pub fn outside(failure: MeshFailure) -> Self {
        let reports = Reports::new("", None, false);
        reports.fail(failure);
        let (_, device) = oneshot::channel();
        let (_, discovery) = watch::channel(DiscoveryStatus::default());
        let reports = Arc::new(reports);
        Self { view: MeshView { keys: None, reports, paths: None, discovery, provenance: None }, device }
    }

    /// What other subsystems may know of the mesh.
    pub fn view(&self) -> MeshView {
        self.view.clone()
    }

    /// The device, once the subsystem was stopped.
    pub async fn into_device(self) -> Option<DeviceSlot> {
        self.device.await.ok()
    }
}

/// What other subsystems may know of the mesh.
#[derive(Clone)]
pub struct MeshView {
    keys: Option<Arc<KeyStore>>,
    reports: Arc<Reports>,
    paths: Option<Arc<PathPort>>,
    discovery: watch::Receiver<DiscoveryStatus>,
    provenance: Option<Provenance>,
}

impl MeshView {
    /// When the sources of members last told of them.
    pub fn heard(&self, saved: Option<Instant>) -> Heard {
        self.provenance.as_ref().map(|provenance| provenance.heard(saved)).unwrap_or_default()
    }

    /// How the discovery services of the mesh do.
    pub fn discovery(&self) -> DiscoveryStatus {
        self.discovery.borrow().clone()
    }

    /// This node's keys; `None` when its key file is unusable.
    pub fn keys(&self) -> Option<&Arc<KeyStore>> {
        self.keys.as_ref()
    }

    /// The paths to the peers; `None` on a node that stays outside of the mesh.
    pub fn paths(&self) -> Option<&Arc<PathPort>> {
        self.paths.as_ref()
    }

    /// The mesh as of the last step.
    pub fn snapshot(&self) -> Snapshot {
        self.reports.snapshot()
    }

    /// MTU of the device; `None` before there is one.
    pub fn mtu(&self) -> Option<u32> {
        self.snapshot().report.map(|report| report.device.mtu)
    }

    /// Why pods do not reach other nodes through the mesh. A cluster without a mesh has no problem with it.
    pub fn problem(&self) -> Option<MeshFailure> {
        self.snapshot().failure.filter(|failure| *failure != MeshFailure::NoMesh)
    }
}

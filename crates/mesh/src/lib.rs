//! The mesh: tunnels to all members, and what leads packets into them.
//!
//! Data goes one way, through layers of which each uses only those before it. [`model`] has the types. [`gather`] reads the
//! cluster's objects: members by way of [`fairlead_members`], settings, this Node, its keys. [`plan`] decides with
//! [`fairlead_topology`] and lists the endpoints of each peer; it is pure. [`apply`] brings the kernel there, by
//! `fairlead-dataplane` and, where the kernel has no WireGuard, `fairlead-tunnel`; [`apply::path_port`] drives
//! [`fairlead_path`] and chooses endpoints: a timer of a path reads neither the cluster's objects nor links, routes or nftables.
//! [`apply::relay`], [`fairlead_port_mapping`] and others ask servers beside all of this, and are read as inputs.
//!
//! [`tell`] has the results: this node's own WireKubePeer, metrics, and by [`MeshView`] the status. What must outlive the
//! API server stands in the state directory: keys ([`gather::identity`]), and what was last known of the cluster.
//!
//! It does not know pods or egress gateways: prefixes of this node's pods are those of its AddressBlocks, and source addresses
//! of gateways are handed to it.

pub mod apply;
mod deps;
pub mod gather;
pub mod model;
pub mod plan;
mod run;
mod start;
pub mod tell;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Instant;

use fairlead_members::provenance::{DiscoveryStatus, Heard, Provenance};
use tokio::sync::{oneshot, watch};

use self::apply::path_port::PathPort;
use self::apply::reconciler::DeviceSlot;
pub use self::deps::{MeshCaches, MeshDeps, MeshNode, MeshOutputs, SourceWatches};
use self::gather::keys::KeyStore;
use self::model::problem::MeshFailure;
pub use self::start::start;
pub use self::tell::publisher::pause_after_write;
use self::tell::reports::Reports;
pub use self::tell::reports::Snapshot;

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

    /// View of the mesh for other subsystems.
    pub fn view(&self) -> MeshView {
        self.view.clone()
    }

    /// The device, once the subsystem was stopped.
    pub async fn into_device(self) -> Option<DeviceSlot> {
        self.device.await.ok()
    }
}

/// State of the mesh for other subsystems.
#[derive(Clone)]
pub struct MeshView {
    keys: Option<Arc<KeyStore>>,
    reports: Arc<Reports>,
    paths: Option<Arc<PathPort>>,
    discovery: watch::Receiver<DiscoveryStatus>,
    provenance: Option<Provenance>,
}

impl MeshView {
    /// Times at which the sources of members last told of them.
    pub fn heard(&self, saved: Option<Instant>) -> Heard {
        self.provenance.as_ref().map(|provenance| provenance.heard(saved)).unwrap_or_default()
    }

    /// State of the discovery services of the mesh.
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

    /// Reason why pods do not reach other nodes through the mesh. A cluster without a mesh has no problem with it.
    pub fn problem(&self) -> Option<MeshFailure> {
        self.snapshot().failure.filter(|failure| *failure != MeshFailure::NoMesh)
    }
}

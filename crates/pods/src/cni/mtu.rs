//! The MTU of pods' links.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::names::MESH_MTU;
use fairlead_api::resources::WireKubeMesh;
use fairlead_cluster::caches::Cache;
use fairlead_dataplane::uplink::{self, HostNetwork, Ignored};

use super::mesh::MeshStatus;
use crate::ttl_cell::TtlCell;

/// Time for which the uplink's MTU is cached. Reading it reads every link of the node, and a hundred pods that start together must
/// not do it a hundred times.
const UPLINK_TTL: Duration = Duration::from_secs(1);

/// The mesh's MTU, so that nothing has to be fragmented; the uplink's where there is no mesh.
#[derive(Clone)]
pub(super) struct PodMtu(Arc<Sources>);

struct Sources {
    mesh: Arc<dyn MeshStatus>,
    meshes: Arc<Cache<WireKubeMesh>>,
    uplink: TtlCell<u32, fn() -> Option<u32>>,
}

impl PodMtu {
    pub(super) fn new(mesh: Arc<dyn MeshStatus>, meshes: Arc<Cache<WireKubeMesh>>) -> Self {
        Self(Arc::new(Sources { mesh, meshes, uplink: TtlCell::new(UPLINK_TTL, uplink_mtu) }))
    }

    /// The MTU at this moment; `None` when the uplink cannot be read. For threads that may block.
    pub(super) fn value(&self) -> Option<u32> {
        let Sources { mesh, meshes, uplink } = self.0.as_ref();
        if let Some(mtu) = mesh.mtu() {
            return Some(mtu);
        }
        let uplink = uplink.value(Instant::now())?;
        let selected = WireKubeMesh::selected(&meshes.store.state()).cloned();
        if selected.is_none() && meshes.has_answer() {
            return Some(uplink);
        }
        let configured = selected.map_or(MESH_MTU, |selected| u32::from(selected.spec.mtu));
        Some(uplink::mesh_mtu(configured, uplink))
    }
}

fn uplink_mtu() -> Option<u32> {
    HostNetwork::read().ok().and_then(|network| network.uplink_mtu(&Ignored::default()))
}

//! Which mesh resource counts.

use std::sync::Arc;

use fairlead_api::resources::WireKubeMesh;
use fairlead_cluster::caches::Cache;

/// The WireKubeMesh that nodes follow.
pub(crate) fn selected(meshes: &Cache<WireKubeMesh>) -> Option<Arc<WireKubeMesh>> {
    WireKubeMesh::selected(&meshes.store.state()).cloned()
}

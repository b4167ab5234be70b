//! Mesh, as far as the CNI service asks for it.

/// Status of the mesh, for the CNI service.
pub trait MeshStatus: Send + Sync {
    /// MTU of the mesh's device; `None` without one.
    fn mtu(&self) -> Option<u32>;

    /// Reason why pods of this node may not reach other nodes; `None` if nothing is wrong, or no mesh is wanted.
    fn problem(&self) -> Option<String>;
}

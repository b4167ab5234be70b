//! CNI service: its dependencies, and the handle that leads to it.

use std::sync::Arc;

use fairlead_api::resources::{AddressPool, WireKubeMesh};
use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::EventPublisher;
use fairlead_cluster::pods::SlimPod;
use fairlead_ipam::Key;
use fairlead_members::cached_block::CachedBlock;
use k8s_openapi::api::core::v1::Namespace;
use kube::Client;
use kube::api::PartialObjectMeta;

use super::attach::Stages;
use super::failure::Failure;
use super::mesh::MeshStatus;
use super::metrics::CniMetrics;
use super::records::Records;
use crate::container_locks::ContainerLocks;
use crate::ipam::Ipam;
use crate::ipam::metrics::IpamMetrics;

/// Dependencies of the CNI service.
pub struct CniDeps {
    /// Whether this program allocates addresses and makes interfaces; otherwise another plugin does both before.
    pub enable_ipam: bool,
    /// Addresses of this node.
    pub ipam: Arc<Ipam>,
    /// Metadata of all namespaces.
    pub namespaces: Arc<Cache<PartialObjectMeta<Namespace>>>,
    /// The pods of this node.
    pub pods: Arc<Cache<SlimPod>>,
    /// All pools.
    pub pools: Arc<Cache<AddressPool>>,
    /// All blocks of all nodes.
    pub blocks: Arc<Cache<CachedBlock>>,
    /// All meshes; there should be one.
    pub meshes: Arc<Cache<WireKubeMesh>>,
    /// Client of the API server, for objects that the caches do not have yet.
    pub client: Client,
    /// Serializes the operations of each container.
    pub locks: Arc<ContainerLocks>,
    /// The mesh.
    pub mesh: Arc<dyn MeshStatus>,
    /// Whether links on the host have the names that Calico's policy program expects.
    pub calico_names: bool,
    /// Files beside the socket.
    pub records: Records,
    /// Publishes why a pod gets no address.
    pub events: EventPublisher,
    /// Counters and times of operations.
    pub metrics: CniMetrics,
    /// Times of waiting for a block.
    pub addresses: IpamMetrics,
}

/// The service that [`CniHandle`] leads to.
pub(super) struct Service {
    pub(super) deps: CniDeps,
    pub(super) stages: Stages,
    /// One GC at a time.
    pub(super) collecting: tokio::sync::Mutex<()>,
}

/// Serves the CNI operations: the gRPC services `Cni` and `Network`.
#[derive(Clone)]
pub struct CniHandle(pub(super) Arc<Service>);

impl Service {
    /// Detaches an interface of a container; the caller holds the container's lock.
    pub(super) async fn detach(&self, key: &Key) -> Result<(), Failure> {
        self.stages.detach(key).await
    }
}

impl CniHandle {
    /// Detaches an interface of a container; the caller holds the container's lock.
    ///
    /// # Errors
    /// The kernel refused.
    pub async fn detach(&self, key: &Key) -> Result<(), Failure> {
        self.0.detach(key).await
    }
}

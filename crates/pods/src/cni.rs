//! The CNI service: ADD, DEL, CHECK, GC and STATUS for the plugin.
//!
//! [`operations`] takes a request from the socket and locks its container; [`attach`] runs it through the stages of an
//! attachment, which call node IPAM, the kernel and the records beside the socket; [`failure`] turns what failed into the
//! error of the CNI specification.

mod args;
mod attach;
mod calico;
mod check;
mod failure;
pub mod gc;
mod grpc_metrics;
pub mod metrics;
mod mtu;
mod operations;
pub mod records;
mod status;

use std::sync::Arc;

use fairlead_api::resources::{AddressPool, WireKubeMesh};
use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::EventPublisher;
use fairlead_cluster::pods::SlimPod;
use fairlead_cluster::subsystem::Supervisor;
use fairlead_ipam::Key;
use fairlead_members::cached_block::CachedBlock;
use k8s_openapi::api::core::v1::Namespace;
use kube::Client;
use kube::api::PartialObjectMeta;

pub use self::args::{Attachment, attachment};
use self::attach::address::AddressStage;
use self::attach::chained::ChainedStage;
use self::attach::link::LinkStage;
use self::attach::record::RecordStage;
use self::attach::result::ResultStage;
pub use self::attach::{AttachContext, CheckContext, EgressRequest, EgressStages, Stage, warn_at_pod};
use self::attach::{DetachOnly, Stages};
pub use self::check::Previous;
pub use self::failure::{Failure, Reason, blocking};
use self::metrics::CniMetrics;
use self::mtu::PodMtu;
use self::records::Records;
use crate::container_locks::ContainerLocks;
use crate::ipam::Ipam;
use crate::ipam::metrics::IpamMetrics;

/// What the CNI service asks of the mesh.
pub trait MeshStatus: Send + Sync {
    /// MTU of the mesh's device; `None` without one.
    fn mtu(&self) -> Option<u32>;

    /// Why pods of this node may not reach other nodes; `None` if nothing is wrong, or no mesh is wanted.
    fn problem(&self) -> Option<String>;
}

/// What the CNI service needs.
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
    /// For what the caches do not have yet.
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
struct Service {
    deps: CniDeps,
    stages: Stages,
    /// One GC at a time.
    collecting: tokio::sync::Mutex<()>,
}

/// Serves the CNI operations: the gRPC services `Cni` and `Network`.
#[derive(Clone)]
pub struct CniHandle(Arc<Service>);

/// Starts the service and the task that finishes pending DELs.
pub fn start(deps: CniDeps, egress: EgressStages, supervisor: &mut Supervisor) -> CniHandle {
    let address = AddressStage {
        ipam: Arc::clone(&deps.ipam),
        namespaces: Arc::clone(&deps.namespaces),
        client: deps.client.clone(),
        events: deps.events.clone(),
        metrics: deps.addresses.clone(),
    };
    let record = RecordStage { records: deps.records.clone(), networks: deps.enable_ipam };
    let link = LinkStage {
        ids: deps.ipam.numbers(),
        mtu: PodMtu::new(Arc::clone(&deps.mesh), Arc::clone(&deps.meshes)),
        calico_names: deps.calico_names,
    };
    let stages = Stages(match deps.enable_ipam {
        true => vec![
            egress.request,
            Box::new(address),
            Box::new(record),
            Box::new(link),
            egress.tunnels,
            Box::new(ResultStage),
        ],
        // There usually is nothing to detach; what an earlier run with other settings made still goes.
        false => vec![
            egress.request,
            Box::new(DetachOnly(Box::new(address))),
            Box::new(record),
            Box::new(DetachOnly(Box::new(link))),
            Box::new(ChainedStage),
            egress.tunnels,
        ],
    });
    let service = Arc::new(Service { deps, stages, collecting: tokio::sync::Mutex::default() });
    supervisor.subsystem("cni").spawn("pending DELs", gc::finish_pending_later(Arc::clone(&service)));
    CniHandle(service)
}

impl Service {
    /// Detaches an interface of a container; the caller holds the container's lock.
    async fn detach(&self, key: &Key) -> Result<(), Failure> {
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

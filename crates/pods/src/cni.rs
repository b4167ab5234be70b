//! The CNI service: ADD, DEL, CHECK, GC and STATUS for the plugin.
//!
//! [`operations`] takes a request from the socket and locks its container; [`attach`] runs it through the stages of an
//! attachment, which call node IPAM, the kernel and the records beside the socket; [`failure`] turns what failed into the
//! error of the CNI specification.

mod attach;
mod attachment;
mod calico;
mod check;
mod failure;
pub mod gc;
mod grpc_metrics;
mod mesh;
pub mod metrics;
mod mtu;
mod operations;
pub mod records;
mod service;
mod status;

use std::sync::Arc;

use fairlead_cluster::subsystem::Supervisor;

use self::attach::Stages;
use self::attach::address::AddressStage;
use self::attach::link::LinkStage;
use self::attach::namespace_pools::NamespacePools;
use self::attach::record::RecordStage;
pub use self::attach::{
    EgressRequest, EgressStages, FindEgress, PodInterface, SetUpEgress, Stage, warn_at_pod,
};
pub use self::attachment::Attachment;
pub use self::failure::{Failure, Reason, blocking};
pub use self::mesh::MeshStatus;
pub(crate) use self::mesh::is_starting;
use self::mtu::PodMtu;
use self::service::Service;
pub use self::service::{CniDeps, CniHandle};

/// Starts the service and the task that finishes pending DELs.
pub fn start(deps: CniDeps, egress: EgressStages, supervisor: &mut Supervisor) -> CniHandle {
    let address = AddressStage {
        ipam: Arc::clone(&deps.ipam),
        namespaces: Arc::clone(&deps.namespaces),
        pools: NamespacePools::load(deps.records.namespace_pools()),
        client: deps.client.clone(),
        events: deps.events.clone(),
        metrics: deps.addresses.clone(),
    };
    let record = RecordStage { records: deps.records.clone() };
    let link = LinkStage {
        ids: deps.ipam.numbers(),
        mtu: PodMtu::new(Arc::clone(&deps.mesh), Arc::clone(&deps.meshes)),
        calico_names: deps.calico_names,
    };
    let stages = Stages {
        request: egress.request,
        address: Box::new(address),
        record: Box::new(record),
        link: Box::new(link),
        tunnels: egress.tunnels,
        behind_plugin: !deps.enable_ipam,
    };
    let service = Arc::new(Service { deps, stages, collecting: tokio::sync::Mutex::default() });
    supervisor.subsystem("cni").spawn("pending DELs", gc::finish_pending_later(Arc::clone(&service)));
    CniHandle(service)
}

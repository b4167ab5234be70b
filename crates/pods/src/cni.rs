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
mod mesh;
pub mod metrics;
mod mtu;
mod operations;
pub mod records;
mod service;
mod status;

use std::sync::Arc;

use fairlead_cluster::subsystem::Supervisor;

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
pub use self::mesh::MeshStatus;
use self::mtu::PodMtu;
use self::service::Service;
pub use self::service::{CniDeps, CniHandle};

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

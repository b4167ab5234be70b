//! Egress NAT of a node: its pods that use egress gateways, and the source addresses of gateways that run on it.
//!
//! * [`objects`] and [`inputs`]: what is watched: Egresses, and once there is a client pod their Services.
//! * [`intent`]: attachments as [`fairlead_egress::client`] decides by them; [`fairlead_egress::problem`] says why a pod does not get what it
//!   asks for.
//! * [`pod_egress`]: what all that follows shares. [`gateways`] is what it asks of the registrar.
//! * [`kernel`] and [`programs`]: bring a network namespace to it, with BPF programs that are loaded before a pod needs them.
//! * [`sandboxes`]: where the namespaces are. [`reconciler`]: keeps running pods current, and repairs what others change.
//! * [`stages`] and [`attach`]: ADD, DEL and CHECK, as stages of an attachment of `fairlead-pods`.
//! * [`registrar`]: registers pods at gateways, and says which gateways can be reached.
//! * [`source_addresses`]: announces the source addresses that gateways on this node hold.
//!
//! Objects come from watches, pods from the stages and from files beside the socket, holds from the streams of gateways. Tunnels,
//! rules and routes go to the kernel by `fairlead-fou` and `fairlead-dataplane`. Gateways are `fairlead-egress-gateway`, and the
//! controller makes them.
//!
//! A pod that asks for gateways never sends to their destinations by `eth0`: it does not start without them, and later, whatever
//! fails, routes refuse its packets.

mod annotations;
mod attach;
mod gateways;
mod inputs;
mod intent;
mod kernel;
mod metrics;
mod objects;
mod pod_egress;
mod problems;
mod programs;
mod reconciler;
mod registrar;
mod sandboxes;
mod source_addresses;
mod stages;
mod switches;
#[cfg(test)]
mod tests;
mod without_egress;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::EventPublisher;
use fairlead_cluster::pods::SlimPod;
use fairlead_cluster::subsystem::Subsystem;
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_pods::container_locks::ContainerLocks;
use fairlead_pods::ipam::Ipam;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::PartialObjectMeta;
use prometheus_client::registry::Registry;

use inputs::Inputs;
use metrics::EgressMetrics;
use pod_egress::{EgressDeps, PodEgress};
pub use problems::EgressProblems;
use programs::{ProgramStock, loading};
use registrar::metrics::RegistrarMetrics;
use registrar::{Registrar, RegistrarDeps, slices};
use sandboxes::Sandboxes;
use source_addresses::AnnounceDeps;
use source_addresses::metrics::AnnounceMetrics;
pub use source_addresses::{Report, Shown, SourceAddresses};
pub use switches::EgressSwitches;

/// Parses the content of a file in `<socket>.d/sandboxes`, and returns it as it is written; `None` if it is invalid. For fuzz targets and
/// recorded files; the program parses what an earlier one has left there in the same way.
pub fn parse_sandbox(content: &[u8]) -> Option<Vec<u8>> {
    serde_json::to_vec(&sandboxes::parse(content).ok()?).ok()
}

/// Metrics of egress.
#[derive(Debug, Clone)]
pub struct Metrics {
    registrations: RegistrarMetrics,
    pods: EgressMetrics,
    sources: AnnounceMetrics,
}

impl Metrics {
    /// Handles of the metrics, which the registry exposes from now on.
    pub fn register(all: &mut Registry) -> Self {
        Self {
            registrations: RegistrarMetrics::register(all),
            pods: EgressMetrics::register(all),
            sources: AnnounceMetrics::register(all),
        }
    }
}

/// Dependencies of [`start`].
pub struct Deps {
    /// Client of the API server.
    pub client: kube::Client,
    /// Name of this node's Node object.
    pub node: String,
    /// Numbers of the tables and rules in the kernel.
    pub ids: RoutingIds,
    /// Flags of the node program.
    pub switches: EgressSwitches,
    /// The node program's socket, beside which files say what pods ask for.
    pub socket: PathBuf,
    /// Metadata of all namespaces.
    pub namespaces: Arc<Cache<PartialObjectMeta<Namespace>>>,
    /// The pods of this node.
    pub pods: Arc<Cache<SlimPod>>,
    /// The containers of pods that are looked for.
    pub ipam: Arc<Ipam>,
    /// Locks of containers: one with a CNI operation under way is left to that operation.
    pub locks: Arc<ContainerLocks>,
    /// Names of the mesh's devices, which are no uplinks.
    pub mesh_devices: Box<dyn Fn() -> Vec<String> + Send + Sync>,
    /// Events at pods.
    pub events: EventPublisher,
    /// Counters and gauges.
    pub metrics: Metrics,
    /// Problems of pods, for the status.
    pub problems: EgressProblems,
    /// Source addresses of gateways on this node, for the mesh, the router and the status.
    pub sources: SourceAddresses,
}

/// Egress of this node, which registers its pods, keeps running ones current and announces source addresses from now on.
pub fn start(deps: Deps, subsystem: &mut Subsystem) -> Egress {
    let egresses = Arc::new(objects::watch_egresses(&deps.client, subsystem));
    let slices = Arc::new(slices::watch(&deps.client, subsystem));
    let registrar = RegistrarDeps {
        client: deps.client.clone(),
        node: deps.node,
        egresses: Arc::clone(&egresses),
        slices: Arc::clone(&slices),
        metrics: deps.metrics.registrations,
    };
    let registrar = Registrar::start(registrar, subsystem);
    let sources = AnnounceDeps {
        registrar: registrar.clone(),
        egresses: Arc::clone(&egresses),
        slices,
        pods: Arc::clone(&deps.pods),
        sources: deps.sources,
        ids: deps.ids,
        metrics: deps.metrics.sources,
        mesh_devices: deps.mesh_devices,
    };
    source_addresses::start(sources, subsystem);
    let of_pods = EgressDeps {
        inputs: Inputs::start(subsystem, &deps.client, egresses, deps.namespaces, deps.switches),
        gateways: Arc::new(registrar),
        pods: deps.pods,
        ipam: deps.ipam,
        locks: deps.locks,
        events: deps.events,
        metrics: deps.metrics.pods,
        problems: deps.problems,
    };
    Egress::start(of_pods, &deps.socket, subsystem)
}

/// Egress of this node: for the CNI service, cheap to clone.
#[derive(Clone)]
pub struct Egress(Arc<PodEgress>);

impl Egress {
    /// Starts to keep running pods current. `socket` is the node program's.
    pub(crate) fn start(deps: EgressDeps, socket: &Path, subsystem: &mut Subsystem) -> Self {
        let (sandboxes, used) = Sandboxes::load(socket);
        if deps.inputs.is_enabled() {
            deps.gateways.expect_clients(used);
        }
        let egress = Self(Arc::new(PodEgress { deps, sandboxes, programs: ProgramStock::default() }));
        subsystem.spawn("egress of pods", reconciler::run(Arc::clone(&egress.0)));
        subsystem.spawn("tunnel programs", loading::run(Arc::clone(&egress.0)));
        egress
    }
}

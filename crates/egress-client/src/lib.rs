//! Egress NAT of a node: its pods that use egress gateways, and the source addresses of gateways that run on it.
//!
//! * [`objects`] and [`inputs`]: what is watched: Egresses, and once there is a client pod their Services.
//! * [`selection`], [`intent`], [`plan`]: what a pod should have. Pure; [`fairlead_egress::problem`] says why it does not get it.
//! * [`kernel`] and [`programs`]: bring a network namespace to it, with BPF programs that are loaded before a pod needs them.
//! * [`sandboxes`]: where the namespaces are. [`reconciler`]: keeps running pods current, and repairs what others change.
//! * [`stages`] and [`attach`]: ADD, DEL and CHECK, as stages of an attachment of `fairlead-pods`.
//! * [`registrar`]: registers pods at gateways, and says which gateways can be reached.
//! * [`announce`]: announces the source addresses that gateways on this node hold.
//! * [`explain`]: which way the packets of a pod take, for the command line.
//!
//! Objects come from watches, pods from the stages and from files beside the socket, holds from the streams of gateways. Tunnels,
//! rules and routes go to the kernel by `fairlead-fou` and `fairlead-dataplane`. Gateways are `fairlead-egress-gateway`, and the
//! controller makes them.
//!
//! A pod that asks for gateways never sends to their destinations by `eth0`: it does not start without them, and later, whatever
//! fails, routes refuse its packets.

mod announce;
mod attach;
pub mod explain;
mod inputs;
mod intent;
mod kernel;
mod metrics;
mod objects;
mod plan;
mod programs;
mod reconciler;
mod registrar;
mod routing;
mod sandboxes;
mod selection;
mod stages;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fairlead_api::names::ANNOTATION_EGRESS_PREFIX;
use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::{EventPublisher, PendingEvent, pod_reference};
use fairlead_cluster::pods::SlimPod;
use fairlead_cluster::subsystem::Subsystem;
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_egress::EgressName;
use fairlead_ipam::Key;
use fairlead_pods::container_locks::ContainerLocks;
use fairlead_pods::ipam::Ipam;
use fairlead_wire::egress::RegisterResponse;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::PartialObjectMeta;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use announce::AnnounceDeps;
use announce::metrics::AnnounceMetrics;
pub use announce::{Report, Shown, SourceAddresses};
use attach::Attached;
use inputs::Inputs;
use intent::Knowledge;
use metrics::EgressMetrics;
pub use objects::SlimService;
use plan::Cluster;
use programs::ProgramStock;
use registrar::metrics::RegistrarMetrics;
use registrar::{Client, Registrar, RegistrarDeps, Way, endpoints};
use sandboxes::{Sandbox, Sandboxes};

/// Flags of the node program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EgressSwitches {
    /// Egress gateways are set up for pods (`--enable-egress`). Otherwise a pod that asks for them does not start.
    pub enabled: bool,
    /// Of Egresses without `spec.originatingOnly` (`--enable-originating-only`).
    pub originating_only: bool,
}

impl Default for EgressSwitches {
    fn default() -> Self {
        Self { enabled: true, originating_only: false }
    }
}

/// Parses the content of a file in `<socket>.d/sandboxes`, and returns it as it is written; `None` if it is invalid. For fuzz targets and
/// recorded files; the program parses what an earlier one has left there in the same way.
pub fn parse_sandbox(content: &[u8]) -> Option<Vec<u8>> {
    serde_json::to_vec(&sandboxes::parse(content).ok()?).ok()
}

/// The source addresses that a gateway says it holds, with how long they count without being said again; `None` if they are invalid. For fuzz
/// targets and recorded answers; the program parses the answers of gateways in the same way.
pub fn parse_holds(answer: &RegisterResponse) -> Option<BTreeMap<IpAddr, Duration>> {
    registrar::parse_holds(&answer.held)
}

/// What the pods' side asks of the gateways' side.
#[tonic::async_trait]
pub(crate) trait Gateways: Send + Sync {
    /// All clients of each Egress on this node.
    fn set_clients(&self, clients: BTreeMap<EgressName, Vec<Client>>);
    /// Adds one client before [`Self::set_clients`] does.
    fn add_client(&self, egress: &EgressName, client: Client);
    /// Gateways of these Egresses may have clients of this node from before the start, and are told which there are, even if none.
    fn expect_clients(&self, egresses: BTreeSet<EgressName>);
    /// Removes it again.
    fn remove_client(&self, egress: &EgressName, uid: &str);
    /// Resolves as soon as its packets can be sent to a gateway, or all gateways have refused it: then with the reason.
    async fn registered(&self, egress: &EgressName, uid: &str) -> Result<(), String>;
    /// Where its packets go now.
    fn way(&self, egress: &EgressName, uid: &str) -> Way;
    /// Addresses of all gateways of an Egress.
    fn addresses(&self, _: &EgressName) -> BTreeSet<IpAddr> {
        BTreeSet::new()
    }
    /// Changes whenever [`Self::way`] may return something else.
    fn changes(&self) -> watch::Receiver<u64>;
}

#[tonic::async_trait]
impl Gateways for Registrar {
    fn set_clients(&self, clients: BTreeMap<EgressName, Vec<Client>>) {
        Self::set_clients(self, clients);
    }

    fn add_client(&self, egress: &EgressName, client: Client) {
        Self::add_client(self, egress, client);
    }

    fn expect_clients(&self, egresses: BTreeSet<EgressName>) {
        Self::expect_clients(self, egresses);
    }

    fn remove_client(&self, egress: &EgressName, uid: &str) {
        Self::remove_client(self, egress, uid);
    }

    async fn registered(&self, egress: &EgressName, uid: &str) -> Result<(), String> {
        Self::registered(self, egress, uid).await.map_err(|error| format!("{error} ({})", error.reason()))
    }

    fn way(&self, egress: &EgressName, uid: &str) -> Way {
        Self::way(self, egress, uid)
    }

    fn addresses(&self, egress: &EgressName) -> BTreeSet<IpAddr> {
        Self::addresses(self, egress)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        Self::changes(self)
    }
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
    let slices = Arc::new(endpoints::watch(&deps.client, subsystem));
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
    announce::start(sources, subsystem);
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

/// What egress of pods needs.
pub(crate) struct EgressDeps {
    pub(crate) inputs: Inputs,
    pub(crate) gateways: Arc<dyn Gateways>,
    /// The pods of this node.
    pub(crate) pods: Arc<Cache<SlimPod>>,
    /// Tells the containers of pods that are looked for.
    pub(crate) ipam: Arc<Ipam>,
    /// A container with a CNI operation under way is left to that operation.
    pub(crate) locks: Arc<ContainerLocks>,
    pub(crate) events: EventPublisher,
    pub(crate) metrics: EgressMetrics,
    pub(crate) problems: EgressProblems,
}

/// Egress of this node: for the CNI service, cheap to clone.
#[derive(Clone)]
pub struct Egress(Arc<Shared>);

struct Shared {
    deps: EgressDeps,
    sandboxes: Sandboxes,
    programs: ProgramStock,
}

impl Egress {
    /// Starts to keep running pods current. `socket` is the node program's.
    pub(crate) fn start(deps: EgressDeps, socket: &Path, subsystem: &mut Subsystem) -> Self {
        let (sandboxes, used) = Sandboxes::load(socket);
        if deps.inputs.is_enabled() {
            deps.gateways.expect_clients(used);
        }
        let egress = Self(Arc::new(Shared { deps, sandboxes, programs: ProgramStock::default() }));
        subsystem.spawn("egress of pods", reconciler::run(Arc::clone(&egress.0)));
        subsystem.spawn("tunnel programs", programs::run(Arc::clone(&egress.0)));
        egress
    }
}

impl Shared {
    /// The pod of an attachment as the watch shows it.
    fn pod_of(&self, sandbox: &Sandbox) -> Option<Arc<SlimPod>> {
        let name = kube::runtime::reflector::ObjectRef::new(&sandbox.pod).within(&sandbox.namespace);
        self.deps.pods.store.get(&name).filter(|pod| sandbox.is_of(pod))
    }

    /// What is known beside the pod of an attachment.
    fn knowledge<'a>(
        &self,
        sandbox: &Sandbox,
        pod: Option<&SlimPod>,
        cluster: Option<&'a Cluster>,
    ) -> Knowledge<'a> {
        let inputs = &self.deps.inputs;
        let selected = match pod {
            // What counted last counts, also in what is recorded, until it is known which Egresses there are.
            _ if !inputs.is_listed() => Some(sandbox.selected()),
            Some(pod) => inputs.selected(&sandbox.namespace, pod.metadata.labels.as_ref(), false),
            None => Some(sandbox.selected()),
        };
        Knowledge { is_disabled: !inputs.is_enabled(), selected, cluster }
    }

    /// Leaves for later programs what a pod asks for, and of which Egresses it is a client, before their gateways are told.
    fn record(&self, key: &Key, sandbox: &Sandbox, pod: Option<&SlimPod>, clients_of: &BTreeSet<EgressName>) {
        let selected = self.knowledge(sandbox, pod, None).selected.unwrap_or_else(|| sandbox.selected());
        let annotations = intent::annotations(sandbox, pod);
        if let Err(error) = self.sandboxes.record(key, annotations, &selected, clients_of) {
            let pod = &sandbox.pod;
            tracing::warn!(pod, %error, "a later program may not know which gateways have this pod as a client");
        }
    }

    fn warn(&self, sandbox: &Sandbox, reason: &'static str, note: String) {
        self.deps.events.warn(PendingEvent {
            regarding: pod_reference(&sandbox.namespace, &sandbox.pod, sandbox.uid.clone()),
            reason,
            action: "SetUpEgress",
            note,
        });
    }
}

/// The annotations by which a pod asks for gateways.
pub(crate) fn egress_annotations(annotations: Option<&BTreeMap<String, String>>) -> BTreeMap<String, String> {
    let all = annotations.into_iter().flatten();
    let ours = all.filter(|(name, _)| name.starts_with(ANNOTATION_EGRESS_PREFIX));
    ours.map(|(name, value)| (name.clone(), value.clone())).collect()
}

fn client(sandbox: &Sandbox) -> Client {
    Client {
        uid: sandbox.uid(),
        namespace: sandbox.namespace.clone(),
        name: sandbox.pod.clone(),
        addresses: sandbox.addresses(),
    }
}

/// What is wrong with the egress of pods, as of the last comparison.
#[derive(Clone, Default)]
pub struct EgressProblems(Arc<Mutex<Vec<String>>>);

impl EgressProblems {
    /// One sentence each.
    pub fn get(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, problems: Vec<String>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != problems {
            if !problems.is_empty() {
                tracing::warn!(?problems, "pods of this node do not have the egress that they ask for");
            }
            *known = problems;
        }
    }
}

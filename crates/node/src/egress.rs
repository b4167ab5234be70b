//! Egress NAT: the pods of this node that use egress gateways.
//!
//! * [`inputs`]: Egresses, and once there is a client pod their Services.
//! * [`objects`]: what is read of them, and the watch of Egresses.
//! * [`selection`]: which Egresses select a pod.
//! * [`explain`]: which way the packets of a pod take, for the command line.
//! * [`plan`]: what a pod should have. Pure; [`fairlead_egress::problem`] says why it does not get it.
//! * [`kernel`]: brings a network namespace to it.
//! * [`programs`]: BPF programs of tunnels that are loaded before a pod needs them.
//! * [`sandboxes`]: where the namespaces are.
//! * [`registrar`]: registers pods at gateways, and says which gateways can be reached.
//! * [`attach`]: ADD, DEL and CHECK, for the [`stages`] of an attachment.
//! * [`announce`]: announces the source addresses that gateways on this node hold.
//! * [`reconciler`]: keeps running pods current, and repairs what others change.
//!
//! A pod that asks for gateways never sends to their destinations by `eth0`: it does not start without them, and later, whatever
//! fails, routes refuse its packets.

pub(crate) mod announce;
mod attach;
pub mod explain;
mod inputs;
mod intent;
mod kernel;
pub mod metrics;
mod objects;
mod plan;
mod programs;
mod reconciler;
pub(crate) mod registrar;
mod routing;
mod sandboxes;
mod selection;
mod stages;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fairlead_api::names::ANNOTATION_EGRESS_PREFIX;
use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::{EventPublisher, PendingEvent, pod_reference};
use fairlead_cluster::pods::SlimPod;
use fairlead_cluster::subsystem::Subsystem;
use fairlead_egress::EgressName;
use fairlead_ipam::Key;
use fairlead_wire::egress::RegisterResponse;
use tokio::sync::watch;

pub(crate) use attach::Attached;
use fairlead_pods::container_locks::ContainerLocks;
use fairlead_pods::ipam::Ipam;
pub(crate) use inputs::Inputs;
use intent::Knowledge;
use metrics::EgressMetrics;
pub use objects::SlimService;
pub(crate) use objects::watch_egresses;
use plan::Cluster;
use programs::ProgramStock;
pub(crate) use registrar::metrics::RegistrarMetrics;
use registrar::{Client, Way};
pub(crate) use registrar::{Registrar, RegistrarDeps};
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

/// What egress of this node needs.
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
pub(crate) struct Egress(Arc<Shared>);

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
pub(crate) struct EgressProblems(Arc<Mutex<Vec<String>>>);

impl EgressProblems {
    /// One sentence each.
    pub(crate) fn get(&self) -> Vec<String> {
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

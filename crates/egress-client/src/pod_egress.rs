//! Egress of this node's pods: its inputs and gateways, where its pods are, and what is recorded of them.

use std::collections::BTreeSet;
use std::sync::Arc;

use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::{EventPublisher, PendingEvent, pod_reference};
use fairlead_cluster::pods::SlimPod;
use fairlead_egress::EgressName;
use fairlead_egress::client::intent::Knowledge;
use fairlead_egress::client::plan::Cluster;
use fairlead_ipam::Key;
use fairlead_pods::container_locks::ContainerLocks;
use fairlead_pods::ipam::Ipam;

use super::gateways::Gateways;
use super::inputs::Inputs;
use super::intent;
use super::metrics::EgressMetrics;
use super::problems::EgressProblems;
use super::programs::ProgramStock;
use super::sandboxes::{Sandbox, Sandboxes};

/// Dependencies of the egress of pods.
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

/// Egress of this node's pods: what attachments and running pods share.
pub(crate) struct PodEgress {
    pub(crate) deps: EgressDeps,
    pub(crate) sandboxes: Sandboxes,
    pub(crate) programs: ProgramStock,
}

impl PodEgress {
    /// The pod of an attachment as the watch shows it.
    pub(crate) fn pod_of(&self, sandbox: &Sandbox) -> Option<Arc<SlimPod>> {
        let name = kube::runtime::reflector::ObjectRef::new(&sandbox.pod).within(&sandbox.namespace);
        self.deps.pods.store.get(&name).filter(|pod| sandbox.is_of(pod))
    }

    /// Knowledge that decides about an attachment, beside its pod.
    pub(crate) fn knowledge<'a>(
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

    /// Leaves for later programs what a pod asks for, and of which Egresses it is a client, before their gateways are told; `None` of these
    /// is not known yet.
    pub(crate) fn record(
        &self,
        key: &Key,
        sandbox: &Sandbox,
        pod: Option<&SlimPod>,
        clients_of: Option<&BTreeSet<EgressName>>,
    ) {
        let selected = self.knowledge(sandbox, pod, None).selected.unwrap_or_else(|| sandbox.selected());
        let annotations = intent::annotations(sandbox, pod);
        if let Err(error) = self.sandboxes.record(key, annotations, &selected, clients_of) {
            let pod = &sandbox.pod;
            tracing::warn!(pod, %error, "a later program may not know which gateways have this pod as a client");
        }
    }

    /// Publishes an Event at the pod of an attachment.
    pub(crate) fn warn(&self, sandbox: &Sandbox, reason: &'static str, note: String) {
        self.deps.events.warn(PendingEvent {
            regarding: pod_reference(&sandbox.namespace, &sandbox.pod, sandbox.uid.clone()),
            reason,
            action: "SetUpEgress",
            note,
        });
    }
}

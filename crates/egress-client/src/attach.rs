//! Egress of a pod in ADD, DEL and CHECK.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fairlead_egress::EgressName;
use fairlead_egress::annotation::chosen;
use fairlead_egress::client::intent::{Intent, intent};
use fairlead_egress::client::plan::{Desired, Plan, desired, usable};
use fairlead_egress::problem::{EgressProblem, EgressReason};
use fairlead_ipam::Key;
use fairlead_netlink::netns::Netns;
use fairlead_pods::cni::{Attachment, EgressRequest, Failure, PodInterface, Reason, blocking};
use futures::future::try_join_all;
use tokio::time::timeout;

use super::Egress;
use super::intent::attached_pod;
use super::kernel::{self, Place};
use super::pod_egress::PodEgress;
use super::sandboxes::Sandbox;

/// Longest time for which an ADD waits for a gateway.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(2);

impl Egress {
    /// Checks a pod's request before anything is made for it, and adds the Egresses that select the pod.
    ///
    /// # Errors
    /// The pod cannot be a client, or not of these Egresses.
    pub(crate) async fn examine(&self, namespace: &str, request: &mut EgressRequest) -> Result<(), Failure> {
        if let Some(name) = &request.gateway_of {
            let egress = EgressName { namespace: namespace.to_owned(), name: name.clone() };
            let asks = !request.annotations.is_empty();
            return if asks { Err(EgressProblem::gateway(&egress).into()) } else { Ok(()) };
        }
        let inputs = &self.0.deps.inputs;
        if !inputs.is_enabled() {
            let asks = !request.annotations.is_empty();
            return if asks { Err(EgressProblem::disabled().into()) } else { Ok(()) };
        }
        let mut chosen = chosen(&request.annotations).map_err(EgressProblem::from)?;
        let selected = inputs.selected_at_start(namespace, &request.labels).await;
        let selected = selected.ok_or_else(not_known_whether_selected)?;
        chosen.extend(selected.iter().cloned());
        request.selected = selected;
        if chosen.is_empty() {
            return Ok(());
        }
        self.0.inputs_known().await?;
        let cluster = self.0.deps.inputs.cluster();
        for egress in &chosen {
            usable(&cluster, namespace, egress)?;
        }
        Ok(())
    }

    /// Sets up what a pod asks for in its namespace, once a gateway of each Egress has the pod as its client. A further interface of a
    /// container gets nothing: gateways know the addresses of the first one.
    ///
    /// # Errors
    /// It cannot have all that it asks for; then it must not start.
    pub(crate) async fn attach(
        &self,
        attachment: &Attachment,
        interface: PodInterface,
        request: EgressRequest,
    ) -> Result<(), Failure> {
        let key = &attachment.key;
        if self.0.sandboxes.has_other_interface(key) {
            return Ok(());
        }
        let sandbox = sandbox(attachment, interface, request).await?;
        // Before it is a client, so that a comparison of all clients does not remove it again.
        self.0.sandboxes.add(key, sandbox.clone()).unwrap_or_else(|error| {
            tracing::warn!(container = key.container_id, %error, "a later program has to look for this pod");
        });
        let pod = self.0.pod_of(&sandbox);
        let cluster = self.0.deps.inputs.cluster();
        let knowledge = self.0.knowledge(&sandbox, pod.as_deref(), Some(&cluster));
        match intent(&attached_pod(&sandbox, pod.as_deref()), knowledge) {
            Intent::Client(plan) => {
                if let Some(problem) = plan.problems.first() {
                    return Err(problem.clone().into());
                }
                self.0.record(key, &sandbox, pod.as_deref(), Some(&plan.usable));
                let desired = self.0.register(&sandbox, &plan).await?;
                let shared = Arc::clone(&self.0);
                let work = move |place: Place<'_>| kernel::apply(place, &desired, &shared.programs);
                in_namespace(&sandbox, "setting up egress", work).await.map(drop)
            }
            Intent::Gateway(problem) => {
                problem.map_or(Ok(()), |problem| Err(Failure::from(problem)))?;
                in_namespace(&sandbox, "preparing a gateway", kernel::make_gateway).await.map(drop)
            }
            Intent::Keep(problem) => Err(problem.into()),
            Intent::Unknown => Err(not_known_whether_selected()),
            Intent::Ended | Intent::Nothing => Ok(()),
        }
    }

    /// Forgets an attachment: no gateway takes packets of its addresses any more. What is in its namespace goes with it.
    pub(crate) fn detach(&self, key: &Key) {
        let Some(sandbox) = self.0.sandboxes.remove(key) else { return };
        let uid = sandbox.uid();
        // The pod may have a new sandbox already.
        if self.0.sandboxes.all().values().any(|other| other.uid() == uid) {
            return;
        }
        let known = self.0.deps.inputs.cluster();
        let asked = chosen(&super::intent::annotations(&sandbox, self.0.pod_of(&sandbox).as_deref()));
        for egress in asked.unwrap_or_default().iter().chain(known.egresses.keys()).collect::<BTreeSet<_>>() {
            self.0.deps.gateways.remove_client(egress, &uid);
        }
    }

    /// Differences in the namespace of an attachment from what it should have, one sentence each.
    ///
    /// # Errors
    /// The namespace cannot be read.
    pub(crate) async fn check(&self, key: &Key) -> Result<Vec<String>, Failure> {
        let Some(sandbox) = self.0.sandboxes.get(key) else { return Ok(Vec::new()) };
        let is_known = self.0.deps.inputs.is_ready();
        let cluster = is_known.then(|| self.0.deps.inputs.cluster());
        let pod = self.0.pod_of(&sandbox);
        let knowledge = self.0.knowledge(&sandbox, pod.as_deref(), cluster.as_deref());
        let Intent::Client(plan) = intent(&attached_pod(&sandbox, pod.as_deref()), knowledge) else {
            return Ok(Vec::new());
        };
        let uid = sandbox.uid();
        let next_hop = |egress: &EgressName| self.0.deps.gateways.next_hop(egress, &uid);
        let Some(desired) = desired(&plan, next_hop) else { return Ok(Vec::new()) };
        in_namespace(&sandbox, "reading egress", move |place| kernel::differences(place, &desired)).await
    }
}

fn not_known_whether_selected() -> Failure {
    let what = "it is not known whether an Egress selects the pod (spec.selectors)";
    let why = "the API server has not shown Egresses, or the pod's Namespace, yet";
    Failure::new(Reason::ApiServerUnavailable, what).details(why)
}

impl PodEgress {
    async fn inputs_known(&self) -> Result<(), Failure> {
        if self.deps.inputs.ready().await {
            return Ok(());
        }
        let failure = Failure::new(
            Reason::ApiServerUnavailable,
            "the pod asks for egress gateways, and it is not known which there are",
        );
        if self.deps.inputs.lacks_ranges() {
            return Err(failure.details(
                "no Egress has status.clusterRanges, which the controller of egress gateways writes: see whether it runs, and is as new as this program",
            ));
        }
        let refusal = self.deps.inputs.refusal();
        Err(match refusal {
            Some(refusal) => failure.details(format!("{refusal}; grant what deploy/rbac/node.yaml grants")),
            None => failure.details("the API server does not answer"),
        })
    }

    /// Waits until a gateway of each Egress has the pod as its client, and returns what its namespace should have.
    async fn register(&self, sandbox: &Sandbox, plan: &Plan) -> Result<Desired, Failure> {
        let gateways = &self.deps.gateways;
        let uid = &sandbox.uid();
        for egress in &plan.usable {
            gateways.add_client(egress, sandbox.client());
        }
        let registered = plan.usable.iter().map(|egress| async move {
            let failed = |why: &str| {
                let message = format!("no gateway of Egress {egress} has the pod as its client: {why}");
                Failure::from(EgressProblem::new(EgressReason::NotRegistered, message))
            };
            match timeout(REGISTRATION_TIMEOUT, gateways.registered(egress, uid)).await {
                Ok(outcome) => outcome.map_err(|why| failed(&why)),
                Err(_) => Err(failed(&format!("none answered within {} s", REGISTRATION_TIMEOUT.as_secs()))),
            }
        });
        try_join_all(registered).await?;
        let desired = desired(plan, |egress| gateways.next_hop(egress, uid));
        let lost = || {
            EgressProblem::new(
                EgressReason::NotRegistered,
                "the gateways of an Egress are not known yet: try again",
            )
        };
        let desired = desired.ok_or_else(lost)?.answered_by(plan, |egress| gateways.addresses(egress));
        let closed = desired.tunnels.values().find(|tunnel| !tunnel.is_open());
        match closed {
            None => Ok(desired),
            Some(tunnel) => {
                let message = format!(
                    "no ready gateway has an address of the family of {}, as the Service of the Egress does",
                    tunnel.local
                );
                Err(EgressProblem::new(EgressReason::NotRegistered, message).into())
            }
        }
    }
}

async fn sandbox(
    attachment: &Attachment,
    interface: PodInterface,
    request: EgressRequest,
) -> Result<Sandbox, Failure> {
    let Attachment { key: Key { ifname, .. }, netns, pod } = attachment.clone();
    let mtu = match interface.mtu {
        Some(mtu) => mtu,
        // Only a client needs it.
        None if request.annotations.is_empty() && request.selected.is_empty() => {
            read_mtu(netns.clone(), ifname.clone()).await.unwrap_or_default()
        }
        None => read_mtu(netns.clone(), ifname.clone()).await?,
    };
    Ok(Sandbox {
        namespace: pod.namespace,
        pod: pod.name,
        uid: request.uid,
        netns,
        ifname,
        addresses: interface.addresses.iter().collect(),
        mtu,
        annotations: request.annotations,
        gateway_of: request.gateway_of,
        selected: request.selected.iter().map(EgressName::to_string).collect(),
        clients_of: BTreeSet::new(),
        planned: None,
    })
}

async fn in_namespace(
    sandbox: &Sandbox,
    what: &'static str,
    work: impl FnOnce(Place<'_>) -> Result<Vec<String>, kernel::Error> + Send + 'static,
) -> Result<Vec<String>, Failure> {
    let path = sandbox.netns.clone();
    let ifname = sandbox.ifname.clone();
    let work = move || work(Place { netns: &Netns::open(path)?, ifname: &ifname });
    blocking(what, work).await?.map_err(Failure::from)
}

async fn read_mtu(netns: PathBuf, ifname: String) -> Result<u32, Failure> {
    let name = ifname.clone();
    let read = move || kernel::mtu(&Netns::open(netns)?, &name);
    let found = blocking("reading the pod's interface", read).await?.map_err(Failure::from)?;
    found
        .ok_or_else(|| Failure::new(Reason::InvalidPluginOrder, format!("the pod has no interface {ifname}")))
}

impl From<kernel::Error> for Failure {
    fn from(error: kernel::Error) -> Self {
        let reason = match &error {
            kernel::Error::Netlink(fairlead_netlink::Error::Namespace { .. }) => Reason::UnusableNetns,
            _ => Reason::DataPlaneFailed,
        };
        Self::new(reason, format!("egress of the pod: {error}"))
    }
}

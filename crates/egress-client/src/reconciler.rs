//! Keeps running pods current: brings each namespace to what it should have whenever that changes, and repairs what others change in it.
//!
//! Each pod is worked on by itself, so that one that fails or hangs delays no other. What differs is found by comparing with the
//! kernel; a change of the namespace (`ChangeSignal`) leads to a comparison at once, and a sweep finds what was not reported.

mod job;
mod pods;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fairlead_cluster::pods::SlimPod;
use fairlead_egress::EgressName;
use fairlead_egress::client::intent::{Intent, intent};
use fairlead_egress::client::plan::{Cluster, desired};
use fairlead_egress::problem::{EgressProblem, EgressReason};
use fairlead_ipam::Key;
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::ChangeSignal;
use futures::future::select_all;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use self::job::{Job, Work};
use self::pods::Pods;
use super::annotations::egress_annotations;
use super::intent::{annotations, attached_pod};
use super::kernel::{self, Place};
use super::pod_egress::PodEgress;
use super::sandboxes::{self, Sandbox};
use crate::registrar::Client;

/// Time between two comparisons of all namespaces without a change.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Time for which changes of the cluster are gathered: a new Service comes with its Egress.
const DEBOUNCE: Duration = Duration::from_millis(20);
/// Least time between two comparisons of one namespace for changes in it.
const SIGNAL_PAUSE: Duration = Duration::from_millis(200);
/// Changes that may wait to be looked at. What does not fit waits in the namespaces' sockets.
const SIGNALS: usize = 64;
/// Directories in which container runtimes keep files of network namespaces: containerd and CRI-O, Docker.
const NAMESPACES: [&str; 2] = ["/run/netns", "/run/docker/netns"];

/// Result of one job.
pub(crate) struct Done {
    pub(crate) key: Key,
    pub(crate) outcome: Outcome,
}

/// Outcome of a job.
pub(crate) enum Outcome {
    /// A CNI operation has the container.
    Busy,
    /// The kernel refused something.
    Failed(String),
    /// The namespace is as it should be.
    Finished {
        /// State that the namespace was brought to.
        work: Work,
        /// Differences that others had caused, one sentence each; they are corrected.
        corrected: Vec<String>,
        /// Signals of later changes, if the job wants them.
        signals: Vec<ChangeSignal>,
    },
}

/// Runs until the program ends.
pub(crate) async fn run(shared: Arc<PodEgress>) -> Infallible {
    let (wake, mut signalled) = mpsc::channel(SIGNALS);
    let mut jobs = JoinSet::<Done>::new();
    let mut watches = JoinSet::<()>::new();
    let mut located = JoinSet::<Vec<Sandbox>>::new();
    let mut pods = Pods::default();
    let deps = &shared.deps;
    let mut of_pods = deps.pods.subscribe();
    let mut inputs = deps.inputs.subscribe();
    let mut ways = deps.gateways.changes();
    let mut attachments = shared.sandboxes.subscribe();
    let mut sweep = Instant::now() + SWEEP_INTERVAL;
    let mut namespaces = deps.inputs.subscribe_to_namespaces();
    let mut cluster = shared.cluster();
    let mut selectors = deps.inputs.selectors();
    shared.refresh(&mut pods);
    locate(&shared, &mut located);
    loop {
        for job in pods.due(Instant::now()) {
            jobs.spawn(carry_out(Arc::clone(&shared), job));
        }
        let changed = tokio::select! {
            _ = of_pods.changed() => true,
            () = inputs.changed() => {
                let now = (shared.cluster(), deps.inputs.selectors());
                let differs = !is_same(&cluster, &now.0) || !is_same(&selectors, &now.1);
                (cluster, selectors) = now;
                differs
            }
            Ok(()) = namespaces.changed() => {
                selectors.as_ref().is_some_and(|all| all.need_namespaces())
            }
            _ = ways.changed() => true,
            _ = attachments.changed() => true,
            Some(key) = signalled.recv() => { pods.compare(&key); false }
            Some(done) = jobs.join_next(), if !jobs.is_empty() => {
                if let Ok(done) = done { shared.finished(&mut pods, done, &wake, &mut watches); }
                false
            }
            Some(_) = watches.join_next(), if !watches.is_empty() => false,
            Some(found) = located.join_next(), if !located.is_empty() => {
                shared.remember(found.unwrap_or_default());
                false
            }
            () = sleep_until(pods.next(sweep)) => false,
        };
        if changed {
            sleep(DEBOUNCE).await;
            of_pods.mark_unchanged();
            ways.mark_unchanged();
            attachments.mark_unchanged();
            shared.refresh(&mut pods);
        }
        if Instant::now() >= sweep {
            sweep = Instant::now() + SWEEP_INTERVAL;
            pods.compare_all();
            locate(&shared, &mut located);
        }
    }
}

fn is_same<T>(before: &Option<Arc<T>>, now: &Option<Arc<T>>) -> bool {
    match (before, now) {
        (Some(before), Some(now)) => Arc::ptr_eq(before, now),
        (before, now) => before.is_none() && now.is_none(),
    }
}

/// Looks for pods that ask for gateways, or are gateways, and whose namespace is not known.
fn locate(shared: &Arc<PodEgress>, located: &mut JoinSet<Vec<Sandbox>>) {
    let known = shared.sandboxes.all();
    let is_missing = |pod: &&Arc<SlimPod>| {
        let concerns = pod.gateway_of().is_some()
            || !egress_annotations(pod.metadata.annotations.as_ref()).is_empty()
            || shared.is_selected(pod);
        let has_own = !pod.uses_host_network() && !pod.has_ended() && !pod.addresses().is_empty();
        concerns && has_own && !known.values().any(|sandbox| sandbox.is_of(pod))
    };
    let missing: Vec<_> = shared.deps.pods.store.state().iter().filter(is_missing).cloned().collect();
    // One search at a time.
    if !missing.is_empty() && located.is_empty() {
        located.spawn_blocking(move || {
            let directories = NAMESPACES.map(Path::new);
            missing.iter().filter_map(|pod| sandboxes::locate(&directories, pod)).collect()
        });
    }
}

async fn carry_out(shared: Arc<PodEgress>, job: Job) -> Done {
    let key = job.key.clone();
    let Some(guard) = shared.deps.locks.try_lock(&key.container_id) else {
        return Done { key, outcome: Outcome::Busy };
    };
    let work = move || {
        let _guard = guard;
        carry_out_now(&shared, job)
    };
    let outcome = tokio::task::spawn_blocking(work).await;
    Done { key, outcome: outcome.unwrap_or_else(|error| Outcome::Failed(error.to_string())) }
}

/// Blocks on the kernel.
fn carry_out_now(shared: &PodEgress, job: Job) -> Outcome {
    let Job { sandbox, work, is_check, wants_signal, .. } = job;
    let outcome = || -> Result<_, kernel::Error> {
        let netns = Netns::open(&sandbox.netns)?;
        let place = Place { netns: &netns, ifname: &sandbox.ifname };
        // Before anything is compared, so that no change is missed.
        let signals = if wants_signal { kernel::signals(&netns, work.has_nftables())? } else { Vec::new() };
        let corrected = match &work {
            Work::Client(desired) if is_check => {
                let differences = kernel::differences(place, desired)?;
                if !differences.is_empty() {
                    kernel::apply(place, desired, &shared.programs)?;
                }
                differences
            }
            Work::Client(desired) => {
                kernel::apply(place, desired, &shared.programs)?;
                Vec::new()
            }
            Work::Gateway => {
                let changed = kernel::make_gateway(place)?;
                if is_check { changed } else { Vec::new() }
            }
            Work::Nothing => {
                if kernel::has_egress(&netns)? {
                    kernel::remove(place)?;
                }
                Vec::new()
            }
        };
        Ok((corrected, signals))
    };
    match outcome() {
        Ok((corrected, signals)) => Outcome::Finished { work, corrected, signals },
        Err(error) => Outcome::Failed(error.to_string()),
    }
}

/// Watches until one of them ends.
async fn watch_all(signals: Vec<ChangeSignal>, key: Key, wake: mpsc::Sender<Key>) {
    let watches = signals.into_iter().map(|signal| Box::pin(watch(signal, key.clone(), wake.clone())));
    select_all(watches).await;
}

/// Says which namespace has changed, again and again, until it is gone.
async fn watch(signal: ChangeSignal, key: Key, wake: mpsc::Sender<Key>) {
    #[expect(
        deprecated,
        reason = "unsound only for types that do not own their descriptor; `register` is unsafe"
    )]
    let Ok(mut socket) = AsyncFd::try_new(signal) else { return };
    loop {
        let Ok(mut ready) = socket.readable_mut().await else { return };
        let changed = ready.get_inner_mut().take();
        ready.clear_ready();
        match changed {
            Ok(false) => continue,
            Ok(true) if wake.send(key.clone()).await.is_ok() => {}
            _ => return,
        }
        sleep(SIGNAL_PAUSE).await;
    }
}

impl PodEgress {
    /// The cluster, once everything of it is known.
    fn cluster(&self) -> Option<Arc<Cluster>> {
        self.deps.inputs.is_ready().then(|| self.deps.inputs.cluster())
    }

    /// Computes what every pod should have.
    fn refresh(&self, pods: &mut Pods) {
        let deps = &self.deps;
        let attachments = self.sandboxes.all();
        let shown: BTreeMap<&Key, Option<Arc<SlimPod>>> =
            attachments.iter().map(|(key, sandbox)| (key, self.pod_of(sandbox))).collect();
        let asks = |(key, sandbox): (&Key, &Arc<Sandbox>)| {
            let pod = shown.get(key).and_then(Option::as_deref);
            let selected = || self.knowledge(sandbox, pod, None).selected.unwrap_or_default();
            !annotations(sandbox, pod).is_empty() || !selected().is_empty()
        };
        if deps.inputs.is_enabled() && attachments.iter().any(asks) {
            deps.inputs.want();
        }
        let cluster = self.cluster();
        let intents: BTreeMap<Key, Intent> = attachments
            .iter()
            .map(|(key, sandbox)| {
                let pod = shown.get(key).and_then(Option::as_deref);
                let intent = match pods.intent(key).filter(|_| pod.is_none()) {
                    // An annotation may have come after the ADD: until it is seen that there is none, nothing is removed.
                    _ if !deps.pods.is_ready() => Intent::Unknown,
                    // The pod was deleted, and its sandbox is not gone yet.
                    Some(before) if *before != Intent::Unknown => before.clone(),
                    _ => {
                        intent(&attached_pod(sandbox, pod), self.knowledge(sandbox, pod, cluster.as_deref()))
                    }
                };
                (key.clone(), intent)
            })
            .collect();
        pods.set(&attachments, intents);
        for (key, sandbox) in &attachments {
            let pod = shown.get(key).and_then(Option::as_deref);
            self.record(key, sandbox, pod, pods.usable_by(key).as_ref());
        }
        if deps.inputs.is_enabled() && deps.pods.is_ready() && !pods.is_any_unknown() {
            deps.gateways.set_clients(clients(&attachments, pods));
        }
        pods.set_wanted(|sandbox, plan| {
            let uid = sandbox.uid();
            let desired = desired(plan, |egress| deps.gateways.next_hop(egress, &uid))?;
            Some(desired.answered_by(plan, |egress| deps.gateways.addresses(egress)))
        });
        self.report(pods, &attachments);
    }

    fn report(&self, pods: &mut Pods, attachments: &BTreeMap<Key, Arc<Sandbox>>) {
        let mut problems: Vec<String> = Vec::new();
        for (key, problem) in pods.problems() {
            let Some(sandbox) = attachments.get(key) else { continue };
            problems.push(format!("pod {}/{}: {problem}", sandbox.namespace, sandbox.pod));
        }
        for (key, problem) in pods.new_problems() {
            let Some(sandbox) = attachments.get(&key) else { continue };
            self.warn(sandbox, problem.reason.as_str(), problem.message);
        }
        let on_host = self.host_network_clients();
        for pod in &on_host {
            problems.push(format!(
                "pod {}/{}: {}",
                pod.namespace(),
                pod.name(),
                EgressProblem::host_network()
            ));
        }
        for pod in pods.new_on_host(&on_host) {
            let problem = EgressProblem::host_network();
            self.deps.events.warn(fairlead_cluster::events::PendingEvent {
                regarding: fairlead_cluster::events::pod_reference(
                    pod.namespace(),
                    pod.name(),
                    pod.metadata.uid.clone(),
                ),
                reason: problem.reason.as_str(),
                action: "SetUpEgress",
                note: problem.message,
            });
        }
        let host = on_host.len();
        self.deps.metrics.counted(pods.clients(), |reason| {
            let host = if reason == EgressReason::HostNetwork { host } else { 0 };
            pods.problems()
                .filter(|(_, problem)| problem.contains_reason(reason))
                .count()
                .saturating_add(host)
        });
        self.deps.problems.set(problems);
    }

    /// Whether an Egress selects a pod.
    fn is_selected(&self, pod: &SlimPod) -> bool {
        let selected = self.deps.inputs.selected(pod.namespace(), pod.metadata.labels.as_ref(), false);
        selected.is_some_and(|selected| !selected.is_empty())
    }

    /// Pods in this node's network that ask for gateways.
    fn host_network_clients(&self) -> Vec<Arc<SlimPod>> {
        let mut pods = self.deps.pods.store.state();
        pods.retain(|pod| {
            let asks = !egress_annotations(pod.metadata.annotations.as_ref()).is_empty();
            asks && pod.uses_host_network() && !pod.has_ended()
        });
        pods
    }

    fn finished(&self, pods: &mut Pods, done: Done, wake: &mpsc::Sender<Key>, watches: &mut JoinSet<()>) {
        let Done { key, outcome } = done;
        let Some(sandbox) = self.sandboxes.get(&key) else { return };
        match outcome {
            Outcome::Busy => drop(pods.retry(&key, None, Instant::now())),
            Outcome::Failed(_) if !sandbox.netns.exists() => drop(self.sandboxes.remove(&key)),
            Outcome::Failed(error) => {
                self.deps.metrics.failed();
                if pods.retry(&key, Some(&error), Instant::now()) {
                    tracing::warn!(
                        container = key.container_id,
                        pod = sandbox.pod,
                        namespace = sandbox.namespace,
                        error,
                        "cannot set up the egress of a pod"
                    );
                    self.warn(&sandbox, "DataPlaneFailed", format!("egress of the pod: {error}"));
                }
                self.report(pods, &self.sandboxes.all());
            }
            Outcome::Finished { work, corrected, signals } => {
                if !corrected.is_empty() {
                    tracing::warn!(
                        pod = sandbox.pod,
                        namespace = sandbox.namespace,
                        differences = ?corrected,
                        "corrected the egress of a pod"
                    );
                    self.deps.metrics.corrected();
                }
                let watch = (!signals.is_empty())
                    .then(|| watches.spawn(watch_all(signals, key.clone(), wake.clone())));
                if pods.done(&key, work, watch) {
                    self.report(pods, &self.sandboxes.all());
                }
            }
        }
    }

    /// Adds pods that were found.
    fn remember(&self, found: Vec<Sandbox>) {
        for sandbox in found {
            let attachments = self.deps.ipam.attachments();
            let has = |it: &&fairlead_pods::ipam::Attachment| {
                it.allocated.addresses().any(|ip| sandbox.addresses.contains(&ip))
            };
            let key = attachments
                .iter()
                .find(has)
                .map(|it| it.key.clone())
                .unwrap_or_else(|| Key { container_id: sandbox.uid(), ifname: sandbox.ifname.clone() });
            tracing::info!(pod = sandbox.pod, namespace = sandbox.namespace, netns = %sandbox.netns.display(), "found a pod that uses egress");
            self.sandboxes.found(key, sandbox);
        }
    }
}

/// All clients of each Egress; a pod with two sandboxes counts once.
fn clients(attachments: &BTreeMap<Key, Arc<Sandbox>>, pods: &Pods) -> BTreeMap<EgressName, Vec<Client>> {
    let mut all = BTreeMap::<EgressName, Vec<Client>>::new();
    let mut seen = BTreeSet::new();
    for (key, usable) in pods.usable() {
        let Some(sandbox) = attachments.get(key) else { continue };
        for egress in usable {
            if seen.insert((egress.clone(), sandbox.uid())) {
                all.entry(egress.clone()).or_default().push(sandbox.client());
            }
        }
    }
    all
}

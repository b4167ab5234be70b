//! Work of the elected replica: it looks at all Egresses whenever one of their objects changes, and at times in between.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::names::EGRESS_PROGRAM;
use fairlead_api::resources::Egress;
use fairlead_cluster::caches::{self, Cache, config};
use fairlead_cluster::events::{EventPublisher, ProblemEvent, ProblemEvents};
use fairlead_cluster::subsystem::Subsystem;
use fairlead_egress::objects::{Defaults, role_binding, selector_of_all};
use fairlead_egress::status::{Finding, invalid_selectors};
use fairlead_ipam::queue::Attempt;
use futures::{StreamExt as _, stream};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ObjectReference, Pod, Service, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::runtime::events::Reporter;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::timeout;

use super::causes;
use super::findings::{Cause, Causes};
use super::ranges::{self, Ranges};
use super::reconcile::{Outcome, Reconciler};
use super::source_addresses::{Decision, SourceAddresses};
use super::write::Writer;
use super::{Metrics, Settings, costs};
use crate::changes::Changes;

/// Changes are collected this long.
const DEBOUNCE: Duration = Duration::from_millis(200);
/// Interval without a change: objects of other owners are not watched, nor are namespaces.
const RESYNC_INTERVAL: Duration = Duration::from_secs(5);
/// Time that the first look waits for the ranges of the cluster.
const RANGES: Duration = Duration::from_secs(5);
/// Egresses that are worked on at the same time.
const CONCURRENCY: usize = 8;
/// Pauses after failures in seconds; the last one repeats.
const PAUSES: [u64; 5] = [1, 2, 5, 10, 20];

const EVENT: ProblemEvent = ProblemEvent {
    resolved: "GatewaysDeployed",
    resolved_note: "Deployment and Service are as the Egress says, and no gateway is known to fail",
    action: "DeployGateways",
};

/// Objects as last seen.
#[derive(Clone)]
pub(super) struct Stores {
    pub(super) egresses: Store<Egress>,
    pub(super) deployments: Store<Deployment>,
    pub(super) services: Store<Service>,
    pub(super) budgets: Store<PodDisruptionBudget>,
    pub(super) accounts: Store<ServiceAccount>,
    bindings: Store<ClusterRoleBinding>,
}

/// Starts the leader's work, which ends when the subsystem is stopped.
pub(super) fn start(subsystem: &mut Subsystem, client: &Client, settings: &Settings, metrics: &Metrics) {
    let ours = || config().labels(&selector_of_all());
    let binding = config().fields(&format!("metadata.name={EGRESS_PROGRAM}"));
    let egresses: Cache<Egress> = caches::watch_all(subsystem, "Egresses", client, config());
    let deployments: Cache<Deployment> = caches::watch_all(subsystem, "Deployments", client, ours());
    let services: Cache<Service> = caches::watch_all(subsystem, "Services", client, ours());
    let budgets: Cache<PodDisruptionBudget> =
        caches::watch_all(subsystem, "PodDisruptionBudgets", client, ours());
    let accounts: Cache<ServiceAccount> = caches::watch_all(subsystem, "ServiceAccounts", client, ours());
    let bindings: Cache<ClusterRoleBinding> =
        caches::watch_all(subsystem, "ClusterRoleBindings", client, binding);
    let (cluster_ranges, changed_ranges) = ranges::start(subsystem, client);
    let (sources, [leases, pods, roles, role_bindings, blocks]) =
        SourceAddresses::start(subsystem, client, &settings.source_addresses);
    let (causes, changed_causes) =
        causes::start(subsystem, client.clone(), egresses.store.clone(), deployments.store.clone());
    let (warnings, changed_warnings) = costs::start(subsystem, client.clone(), egresses.store.clone());
    let watches = [
        changed_ranges,
        changed_causes,
        changed_warnings,
        egresses.subscribe(),
        deployments.subscribe(),
        services.subscribe(),
        budgets.subscribe(),
        accounts.subscribe(),
        bindings.subscribe(),
        leases,
        pods,
        roles,
        role_bindings,
        blocks,
    ];
    let stores = Stores {
        egresses: egresses.store,
        deployments: deployments.store,
        services: services.store,
        budgets: budgets.store,
        accounts: accounts.store,
        bindings: bindings.store,
    };
    let reporter = Reporter::from("fairlead-egress-controller");
    let events = EventPublisher::start(subsystem, client.clone(), reporter, metrics.events.clone());
    let writer = Arc::new(Writer::default());
    let leader = Leader {
        client: client.clone(),
        settings: settings.clone(),
        image: settings.image.clone(),
        writer,
        stores,
        ranges: cluster_ranges,
        causes: [causes, warnings],
        sources,
        events,
        metrics: metrics.clone(),
        memories: BTreeMap::new(),
    };
    let changes = Changes { watches, resync: RESYNC_INTERVAL, debounce: DEBOUNCE };
    subsystem.spawn("gateways", leader.run(changes));
}

struct Leader {
    client: Client,
    settings: Settings,
    /// The image of gateways, once it is known.
    image: Option<String>,
    writer: Arc<Writer>,
    stores: Stores,
    ranges: watch::Receiver<Ranges>,
    /// Causes why gateways are not available, then warnings about gateways that are.
    causes: [watch::Receiver<Causes>; 2],
    sources: SourceAddresses,
    events: EventPublisher,
    metrics: Metrics,
    /// Memories by the UIDs of Egresses.
    memories: BTreeMap<String, Memory>,
}

/// Knowledge about an Egress that is kept from one look to the next.
struct Memory {
    events: ProblemEvents,
    /// Problem that the last look found.
    problem: Option<Finding>,
    failures: usize,
    /// Earliest time of the next look, unless the Egress is changed: the generation is that of the last look.
    retry: Option<(Instant, Option<i64>)>,
}

impl Leader {
    /// Runs forever, once all first lists are there: without one, objects would seem to be missing, and subjects stale.
    async fn run<const KINDS: usize>(mut self, mut changes: Changes<KINDS>) {
        for generation in &mut changes.watches {
            if generation.wait_for(|generation| *generation > 0).await.is_err() {
                return std::future::pending().await;
            }
        }
        // Without them a source address inside of the cluster would seem to be free.
        if self.sources.are_permitted() && self.ranges.wait_for(Option::is_some).await.is_err() {
            return std::future::pending().await;
        }
        // Without them an Egress that no pod can use would seem to be ready for a moment.
        let _ = timeout(RANGES, self.ranges.wait_for(Option::is_some)).await;
        loop {
            let wait = self.look().await;
            changes.resync = wait.unwrap_or(RESYNC_INTERVAL);
            changes.next().await;
        }
    }

    /// Looks at all Egresses; returns when to look again at the latest, if that is soon.
    async fn look(&mut self) -> Option<Duration> {
        let all = self.stores.egresses.state();
        let namespaces: BTreeSet<String> = all.iter().filter_map(|egress| egress.namespace()).collect();
        let shared = self.bind(&namespaces).await;
        self.image = match self.image.take() {
            Some(image) => Some(image),
            None => self.own_image().await,
        };
        self.forget(&all, &namespaces);
        let ranges = self.ranges.borrow().clone();
        let mut decisions = self.sources.decide(&all, ranges.as_deref());
        self.sources.write(&self.writer, &all, &mut decisions).await;
        let wait = SourceAddresses::wait(&decisions);
        let now = Instant::now();
        let is_due =
            |egress: &Arc<Egress>| self.is_due(egress, decisions.get(&egress.uid().unwrap_or_default()), now);
        let due: Vec<Arc<Egress>> = all.into_iter().filter(is_due).collect();
        let uids: Vec<String> = due.iter().filter_map(|egress| egress.uid()).collect();
        self.metrics.queue.waiting(now, uids.iter().map(String::as_str));
        let Settings { port, seccomp, .. } = self.settings;
        let defaults = Defaults { image: self.image.clone(), port, seccomp };
        let reconciler = Reconciler {
            client: self.client.clone(),
            writer: Arc::clone(&self.writer),
            stores: self.stores.clone(),
            defaults,
            shared,
            ranges,
            sources: decisions,
            causes: self.causes.each_ref().map(|causes| Arc::clone(&causes.borrow())),
        };
        let outcomes: Vec<_> = stream::iter(due)
            .map(|egress| {
                let reconciler = &reconciler;
                let queue = &self.metrics.queue;
                async move {
                    let uid = egress.uid().unwrap_or_default();
                    queue.started(Instant::now(), &uid);
                    let outcome = reconciler.reconcile(&egress).await;
                    let attempt = if outcome.is_done { Attempt::Answered } else { Attempt::Failed };
                    queue.ended(Instant::now(), &uid, attempt);
                    (egress, outcome)
                }
            })
            .buffer_unordered(CONCURRENCY)
            .collect()
            .await;
        for (egress, outcome) in outcomes {
            self.remember(&egress, outcome);
        }
        wait
    }

    /// An Egress that is being deleted needs no objects: the garbage collector deletes them. The holders of source addresses
    /// are written at once: node programs route by them.
    fn is_due(&self, egress: &Egress, decision: Option<&Decision>, now: Instant) -> bool {
        let memory = egress.uid().and_then(|uid| self.memories.get(&uid));
        let waits = memory
            .and_then(|memory| memory.retry)
            .is_some_and(|(until, generation)| now < until && generation == egress.metadata.generation);
        let is_said = |decision: &Decision| {
            egress.status.as_ref().is_some_and(|status| status.source_addresses == decision.status())
        };
        egress.metadata.deletion_timestamp.is_none() && (!waits || decision.is_some_and(|it| !is_said(it)))
    }

    fn remember(&mut self, egress: &Egress, Outcome { problem, cause, is_done }: Outcome) {
        let new = || Memory {
            events: ProblemEvents::new(self.events.clone(), reference(egress), EVENT),
            problem: None,
            failures: 0,
            retry: None,
        };
        let memory = self.memories.entry(egress.uid().unwrap_or_default()).or_insert_with(new);
        if let Some(Finding { reason, message, .. }) = problem.as_ref().filter(|_| problem != memory.problem)
        {
            let namespace = egress.namespace();
            let name = egress.name_any();
            tracing::warn!(namespace, egress = name, reason, message, "an Egress does not work as it says");
        }
        memory.problem.clone_from(&problem);
        let now = Instant::now();
        let problem = problem.map(|Finding { reason, message, .. }| (reason, message));
        let cause = cause.map(|Cause { reason, message }| (reason, message));
        memory.events.update(problem.into_iter().chain(invalid_selectors(egress)).chain(cause), now);
        if is_done {
            memory.failures = 0;
            memory.retry = None;
            return;
        }
        let pause = PAUSES.get(memory.failures).or(PAUSES.last()).copied().unwrap_or_default();
        memory.failures = memory.failures.saturating_add(1);
        let until = now.checked_add(Duration::from_secs(pause));
        memory.retry = until.map(|until| (until, egress.metadata.generation));
    }

    /// Forgets what is gone.
    fn forget(&mut self, all: &[Arc<Egress>], namespaces: &BTreeSet<String>) {
        let uids: BTreeSet<String> = all.iter().filter_map(|egress| egress.uid()).collect();
        self.memories.retain(|uid, _| uids.contains(uid));
        self.writer.forget_namespaces_but(namespaces);
    }

    /// Binds exactly the ServiceAccounts of these namespaces; says why it cannot.
    async fn bind(&self, namespaces: &BTreeSet<String>) -> Option<Finding> {
        let live = self.stores.bindings.get(&ObjectRef::new(EGRESS_PROGRAM));
        if live.is_none() && namespaces.is_empty() {
            return None;
        }
        let api = Api::<ClusterRoleBinding>::all(self.client.clone());
        let applied = self.writer.apply(&api, live.as_deref(), json!(role_binding(namespaces)), true).await;
        let failure = applied.err()?;
        tracing::warn!(%failure, "cannot bind the ServiceAccounts of gateways; retrying");
        failure.finding()
    }

    /// The image of this replica's pod.
    async fn own_image(&self) -> Option<String> {
        let pod = self.settings.pod.as_ref()?;
        let pods = Api::<Pod>::namespaced(self.client.clone(), &pod.namespace);
        match pods.get_opt(&pod.name).await {
            Ok(found) => found?.spec?.containers.into_iter().next()?.image,
            Err(error) => {
                tracing::warn!(pod = pod.name, %error, "cannot read the image of this pod; retrying");
                None
            }
        }
    }
}

fn reference(egress: &Egress) -> ObjectReference {
    egress.object_ref(&())
}

//! Source addresses of Egresses: what is watched for them, and the writes that `fairlead_source_addresses::leases` decides. Without
//! `--egress-source-addresses` nothing is watched, and every source address is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::resources::{AddressBlock, Egress, EgressSourceAddress};
use fairlead_cluster::caches::{self, Cache, config};
use fairlead_cluster::lean;
use fairlead_cluster::pods::gateway_of;
use fairlead_cluster::subsystem::Subsystem;
use fairlead_cluster::writes::is_stale;
use fairlead_egress::objects::selector_of_all;
use fairlead_egress::status::Finding;
use fairlead_source_addresses::leases::{
    self, ANNOTATION_MEMBER_PREFIX, Claimed, Plan, ROLE, Refusal, Resting, asking_to_leave, gone_members,
    is_ours, members_lease, permit, plan, role, role_binding,
};
use ipnet::IpNet;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio::sync::watch;

use super::ranges::ClusterRanges;
use super::write::{MANAGER, Writer};

/// Signals of what is watched.
pub(super) const KINDS: usize = 5;
/// Gateways of an Egress that are looked for at once: what one wrote into its list does not hold up the other Egresses.
const MAX_GONE: usize = 8;

/// State and clients of the work on source addresses.
pub(super) struct SourceAddresses {
    client: Client,
    permitted: Vec<IpNet>,
    watched: Option<Watched>,
    start: Instant,
    resting: Resting,
    /// Signals of what is not watched: they never come.
    _silent: watch::Sender<u64>,
}

struct Watched {
    leases: Store<Lease>,
    pods: Store<Pod>,
    roles: Store<Role>,
    bindings: Store<RoleBinding>,
    blocks: Store<AddressBlock>,
}

impl Watched {
    /// Ranges in which no source address may be, each with its origin.
    fn cluster(&self, known: Option<&ClusterRanges>) -> Vec<(IpNet, String)> {
        let mut ranges = known.map(|known| known.named.clone()).unwrap_or_default();
        for block in self.blocks.state() {
            let what = format!("AddressBlock {}", block.name_any());
            let nets = block.parse().map(|nets| nets.iter().collect::<Vec<_>>()).unwrap_or_default();
            ranges.extend(nets.into_iter().map(|net| (net, what.clone())));
        }
        ranges
    }
}

/// Decision about the source addresses of one Egress.
#[derive(Debug, Clone, Default)]
pub(super) struct Decision {
    pub(super) plan: Plan,
    pub(super) refusals: Vec<Refusal>,
    /// Reason why a Lease could not be made.
    pub(super) failure: Option<String>,
}

impl Decision {
    /// Finding for the condition, unless there is something worse: all refusals with the reason of the first one, or else the failure.
    pub(super) fn finding(&self) -> Option<Finding> {
        let Some(first) = self.refusals.first() else {
            let failure = self.failure.clone()?;
            return Some(Finding::problem("SourceAddressLeaseMissing", failure));
        };
        let texts: Vec<String> = self.refusals.iter().map(ToString::to_string).collect();
        Some(Finding::problem(first.reason(), texts.join("; ")))
    }

    /// Source addresses for the status.
    pub(super) fn status(&self) -> Vec<EgressSourceAddress> {
        leases::status(&self.plan.slots, &self.plan.holders)
    }
}

impl SourceAddresses {
    /// Whether `--egress-source-addresses` permits any.
    pub(super) fn are_permitted(&self) -> bool {
        self.watched.is_some()
    }

    /// Starts what is watched, and returns its signals.
    pub(super) fn start(
        subsystem: &mut Subsystem,
        client: &Client,
        permitted: &[IpNet],
    ) -> (Self, [watch::Receiver<u64>; KINDS]) {
        // One that has been there always.
        let (silent, never) = watch::channel(1);
        let mut signals: [watch::Receiver<u64>; KINDS] = std::array::from_fn(|_| never.clone());
        let watched = (!permitted.is_empty()).then(|| {
            let ours = || config().labels(&selector_of_all());
            let leases: Cache<Lease> = caches::watch_all(subsystem, "Leases", client, ours());
            let pods = watcher(Api::<Pod>::all(client.clone()), ours()).modify(slim_pod);
            let pods: Cache<Pod> = caches::start(subsystem, "gateway pods", pods);
            let roles: Cache<Role> = caches::watch_all(subsystem, "Roles", client, ours());
            let bindings: Cache<RoleBinding> = caches::watch_all(subsystem, "RoleBindings", client, ours());
            let blocks: Cache<AddressBlock> = caches::watch_all(subsystem, "AddressBlocks", client, config());
            signals = [
                leases.subscribe(),
                pods.subscribe(),
                roles.subscribe(),
                bindings.subscribe(),
                blocks.subscribe(),
            ];
            Watched {
                leases: leases.store,
                pods: pods.store,
                roles: roles.store,
                bindings: bindings.store,
                blocks: blocks.store,
            }
        });
        let new = Self {
            client: client.clone(),
            permitted: permitted.to_vec(),
            watched,
            start: Instant::now(),
            resting: Resting::default(),
            _silent: silent,
        };
        (new, signals)
    }

    /// Decisions about all Egresses, by UID.
    pub(super) fn decide(
        &mut self,
        egresses: &[Arc<Egress>],
        known: Option<&ClusterRanges>,
    ) -> BTreeMap<String, Decision> {
        let now = self.start.elapsed();
        let leases = self.watched.as_ref().map(|watched| watched.leases.state()).unwrap_or_default();
        self.resting.look(leases.iter().map(AsRef::as_ref), now);
        let cluster = self.watched.as_ref().map(|watched| watched.cluster(known)).unwrap_or_default();
        let ranges = leases::Ranges { permitted: self.permitted.clone(), cluster };
        let claimed = Claimed::new(egresses.iter().map(AsRef::as_ref));
        let decide = |egress: &Arc<Egress>| {
            let name = egress.name_any();
            let own = |lease: &&Lease| {
                lease.metadata.namespace == egress.metadata.namespace && is_ours(&name, lease)
            };
            let live: Vec<&Lease> = leases.iter().map(AsRef::as_ref).filter(own).collect();
            let (slots, refusals) = permit(egress, &ranges, &claimed, &live);
            let plan = match self.watched {
                Some(_) => plan(egress, &slots, &live, &self.resting, now),
                None => Plan { slots: vec![Vec::new(); slots.len()], ..Plan::default() },
            };
            let failure = plan.blocked.clone();
            (egress.uid().unwrap_or_default(), Decision { plan, refusals, failure })
        };
        egresses.iter().map(decide).collect()
    }

    /// Time until the next look; `None` unless an address rests.
    pub(super) fn wait(decisions: &BTreeMap<String, Decision>) -> Option<Duration> {
        decisions.values().any(|decision| decision.plan.waits).then_some(Duration::from_millis(500))
    }

    /// Brings Roles, Leases and the lists of gateways to what was decided. What fails is logged, and tried again by the next look.
    pub(super) async fn write(
        &self,
        writer: &Writer,
        egresses: &[Arc<Egress>],
        decisions: &mut BTreeMap<String, Decision>,
    ) {
        let Some(watched) = &self.watched else { return };
        self.write_roles(writer, watched, egresses, decisions).await;
        for egress in egresses.iter().filter(|egress| egress.metadata.deletion_timestamp.is_none()) {
            let Some(decision) = egress.uid().and_then(|uid| decisions.get_mut(&uid)) else { continue };
            let namespace = egress.namespace().unwrap_or_default();
            let leases = Api::<Lease>::namespaced(self.client.clone(), &namespace);
            for lease in &decision.plan.delete {
                self.delete(&leases, lease).await;
            }
            for lease in &decision.plan.create {
                let failure = create(&leases, lease).await.err();
                decision.failure = failure.or_else(|| decision.failure.take());
            }
            self.update_members(watched, &leases, egress).await;
        }
    }

    async fn delete(&self, leases: &Api<Lease>, lease: &Lease) {
        let preconditions = Preconditions { uid: lease.uid(), resource_version: None };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::background() };
        match leases.delete(&lease.name_any(), &parameters).await {
            Ok(_) => tracing::info!(namespace = lease.namespace(), lease = lease.name_any(), "deleted"),
            Err(error) if is_stale(&error) => {}
            Err(error) => {
                tracing::warn!(namespace = lease.namespace(), lease = lease.name_any(), %error, "cannot delete a Lease; retrying");
            }
        }
    }

    /// The right of gateways, before the Leases that it is for.
    async fn write_roles(
        &self,
        writer: &Writer,
        watched: &Watched,
        egresses: &[Arc<Egress>],
        decisions: &BTreeMap<String, Decision>,
    ) {
        let mut names = BTreeMap::<String, BTreeSet<String>>::new();
        for egress in egresses {
            let decision = egress.uid().and_then(|uid| decisions.get(&uid));
            let namespace = egress.namespace().unwrap_or_default();
            if let Some(decision) = decision.filter(|decision| !decision.plan.names.is_empty()) {
                names.entry(namespace).or_default().extend(decision.plan.names.iter().cloned());
            }
        }
        for (namespace, leases) in &names {
            let key = |namespace: &str| ObjectRef::new(ROLE).within(namespace);
            let roles = Api::<Role>::namespaced(self.client.clone(), namespace);
            let live = watched.roles.get(&key(namespace));
            let applied = writer.apply(&roles, live.as_deref(), json!(role(namespace, leases)), true).await;
            let bindings = Api::<RoleBinding>::namespaced(self.client.clone(), namespace);
            let live = watched.bindings.get(&ObjectRef::new(ROLE).within(namespace));
            let bound = writer.apply(&bindings, live.as_deref(), json!(role_binding(namespace)), true).await;
            for failure in [applied, bound].into_iter().filter_map(Result::err) {
                tracing::warn!(namespace, %failure, "gateways get no right to the Leases of their source addresses; retrying");
            }
        }
        for binding in watched.bindings.state().iter().filter(|it| it.name_any() == ROLE) {
            let namespace = binding.namespace().unwrap_or_default();
            if !names.contains_key(&namespace) {
                let api = Api::<RoleBinding>::namespaced(self.client.clone(), &namespace);
                log_failure(&namespace, writer.delete(&api, binding.as_ref()).await);
            }
        }
        for role in watched.roles.state().iter().filter(|it| it.name_any() == ROLE) {
            let namespace = role.namespace().unwrap_or_default();
            if !names.contains_key(&namespace) {
                let api = Api::<Role>::namespaced(self.client.clone(), &namespace);
                log_failure(&namespace, writer.delete(&api, role.as_ref()).await);
            }
        }
    }

    /// Removes gateways whose pod is gone from the list, and asks those to leave whose pod is no gateway of the Egress any more, because its
    /// labels were changed: no node announces what they hold. A gateway that is not in the list may be left out of account, so the API server
    /// is asked whether the pod is really gone.
    async fn update_members(&self, watched: &Watched, leases: &Api<Lease>, egress: &Egress) {
        let namespace = egress.namespace().unwrap_or_default();
        let name = members_lease(&egress.name_any());
        let Some(lease) = watched.leases.get(&ObjectRef::new(&name).within(&namespace)) else { return };
        let pods = watched.pods.state();
        let own = egress.name_any();
        let is_gateway = |metadata: &ObjectMeta| gateway_of(metadata.labels.as_ref()) == Some(&own);
        let of_egress = pods
            .iter()
            .filter(|pod| pod.namespace().as_deref() == Some(&namespace) && is_gateway(&pod.metadata));
        let pods: BTreeSet<(String, String)> =
            of_egress.map(|pod| (pod.name_any(), pod.uid().unwrap_or_default())).collect();
        let api = Api::<Pod>::namespaced(self.client.clone(), &namespace);
        let annotation = |pod: &str| format!("{ANNOTATION_MEMBER_PREFIX}{pod}");
        let asking = |pod: &str, leave| {
            let value = lease.annotations().get(&annotation(pod))?;
            Some((annotation(pod), Some(asking_to_leave(value, leave)?)))
        };
        let mut gone: BTreeMap<String, Option<String>> =
            pods.iter().filter_map(|(pod, _)| asking(pod, false)).collect();
        for (pod, uid) in gone_members(&lease, &pods).into_iter().take(MAX_GONE) {
            match api.get_metadata_opt(&pod).await {
                Ok(Some(found)) if found.metadata.uid.as_deref() == Some(&uid) => {
                    gone.extend(asking(&pod, true).filter(|_| !is_gateway(&found.metadata)));
                }
                Ok(_) => drop(gone.insert(annotation(&pod), None)),
                Err(error) => {
                    tracing::warn!(namespace, pod, %error, "cannot read whether a gateway's pod is gone; retrying");
                }
            }
        }
        if gone.is_empty() {
            return;
        }
        // Only as it was read: the pod of a new gateway may have the name.
        let patch =
            json!({ "metadata": { "resourceVersion": lease.resource_version(), "annotations": gone } });
        let parameters = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        match leases.patch_metadata(&name, &parameters, &Patch::Merge(patch)).await {
            Ok(_) => tracing::info!(namespace, gateways = ?gone, "gateways are gone, or asked to leave"),
            Err(error) if is_stale(&error) => {}
            Err(error) => {
                tracing::warn!(namespace, %error, "cannot remove gateways that are gone; retrying");
            }
        }
    }
}

/// Makes a Lease.
///
/// # Errors
/// Reason why the Lease is missing, in words for the status.
async fn create(leases: &Api<Lease>, lease: &Lease) -> Result<(), String> {
    let namespace = lease.namespace().unwrap_or_default();
    let name = lease.name_any();
    let parameters = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
    let error = match leases.create(&parameters, lease).await {
        Ok(_) => {
            tracing::info!(namespace, lease = name, "created");
            return Ok(());
        }
        Err(kube::Error::Api(status)) if status.code == 409 => {
            "it was not made for the Egress: delete it".to_owned()
        }
        Err(error) => error.to_string(),
    };
    tracing::warn!(namespace, lease = name, error, "cannot create a Lease; retrying");
    Err(format!("cannot create the Lease {name} of its source addresses: {error}"))
}

fn log_failure(namespace: &str, outcome: Result<(), super::write::Failure>) {
    if let Err(failure) = outcome {
        tracing::warn!(namespace, %failure, "cannot take back the right of gateways; retrying");
    }
}

/// Reduces a pod of the cache to its name and UID.
fn slim_pod(pod: &mut Pod) {
    lean::any(pod);
    pod.spec = None;
    pod.status = None;
}

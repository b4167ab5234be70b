//! One Egress: its objects and its status.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::net::IpAddr;
use std::sync::Arc;

use fairlead_address::PrefixSet;
use fairlead_api::names::EGRESS_PROGRAM;
use fairlead_api::resources::{Egress, EgressSourceAddress};
use fairlead_cluster::writes::apply_status;
use fairlead_egress::EgressName;
use fairlead_egress::client::{cluster_ranges, problem_of_all_pods};
use fairlead_egress::destinations::Destinations;
use fairlead_egress::objects::{Defaults, Objects, objects, service_account, take_back_ports};
use fairlead_egress::status::{self, Finding};
use ipnet::IpNet;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Service, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::findings::{Cause, Causes};
use super::leader::Stores;
use super::ranges::Ranges;
use super::source_addresses::Decision;
use super::write::{Failure, MANAGER, Writer};

/// Result of a look at an Egress.
pub(super) struct Outcome {
    /// Problem that keeps the gateways from being deployed.
    pub(super) problem: Option<Finding>,
    /// Cause why deployed gateways are not available.
    pub(super) cause: Option<Cause>,
    /// Whether everything is written, so that no retry is needed.
    pub(super) is_done: bool,
}

/// Ranges of the cluster for the status of an Egress.
fn ranges_for(egress: &Egress, all: &PrefixSet) -> Vec<String> {
    let spec = &egress.spec;
    let destinations = Destinations::parse(&spec.destinations, &spec.excluded_destinations);
    cluster_ranges(all, &destinations.unwrap_or_default()).iter().map(IpNet::to_string).collect()
}

/// Reconciles Egresses.
pub(super) struct Reconciler {
    pub(super) client: Client,
    pub(super) writer: Arc<Writer>,
    pub(super) stores: Stores,
    pub(super) defaults: Defaults,
    /// Problem that keeps the gateways of all Egresses from running.
    pub(super) shared: Option<Finding>,
    /// Ranges of the cluster, for the status.
    pub(super) ranges: Ranges,
    /// Source addresses, by the UIDs of Egresses.
    pub(super) sources: BTreeMap<String, Decision>,
    /// Causes why gateways are not available, then warnings about gateways that are; the first one found is reported.
    pub(super) causes: [Causes; 2],
}

/// Objects of an Egress that exist now, one of each kind.
struct Live {
    deployment: Option<Deployment>,
    service: Option<Service>,
    budget: Option<PodDisruptionBudget>,
}

impl Reconciler {
    pub(super) async fn reconcile(&self, egress: &Egress) -> Outcome {
        let namespace = egress.namespace();
        let name = egress.name_any();
        let uid = egress.metadata.uid.as_ref();
        let cause = uid.and_then(|uid| self.causes.iter().find_map(|causes| causes.get(uid))).cloned();
        let decision = uid.and_then(|uid| self.sources.get(uid));
        // What does not depend on whether the objects are written.
        let others = || self.shared.clone().or_else(|| decision?.finding()).or_else(|| self.useless(egress));
        let problem = match objects(egress, &self.defaults) {
            Ok(objects) => {
                match self.write(egress, objects).await.map_err(|failure| (failure.finding(), failure)) {
                    Ok(()) => None,
                    Err((Some(problem), _)) => Some(problem),
                    // What the status says may still be true.
                    Err((None, failure)) => {
                        tracing::warn!(namespace, egress = name, %failure, "cannot deploy gateways; retrying");
                        return Outcome { problem: others(), cause, is_done: false };
                    }
                }
            }
            Err(error) => Some(Finding::problem(error.reason(), error.to_string())),
        };
        // What is refused is no failure: the gateways are as the Egress says otherwise, and another attempt changes nothing.
        let is_done = problem.is_none() && self.shared.is_none();
        let problem = problem.or_else(others);
        let said = decision.map(Decision::status).unwrap_or_default();
        let written = self.write_status(egress, problem.as_ref(), cause.as_ref(), said).await;
        Outcome { is_done: is_done && written, cause, problem }
    }

    /// Problem for which no pod can use the gateways, although they run.
    fn useless(&self, egress: &Egress) -> Option<Finding> {
        let spec = &egress.spec;
        let destinations = Destinations::parse(&spec.destinations, &spec.excluded_destinations).ok()?;
        let service = cached(egress, &self.stores.services)?;
        let cluster_ips = service.spec.iter().flat_map(|spec| spec.cluster_ips.iter().flatten());
        let cluster_ips = cluster_ips.filter_map(|address| address.parse::<IpAddr>().ok()).collect();
        let ranges = &self.ranges.as_ref()?.all;
        let name = EgressName { namespace: egress.namespace()?, name: egress.name_any() };
        let problem = problem_of_all_pods(&name, &destinations, cluster_ips, ranges)?;
        Some(Finding::problem(problem.reason(), problem.to_string()))
    }

    /// Applies the objects, unless one of their names is taken: then none.
    async fn write(&self, egress: &Egress, objects: Objects) -> Result<(), Failure> {
        let Objects { service, disruption_budget, deployment_to_apply, .. } = objects;
        let namespace = egress.namespace().unwrap_or_default();
        let live = Live {
            deployment: self.claim(egress, &self.stores.deployments).await?,
            service: self.claim(egress, &self.stores.services).await?,
            budget: self.budget(egress, disruption_budget.is_some()).await?,
        };
        let account = self.stores.accounts.get(&ObjectRef::new(EGRESS_PROGRAM).within(&namespace));
        let desired = json!(service_account(&namespace));
        let accounts: Api<ServiceAccount> = self.api(egress);
        self.writer.apply(&accounts, account.as_deref(), desired, true).await?;
        let mut live_service = live.service;
        if let Some(patch) = live_service.as_ref().and_then(|live| take_back_ports(live, &service)) {
            let name = egress.name_any();
            live_service = Some(self.writer.merge(&self.api::<Service>(egress), &name, patch).await?);
        }
        self.apply(egress, live_service, json!(service)).await?;
        self.apply(egress, live.deployment, deployment_to_apply).await?;
        match (disruption_budget, live.budget) {
            (Some(budget), live) => self.apply(egress, live, json!(budget)).await,
            (None, Some(budget)) => self.writer.delete(&self.api(egress), &budget).await,
            (None, None) => Ok(()),
        }
    }

    /// The budget of the Egress. Where it asks for none, another's is no concern.
    async fn budget(&self, egress: &Egress, is_wanted: bool) -> Result<Option<PodDisruptionBudget>, Failure> {
        if is_wanted {
            return self.claim(egress, &self.stores.budgets).await;
        }
        let cached = cached(egress, &self.stores.budgets);
        Ok(cached.filter(|budget| is_owner(egress, budget.as_ref())).map(|budget| budget.as_ref().clone()))
    }

    /// The object that has the name of the Egress, if there is one.
    ///
    /// # Errors
    /// It belongs to another owner, or is being deleted.
    async fn claim<K>(&self, egress: &Egress, store: &Store<K>) -> Result<Option<K>, Failure>
    where
        K: Owned,
    {
        let cached = cached(egress, store);
        let name = egress.name_any();
        let live = self.writer.live(&self.api(egress), cached.as_deref(), &name).await?;
        let Some(object) = live else { return Ok(None) };
        let what = format!("{} {name}", K::kind(&()));
        let is_of_earlier = owner(&object).is_some_and(|owner| owner.kind == "Egress" && owner.name == name);
        if !is_owner(egress, &object) && !is_of_earlier {
            let message =
                format!("{what} was not made for this Egress: delete it, or give the Egress another name");
            return Err(Failure::NameTaken(message));
        }
        if !is_owner(egress, &object) || object.meta().deletion_timestamp.is_some() {
            return Err(Failure::Terminating(format!("{what} is being deleted")));
        }
        Ok(Some(object))
    }

    async fn apply<K: Owned>(
        &self,
        egress: &Egress,
        live: Option<K>,
        desired: serde_json::Value,
    ) -> Result<(), Failure> {
        // Another may have made an object of the same name meanwhile: its fields are not taken.
        let force = live.is_some();
        self.writer.apply::<K>(&self.api(egress), live.as_ref(), desired, force).await
    }

    /// Whether the status is written.
    async fn write_status(
        &self,
        egress: &Egress,
        problem: Option<&Finding>,
        cause: Option<&Cause>,
        said: Vec<EgressSourceAddress>,
    ) -> bool {
        let deployment = cached(egress, &self.stores.deployments);
        let deployment = deployment.as_deref().filter(|deployment| is_owner(egress, *deployment));
        let finding = problem.cloned().unwrap_or_else(|| {
            let finding = Finding::of(egress, deployment);
            cause.map_or(finding.clone(), |cause| finding.because(cause.reason, &cause.message))
        });
        let now = Time(jiff::Timestamp::now());
        let ranges = self.ranges.as_ref().map(|ranges| ranges_for(egress, &ranges.all));
        let Some(status) = status::due(egress, deployment, &finding, ranges.as_deref(), said, now) else {
            return true;
        };
        let name = egress.name_any();
        let patch = json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "Egress", "metadata": { "name": name }, "status": status,
        });
        let written = apply_status(&self.api::<Egress>(egress), &name, MANAGER, &patch).await;
        if let Err(error) = &written {
            tracing::warn!(egress = name, %error, "cannot write the status; retrying");
        }
        written.is_ok()
    }

    fn api<K>(&self, egress: &Egress) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &egress.namespace().unwrap_or_default())
    }
}

/// Kinds of objects that belong to one Egress.
trait Owned:
    Resource<Scope = NamespaceResourceScope, DynamicType = ()>
    + Clone
    + Debug
    + DeserializeOwned
    + Serialize
    + 'static
{
}

impl Owned for Deployment {}
impl Owned for PodDisruptionBudget {}
impl Owned for Service {}

/// The object that has the name of the Egress, from the watch.
fn cached<K>(egress: &Egress, store: &Store<K>) -> Option<Arc<K>>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + 'static,
{
    let namespace = egress.namespace().unwrap_or_default();
    store.get(&ObjectRef::new(&egress.name_any()).within(&namespace))
}

fn is_owner(egress: &Egress, object: &impl Resource<DynamicType = ()>) -> bool {
    owner(object).is_some_and(|owner| Some(&owner.uid) == egress.metadata.uid.as_ref())
}

fn owner(object: &impl Resource<DynamicType = ()>) -> Option<&OwnerReference> {
    let mut owners = object.meta().owner_references.iter().flatten();
    owners.find(|owner| owner.controller == Some(true))
}

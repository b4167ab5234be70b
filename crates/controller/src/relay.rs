//! The managed relay: its objects in a namespace of its own, and where it is in the status of the mesh.
//!
//! Objects are applied whole, every few seconds, so that what was deleted or changed by others is there again: applying the same
//! changes nothing in etcd. They are named one by one in the controller's rights (`deploy/rbac/relay.yaml`), and the namespace
//! admits no pod with privileges.

mod certificates;
mod objects;
mod state;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fairlead_api::conditions::{Finding, condition};
use fairlead_api::names::{
    RELAY_CA_SECRET, RELAY_NAMESPACE, RELAY_PROGRAM, RELAY_REPLICAS_SERVICE, RELAY_TLS_SECRET,
};
use fairlead_api::resources::{ManagedRelay, RelayProvider, WireKubeMesh, WireKubeMeshStatus};
use fairlead_cluster::writes::apply_status;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node, Pod, Secret, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::runtime::reflector::Store;
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use certificates::Certificates;
use state::{Observed, RELAY_READY, State, unavailable};

/// Field manager of the objects, and of what the status says of the relay.
const MANAGER: &str = "fairlead-controller-relay";
/// Interval at which the objects are applied while there is a relay; a change of the mesh is seen at once.
const INTERVAL: Duration = Duration::from_secs(5);
/// Interval at which the removal of the objects is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// Task that keeps the relay current.
pub(crate) struct Reconciler {
    client: Client,
    meshes: Store<WireKubeMesh>,
    /// Name of this replica's pod.
    identity: String,
    /// The image of that pod.
    image: Option<String>,
    /// Whether there is nothing of a relay that is not wanted.
    is_removed: bool,
}

/// A relay that is wanted.
struct Wanted {
    mesh: Arc<WireKubeMesh>,
    managed: ManagedRelay,
}

impl Reconciler {
    pub(crate) fn new(client: Client, meshes: Store<WireKubeMesh>, identity: String) -> Self {
        Self { client, meshes, identity, image: None, is_removed: false }
    }

    /// Runs forever, once the first list of meshes is there.
    pub(crate) async fn run(mut self, mut changed: watch::Receiver<u64>) {
        // Without the list there would seem to be no mesh, and its relay would be removed.
        if changed.wait_for(|generation| *generation > 0).await.is_err() {
            return std::future::pending().await;
        }
        loop {
            let wanted = self.wanted();
            let selected = wanted.as_ref().map(|wanted| wanted.mesh.name_any());
            for mesh in self.meshes.state() {
                if selected.as_ref() != Some(&mesh.name_any()) {
                    self.publish(&mesh, None).await;
                }
            }
            let pause = match &wanted {
                Some(wanted) => {
                    self.is_removed = false;
                    self.keep(wanted).await;
                    INTERVAL
                }
                None => {
                    self.remove_once().await;
                    RETRY_INTERVAL
                }
            };
            let _ = timeout(pause, changed.changed()).await;
            // A burst of changes is one.
            sleep(Duration::from_millis(200)).await;
        }
    }

    /// Relay that the mesh asks for, if it does; of several meshes the first by name counts.
    fn wanted(&self) -> Option<Wanted> {
        let mut meshes = self.meshes.state();
        meshes.sort_by_key(|mesh| mesh.name_any());
        let mesh = meshes.into_iter().next()?;
        let relay = mesh.spec.relay.as_ref().filter(|relay| relay.provider == RelayProvider::Managed)?;
        let managed = relay.managed.clone().unwrap_or_default();
        mesh.metadata.deletion_timestamp.is_none().then_some(Wanted { mesh, managed })
    }

    async fn keep(&mut self, wanted: &Wanted) {
        let present = wanted.mesh.status.clone().unwrap_or_default();
        let (state, bundle) = match self.reconcile(wanted, &present).await {
            Ok((state, bundle)) => (state, Some(bundle)),
            Err(error) => {
                let is_ours = error.downcast_ref::<Refused>();
                let finding = is_ours.map_or_else(|| state::failed(&error), |refused| refused.0.clone());
                // What runs goes on, and nodes use it.
                let state =
                    State { endpoint: present.relay_endpoint, pod_ips: present.relay_pod_ips, finding };
                (state, present.relay_ca_bundle)
            }
        };
        self.publish(&wanted.mesh, Some((state, bundle))).await;
    }

    /// Makes the objects, and says where the relay is and what certifies it.
    async fn reconcile(&mut self, wanted: &Wanted, present: &WireKubeMeshStatus) -> Result<(State, String)> {
        let Wanted { mesh, managed } = wanted;
        if let Some(finding) = state::refusal(managed) {
            return Err(Refused(finding).into());
        }
        let image = self.image(managed).await?;
        let certificates = self.certificates(mesh).await?;
        let service = self.apply(RELAY_PROGRAM, objects::service(mesh, managed)).await?;
        self.apply::<Service>(RELAY_REPLICAS_SERVICE, objects::replicas_service(mesh)).await?;
        self.apply::<PodDisruptionBudget>(RELAY_PROGRAM, objects::disruption_budget(mesh)).await?;
        let deployment = self.apply(RELAY_PROGRAM, objects::deployment(mesh, managed, &image)).await?;
        let pods = self.pods().await?;
        let node = state::serving(&pods).and_then(|pod| pod.spec.as_ref()?.node_name.clone());
        let node = match node {
            Some(name) => Api::<Node>::all(self.client.clone()).get_opt(&name).await?,
            None => None,
        };
        let observed = Observed {
            deployment: Some(deployment),
            service: Some(service),
            pods,
            node,
            endpoint: present.relay_endpoint.clone(),
        };
        Ok((state::state(managed, &observed), STANDARD.encode(certificates.bundle())))
    }

    /// The image of the mesh, else the one that this replica runs.
    async fn image(&mut self, managed: &ManagedRelay) -> Result<String> {
        if let Some(image) = managed.image.as_ref().or(self.image.as_ref()) {
            return Ok(image.clone());
        }
        let own = ListParams::default().fields(&format!("metadata.name={}", self.identity));
        let pods = Api::<Pod>::default_namespaced(self.client.clone()).list(&own).await?;
        let containers = pods.items.into_iter().next().and_then(|pod| Some(pod.spec?.containers));
        self.image = containers.and_then(|containers| containers.into_iter().next()?.image);
        self.image.clone().ok_or_else(|| {
            let message = "the controller does not run in a pod whose image it could take: set spec.relay.managed.image";
            Refused(unavailable("ImageUnknown", message.to_owned())).into()
        })
    }

    /// The Secrets, written when they change.
    async fn certificates(&self, mesh: &WireKubeMesh) -> Result<Certificates> {
        let secrets: Api<Secret> = self.api();
        let authority =
            secrets.get_opt(RELAY_CA_SECRET).await.context("cannot read the relay's authority")?;
        let server =
            secrets.get_opt(RELAY_TLS_SECRET).await.context("cannot read the relay's certificate")?;
        let now = jiff::Timestamp::now();
        let current = Certificates::current(authority.as_ref(), server.as_ref(), now)?;
        for (name, data, present) in [
            (RELAY_CA_SECRET, objects::authority_data(&current), authority),
            (RELAY_TLS_SECRET, objects::server_data(&current), server),
        ] {
            let present = present.unwrap_or_default();
            let mut owners = present.metadata.owner_references.iter().flatten();
            let is_owned = owners.any(|owner| Some(&owner.uid) == mesh.metadata.uid.as_ref());
            if !is_owned || json!(present.data) != json!(data) {
                self.apply::<Secret>(name, objects::secret(mesh, name, &data)).await?;
                tracing::info!(name, "wrote a certificate of the relay");
            }
        }
        Ok(current)
    }

    async fn pods(&self) -> Result<Vec<Pod>> {
        let selector = "app.kubernetes.io/name=fairlead,app.kubernetes.io/component=relay";
        let listed = self.api::<Pod>().list(&ListParams::default().labels(selector)).await;
        Ok(listed.context("cannot list the relay's pods")?.items)
    }

    async fn apply<K>(&self, name: &str, object: Value) -> Result<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        let parameters = PatchParams::apply(MANAGER).force();
        let applied = self.api::<K>().patch(name, &parameters, &Patch::Apply(object)).await;
        applied.with_context(|| format!("cannot apply {} {RELAY_NAMESPACE}/{name}", K::kind(&())))
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), RELAY_NAMESPACE)
    }

    /// Deletes what there is, until it is gone: the owner may still be there, or have gone while no controller ran.
    async fn remove_once(&mut self) {
        if self.is_removed {
            return;
        }
        match self.remove().await {
            Ok(()) => self.is_removed = true,
            // Without rights there was never a relay.
            Err(kube::Error::Api(status)) if status.code == 403 => self.is_removed = true,
            Err(error) => tracing::warn!(%error, "cannot remove the managed relay; retrying"),
        }
    }

    async fn remove(&self) -> kube::Result<()> {
        delete(&self.api::<Deployment>(), RELAY_PROGRAM).await?;
        delete(&self.api::<PodDisruptionBudget>(), RELAY_PROGRAM).await?;
        delete(&self.api::<Service>(), RELAY_REPLICAS_SERVICE).await?;
        delete(&self.api::<Service>(), RELAY_PROGRAM).await?;
        delete(&self.api::<Secret>(), RELAY_TLS_SECRET).await?;
        delete(&self.api::<Secret>(), RELAY_CA_SECRET).await
    }

    /// Writes what the status of a mesh says of the relay; `None` where there is none.
    async fn publish(&self, mesh: &WireKubeMesh, found: Option<(State, Option<String>)>) {
        let present = mesh.status.clone().unwrap_or_default();
        let Some(status) = status(&present, found, mesh.metadata.generation, jiff::Timestamp::now()) else {
            return;
        };
        let name = mesh.name_any();
        let patch = json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh", "metadata": { "name": name }, "status": status,
        });
        let api: Api<WireKubeMesh> = Api::all(self.client.clone());
        if let Err(error) = apply_status(&api, &name, MANAGER, &patch).await {
            tracing::warn!(mesh = name, %error, "cannot write the status; retrying");
        }
    }
}

/// The controller does not do what the mesh asks for; why, for the condition.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.message)]
struct Refused(Finding<'static>);

/// Patch of the status of the mesh; `None` if the status needs none. Pure.
fn status(
    present: &WireKubeMeshStatus,
    found: Option<(State, Option<String>)>,
    generation: Option<i64>,
    now: jiff::Timestamp,
) -> Option<Value> {
    let Some((State { endpoint, pod_ips, finding }, bundle)) = found else {
        let has_none = present.relay_endpoint.is_none()
            && present.relay_ca_bundle.is_none()
            && present.relay_pod_ips.is_empty()
            && present.conditions.iter().all(|condition| condition.type_ != RELAY_READY);
        return (!has_none).then(|| json!({}));
    };
    let condition = condition(&present.conditions, finding, generation, Time(now));
    let is_there = (&present.relay_endpoint, &present.relay_ca_bundle) == (&endpoint, &bundle)
        && present.relay_pod_ips == pod_ips
        && present.conditions.contains(&condition);
    let status = WireKubeMeshStatus {
        relay_endpoint: endpoint,
        relay_ca_bundle: bundle,
        relay_pod_ips: pod_ips,
        conditions: vec![condition],
        ..WireKubeMeshStatus::default()
    };
    (!is_there).then(|| json!(status))
}

async fn delete<K>(api: &Api<K>, name: &str) -> kube::Result<()>
where
    K: Clone + Debug + DeserializeOwned,
{
    match api.delete(name, &DeleteParams::background()).await {
        Ok(_) => {
            tracing::info!(name, "deleted an object of the managed relay");
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error),
    }
}

//! `fairlead uninstall`: removes Fairlead from a cluster.
//!
//! Pools and blocks carry finalizers that only Fairlead's programs remove, and only the programs know what is in the kernels of
//! nodes: everything at once, as by `kubectl delete -k deploy`, would never end. The steps, each of which may be repeated:
//!
//! 1. Controllers end, so that nothing is granted any more.
//! 2. The node programs end, and a DaemonSet made of theirs ([`daemon_set`]) runs `fairlead cleanup` on every node.
//! 3. Finalizers are removed, and the CRDs deleted with all their objects.
//! 4. What else `deploy/` installs is deleted ([`objects`]).

mod daemon_set;
mod objects;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use fairlead_api::names::{
    COIL_FINALIZER, CONTROLLER_PROGRAM, EGRESS_CONTROLLER_PROGRAM, NODE_PROGRAM, SYSTEM_NAMESPACE,
};
use fairlead_api::resources::{AddressBlock, AddressPool, WireKubeMesh, definitions};
use fairlead_cluster::writes::{is_stale, remove_finalizer};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::api::{list, list_if_served, programs};
use crate::arguments::uninstall::UninstallArguments;
use crate::query::current_thread;

/// Interval at which the state of a step is read.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Removes Fairlead from the cluster, or says what would be removed.
///
/// # Errors
/// The API server refuses or does not answer, or a step is not done in time.
pub fn run(arguments: &UninstallArguments) -> anyhow::Result<ExitCode> {
    current_thread(async {
        let uninstall = Uninstall {
            client: arguments.api.client().await?,
            timeout: arguments.timeout,
            skip_unreachable: arguments.skip_unreachable_nodes,
        };
        if !arguments.yes {
            return uninstall.explain().await;
        }
        uninstall.run().await?;
        tracing::info!("Fairlead is uninstalled");
        Ok(ExitCode::SUCCESS)
    })
}

struct Uninstall {
    client: Client,
    timeout: Duration,
    skip_unreachable: bool,
}

impl Uninstall {
    /// Without `--yes` nothing is changed.
    async fn explain(&self) -> anyhow::Result<ExitCode> {
        let pools = self.list_if_served::<AddressPool>("AddressPools").await?.len();
        let blocks = self.list_if_served::<AddressBlock>("AddressBlocks").await?.len();
        bail!(
            "this would remove Fairlead from every node and delete {pools} pools with {blocks} blocks; pods with addresses of \
             these pools lose their network until another network is installed and they are created again. Repeat with --yes"
        )
    }

    async fn run(&self) -> anyhow::Result<()> {
        let mesh_devices = self.mesh_devices().await?;
        let cleans = self.prepare_cleanup(&mesh_devices).await?;
        objects::delete_programs(&self.client).await?;
        self.wait_for_nodes("the programs to end", || self.programs_left()).await?;
        if cleans {
            self.start_cleanup().await?;
            self.wait_for_nodes("every node to be cleaned up", || self.nodes_left()).await?;
        }
        self.delete_definitions().await?;
        objects::delete_rest(&self.client).await
    }

    async fn mesh_devices(&self) -> anyhow::Result<Vec<String>> {
        let meshes = self.list_if_served::<WireKubeMesh>("WireKubeMeshes").await?;
        Ok(meshes.into_iter().map(|mesh| mesh.spec.interface_name).collect())
    }

    /// Creates the DaemonSet that cleans nodes up, which runs nowhere yet: it keeps image and settings of the node program,
    /// also if this command is interrupted. Returns whether there is one.
    async fn prepare_cleanup(&self, mesh_devices: &[String]) -> anyhow::Result<bool> {
        let daemon_sets = self.daemon_sets();
        let Some(program) =
            daemon_sets.get_opt(NODE_PROGRAM).await.context("cannot read the DaemonSet coild")?
        else {
            let prepared =
                daemon_sets.get_opt(daemon_set::CLEANUP).await.context("cannot read a DaemonSet")?;
            return Ok(prepared.is_some());
        };
        let cleanup =
            daemon_set::cleanup(&program, mesh_devices).context("the DaemonSet coild is not Fairlead's")?;
        match daemon_sets.create(&PostParams::default(), &cleanup).await {
            Ok(_) => tracing::info!(name = daemon_set::CLEANUP, "created the DaemonSet that cleans nodes up"),
            Err(kube::Error::Api(status)) if status.is_already_exists() => {}
            Err(error) => return Err(error).context("cannot create the DaemonSet that cleans nodes up"),
        }
        Ok(true)
    }

    async fn start_cleanup(&self) -> anyhow::Result<()> {
        let patch = Patch::Merge(daemon_set::release());
        let patched = self.daemon_sets().patch(daemon_set::CLEANUP, &PatchParams::default(), &patch).await;
        patched.map(drop).context("cannot start the DaemonSet that cleans nodes up")
    }

    /// Programs that still run, each with the reason.
    async fn programs_left(&self) -> anyhow::Result<Vec<String>> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), SYSTEM_NAMESPACE);
        let labels = programs(&[NODE_PROGRAM, CONTROLLER_PROGRAM, EGRESS_CONTROLLER_PROGRAM]);
        let pods = list(&pods, "the programs' pods", ListParams::default().labels(&labels)).await?;
        let node = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
        Ok(pods.iter().map(|pod| format!("{} on node {}", pod.name_any(), node(pod))).collect())
    }

    /// Nodes that are not cleaned up yet, each with the reason.
    async fn nodes_left(&self) -> anyhow::Result<Vec<String>> {
        let set = self.daemon_sets().get(daemon_set::CLEANUP).await.context("cannot read a DaemonSet")?;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), SYSTEM_NAMESPACE);
        let pods = list(&pods, "pods", ListParams::default().labels(daemon_set::SELECTOR)).await?;
        Ok(daemon_set::left(&set, &pods))
    }

    /// Deletes the definitions with all their objects.
    async fn delete_definitions(&self) -> anyhow::Result<()> {
        let definitions_api: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        for definition in definitions() {
            let name = definition.name_any();
            match definitions_api.delete(&name, &DeleteParams::default()).await {
                Ok(_) => tracing::info!(name, "deleted the CustomResourceDefinition"),
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                Err(error) => return Err(error).with_context(|| format!("cannot delete {name}")),
            }
        }
        const WHAT: &str = "custom resources to be deleted";
        let left = self.wait(WHAT, || self.definitions_left()).await?;
        self.complete(WHAT, &left, "repeat the command once they can be deleted")
    }

    /// Objects that were created a moment ago have finalizers, too: each time, those that are there are removed.
    async fn definitions_left(&self) -> anyhow::Result<Vec<String>> {
        self.remove_finalizers::<AddressPool>("AddressPools").await?;
        self.remove_finalizers::<AddressBlock>("AddressBlocks").await?;
        let present: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        let mut left = Vec::new();
        for definition in definitions() {
            let name = definition.name_any();
            let still =
                present.get_metadata_opt(&name).await.with_context(|| format!("cannot read {name}"))?;
            left.extend(still.map(|_| format!("{name}, perhaps because of finalizers of other programs")));
        }
        Ok(left)
    }

    async fn remove_finalizers<K>(&self, what: &str) -> anyhow::Result<()>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        let api: Api<K> = Api::all(self.client.clone());
        for object in self.list_if_served::<K>(what).await? {
            if object.finalizers().iter().any(|finalizer| finalizer == COIL_FINALIZER) {
                match remove_finalizer(&api, &object, COIL_FINALIZER).await {
                    Err(error) if !is_stale(&error) => {
                        return Err(error).with_context(|| {
                            format!("cannot remove the finalizer of {}", object.name_any())
                        });
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    async fn list_if_served<K>(&self, what: &str) -> anyhow::Result<Vec<K>>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        list_if_served(&Api::all(self.client.clone()), what).await
    }

    fn daemon_sets(&self) -> Api<DaemonSet> {
        Api::namespaced(self.client.clone(), SYSTEM_NAMESPACE)
    }

    /// Waits for what every node does. Those that do not can be left out.
    async fn wait_for_nodes<F>(&self, what: &str, left: impl Fn() -> F) -> anyhow::Result<()>
    where
        F: Future<Output = anyhow::Result<Vec<String>>>,
    {
        let left = self.wait(what, left).await?;
        if !left.is_empty() && self.skip_unreachable {
            let left = left.join("\n  ");
            tracing::warn!("not finished, run `fairlead cleanup` on these nodes:\n  {left}");
            return Ok(());
        }
        self.complete(
            what,
            &left,
            "repeat the command once the nodes are back, or delete the Nodes that are gone; --skip-unreachable-nodes continues \
             without them",
        )
    }

    fn complete(&self, what: &str, left: &[String], advice: &str) -> anyhow::Result<()> {
        let seconds = self.timeout.as_secs();
        ensure!(left.is_empty(), "waited {seconds} s for {what}:\n  {}\n{advice}", left.join("\n  "));
        Ok(())
    }

    /// Waits until nothing is left, and returns what is after the time-out. Failures to read are retried: the API server may
    /// restart meanwhile.
    async fn wait<F>(&self, what: &str, left: impl Fn() -> F) -> anyhow::Result<Vec<String>>
    where
        F: Future<Output = anyhow::Result<Vec<String>>>,
    {
        let start = Instant::now();
        let mut reported = usize::MAX;
        loop {
            let left = left().await;
            match &left {
                Ok(left) if left.is_empty() => return Ok(Vec::new()),
                Ok(left) if left.len() != reported => {
                    reported = left.len();
                    tracing::info!(left = reported, "waiting for {what}");
                }
                Ok(_) => {}
                Err(error) => tracing::warn!("{error:#}; retrying"),
            }
            if start.elapsed() >= self.timeout {
                return left;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

//! The objects of a large cluster, made through the API.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use fairlead_api::resources::{AddressBlock, AddressPool};
use fairlead_cluster::caches::{self, Cache};
use fairlead_cluster::subsystem::{Subsystem, Supervisor};
use fairlead_demo::World;
use fairlead_pods::ipam::own_blocks::OwnBlocks;
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::serde::de::DeserializeOwned;
use kube::api::{ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::ClusterResourceScope;
use kube::runtime::watcher::{Event, watcher};
use kube::{Api, Client, Config, Resource};
use serde::Serialize;
use serde_json::{Value, json};

use super::Size;

/// Pool of the simulated nodes.
pub(super) const POOL: &str = "simulated";
/// Namespace of the Pod objects.
const NAMESPACE: &str = "bench-pods";
/// Requests that are under way together.
const AT_ONCE: usize = 32;

/// A client, and what the simulated nodes share.
pub(super) struct Cluster {
    pub(super) client: Client,
    /// Names of the simulated nodes.
    pub(super) names: Vec<String>,
    pub(super) nodes: Cache<Node>,
    pub(super) pools: Cache<AddressPool>,
    /// Blocks of each simulated node, by its name, from one watch for all.
    pub(super) blocks: BTreeMap<String, OwnBlocks>,
    _watches: Supervisor,
}

impl Cluster {
    /// Makes pools, Nodes and Pods.
    pub(super) async fn create(world: &World, size: Size) -> Result<Self> {
        world.plane.apply(&pools())?;
        let client = client(world.plane.kubeconfig()).await?;
        let names: Vec<String> = (0..size.nodes).map(|number| format!("node-{number}")).collect();
        let nodes = Api::<Node>::all(client.clone());
        create(&nodes, names.iter().map(|name| node(name))).await.context("cannot create Nodes")?;
        let real = world.nodes.first().context("the cluster has no real node")?;
        let hosts =
            names.iter().map(String::as_str).cycle().take(size.objects.saturating_sub(size.real_pods));
        let hosts = std::iter::repeat_n(real.name.as_str(), size.real_pods).chain(hosts);
        let pods = hosts.enumerate().map(|(number, host)| pod(number, host));
        let objects = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
        create(&objects, pods).await.context("cannot create Pods")?;
        let mut supervisor = Supervisor::default();
        let watches = supervisor.subsystem("watches");
        let (all_blocks, blocks) = watch_blocks(watches, &client, &names);
        let cluster = Self {
            nodes: watch(watches, "Nodes", &client),
            pools: watch(watches, "AddressPools", &client),
            blocks,
            client,
            names,
            _watches: supervisor,
        };
        cluster.nodes.store.wait_until_ready().await.context("the watch of Nodes ended")?;
        cluster.pools.store.wait_until_ready().await.context("the watch of AddressPools ended")?;
        all_blocks.store.wait_until_ready().await.context("the watch of AddressBlocks ended")?;
        Ok(cluster)
    }

    /// Requests that the API server has answered so far, of all clients; watches count when they end.
    pub(super) async fn requests_served(&self) -> Result<f64> {
        let request = kube::core::Request::new("");
        let request = request.get("metrics", &Default::default()).context("cannot ask for metrics")?;
        let text = self.client.request_text(request).await.context("cannot read the API server's metrics")?;
        Ok(text.lines().filter_map(served).sum())
    }

    /// Blocks of the simulated nodes.
    pub(super) async fn granted(&self) -> Result<usize> {
        let blocks: Api<AddressBlock> = Api::all(self.client.clone());
        let of_pool = ListParams::default().labels(&format!("coil.cybozu.com/pool={POOL}"));
        Ok(blocks.list_metadata(&of_pool).await.context("cannot list AddressBlocks")?.items.len())
    }
}

/// The count in a line of `apiserver_request_total`, leaving out what the election writes.
fn served(line: &str) -> Option<f64> {
    let (labels, count) = line.strip_prefix("apiserver_request_total{")?.rsplit_once("} ")?;
    (!labels.contains("resource=\"leases\"")).then(|| count.parse().ok()).flatten()
}

fn watch<K>(watches: &mut Subsystem, what: &'static str, client: &Client) -> Cache<K>
where
    K: Resource<DynamicType = (), Scope = ClusterResourceScope>
        + Clone
        + std::fmt::Debug
        + DeserializeOwned
        + Send
        + Sync
        + 'static,
{
    caches::start(watches, what, watcher(Api::all(client.clone()), caches::config()))
}

/// Blocks of each node, which every node program follows in a watch of its own.
fn watch_blocks(
    watches: &mut Subsystem,
    client: &Client,
    nodes: &[String],
) -> (Cache<AddressBlock>, BTreeMap<String, OwnBlocks>) {
    let (mut followers, mut blocks) = (BTreeMap::new(), BTreeMap::new());
    for node in nodes {
        let (follower, of_node) = OwnBlocks::of(node);
        followers.insert(node.clone(), follower);
        blocks.insert(node.clone(), of_node);
    }
    let events = watcher(Api::<AddressBlock>::all(client.clone()), caches::config());
    let events = events.inspect(move |event| match event {
        Ok(event @ (Event::Apply(block) | Event::Delete(block) | Event::InitApply(block))) => {
            if let Some(follower) = block.node().and_then(|node| followers.get_mut(node)) {
                follower.observe(event);
            }
        }
        Ok(event) => followers.values_mut().for_each(|follower| follower.observe(event)),
        Err(_) => {}
    });
    (caches::start(watches, "AddressBlocks", events), blocks)
}

pub(crate) async fn client(kubeconfig: &Path) -> Result<Client> {
    // One provider for every TLS connection of the process; a second installation is harmless.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let kubeconfig =
        Kubeconfig::read_from(kubeconfig).context("cannot read the administrator's kubeconfig")?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

pub(crate) async fn create<K>(api: &Api<K>, objects: impl Iterator<Item = Value>) -> Result<()>
where
    K: Resource + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    let one = |object: Value| async move {
        let object: K = serde_json::from_value(object)?;
        api.create(&PostParams::default(), &object).await?;
        anyhow::Ok(())
    };
    stream::iter(objects).map(one).buffer_unordered(AT_ONCE).try_collect().await
}

/// With the labels that every kubelet sets: nodes without any would look smaller than they are.
pub(crate) fn node(name: &str) -> Value {
    let labels = json!({
        "kubernetes.io/arch": "amd64", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux",
        "topology.kubernetes.io/region": "bench", "topology.kubernetes.io/zone": "bench-a",
    });
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
}

fn pod(number: usize, node: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("pod-{number}"), "labels": {"app": format!("app-{}", number % 100)}},
        "spec": {
            "nodeName": node, "automountServiceAccountToken": false,
            "containers": [{"name": "main", "image": "example.invalid/none"}],
        },
    })
}

fn pools() -> String {
    format!(
        "apiVersion: coil.cybozu.com/v2\nkind: AddressPool\nmetadata: {{name: {POOL}}}\n\
         spec: {{blockSizeBits: 5, subnets: [{{ipv4: 10.128.0.0/12, ipv6: \"fd02:fa1e:51::/108\"}}]}}\n\
         ---\napiVersion: coil.cybozu.com/v2\nkind: AddressPool\nmetadata: {{name: default}}\n\
         spec: {{blockSizeBits: 5, subnets: [{{ipv4: 10.64.0.0/16, ipv6: \"fd02:fa1e::/112\"}}]}}\n\
         ---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: {NAMESPACE}}}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_without_those_of_the_election() {
        let line =
            |resource: &str| format!("apiserver_request_total{{code=\"200\",resource=\"{resource}\"}} 12");
        assert_eq!(served(&line("nodes")), Some(12.0));
        assert_eq!(served(&line("leases")), None);
        assert_eq!(served("apiserver_request_duration_seconds_count{} 3"), None);
        assert_eq!(served("# HELP apiserver_request_total Counter"), None);
    }
}

//! What the API server says of Egresses, their Services and the ranges of the cluster.
//!
//! Nothing of it is watched on a node that has no client pod: the watches begin with the first one.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fairlead_api::resources::{AddressPool, Egress};
use fairlead_cluster::caches::{self, Cache, Refusal};
use fairlead_cluster::lean;
use fairlead_cluster::subsystem::Subsystem;
use fairlead_egress::EgressName;
use fairlead_egress::client::SourcePort;
use fairlead_egress::objects::selector_of_all;
use futures::{Stream, StreamExt as _, stream};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::api::ObjectMeta;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::plan::{Cluster, KnownEgress, KnownService};
use crate::members::cluster_addresses::service_prefixes;

/// How long an ADD waits for first lists.
const FIRST_LISTS_TIMEOUT: Duration = Duration::from_secs(2);
/// How often it checks whether they have arrived.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The Service of an Egress; other fields are not even parsed.
#[derive(Resource, Serialize, Deserialize, Clone, Debug, Default)]
#[resource(inherit = Service)]
pub(crate) struct SlimService {
    #[serde(default)]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: ServiceFields,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default, rename_all = "camelCase")]
struct ServiceFields {
    #[serde(rename = "clusterIPs")]
    cluster_ips: Vec<String>,
    ports: Vec<Port>,
    session_affinity: String,
    session_affinity_config: Option<AffinityConfig>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct Port {
    port: u16,
    protocol: String,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct AffinityConfig {
    #[serde(rename = "clientIP")]
    client_ip: Option<ClientIp>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default, rename_all = "camelCase")]
struct ClientIp {
    timeout_seconds: Option<u64>,
}

/// A Node: where it is, and its pods are; other fields are not even parsed.
#[derive(Resource, Serialize, Deserialize, Clone, Debug, Default)]
#[resource(inherit = Node)]
pub(crate) struct SlimNode {
    #[serde(default)]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: NodeFields,
    #[serde(default)]
    status: NodeState,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct NodeFields {
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Vec<String>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct NodeState {
    addresses: Vec<NodeAddress>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct NodeAddress {
    address: String,
}

impl SlimService {
    fn known(&self) -> KnownService {
        let spec = &self.spec;
        let udp = spec.ports.iter().find(|port| port.protocol == "UDP");
        let by_client = spec.session_affinity == "ClientIP";
        let timeout =
            spec.session_affinity_config.as_ref().and_then(|it| it.client_ip.as_ref()?.timeout_seconds);
        KnownService {
            // "None" of a headless Service is no address.
            cluster_ips: spec.cluster_ips.iter().filter_map(|text| text.parse::<IpAddr>().ok()).collect(),
            port: udp.map_or(fairlead_api::names::FOU_PORT, |port| port.port),
            by_client,
            idle_timeout: timeout.map(Duration::from_secs),
        }
    }
}

impl SlimNode {
    fn ranges(&self) -> impl Iterator<Item = IpNet> + '_ {
        let addresses = self.status.addresses.iter().filter_map(|it| it.address.parse::<IpAddr>().ok());
        let pods = self.spec.pod_cidrs.iter().filter_map(|text| text.parse::<IpNet>().ok());
        addresses.map(IpNet::from).chain(pods)
    }
}

fn known_egress(egress: &Egress) -> KnownEgress {
    let spec = &egress.spec;
    KnownEgress {
        destinations: fairlead_egress::destinations::prefixes(&spec.destinations)
            .map_err(|error| error.to_string()),
        source_port: if spec.fou_source_port_auto { SourcePort::Auto } else { SourcePort::Fixed },
        allowed_namespaces: spec.allowed_namespaces.as_ref().map(|all| all.iter().cloned().collect()),
        service: None,
    }
}

/// What is watched for client pods.
pub(crate) struct Inputs {
    pub(super) egresses: Cache<Egress>,
    services: Cache<SlimService>,
    nodes: Cache<SlimNode>,
    pools: Arc<Cache<AddressPool>>,
    service_ranges: Arc<Cache<ServiceCIDR>>,
    /// Whether the watches were asked for.
    wanted: watch::Sender<bool>,
    /// The last result, with the generations of what it was made of.
    cluster: Mutex<Option<(Generations, Arc<Cluster>)>>,
}

type Generations = [u64; 5];

impl Inputs {
    /// Prepares the watches; the first client pod starts them.
    pub(crate) fn start(
        subsystem: &mut Subsystem,
        client: &Client,
        pools: Arc<Cache<AddressPool>>,
        service_ranges: Arc<Cache<ServiceCIDR>>,
    ) -> Self {
        let (wanted, gate) = watch::channel(false);
        let egresses = watcher(Api::<Egress>::all(client.clone()), caches::config()).modify(|egress| {
            lean::identified(egress);
            (egress.spec.template, egress.status) = (None, None);
        });
        let of_egresses = caches::config().labels(&selector_of_all());
        let services = watcher(Api::<SlimService>::all(client.clone()), of_egresses).modify(lean::identified);
        let nodes = watcher(Api::<SlimNode>::all(client.clone()), caches::config()).modify(lean::identified);
        Self {
            egresses: caches::start(subsystem, "Egresses", once_wanted(gate.clone(), egresses)),
            services: caches::start(subsystem, "Services of Egresses", once_wanted(gate.clone(), services)),
            nodes: caches::start(subsystem, "ranges of Nodes", once_wanted(gate, nodes)),
            pools,
            service_ranges,
            wanted,
            cluster: Mutex::default(),
        }
    }

    /// With caches of tests.
    #[cfg(test)]
    pub(super) fn of(
        (egresses, services, nodes): (Cache<Egress>, Cache<SlimService>, Cache<SlimNode>),
        pools: Arc<Cache<AddressPool>>,
        service_ranges: Arc<Cache<ServiceCIDR>>,
    ) -> Self {
        let (wanted, cluster) = (watch::Sender::new(true), Mutex::default());
        Self { egresses, services, nodes, pools, service_ranges, wanted, cluster }
    }

    /// There is a client pod.
    pub(crate) fn want(&self) {
        self.wanted.send_if_modified(|wanted| !std::mem::replace(wanted, true));
    }

    /// Whether everything is known that a plan needs. An API server that has no ServiceCIDRs or AddressPools shows none.
    pub(crate) fn is_ready(&self) -> bool {
        self.egresses.is_ready()
            && self.services.is_ready()
            && self.nodes.is_ready()
            && self.pools.has_answer()
            && self.service_ranges.has_answer()
    }

    /// Why the API server shows no Egresses, Services or Nodes.
    pub(crate) fn refusal(&self) -> Option<Refusal> {
        self.egresses.refusal().or_else(|| self.services.refusal()).or_else(|| self.nodes.refusal())
    }

    /// Waits until [`Self::is_ready`], up to 2 s, and says whether it is.
    pub(crate) async fn ready(&self) -> bool {
        self.want();
        let poll = async {
            while !self.is_ready() {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        self.is_ready() || tokio::time::timeout(FIRST_LISTS_TIMEOUT, poll).await.is_ok()
    }

    fn generations(&self) -> Generations {
        [
            self.egresses.generation(),
            self.services.generation(),
            self.nodes.generation(),
            self.pools.generation(),
            self.service_ranges.generation(),
        ]
    }

    /// What is known now.
    pub(crate) fn cluster(&self) -> Arc<Cluster> {
        let generations = self.generations();
        let mut last = self.cluster.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, cluster)) = last.as_ref()
            && *of == generations
        {
            return Arc::clone(cluster);
        }
        let read = self.read();
        // Most changes of Nodes are none of their ranges.
        let same = last.as_ref().map(|(_, cluster)| cluster).filter(|cluster| ***cluster == read).cloned();
        let cluster = same.unwrap_or_else(|| Arc::new(read));
        *last = Some((generations, Arc::clone(&cluster)));
        cluster
    }

    fn read(&self) -> Cluster {
        let mut egresses: BTreeMap<EgressName, KnownEgress> = BTreeMap::new();
        for egress in self.egresses.store.state() {
            egresses.insert(name_of(&egress.metadata), known_egress(&egress));
        }
        for service in self.services.store.state() {
            if let Some(egress) = egresses.get_mut(&name_of(&service.metadata)) {
                egress.service = Some(service.known());
            }
        }
        let nodes = self.nodes.store.state();
        // Blocks lie in pools: a pool is not deleted before its blocks.
        let pools = self.pools.store.state();
        let subnets = pools.iter().flat_map(|pool| pool.spec.parse_subnets().unwrap_or_default());
        let subnets: Vec<IpNet> = subnets.flat_map(|nets| nets.iter()).collect();
        let services = service_prefixes(&self.service_ranges);
        let nodes: Vec<IpNet> = nodes.iter().flat_map(|node| node.ranges()).collect();
        let in_cluster = subnets.into_iter().chain(services).chain(nodes).collect();
        Cluster { egresses, in_cluster }
    }

    /// Resolves at the next change of any of it. Cancel safe.
    pub(crate) fn subscribe(&self) -> InputChanges {
        InputChanges([
            self.egresses.subscribe(),
            self.services.subscribe(),
            self.nodes.subscribe(),
            self.pools.subscribe(),
            self.service_ranges.subscribe(),
        ])
    }
}

/// Changes of [`Inputs`].
pub(crate) struct InputChanges([watch::Receiver<u64>; 5]);

impl InputChanges {
    /// Waits for the next one.
    pub(crate) async fn changed(&mut self) {
        let [egresses, services, nodes, pools, ranges] = &mut self.0;
        tokio::select! {
            _ = egresses.changed() => {}
            _ = services.changed() => {}
            _ = nodes.changed() => {}
            _ = pools.changed() => {}
            _ = ranges.changed() => {}
        }
    }
}

fn name_of(metadata: &ObjectMeta) -> EgressName {
    EgressName {
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
    }
}

/// The events, once the gate is open.
fn once_wanted<T>(
    mut gate: watch::Receiver<bool>,
    events: impl Stream<Item = T> + Send + 'static,
) -> impl Stream<Item = T> + Send + 'static
where
    T: Send + 'static,
{
    let opened = async move {
        // Without a sender the program is ending.
        if gate.wait_for(|open| *open).await.is_err() {
            futures::future::pending::<()>().await;
        }
        events
    };
    stream::once(opened).flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn of_a_service_only_what_a_client_needs_is_read() {
        let service: SlimService = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Service", "metadata": { "name": "nat", "namespace": "internet" },
            "spec": {
                "clusterIPs": ["10.68.0.1", "fd04::1"], "sessionAffinity": "ClientIP", "type": "ClusterIP",
                "ports": [{ "port": 80, "protocol": "TCP" }, { "port": 5556, "protocol": "UDP", "targetPort": 1 }],
                "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": 300 } },
            },
            "status": { "loadBalancer": {} },
        }))
        .unwrap();
        let expected = KnownService {
            cluster_ips: ["10.68.0.1", "fd04::1"].map(|text| text.parse().unwrap()).into_iter().collect(),
            port: 5556,
            by_client: true,
            idle_timeout: Some(Duration::from_secs(300)),
        };
        assert_eq!(service.known(), expected);
        let headless = json!({ "metadata": { "name": "nat" }, "spec": { "clusterIPs": ["None"] } });
        let headless: SlimService = serde_json::from_value(headless).unwrap();
        let known = headless.known();
        assert_eq!((known.cluster_ips.is_empty(), known.port, known.by_client), (true, 5555, false));
    }

    #[test]
    fn a_node_has_addresses_and_networks_of_pods() {
        let node: SlimNode = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n" },
            "spec": { "podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24", "?"] },
            "status": { "addresses": [
                { "type": "InternalIP", "address": "192.0.2.1" }, { "type": "Hostname", "address": "n" },
            ] },
        }))
        .unwrap();
        let ranges: Vec<String> = node.ranges().map(|range| range.to_string()).collect();
        assert_eq!(ranges, ["192.0.2.1/32", "10.244.1.0/24"]);
    }

    #[tokio::test]
    async fn nothing_is_watched_before_it_is_wanted() {
        let (open, gate) = watch::channel(false);
        let mut events = Box::pin(once_wanted(gate, stream::iter([1, 2])));
        assert!(futures::poll!(events.next()).is_pending());
        open.send_replace(true);
        assert_eq!(events.collect::<Vec<_>>().await, [1, 2]);
    }
}

//! Watches of a gateway: its Egress, and the addresses inside of the cluster. Of each object only what is read is kept.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::net::IpAddr;
use std::time::Duration;

use fairlead_api::resources::{AddressBlock, AddressPool, Egress};
use fairlead_cluster::caches::{self, Cache, Refusal};
use fairlead_cluster::lean;
use fairlead_cluster::subsystem::{Readiness, Subsystem};
use fairlead_egress::EgressName;
use fairlead_egress::destinations::Destinations;
use fairlead_source_addresses::leases;
use futures::future::select_all;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::runtime::reflector::Lookup;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;

use crate::facts::{self, Facts};
use fairlead_egress::options::{InvalidTarget, Options};

/// Time in which changes are gathered before they are read.
const DEBOUNCE: Duration = Duration::from_millis(50);

/// The prefixes of an object of kind `K`.
#[derive(Debug, Clone)]
struct Slim<K> {
    name: String,
    /// The Node whose pods have the prefixes in `pods`.
    node: Option<String>,
    pods: Vec<IpNet>,
    /// Other addresses inside of the cluster.
    others: Vec<IpNet>,
    kind: PhantomData<K>,
}

impl<K: Resource<DynamicType = ()>> Slim<K> {
    fn new(object: &K, node: Option<String>, pods: Vec<IpNet>, others: Vec<IpNet>) -> Self {
        Self { name: object.meta().name.clone().unwrap_or_default(), node, pods, others, kind: PhantomData }
    }
}

impl<K: Resource<DynamicType = ()>> Lookup for Slim<K> {
    type DynamicType = ();

    fn kind((): &()) -> Cow<'_, str> {
        K::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        K::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        K::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        K::plural(&())
    }

    fn name(&self) -> Option<Cow<'_, str>> {
        Some(Cow::Borrowed(&self.name))
    }

    fn namespace(&self) -> Option<Cow<'_, str>> {
        None
    }

    fn resource_version(&self) -> Option<Cow<'_, str>> {
        None
    }

    fn uid(&self) -> Option<Cow<'_, str>> {
        None
    }
}

impl From<Node> for Slim<Node> {
    fn from(node: Node) -> Self {
        let spec = node.spec.as_ref();
        let pods = spec.and_then(|spec| spec.pod_cidrs.clone()).unwrap_or_default();
        let first = spec.and_then(|spec| spec.pod_cidr.clone());
        let addresses =
            node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
        // Host names are among them.
        let others =
            addresses.iter().filter_map(|it| it.address.parse::<IpAddr>().ok()).map(IpNet::from).collect();
        let pods = pods.iter().chain(&first).filter_map(|text| text.parse().ok()).collect();
        Self::new(&node, node.metadata.name.clone(), pods, others)
    }
}

impl From<AddressBlock> for Slim<AddressBlock> {
    fn from(block: AddressBlock) -> Self {
        let pods = block.parse().map(|nets| nets.iter().collect()).unwrap_or_default();
        Self::new(&block, block.node().map(str::to_owned), pods, Vec::new())
    }
}

impl From<AddressPool> for Slim<AddressPool> {
    fn from(pool: AddressPool) -> Self {
        // Each subnet by itself: one that does not parse hides no other.
        let subnets = pool.spec.subnets.iter().filter_map(|subnet| subnet.parse().ok());
        let others = subnets.flat_map(|nets| nets.iter()).collect();
        Self::new(&pool, None, Vec::new(), others)
    }
}

impl From<ServiceCIDR> for Slim<ServiceCIDR> {
    fn from(range: ServiceCIDR) -> Self {
        let cidrs = range.spec.as_ref().and_then(|spec| spec.cidrs.as_deref()).unwrap_or_default();
        let others = cidrs.iter().filter_map(|text| text.parse().ok()).collect();
        Self::new(&range, None, Vec::new(), others)
    }
}

/// The caches.
pub(crate) struct Watches {
    name: EgressName,
    egress: Cache<Egress>,
    nodes: Cache<Slim<Node>>,
    blocks: Cache<Slim<AddressBlock>>,
    pools: Cache<Slim<AddressPool>>,
    services: Cache<Slim<ServiceCIDR>>,
}

/// State of the cluster, as far as the gateway needs it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Cluster {
    /// Nodes, prefixes and namespaces that decide who may be a client.
    pub(crate) facts: Facts,
    /// Prefixes, and whether clients may send to them.
    pub(crate) destinations: BTreeMap<IpNet, bool>,
    /// Options of the Egress.
    pub(crate) options: Options,
    /// Targets of the health check that cannot be probed.
    pub(crate) invalid: Vec<InvalidTarget>,
    /// The addresses of each slot of source addresses, if the Egress has some.
    pub(crate) slots: Option<Vec<Vec<IpAddr>>>,
}

impl Watches {
    /// Starts the watches.
    pub(crate) fn start(subsystem: &mut Subsystem, client: &Client, name: &EgressName) -> Self {
        let own = caches::config().fields(&format!("metadata.name={}", name.name));
        let egresses = Api::<Egress>::namespaced(client.clone(), &name.namespace);
        let egresses = watcher(egresses, own).modify(lean::any);
        Self {
            name: name.clone(),
            egress: caches::start(subsystem, "its Egress", egresses),
            nodes: slim(subsystem, "Nodes", client),
            blocks: slim(subsystem, "AddressBlocks", client),
            pools: slim(subsystem, "AddressPools", client),
            services: slim(subsystem, "ServiceCIDRs", client),
        }
    }

    /// Waits for a change of any object, and for those that follow at once.
    pub(crate) async fn changed(&self, seen: &mut u64) {
        while self.generation() == *seen {
            let receivers = [
                self.egress.subscribe(),
                self.nodes.subscribe(),
                self.blocks.subscribe(),
                self.pools.subscribe(),
                self.services.subscribe(),
            ];
            let mut receivers = receivers.map(|mut receiver| {
                receiver.mark_unchanged();
                receiver
            });
            // One that came between the comparison and the subscription.
            if self.generation() != *seen {
                break;
            }
            let changes = receivers.iter_mut().map(|receiver| Box::pin(receiver.changed()));
            if select_all(changes).await.0.is_err() {
                // A cache without its task: the program is ending.
                std::future::pending::<()>().await;
            }
        }
        tokio::time::sleep(DEBOUNCE).await;
        *seen = self.generation();
    }

    fn generation(&self) -> u64 {
        let all = [
            self.egress.generation(),
            self.nodes.generation(),
            self.blocks.generation(),
            self.pools.generation(),
            self.services.generation(),
        ];
        all.iter().fold(0, |sum, generation| sum.wrapping_add(*generation))
    }

    /// State of the cluster now; the error is the reason why it is not known.
    pub(crate) fn read(&self) -> Result<Cluster, String> {
        if let Some(reason) = self.missing() {
            return Err(reason);
        }
        let egresses = self.egress.store.state();
        let Some(egress) = egresses.iter().find(|egress| egress.name_any() == self.name.name) else {
            return Err(format!("EgressMissing: there is no Egress {}", self.name));
        };
        let Destinations { prefixes: wanted, excluded } =
            Destinations::parse(&egress.spec.destinations, &egress.spec.excluded_destinations)
                .map_err(|error| format!("InvalidDestination: {error}"))?;
        let namespaces = egress.spec.allowed_namespaces.clone().map(|names| names.into_iter().collect());
        let nodes = self.nodes.store.state();
        let blocks = self.blocks.store.state();
        let mut facts = Facts { namespaces, ..Facts::default() };
        for node in &nodes {
            facts.nodes.insert(node.name.clone());
            node.pods.iter().for_each(|prefix| facts.pod_cidrs.add(&node.name, *prefix));
        }
        for block in &blocks {
            // Those of a Node that is gone count for no Node.
            if let Some(node) = block.node.as_ref().filter(|node| facts.nodes.contains(*node)) {
                block.pods.iter().for_each(|prefix| facts.blocks.add(node, *prefix));
            }
        }
        let mut cluster: Vec<IpNet> =
            nodes.iter().flat_map(|node| node.pods.iter().chain(&node.others)).copied().collect();
        cluster.extend(blocks.iter().flat_map(|block| &block.pods));
        cluster.extend(self.pools.store.state().iter().flat_map(|pool| pool.others.clone()));
        cluster.extend(self.services.store.state().iter().flat_map(|range| range.others.clone()));
        let (options, invalid) = Options::read(&egress.spec);
        let slots = leases::permitted(&egress.spec, egress.status.as_ref());
        let destinations = facts::destinations(wanted, cluster.into_iter().chain(excluded));
        Ok(Cluster { facts, destinations, options, invalid, slots })
    }

    /// Reason why the state is not known yet: objects that have not arrived. Where a resource does not exist, there are no objects of it.
    fn missing(&self) -> Option<String> {
        let all = [
            ("its Egress", self.egress.is_ready(), self.egress.refusal()),
            ("Nodes", self.nodes.is_ready(), self.nodes.refusal()),
            ("AddressBlocks", self.blocks.is_ready(), self.blocks.refusal()),
            ("AddressPools", self.pools.is_ready(), self.pools.refusal()),
            ("ServiceCIDRs", self.services.is_ready(), self.services.refusal()),
        ];
        let is_missing = |ready: bool, refusal: &Option<Refusal>| {
            !ready && !matches!(refusal, Some(Refusal::UnknownResource(_)))
        };
        let missing: Vec<String> = all
            .into_iter()
            .filter(|(_, ready, refusal)| is_missing(*ready, refusal))
            .map(|(what, _, refusal)| match refusal {
                Some(refusal) => {
                    format!("{what} ({refusal}; grant what deploy/rbac/egress/gateway.yaml grants)")
                }
                None => what.to_owned(),
            })
            .collect();
        (!missing.is_empty()).then(|| format!("waiting for the API server's {}", missing.join(", ")))
    }
}

impl Readiness for Watches {
    fn not_ready(&self) -> Option<String> {
        self.missing()
    }
}

fn slim<K>(subsystem: &mut Subsystem, what: &'static str, client: &Client) -> Cache<Slim<K>>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    Slim<K>: From<K>,
{
    let events = watcher(Api::<K>::all(client.clone()), caches::config());
    caches::start(subsystem, what, caches::parsed(events, |object: K| Slim::from(object)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn texts(prefixes: &[IpNet]) -> Vec<String> {
        prefixes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn of_objects_only_their_prefixes_are_kept() {
        let node: Node = serde_json::from_value(json!({
            "metadata": { "name": "n1" },
            "spec": { "podCIDRs": ["10.244.1.0/24", "fd00:1::/64", "nonsense"], "podCIDR": "10.244.1.0/24" },
            "status": { "addresses": [
                { "type": "InternalIP", "address": "192.0.2.1" }, { "type": "Hostname", "address": "n1" },
            ] },
        }))
        .unwrap();
        let node = Slim::from(node);
        assert_eq!(texts(&node.pods), ["10.244.1.0/24", "fd00:1::/64", "10.244.1.0/24"]);
        assert_eq!(
            (texts(&node.others), node.node.as_deref()),
            (vec!["192.0.2.1/32".to_owned()], Some("n1"))
        );
        let block: AddressBlock = serde_json::from_value(json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "index": 0, "ipv4": "10.0.0.0/27",
            "metadata": { "name": "p-0", "labels": { "coil.cybozu.com/node": "n2" } },
        }))
        .unwrap();
        let block = Slim::from(block);
        assert_eq!((texts(&block.pods), block.node.as_deref()), (vec!["10.0.0.0/27".to_owned()], Some("n2")));
    }
}

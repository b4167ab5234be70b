//! What the API server says of Egresses, their Services and the ranges of the cluster.
//!
//! Only Egresses are watched on a node that has no client pod: they may select one. The other watches begin with the first client.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fairlead_api::resources::{AddressPool, Egress};
use fairlead_cluster::caches::{self, Cache, Refusal};
use fairlead_cluster::lean;
use fairlead_cluster::subsystem::Subsystem;
use fairlead_egress::EgressName;
use fairlead_egress::objects::selector_of_all;
use fairlead_egress::selectors::{Candidate, Labels, PodSelectors};
use futures::{Stream, StreamExt as _, stream};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::api::PartialObjectMeta;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};
use tokio::sync::watch;

use super::EgressSwitches;
use super::objects::{SlimNode, SlimService, name_of, subnets};
use super::plan::Cluster;
use crate::members::cluster_addresses::service_prefixes;

/// How long an ADD waits for first lists.
const FIRST_LISTS_TIMEOUT: Duration = Duration::from_secs(2);
/// How often it checks whether they have arrived.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// What is watched for client pods.
pub(crate) struct Inputs {
    pub(super) egresses: Cache<Egress>,
    services: Cache<SlimService>,
    nodes: Cache<SlimNode>,
    pools: Arc<Cache<AddressPool>>,
    service_ranges: Arc<Cache<ServiceCIDR>>,
    namespaces: Arc<Cache<PartialObjectMeta<Namespace>>>,
    /// Whether the watches were asked for.
    wanted: watch::Sender<bool>,
    switches: EgressSwitches,
    /// The last result, with the generations of what it was made of.
    cluster: Mutex<Option<(Generations, Arc<Cluster>)>>,
    /// Egresses with selectors, with the generation of Egresses.
    selectors: Mutex<Option<(u64, Arc<Selectors>)>>,
}

/// Egresses that select pods.
pub(crate) type Selectors = BTreeMap<EgressName, PodSelectors>;

type Generations = [u64; 5];

impl Inputs {
    /// Starts to watch Egresses, unless egress is off, and prepares the other watches; the first client pod starts them.
    pub(crate) fn start(
        subsystem: &mut Subsystem,
        client: &Client,
        pools: Arc<Cache<AddressPool>>,
        service_ranges: Arc<Cache<ServiceCIDR>>,
        namespaces: Arc<Cache<PartialObjectMeta<Namespace>>>,
        switches: EgressSwitches,
    ) -> Self {
        let (wanted, gate) = watch::channel(false);
        // Without a sender it opens only if it is open already.
        let enabled = watch::channel(switches.enabled).1;
        let egresses = watcher(Api::<Egress>::all(client.clone()), caches::config()).modify(|egress| {
            lean::identified(egress);
            (egress.spec.template, egress.status) = (None, None);
        });
        let of_egresses = caches::config().labels(&selector_of_all());
        let services = watcher(Api::<SlimService>::all(client.clone()), of_egresses).modify(lean::identified);
        let nodes = watcher(Api::<SlimNode>::all(client.clone()), caches::config()).modify(lean::identified);
        Self {
            egresses: caches::start(subsystem, "Egresses", once_wanted(enabled, egresses)),
            services: caches::start(subsystem, "Services of Egresses", once_wanted(gate.clone(), services)),
            nodes: caches::start(subsystem, "ranges of Nodes", once_wanted(gate, nodes)),
            pools,
            service_ranges,
            namespaces,
            wanted,
            switches,
            cluster: Mutex::default(),
            selectors: Mutex::default(),
        }
    }

    /// With caches of tests.
    #[cfg(test)]
    pub(super) fn of(
        (egresses, services, nodes): (Cache<Egress>, Cache<SlimService>, Cache<SlimNode>),
        pools: Arc<Cache<AddressPool>>,
        service_ranges: Arc<Cache<ServiceCIDR>>,
        namespaces: Arc<Cache<PartialObjectMeta<Namespace>>>,
        switches: EgressSwitches,
    ) -> Self {
        let (wanted, cluster, selectors) = (watch::Sender::new(true), Mutex::default(), Mutex::default());
        Self {
            egresses,
            services,
            nodes,
            pools,
            service_ranges,
            namespaces,
            wanted,
            switches,
            cluster,
            selectors,
        }
    }

    /// Whether pods may have egress gateways on this node.
    pub(crate) fn is_enabled(&self) -> bool {
        self.switches.enabled
    }

    /// Egresses that select pods; `None` while it is not known which there are. An API server that shows no Egresses has none.
    pub(crate) fn selectors(&self) -> Option<Arc<Selectors>> {
        if self.is_enabled() && !self.egresses.has_answer() {
            return None;
        }
        let generation = self.egresses.generation();
        let mut last = self.selectors.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, selectors)) = last.as_ref()
            && *of == generation
        {
            return Some(Arc::clone(selectors));
        }
        let mut read = Selectors::new();
        for egress in self.egresses.store.state() {
            let (selectors, _) = PodSelectors::of(&egress.spec);
            if !selectors.is_empty() {
                read.insert(name_of(&egress.metadata), selectors);
            }
        }
        let same = last.as_ref().map(|(_, known)| known).filter(|known| ***known == read).cloned();
        let selectors = same.unwrap_or_else(|| Arc::new(read));
        *last = Some((generation, Arc::clone(&selectors)));
        Some(selectors)
    }

    /// The Egresses that select a pod; `None` while it is not known. `is_new` says that its Namespace may be newer than the watch shows.
    pub(crate) fn selected(
        &self,
        namespace: &str,
        labels: Option<&Labels>,
        is_new: bool,
    ) -> Option<BTreeSet<EgressName>> {
        let selectors = self.selectors()?;
        let needs_namespaces = selectors.values().any(PodSelectors::has_namespaces);
        let found = self.namespaces.store.get(&ObjectRef::new(namespace)).filter(|_| needs_namespaces);
        if needs_namespaces && (!self.namespaces.is_ready() || is_new && found.is_none()) {
            return None;
        }
        let metadata = found.as_ref().map(|namespace| &namespace.metadata);
        let candidate = Candidate {
            namespace,
            namespace_labels: metadata.and_then(|metadata| metadata.labels.as_ref()),
            namespace_annotations: metadata.and_then(|metadata| metadata.annotations.as_ref()),
            labels,
        };
        let all = selectors.iter().filter(|(egress, selectors)| selectors.selects(egress, candidate));
        Some(all.map(|(egress, _)| egress.clone()).collect())
    }

    /// The Egresses that select a pod that is being started; waits up to 2 s until it is known.
    pub(crate) async fn selected_at_start(
        &self,
        namespace: &str,
        labels: &Labels,
    ) -> Option<BTreeSet<EgressName>> {
        let poll = async {
            loop {
                if let Some(selected) = self.selected(namespace, Some(labels), true) {
                    return selected;
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        tokio::time::timeout(FIRST_LISTS_TIMEOUT, poll).await.ok()
    }

    /// Changes of Namespaces, which matter once an Egress selects by them.
    pub(crate) fn subscribe_to_namespaces(&self) -> watch::Receiver<u64> {
        self.namespaces.subscribe()
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
        let nodes = self.nodes.store.state();
        let pools = self.pools.store.state();
        let services = service_prefixes(&self.service_ranges);
        let subnets = pools.iter().flat_map(|pool| subnets(pool));
        let ranges = subnets.chain(services).chain(nodes.iter().flat_map(|node| node.ranges()));
        let cluster = Cluster::of(self.egresses.store.state(), self.services.store.state(), ranges);
        Cluster { originating_only: self.switches.originating_only, ..cluster }
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
    use super::*;

    #[tokio::test]
    async fn nothing_is_watched_before_it_is_wanted() {
        let (open, gate) = watch::channel(false);
        let mut events = Box::pin(once_wanted(gate, stream::iter([1, 2])));
        assert!(futures::poll!(events.next()).is_pending());
        open.send_replace(true);
        assert_eq!(events.collect::<Vec<_>>().await, [1, 2]);
    }
}

//! Watches of Egresses, with the ranges of the cluster in their status, and of their Services.
//!
//! Only Egresses are watched on a node that has no client pod: they may select one, and their gateways may hold source addresses. The watch of
//! Services begins with the first client.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fairlead_cluster::caches::{self, Cache, Refusal};
use fairlead_cluster::subsystem::Subsystem;
use fairlead_egress::EgressName;
use fairlead_egress::client::plan::Cluster;
use fairlead_egress::objects::selector_of_all;
use fairlead_egress::selection::Selectors;
use fairlead_egress::selectors::Labels;
use futures::{Stream, StreamExt as _, stream};
use k8s_openapi::api::core::v1::{Namespace, Service};
use kube::api::PartialObjectMeta;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::sync::watch;

use super::objects::{CachedEgress, CachedService};
use super::switches::EgressSwitches;

/// Longest time for which an ADD waits for first lists.
const FIRST_LISTS_TIMEOUT: Duration = Duration::from_secs(2);
/// Time between two checks whether they have arrived.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Watched objects that decide about client pods.
pub(crate) struct Inputs {
    egresses: Arc<Cache<CachedEgress>>,
    services: Cache<CachedService>,
    namespaces: Arc<Cache<PartialObjectMeta<Namespace>>>,
    /// Whether the watches were asked for.
    wanted: watch::Sender<bool>,
    switches: EgressSwitches,
    /// The last result, with the generations of what it was made of.
    cluster: Mutex<Option<(Generations, Arc<Cluster>)>>,
    /// Egresses with selectors, with the generation of Egresses.
    selectors: Mutex<Option<(u64, Arc<Selectors>)>>,
}

type Generations = [u64; 2];

impl Inputs {
    /// Prepares the watch of Services, which the first client pod starts. With egress off, it is as if there were no Egresses.
    pub(crate) fn start(
        subsystem: &mut Subsystem,
        client: &Client,
        egresses: Arc<Cache<CachedEgress>>,
        namespaces: Arc<Cache<PartialObjectMeta<Namespace>>>,
        switches: EgressSwitches,
    ) -> Self {
        let (wanted, gate) = watch::channel(false);
        let of_egresses = caches::config().labels(&selector_of_all());
        let services = watcher(Api::<Service>::all(client.clone()), of_egresses);
        let services = caches::parsed(services, CachedService::from);
        Self {
            egresses,
            services: caches::start(subsystem, "Services of Egresses", once_wanted(gate, services)),
            namespaces,
            wanted,
            switches,
            cluster: Mutex::default(),
            selectors: Mutex::default(),
        }
    }

    /// With caches of tests.
    #[cfg(test)]
    pub(crate) fn of(
        (egresses, services): (Cache<CachedEgress>, Cache<CachedService>),
        namespaces: Arc<Cache<PartialObjectMeta<Namespace>>>,
        switches: EgressSwitches,
    ) -> Self {
        let (wanted, cluster, selectors) = (watch::Sender::new(true), Mutex::default(), Mutex::default());
        let egresses = Arc::new(egresses);
        Self { egresses, services, namespaces, wanted, switches, cluster, selectors }
    }

    /// Whether pods may have egress gateways on this node.
    pub(crate) fn is_enabled(&self) -> bool {
        self.switches.enabled
    }

    /// Egresses that count on this node: none where egress is off.
    fn egresses(&self) -> Vec<Arc<CachedEgress>> {
        if self.is_enabled() { self.egresses.store.state() } else { Vec::new() }
    }

    /// Whether Egresses have been listed. Never where egress is off.
    pub(crate) fn is_listed(&self) -> bool {
        self.is_enabled() && self.egresses.is_ready()
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
        let read = Selectors::of(
            self.egresses().iter().map(|egress| (egress.info.name.clone(), egress.info.selectors.clone())),
        );
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
        let needs_namespaces = selectors.need_namespaces();
        let found = self.namespaces.store.get(&ObjectRef::new(namespace)).filter(|_| needs_namespaces);
        if needs_namespaces && (!self.namespaces.is_ready() || is_new && found.is_none()) {
            return None;
        }
        Some(selectors.select(namespace, found.as_ref().map(|found| &found.metadata), labels))
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

    /// Starts the watch of Services: there is a client pod.
    pub(crate) fn want(&self) {
        self.wanted.send_if_modified(|wanted| !std::mem::replace(wanted, true));
    }

    /// Whether there is an Egress that a pod of this node may use.
    pub(crate) fn has_egresses(&self) -> bool {
        !self.egresses().is_empty()
    }

    /// Whether everything is known that a plan needs: the controller writes the ranges of the cluster into the status of Egresses.
    pub(crate) fn is_ready(&self) -> bool {
        self.is_listed() && self.services.is_ready() && !self.lacks_ranges()
    }

    /// Whether there are Egresses, and none says the ranges of the cluster.
    pub(crate) fn lacks_ranges(&self) -> bool {
        let egresses = self.egresses();
        !egresses.is_empty() && egresses.iter().all(|egress| egress.info.known.cluster_ranges.is_none())
    }

    /// Refusal of the API server to show Egresses or Services, if there is one.
    pub(crate) fn refusal(&self) -> Option<Refusal> {
        self.egresses.refusal().or_else(|| self.services.refusal())
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
        [self.egresses.generation(), self.services.generation()]
    }

    /// Egresses and Services as they are known now.
    pub(crate) fn cluster(&self) -> Arc<Cluster> {
        let generations = self.generations();
        let mut last = self.cluster.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, cluster)) = last.as_ref()
            && *of == generations
        {
            return Arc::clone(cluster);
        }
        let read = self.read();
        // Most changes of a status are none of what is read of it.
        let same = last.as_ref().map(|(_, cluster)| cluster).filter(|cluster| ***cluster == read).cloned();
        let cluster = same.unwrap_or_else(|| Arc::new(read));
        *last = Some((generations, Arc::clone(&cluster)));
        cluster
    }

    fn read(&self) -> Cluster {
        let egresses = self.egresses();
        let known = egresses.iter().map(|egress| (egress.info.name.clone(), egress.info.known.clone()));
        let services = self.services.store.state();
        let services = services.iter().map(|service| (service.egress.clone(), service.known.clone()));
        let cluster = Cluster::of(known, services);
        Cluster { originating_only: self.switches.originating_only, ..cluster }
    }

    /// Resolves at the next change of any of it. Cancel safe.
    pub(crate) fn subscribe(&self) -> InputChanges {
        InputChanges([self.egresses.subscribe(), self.services.subscribe()])
    }
}

/// Changes of [`Inputs`].
pub(crate) struct InputChanges([watch::Receiver<u64>; 2]);

impl InputChanges {
    /// Waits for the next one.
    pub(crate) async fn changed(&mut self) {
        let [egresses, services] = &mut self.0;
        tokio::select! {
            _ = egresses.changed() => {}
            _ = services.changed() => {}
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

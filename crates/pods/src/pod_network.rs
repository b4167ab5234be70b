//! Keeps this node's pods connected while other programs change the network: the rule that leads to the table of pods,
//! forwarding, the check of source addresses, masquerading, firewalls that drop what is forwarded, each pod's link, addresses and routes, and the routes that refuse
//! packets to addresses of no pod.
//!
//! The allocation table says what should be, a dump what is; the difference is sent as one batch per pod, nothing if there is
//! none. It runs when [`KernelWatch`] reports a change, and as a sweep: the kernel does not report the IPv4 routes of a
//! link that goes down.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use fairlead_api::names::{
    LINK_ALIAS_PREFIX, NFT_TABLE_FORWARD, NFT_TABLE_MASQUERADE, NFT_TABLE_SOURCE_CHECK,
};
use fairlead_api::resources::{AddressPool, WireKubeMesh};
use fairlead_cluster::caches::{Cache, Refusal};
use fairlead_cluster::subsystem::Subsystem;
use fairlead_dataplane::forwarding::ForwardRules;
use fairlead_dataplane::kernel_tables::KernelTables;
use fairlead_dataplane::kernel_watch::{KernelChanges, KernelWatch};
use fairlead_dataplane::nft_table::Applied;
use fairlead_dataplane::pods::{self, Attached, HostEnds, Repair};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_dataplane::uplink::{self, HostNetwork, Ignored};
use fairlead_dataplane::{forwarding, masquerade, routes};
use fairlead_members::cached_peer::CachedPeer;
use fairlead_netlink::route::Change;
use ipnet::IpNet;
use tokio::time::{sleep, timeout};

use self::metrics::{Object, PodNetworkMetrics};
use self::refused::Refused;
use crate::cni::{self, MeshStatus};
use crate::container_locks::{ContainerLocks, Guard};
use crate::ipam::Ipam;

mod connected;
pub mod desired;
pub mod metrics;
mod refused;

/// nftables tables of the pods' network.
const TABLES: [&str; 3] = [NFT_TABLE_FORWARD, NFT_TABLE_MASQUERADE, NFT_TABLE_SOURCE_CHECK];
/// Interval at which the kernel is compared when nothing changes.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Least pause between two comparisons: every ADD and DEL changes links, and needs none.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// Dependencies of what keeps the pods' network.
pub struct PodNetwork {
    /// Addresses of this node.
    pub ipam: Arc<Ipam>,
    /// A container with a CNI operation under way is left to that operation.
    pub locks: Arc<ContainerLocks>,
    /// All pools.
    pub pools: Arc<Cache<AddressPool>>,
    /// All meshes; there should be one.
    pub meshes: Arc<Cache<WireKubeMesh>>,
    /// Tell the networks of pods of other plugins.
    pub peers: Arc<Cache<CachedPeer>>,
    /// The mesh.
    pub mesh: Arc<dyn MeshStatus>,
    /// Counter of corrections.
    pub metrics: PodNetworkMetrics,
    /// Problems, for the status.
    pub problems: PodNetworkProblems,
}

/// Objects that cannot be reconciled, as of the last comparison.
#[derive(Clone, Default)]
pub struct PodNetworkProblems(Arc<Mutex<Vec<String>>>);

impl PodNetworkProblems {
    /// One sentence each.
    pub fn get(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, problems: Vec<String>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != problems {
            tracing::warn!(?problems, "the network of the pods has other problems than before");
            *known = problems;
        }
    }
}

/// Prepares what all pods need, and returns what had to be changed.
///
/// # Errors
/// The kernel refuses.
pub fn prepare(ids: RoutingIds) -> anyhow::Result<Vec<(Object, String)>> {
    let mut changed = Vec::new();
    let files = uplink::enable_forwarding()?;
    changed.extend(files.iter().map(|file| (Object::Forwarding, format!("set {}", file.display()))));
    let rules = routes::ensure_rules(&routes::pod_rules(ids))?;
    changed.extend(rules.add.iter().map(|rule| (Object::Rule, format!("add {rule}"))));
    Ok(changed)
}

impl PodNetwork {
    /// Starts to reconcile.
    pub fn start(self, kernel: &KernelWatch, subsystem: &mut Subsystem) {
        let ids = self.ipam.numbers();
        subsystem.spawn("pod network", self.run(kernel.subscribe(move |change| concerns(change, ids))));
    }

    async fn run(self, mut kernel: KernelChanges) -> Infallible {
        let mut pools = self.pools.subscribe();
        let mut meshes = self.meshes.subscribe();
        let mut refused = Refused::default();
        let mut firewalls = ForwardRules::default();
        let mut tables = KernelTables::default();
        loop {
            let mut problems: Vec<String> = tables.problems().into_iter().map(str::to_owned).collect();
            match self.pass_firewalls(&mut firewalls).await {
                Ok(dropped) => problems.extend(dropped),
                Err(error) => problems.push(format!("{error:#}")),
            }
            let is_mesh_starting = self.is_mesh_starting();
            let outcomes = [
                self.restore_pods().await,
                self.refuse_unallocated(&mut refused, is_mesh_starting).await,
                self.check_sources().await,
            ];
            for outcome in outcomes {
                problems.extend(outcome.err().map(|error| format!("{error:#}")));
            }
            match self.masquerade().await {
                Ok(shared) => problems.extend(shared),
                Err(error) => problems.push(format!("{error:#}")),
            }
            self.problems.set(problems);
            sleep(MIN_PAUSE).await;
            let changed = async {
                tokio::select! {
                    () = kernel.changed() => {}
                    () = self.ipam.blocks_changed() => {}
                    _ = pools.changed() => {}
                    _ = meshes.changed() => {}
                    () = self.mesh_started(), if is_mesh_starting => {}
                }
            };
            // The mesh wakes nothing here when it has noticed what this node has released.
            let interval = if refused.has_released() { Duration::ZERO } else { SWEEP_INTERVAL };
            let _ = timeout(interval, changed).await;
        }
    }

    async fn restore_pods(&self) -> anyhow::Result<()> {
        let ids = self.ipam.numbers();
        let attached: Vec<Attached> = self.ipam.attachments().into_iter().map(attached).collect();
        let compare = move || {
            let prepared = prepare(ids).context("cannot prepare the network of the pods")?;
            Ok::<_, anyhow::Error>((prepared, pods::repairs(ids, &attached, &HostEnds::read(ids)?)))
        };
        let (prepared, repairs) = tokio::task::spawn_blocking(compare).await??;
        for (object, operation) in prepared {
            self.corrected(object, &operation, None);
        }
        let free = |repair: Repair| Some((self.locks.try_lock(&repair.container_id)?, repair));
        let repairs: Vec<(Guard, Repair)> = repairs.into_iter().filter_map(free).collect();
        if repairs.is_empty() {
            return Ok(());
        }
        let apply =
            move || repairs.into_iter().map(|(_guard, repair)| (repair.apply(), repair)).collect::<Vec<_>>();
        let mut first = Ok(());
        for (outcome, repair) in tokio::task::spawn_blocking(apply).await? {
            match outcome {
                Ok(()) => repair.operations().for_each(|it| self.corrected(Object::Pod, it, Some(&repair))),
                Err(error) => {
                    let link = &repair.host_name;
                    first =
                        first.and(Err(error).with_context(|| format!("cannot restore link {link} of a pod")));
                }
            }
        }
        first
    }

    /// Packets to addresses of this node's blocks that no pod has are refused, also of blocks that it has released until the mesh has noticed that.
    /// Waits for the blocks: what was refused before the start goes on until they are known, and until the mesh keeps packets to those that are
    /// another node's by now. Where the prefixes are those of the last time, a difference is a correction.
    async fn refuse_unallocated(&self, refused: &mut Refused, is_mesh_starting: bool) -> anyhow::Result<()> {
        let Some(own) = self.ipam.pod_prefixes() else { return Ok(()) };
        let ids = self.ipam.numbers();
        let prefixes = refused.update(own, Instant::now(), |prefix| self.mesh.takes_for_own(prefix));
        let wanted = prefixes.clone();
        let set = if is_mesh_starting { routes::add_blocks } else { routes::sync_blocks };
        let done = tokio::task::spawn_blocking(move || set(ids, &wanted)).await?;
        let done = done.context("cannot refuse packets to addresses that no pod has")?;
        if !done.is_empty() && refused.are_set(&prefixes) {
            self.corrected(Object::Block, "set the routes that refuse packets to addresses of no pod", None);
        }
        refused.set((!is_mesh_starting).then_some(prefixes));
        Ok(())
    }

    fn is_mesh_starting(&self) -> bool {
        cni::is_starting(&self.meshes, self.mesh.as_ref())
    }

    async fn mesh_started(&self) {
        while self.is_mesh_starting() {
            sleep(MIN_PAUSE).await;
        }
    }

    async fn check_sources(&self) -> anyhow::Result<()> {
        let checked = tokio::task::spawn_blocking(pods::check_sources).await?;
        let checked =
            checked.context("pods can send with addresses of others: the kernel refuses the check")?;
        if checked != Applied::Unchanged {
            self.corrected(Object::SourceCheck, "set the check of source addresses", None);
        }
        Ok(())
    }

    /// Lets packets of pods through firewalls that drop what this host forwards, and returns which do not.
    async fn pass_firewalls(&self, rules: &mut ForwardRules) -> anyhow::Result<Vec<String>> {
        let mut taken = std::mem::take(rules);
        let apply = move || {
            let forwarding = taken.apply(Instant::now());
            let marked = forwarding::mark_pods(forwarding.is_dropped);
            (taken, forwarding, marked)
        };
        let (taken, forwarding, marked) = tokio::task::spawn_blocking(apply).await?;
        *rules = taken;
        let marked = marked.context("cannot mark packets of pods for firewalls that drop the others")?;
        if marked.is_some_and(|applied| applied != Applied::Unchanged) {
            self.corrected(Object::Firewall, "set the mark of packets that firewalls are to accept", None);
        }
        let problems = forwarding.problems.into_iter();
        Ok(problems.map(|problem| format!("{}: {problem}", problem.reason())).collect())
    }

    /// Masquerades connections of pods, and returns which pools share addresses with networks of this host.
    async fn masquerade(&self) -> anyhow::Result<Vec<String>> {
        if !has_masquerade_settings(&self.pools, &self.meshes) {
            return Ok(Vec::new());
        }
        let pools = self.pools.store.state();
        let meshes = self.meshes.store.state();
        let mesh = WireKubeMesh::selected(&meshes).cloned();
        // What an earlier program left out for networks of peers stays until they are known.
        if mesh.as_deref().is_some_and(WireKubeMesh::includes_pod_networks) && !self.peers.has_answer() {
            return Ok(Vec::new());
        }
        let pod_networks = self.pod_networks(mesh.as_deref());
        let apply = move || {
            let host = HostNetwork::read()?;
            let shared = connected::problems(&pools, &host.networks_on_links(&Ignored::default()));
            let connected = host.connected_prefixes(&Ignored::default());
            let wanted = desired::masquerade(&pools, mesh.as_deref(), &pod_networks, connected);
            Ok::<_, fairlead_netlink::Error>((shared, masquerade::apply(&wanted)?))
        };
        let applied = tokio::task::spawn_blocking(apply).await?;
        let (shared, applied) = applied
            .context("cannot masquerade connections of pods: they reach no host outside of the cluster")?;
        if applied.is_some_and(|applied| applied != Applied::Unchanged) {
            self.corrected(Object::Masquerade, "set the masquerading of pods", None);
        }
        Ok(shared)
    }

    /// Networks of other plugins whose pods see the addresses of this node's pods. They change with nodes: the next sweep is soon enough.
    fn pod_networks(&self, mesh: Option<&WireKubeMesh>) -> Vec<IpNet> {
        if !mesh.is_some_and(WireKubeMesh::includes_pod_networks) {
            return Vec::new();
        }
        let peers = self.peers.store.state();
        peers.iter().flat_map(|peer| &peer.member().pod_networks).copied().collect()
    }

    fn corrected(&self, object: Object, operation: &str, pod: Option<&Repair>) {
        let container = pod.map(|it| it.container_id.as_str());
        let link = pod.map(|it| it.host_name.as_str());
        tracing::warn!(container, link, operation, "corrected the network of the pods");
        self.metrics.corrected(object);
    }
}

/// Whether it is known what is to be masqueraded. Until then, what was masqueraded before the start goes on. An API server that
/// has no WireKubeMeshes says that there is none; one that does not show them to this node does not.
fn has_masquerade_settings(pools: &Cache<AddressPool>, meshes: &Cache<WireKubeMesh>) -> bool {
    let has_no_meshes = matches!(meshes.refusal(), Some(Refusal::UnknownResource(_)));
    pools.is_ready() && (meshes.is_ready() || has_no_meshes)
}

fn attached(one: crate::ipam::Attachment) -> Attached {
    let addresses = one.allocated.addresses().collect();
    Attached { container_id: one.key.container_id, ifname: one.key.ifname, addresses }
}

/// Whether a change may cut pods off. An ADD and a DEL report the same of their own links; then there is nothing to send.
fn concerns(change: &Change, ids: RoutingIds) -> bool {
    match change {
        Change::Address { .. } => false,
        Change::Link { link, gone } => {
            let is_pod = link.alias.as_deref().is_some_and(|alias| alias.starts_with(LINK_ALIAS_PREFIX));
            is_pod && !gone
        }
        Change::Missed => true,
        Change::Netconf(netconf) => netconf.link.is_none() && netconf.forwarding == Some(false),
        Change::Route { route, gone } => *gone && route.table == ids.table_pods(),
        Change::Table(name) => TABLES.contains(&name.as_str()),
        Change::Rule { rule, gone } => *gone && rule.priority == ids.rule_priority(),
    }
}

#[cfg(test)]
mod tests {
    use fairlead_cluster::caches;
    use fairlead_cluster::subsystem::Supervisor;
    use futures::stream::{self, StreamExt as _};
    use kube::core::Status;
    use kube::runtime::watcher::{self, Event};

    use super::*;

    /// A watch that an API server answers with this code; 200 is an empty list.
    async fn cache<K>(watches: &mut Supervisor, code: u16) -> Cache<K>
    where
        K: kube::runtime::reflector::Lookup<DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + Send
            + Sync
            + 'static,
    {
        let status = Status { code, ..Status::default() };
        let list = match code {
            200 => vec![Ok(Event::Init), Ok(Event::InitDone)],
            _ => vec![Err(watcher::Error::InitialListFailed(kube::Error::Api(Box::new(status))))],
        };
        let events = stream::iter(list).chain(stream::pending());
        let cache = caches::start(watches.subsystem("caches"), "objects", events);
        while !cache.has_answer() {
            tokio::task::yield_now().await;
        }
        cache
    }

    #[tokio::test]
    async fn pools_masquerade_where_the_api_server_has_no_meshes() {
        let mut watches = Supervisor::default();
        for (pools, meshes, known) in [
            (200, 200, true),
            (200, 404, true),
            // There may be a mesh.
            (200, 403, false),
            (404, 200, false),
        ] {
            let of_pools = cache::<AddressPool>(&mut watches, pools).await;
            let of_meshes = cache::<WireKubeMesh>(&mut watches, meshes).await;
            assert_eq!(has_masquerade_settings(&of_pools, &of_meshes), known, "{pools} {meshes}");
        }
    }
}

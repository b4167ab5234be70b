//! Reads the inputs from the cluster's objects, or from what was saved while the API server does not answer.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::resources::{NodeFacts, WireKubeMesh};
use fairlead_cluster::caches::{Cache, Refusal};
use fairlead_members::cluster_addresses::{UnusableAddress, service_prefixes};
use fairlead_members::departures::Departures;
use fairlead_members::membership::{Membership, View};
use fairlead_members::names::Names;
use fairlead_members::saved::cluster::{Facts, Unsaved};
use fairlead_members::settings::{
    ConfiguredDiscovery, DiscoverySettings, MeshSettings, RelayServer, selected,
};
use fairlead_members::state_file::StateFile;
use fairlead_members::{SourceProblem, annotations, nodes, shared};
use fairlead_topology::{Member, MemberRecord, Source};
use ipnet::IpNet;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::runtime::reflector::ObjectRef;
use tokio::sync::watch;

use super::network::NetworkWatches;
use crate::gather::keys::Keys;
use crate::model::inputs::{Inputs, NetworkFacts, OwnKeys, OwnNode};
use crate::model::problem::MeshFailure;

/// Reads [`Inputs`] and says when they may have changed.
pub(crate) struct InputReader {
    node: String,
    nodes: Arc<Cache<Node>>,
    meshes: Arc<Cache<WireKubeMesh>>,
    service_ranges: Arc<Cache<ServiceCIDR>>,
    membership: Membership,
    /// The last inputs.
    last: Option<Arc<Inputs>>,
    api_server: watch::Receiver<Option<Vec<SocketAddr>>>,
    network: NetworkWatches,
    names: Names,
    saved: Saved,
    relay: watch::Sender<Option<RelayServer>>,
    discovery: watch::Sender<ConfiguredDiscovery>,
    node_changed: watch::Receiver<u64>,
    mesh_changed: watch::Receiver<u64>,
    services_changed: watch::Receiver<u64>,
}

/// Time after the start that the API server has to answer before the saved state is used.
const PATIENCE: Duration = Duration::from_secs(3);
/// Time for an API server that has answered a request: the lists of a large cluster take a while, and a device that was adopted is not to
/// be brought back to older facts.
const PATIENCE_WITH_LISTS: Duration = Duration::from_secs(60);

/// Saved state of an earlier run, and the state that is to be saved.
struct Saved {
    file: StateFile,
    started: Instant,
    /// Content of the file; `None` until it is needed, and again once it is not.
    facts: Option<Facts>,
    /// The file was read.
    is_read: bool,
    /// Members as of an earlier run, and how old that is, until there are current ones.
    earlier: (Vec<Arc<Member>>, Duration),
    /// Time at which the file was written.
    at: Option<Instant>,
    /// The inputs of the last [`InputReader::read`] were those of the cluster.
    is_live: bool,
    unsaved: watch::Sender<Option<Unsaved>>,
}

impl Saved {
    fn new(file: StateFile) -> Self {
        let unsaved = watch::Sender::new(None);
        Self {
            file,
            started: Instant::now(),
            facts: None,
            is_read: false,
            earlier: Default::default(),
            at: None,
            is_live: false,
            unsaved,
        }
    }

    /// Saved state of an earlier run; `None` while the API server still has time to answer.
    fn facts(&mut self, now: Instant, has_answered: bool) -> Option<Facts> {
        let patience = if has_answered { PATIENCE_WITH_LISTS } else { PATIENCE };
        if now.saturating_duration_since(self.started) < patience {
            return None;
        }
        self.facts.clone()
    }

    /// Reads the file, the first time. Returns what is remembered of members that left.
    fn read(&mut self) -> Option<Departures> {
        if std::mem::replace(&mut self.is_read, true) {
            return None;
        }
        match self.file.read((Instant::now(), Timestamp::now())) {
            Ok(Some(read)) => {
                let members = read.facts.members.iter().cloned().map(Arc::new);
                self.earlier = (members.collect(), read.age);
                self.at = Instant::now().checked_sub(read.age);
                self.facts = Some(read.facts);
                Some(read.departures)
            }
            Ok(None) => None,
            Err(error) => {
                tracing::warn!(error = %format!("{error:#}"), "nothing is known of the mesh until the API server answers");
                None
            }
        }
    }
}

impl InputReader {
    pub(crate) fn new(
        file: StateFile,
        nodes: Arc<Cache<Node>>,
        meshes: Arc<Cache<WireKubeMesh>>,
        service_ranges: Arc<Cache<ServiceCIDR>>,
        membership: Membership,
        api_server: watch::Receiver<Option<Vec<SocketAddr>>>,
        network: NetworkWatches,
    ) -> Self {
        let mut node_changed = nodes.subscribe();
        let mut mesh_changed = meshes.subscribe();
        // Only what changes from now on is news.
        node_changed.mark_unchanged();
        mesh_changed.mark_unchanged();
        let mut services_changed = service_ranges.subscribe();
        services_changed.mark_unchanged();
        let names = Names::default();
        Self {
            node: file.node.clone(),
            saved: Saved::new(file),
            relay: watch::Sender::new(None),
            discovery: watch::Sender::default(),
            nodes,
            meshes,
            service_ranges,
            membership,
            last: None,
            api_server,
            network,
            names,
            node_changed,
            mesh_changed,
            services_changed,
        }
    }

    /// Resolves when the inputs may have changed.
    pub(crate) async fn changed(&mut self) {
        tokio::select! {
            () = self.membership.changed() => {}
            () = self.names.changed() => {}
            _ = self.api_server.changed() => {}
            () = self.network.changed() => {}
            _ = self.mesh_changed.changed() => {}
            _ = self.services_changed.changed() => {}
            _ = self.node_changed.changed() => {}
        }
    }

    /// The inputs as they are, or, while the API server has not answered at all, as they were saved.
    ///
    /// # Errors
    /// There is no mesh, or something has not answered yet.
    pub(crate) fn read(&mut self, now: Instant) -> Result<Inputs, MeshFailure> {
        if let Some(departures) = self.saved.read() {
            self.membership.restore(departures);
        }
        let (facts, is_live) = match self.facts(now) {
            Err(MeshFailure::WaitingForApiServer) => {
                let has_answered = self.api_server.borrow().is_some();
                let saved = self.saved.facts(now, has_answered);
                (saved.ok_or(MeshFailure::WaitingForApiServer)?, false)
            }
            facts => (facts?, true),
        };
        self.saved.is_live = is_live;
        if is_live {
            self.saved.facts = None;
            self.saved.earlier = Default::default();
        }
        let facts = if is_live { facts } else { self.with_sources(facts, now) };
        let inputs = self.inputs(facts);
        self.publish_discovery(inputs.settings.discovery.as_ref());
        self.publish_relay(inputs.settings.relay.as_ref().map(|relay| &relay.server));
        Ok(inputs)
    }

    /// The relay of the mesh as of the last [`Self::read`].
    pub(crate) fn relay(&self) -> watch::Receiver<Option<RelayServer>> {
        self.relay.subscribe()
    }

    /// The discovery services of the mesh as of the last [`Self::read`].
    pub(crate) fn discovery(&self) -> watch::Receiver<ConfiguredDiscovery> {
        self.discovery.subscribe()
    }

    fn publish_discovery(&self, settings: Option<&DiscoverySettings>) {
        let configured =
            settings.cloned().map_or(ConfiguredDiscovery::Disabled, ConfiguredDiscovery::Enabled);
        self.discovery.send_if_modified(|known| {
            let differs = *known != configured;
            *known = configured;
            differs
        });
    }

    /// Saved state, with all facts that are known without the API server.
    fn with_sources(&mut self, mut facts: Facts, now: Instant) -> Facts {
        let settings = MeshSettings::parse(&facts.mesh, &mut Vec::new());
        let view = View {
            previous: &[],
            age: Duration::ZERO,
            revoked: &settings.revoked,
            deleted: &settings.deleted,
            uses_discovery: settings.discovery.is_some(),
            now,
        };
        if let Some(sources) = self.network.source_nodes.borrow_and_update().clone() {
            facts.sources = sources;
        }
        facts.members = self.membership.with_saved(facts.members, &view, &mut facts.problems);
        // The key may have been replaced since.
        for own in facts.members.iter_mut().filter(|member| member.name == self.node) {
            own.public_key = Some(self.network.mesh_identity.keys.borrow().public_key);
            own.sources = Source::Local.into();
        }
        facts
    }

    fn publish_relay(&self, server: Option<&RelayServer>) {
        self.relay.send_if_modified(|known| {
            let differs = known.as_ref() != server;
            if differs {
                *known = server.cloned();
            }
            differs
        });
    }

    /// State of the cluster.
    fn facts(&mut self, now: Instant) -> Result<Facts, MeshFailure> {
        if !(self.membership.is_ready() && self.meshes.is_ready() && self.nodes.is_ready()) {
            return Err(self.unanswered());
        }
        // An API server without the resource, or that does not show it, is no reason to have no mesh.
        if !self.service_ranges.has_answer() {
            return Err(MeshFailure::WaitingForApiServer);
        }
        let api_server = self.api_server.borrow().clone().ok_or(MeshFailure::WaitingForApiServer)?;
        // Without it, the claim of the node that holds a source address would not count for a moment.
        let sources = self.network.source_nodes.borrow_and_update().clone();
        let sources = sources.ok_or(MeshFailure::WaitingForApiServer)?;
        let mut problems = Vec::new();
        let mesh = selected(&self.meshes).ok_or(MeshFailure::NoMesh)?;
        let node = self.nodes.store.get(&ObjectRef::new(&self.node));
        let node = node.ok_or_else(|| MeshFailure::NodeNotFound(self.node.clone()))?;
        let settings = MeshSettings::parse(&mesh, &mut Vec::new());
        // What comes later is read the next time.
        self.network.announced_sources.mark_unchanged();
        let own = self.own_record(&node, &self.claims(&settings, &node));
        let (previous, age) = match &self.last {
            // They may be those of the file, until now.
            Some(last) => (
                &*last.members,
                last.saved_at.map(|at| now.saturating_duration_since(at)).unwrap_or_default(),
            ),
            None => (&*self.saved.earlier.0, self.saved.earlier.1),
        };
        let view = View {
            previous,
            age,
            revoked: &settings.revoked,
            deleted: &settings.deleted,
            uses_discovery: settings.discovery.is_some(),
            now,
        };
        let members = self.membership.members(own, &view, &mut problems);
        let services = service_prefixes(&self.service_ranges);
        Ok(Facts { mesh, node, members, api_server, services, sources, problems })
    }

    fn inputs(&mut self, facts: Facts) -> Inputs {
        let Keys { private_key, public_key, previous, .. } =
            self.network.mesh_identity.keys.borrow_and_update().clone();
        let Facts { mesh, node, mut members, api_server, services, sources, problems: of_members } = facts;
        if mesh.spec.discovery.is_none() {
            // What was known of discovery before counts no more.
            members.retain(|member| !member.discovery.is_only_source);
        }
        let derived = self.network.mesh_identity.derived(&self.node, &public_key, &members);
        for own in members.iter_mut().filter(|member| member.name == self.node && derived.is_some()) {
            own.addresses.mesh = derived.into_iter().collect();
        }
        // Those of this node come first: of a long list the end is left out, and peers may cause any number.
        let mut problems = Vec::new();
        let settings = MeshSettings::parse(&mesh, &mut problems);
        let unusable = |address| UnusableAddress::of(address, &members, &services);
        let own = self.own_node(&node, unusable, &mut problems);
        problems.extend(annotations::location_problems(&node, &settings.locations.topology));
        problems.extend(of_members);
        let others = members.iter().filter(|member| member.name != self.node);
        let manual_of_others = others.filter_map(|member| member.endpoints.manual.as_ref());
        let resolved = self.names.resolve(manual_of_others.chain(&settings.traversal.stun_servers));
        let before = self.last.as_ref().map(|last| last.members.as_slice()).unwrap_or_default();
        let members = shared(members, before);
        let claims = self.claims(&settings, &node);
        Inputs {
            node: self.node.clone(),
            keys: OwnKeys { private: private_key, public: public_key, previous },
            own: OwnNode { claims, ..own },
            network: NetworkFacts {
                port_mappings: self.network.port_mappings.borrow_and_update().clone(),
                public_ipv4: *self.network.public_ipv4.borrow_and_update(),
                nat64: self.network.nat64.borrow_and_update().clone(),
            },
            settings,
            members,
            api_server,
            resolved,
            services,
            sources,
            departures: self.membership.departures().clone(),
            problems,
            saved_at: self.saved.at.filter(|_| !self.saved.is_live),
            cluster: self.network.mesh_identity.cluster.borrow_and_update().clone(),
        }
    }

    /// This node's object, without claims; addresses that are `unusable` are problems.
    fn own_node(
        &self,
        node: &Node,
        unusable: impl Fn(IpAddr) -> Option<UnusableAddress> + Copy,
        problems: &mut Vec<SourceProblem>,
    ) -> OwnNode {
        let manual = annotations::manual_endpoint(node, unusable, problems);
        let port = annotations::listen_port(node, unusable);
        let extra_endpoints = annotations::extra_endpoints(node, unusable, problems);
        let addresses = nodes::addresses(node, nodes::ANY);
        problems.extend(addresses.iter().filter_map(|address| {
            let why = unusable(*address)?;
            Some(SourceProblem::UnusableNodeAddress { node: self.node.clone(), address: *address, why })
        }));
        OwnNode {
            addresses,
            claims: Vec::new(),
            manual,
            extra_endpoints,
            port,
            filters: annotations::filters(node, problems),
            keepalive: annotations::keepalive(node, problems),
            interface_id: self.network.mesh_identity.interface_id,
        }
    }

    /// State that is to be written to the file, as [`Self::keep`] leaves it; `None` while there is nothing to write.
    pub(crate) fn unsaved(&self) -> watch::Receiver<Option<Unsaved>> {
        self.saved.unsaved.subscribe()
    }

    /// Takes note of the inputs that were read last, and lets them be saved unless they come from the file.
    pub(crate) fn keep(&mut self, inputs: &Arc<Inputs>) {
        self.last = Some(Arc::clone(inputs));
        let node = self.nodes.store.get(&ObjectRef::new(&self.node)).filter(|_| self.saved.is_live);
        if let (Some(mesh), Some(node)) = (selected(&self.meshes), node) {
            self.saved.unsaved.send_replace(Some(Unsaved {
                mesh,
                node,
                public_key: inputs.keys.public,
                members: inputs.members.clone(),
                api_server: inputs.api_server.clone(),
                services: inputs.services.clone(),
                sources: Arc::clone(&inputs.sources),
                departures: inputs.departures.clone(),
            }));
        }
    }

    /// There is no mesh: nothing of it stays in the file.
    pub(crate) fn forget(&mut self) {
        self.last = None;
        self.saved.earlier = Default::default();
        self.membership.restore(Departures::default());
        self.saved.unsaved.send_replace(None);
        self.saved.file.remove();
        self.publish_relay(None);
        self.publish_discovery(None);
    }

    /// Whether it is known which meshes there are.
    pub(crate) fn has_meshes_listed(&self) -> bool {
        self.meshes.is_ready()
    }

    /// Cause of missing first lists. Where the API server has no such resource, there is no mesh.
    fn unanswered(&self) -> MeshFailure {
        let refusals = [self.meshes.refusal(), self.nodes.refusal()].into_iter().flatten();
        let mut refusals = refusals.chain(self.membership.refusals());
        match refusals.next() {
            Some(Refusal::Forbidden(words)) => MeshFailure::Forbidden(words),
            Some(Refusal::UnknownResource(_)) => MeshFailure::NoMesh,
            None => MeshFailure::WaitingForApiServer,
        }
    }

    /// The addresses at which this node is reached through the mesh, and the source addresses of egress gateways that it announces.
    fn claims(&self, settings: &MeshSettings, node: &Node) -> Vec<IpAddr> {
        let mut claims = claims(settings, node);
        claims.extend(self.network.announced_sources.borrow().iter());
        claims
    }

    /// Record of this node, of which the program knows more than the API server last heard.
    fn own_record(&self, node: &Node, claims: &[IpAddr]) -> MemberRecord {
        let mut record = MemberRecord::of_node(Source::Local, &self.node);
        record.member.public_key = Some(self.network.mesh_identity.keys.borrow().public_key);
        record.member.addresses.node = Some(nodes::addresses(node, nodes::INTERNAL));
        // Others learn it from the controller. A node that joins must know it before it has peers: cut from their etcd, its API server says nothing more.
        record.member.addresses.is_control_plane = NodeFacts::is_control_plane_of(node);
        record.member.pod_networks = NodeFacts::pod_cidrs_of(node);
        record.member.claims = claims.iter().copied().map(IpNet::from).collect();
        record
    }
}

/// The addresses at which this node is reached through the mesh: its internal ones, without what its Node excludes. External ones belong to the address
/// translation of the cloud, and are reached without the mesh.
fn claims(settings: &MeshSettings, node: &Node) -> Vec<IpAddr> {
    if settings.routing.claim_node_addresses { annotations::own_addresses(node) } else { Vec::new() }
}

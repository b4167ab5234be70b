//! The mesh agent: watches members, steps the data plane, publishes this node.

pub mod agent;
pub mod metrics;
pub mod publish;
pub mod view;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fairlead_api::names::{ANNOTATION_ENDPOINT, ANNOTATION_KILO_FORCE_ENDPOINT, ANNOTATION_KILO_KEEPALIVE};
use fairlead_api::resources::{AddressBlock, WireKubeMesh, WireKubePeer};
use fairlead_api::wireguard::PublicKey;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::reflector::ObjectRef;
use kube::{Client, ResourceExt};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use self::agent::{Agent, Inputs, Report};
use self::metrics::MeshMetrics;
use self::view::{MeshSettings, PublishedPeer};
use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::{EventPublisher, ProblemEvent, ProblemEvents, node_reference};

/// Least pause between two steps, so that a storm of changes costs one step, not thousands.
const LEAST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause after a step that failed.
const AFTER_FAILURE: Duration = Duration::from_secs(2);
/// Pause after the first: a predecessor that is ending gives port and device back a moment later.
const AFTER_FIRST_FAILURE: Duration = Duration::from_millis(50);
/// Longest an API call of the publisher may take before it is given up and repeated.
const PUBLISH: Duration = Duration::from_secs(10);
/// How long a resolved host name is used before it is looked up again.
const NAME_LIFETIME: Duration = Duration::from_secs(30);

/// Why nothing is done where nobody asked for a mesh.
pub const NO_MESH: &str = "there is no WireKubeMesh: this node routes only its own pods";

/// Problems of the mesh as Events on the Node.
const PROBLEM_EVENT: ProblemEvent = ProblemEvent {
    reason: "MeshProblem",
    resolved: "MeshProblemsGone",
    resolved_note: "the mesh has no problems any more",
    action: "JoinMesh",
};

/// Why nothing is done yet.
const WAITING: &str = "waiting for the first answer of the API server";

/// What the rest of the program may know of the mesh.
#[derive(Debug, Default)]
pub struct Shared(Mutex<Snapshot>);

/// The mesh as of the last step.
#[derive(Debug, Default, Clone)]
pub struct Snapshot {
    /// What the last good step reported.
    pub report: Option<Arc<Report>>,
    /// Why the last step failed, or why there is none.
    pub failure: Option<String>,
}

impl Shared {
    /// The latest snapshot.
    pub fn snapshot(&self) -> Snapshot {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, report: Option<Arc<Report>>, failure: Option<String>) {
        let mut snapshot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        snapshot.failure = failure;
        if report.is_some() {
            snapshot.report = report;
        }
    }
}

/// What the mesh task works with.
pub struct Context {
    /// Client of the API server.
    pub client: Client,
    /// This node's name.
    pub node: String,
    /// This node's identity.
    pub public_key: PublicKey,
    /// This node's own object.
    pub nodes: Arc<Cache<Node>>,
    /// The mesh resources; the first by name counts.
    pub meshes: Arc<Cache<WireKubeMesh>>,
    /// All peers.
    pub peers: Arc<Cache<WireKubePeer>>,
    /// All blocks.
    pub blocks: Arc<Cache<AddressBlock>>,
    /// Where the API server is; `None` until it said so.
    pub api_server: watch::Receiver<Option<Vec<SocketAddr>>>,
    /// Where snapshots go.
    pub shared: Arc<Shared>,
    /// Publishes problems on the Node, where `kubectl describe node` shows them.
    pub events: EventPublisher,
    /// Counters.
    pub metrics: MeshMetrics,
}

/// Runs the mesh until `stop` resolves. The device stays as it is, in the agent's hands.
pub async fn run(context: Context, mut agent: Agent, stop: impl Future<Output = ()>) -> Agent {
    let mut stop = pin!(stop);
    let mut changes = [
        context.nodes.subscribe(),
        context.meshes.subscribe(),
        context.peers.subscribe(),
        context.blocks.subscribe(),
    ];
    let mut api_server = context.api_server.clone();
    let mut names = Names::default();
    let (reports, inbox) = watch::channel(None);
    let publisher = publisher(&context, inbox);
    let steps = async {
        let mut failures = 0_u32;
        loop {
            let pause = match context.inputs() {
                Ok(mut inputs) => {
                    inputs.resolved = names.resolve(&inputs.peers);
                    let (back, outcome) = step(agent, inputs).await;
                    agent = back;
                    let pause = context.conclude(outcome, &agent, &reports);
                    failures = if pause.is_some() { 0_u32 } else { failures.saturating_add(1) };
                    pause.unwrap_or_else(|| after_failure(failures))
                }
                Err(reason) => {
                    context.shared.set(None, Some(reason));
                    AFTER_FAILURE
                }
            };
            tokio::time::sleep(LEAST_PAUSE).await;
            let [nodes, meshes, peers, blocks] = &mut changes;
            let changed = async {
                tokio::select! {
                    _ = nodes.changed() => {}
                    _ = meshes.changed() => {}
                    _ = peers.changed() => {}
                    _ = blocks.changed() => {}
                    _ = api_server.changed() => {}
                }
            };
            tokio::select! {
                _ = timeout(pause.saturating_sub(LEAST_PAUSE), changed) => {}
                () = &mut stop => return agent,
            }
        }
    };
    tokio::select! {
        agent = steps => agent,
        never = publisher => match never {},
    }
}

/// One step on a thread that may block.
async fn step(mut agent: Agent, inputs: Inputs) -> (Agent, Result<Report, String>) {
    let work = tokio::task::spawn_blocking(move || {
        let outcome = agent.step(&inputs, Instant::now()).map_err(|error| error.to_string());
        (agent, outcome)
    });
    match work.await {
        Ok(done) => done,
        // The agent is gone with the panic; there is nothing sane to go on with, and the kernel keeps what it has.
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

impl Context {
    fn inputs(&self) -> Result<Inputs, String> {
        if !(self.meshes.is_ready()
            && self.peers.is_ready()
            && self.blocks.is_ready()
            && self.nodes.is_ready())
        {
            return Err(WAITING.to_owned());
        }
        let api_server = self.api_server.borrow().clone().ok_or(WAITING)?;
        let mut meshes = self.meshes.store.state();
        meshes.sort_by_key(|mesh| mesh.name_any());
        let mesh = meshes.first().ok_or(NO_MESH)?;
        let node = self
            .nodes
            .store
            .get(&ObjectRef::new(&self.node))
            .ok_or_else(|| format!("Node {} does not exist: is the node name right?", self.node))?;
        let mut problems = Vec::new();
        let settings = MeshSettings::parse(mesh, &mut problems);
        let mut peers = Vec::new();
        for peer in self.peers.store.state() {
            match view::parse_peer(&peer, &mut problems) {
                Ok(peer) => peers.push(peer),
                Err(problem) => problems.push(problem),
            }
        }
        peers.sort_by(|a, b| a.name.cmp(&b.name));
        let claims = claims(&settings, &node);
        self.speak_for_ourselves(&mut peers, &claims);
        Ok(Inputs {
            node: self.node.clone(),
            settings,
            blocks: view::blocks_by_node(&self.blocks.store.state()),
            node_addresses: node_addresses(&node, &["InternalIP", "ExternalIP"]),
            claims,
            api_server,
            keepalive: keepalive(&node, &mut problems),
            resolved: BTreeMap::new(),
            peers,
            problems,
        })
    }

    /// Our own entry is what we know, not what the API server last heard of us.
    fn speak_for_ourselves(&self, peers: &mut Vec<PublishedPeer>, claims: &[IpAddr]) {
        let previous = peers.iter().position(|peer| peer.name == self.node).map(|at| peers.remove(at));
        peers.push(PublishedPeer {
            name: self.node.clone(),
            public_key: self.public_key,
            manual: None,
            endpoint: None,
            host: Vec::new(),
            sees: previous.map(|peer| peer.sees).unwrap_or_default(),
            claims: claims.iter().copied().map(IpNet::from).collect(),
            keepalive: None,
        });
    }

    /// How long the next step may wait; `None` after a failure.
    fn conclude(
        &self,
        outcome: Result<Report, String>,
        agent: &Agent,
        reports: &watch::Sender<Option<Arc<Report>>>,
    ) -> Option<Duration> {
        match outcome {
            Ok(report) => {
                let pause = agent.pause(&report, Instant::now());
                let report = Arc::new(report);
                self.metrics.update(&report);
                self.shared.set(Some(Arc::clone(&report)), None);
                reports.send_replace(Some(report));
                Some(pause)
            }
            Err(error) => {
                tracing::warn!(error, "the mesh is not as it should be");
                self.shared.set(None, Some(error));
                None
            }
        }
    }
}

/// The pause doubles with every failure in a row.
fn after_failure(failures: u32) -> Duration {
    let doubled = 2_u32.saturating_pow(failures.saturating_sub(1));
    AFTER_FIRST_FAILURE.saturating_mul(doubled).min(AFTER_FAILURE)
}

/// Publishes what reports say, one write at a time; while the API server is away the latest report waits.
async fn publisher(context: &Context, mut inbox: watch::Receiver<Option<Arc<Report>>>) -> Infallible {
    let mut own = context.peers.subscribe();
    let regarding = node_reference(&context.node);
    let mut events = ProblemEvents::new(context.events.clone(), regarding, PROBLEM_EVENT);
    loop {
        tokio::select! {
            Ok(()) = inbox.changed() => {}
            _ = own.changed() => {}
        }
        let Some(report) = inbox.borrow_and_update().clone() else { continue };
        match timeout(PUBLISH, publish_report(context, &report, &mut events)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot publish this node's WireKubePeer");
                tokio::time::sleep(AFTER_FAILURE).await;
            }
            Err(_) => {
                tracing::warn!("publishing this node's WireKubePeer took more than {} s", PUBLISH.as_secs())
            }
        }
    }
}

async fn publish_report(
    context: &Context,
    report: &Report,
    events: &mut ProblemEvents,
) -> Result<(), kube::Error> {
    let Some(node) = context.nodes.store.get(&ObjectRef::new(&context.node)) else { return Ok(()) };
    let others: Vec<Arc<WireKubePeer>> = context.peers.store.state();
    let reported = |peer: &str, endpoint: SocketAddr| {
        let text = endpoint.to_string();
        others
            .iter()
            // The first by name report; counting only those keeps the choice from swinging.
            .filter(|other| other.name_any() < context.node)
            .filter_map(|other| other.status.as_ref()?.observed_endpoints.get(peer))
            .filter(|seen| seen.endpoint == text)
            .count()
    };
    let desired = publish::desired(&publish::Facts {
        public_key: context.public_key,
        report,
        manual: manual_endpoint(&node),
        claims: report.claims.iter().map(|address| IpNet::from(*address).to_string()).collect(),
        keepalive: keepalive(&node, &mut Vec::new()),
        reported: &reported,
    });
    let present = context.peers.store.get(&ObjectRef::new(&context.node));
    publish::publish(&context.client, &node, present.as_deref(), &desired).await?;
    events.update(&report.problems, Instant::now());
    Ok(())
}

/// WireKube's annotation beats Kilo's.
fn manual_endpoint(node: &Node) -> Option<&str> {
    [ANNOTATION_ENDPOINT, ANNOTATION_KILO_FORCE_ENDPOINT]
        .iter()
        .find_map(|name| node.annotations().get(*name))
        .map(String::as_str)
        .filter(|endpoint| !endpoint.is_empty())
}

fn keepalive(node: &Node, problems: &mut Vec<String>) -> Option<u16> {
    let text = node.annotations().get(ANNOTATION_KILO_KEEPALIVE)?;
    text.parse()
        .map_err(|_| {
            problems.push(format!(
                "Node {}: annotation {ANNOTATION_KILO_KEEPALIVE} is {text:?}, which is no number of seconds",
                node.name_any()
            ));
        })
        .ok()
}

/// What this node wants to be reached at through the mesh: its internal addresses. External ones belong to the cloud's
/// translation, and people reach them without the mesh.
fn claims(settings: &MeshSettings, node: &Node) -> Vec<IpAddr> {
    if settings.claim_node_addresses { node_addresses(node, &["InternalIP"]) } else { Vec::new() }
}

/// Addresses of the Node object of these kinds, in the order of the kinds, without repetition.
pub(crate) fn node_addresses(node: &Node, kinds: &[&str]) -> Vec<IpAddr> {
    let listed = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let mut addresses = Vec::new();
    for kind in kinds {
        for entry in listed.clone().filter(|entry| entry.type_ == *kind) {
            match entry.address.parse() {
                Ok(address) if !addresses.contains(&address) => addresses.push(address),
                _ => {}
            }
        }
    }
    addresses
}

/// Host names given as endpoints, looked up beside everything else: a name that does not resolve delays nobody.
#[derive(Default)]
struct Names {
    asked: BTreeMap<String, Instant>,
    known: Arc<Mutex<BTreeMap<String, SocketAddr>>>,
    lookups: JoinSet<()>,
}

impl Names {
    /// What is known now; what is missing or old is being looked up when this returns.
    fn resolve(&mut self, peers: &[PublishedPeer]) -> BTreeMap<String, SocketAddr> {
        let wanted = peers.iter().filter_map(|peer| peer.manual.as_ref());
        let wanted: Vec<&String> = wanted.filter(|text| text.parse::<SocketAddr>().is_err()).collect();
        self.asked.retain(|name, _| wanted.contains(&name));
        while self.lookups.try_join_next().is_some() {}
        for name in wanted {
            let fresh = self.asked.get(name).is_some_and(|at| at.elapsed() < NAME_LIFETIME);
            if !fresh {
                self.asked.insert(name.clone(), Instant::now());
                self.lookups.spawn(look_up(name.clone(), Arc::clone(&self.known)));
            }
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|name, _| self.asked.contains_key(name));
        known.clone()
    }
}

/// A failed look-up leaves the last known address in use.
async fn look_up(name: String, known: Arc<Mutex<BTreeMap<String, SocketAddr>>>) {
    match timeout(NAME_LIFETIME, tokio::net::lookup_host(name.clone())).await {
        Ok(Ok(mut addresses)) => {
            if let Some(address) = addresses.next() {
                known.lock().unwrap_or_else(PoisonError::into_inner).insert(name, address);
            }
        }
        Ok(Err(error)) => tracing::warn!(name, %error, "cannot resolve a peer's endpoint"),
        Err(_) => tracing::warn!(name, "a peer's endpoint did not resolve in {} s", NAME_LIFETIME.as_secs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_in_a_row_make_the_pause_longer_up_to_a_limit() {
        let pauses: Vec<u128> = [1, 2, 3, 6, 7, 1000].map(|n| after_failure(n).as_millis()).to_vec();
        assert_eq!(pauses, [50, 100, 200, 1600, 2000, 2000]);
    }
}

//! Publishes this node's WireKubePeer and Events about problems of the mesh, fed by reports.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::{EventPublisher, PendingEvent, ProblemEvent, ProblemEvents, node_reference};
use fairlead_members::cached_peer::CachedPeer;
use ipnet::IpNet;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::runtime::reflector::ObjectRef;
use tokio::sync::watch;
use tokio::time::{sleep, sleep_until, timeout};

use super::publish;
use super::publish::Writes;
use super::reports::{Publication, Reports};
use super::write_budget::WriteBudget;
use crate::apply::report::Report;
use crate::gather::keys::Keys;
use crate::model::problem::MeshFailure;

/// Longest an API call may take before it is given up and retried.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failure.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// Interval at which the published object is compared without news, and its growth for each node of the mesh; only differences are written.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);
const REFRESH_PER_NODE: Duration = Duration::from_millis(5);
/// Least pause between two writes, for each node of the mesh, and its bounds. [`WriteBudget`] says how many there may be.
const PAUSE_PER_NODE: Duration = Duration::from_millis(10);
const MIN_PAUSE: Duration = Duration::from_millis(300);
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Least pause between two comparisons, for each node of the mesh.
const COMPARE_PER_NODE: Duration = Duration::from_micros(500);

/// Problems of the mesh as Events on the Node, each with its own reason.
const PROBLEM_EVENT: ProblemEvent = ProblemEvent {
    resolved: "MeshProblemsGone",
    resolved_note: "the mesh has no problems any more",
    action: "JoinMesh",
};

/// Publishes what this node says of itself.
pub(crate) struct Publisher {
    pub(crate) client: Client,
    pub(crate) node: String,
    pub(crate) keys: watch::Receiver<Keys>,
    pub(crate) nodes: Arc<Cache<Node>>,
    pub(crate) peers: Arc<Cache<CachedPeer>>,
    pub(crate) events: EventPublisher,
    pub(crate) reports: Arc<Reports>,
}

impl Publisher {
    /// Publishes what reports say, one write at a time; while the API server is away the latest report waits.
    pub(crate) async fn run(self, mut inbox: watch::Receiver<Publication>) -> Infallible {
        let mut peers = self.peers.subscribe();
        let mut keys = self.keys.clone();
        let regarding = node_reference(&self.node);
        let mut events = ProblemEvents::new(self.events.clone(), regarding, PROBLEM_EVENT);
        let mut state = State { seen: Seen::default(), budget: WriteBudget::new(Instant::now()) };
        let mut waiting = None;
        let mut warned = None;
        loop {
            let members = u32::try_from(self.peers.store.len()).unwrap_or(u32::MAX);
            let refresh = REFRESH_INTERVAL.max(REFRESH_PER_NODE.saturating_mul(members));
            tokio::select! {
                Ok(()) = inbox.changed() => {}
                _ = peers.changed() => {}
                Ok(()) = keys.changed() => {}
                () = sleep(waiting.take().unwrap_or(refresh).min(refresh)) => {}
            }
            let publication = inbox.borrow_and_update().clone();
            self.warn_of(&publication, &mut warned);
            let written = timeout(TIMEOUT, self.publish(&publication, &mut state)).await;
            let pause = match written {
                Ok(Ok(Writes { spec, status, wait })) => {
                    waiting = wait;
                    self.reports.published(None);
                    if let Publication::Member(report) = &publication {
                        let problems = publish::problems(&self.node, report);
                        let problems = problems.iter().map(|problem| (problem.reason(), problem.to_string()));
                        events.update(problems, Instant::now());
                    }
                    let compared = COMPARE_PER_NODE.saturating_mul(members);
                    if spec || status { pause_after_write(members, rand::random()) } else { compared }
                }
                Ok(Err(error)) => {
                    self.refused(&error);
                    RETRY_INTERVAL
                }
                Err(_) => {
                    let seconds = TIMEOUT.as_secs();
                    tracing::warn!("publishing this node's WireKubePeer took more than {seconds} s");
                    RETRY_INTERVAL
                }
            };
            self.pause(pause.min(MAX_PAUSE), &publication, &inbox, &keys).await;
        }
    }

    /// Rests. A Peer or an address that came to this node, and a key of this node, do not wait as other news does: packets take
    /// another way.
    async fn pause(
        &self,
        pause: Duration,
        published: &Publication,
        inbox: &watch::Receiver<Publication>,
        keys: &watch::Receiver<Keys>,
    ) {
        let until = tokio::time::Instant::now() + pause;
        sleep(pause.min(MIN_PAUSE)).await;
        let differs = |now: &Publication| match (published, now) {
            (Publication::Member(before), Publication::Member(now)) => {
                !before.entry_terms().eq(now.entry_terms()) || before.own.claims != now.own.claims
            }
            _ => false,
        };
        // What it sees is news for the inbox all the same.
        let mut news = inbox.clone();
        let mut keys = keys.clone();
        tokio::select! {
            _ = news.wait_for(differs) => {}
            Ok(()) = keys.changed() => {}
            () = sleep_until(until) => {}
        }
    }

    /// Publishes an Event with the reason why this node is kept from the mesh, once until it is a member again.
    fn warn_of(&self, publication: &Publication, warned: &mut Option<MeshFailure>) {
        match publication {
            Publication::Outside(failure) if warned.as_ref() != Some(failure) => {
                self.events.warn(PendingEvent {
                    regarding: node_reference(&self.node),
                    reason: failure.reason(),
                    action: "JoinMesh",
                    note: failure.to_string(),
                });
                *warned = Some(failure.clone());
            }
            Publication::Outside(_) | Publication::Unknown => {}
            Publication::Left | Publication::Member(_) => *warned = None,
        }
    }

    /// A refusal keeps this node's state from all others; the operator has to know.
    fn refused(&self, error: &kube::Error) {
        tracing::warn!(%error, "cannot publish this node's WireKubePeer");
        let kube::Error::Api(status) = error else { return };
        let note = format!("the API server refuses this node's WireKubePeer: {}", status.message);
        self.events.warn(PendingEvent {
            regarding: node_reference(&self.node),
            reason: "PublishFailed",
            action: "JoinMesh",
            note: note.clone(),
        });
        self.reports.published(Some(note));
    }

    /// Returns what was written, and what has to wait.
    async fn publish(&self, publication: &Publication, state: &mut State) -> Result<Writes, kube::Error> {
        let State { seen, budget } = state;
        let nothing = Writes::default();
        let Some(node) = self.nodes.store.get(&ObjectRef::new(&self.node)) else { return Ok(nothing) };
        let present = self.peers.store.get(&ObjectRef::new(&self.node));
        let present = present.as_ref().and_then(|present| present.own());
        let status = present.as_ref().and_then(|present| present.status.as_ref());
        let now = Timestamp::now();
        let report = match publication {
            Publication::Member(report) => report,
            Publication::Left => {
                let Some(left) = status.and_then(|status| publish::left(status, now)) else {
                    return Ok(nothing);
                };
                publish::publish_status(&self.client, &self.node, &left).await?;
                return Ok(Writes { status: true, ..nothing });
            }
            Publication::Outside(failure) => {
                let Some(outside) = status.and_then(|status| publish::outside(failure, status, now)) else {
                    return Ok(nothing);
                };
                publish::publish_status(&self.client, &self.node, &outside).await?;
                return Ok(Writes { status: true, ..nothing });
            }
            Publication::Unknown => return Ok(nothing),
        };
        let members = report.peers.len().saturating_add(1);
        seen.update(report, Instant::now());
        let reporters = self.reporters();
        let observes = |peer: &str, endpoint: SocketAddr| {
            let of_peer = reporters.get(&(peer.to_owned(), endpoint));
            let of_peer = of_peer.into_iter().flatten().map(String::as_str);
            publish::observes((&self.node, peer), of_peer, members, seen.age(peer, endpoint))
        };
        let keys = self.keys.borrow().clone();
        let desired = publish::desired(&publish::Facts {
            node: &self.node,
            public_key: keys.public_key,
            next_key: keys.next_public_key(),
            report,
            claims: report.own.claims.iter().map(|address| IpNet::from(*address).to_string()).collect(),
            observes: &observes,
            present: status,
            now,
        });
        let present = present.map(|present| &**present);
        let writes = publish::writes(budget, Instant::now(), present, &desired, members);
        if writes.spec {
            publish::publish_spec(&self.client, &node, &desired.spec).await?;
        }
        if writes.status {
            publish::publish_status(&self.client, &self.node, &desired.status).await?;
            let candidates = desired.status.ice_candidates.len();
            tracing::debug!(candidates, "published the state of this node");
        }
        Ok(writes)
    }

    /// Names of the nodes that say that they see a peer at an endpoint, by peer and endpoint.
    fn reporters(&self) -> BTreeMap<(String, SocketAddr), Vec<String>> {
        let mut reporters: BTreeMap<(String, SocketAddr), Vec<String>> = BTreeMap::new();
        for reporter in self.peers.store.state() {
            let reporter = reporter.member();
            for (peer, (_, endpoint)) in &reporter.endpoints.sightings {
                reporters.entry((peer.clone(), *endpoint)).or_default().push(reporter.name.clone());
            }
        }
        reporters
    }
}

/// State on which the next publication depends.
struct State {
    seen: Seen,
    budget: WriteBudget,
}

/// Time since which this node sees each peer at its endpoint.
#[derive(Default)]
struct Seen(BTreeMap<String, (SocketAddr, Instant)>);

impl Seen {
    fn update(&mut self, report: &Report, now: Instant) {
        let mut before = std::mem::take(&mut self.0);
        for peer in &report.peers {
            let Some(endpoint) = peer.published_endpoint else { continue };
            let known = before.remove(&peer.name).filter(|(known, _)| *known == endpoint);
            self.0.insert(peer.name.clone(), known.unwrap_or((endpoint, now)));
        }
    }

    fn age(&self, peer: &str, endpoint: SocketAddr) -> Duration {
        let since = self.0.get(peer).filter(|(known, _)| *known == endpoint);
        since.map_or(Duration::ZERO, |(_, since)| since.elapsed())
    }
}

/// Pause of a node after a write. Grows with the mesh, whose members all read each write, and is stretched by up to a half: nodes that saw
/// one change do not write at one moment.
pub fn pause_after_write(members: u32, random: u8) -> Duration {
    let pause = PAUSE_PER_NODE.saturating_mul(members).clamp(MIN_PAUSE, MAX_PAUSE);
    pause.saturating_mul(u32::from(random).saturating_add(512)) / 512
}

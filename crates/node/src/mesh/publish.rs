//! This node's own WireKubePeer: what it should say (pure), and writing it.
//!
//! In a mesh of a thousand nodes each write is read by all of them. So nothing lists all peers; what every node sees is
//! published by a few ([`super::observers`]); and counters are written along with something else, or rarely.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use fairlead_api::names::{KEEPALIVE, LABEL_WIREKUBE_NODE};
use fairlead_api::resources::{
    CandidateType, EndpointDiscoveryMethod, IceCandidate, NatType as PublishedNat, ObservedEndpoint,
    PeerCounts, PeerTransport, TransportMode, WireGuardImplementation, WireKubePeer, WireKubePeerSpec,
    WireKubePeerStatus,
};
use fairlead_api::wireguard::PublicKey;
use fairlead_dataplane::wireguard::Backend;
use fairlead_path::NatType;
use fairlead_path::State;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::api::{ObjectMeta, Patch, PatchParams};
use kube::{Api, Client, Resource as _, ResourceExt};

use super::observers::{self, OBSERVERS};
use super::problem::{MeshFailure, MeshProblem};
use super::report::{PeerReport, Report};

/// Field manager of our server-side applies.
const MANAGER: &str = "fairlead-node";
/// Priority of an address of the node itself (WireKube's candidate table).
const HOST_PRIORITY: i32 = 100;
/// Up to this many peers, each is listed.
const MAX_LISTED: usize = 100;
/// Most observations one node publishes.
const MAX_OBSERVATIONS: usize = 64;
/// Most problems one node publishes.
const MAX_PROBLEMS: usize = 16;
/// Most names in the message of a condition.
const MAX_NAMES: usize = 8;
/// How often counters are written at least, in a small mesh.
const MIN_REFRESH: Duration = Duration::from_secs(300);
/// The same for each node of the mesh: all together write this often.
const REFRESH_PER_NODE: Duration = Duration::from_millis(3600);

/// What the node's object should say, besides its name.
#[derive(Debug, Clone, PartialEq)]
pub struct Desired {
    /// The specification.
    pub spec: WireKubePeerSpec,
    /// The status.
    pub status: WireKubePeerStatus,
}

/// What [`desired`] is made from.
pub struct Facts<'a> {
    /// This node's name.
    pub node: &'a str,
    /// Identity of this node.
    pub public_key: PublicKey,
    /// What the agent found.
    pub report: &'a Report,
    /// Addresses of the Node object, which this node claims.
    pub claims: Vec<String>,
    /// Whether this node is to publish the endpoint at which it sees a peer.
    pub observes: &'a (dyn Fn(&str, SocketAddr) -> bool + Sync),
    /// What is published now.
    pub present: Option<&'a WireKubePeerStatus>,
    /// The time.
    pub now: Timestamp,
}

/// The object this node should publish.
pub fn desired(facts: &Facts<'_>) -> Desired {
    let report = facts.report;
    let (endpoint, method) = endpoint(facts);
    let is_up = |peer: &&PeerReport| peer.path.state == State::Up;
    let up: Vec<&PeerReport> = report.peers.iter().filter(is_up).collect();
    let is_small = report.peers.len() <= MAX_LISTED;
    let listed = up.iter().filter(|_| is_small);
    let devices = || report.peers.iter().filter_map(|peer| peer.device.as_ref());
    let sum = |count: u64| i64::try_from(count).ok();
    Desired {
        spec: WireKubePeerSpec {
            public_key: facts.public_key.to_string(),
            endpoint,
            allowed_ips: facts.claims.clone(),
            persistent_keepalive: report.keepalive.unwrap_or(KEEPALIVE.as_secs() as u16),
        },
        status: WireKubePeerStatus {
            peers: Some(counts(report.peers.len(), up.len())),
            last_handshake: devices().filter_map(|device| device.last_handshake).max().and_then(time),
            last_reported_at: Some(Time(facts.now)),
            bytes_received: sum(devices().map(|device| device.rx_bytes).sum()),
            bytes_sent: sum(devices().map(|device| device.tx_bytes).sum()),
            endpoint_discovery_method: Some(method),
            nat_type: published_nat(report.nat),
            ice_candidates: report.host.iter().map(host_candidate).collect(),
            transport_mode: (!up.is_empty()).then_some(TransportMode::Direct),
            peer_transports: listed.map(|peer| (peer.name.clone(), PeerTransport::Direct)).collect(),
            observed_endpoints: observations(facts, &up),
            wireguard: Some(match report.backend {
                Backend::Kernel => WireGuardImplementation::Kernel,
                Backend::Embedded => WireGuardImplementation::Embedded,
            }),
            problems: problems(facts.node, report)
                .iter()
                .take(MAX_PROBLEMS)
                .map(ToString::to_string)
                .collect(),
            ..connection(facts)
        },
    }
}

/// The status of a node that has left the mesh because the last WireKubeMesh was deleted. Nothing of the mesh remains in it.
/// `None` if `present` says that already.
pub fn left(present: &WireKubePeerStatus, now: Timestamp) -> Option<WireKubePeerStatus> {
    let failure = MeshFailure::NoMesh;
    let unchanged = WireKubePeerStatus {
        connected: Some(false),
        last_reported_at: present.last_reported_at.clone(),
        conditions: vec![ready(Some((failure.reason(), failure.to_string())), Some(present), now)],
        ..WireKubePeerStatus::default()
    };
    (unchanged != *present).then_some(WireKubePeerStatus { last_reported_at: Some(Time(now)), ..unchanged })
}

/// The problems that this node publishes: its own, and those it was chosen for. All are in `fairlead status`.
pub fn problems<'a>(node: &str, report: &'a Report) -> Vec<&'a MeshProblem> {
    let members = report.peers.len().saturating_add(1);
    let publishes = |problem: &&MeshProblem| {
        let nodes = problem.nodes();
        let subject = || nodes.join(" ");
        nodes.is_empty()
            || nodes.contains(&node)
            || observers::is_chosen(observers::place(node, &subject()), members)
    };
    report.problems.iter().filter(publishes).collect()
}

/// Whether `present` has to be written again: something changed but counters and times, or these are old.
pub fn is_due(present: Option<&WireKubePeerStatus>, desired: &WireKubePeerStatus, members: usize) -> bool {
    let lasting = |status: &WireKubePeerStatus| WireKubePeerStatus {
        peers: None,
        last_handshake: None,
        last_reported_at: None,
        bytes_received: None,
        bytes_sent: None,
        ..status.clone()
    };
    let Some(present) = present else { return true };
    let period = MIN_REFRESH.max(REFRESH_PER_NODE.saturating_mul(u32::try_from(members).unwrap_or(u32::MAX)));
    let age = match (&desired.last_reported_at, &present.last_reported_at) {
        (Some(now), Some(then)) => now.0.duration_since(then.0).unsigned_abs(),
        _ => Duration::MAX,
    };
    age >= period || lasting(present) != lasting(desired)
}

fn counts(total: usize, up: usize) -> PeerCounts {
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    PeerCounts { total: number(total), direct: number(up), unreachable: number(total.saturating_sub(up)) }
}

fn time(at: SystemTime) -> Option<Time> {
    let seconds = at.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs();
    Timestamp::from_second(i64::try_from(seconds).ok()?).ok().map(Time)
}

/// `connected`, and the condition that explains it.
fn connection(facts: &Facts<'_>) -> WireKubePeerStatus {
    let peers = &facts.report.peers;
    let members = peers.len().saturating_add(1);
    let counts = |peer: &&PeerReport| {
        peers.len() <= MAX_LISTED || observers::is_chosen(observers::place(facts.node, &peer.name), members)
    };
    let mut away = peers
        .iter()
        .filter(counts)
        .filter(|peer| peer.path.state != State::Up)
        .map(|peer| peer.name.as_str());
    let mut names: Vec<&str> = away.by_ref().take(MAX_NAMES).collect();
    let connected = names.is_empty();
    if away.next().is_some() {
        names.push("and more");
    }
    let why = (!connected).then(|| {
        let message = format!("no usable path to {}; see `fairlead status` on this node", names.join(", "));
        ("PeersUnreachable", message)
    });
    WireKubePeerStatus {
        connected: Some(connected),
        conditions: vec![ready(why, facts.present, facts.now)],
        ..WireKubePeerStatus::default()
    }
}

/// The condition `Ready`; it keeps its time while its status stays.
fn ready(why: Option<(&str, String)>, present: Option<&WireKubePeerStatus>, now: Timestamp) -> Condition {
    let status = if why.is_none() { "True" } else { "False" };
    let (reason, message) = why.unwrap_or(("Connected", "every observed peer has a usable path".to_owned()));
    let mut before = present.into_iter().flat_map(|status| &status.conditions);
    let before = before.find(|condition| condition.type_ == "Ready" && condition.status == status);
    Condition {
        type_: "Ready".to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: before.map_or(Time(now), |before| before.last_transition_time.clone()),
        observed_generation: None,
    }
}

/// `kernel` or `embedded`.
pub fn backend_name(backend: Backend) -> &'static str {
    match backend {
        Backend::Kernel => "kernel",
        Backend::Embedded => "embedded",
    }
}

/// The name of a NAT type for people; empty while unknown.
pub fn nat_name(nat: NatType) -> &'static str {
    match nat {
        NatType::Open => "open",
        NatType::Cone => "cone",
        NatType::Symmetric => "symmetric",
        NatType::Unknown => "",
    }
}

fn published_nat(nat: NatType) -> Option<PublishedNat> {
    match nat {
        NatType::Open => Some(PublishedNat::Open),
        NatType::Cone => Some(PublishedNat::Cone),
        NatType::Symmetric => Some(PublishedNat::Symmetric),
        NatType::Unknown => None,
    }
}

/// The one endpoint shown to people, and how it was found.
fn endpoint(facts: &Facts<'_>) -> (Option<String>, EndpointDiscoveryMethod) {
    if let Some(manual) = &facts.report.manual {
        return (Some(manual.to_string()), EndpointDiscoveryMethod::Manual);
    }
    match (facts.report.observed.first(), facts.report.host.first()) {
        (Some(observed), _) if facts.report.nat != NatType::Open => {
            (Some(observed.to_string()), EndpointDiscoveryMethod::Observed)
        }
        (_, host) => (host.map(ToString::to_string), EndpointDiscoveryMethod::InternalIp),
    }
}

fn host_candidate(address: &SocketAddr) -> IceCandidate {
    IceCandidate { type_: CandidateType::Host, address: address.to_string(), priority: HOST_PRIORITY }
}

/// Endpoints of peers that did not publish them: what a peer behind another NAT needs to reach them.
fn observations(facts: &Facts<'_>, up: &[&PeerReport]) -> BTreeMap<String, ObservedEndpoint> {
    up.iter()
        .filter(|peer| peer.endpoint_is_news)
        .filter_map(|peer| {
            let endpoint = peer.device.as_ref()?.config.endpoint?;
            (facts.observes)(&peer.name, endpoint).then(|| {
                let seen = ObservedEndpoint {
                    public_key: peer.public_key.to_string(),
                    endpoint: endpoint.to_string(),
                    last_seen: None,
                };
                (peer.name.clone(), seen)
            })
        })
        .take(MAX_OBSERVATIONS)
        .collect()
}

/// Whether this node is to publish that it sees a peer at an endpoint, of which it has known for `age`: unless enough of the
/// `reporters` precede it, and only after those that do had time to.
pub fn observes<'a>(
    (node, peer): (&str, &str),
    reporters: impl Iterator<Item = &'a str>,
    members: usize,
    age: Duration,
) -> bool {
    let own = observers::place(node, peer);
    let before = reporters.filter(|other| *other != node && observers::place(other, peer) < own).count();
    before < OBSERVERS && age >= observers::delay(own, members)
}

/// Writes the specification if it differs.
///
/// # Errors
/// The API server's answer. The admission policy refuses any name but this node's.
pub async fn publish_spec(
    client: &Client,
    node: &Node,
    present: Option<&WireKubePeer>,
    desired: &WireKubePeerSpec,
) -> Result<bool, kube::Error> {
    if present.is_some_and(|peer| peer.spec == *desired) {
        return Ok(false);
    }
    let name = node.name_any();
    let mut object = WireKubePeer::new(&name, desired.clone());
    object.metadata = metadata(&name, node);
    let peers: Api<WireKubePeer> = Api::all(client.clone());
    peers.patch(&name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&object)).await?;
    Ok(true)
}

/// Writes the status.
///
/// # Errors
/// See [`publish_spec`].
pub async fn publish_status(
    client: &Client,
    name: &str,
    status: &WireKubePeerStatus,
) -> Result<(), kube::Error> {
    let peers: Api<WireKubePeer> = Api::all(client.clone());
    let object = serde_json::json!({
        "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer",
        "metadata": { "name": name }, "status": status,
    });
    peers.patch_status(name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&object)).await.map(drop)
}

fn metadata(name: &str, node: &Node) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.to_owned()),
        labels: Some([(LABEL_WIREKUBE_NODE.to_owned(), name.to_owned())].into()),
        owner_references: node.owner_ref(&()).map(|owner| vec![owner]),
        ..ObjectMeta::default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use fairlead_api::wireguard::{PeerConfig, PeerState};
    use fairlead_path::{Reason, Status};
    use fairlead_topology::Problem;

    use super::*;
    use crate::mesh::problem::MeshProblem;

    fn peer(name: &str, state: State, endpoint: &str, news: bool) -> PeerReport {
        let config = PeerConfig {
            preshared_key: None,
            endpoint: endpoint.parse().ok(),
            persistent_keepalive: Some(25),
            allowed_ips: Vec::new(),
        };
        PeerReport {
            name: name.to_owned(),
            public_key: PublicKey([name.len() as u8; 32]),
            path: Status {
                state,
                reason: Reason::NotObserved,
                endpoint: None,
                source: None,
                message: String::new(),
            },
            device: Some(PeerState {
                config,
                last_handshake: Some(SystemTime::UNIX_EPOCH),
                rx_bytes: 1,
                tx_bytes: 1,
            }),
            prefixes: Vec::new(),
            endpoint_is_news: news,
        }
    }

    fn report(nat: NatType, peers: Vec<PeerReport>) -> Report {
        Report {
            backend: Backend::Embedded,
            interface: "wire_kube".to_owned(),
            mtu: 1420,
            port: 51820,
            nat,
            host: vec!["192.168.1.10:51820".parse().unwrap()],
            observed: vec!["203.0.113.9:4000".parse().unwrap()],
            peers,
            own_prefixes: Vec::new(),
            claims: Vec::new(),
            problems: vec![MeshProblem::Plan(Problem::NoKey { node: "n".to_owned() }); 100],
            manual: None,
            keepalive: None,
        }
    }

    const NO: &(dyn Fn(&str, SocketAddr) -> bool + Sync) = &|_, _| false;
    const YES: &(dyn Fn(&str, SocketAddr) -> bool + Sync) = &|_, _| true;

    fn facts<'a>(report: &'a Report, observes: &'a (dyn Fn(&str, SocketAddr) -> bool + Sync)) -> Facts<'a> {
        let claims = vec!["192.168.1.10/32".to_owned()];
        let (public_key, now) = (PublicKey([9; 32]), Timestamp::UNIX_EPOCH);
        Facts { node: "own", public_key, report, claims, observes, present: None, now }
    }

    /// A mesh of that many peers, of which those with these numbers are down.
    fn mesh(peers: usize, down: &[usize]) -> Report {
        let peer = |number: usize| {
            let state = if down.contains(&number) { State::Down } else { State::Up };
            let named = peer("x", state, "203.0.113.1:1", true);
            PeerReport { name: format!("node-{number:04}"), public_key: PublicKey([1; 32]), ..named }
        };
        report(NatType::Open, (0..peers).map(peer).collect())
    }

    fn bytes(status: &WireKubePeerStatus) -> usize {
        serde_json::to_string(status).unwrap().len()
    }

    #[test]
    fn a_node_that_left_the_mesh_publishes_nothing_of_it_any_more() {
        let half =
            report(NatType::Open, vec![peer("a", State::Up, "", false), peer("bb", State::Down, "", false)]);
        let before = desired(&facts(&half, NO)).status;
        assert_eq!(before.connected, Some(false), "it was not connected before it left either");
        let now = Timestamp::from_second(60).unwrap();
        let after = left(&before, now).unwrap();
        let expected = WireKubePeerStatus {
            connected: Some(false),
            last_reported_at: Some(Time(now)),
            conditions: after.conditions.clone(),
            ..WireKubePeerStatus::default()
        };
        assert_eq!((after.conditions[0].reason.as_str(), &after), ("NoMesh", &expected));
        let later = Timestamp::from_second(120).unwrap();
        assert_eq!(left(&after, later), None, "it is written once");
    }

    #[test]
    fn counters_and_times_alone_are_written_rarely() {
        let first = report(NatType::Cone, vec![peer("a", State::Up, "203.0.113.1:1", true)]);
        let mut later = first.clone();
        if let Some(device) = later.peers.first_mut().and_then(|peer| peer.device.as_mut()) {
            device.rx_bytes = 1_000_000;
            device.last_handshake = Some(SystemTime::now());
        }
        let before = desired(&facts(&first, YES)).status;
        assert!(is_due(None, &before, 2));
        let at = |seconds: i64| {
            let now = Timestamp::from_second(seconds).unwrap();
            desired(&Facts { present: Some(&before), now, ..facts(&later, YES) }).status
        };
        assert!(!is_due(Some(&before), &at(299), 2));
        assert!(is_due(Some(&before), &at(300), 2));
        assert!(!is_due(Some(&before), &at(3500), 1000), "in a mesh of a thousand nodes about once an hour");
        let written = at(300);
        assert_eq!((written.bytes_received, written.bytes_sent), (Some(1_000_000), Some(1)));
        assert!(written.last_handshake > before.last_handshake);
        assert_eq!(written.conditions, before.conditions, "the condition keeps its time");
        let other = WireKubePeerStatus { connected: Some(false), ..before.clone() };
        assert!(is_due(Some(&before), &other, 2), "everything else at once");
    }

    #[test]
    fn one_of_a_thousand_nodes_that_fails_changes_the_status_of_a_few() {
        let (before, after) = (mesh(999, &[]), mesh(999, &[500]));
        let status = |node: &str, report: &Report| {
            // Each node sees the endpoint of each.
            let observes =
                |peer: &str, _: SocketAddr| observers::is_chosen(observers::place(node, peer), 1000);
            let status = desired(&Facts { node, ..facts(report, &observes) }).status;
            assert!(bytes(&status) < 5_000, "{} bytes", bytes(&status));
            status
        };
        let writes: Vec<String> = (0..1000)
            .map(|number| format!("observer-{number}"))
            .filter(|node| is_due(Some(&status(node, &before)), &status(node, &after), 1000))
            .collect();
        assert!((1..=10).contains(&writes.len()), "{writes:?}");
        let seen_by = writes.first().unwrap();
        let seen = status(seen_by, &after);
        assert_eq!((seen.connected, seen.conditions[0].reason.as_str()), (Some(false), "PeersUnreachable"));
        assert!(seen.conditions[0].message.contains("node-0500"), "{}", seen.conditions[0].message);
        assert_eq!(seen.peers, Some(PeerCounts { total: 999, direct: 998, unreachable: 1 }));
    }

    #[test]
    fn a_problem_of_others_is_published_by_a_few_and_its_own_by_each() {
        let mut report = mesh(999, &[]);
        let about = |node: &str| MeshProblem::Plan(Problem::NoKey { node: node.to_owned() });
        report.problems = vec![about("elsewhere")];
        let publishers =
            (0..1000).filter(|number| !problems(&format!("n{number}"), &report).is_empty()).count();
        assert!((1..=10).contains(&publishers), "{publishers}");
        let silent = (0..1000)
            .map(|number| format!("n{number}"))
            .find(|node| problems(node, &report).is_empty())
            .unwrap();
        report.problems.push(about(&silent));
        assert_eq!(problems(&silent, &report), [&about(&silent)]);
    }

    #[test]
    fn an_observation_is_published_by_those_of_the_first_places_that_see_it() {
        let nodes: Vec<String> = (0..1000).map(|number| format!("n{number}")).collect();
        let mut places: Vec<&str> = nodes.iter().map(String::as_str).collect();
        places.sort_by_key(|node| observers::place(node, "peer"));
        let old = Duration::from_secs(3600);
        let publishes = |node: &str, reporters: &[&str], age| {
            observes((node, "peer"), reporters.iter().copied(), nodes.len(), age)
        };
        assert!(publishes(places[0], &places[1..9], Duration::ZERO));
        assert!(publishes(places[2], &places[..2], old));
        assert!(!publishes(places[3], &places[..3], old), "enough precede it");
        assert!(publishes(places[700], &places[701..], old), "none before it sees the peer");
        assert!(!publishes(places[700], &[], Duration::ZERO), "it waits for those before it");
        assert!(publishes(places[3], &places[..2], old), "its own earlier report does not count");
    }

    #[test]
    fn the_endpoint_shown_is_manual_or_observed_or_our_own() {
        let behind = report(NatType::Cone, Vec::new());
        assert_eq!(desired(&facts(&behind, NO)).spec.endpoint.as_deref(), Some("203.0.113.9:4000"));
        let open = report(NatType::Open, Vec::new());
        assert_eq!(desired(&facts(&open, NO)).spec.endpoint.as_deref(), Some("192.168.1.10:51820"));
        let chosen = Report { manual: "node.example:7".parse().ok(), keepalive: Some(0), ..open };
        let manual = desired(&facts(&chosen, NO));
        assert_eq!(manual.spec.persistent_keepalive, 0);
        assert_eq!(manual.spec.endpoint.as_deref(), Some("node.example:7"));
        assert_eq!(manual.status.endpoint_discovery_method, Some(EndpointDiscoveryMethod::Manual));
    }

    #[test]
    fn only_news_of_peers_that_are_up_is_published() {
        let peers = vec![
            peer("a", State::Up, "203.0.113.1:1", true),
            peer("bb", State::Up, "203.0.113.2:1", false),
            peer("ccc", State::Down, "203.0.113.3:1", true),
        ];
        let report = report(NatType::Open, peers);
        let published: Vec<String> =
            desired(&facts(&report, YES)).status.observed_endpoints.into_keys().collect();
        assert_eq!(published, ["a"]);
        assert!(desired(&facts(&report, NO)).status.observed_endpoints.is_empty());
    }

    #[test]
    fn status_is_bounded_and_lists_connected_peers_of_a_small_mesh() {
        let half =
            report(NatType::Open, vec![peer("a", State::Up, "", false), peer("bb", State::Down, "", false)]);
        let status = desired(&facts(&half, NO)).status;
        assert_eq!(status.problems.len(), MAX_PROBLEMS);
        assert_eq!(status.connected, Some(false));
        assert_eq!(status.peer_transports.len(), 1);
        assert_eq!(status.transport_mode, Some(TransportMode::Direct));
        assert_eq!(desired(&facts(&mesh(MAX_LISTED, &[]), NO)).status.peer_transports.len(), MAX_LISTED);
        assert!(desired(&facts(&mesh(MAX_LISTED + 1, &[]), NO)).status.peer_transports.is_empty());
    }
}

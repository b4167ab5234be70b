//! This node's own WireKubePeer: what it should say (pure), and writing it.
//!
//! In a mesh of a thousand nodes each write is read by all of them. So nothing lists all peers; what every node sees is
//! published by a few ([`super::observers`]); and counters are written along with something else, or rarely.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime};

use fairlead_api::conditions::{Finding, condition};
use fairlead_api::names::LABEL_WIREKUBE_NODE;
use fairlead_api::resources::{
    NatType as PublishedNat, PeerCounts, PeerTransport, TransportMode, WireGuardImplementation, WireKubePeer,
    WireKubePeerSpec, WireKubePeerStatus,
};
use fairlead_cluster::events::truncate_note;
use fairlead_dataplane::wireguard::Backend;
use fairlead_keys::KEEPALIVE;
use fairlead_keys::PublicKey;
use fairlead_path::{NatType, State};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::api::{ObjectMeta, Patch, PatchParams};
use kube::{Api, Client, Resource as _, ResourceExt};

pub use self::endpoints::observes;
use self::endpoints::{endpoint, entry_terms, ice_candidates, observations};
use super::observers;
use super::write_budget::{Urgency, WriteBudget};
use crate::apply::report::{PeerReport, Report};
use crate::model::problem::{MeshFailure, MeshProblem};

mod endpoints;
mod ports;

/// Field manager of our server-side applies.
const MANAGER: &str = "fairlead-node";
/// Most peers that are listed one by one.
const MAX_LISTED: usize = 100;
/// Most problems one node publishes.
const MAX_PROBLEMS: usize = 16;
/// Most names in the message of a condition.
const MAX_NAMES: usize = 8;
/// Least time between two writes of which the later one says other reasons for the relay, and nothing else.
const MIN_AGE_FOR_REASONS: Duration = Duration::from_secs(10);
/// Longest time between two writes of counters in a small mesh.
const MIN_REFRESH: Duration = Duration::from_secs(300);
/// Longest time between such writes for each node of the mesh: all together write this often.
const REFRESH_PER_NODE: Duration = Duration::from_millis(3600);

/// Desired content of the node's object, besides its name.
#[derive(Debug, Clone, PartialEq)]
pub struct Desired {
    /// The specification.
    pub spec: WireKubePeerSpec,
    /// The status.
    pub status: WireKubePeerStatus,
}

/// Inputs of [`desired`].
pub struct Facts<'a> {
    /// This node's name.
    pub node: &'a str,
    /// Identity of this node.
    pub public_key: PublicKey,
    /// The key that it is about to use.
    pub next_key: Option<PublicKey>,
    /// State of the mesh on this node.
    pub report: &'a Report,
    /// Addresses of the Node object, which this node claims.
    pub claims: Vec<String>,
    /// Whether this node is to publish the endpoint at which it sees a peer.
    pub observes: &'a (dyn Fn(&str, SocketAddr) -> bool + Sync),
    /// Status that is published now.
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
    let listed = || up.iter().copied().filter(|peer| is_small || peer.is_relayed()).take(MAX_LISTED);
    let relayed = up.iter().filter(|peer| peer.is_relayed()).count();
    let devices = || report.peers.iter().filter_map(|peer| peer.device.as_ref());
    let sum = |count: u64| i64::try_from(count).ok();
    Desired {
        spec: WireKubePeerSpec {
            public_key: facts.public_key.to_string(),
            next_public_key: facts.next_key.map(|key| key.to_string()),
            endpoint,
            allowed_ips: facts.claims.clone(),
            persistent_keepalive: report.configured.keepalive.unwrap_or(KEEPALIVE.as_secs() as u16),
        },
        status: WireKubePeerStatus {
            peers: Some(counts(report.peers.len(), up.len(), relayed)),
            last_handshake: devices().filter_map(|device| device.last_handshake).max().and_then(time),
            last_reported_at: Some(Time(facts.now)),
            bytes_received: sum(devices().map(|device| device.rx_bytes).sum()),
            bytes_sent: sum(devices().map(|device| device.tx_bytes).sum()),
            endpoint_discovery_method: Some(method),
            nat_type: published_nat(report.translation.nat),
            ice_candidates: ice_candidates(report),
            port_prediction: ports::prediction(report, facts.present),
            transport_mode: transport_mode(up.len(), relayed),
            peer_transports: listed().map(|peer| (peer.name.clone(), transport(peer))).collect(),
            relay_reasons: listed().filter_map(|peer| relay_reason(facts, peer)).collect(),
            relay_latency_ms: relay_latency(report),
            observed_endpoints: observations(facts, &up),
            entry_terms: entry_terms(report),
            interface_id: report.own.interface_id.map(|id| id.to_string()),
            prepared_granularity: report.prepared_granularity,
            wireguard: Some(match report.device.backend {
                Backend::Kernel => WireGuardImplementation::Kernel,
                Backend::Embedded => WireGuardImplementation::Embedded,
            }),
            problems: problems(facts.node, report)
                .iter()
                .take(MAX_PROBLEMS)
                .map(|problem| truncate_note(problem.to_string()))
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
        node: present.node.clone(),
        conditions: vec![ready(Some((failure.reason(), failure.to_string())), Some(present), now)],
        ..WireKubePeerStatus::default()
    };
    (unchanged != *present).then_some(WireKubePeerStatus { last_reported_at: Some(Time(now)), ..unchanged })
}

/// The status of a node that is kept from the mesh. What it had published stays: its tunnels may work. `None` if `present` says that already.
pub fn outside(
    failure: &MeshFailure,
    present: &WireKubePeerStatus,
    now: Timestamp,
) -> Option<WireKubePeerStatus> {
    let unchanged = WireKubePeerStatus {
        connected: Some(false),
        conditions: vec![ready(Some((failure.reason(), failure.to_string())), Some(present), now)],
        ..present.clone()
    };
    (unchanged != *present).then_some(WireKubePeerStatus { last_reported_at: Some(Time(now)), ..unchanged })
}

/// The problems that this node publishes: its own, and those it was chosen for. All are in `fairlead status`.
pub fn problems<'a>(node: &str, report: &'a Report) -> Vec<&'a MeshProblem> {
    let members = report.peers.len().saturating_add(1);
    let publishes = |problem: &&MeshProblem| {
        // The controller says it of the mesh.
        if matches!(problem, MeshProblem::GranularityPending { .. }) {
            return false;
        }
        let nodes = problem.nodes();
        let subject = || nodes.join(" ");
        nodes.is_empty()
            || nodes.contains(&node)
            || observers::is_chosen(observers::place(node, &subject()), members)
    };
    report.problems.iter().filter(publishes).collect()
}

/// Whether `present` has to be written again, and for whom: something changed but counters and times, or these are old. Reasons wait until
/// the last write is [`MIN_AGE_FOR_REASONS`] old.
pub fn urgency(
    present: Option<&WireKubePeerStatus>,
    desired: &WireKubePeerStatus,
    members: usize,
) -> Option<Urgency> {
    let lasting = |status: &WireKubePeerStatus| WireKubePeerStatus {
        peers: None,
        last_handshake: None,
        last_reported_at: None,
        bytes_received: None,
        bytes_sent: None,
        relay_latency_ms: None,
        relay_reasons: BTreeMap::new(),
        node: None,
        ..status.clone()
    };
    let Some(present) = present else { return Some(Urgency::Essential) };
    if present.entry_terms != desired.entry_terms {
        return Some(Urgency::Critical);
    }
    if essential(present) != essential(desired) {
        return Some(Urgency::Essential);
    }
    let period = MIN_REFRESH.max(REFRESH_PER_NODE.saturating_mul(u32::try_from(members).unwrap_or(u32::MAX)));
    let age = match (&desired.last_reported_at, &present.last_reported_at) {
        (Some(now), Some(then)) => now.0.duration_since(then.0).unsigned_abs(),
        _ => Duration::MAX,
    };
    let has_other_reasons = present.relay_reasons != desired.relay_reasons;
    let is_due = age >= period
        || (has_other_reasons && age >= MIN_AGE_FOR_REASONS)
        || lasting(present) != lasting(desired);
    is_due.then_some(Urgency::Status)
}

/// Status that peers need to reach this node and other nodes, and that a change of the whole mesh waits for.
fn essential(status: &WireKubePeerStatus) -> WireKubePeerStatus {
    WireKubePeerStatus {
        ice_candidates: status.ice_candidates.clone(),
        nat_type: status.nat_type,
        observed_endpoints: status.observed_endpoints.clone(),
        prepared_granularity: status.prepared_granularity,
        ..WireKubePeerStatus::default()
    }
}

/// Parts of the object that differ and are to be written now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Writes {
    /// The specification.
    pub spec: bool,
    /// The status.
    pub status: bool,
    /// Time that parts which are left out have to wait; `None` if there are none.
    pub wait: Option<Duration>,
}

/// Takes from the budget what the difference needs.
pub fn writes(
    budget: &mut WriteBudget,
    now: Instant,
    present: Option<&WireKubePeer>,
    desired: &Desired,
    members: usize,
) -> Writes {
    let mut wait = None;
    let mut takes = |urgency| match budget.take(now, urgency) {
        Ok(()) => true,
        Err(time) => {
            wait.get_or_insert(time);
            false
        }
    };
    let differs = present.is_none_or(|present| present.spec != desired.spec);
    let spec = differs && takes(Urgency::Critical);
    let status = present.and_then(|present| present.status.as_ref());
    let status = urgency(status, &desired.status, members).is_some_and(takes);
    Writes { spec, status, wait }
}

fn counts(total: usize, up: usize, relayed: usize) -> PeerCounts {
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    PeerCounts {
        total: number(total),
        direct: number(up.saturating_sub(relayed)),
        unreachable: number(total.saturating_sub(up)),
    }
}

fn transport(peer: &PeerReport) -> PeerTransport {
    if peer.is_relayed() { PeerTransport::Relay } else { PeerTransport::Direct }
}

/// Reason why a peer is relayed. While its path is about to change, the published reason stays.
fn relay_reason(facts: &Facts<'_>, peer: &PeerReport) -> Option<(String, String)> {
    let published = || facts.present?.relay_reasons.get(&peer.name).cloned();
    let reason = peer.relay_reason?.lasting().or_else(published)?;
    Some((peer.name.clone(), reason))
}

fn transport_mode(up: usize, relayed: usize) -> Option<TransportMode> {
    match (up, relayed) {
        (0, _) => None,
        (_, 0) => Some(TransportMode::Direct),
        _ if up == relayed => Some(TransportMode::Relay),
        _ => Some(TransportMode::Mixed),
    }
}

fn relay_latency(report: &Report) -> Option<i32> {
    let round_trip = report.relay.as_ref()?.status.round_trip?;
    Some(i32::try_from(round_trip.as_millis()).unwrap_or(i32::MAX))
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

/// The condition `Ready`.
fn ready(why: Option<(&str, String)>, present: Option<&WireKubePeerStatus>, now: Timestamp) -> Condition {
    let holds = why.is_none();
    let (reason, message) = why.unwrap_or(("Connected", "every observed peer has a usable path".to_owned()));
    let present = present.map(|status| status.conditions.as_slice()).unwrap_or_default();
    condition(present, Finding { type_: "Ready", holds, reason, message }, None, Time(now))
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
        NatType::PortRestrictedCone => "port-restricted-cone",
        NatType::Symmetric => "symmetric",
        NatType::Unknown => "",
    }
}

fn published_nat(nat: NatType) -> Option<PublishedNat> {
    match nat {
        NatType::Open => Some(PublishedNat::Open),
        NatType::Cone => Some(PublishedNat::Cone),
        NatType::PortRestrictedCone => Some(PublishedNat::PortRestrictedCone),
        NatType::Symmetric => Some(PublishedNat::Symmetric),
        NatType::Unknown => None,
    }
}

/// Writes the specification.
///
/// # Errors
/// The API server's answer. The admission policy refuses any name but this node's.
pub async fn publish_spec(
    client: &Client,
    node: &Node,
    desired: &WireKubePeerSpec,
) -> Result<(), kube::Error> {
    let name = node.name_any();
    let mut object = WireKubePeer::new(&name, desired.clone());
    object.metadata = metadata(&name, node);
    let peers: Api<WireKubePeer> = Api::all(client.clone());
    peers.patch(&name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&object)).await.map(drop)
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
    // That is the controller's, which the admission policy enforces.
    let status = WireKubePeerStatus { node: None, ..status.clone() };
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
pub(crate) mod tests;

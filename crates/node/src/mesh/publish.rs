//! This node's own WireKubePeer: what it should say (pure), and writing it.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use fairlead_api::names::{KEEPALIVE, LABEL_WIREKUBE_NODE};
use fairlead_api::resources::{
    CandidateType, EndpointDiscoveryMethod, IceCandidate, NatType as PublishedNat, ObservedEndpoint,
    PeerTransport, TransportMode, WireGuardImplementation, WireKubePeer, WireKubePeerSpec,
    WireKubePeerStatus,
};
use fairlead_api::wireguard::PublicKey;
use fairlead_dataplane::wireguard::Backend;
use fairlead_path::NatType;
use fairlead_path::State;
use k8s_openapi::api::core::v1::Node;
use kube::api::{ObjectMeta, Patch, PatchParams};
use kube::{Api, Client, Resource as _, ResourceExt};

use super::report::{PeerReport, Report};

/// Field manager of our server-side applies.
const MANAGER: &str = "fairlead-node";
/// Priority of an address of the node itself (WireKube's candidate table).
const HOST_PRIORITY: i32 = 100;
/// An endpoint that this many other nodes report is not reported again: at a thousand nodes the reports would otherwise
/// grow with the square.
const MAX_OBSERVERS: usize = 3;
/// Most observations one node publishes.
const MAX_OBSERVATIONS: usize = 64;
/// Most problems one node publishes.
const MAX_PROBLEMS: usize = 16;

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
    /// Identity of this node.
    pub public_key: PublicKey,
    /// What the agent found.
    pub report: &'a Report,
    /// Endpoint chosen by annotation.
    pub manual: Option<&'a str>,
    /// Addresses of the Node object, which this node claims.
    pub claims: Vec<String>,
    /// Seconds between keepalives asked for by annotation.
    pub keepalive: Option<u16>,
    /// How many other nodes report this endpoint for this peer already.
    pub reported: &'a (dyn Fn(&str, SocketAddr) -> usize + Sync),
}

/// The object this node should publish. It says nothing that changes with every handshake, so that a quiet mesh
/// writes nothing.
pub fn desired(facts: &Facts<'_>) -> Desired {
    let report = facts.report;
    let up: Vec<&PeerReport> = report.peers.iter().filter(|peer| peer.path.state == State::Up).collect();
    let (endpoint, method) = endpoint(facts);
    let transports: BTreeMap<String, PeerTransport> =
        up.iter().map(|peer| (peer.name.clone(), PeerTransport::Direct)).collect();
    Desired {
        spec: WireKubePeerSpec {
            public_key: facts.public_key.to_string(),
            endpoint,
            allowed_ips: facts.claims.clone(),
            persistent_keepalive: facts.keepalive.unwrap_or(KEEPALIVE.as_secs() as u16),
        },
        status: WireKubePeerStatus {
            connected: Some(up.len() == report.peers.len()),
            endpoint_discovery_method: Some(method),
            nat_type: published_nat(report.nat),
            ice_candidates: report.host.iter().map(host_candidate).collect(),
            transport_mode: TransportMode::of(transports.values()),
            peer_transports: transports,
            observed_endpoints: observations(facts, &up),
            wireguard: Some(match report.backend {
                Backend::Kernel => WireGuardImplementation::Kernel,
                Backend::Embedded => WireGuardImplementation::Embedded,
            }),
            problems: report.problems.iter().take(MAX_PROBLEMS).map(ToString::to_string).collect(),
            ..WireKubePeerStatus::default()
        },
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
    if let Some(manual) = facts.manual {
        return (Some(manual.to_owned()), EndpointDiscoveryMethod::Manual);
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
            let needed = (facts.reported)(&peer.name, endpoint) < MAX_OBSERVERS;
            needed.then(|| {
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

/// Writes what differs between `present` and `desired`; nothing when nothing does.
///
/// # Errors
/// The API server's answer. The admission policy refuses any name but this node's.
pub async fn publish(
    client: &Client,
    node: &Node,
    present: Option<&WireKubePeer>,
    desired: &Desired,
) -> Result<(), kube::Error> {
    let name = node.name_any();
    let peers: Api<WireKubePeer> = Api::all(client.clone());
    let parameters = PatchParams::apply(MANAGER).force();
    if present.is_none_or(|peer| peer.spec != desired.spec) {
        let mut object = WireKubePeer::new(&name, desired.spec.clone());
        object.metadata = metadata(&name, node);
        peers.patch(&name, &parameters, &Patch::Apply(&object)).await?;
    }
    if present.and_then(|peer| peer.status.as_ref()) != Some(&desired.status) {
        let status = serde_json::json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer",
            "metadata": { "name": name }, "status": desired.status,
        });
        peers.patch_status(&name, &parameters, &Patch::Apply(&status)).await?;
    }
    Ok(())
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
        }
    }

    fn facts<'a>(report: &'a Report, reported: &'a (dyn Fn(&str, SocketAddr) -> usize + Sync)) -> Facts<'a> {
        let claims = vec!["192.168.1.10/32".to_owned()];
        Facts { public_key: PublicKey([9; 32]), report, manual: None, claims, keepalive: None, reported }
    }

    #[test]
    fn a_quiet_mesh_writes_the_same_again() {
        let first = report(NatType::Cone, vec![peer("a", State::Up, "203.0.113.1:1", true)]);
        let mut later = first.clone();
        if let Some(device) = later.peers.first_mut().and_then(|peer| peer.device.as_mut()) {
            device.rx_bytes = 1_000_000;
            device.last_handshake = Some(SystemTime::now());
        }
        let no_observers = |_: &str, _: SocketAddr| 0;
        assert_eq!(desired(&facts(&first, &no_observers)), desired(&facts(&later, &no_observers)));
    }

    #[test]
    fn the_endpoint_shown_is_manual_or_observed_or_our_own() {
        let no_observers = |_: &str, _: SocketAddr| 0;
        let behind = report(NatType::Cone, Vec::new());
        assert_eq!(
            desired(&facts(&behind, &no_observers)).spec.endpoint.as_deref(),
            Some("203.0.113.9:4000")
        );
        let open = report(NatType::Open, Vec::new());
        assert_eq!(
            desired(&facts(&open, &no_observers)).spec.endpoint.as_deref(),
            Some("192.168.1.10:51820")
        );
        let manual = desired(&Facts { manual: Some("node.example:7"), ..facts(&open, &no_observers) });
        assert_eq!(manual.spec.endpoint.as_deref(), Some("node.example:7"));
        assert_eq!(manual.status.endpoint_discovery_method, Some(EndpointDiscoveryMethod::Manual));
    }

    #[test]
    fn only_news_of_peers_that_are_up_is_published_and_only_by_the_first_few() {
        let peers = vec![
            peer("a", State::Up, "203.0.113.1:1", true),
            peer("bb", State::Up, "203.0.113.2:1", false),
            peer("ccc", State::Down, "203.0.113.3:1", true),
        ];
        let report = report(NatType::Open, peers);
        let no_observers = |_: &str, _: SocketAddr| 0;
        let published: Vec<String> =
            desired(&facts(&report, &no_observers)).status.observed_endpoints.into_keys().collect();
        assert_eq!(published, ["a"]);
        let many = |_: &str, _: SocketAddr| MAX_OBSERVERS;
        assert!(desired(&facts(&report, &many)).status.observed_endpoints.is_empty());
    }

    #[test]
    fn status_is_bounded_and_lists_connected_peers() {
        let no_observers = |_: &str, _: SocketAddr| 0;
        let half =
            report(NatType::Open, vec![peer("a", State::Up, "", false), peer("bb", State::Down, "", false)]);
        let status = desired(&facts(&half, &no_observers)).status;
        assert_eq!(status.problems.len(), MAX_PROBLEMS);
        assert_eq!(status.connected, Some(false));
        assert_eq!(status.peer_transports.len(), 1);
        assert_eq!(status.transport_mode, Some(TransportMode::Direct));
    }
}

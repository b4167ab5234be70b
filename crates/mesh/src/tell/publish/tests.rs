use std::sync::Arc;
use std::time::SystemTime;

use fairlead_api::resources::{CandidateType, EndpointDiscoveryMethod, Granularity, IceCandidate};
use fairlead_dataplane::wireguard::PortAccess;
use fairlead_keys::{PeerConfig, PeerState};
use fairlead_path::{Reason, Status};
use fairlead_topology::{Problem, Sources};

use super::*;
use crate::apply::path_port::PathCounters;
use crate::apply::relay::RelayTransport;
use crate::apply::report::{ConfiguredReport, DeviceReport, OwnReport, TranslationReport};
use crate::model::problem::MeshProblem;
use crate::plan::desired::OwnEndpoints;
use crate::plan::relay_reason::RelayReason;

fn peer(name: &str, state: State, endpoint: &str, news: bool) -> PeerReport {
    let config = PeerConfig {
        endpoint: endpoint.parse().ok(),
        persistent_keepalive: Some(25),
        ..PeerConfig::default()
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
            round_trip: None,
            loses_long: false,
            route_mtu: None,
        },
        sources: Sources::default(),
        relay_reason: None,
        plain: Vec::new(),
        encapsulated: Vec::new(),
        device: Some(Arc::new(PeerState {
            config,
            last_handshake: Some(SystemTime::UNIX_EPOCH),
            rx_bytes: 1,
            tx_bytes: 1,
        })),
        prefixes: Vec::new(),
        published_endpoint: endpoint.parse().ok().filter(|_| news),
        relay: endpoint.starts_with("127.64.").then_some(RelayTransport::Tcp),
    }
}

pub(crate) fn report(nat: NatType, peers: Vec<PeerReport>) -> Report {
    Report {
        device: DeviceReport {
            backend: Backend::Embedded,
            backend_reason: None,
            port_access: Some(PortAccess::Shared),
            interface: "wire_kube".to_owned(),
            mtu: 1420,
            uplink_mtu: 1500,
            port: 51820,
        },
        endpoints: OwnEndpoints {
            host: vec!["192.168.1.10:51820".parse().unwrap()],
            observed: vec!["203.0.113.9:4000".parse().unwrap()],
            ..OwnEndpoints::default()
        },
        translation: TranslationReport { nat, ..TranslationReport::default() },
        own: OwnReport { is_gateway: true, ..OwnReport::default() },
        configured: ConfiguredReport::default(),
        saved_at: None,
        peers,
        external: Vec::new(),
        prepared_granularity: None,
        problems: vec![MeshProblem::Plan(Problem::NoKey { node: "n".to_owned() }); 100],
        released: Vec::new(),
        guarded: 0,
        paths: PathCounters::default(),
        relay: None,
    }
}

/// A report with other endpoints.
fn with_endpoints(mut report: Report, change: impl FnOnce(&mut OwnEndpoints)) -> Report {
    change(&mut report.endpoints);
    report
}

const NO: &(dyn Fn(&str, SocketAddr) -> bool + Sync) = &|_, _| false;
const YES: &(dyn Fn(&str, SocketAddr) -> bool + Sync) = &|_, _| true;

fn facts<'a>(report: &'a Report, observes: &'a (dyn Fn(&str, SocketAddr) -> bool + Sync)) -> Facts<'a> {
    let claims = vec!["192.168.1.10/32".to_owned()];
    let (public_key, now) = (PublicKey([9; 32]), Timestamp::UNIX_EPOCH);
    Facts { node: "own", public_key, next_key: None, report, claims, observes, present: None, now }
}

/// A mesh of that many peers, of which those with these numbers are down.
pub(crate) fn mesh(peers: usize, down: &[usize]) -> Report {
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
fn a_node_that_is_kept_from_the_mesh_says_why_and_what_it_published_stays() {
    let before = desired(&facts(&report(NatType::Open, vec![peer("a", State::Up, "", false)]), NO)).status;
    let failure = MeshFailure::NumbersTaken("KubeSpan runs here".to_owned());
    let now = Timestamp::from_second(60).unwrap();
    let after = outside(&failure, &before, now).unwrap();
    assert_eq!((after.conditions[0].reason.as_str(), after.connected), ("NumbersTaken", Some(false)));
    assert_eq!(after.ice_candidates, before.ice_candidates);
    assert_eq!(outside(&failure, &after, Timestamp::from_second(120).unwrap()), None, "it is written once");
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
        let device = Arc::make_mut(device);
        device.rx_bytes = 1_000_000;
        device.last_handshake = Some(SystemTime::now());
    }
    let before = desired(&facts(&first, YES)).status;
    let is_due = |present: Option<&_>, desired: &_, members| urgency(present, desired, members).is_some();
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
        let observes = |peer: &str, _: SocketAddr| observers::is_chosen(observers::place(node, peer), 1000);
        let status = desired(&Facts { node, ..facts(report, &observes) }).status;
        assert!(bytes(&status) < 5_000, "{} bytes", bytes(&status));
        status
    };
    let writes: Vec<String> = (0..1000)
        .map(|number| format!("observer-{number}"))
        .filter(|node| urgency(Some(&status(node, &before)), &status(node, &after), 1000).is_some())
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
    let publishers = (0..1000).filter(|number| !problems(&format!("n{number}"), &report).is_empty()).count();
    assert!((1..=10).contains(&publishers), "{publishers}");
    let silent =
        (0..1000).map(|number| format!("n{number}")).find(|node| problems(node, &report).is_empty()).unwrap();
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
    let reflexive = vec!["203.0.113.9:4500".parse().unwrap()];
    let stun = desired(&facts(&with_endpoints(behind, |it| it.reflexive = reflexive.clone()), NO));
    assert_eq!(stun.spec.endpoint.as_deref(), Some("203.0.113.9:4500"));
    assert_eq!(stun.status.endpoint_discovery_method, Some(EndpointDiscoveryMethod::Stun));
    let candidates = |desired: &Desired| {
        let candidates = desired.status.ice_candidates.iter();
        candidates.map(|it| (it.type_, it.address.clone(), it.priority)).collect::<Vec<_>>()
    };
    let host = (CandidateType::Host, "192.168.1.10:51820".to_owned(), 100);
    let seen = |priority| (CandidateType::Srflx, "203.0.113.9:4500".to_owned(), priority);
    assert_eq!(candidates(&stun), [host.clone(), seen(200)]);
    let symmetric = with_endpoints(report(NatType::Symmetric, Vec::new()), |it| it.reflexive = reflexive);
    let symmetric = desired(&facts(&symmetric, NO));
    assert_eq!(symmetric.spec.endpoint.as_deref(), Some("203.0.113.9:51820"), "the port is a placeholder");
    assert_eq!(candidates(&symmetric), [host, seen(50)]);
    let reflexive = vec!["100.64.0.7:4500".parse().unwrap()];
    let private = with_endpoints(report(NatType::Cone, Vec::new()), |it| it.reflexive = reflexive);
    assert_eq!(desired(&facts(&private, NO)).spec.endpoint.as_deref(), Some("203.0.113.9:4000"));
    let configured = ConfiguredReport {
        manual: "node.example:7".parse().ok(),
        keepalive: Some(0),
        ..ConfiguredReport::default()
    };
    let chosen = Report { configured, ..open };
    let manual = desired(&facts(&chosen, NO));
    assert_eq!(manual.spec.persistent_keepalive, 0);
    assert_eq!(manual.spec.endpoint.as_deref(), Some("node.example:7"));
    assert_eq!(manual.status.endpoint_discovery_method, Some(EndpointDiscoveryMethod::Manual));
}

/// Endpoints that authenticated peers see are shown where no STUN server says more.
#[test]
fn what_peers_see_is_shown_with_no_symmetric_port_and_no_private_address_for_a_public_one() {
    let shown = |nat, host: &[&str], observed: &[&str]| {
        let parse = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        let report = with_endpoints(report(nat, Vec::new()), |it| {
            (it.host, it.observed) = (parse(host), parse(observed));
        });
        desired(&facts(&report, NO)).spec.endpoint.unwrap()
    };
    let (private, public) = ("192.168.1.10:51820", "198.51.100.1:51820");
    let (inside, outside) = ("10.9.0.1:4000", "203.0.113.9:4000");
    for (nat, host, observed, expected) in [
        (NatType::Cone, private, &[outside][..], outside),
        (NatType::Unknown, private, &[inside, outside], outside),
        (NatType::Unknown, private, &[inside], inside),
        (NatType::Unknown, public, &[inside], public),
        (NatType::Symmetric, private, &[outside], "203.0.113.9:51820"),
        (NatType::Symmetric, private, &[inside, outside], "203.0.113.9:51820"),
        (NatType::Open, public, &[outside], public),
    ] {
        assert_eq!(shown(nat, &[host], observed), expected, "{nat:?} {host} {observed:?}");
    }
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

#[test]
fn what_a_gateway_maps_is_a_candidate_and_the_endpoint_where_nothing_better_is_known() {
    let [mapped, seen] = ["198.51.100.1:4000", "198.51.100.1:51820"].map(|it| it.parse().unwrap());
    let publish = |nat, mapped: SocketAddr, seen: &[SocketAddr]| {
        let with = with_endpoints(report(nat, Vec::new()), |it| {
            (it.mapped, it.reflexive) = (vec![mapped], seen.to_vec());
        });
        let Desired { spec, status } = desired(&facts(&with, NO));
        let of = |candidate: &IceCandidate| (candidate.address.clone(), candidate.priority);
        let reflexive = |candidate: &&IceCandidate| candidate.type_ == CandidateType::Srflx;
        let candidates: Vec<_> = status.ice_candidates.iter().filter(reflexive).map(of).collect();
        (spec.endpoint.unwrap(), status.endpoint_discovery_method.unwrap(), candidates)
    };
    let mapped_text = ("198.51.100.1:4000".to_owned(), 200);
    let seen_text = |priority| ("198.51.100.1:51820".to_owned(), priority);
    let (endpoint, method, candidates) = publish(NatType::Symmetric, mapped, &[seen]);
    assert_eq!((endpoint, method), (mapped_text.0.clone(), EndpointDiscoveryMethod::Upnp));
    assert_eq!(candidates, [mapped_text.clone(), seen_text(50)]);

    let (endpoint, method, candidates) = publish(NatType::Cone, mapped, &[seen]);
    assert_eq!((endpoint, method), (seen_text(0).0, EndpointDiscoveryMethod::Stun));
    assert_eq!(candidates, [mapped_text.clone(), seen_text(200)]);
    let (endpoint, method, _) = publish(NatType::Unknown, mapped, &[]);
    assert_eq!((endpoint, method), (mapped_text.0, EndpointDiscoveryMethod::Upnp));
    let on_ec2 = |nat, seen: &[SocketAddr]| {
        let public_ipv4 = Some([198, 51, 100, 1].into());
        let with = with_endpoints(report(nat, Vec::new()), |it| {
            it.public_ipv4 = public_ipv4;
            (it.mapped, it.reflexive) = (vec![mapped], seen.to_vec());
        });
        let spec_and_status = desired(&facts(&with, NO));
        (spec_and_status.spec.endpoint.unwrap(), spec_and_status.status.endpoint_discovery_method.unwrap())
    };
    let of_instance = ("198.51.100.1:51820".to_owned(), EndpointDiscoveryMethod::AwsMetadata);
    assert_eq!(on_ec2(NatType::Unknown, &[]), of_instance);
    assert_eq!(
        on_ec2(NatType::Cone, &[seen]).1,
        EndpointDiscoveryMethod::Stun,
        "STUN servers say the port as well"
    );
    // STUN servers see what the gateway mapped: it is published once.
    assert_eq!(publish(NatType::Cone, seen, &[seen]).2, [seen_text(200)]);

    // Behind another NAT, or that of the provider.
    for private in ["192.168.7.1:4000", "100.64.0.1:4000"] {
        let (endpoint, method, candidates) = publish(NatType::Symmetric, private.parse().unwrap(), &[]);
        assert_eq!((endpoint.as_str(), method), ("203.0.113.9:51820", EndpointDiscoveryMethod::Observed));
        assert_eq!(candidates, [(private.to_owned(), 200)]);
    }
}

#[test]
fn what_peers_see_is_a_candidate_unless_the_nat_shows_each_of_them_another_port() {
    let publish = |nat| {
        let peer_reflexive = vec!["203.0.113.9:4700".parse().unwrap()];
        let with = with_endpoints(report(nat, Vec::new()), |it| {
            (it.peer_reflexive, it.observed) = (peer_reflexive, Vec::new());
        });
        let Desired { spec, status } = desired(&facts(&with, NO));
        let candidates = status.ice_candidates;
        let by_peers = candidates.iter().filter(|candidate| candidate.type_ == CandidateType::Prflx).count();
        (spec.endpoint.unwrap(), by_peers)
    };
    assert_eq!(publish(NatType::Cone), ("203.0.113.9:4700".to_owned(), 1));
    assert_eq!(publish(NatType::Symmetric), ("192.168.1.10:51820".to_owned(), 0));
}

#[test]
fn the_reason_for_the_relay_is_published_and_causes_few_writes() {
    let relayed = |relay_reason: RelayReason| {
        let relayed =
            PeerReport { relay_reason: Some(relay_reason), ..peer("a", State::Up, "127.64.0.1:1", false) };
        report(NatType::Symmetric, vec![relayed, peer("bb", State::Up, "203.0.113.1:1", false)])
    };
    let at = |seconds: i64, present: Option<&WireKubePeerStatus>, reason| {
        let (report, now) = (relayed(reason), Timestamp::from_second(seconds).unwrap());
        desired(&Facts { present, now, ..facts(&report, NO) }).status
    };
    let first = at(0, None, RelayReason::BothSymmetric);
    assert_eq!(first.relay_reasons, [("a".to_owned(), "both symmetric NAT".to_owned())].into());
    let about_to_move = at(60, Some(&first), RelayReason::DirectAnswers);
    assert_eq!(about_to_move.relay_reasons, first.relay_reasons);
    assert_eq!(urgency(Some(&first), &about_to_move, 3), None);
    let blocked = |seconds| at(seconds, Some(&first), RelayReason::UdpBlocked);
    assert_eq!(urgency(Some(&first), &blocked(9), 3), None);
    assert_eq!(urgency(Some(&first), &blocked(10), 3), Some(Urgency::Status));
}

#[test]
fn the_mesh_does_not_wait_for_a_node_that_has_prepared() {
    let report = |prepared_granularity| Report { prepared_granularity, ..report(NatType::Open, Vec::new()) };
    let status = |granularity| desired(&facts(&report(Some(granularity)), NO)).status;
    let (before, after) = (status(Granularity::Full), status(Granularity::Location));
    assert_eq!(urgency(Some(&before), &after, 3), Some(Urgency::Essential));
    assert_eq!(urgency(Some(&before), &before, 3), None);
}

#[test]
fn reasons_are_published_of_as_many_peers_as_transports() {
    let relayed = (0..MAX_LISTED + 50).map(|number| PeerReport {
        name: format!("node-{number:04}"),
        relay_reason: Some(RelayReason::UdpBlocked),
        ..peer("a", State::Up, "127.64.0.1:1", false)
    });
    let status = desired(&facts(&report(NatType::Open, relayed.collect()), NO)).status;
    assert!(status.relay_reasons.keys().eq(status.peer_transports.keys()));
    assert_eq!(status.relay_reasons.len(), MAX_LISTED);
}

/// All 1000 peers change between direct and relayed paths all the time, and this node's own addresses now and then.
#[test]
fn a_node_whose_paths_change_all_the_time_writes_rarely_and_its_addresses_at_once() {
    const SECONDS: u32 = 600;
    let mut seen = mesh(1000, &[]);
    let start = Instant::now();
    let mut budget = WriteBudget::new(start);
    let (mut present, mut written, mut most_waiting) =
        (WireKubePeer::new("own", desired(&facts(&seen, NO)).spec), 0, 0);
    let mut waiting_since = None;
    for second in 0..SECONDS {
        for (peer, number) in seen.peers.iter_mut().zip(0_u32..) {
            let is_relayed = (number + second).is_multiple_of(20);
            peer.relay = is_relayed.then_some(RelayTransport::Tcp);
        }
        if second > 0 && second.is_multiple_of(100) {
            let port = u16::try_from(second).unwrap();
            seen.endpoints.reflexive = vec![SocketAddr::from(([203, 0, 113, 9], port))];
            waiting_since = Some(second);
        }
        let now = Timestamp::from_second(second.into()).unwrap();
        let desired = desired(&Facts { present: present.status.as_ref(), now, ..facts(&seen, NO) });
        let at = start + Duration::from_secs(second.into());
        let writes = writes(&mut budget, at, Some(&present), &desired, 1001);
        if writes.spec {
            present.spec = desired.spec;
            written += 1;
        }
        if writes.status {
            present.status = Some(desired.status);
            written += 1;
            most_waiting = most_waiting.max(waiting_since.take().map_or(0, |since| second - since));
        }
    }
    assert!(written <= 6 + SECONDS / 10, "{written} writes in {SECONDS} s");
    assert!(written >= SECONDS / 10 - 3, "{written} writes in {SECONDS} s: what is new is told");
    assert_eq!((waiting_since, most_waiting), (None, 0), "what peers need never waits here");
}

/// Peers that reach the node only there, through the one port that its router forwards, would be cut off meanwhile.
#[test]
fn another_endpoint_is_written_at_once_though_the_node_has_written_much() {
    let seen = mesh(3, &[]);
    let desired = desired(&facts(&seen, NO));
    let mut present = WireKubePeer::new("own", desired.spec.clone());
    present.status = Some(desired.status.clone());
    present.spec.endpoint = Some("203.0.113.9:51821".to_owned());
    let start = Instant::now();
    let mut budget = WriteBudget::new(start);
    while budget.take(start, Urgency::Essential).is_ok() {}
    let written = writes(&mut budget, start, Some(&present), &desired, 4);
    assert_eq!(written, Writes { spec: true, ..Writes::default() });
}

#[test]
fn extra_endpoints_are_candidates_beside_what_the_node_finds() {
    let extra: Vec<SocketAddr> =
        ["198.51.100.1:7", "192.168.1.10:51820"].map(|it| it.parse().unwrap()).to_vec();
    let configured = ConfiguredReport { extra_endpoints: extra, ..ConfiguredReport::default() };
    let with = Report { configured, ..report(NatType::Symmetric, Vec::new()) };
    let published = desired(&facts(&with, NO));
    let candidates: Vec<(CandidateType, &str)> =
        published.status.ice_candidates.iter().map(|it| (it.type_, it.address.as_str())).collect();
    assert_eq!(
        candidates,
        [(CandidateType::Host, "192.168.1.10:51820"), (CandidateType::Srflx, "198.51.100.1:7")]
    );
    assert!(!with.publishes_the_same(&report(NatType::Symmetric, Vec::new())));
}

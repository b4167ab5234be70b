//! Objects of commit 5a83802c with every field of their status: they are read as they were meant, and written as they were.

use std::fmt::Debug;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;

mod bounds;

const KEY: &str = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";
const NEXT_KEY: &str = "TrMvSoP4jYQlY6RIzBgbssQqY3vxI2Pi+y71lOWWXX0=";

fn time(text: &str) -> Time {
    Time(text.parse().unwrap())
}

fn texts<const N: usize>(texts: [&str; N]) -> Vec<String> {
    texts.map(str::to_owned).into()
}

fn conditions() -> Vec<Condition> {
    vec![Condition {
        type_: "Ready".to_owned(),
        status: "False".to_owned(),
        reason: "Exhausted".to_owned(),
        message: "all blocks are granted".to_owned(),
        last_transition_time: time("2026-11-21T08:00:00Z"),
        observed_generation: Some(3),
    }]
}

#[track_caller]
fn is_kept<T: Serialize + DeserializeOwned + PartialEq + Debug>(object: &T, kept: &str) {
    let kept: Value = serde_json::from_str(kept).unwrap();
    assert_eq!(serde_json::to_value(object).unwrap(), kept);
    assert_eq!(&serde_json::from_value::<T>(kept).unwrap(), object);
}

#[test]
fn the_object_of_a_node_is_as_it_was() {
    let spec = WireKubePeerSpec {
        public_key: KEY.to_owned(),
        next_public_key: Some(NEXT_KEY.to_owned()),
        endpoint: Some("203.0.113.7:40001".to_owned()),
        allowed_ips: texts(["192.168.1.10/32", "fd00:10::10/128"]),
        persistent_keepalive: 10,
    };
    let candidate =
        |type_, address: &str, priority| IceCandidate { type_, address: address.to_owned(), priority };
    let observed = ObservedEndpoint {
        public_key: NEXT_KEY.to_owned(),
        endpoint: "[2001:db8::7]:51820".to_owned(),
        last_seen: Some(time("2026-11-21T08:00:00Z")),
    };
    let location = NodeLocation {
        name: "office".to_owned(),
        internal_ips: texts(["192.168.1.10/24"]),
        leader: true,
        public: true,
        networks: texts(["192.168.7.0/24"]),
    };
    let status = WireKubePeerStatus {
        connected: Some(true),
        peers: Some(PeerCounts { total: 3, direct: 2, unreachable: 1 }),
        last_handshake: Some(time("2026-11-21T08:00:00Z")),
        last_reported_at: Some(time("2026-11-21T08:00:01Z")),
        bytes_received: Some((1 << 53) + 1),
        bytes_sent: Some(7),
        endpoint_discovery_method: Some(EndpointDiscoveryMethod::AwsMetadata),
        nat_type: Some(NatType::PortRestrictedCone),
        ice_candidates: vec![
            candidate(CandidateType::Host, "192.168.1.10:51820", 100),
            candidate(CandidateType::Srflx, "203.0.113.7:40001", 200),
            candidate(CandidateType::Prflx, "203.0.113.7:40002", 50),
        ],
        port_prediction: Some(PortPrediction {
            base_port: Some(40_001),
            increment: Some(0),
            jitter: Some(2),
            sample_ports: vec![40_001, 40_003],
        }),
        ice_state: Some("connected".to_owned()),
        connections: [("worker-1".to_owned(), PeerTransport::Direct)].into(),
        peer_transports: [("worker-2".to_owned(), PeerTransport::Relay)].into(),
        relay_reasons: [("worker-2".to_owned(), "both symmetric NAT".to_owned())].into(),
        transport_mode: Some(TransportMode::Mixed),
        relay_latency_ms: Some(12),
        bind_mode: Some("userspace".to_owned()),
        observed_endpoints: [("worker-1".to_owned(), observed)].into(),
        entry_terms: [("laptop".to_owned(), EntryTerm { public_key: NEXT_KEY.to_owned(), term: 3 })].into(),
        problems: texts(["worker-3 is down"]),
        interface_id: Some("0211:22ff:fe33:4455".to_owned()),
        node: Some(NodeFacts {
            internal_ips: texts(["192.168.1.10"]),
            first_internal_ips: Vec::new(),
            is_control_plane: false,
            location: Some(location),
            endpoint_filters: Some(texts(["10.0.0.0/8"])),
            pod_cidrs: texts(["10.244.1.0/24"]),
            mesh_ips: texts(["fd00::10"]),
        }),
        prepared_granularity: Some(Granularity::Location),
        wireguard: Some(WireGuardImplementation::Embedded),
        conditions: conditions(),
    };
    let peer = WireKubePeer { status: Some(status), ..WireKubePeer::new("home-1", spec) };
    is_kept(&peer, include_str!("../../fixtures/5a83802c/wirekube-peer.json"));
    let bare = WireKubePeer::new("home-1", WireKubePeerSpec::default());
    is_kept(&bare, include_str!("../../fixtures/5a83802c/wirekube-peer-bare.json"));
}

#[test]
fn the_status_of_the_mesh_is_as_it_was() {
    let until = || time("2026-11-22T08:00:00Z");
    let deleted = |next: Option<&str>| DeletedPeer {
        name: "home-2".to_owned(),
        public_key: KEY.to_owned(),
        next_public_key: next.map(str::to_owned),
        until: until(),
    };
    let status = WireKubeMeshStatus {
        ready_peers: Some(2),
        total_peers: Some(3),
        relay_endpoint: Some("wss://relay.example:443".to_owned()),
        relay_ca_bundle: Some("PEM".to_owned()),
        relay_pod_ips: texts(["10.244.1.9"]),
        kept_mesh_ips: vec![KeptMeshIp {
            node: "home-2".to_owned(),
            ip: "10.99.0.2".to_owned(),
            until: until(),
        }],
        deleted_peers: vec![deleted(Some(NEXT_KEY)), deleted(None)],
        granularity: Some(Granularity::Cross),
        conditions: conditions(),
    };
    is_kept(&status, include_str!("../../fixtures/5a83802c/wirekube-mesh-status.json"));
}

#[test]
fn the_status_of_a_pool_and_of_a_request_are_as_they_were() {
    let status = AddressPoolStatus {
        observed_generation: Some(3),
        blocks: Some(8),
        capacity: Some(256),
        used: Some(7),
        free: Some(1),
        node_count: Some(2),
        nodes: vec![NodeBlocks { name: "n1".to_owned(), blocks: 4 }],
        conditions: conditions(),
    };
    is_kept(&status, include_str!("../../fixtures/5a83802c/address-pool-status.json"));
    let block = AddressBlockFields {
        index: 16,
        ipv4: Some("10.2.2.0/27".to_owned()),
        ipv6: Some("fd01::200/123".to_owned()),
    };
    let spec =
        BlockRequestSpec { node_name: "n1".to_owned(), pool_name: "default".to_owned(), in_use: Some(block) };
    let condition = |type_, status, time| BlockRequestCondition {
        type_,
        status,
        last_probe_time: time,
        last_transition_time: Some(self::time("2026-11-21T08:00:00Z")),
        reason: "OutOfBlocks".to_owned(),
        message: "all blocks are granted".to_owned(),
    };
    let probed = Some(time("2026-11-21T08:00:00Z"));
    let status = BlockRequestStatus {
        address_block_name: Some("default-16".to_owned()),
        conditions: vec![
            condition(BlockRequestConditionType::Complete, ConditionStatus::True, probed),
            condition(BlockRequestConditionType::Failed, ConditionStatus::Unknown, None),
        ],
    };
    let request = json!({ "spec": spec, "status": status });
    let kept: Value =
        serde_json::from_str(include_str!("../../fixtures/5a83802c/block-request.json")).unwrap();
    assert_eq!(request, kept);
    assert_eq!(serde_json::from_value::<BlockRequestSpec>(kept["spec"].clone()).unwrap(), spec);
    assert_eq!(serde_json::from_value::<BlockRequestStatus>(kept["status"].clone()).unwrap(), status);
}

#[test]
fn the_status_of_an_egress_is_as_it_was() {
    let status = EgressStatus {
        replicas: Some(2),
        selector: Some("coil.cybozu.com%2Fname=internet".to_owned()),
        source_addresses: vec![
            EgressSourceAddress {
                addresses: texts(["192.0.2.40", "2001:db8::40"]),
                gateway: Some("nat-0".to_owned()),
            },
            EgressSourceAddress { addresses: texts(["192.0.2.41"]), gateway: None },
        ],
        cluster_ranges: Some(texts(["10.96.0.0/12"])),
        conditions: conditions(),
    };
    is_kept(&status, include_str!("../../fixtures/5a83802c/egress-status.json"));
}

//! Reports of a mesh for tests, and what the status says of them.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use fairlead_dataplane::wireguard::{Backend, PortAccess};
use fairlead_keys::{PeerConfig, PeerState, PublicKey};
use fairlead_mesh::apply::path_port::PathCounters;
use fairlead_mesh::apply::report::{
    ConfiguredReport, DeviceReport, OwnReport, PeerReport, Report, TranslationReport,
};
use fairlead_mesh::plan::desired::OwnEndpoints;
use fairlead_path::{NatType, Reason, State, Status};
use fairlead_topology::Sources;
use fairlead_wire::node::{ReleasedBlock, StatusResponse};

use super::{describe, describe_released};

/// A peer that is reached at an endpoint.
pub(crate) fn peer() -> PeerReport {
    let config = PeerConfig { endpoint: "203.0.113.1:1".parse().ok(), ..PeerConfig::default() };
    PeerReport {
        name: "node-1".to_owned(),
        public_key: PublicKey([1; 32]),
        path: Status {
            state: State::Up,
            reason: Reason::NotObserved,
            endpoint: "203.0.113.1:1".parse().ok(),
            source: None,
            message: String::new(),
            round_trip: Some(Duration::from_millis(3)),
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
        published_endpoint: None,
        relay: None,
    }
}

/// The report of a mesh with these peers.
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
        released: Vec::new(),
        guarded: 0,
        problems: Vec::new(),
        paths: PathCounters::default(),
        relay: None,
    }
}

#[test]
fn released_blocks_are_told_with_the_time_until_which_they_are_guarded() {
    let now = (Instant::now(), SystemTime::UNIX_EPOCH + Duration::from_millis(1_000_400));
    let block =
        |text: &str, seconds| (text.parse::<ipnet::IpNet>().unwrap(), now.0 + Duration::from_secs(seconds));
    let released = vec![block("10.64.1.0/26", 60), block("10.64.2.0/26", 0)];
    let told = ReleasedBlock { prefix: "10.64.1.0/26".to_owned(), until_seconds: 1060.0 };
    assert_eq!(describe_released(&released, now), [told]);
    let mut answer = StatusResponse::default();
    describe(&Report { released, ..report(NatType::Open, Vec::new()) }, &mut answer, now.1);
    assert_eq!(answer.released_blocks.len(), 1);
    assert!(answer.problems.is_empty(), "it is no problem");
}

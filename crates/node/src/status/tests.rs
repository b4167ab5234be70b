//! Reports of a mesh for tests.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fairlead_dataplane::wireguard::{Backend, PortAccess};
use fairlead_keys::{PeerConfig, PeerState, PublicKey};
use fairlead_mesh::apply::path_port::PathCounters;
use fairlead_mesh::apply::report::{
    ConfiguredReport, DeviceReport, OwnReport, PeerReport, Report, TranslationReport,
};
use fairlead_mesh::plan::desired::OwnEndpoints;
use fairlead_path::{NatType, Reason, State, Status};
use fairlead_topology::Sources;

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
        guarded: 0,
        problems: Vec::new(),
        paths: PathCounters::default(),
        relay: None,
    }
}

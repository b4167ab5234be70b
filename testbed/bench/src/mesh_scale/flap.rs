//! Number of writes by all nodes when one of them fails.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use fairlead_dataplane::wireguard::Backend;
use fairlead_keys::{PeerConfig, PeerState, PublicKey};
use fairlead_mesh::apply::path_port::PathCounters;
use fairlead_mesh::apply::report::{
    ConfiguredReport, DeviceReport, OwnReport, PeerReport, Report, TranslationReport,
};
use fairlead_mesh::plan::desired::OwnEndpoints;
use fairlead_mesh::tell::publish::{Facts, desired, observes, urgency};
use fairlead_path::{NatType, Reason, State, Status};
use fairlead_topology::Sources;

/// Writes of one failure.
pub(super) struct Flap {
    pub(super) nodes: usize,
    pub(super) bytes: usize,
    /// Bytes of the largest status.
    pub(super) largest: usize,
}

/// A mesh of that many nodes behind NAT, whose endpoints others have to see. Node 0 fails.
pub(super) fn of(nodes: usize) -> Flap {
    let mut flap = Flap { nodes: 0, bytes: 0, largest: 0 };
    let (before, after) = (report(nodes, false), report(nodes, true));
    for number in 1..nodes {
        let node = format!("node-{number}");
        let status = |report: &Report| {
            let sees = |peer: &str, _: SocketAddr| {
                let reporters = std::iter::empty();
                // Only those of the first places; the others have waited for them.
                observes((&node, peer), reporters, nodes, std::time::Duration::ZERO)
            };
            desired(&Facts {
                node: &node,
                public_key: PublicKey([1; 32]),
                next_key: None,
                report,
                claims: vec!["192.0.2.1/32".to_owned()],
                observes: &sees,
                present: None,
                now: jiff::Timestamp::UNIX_EPOCH,
            })
            .status
        };
        let (old, new) = (status(&before), status(&after));
        let size = serde_json::to_string(&new).map_or(0, |text| text.len());
        flap.largest = flap.largest.max(size);
        if urgency(Some(&old), &new, nodes).is_some() {
            flap.nodes = flap.nodes.saturating_add(1);
            flap.bytes = flap.bytes.saturating_add(size);
        }
    }
    flap
}

fn report(nodes: usize, failed: bool) -> Report {
    let peer = |number: usize| {
        let state = if failed && number == 0 { State::Down } else { State::Up };
        let config = PeerConfig {
            endpoint: "203.0.113.1:51820".parse().ok(),
            persistent_keepalive: Some(25),
            ..PeerConfig::default()
        };
        PeerReport {
            name: format!("node-{number}"),
            public_key: PublicKey([1; 32]),
            path: Status {
                state,
                reason: Reason::SessionAlive,
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
            published_endpoint: "203.0.113.1:51820".parse().ok(),
            relay: None,
        }
    };
    report_of((0..nodes).map(peer).collect())
}

/// A report with these peers, and nothing else that is of interest.
pub(crate) fn report_of(peers: Vec<PeerReport>) -> Report {
    Report {
        device: DeviceReport {
            backend: Backend::Embedded,
            backend_reason: None,
            port_access: None,
            interface: "wire_kube".to_owned(),
            mtu: 1420,
            uplink_mtu: 1500,
            port: 51820,
        },
        endpoints: OwnEndpoints::default(),
        translation: TranslationReport { nat: NatType::Cone, ..TranslationReport::default() },
        own: OwnReport { is_gateway: true, ..OwnReport::default() },
        configured: ConfiguredReport::default(),
        peers,
        external: Vec::new(),
        prepared_granularity: None,
        released: Vec::new(),
        guarded: 0,
        problems: Vec::new(),
        saved_at: None,
        paths: PathCounters::default(),
        relay: None,
    }
}

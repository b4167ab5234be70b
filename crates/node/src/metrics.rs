//! Prometheus metrics of the node program. Names and units follow the Prometheus conventions; counters end in
//! `_total`.

use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime};

use fairlead_path::State;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::mesh::agent::Report;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Verb {
    verb: &'static str,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Peer {
    peer: String,
}

/// Upper bounds of the ADD and DEL latency buckets, in seconds: from a kernel round trip to a block's long wait.
const BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0];

/// All metrics of the program.
pub struct Metrics {
    registry: Registry,
    requests: Family<Verb, Counter>,
    add_seconds: Histogram,
    del_seconds: Histogram,
    leaked_addresses: Counter,
    peer_up: Family<Peer, Gauge>,
    peer_handshake: Family<Peer, Gauge<f64, AtomicU64>>,
    peer_received: Family<Peer, Gauge>,
    peer_sent: Family<Peer, Gauge>,
    problems: Gauge,
    netlink_changes: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("fairlead");
        let metrics = Self {
            requests: Family::default(),
            add_seconds: Histogram::new(BUCKETS),
            del_seconds: Histogram::new(BUCKETS),
            leaked_addresses: Counter::default(),
            peer_up: Family::default(),
            peer_handshake: Family::default(),
            peer_received: Family::default(),
            peer_sent: Family::default(),
            problems: Gauge::default(),
            netlink_changes: Gauge::default(),
            registry: Registry::default(),
        };
        registry.register("cni_requests", "CNI verbs served, by result", metrics.requests.clone());
        registry.register_with_unit(
            "cni_add_duration",
            "Time one ADD took",
            Unit::Seconds,
            metrics.add_seconds.clone(),
        );
        registry.register_with_unit(
            "cni_del_duration",
            "Time one DEL took",
            Unit::Seconds,
            metrics.del_seconds.clone(),
        );
        registry.register(
            "ipam_leaked_addresses_freed",
            "Addresses that were freed because their pod was gone and no DEL came",
            metrics.leaked_addresses.clone(),
        );
        registry.register("peer_up", "Whether the tunnel to the peer works", metrics.peer_up.clone());
        registry.register_with_unit(
            "peer_last_handshake_timestamp",
            "When the last handshake with the peer completed",
            Unit::Seconds,
            metrics.peer_handshake.clone(),
        );
        registry.register_with_unit(
            "peer_received",
            "What the WireGuard device received from the peer since it was added",
            Unit::Bytes,
            metrics.peer_received.clone(),
        );
        registry.register_with_unit(
            "peer_sent",
            "What the WireGuard device sent to the peer since it was added",
            Unit::Bytes,
            metrics.peer_sent.clone(),
        );
        registry.register(
            "mesh_problems",
            "Problems that `fairlead status` explains",
            metrics.problems.clone(),
        );
        registry.register(
            "netlink_changes",
            "Messages that changed kernel state since the start",
            metrics.netlink_changes.clone(),
        );
        Self { registry, ..metrics }
    }
}

impl Metrics {
    /// One ADD ended.
    pub fn add(&self, took: Duration, ok: bool) {
        self.requests.get_or_create(&Verb { verb: "ADD", result: result(ok) }).inc();
        self.add_seconds.observe(took.as_secs_f64());
    }

    /// One DEL ended.
    pub fn del(&self, took: Duration, ok: bool) {
        self.requests.get_or_create(&Verb { verb: "DEL", result: result(ok) }).inc();
        self.del_seconds.observe(took.as_secs_f64());
    }

    /// An address was freed whose pod was gone.
    pub fn leaked_address_freed(&self) {
        self.leaked_addresses.inc();
    }

    /// The mesh was stepped. Peers that are gone disappear.
    pub fn mesh(&self, report: &Report) {
        self.problems.set(report.problems.len() as i64);
        self.netlink_changes.set(fairlead_netlink::changes_sent() as i64);
        for family in [&self.peer_up, &self.peer_received, &self.peer_sent] {
            family.clear();
        }
        self.peer_handshake.clear();
        for peer in &report.peers {
            let label = Peer { peer: peer.name.clone() };
            self.peer_up.get_or_create(&label).set(i64::from(peer.path.state == State::Up));
            let Some(device) = &peer.device else { continue };
            self.peer_received.get_or_create(&label).set(device.rx_bytes as i64);
            self.peer_sent.get_or_create(&label).set(device.tx_bytes as i64);
            let at = device.last_handshake.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
            if let Some(at) = at {
                self.peer_handshake.get_or_create(&label).set(at.as_secs_f64());
            }
        }
    }

    /// The text a scrape gets.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

fn result(ok: bool) -> &'static str {
    if ok { "ok" } else { "error" }
}

//! Metrics with the names and labels of WireKube's agent and of Kilo, so that dashboards and alerts made for them go on.
//!
//! A second name for what [`super::MeshMetrics`] has, from the same report. WireKube's gauges that end in `_total` are counters here
//! where they count, which the text format does not tell apart from a gauge of that name.

use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime};

use fairlead_cluster::metrics::declare;
use fairlead_path::{NatType, State};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::super::publish::nat_name;
use super::{Label, set};
use crate::apply::report::{PeerReport, Report};

type Seconds = Gauge<f64, AtomicU64>;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Pair {
    source: String,
    peer: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PairOver {
    source: String,
    peer: String,
    transport: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PairBehind {
    source: String,
    peer: String,
    nat_type: &'static str,
}

#[derive(Debug, Clone)]
pub(super) struct CompatibleMetrics {
    latency: Family<PairOver, Seconds>,
    sent: Family<Pair, Counter>,
    received: Family<Pair, Counter>,
    connected: Family<PairBehind, Gauge>,
    transport: Family<Pair, Gauge>,
    handshake: Family<Pair, Seconds>,
    nat: Family<Label<String>, Gauge>,
    peers: Gauge,
    relayed: Gauge,
    direct: Gauge,
    kilo_leader: Gauge,
    kilo_nodes: Gauge,
    kilo_peers: Gauge,
    kilo_reconciles: Counter,
    kilo_errors: Family<Label, Counter>,
}

impl CompatibleMetrics {
    pub(super) fn register(all: &mut Registry) -> Self {
        let kilo = all.sub_registry_with_prefix("kilo");
        let leader = "Whether this node is a gateway of its location; without locations every node is";
        let kilo_leader = declare(kilo, "leader", leader);
        let kilo_nodes = declare(kilo, "nodes", "Nodes in the mesh, with this one");
        let kilo_peers = declare(kilo, "peers", "Peers outside of the cluster");
        let kilo_reconciles = declare(kilo, "reconciles", "Reconciliations of the mesh that succeeded");
        let errors = "Reconciliations of the mesh that failed; the event is always apply";
        let kilo_errors = declare(kilo, "errors", errors);
        let ours = all.sub_registry_with_prefix("wirekube");
        let transport = "How packets reach the peer: 1 directly, 2 by way of a relay";
        let nat = "NAT of this node: 0 unknown, 1 cone, 2 symmetric, 3 port-restricted cone, 4 open";
        let connected = "Whether the tunnel to the peer works, with the type of this node's NAT";
        let latency = "Round-trip time to the peer, of path probes";
        let handshake = "Seconds since the last handshake with the peer";
        Self {
            latency: declare(ours, "peer_latency_seconds", latency),
            sent: declare(ours, "peer_bytes_sent", "Bytes sent to the peer"),
            received: declare(ours, "peer_bytes_received", "Bytes received of the peer"),
            connected: declare(ours, "peer_connected", connected),
            transport: declare(ours, "peer_transport_mode", transport),
            handshake: declare(ours, "peer_last_handshake_seconds", handshake),
            nat: declare(ours, "node_nat_type", nat),
            peers: declare(ours, "peers_total", "Nodes in the mesh, with this one"),
            relayed: declare(ours, "relayed_peers_total", "Peers reached over a relay"),
            direct: declare(ours, "direct_peers_total", "Peers reached directly"),
            kilo_leader,
            kilo_nodes,
            kilo_peers,
            kilo_reconciles,
            kilo_errors,
        }
    }

    /// The mesh was reconciled; these peers have series of their own.
    pub(super) fn update<'a>(
        &self,
        node: &str,
        report: &Report,
        shown: impl Iterator<Item = &'a PeerReport>,
    ) {
        self.kilo_reconciles.inc();
        let members = report.peers.len().saturating_add(1) as i64;
        self.kilo_leader.set(i64::from(report.own.is_gateway));
        self.kilo_nodes.set(members);
        self.peers.set(members);
        self.kilo_peers.set(report.external.iter().filter(|peer| !peer.is_standby()).count() as i64);
        let is_relayed = |peer: &&PeerReport| peer.is_relayed();
        let is_direct = |peer: &&PeerReport| !peer.is_relayed() && peer.path.state == State::Up;
        self.relayed.set(report.peers.iter().filter(is_relayed).count() as i64);
        self.direct.set(report.peers.iter().filter(is_direct).count() as i64);
        self.nat.get_or_create(&[("node", node.to_owned())]).set(nat_number(report.translation.nat));
        let now = SystemTime::now();
        shown.for_each(|peer| self.update_peer(node, report.translation.nat, peer, now));
    }

    fn update_peer(&self, node: &str, nat: NatType, peer: &PeerReport, now: SystemTime) {
        let pair = Pair { source: node.to_owned(), peer: peer.name.clone() };
        let (transport, mode) = if peer.is_relayed() { ("relay", 2) } else { ("direct", 1) };
        let Pair { source, peer: name } = pair.clone();
        let behind = PairBehind { source, peer: name, nat_type: nat_name(nat) };
        self.connected.get_or_create(&behind).set(i64::from(peer.path.state == State::Up));
        if peer.path.endpoint.is_some() {
            self.transport.get_or_create(&pair).set(mode);
        }
        if let Some(round_trip) = peer.path.round_trip {
            let Pair { source, peer } = pair.clone();
            let over = PairOver { source, peer, transport };
            self.latency.get_or_create(&over).set(round_trip.as_secs_f64());
        }
        let Some(device) = &peer.device else { return };
        set(&self.received.get_or_create(&pair), device.rx_bytes);
        set(&self.sent.get_or_create(&pair), device.tx_bytes);
        if let Some(at) = device.last_handshake {
            let age = now.duration_since(at).unwrap_or(Duration::ZERO);
            self.handshake.get_or_create(&pair).set(age.as_secs_f64());
        }
    }

    /// The mesh could not be reconciled.
    pub(super) fn failed(&self) {
        self.kilo_errors.get_or_create(&[("event", "apply")]).inc();
    }

    /// Clears the metrics: there is no mesh any more.
    pub(super) fn clear(&self) {
        let ours = [&self.peers, &self.relayed, &self.direct];
        for gauge in ours.into_iter().chain([&self.kilo_leader, &self.kilo_nodes, &self.kilo_peers]) {
            gauge.set(0);
        }
        self.nat.clear();
    }

    pub(super) fn clear_peers(&self) {
        self.latency.clear();
        self.sent.clear();
        self.received.clear();
        self.connected.clear();
        self.transport.clear();
        self.handshake.clear();
    }
}

/// Number of a kind of NAT in the metrics of WireKube.
const fn nat_number(nat: NatType) -> i64 {
    match nat {
        NatType::Unknown => 0,
        NatType::Cone => 1,
        NatType::Symmetric => 2,
        NatType::PortRestrictedCone => 3,
        NatType::Open => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apply::report::OwnReport;
    use crate::tell::publish::tests::report;

    #[test]
    fn the_leader_of_kilo_is_a_gateway() {
        let mut all = Registry::default();
        let metrics = CompatibleMetrics::register(&mut all);
        let leader = |report: &Report| {
            metrics.update("own", report, std::iter::empty());
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &all).unwrap();
            text.lines().find_map(|line| line.strip_prefix("kilo_leader ").map(str::to_owned))
        };
        let gateway = report(NatType::Unknown, Vec::new());
        assert_eq!(leader(&gateway).as_deref(), Some("1"));
        assert_eq!(leader(&Report { own: OwnReport::default(), ..gateway }).as_deref(), Some("0"));
    }
}

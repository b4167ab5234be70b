//! Metrics of the mesh and its peers.

mod compatible;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use fairlead_cluster::metrics::{declare, register_with_unit};
use fairlead_dataplane::mesh::Foreign;
use fairlead_dataplane::wireguard::{PathSocketStats, PortAccess};
use fairlead_members::provenance::DiscoveryStatus;
use fairlead_path::{BirthdayOutcome, EndpointReason, ProbeCounts, ProbeDrops, State};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use self::compatible::CompatibleMetrics;
use crate::apply::path_port::PathCounters;
use crate::apply::relay::RelayReport;
use crate::apply::report::{PeerReport, Report};

/// A label and its value.
type Label<T = &'static str> = [(&'static str, T); 1];

/// Most peers with series of their own: ten for each, on each node.
const MAX_PEERS: usize = 100;

/// Buckets in seconds, from a direct path that is found within a round trip of one site to one that needs several rounds of probes.
const TIME_TO_DIRECT_BUCKETS: [f64; 11] = [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0];

/// See [`Self::register`] for what each means.
#[derive(Debug, Clone)]
pub struct MeshMetrics {
    peers: PeerMetrics,
    problems: Gauge,
    released: Gauge,
    guarded: Counter,
    foreign_rules: Family<Label, Gauge>,
    port_access: Family<Label, Gauge>,
    netlink_changes: Counter,
    paths: PathMetrics,
    relay: RelayMetrics,
    discovery: DiscoveryMetrics,
    compatible: CompatibleMetrics,
}

/// Peers by their tunnels, and each of at most [`MAX_PEERS`].
#[derive(Debug, Clone)]
struct PeerMetrics {
    count: Family<Label, Gauge>,
    external: Family<Label, Gauge>,
    up: Family<Label<String>, Gauge>,
    handshake: Family<Label<String>, Gauge<f64, AtomicU64>>,
    received: Family<Label<String>, Counter>,
    sent: Family<Label<String>, Counter>,
}

/// Path probes, attempts and changes of endpoints.
#[derive(Debug, Clone)]
struct PathMetrics {
    endpoint_changes: Family<Label, Counter>,
    time_to_direct: Histogram,
    birthday_attempts: Family<Label, Counter>,
    sent_probes: Family<Label, Counter>,
    received_probes: Family<Label, Counter>,
    dropped_probes: Family<Label, Counter>,
    both_ways: Family<Label, Counter>,
    queued_datagrams: Counter,
    dropped_datagrams: Family<Label, Counter>,
}

/// The link to the relay.
#[derive(Debug, Clone)]
struct RelayMetrics {
    connected: Gauge,
    received: Counter,
    sent: Counter,
    dropped: Counter,
}

/// Discovery services by their servers.
#[derive(Debug, Clone)]
struct DiscoveryMetrics {
    connected: Family<Label<String>, Gauge>,
    members: Family<Label<String>, Gauge>,
}

impl PeerMetrics {
    fn register(ours: &mut Registry) -> Self {
        Self {
            count: declare(ours, "peers", "Peers by the state of their tunnel"),
            external: declare(
                ours,
                "external_peers",
                "Peers outside of the cluster by the state of their session: up, or down, which one that sends nothing is, too",
            ),
            up: declare(ours, "peer_up", "Whether the tunnel to the peer works"),
            handshake: register_with_unit(
                ours,
                "peer_last_handshake_timestamp",
                "When the last handshake with the peer completed",
                Unit::Seconds,
                Family::default(),
            ),
            received: register_with_unit(
                ours,
                "peer_received",
                "What the WireGuard device received from the peer since it was added",
                Unit::Bytes,
                Family::default(),
            ),
            sent: register_with_unit(
                ours,
                "peer_sent",
                "What the WireGuard device sent to the peer since it was added",
                Unit::Bytes,
                Family::default(),
            ),
        }
    }
}

impl PathMetrics {
    fn register(ours: &mut Registry) -> Self {
        Self {
            endpoint_changes: declare(ours, "peer_endpoint_changes", "Endpoints set for peers, by reason"),
            time_to_direct: register_with_unit(
                ours,
                "peer_time_to_direct_path",
                "Time from when a peer is known to its first direct path; peers that have one when the program starts do not count",
                Unit::Seconds,
                time_to_direct(),
            ),
            birthday_attempts: declare(
                ours,
                "birthday_attempts",
                "Attempts to find a port of a symmetric NAT by trying many, by result",
            ),
            sent_probes: declare(ours, "path_probes_sent", "Path probes sent to peers, by kind"),
            received_probes: declare(
                ours,
                "path_probes_received",
                "Path probes of peers that were not dropped, by kind",
            ),
            dropped_probes: declare(
                ours,
                "path_probes_dropped",
                "Path probes that were received and dropped, or held back by the limits on sending, by reason",
            ),
            both_ways: declare(
                ours,
                "packets_sent_both_ways",
                "Packets of the embedded WireGuard whose path was in doubt, by result: Sent over the relay as well, or HeldBack by the limit",
            ),
            queued_datagrams: declare(
                ours,
                "path_socket_queued_datagrams",
                "Datagrams for the path search, such as probes and STUN answers, that came to the WireGuard port or to a socket of a birthday attempt",
            ),
            dropped_datagrams: declare(
                ours,
                "path_socket_dropped_datagrams",
                "Datagrams for the path search that the embedded WireGuard dropped, by reason",
            ),
        }
    }
}

impl RelayMetrics {
    fn register(ours: &mut Registry) -> Self {
        Self {
            connected: declare(
                ours,
                "relay_client_connected",
                "Whether this node is connected to the relay of the mesh",
            ),
            received: register_with_unit(
                ours,
                "relay_client_received",
                "What peers sent to this node by way of the relay",
                Unit::Bytes,
                Counter::default(),
            ),
            sent: register_with_unit(
                ours,
                "relay_client_sent",
                "What this node sent to peers by way of the relay",
                Unit::Bytes,
                Counter::default(),
            ),
            dropped: declare(
                ours,
                "relay_client_dropped_datagrams",
                "Datagrams for the relay that were dropped: no connection, or they waited too long",
            ),
        }
    }
}

impl DiscoveryMetrics {
    fn register(ours: &mut Registry) -> Self {
        Self {
            connected: declare(
                ours,
                "discovery_client_connected",
                "Whether this node is connected to the discovery service",
            ),
            members: declare(
                ours,
                "discovery_client_members",
                "Other members that the discovery service tells of",
            ),
        }
    }
}

impl MeshMetrics {
    /// Declares them in `all`.
    pub fn register(all: &mut Registry) -> Self {
        let compatible = CompatibleMetrics::register(all);
        let ours = all.sub_registry_with_prefix("fairlead");
        Self {
            peers: PeerMetrics::register(ours),
            problems: declare(ours, "mesh_problems", "Problems that `fairlead status` explains"),
            released: declare(
                ours,
                "mesh_released_blocks",
                "Blocks that nodes released, to which what this node sends is dropped for a day",
            ),
            guarded: declare(
                ours,
                "mesh_guard_dropped_packets",
                "Packets for other nodes and their pods that were about to leave outside of the tunnel, and were dropped",
            ),
            foreign_rules: declare(
                ours,
                "mesh_foreign_rules",
                "Rules of other programs, of routing and nftables, that work against the mesh, by reason",
            ),
            port_access: declare(
                ours,
                "wireguard_port_access",
                "Whether path probes share the WireGuard port in this way: rules of nftables, raw sockets, or the device's own sockets",
            ),
            netlink_changes: declare(
                ours,
                "netlink_changes",
                "Messages that changed kernel state since the start",
            ),
            paths: PathMetrics::register(ours),
            relay: RelayMetrics::register(ours),
            discovery: DiscoveryMetrics::register(ours),
            compatible,
        }
    }

    /// Takes the time to the first direct path of each peer, in seconds.
    pub fn time_to_direct(&self) -> Histogram {
        self.paths.time_to_direct.clone()
    }

    /// The mesh was reconciled. Peers that are gone disappear. `per_peer` says whether peers have series of their own: at most
    /// a hundred have, those whose tunnel does not work first.
    pub fn update(&self, node: &str, report: &Report, per_peer: bool) {
        self.problems.set(report.problems.len() as i64);
        self.released.set(report.released.len() as i64);
        set(&self.guarded, report.guarded);
        for reason in Foreign::REASONS {
            let rules = report.problems.iter().filter(|problem| problem.reason() == reason).count();
            self.foreign_rules.get_or_create(&[("reason", reason)]).set(rules as i64);
        }
        self.update_port_access(report.device.port_access);
        set(&self.netlink_changes, fairlead_netlink::changes_sent());
        self.update_paths(&report.paths);
        if let Some(RelayReport { status, counters, .. }) = &report.relay {
            self.relay.connected.set(i64::from(status.is_up));
            set(&self.relay.received, counters.received_bytes);
            set(&self.relay.sent, counters.sent_bytes);
            set(&self.relay.dropped, counters.dropped);
        } else {
            self.relay.connected.set(0);
        }
        self.clear_peers();
        for state in [State::Up, State::Connecting, State::Down] {
            let count = report.peers.iter().filter(|peer| peer.path.state == state).count();
            self.peers.count.get_or_create(&in_state(state)).set(count as i64);
        }
        let time = SystemTime::now();
        let here = || report.external.iter().filter(|peer| !peer.is_standby());
        let connected = here().filter(|peer| peer.is_connected(time)).count();
        let others = here().count().saturating_sub(connected);
        for (state, count) in [(State::Up, connected), (State::Down, others)] {
            self.peers.external.get_or_create(&in_state(state)).set(count as i64);
        }
        let (up, others): (Vec<&PeerReport>, Vec<&PeerReport>) =
            report.peers.iter().partition(|peer| peer.path.state == State::Up);
        let shown = others.into_iter().chain(up).take(if per_peer { MAX_PEERS } else { 0 });
        self.compatible.update(node, report, shown.clone());
        for peer in shown {
            let label = [("peer", peer.name.clone())];
            self.peers.up.get_or_create(&label).set(i64::from(peer.path.state == State::Up));
            let Some(device) = &peer.device else { continue };
            set(&self.peers.received.get_or_create(&label), device.rx_bytes);
            set(&self.peers.sent.get_or_create(&label), device.tx_bytes);
            let at = device.last_handshake.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
            if let Some(at) = at {
                self.peers.handshake.get_or_create(&label).set(at.as_secs_f64());
            }
        }
    }

    /// The discovery services do so.
    pub fn update_discovery(&self, status: &DiscoveryStatus) {
        self.discovery.connected.clear();
        self.discovery.members.clear();
        for service in &status.services {
            let label = [("server", service.server.clone())];
            self.discovery.connected.get_or_create(&label).set(i64::from(service.is_connected));
            let members = i64::try_from(service.members).unwrap_or(i64::MAX);
            self.discovery.members.get_or_create(&label).set(members);
        }
    }

    fn update_port_access(&self, used: Option<PortAccess>) {
        for access in PortAccess::ALL {
            let label = [("access", access.name())];
            self.port_access.get_or_create(&label).set(i64::from(used == Some(access)));
        }
    }

    fn update_paths(&self, paths: &PathCounters) {
        for reason in EndpointReason::ALL {
            let count = paths.changes.get(&reason).copied().unwrap_or_default();
            set(&self.paths.endpoint_changes.get_or_create(&[("reason", reason.name())]), count);
        }
        for outcome in BirthdayOutcome::ALL {
            let count = paths.birthday_attempts.get(&outcome).copied().unwrap_or_default();
            set(&self.paths.birthday_attempts.get_or_create(&[("result", outcome.name())]), count);
        }
        let PathSocketStats { queued, dropped_without_reader, dropped_queue_full, sent_both_ways, held_back } =
            paths.socket;
        for (result, count) in [("HeldBack", held_back), ("Sent", sent_both_ways)] {
            set(&self.paths.both_ways.get_or_create(&[("result", result)]), count);
        }
        set(&self.paths.queued_datagrams, queued);
        for (reason, count) in [("NoReader", dropped_without_reader), ("QueueFull", dropped_queue_full)] {
            set(&self.paths.dropped_datagrams.get_or_create(&[("reason", reason)]), count);
        }
        let ProbeCounts { requests_sent, answers_sent, requests_received, answers_received, drops } =
            paths.probes;
        for (kinds, requests, answers) in [
            (&self.paths.sent_probes, requests_sent, answers_sent),
            (&self.paths.received_probes, requests_received, answers_received),
        ] {
            set(&kinds.get_or_create(&[("kind", "Answer")]), answers);
            set(&kinds.get_or_create(&[("kind", "Request")]), requests);
        }
        let ProbeDrops { unauthenticated, unknown, replayed, limited, unexpected, held_back } = drops;
        for (reason, count) in [
            ("HeldBack", held_back),
            ("Limited", limited),
            ("Replayed", replayed),
            ("Unauthenticated", unauthenticated),
            ("Unexpected", unexpected),
            ("UnknownVersion", unknown),
        ] {
            set(&self.paths.dropped_probes.get_or_create(&[("reason", reason)]), count);
        }
    }

    /// The mesh could not be reconciled.
    pub fn failed(&self) {
        self.compatible.failed();
    }

    /// Clears the metrics: there is no mesh any more.
    pub fn clear(&self) {
        self.compatible.clear();
        self.problems.set(0);
        self.released.set(0);
        self.foreign_rules.clear();
        self.update_port_access(None);
        self.clear_peers();
    }

    fn clear_peers(&self) {
        self.compatible.clear_peers();
        self.peers.count.clear();
        self.peers.external.clear();
        self.peers.up.clear();
        self.peers.handshake.clear();
        self.peers.received.clear();
        self.peers.sent.clear();
    }
}

/// An empty histogram of that metric.
pub(crate) fn time_to_direct() -> Histogram {
    Histogram::new(TIME_TO_DIRECT_BUCKETS)
}

/// Takes over what the kernel or the device has counted.
fn set(counter: &Counter, count: u64) {
    counter.inner().store(count, Ordering::Relaxed);
}

fn in_state(state: State) -> Label {
    [("state", state.as_str())]
}

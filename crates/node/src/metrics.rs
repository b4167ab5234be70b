//! Prometheus metrics of the node program. Names and units follow the Prometheus conventions; counters end in
//! `_total`.

use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime};

use fairlead_ipam::BlockUsage;
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

/// As Go's `go-grpc-prometheus` has them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GrpcCall {
    grpc_type: &'static str,
    grpc_service: &'static str,
    grpc_method: &'static str,
    grpc_code: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ApiRequest {
    resource: String,
    verb: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Peer {
    peer: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouterNode {
    node: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Pool {
    pool: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    result: &'static str,
}

/// Upper bounds of the ADD and DEL latency buckets, in seconds: from a kernel round trip to a block's long wait.
const BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0];

/// All metrics of the program.
pub struct Metrics {
    registry: Registry,
    requests: Family<Verb, Counter>,
    grpc_calls: Family<GrpcCall, Counter>,
    add_seconds: Histogram,
    del_seconds: Histogram,
    addresses_used: Family<Pool, Gauge>,
    addresses: Family<Pool, Gauge>,
    blocks: Family<Pool, Gauge>,
    block_wait: Histogram,
    blocks_given_back: Family<Outcome, Counter>,
    leaked_addresses: Counter,
    api_requests: Family<ApiRequest, Counter>,
    events_dropped: Counter,
    peer_up: Family<Peer, Gauge>,
    peer_handshake: Family<Peer, Gauge<f64, AtomicU64>>,
    peer_received: Family<Peer, Gauge>,
    peer_sent: Family<Peer, Gauge>,
    problems: Gauge,
    netlink_changes: Gauge,
    router_syncs: Family<RouterNode, Counter>,
    router_routes: Family<RouterNode, Gauge>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut all = Registry::default();
        let registry = all.sub_registry_with_prefix("fairlead");
        let metrics = Self {
            requests: Family::default(),
            grpc_calls: Family::default(),
            add_seconds: Histogram::new(BUCKETS),
            del_seconds: Histogram::new(BUCKETS),
            addresses_used: Family::default(),
            addresses: Family::default(),
            blocks: Family::default(),
            block_wait: Histogram::new(BUCKETS),
            blocks_given_back: Family::default(),
            leaked_addresses: Counter::default(),
            api_requests: Family::default(),
            events_dropped: Counter::default(),
            peer_up: Family::default(),
            peer_handshake: Family::default(),
            peer_received: Family::default(),
            peer_sent: Family::default(),
            problems: Gauge::default(),
            netlink_changes: Gauge::default(),
            router_syncs: Family::default(),
            router_routes: Family::default(),
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
        metrics.register_ipam(registry);
        registry.register(
            "api_requests",
            "Requests sent to the API server, by verb and resource",
            metrics.api_requests.clone(),
        );
        registry.register(
            "events_dropped",
            "Kubernetes Events that were not published: too many at once, or the API server did not take them",
            metrics.events_dropped.clone(),
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
        // As Coil's coild has them.
        let grpc = all.sub_registry_with_prefix("grpc_server");
        grpc.register("handled", "RPCs completed, by method and code", metrics.grpc_calls.clone());
        // As Coil's router has them.
        let router = all.sub_registry_with_prefix("coil_router");
        router.register("syncs", "Synchronisations of the built-in router", metrics.router_syncs.clone());
        router.register("routes_synced", "Routes of the built-in router", metrics.router_routes.clone());
        Self { registry: all, ..metrics }
    }
}

impl Metrics {
    fn register_ipam(&self, registry: &mut Registry) {
        registry.register(
            "ipam_addresses_used",
            "Addresses of this node's blocks that pods have",
            self.addresses_used.clone(),
        );
        registry.register(
            "ipam_addresses",
            "Addresses in this node's blocks; of two families, each pair counts once",
            self.addresses.clone(),
        );
        registry.register("ipam_blocks", "AddressBlocks of this node", self.blocks.clone());
        registry.register_with_unit(
            "ipam_block_wait",
            "Time an ADD waited for its address, and so for a block where none had room",
            Unit::Seconds,
            self.block_wait.clone(),
        );
        registry.register(
            "ipam_blocks_given_back",
            "Empty AddressBlocks that were to be given back, by result",
            self.blocks_given_back.clone(),
        );
        registry.register(
            "ipam_leaked_addresses_freed",
            "Addresses that were freed because their pod was gone and no DEL came",
            self.leaked_addresses.clone(),
        );
    }

    /// How full the blocks are. Pools without a block here disappear.
    pub fn blocks(&self, usage: &[BlockUsage]) {
        for family in [&self.addresses_used, &self.addresses, &self.blocks] {
            family.clear();
        }
        for block in usage {
            let label = Pool { pool: block.pool.clone() };
            self.addresses_used.get_or_create(&label).inc_by(block.used.into());
            self.addresses.get_or_create(&label).inc_by(block.capacity.into());
            self.blocks.get_or_create(&label).inc();
        }
    }

    /// An ADD got an address, or none.
    pub fn block_wait(&self, took: Duration) {
        self.block_wait.observe(took.as_secs_f64());
    }

    /// An empty block was given back, or could not be.
    pub fn block_given_back(&self, ok: bool) {
        self.blocks_given_back.get_or_create(&Outcome { result: result(ok) }).inc();
    }

    /// A CNI verb ended.
    pub fn verb(&self, verb: &'static str, took: Duration, ok: bool) {
        self.requests.get_or_create(&Verb { verb, result: result(ok) }).inc();
        match verb {
            "ADD" => self.add_seconds.observe(took.as_secs_f64()),
            "DEL" => self.del_seconds.observe(took.as_secs_f64()),
            _ => {}
        }
    }

    /// A call of Coil's gRPC service was answered. Codes are named as Go names them (`google.golang.org/grpc/codes`).
    pub fn grpc_call(&self, verb: &str, code: tonic::Code) {
        let grpc_method = match verb {
            "ADD" => "Add",
            "DEL" => "Del",
            _ => "Check",
        };
        let grpc_code = match code {
            tonic::Code::Ok => "OK".to_owned(),
            tonic::Code::Cancelled => "Canceled".to_owned(),
            other => format!("{other:?}"),
        };
        let call = GrpcCall { grpc_type: "unary", grpc_service: "pkg.cnirpc.CNI", grpc_method, grpc_code };
        self.grpc_calls.get_or_create(&call).inc();
    }

    /// A request goes to the API server.
    pub fn api_request(&self, verb: &'static str, resource: String) {
        self.api_requests.get_or_create(&ApiRequest { resource, verb }).inc();
    }

    /// An Event was not published.
    pub fn event_dropped(&self) {
        self.events_dropped.inc();
    }

    /// The built-in router was stepped and has so many routes.
    pub fn router(&self, node: &str, routes: usize) {
        let label = RouterNode { node: node.to_owned() };
        self.router_syncs.get_or_create(&label).inc();
        self.router_routes.get_or_create(&label).set(i64::try_from(routes).unwrap_or(i64::MAX));
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

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    fn filled() -> Metrics {
        let metrics = Metrics::default();
        let usage = |block: &str, used| BlockUsage {
            block: block.to_owned(),
            pool: "default".to_owned(),
            used,
            capacity: 32,
            open: true,
        };
        metrics.blocks(&[usage("default-0", 32), usage("default-1", 3)]);
        metrics.block_wait(Duration::from_millis(3));
        metrics.block_given_back(true);
        metrics.leaked_address_freed();
        metrics.verb("ADD", Duration::from_millis(7), true);
        metrics.verb("DEL", Duration::from_millis(2), false);
        metrics.verb("CHECK", Duration::from_millis(2), true);
        metrics.grpc_call("ADD", tonic::Code::Ok);
        metrics.grpc_call("CHECK", tonic::Code::Cancelled);
        metrics.api_request("get", "namespaces".to_owned());
        metrics.event_dropped();
        metrics
    }

    /// OpenMetrics 1.0: every family says its type and purpose before its samples, counters end in `_total`, no sample
    /// comes twice, and the text has an end.
    #[test]
    fn a_scrape_follows_open_metrics() {
        let text = filled().text();
        let (mut types, mut helped, mut samples) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        let body = text.strip_suffix("# EOF\n").expect("the end is marked");
        for line in body.lines() {
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            match words[..] {
                ["#", "TYPE", family, kind] => {
                    assert_eq!(types.insert(family.to_owned(), kind.to_owned()), None)
                }
                ["#", "HELP", family, _] => assert!(helped.insert(family.to_owned()), "{line}"),
                ["#", "UNIT", family, unit] => assert!(family.ends_with(unit), "{line}"),
                _ => {
                    let (series, value) = line.rsplit_once(' ').expect("a value");
                    assert!(value.parse::<f64>().is_ok(), "{line}");
                    assert!(samples.insert(series.to_owned()), "twice: {line}");
                    let name = series.split('{').next().unwrap();
                    assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{line}");
                    let (family, kind) =
                        types.iter().filter(|(family, _)| name.starts_with(*family)).max().expect("a family");
                    let ending = &name[family.len()..];
                    let endings: &[&str] = match kind.as_str() {
                        "counter" => &["_total"],
                        "gauge" => &[""],
                        _ => &["_bucket", "_count", "_sum"],
                    };
                    assert!(endings.contains(&ending), "{kind}: {line}");
                    assert!(helped.contains(family), "{line}");
                }
            }
        }
        assert!(samples.len() > 30, "{text}");
    }

    #[test]
    fn blocks_of_a_pool_are_added_up_and_those_that_left_disappear() {
        let metrics = filled();
        let text = metrics.text();
        for line in [
            "fairlead_ipam_addresses_used{pool=\"default\"} 35",
            "fairlead_ipam_addresses{pool=\"default\"} 64",
            "fairlead_ipam_blocks{pool=\"default\"} 2",
            "fairlead_ipam_leaked_addresses_freed_total 1",
            "grpc_server_handled_total{grpc_type=\"unary\",grpc_service=\"pkg.cnirpc.CNI\",grpc_method=\"Add\",grpc_code=\"OK\"} 1",
            "grpc_server_handled_total{grpc_type=\"unary\",grpc_service=\"pkg.cnirpc.CNI\",grpc_method=\"Check\",grpc_code=\"Canceled\"} 1",
            "fairlead_ipam_blocks_given_back_total{result=\"ok\"} 1",
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
        }
        metrics.blocks(&[]);
        assert!(!metrics.text().contains("pool="));
    }

    #[test]
    fn the_dashboard_asks_for_what_there_is() {
        let dashboard = include_str!("../../../deploy/grafana/fairlead.json");
        let metrics = filled();
        let peer = Peer { peer: "a".to_owned() };
        drop(metrics.peer_up.get_or_create(&peer));
        drop(metrics.peer_handshake.get_or_create(&peer));
        drop(metrics.peer_received.get_or_create(&peer));
        drop(metrics.peer_sent.get_or_create(&peer));
        drop(metrics.router_routes.get_or_create(&RouterNode { node: "n".to_owned() }));
        let text = metrics.text();
        let words = dashboard.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        let ours = words
            .filter(|word| {
                ["fairlead_", "coil_router_", "grpc_server_"].iter().any(|prefix| word.starts_with(prefix))
            })
            .filter(|word| {
                !["fairlead_controller_", "fairlead_webhook_"].iter().any(|other| word.starts_with(other))
            });
        let mut asked = 0;
        for name in ours {
            let family = ["_total", "_bucket"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            assert!(text.contains(&format!("# TYPE {family} ")), "{name} is not in\n{text}");
            asked += 1;
        }
        assert!(asked > 3, "{asked}");
    }
}

//! The names of all metrics of the program, and the dashboard that queries them.

use std::time::Instant;

use fairlead_api::resources::{AddressBlock, AddressPool};
use fairlead_cluster::metrics::{Exposition, text};
use fairlead_cluster::process;
use fairlead_cluster::requests::{Kind, RequestMetrics};
use fairlead_ipam::RefusalReason;
use fairlead_ipam::queue::Attempt;
use kube::runtime::reflector::{Lookup, Store, store};
use kube::runtime::watcher::Event;
use prometheus_client::registry::Registry;
use testbed_metrics::{Exposed, Program, reference};

use crate::leader::LeaderMetrics;
use crate::stores::Stores;

fn has(page: &str, line: &str) {
    assert!(page.lines().any(|it| it == line), "{line} is not in\n{page}");
}

fn cache<K: Lookup<DynamicType = ()> + Clone + 'static>(objects: Vec<K>) -> Store<K> {
    let (store, mut writer) = store();
    for object in objects {
        writer.apply_watcher_event(&Event::Apply(object));
    }
    store
}

/// A valid and an invalid pool, and a block.
fn stores() -> Stores {
    let pool = |name: &str, ipv4: &str| -> AddressPool {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": name },
            "spec": { "blockSizeBits": 2, "subnets": [{ "ipv4": ipv4 }] },
        }))
        .unwrap()
    };
    let block: AddressBlock = serde_json::from_value(serde_json::json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "index": 0,
        "metadata": { "name": "a-0", "labels": { "coil.cybozu.com/pool": "a" } },
    }))
    .unwrap();
    Stores {
        blocks: cache(vec![block]),
        nodes: cache(vec![]),
        pools: cache(vec![pool("a", "10.0.0.0/24"), pool("invalid", "10.0.0.0/31")]),
        requests: cache(vec![]),
        known: std::sync::Arc::default(),
        generations: std::array::from_fn(|_| tokio::sync::watch::channel(1).1),
    }
}

struct Metrics {
    registry: Registry,
    leader: LeaderMetrics,
}

impl Metrics {
    fn new() -> Self {
        let mut registry = Registry::default();
        process::register_process(&mut registry);
        let requests = RequestMetrics::register(registry.sub_registry_with_prefix("fairlead"));
        requests.count(Kind { resource: "leases".to_owned(), verb: "get" }, Some(200));
        let leader = LeaderMetrics::register(&mut registry);
        Self { registry, leader }
    }

    /// Every metric has a value.
    fn counted() -> Self {
        let metrics = Self::new();
        metrics.leader.grants.granted();
        metrics.leader.grants.refused(RefusalReason::PoolExhausted);
        metrics.leader.orphans.count(None);
        let (queue, now) = (&metrics.leader.grants.queue, Instant::now());
        queue.started(now, "uid");
        queue.ended(now, "uid", Attempt::Answered);
        metrics
    }
}

#[test]
fn pools_have_the_names_of_coil_and_only_the_leader_shows_them() {
    let metrics = Metrics::new();
    metrics.leader.leads(Some(stores()));
    for line in [
        "fairlead_controller_leader 1",
        "coil_controller_max_blocks{pool=\"a\"} 64",
        "coil_controller_max_blocks{pool=\"invalid\"} 0",
        "coil_controller_allocated_blocks{pool=\"a\"} 1",
        "coil_controller_allocated_blocks{pool=\"invalid\"} 0",
    ] {
        has(&text(&metrics.registry, Exposition::Text), line);
    }
    metrics.leader.leads(None);
    let standby = text(&metrics.registry, Exposition::Text);
    assert!(standby.contains("fairlead_controller_leader 0") && !standby.contains("pool="), "{standby}");
}

#[test]
fn names_follow_the_conventions_of_prometheus() {
    let page = text(&Metrics::counted().registry, Exposition::Text);
    for line in [
        "fairlead_controller_block_grants_total 1",
        "fairlead_controller_block_refusals_total{reason=\"PoolExhausted\"} 1",
        "fairlead_controller_orphan_blocks_total{result=\"failed\"} 1",
        "fairlead_controller_events_dropped_total 0",
    ] {
        has(&page, line);
    }
}

fn exposed() -> Exposed {
    let metrics = Metrics::counted();
    metrics.leader.leads(Some(stores()));
    Exposed::parse(&text(&metrics.registry, Exposition::Text))
}

#[test]
fn the_dashboard_and_the_alerts_query_existing_metrics_and_labels() {
    let unknown = Program::Controller.unknown(&exposed()).unwrap();
    assert!(unknown.is_empty(), "{unknown:#?}");
}

#[test]
fn the_reference_of_metrics_is_current() {
    reference::check("controller", &exposed()).unwrap();
}

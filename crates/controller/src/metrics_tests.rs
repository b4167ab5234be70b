//! The names of all metrics of the program, and the dashboard that queries them.

use fairlead_api::resources::{AddressBlock, AddressPool};
use fairlead_cluster::metrics::text;
use fairlead_ipam::RefusalReason;
use kube::runtime::reflector::{Lookup, Store, store};
use kube::runtime::watcher::Event;
use prometheus_client::registry::Registry;

use crate::leader::LeaderMetrics;
use crate::stores::Stores;
use crate::webhook::WebhookMetrics;

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
        generations: std::array::from_fn(|_| tokio::sync::watch::channel(1).1),
    }
}

struct Metrics {
    registry: Registry,
    leader: LeaderMetrics,
    webhook: WebhookMetrics,
}

impl Metrics {
    fn new() -> Self {
        let mut registry = Registry::default();
        let leader = LeaderMetrics::register(&mut registry);
        let webhook = WebhookMetrics::register(&mut registry);
        Self { registry, leader, webhook }
    }

    /// Every metric has a value.
    fn counted() -> Self {
        let metrics = Self::new();
        metrics.leader.grants.granted();
        metrics.leader.grants.refused(RefusalReason::PoolExhausted);
        metrics.leader.orphans.count(None);
        metrics.webhook.reviewed("validate", "denied");
        metrics.webhook.certificate_expires(jiff::Timestamp::from_second(1_800_000_000).unwrap());
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
        has(&text(&metrics.registry), line);
    }
    metrics.leader.leads(None);
    let standby = text(&metrics.registry);
    assert!(standby.contains("fairlead_controller_leader 0") && !standby.contains("pool="), "{standby}");
}

#[test]
fn names_follow_the_conventions_of_prometheus() {
    let page = text(&Metrics::counted().registry);
    for line in [
        "fairlead_controller_block_grants_total 1",
        "fairlead_controller_block_refusals_total{reason=\"PoolExhausted\"} 1",
        "fairlead_controller_orphan_blocks_total{result=\"failed\"} 1",
        "fairlead_controller_events_dropped_total 0",
        "fairlead_webhook_requests_total{webhook=\"validate\",result=\"denied\"} 1",
        "fairlead_webhook_certificate_expiry_timestamp_seconds 1800000000",
    ] {
        has(&page, line);
    }
}

#[test]
fn the_dashboard_queries_existing_metrics() {
    let dashboard = include_str!("../../../deploy/grafana/fairlead.json");
    let metrics = Metrics::counted();
    metrics.leader.leads(Some(stores()));
    let text = text(&metrics.registry);
    let words = dashboard.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    let ours = words.filter(|word| {
        ["fairlead_controller_", "fairlead_webhook_", "coil_controller_"]
            .iter()
            .any(|prefix| word.starts_with(prefix))
    });
    let mut queried = 0;
    for name in ours {
        let family = ["_total", "_bucket"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
        assert!(text.contains(&format!("# TYPE {family} ")), "{name} is not in\n{text}");
        queried += 1;
    }
    assert!(queried > 3, "{queried}");
}

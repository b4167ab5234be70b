//! What a scrape of the controller shows: who leads, how many blocks each pool has, what was granted, refused and
//! swept up, and how the webhook fares.

use std::sync::{Arc, Mutex, PoisonError};

use fairlead_api::resources::{AddressBlock, AddressPool};
use kube::ResourceExt;
use kube::runtime::reflector::Store;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Pool {
    pool: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Review {
    webhook: &'static str,
    result: &'static str,
}

/// The leader's watch caches.
type Caches = (Store<AddressPool>, Store<AddressBlock>);

/// Counts since the start of this copy, and what it sees while it leads.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    caches: Mutex<Option<Caches>>,
    grants: Counter,
    refusals: Family<Reason, Counter>,
    orphans: Family<Outcome, Counter>,
    reviews: Family<Review, Counter>,
    certificate_end: Gauge,
}

impl Metrics {
    /// This copy leads, or no longer does.
    pub(crate) fn lead(&self, caches: Option<Caches>) {
        *self.caches.lock().unwrap_or_else(PoisonError::into_inner) = caches;
    }

    /// A BlockRequest was answered with a block.
    pub(crate) fn granted(&self) {
        self.grants.inc();
    }

    /// A BlockRequest was answered without one; the reason is that of its condition.
    pub(crate) fn refused(&self, reason: &'static str) {
        self.refusals.get_or_create(&Reason { reason }).inc();
    }

    /// A block of a node that is gone was looked at: `freed`, `kept` or `failed`.
    pub(crate) fn orphan(&self, result: &'static str) {
        self.orphans.get_or_create(&Outcome { result }).inc();
    }

    /// The webhook `mutate` or `validate` answered: `allowed`, `denied` or `failed`.
    pub(crate) fn reviewed(&self, webhook: &'static str, result: &'static str) {
        self.reviews.get_or_create(&Review { webhook, result }).inc();
    }

    /// When the certificate that is served ends.
    pub(crate) fn certificate_ends(&self, at: jiff::Timestamp) {
        self.certificate_end.set(at.as_second());
    }

    /// The text of a scrape.
    pub(crate) fn text(&self) -> String {
        let caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match caches {
            Some((pools, blocks)) => self.page(true, &pools.state(), &blocks.state()),
            None => self.page(false, &[], &[]),
        }
    }

    fn page(&self, leads: bool, pools: &[Arc<AddressPool>], blocks: &[Arc<AddressBlock>]) -> String {
        let mut registry = Registry::default();
        self.counts(&mut registry, leads);
        of_coil(&mut registry, pools, blocks);
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &registry);
        text
    }

    fn counts(&self, registry: &mut Registry, leads: bool) {
        let leader: Gauge = Gauge::default();
        leader.set(i64::from(leads));
        let ours = registry.sub_registry_with_prefix("fairlead_controller");
        ours.register("leader", "Whether this copy is the elected one", leader);
        ours.register("block_grants", "BlockRequests answered with a block", self.grants.clone());
        ours.register("block_refusals", "BlockRequests refused, by reason", self.refusals.clone());
        ours.register(
            "orphan_blocks",
            "Blocks of nodes that are gone: freed, kept because something changed meanwhile, or failed",
            self.orphans.clone(),
        );
        let webhook = registry.sub_registry_with_prefix("fairlead_webhook");
        webhook.register(
            "requests",
            "Admission reviews answered, by webhook and result",
            self.reviews.clone(),
        );
        webhook.register(
            "certificate_expiry_timestamp_seconds",
            "When the served certificate ends; 0 while there is none",
            self.certificate_end.clone(),
        );
    }
}

/// The names under `coil_controller` are Coil's and mean the same.
fn of_coil(registry: &mut Registry, pools: &[Arc<AddressPool>], blocks: &[Arc<AddressBlock>]) {
    let (max, allocated) = (Family::<Pool, Gauge>::default(), Family::<Pool, Gauge>::default());
    for pool in pools {
        let label = Pool { pool: pool.name_any() };
        let held = blocks.iter().filter(|block| block.pool() == Some(&label.pool)).count();
        allocated.get_or_create(&label).set(i64::try_from(held).unwrap_or(i64::MAX));
        let capacity = fairlead_ipam::Pool::try_from(pool.as_ref()).map_or(0, |usable| usable.capacity());
        max.get_or_create(&label).set(i64::try_from(capacity).unwrap_or(i64::MAX));
    }
    let of_coil = registry.sub_registry_with_prefix("coil_controller");
    of_coil.register("max_blocks", "Blocks that the pool can be cut into; 0 when it cannot be used", max);
    of_coil.register("allocated_blocks", "Blocks of the pool that nodes have", allocated);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(page: &str, line: &str) {
        assert!(page.lines().any(|it| it == line), "{line} is not in\n{page}");
    }

    /// What the leader shows: two pools, of which one cannot be used, and a block.
    fn page(metrics: &Metrics) -> String {
        let pool = |name: &str, ipv4: &str| {
            Arc::new(
                serde_json::from_value::<AddressPool>(serde_json::json!({
                    "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": name },
                    "spec": { "blockSizeBits": 2, "subnets": [{ "ipv4": ipv4 }] },
                }))
                .unwrap(),
            )
        };
        let block = Arc::new(
            serde_json::from_value::<AddressBlock>(serde_json::json!({
                "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "index": 0,
                "metadata": { "name": "a-0", "labels": { "coil.cybozu.com/pool": "a" } },
            }))
            .unwrap(),
        );
        metrics.page(true, &[pool("a", "10.0.0.0/24"), pool("broken", "10.0.0.0/31")], &[block])
    }

    #[test]
    fn pools_have_coils_names_and_only_the_leader_shows_them() {
        let metrics = Metrics::default();
        let shown = page(&metrics);
        for line in [
            "fairlead_controller_leader 1",
            "coil_controller_max_blocks{pool=\"a\"} 64",
            "coil_controller_max_blocks{pool=\"broken\"} 0",
            "coil_controller_allocated_blocks{pool=\"a\"} 1",
            "coil_controller_allocated_blocks{pool=\"broken\"} 0",
        ] {
            has(&shown, line);
        }
        let idle = metrics.text();
        assert!(idle.contains("fairlead_controller_leader 0") && !idle.contains("pool="), "{idle}");
    }

    fn counted() -> Metrics {
        let metrics = Metrics::default();
        metrics.granted();
        metrics.refused("out of blocks");
        metrics.orphan("freed");
        metrics.reviewed("validate", "denied");
        metrics.certificate_ends(jiff::Timestamp::from_second(1_800_000_000).unwrap());
        metrics
    }

    #[test]
    fn counts_are_named_as_prometheus_wants_them() {
        let page = counted().text();
        for line in [
            "fairlead_controller_block_grants_total 1",
            "fairlead_controller_block_refusals_total{reason=\"out of blocks\"} 1",
            "fairlead_controller_orphan_blocks_total{result=\"freed\"} 1",
            "fairlead_webhook_requests_total{webhook=\"validate\",result=\"denied\"} 1",
            "fairlead_webhook_certificate_expiry_timestamp_seconds 1800000000",
        ] {
            has(&page, line);
        }
    }

    #[test]
    fn the_dashboard_asks_for_what_there_is() {
        let dashboard = include_str!("../../../deploy/grafana/fairlead.json");
        let text = page(&counted());
        let words = dashboard.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        let ours = words.filter(|word| {
            ["fairlead_controller_", "fairlead_webhook_", "coil_controller_"]
                .iter()
                .any(|prefix| word.starts_with(prefix))
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

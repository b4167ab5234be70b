//! What a scrape of the controller shows: who leads, and how many blocks each pool has.

use std::sync::{Arc, Mutex, PoisonError};

use fairlead_api::resources::{AddressBlock, AddressPool};
use kube::ResourceExt;
use kube::runtime::reflector::Store;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::grants;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Pool {
    pool: String,
}

/// The leader's watch caches.
type Caches = (Store<AddressPool>, Store<AddressBlock>);

/// What the leader sees; nothing in a copy that does not lead.
#[derive(Clone, Default)]
pub(crate) struct View(Arc<Mutex<Option<Caches>>>);

impl View {
    /// This copy leads, or no longer does.
    pub(crate) fn set(&self, caches: Option<Caches>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = caches;
    }

    /// The text of a scrape.
    pub(crate) fn text(&self) -> String {
        let caches = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match caches {
            Some((pools, blocks)) => text(true, &pools.state(), &blocks.state()),
            None => text(false, &[], &[]),
        }
    }
}

/// The names under `coil_controller` are Coil's and mean the same.
fn text(leads: bool, pools: &[Arc<AddressPool>], blocks: &[Arc<AddressBlock>]) -> String {
    let mut registry = Registry::default();
    let leader: Gauge = Gauge::default();
    leader.set(i64::from(leads));
    registry.sub_registry_with_prefix("fairlead_controller").register(
        "leader",
        "Whether this copy is the elected one",
        leader,
    );
    let (max, allocated) = (Family::<Pool, Gauge>::default(), Family::<Pool, Gauge>::default());
    for pool in pools {
        let label = Pool { pool: pool.name_any() };
        let held = blocks.iter().filter(|block| block.pool() == Some(&label.pool)).count();
        allocated.get_or_create(&label).set(i64::try_from(held).unwrap_or(i64::MAX));
        let capacity = grants::parse(pool).map_or(0, |usable| usable.capacity());
        max.get_or_create(&label).set(i64::try_from(capacity).unwrap_or(i64::MAX));
    }
    let of_coil = registry.sub_registry_with_prefix("coil_controller");
    of_coil.register("max_blocks", "Blocks that the pool can be cut into; 0 when it cannot be used", max);
    of_coil.register("allocated_blocks", "Blocks of the pool that nodes have", allocated);
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = encode(&mut text, &registry);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_have_coils_names_and_only_the_leader_shows_them() {
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
        let shown = text(true, &[pool("a", "10.0.0.0/24"), pool("broken", "10.0.0.0/31")], &[block]);
        for line in [
            "fairlead_controller_leader 1",
            "coil_controller_max_blocks{pool=\"a\"} 64",
            "coil_controller_max_blocks{pool=\"broken\"} 0",
            "coil_controller_allocated_blocks{pool=\"a\"} 1",
            "coil_controller_allocated_blocks{pool=\"broken\"} 0",
        ] {
            assert!(shown.lines().any(|it| it == line), "{line} is not in\n{shown}");
        }
        let idle = View::default().text();
        assert!(idle.contains("fairlead_controller_leader 0") && !idle.contains("pool="), "{idle}");
    }
}

//! Metrics of the built-in router, as Coil's router has them.

use fairlead_cluster::metrics::declare;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// See [`Self::register`] for what each means.
#[derive(Debug, Clone)]
pub struct RouterMetrics {
    syncs: Family<[(&'static str, String); 1], Counter>,
    routes: Family<[(&'static str, String); 1], Gauge>,
}

impl RouterMetrics {
    /// Declares them in `all`.
    pub fn register(all: &mut Registry) -> Self {
        let coil = all.sub_registry_with_prefix("coil_router");
        Self {
            syncs: declare(coil, "syncs", "Synchronisations of the built-in router"),
            routes: declare(coil, "routes_synced", "Routes of the built-in router"),
        }
    }

    /// The routes of `node` were reconciled.
    pub fn synced(&self, node: &str, routes: usize) {
        let label = [("node", node.to_owned())];
        self.syncs.get_or_create(&label).inc();
        self.routes.get_or_create(&label).set(i64::try_from(routes).unwrap_or(i64::MAX));
    }
}

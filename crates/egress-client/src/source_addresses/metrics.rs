//! Counts of source addresses that this node announces.

use fairlead_cluster::metrics::register;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// See [`Self::register`] for what each means.
#[derive(Debug, Clone)]
pub(crate) struct AnnounceMetrics {
    announced: Gauge,
    announcements: Counter,
    takeovers: Counter,
    corrections: Counter,
}

impl AnnounceMetrics {
    /// Declares them in `all`.
    pub(crate) fn register(all: &mut Registry) -> Self {
        let ours = all.sub_registry_with_prefix("fairlead_egress_source");
        let announced = "Source addresses of egress gateways that this node announces";
        let announcements = "Times that this node began to announce a source address";
        let takeovers = "Times that it did so after another gateway had held the address";
        let corrections = "Times that routes or entries of source addresses were put back after another program had changed them";
        Self {
            announced: register(ours, "addresses", announced, Gauge::default()),
            announcements: register(ours, "announcements", announcements, Counter::default()),
            takeovers: register(ours, "takeovers", takeovers, Counter::default()),
            corrections: register(ours, "corrections", corrections, Counter::default()),
        }
    }

    pub(super) fn announced(&self, addresses: usize) {
        self.announced.set(i64::try_from(addresses).unwrap_or(i64::MAX));
    }

    pub(super) fn began(&self, is_takeover: bool) {
        self.announcements.inc();
        if is_takeover {
            self.takeovers.inc();
        }
    }

    pub(super) fn corrected(&self) {
        self.corrections.inc();
    }
}

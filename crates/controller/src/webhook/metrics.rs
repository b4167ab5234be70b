//! Metrics of the webhook.

use fairlead_cluster::metrics::register;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Counts reviews, and says when the served certificate expires.
#[derive(Debug, Clone)]
pub(crate) struct WebhookMetrics {
    requests: Family<ReviewLabels, Counter>,
    certificate_expiry: Gauge,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReviewLabels {
    webhook: &'static str,
    result: &'static str,
}

impl WebhookMetrics {
    /// Declares them in `registry`.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("fairlead_webhook");
        let requests = "Admission reviews answered, by webhook and result";
        let expiry = "When the served certificate expires; 0 while there is none";
        Self {
            requests: register(registry, "requests", requests, Family::default()),
            certificate_expiry: register(
                registry,
                "certificate_expiry_timestamp_seconds",
                expiry,
                Gauge::default(),
            ),
        }
    }

    /// A webhook answered a review: `allowed`, `denied` or `failed`.
    pub(crate) fn reviewed(&self, webhook: &'static str, result: &'static str) {
        self.requests.get_or_create(&ReviewLabels { webhook, result }).inc();
    }

    /// Another certificate is served, which expires then.
    pub(crate) fn certificate_expires(&self, at: jiff::Timestamp) {
        self.certificate_expiry.set(at.as_second());
    }
}

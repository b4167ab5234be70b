//! Metrics of answers.

use fairlead_cluster::metrics::declare;
use fairlead_ipam::RefusalReason;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::work_queue::WorkQueueMetrics;

/// Counts answers.
#[derive(Debug, Clone)]
pub(crate) struct GrantMetrics {
    grants: Counter,
    refusals: Family<ReasonLabel, Counter>,
    pub(crate) queue: WorkQueueMetrics,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

impl GrantMetrics {
    /// Declares them in `registry`.
    pub(crate) fn register(registry: &mut Registry, queue: WorkQueueMetrics) -> Self {
        let grants = "BlockRequests answered with a block";
        let refusals = "BlockRequests refused, by reason";
        Self {
            grants: declare(registry, "block_grants", grants),
            refusals: declare(registry, "block_refusals", refusals),
            queue,
        }
    }

    /// A request was answered with a block.
    pub(crate) fn granted(&self) {
        self.grants.inc();
    }

    /// A request was refused.
    pub(crate) fn refused(&self, reason: RefusalReason) {
        self.refusals.get_or_create(&ReasonLabel { reason: reason.as_str() }).inc();
    }
}

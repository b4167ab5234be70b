//! Metrics of copied connections.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use fairlead_cluster::metrics::{register, register_with_unit};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::incoming::Refused;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

/// What is counted.
#[derive(Debug, Clone, Default)]
pub struct SyncMetrics {
    pub(super) sent: Counter,
    pub(super) injected: Counter,
    pub(super) deleted: Counter,
    refused: Family<ReasonLabel, Counter>,
    pub(super) missed: Counter,
    pub(super) full_copies: Counter,
    pub(super) dropped: Counter,
    copies: Gauge,
    pub(super) held: Gauge,
    lag: Gauge<f64, AtomicU64>,
}

impl SyncMetrics {
    /// Declares them in the registry of a gateway's metrics.
    pub fn register(ours: &mut Registry) -> Self {
        let metrics = Self {
            sent: register(
                ours,
                "flow_changes",
                "Changes of connections that were sent to other gateways",
                Counter::default(),
            ),
            injected: register(
                ours,
                "injected_flows",
                "Connections of other gateways that were added to this kernel, or updated",
                Counter::default(),
            ),
            deleted: register(
                ours,
                "deleted_flow_copies",
                "Connections of other gateways that were deleted from this kernel",
                Counter::default(),
            ),
            refused: register(
                ours,
                "refused_flow_copies",
                "Connections of other gateways that were not taken, by the reason",
                Family::default(),
            ),
            missed: register(
                ours,
                "missed_flow_events",
                "How often the kernel lost notifications of connections",
                Counter::default(),
            ),
            full_copies: register(
                ours,
                "full_flow_copies",
                "Full copies of connections that were sent to another gateway",
                Counter::default(),
            ),
            dropped: register(
                ours,
                "dropped_flow_messages",
                "Messages about connections that another gateway, or this one, could not take in time; a full copy follows",
                Counter::default(),
            ),
            copies: register(
                ours,
                "flow_copies",
                "Connections of other gateways in this kernel",
                Gauge::default(),
            ),
            held: register(
                ours,
                "copied_flows",
                "Connections with a source address that this gateway holds, as others have them",
                Gauge::default(),
            ),
            lag: register_with_unit(
                ours,
                "flow_copy_lag",
                "How long the oldest message about connections has waited for its connection to another gateway",
                Unit::Seconds,
                Gauge::default(),
            ),
        };
        for reason in Refused::ALL {
            // Shown from the beginning, as 0.
            drop(metrics.refused.get_or_create(&ReasonLabel { reason: reason.name() }));
        }
        metrics
    }

    pub(super) fn refused(&self, reasons: &[Refused]) {
        for reason in reasons {
            self.refused.get_or_create(&ReasonLabel { reason: reason.name() }).inc();
        }
    }

    /// How many connections of other gateways this kernel has.
    pub(crate) fn copies(&self) -> u64 {
        u64::try_from(self.copies.get()).unwrap_or_default()
    }

    /// It has so many.
    pub(crate) fn set_copies(&self, count: usize) {
        self.copies.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(super) fn lag(&self, lag: Duration) {
        self.lag.set(lag.as_secs_f64());
    }

    /// What was sent, injected, refused and missed so far, for tests.
    pub fn counts(&self) -> [u64; 4] {
        let refused = Refused::ALL
            .map(|reason| self.refused.get_or_create(&ReasonLabel { reason: reason.name() }).get());
        let refused = refused.into_iter().fold(0, u64::saturating_add);
        [self.sent.get(), self.injected.get(), refused, self.missed.get()]
    }
}

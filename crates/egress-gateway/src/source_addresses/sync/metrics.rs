//! Metrics of copied connections.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use fairlead_cluster::metrics::{register, register_with_unit};
use fairlead_source_addresses::copies::incoming::Refused;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

/// Metrics of the copies of connections.
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
        Self {
            sent: counter(ours, "flow_changes", "Changes of connections that were sent to other gateways"),
            injected: counter(
                ours,
                "injected_flows",
                "Connections of other gateways that were added to this kernel, or updated",
            ),
            deleted: counter(
                ours,
                "deleted_flow_copies",
                "Connections of other gateways that were deleted from this kernel",
            ),
            refused: refusals(ours),
            missed: counter(
                ours,
                "missed_flow_events",
                "How often the kernel lost notifications of connections",
            ),
            full_copies: counter(
                ours,
                "full_flow_copies",
                "Full copies of connections that were sent to another gateway",
            ),
            dropped: counter(
                ours,
                "dropped_flow_messages",
                "Messages about connections that another gateway, or this one, could not take in time; a full copy follows",
            ),
            copies: gauge(ours, "flow_copies", "Connections of other gateways in this kernel"),
            held: gauge(
                ours,
                "copied_flows",
                "Connections with a source address that this gateway holds, as others have them",
            ),
            lag: register_with_unit(
                ours,
                "flow_copy_lag",
                "How long the oldest message about connections has waited for its connection to another gateway",
                Unit::Seconds,
                Gauge::default(),
            ),
        }
    }

    pub(super) fn refused(&self, reasons: &[Refused]) {
        for reason in reasons {
            self.refused.get_or_create(&ReasonLabel { reason: reason.name() }).inc();
        }
    }

    /// Number of connections of other gateways in this kernel.
    pub(crate) fn copies(&self) -> u64 {
        u64::try_from(self.copies.get()).unwrap_or_default()
    }

    /// Sets the number of connections of other gateways in this kernel.
    pub(crate) fn set_copies(&self, count: usize) {
        self.copies.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(super) fn lag(&self, lag: Duration) {
        self.lag.set(lag.as_secs_f64());
    }

    /// Numbers of connections sent, injected, refused and missed so far, for tests.
    pub fn counts(&self) -> [u64; 4] {
        let refused = Refused::ALL
            .map(|reason| self.refused.get_or_create(&ReasonLabel { reason: reason.name() }).get());
        let refused = refused.into_iter().fold(0, u64::saturating_add);
        [self.sent.get(), self.injected.get(), refused, self.missed.get()]
    }
}

fn counter(ours: &mut Registry, name: &str, help: &str) -> Counter {
    register(ours, name, help, Counter::default())
}

fn gauge(ours: &mut Registry, name: &str, help: &str) -> Gauge {
    register(ours, name, help, Gauge::default())
}

/// Connections that were not taken; each reason is shown from the beginning, as 0.
fn refusals(ours: &mut Registry) -> Family<ReasonLabel, Counter> {
    let help = "Connections of other gateways that were not taken, by the reason";
    let refused = register(ours, "refused_flow_copies", help, Family::<ReasonLabel, Counter>::default());
    for reason in Refused::ALL {
        drop(refused.get_or_create(&ReasonLabel { reason: reason.name() }));
    }
    refused
}

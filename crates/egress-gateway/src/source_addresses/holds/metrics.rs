//! Metrics of source addresses.

use std::collections::BTreeMap;
use std::time::Duration;

use fairlead_cluster::metrics::{register, register_with_unit};
use fairlead_source_addresses::hold::{Cause, Held};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SlotLabel {
    slot: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CauseLabel {
    cause: &'static str,
}

/// Metrics of the slots that a gateway holds.
#[derive(Debug, Clone, Default)]
pub(crate) struct HoldMetrics {
    held: Gauge,
    terms: Family<SlotLabel, Gauge>,
    takeovers: Family<CauseLabel, Counter>,
    confirmed: Gauge<f64, std::sync::atomic::AtomicU64>,
}

const CAUSES: [Cause; 4] = [Cause::Free, Cause::Failure, Cause::Handover, Cause::Restart];

fn name(cause: Cause) -> &'static str {
    match cause {
        Cause::Free => "free",
        Cause::Failure => "failure",
        Cause::Handover => "handover",
        Cause::Restart => "restart",
    }
}

impl HoldMetrics {
    pub(crate) fn register(ours: &mut Registry) -> Self {
        let metrics = Self {
            held: register(
                ours,
                "held_source_slots",
                "Slots of spec.sourceAddresses that this gateway holds",
                Gauge::default(),
            ),
            terms: register(
                ours,
                "source_slot_term",
                "The term of each slot that this gateway holds, which grows with each holder",
                Family::default(),
            ),
            takeovers: register(
                ours,
                "source_slots_taken",
                "Slots that this gateway got: free ones, after a failure of the holder, handed over, or kept over a restart",
                Family::default(),
            ),
            confirmed: register_with_unit(
                ours,
                "source_hold_age",
                "Time since the oldest confirmation of a slot that is held, by other gateways or the API server; above 1.8 the slot is lost",
                Unit::Seconds,
                Gauge::default(),
            ),
        };
        for cause in CAUSES {
            drop(metrics.takeovers.get_or_create(&CauseLabel { cause: name(cause) }));
        }
        metrics
    }

    /// This gateway got a slot.
    pub(crate) fn taken(&self, cause: Cause) {
        self.takeovers.get_or_create(&CauseLabel { cause: name(cause) }).inc();
    }

    /// Sets the slots that are held now, with their terms, and the time since the oldest confirmation of one.
    pub(crate) fn set(&self, held: &BTreeMap<u32, Held>, since: Option<Duration>) {
        self.held.set(i64::try_from(held.len()).unwrap_or(i64::MAX));
        self.terms.clear();
        for (slot, held) in held {
            let term = i64::try_from(held.term).unwrap_or(i64::MAX);
            self.terms.get_or_create(&SlotLabel { slot: *slot }).set(term);
        }
        self.confirmed.set(since.unwrap_or_default().as_secs_f64());
    }
}

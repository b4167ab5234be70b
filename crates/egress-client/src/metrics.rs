//! Counts of egress of this node's pods.

use fairlead_cluster::metrics::register;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use fairlead_egress::problem::EgressReason;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Cause {
    reason: &'static str,
}

/// See [`Self::register`] for what each means.
#[derive(Debug, Clone)]
pub(crate) struct EgressMetrics {
    clients: Gauge,
    problems: Family<Cause, Gauge>,
    corrections: Counter,
    failures: Counter,
}

impl EgressMetrics {
    /// Declares them in `all`.
    pub(crate) fn register(all: &mut Registry) -> Self {
        let ours = all.sub_registry_with_prefix("fairlead_egress");
        let metrics = Self {
            clients: register(
                ours,
                "clients",
                "Pods of this node that use egress gateways",
                Gauge::default(),
            ),
            problems: register(
                ours,
                "pod_problems",
                "Pods of this node that do not get the egress that they ask for, by reason",
                Family::default(),
            ),
            corrections: register(
                ours,
                "corrections",
                "Client pods whose rules, routes, links or filters another program had changed, and that were corrected",
                Counter::default(),
            ),
            failures: register(
                ours,
                "failures",
                "Attempts to set up the egress of a running pod that the kernel refused",
                Counter::default(),
            ),
        };
        for reason in EgressReason::ALL {
            metrics.problems.get_or_create(&Cause { reason: reason.as_str() }).set(0);
        }
        metrics
    }

    pub(crate) fn counted(&self, clients: usize, problems: impl Fn(EgressReason) -> usize) {
        self.clients.set(i64::try_from(clients).unwrap_or(i64::MAX));
        for reason in EgressReason::ALL {
            let pods = i64::try_from(problems(reason)).unwrap_or(i64::MAX);
            self.problems.get_or_create(&Cause { reason: reason.as_str() }).set(pods);
        }
    }

    pub(crate) fn corrected(&self) {
        self.corrections.inc();
    }

    pub(crate) fn failed(&self) {
        self.failures.inc();
    }
}

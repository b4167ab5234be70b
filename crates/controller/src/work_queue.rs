//! Metrics of work queues and reconcilers under the names of client-go and controller-runtime, as Coil's controller has them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_cluster::metrics::{declare, register, register_with_unit};
use fairlead_ipam::queue::Attempt;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// Buckets of controller-runtime's `controller_runtime_reconcile_time_seconds`, without those between them.
const RECONCILE_BUCKETS: [f64; 16] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0];

/// A controller, named by the kind that it reconciles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ControllerLabel {
    controller: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Result {
    controller: &'static str,
    result: &'static str,
}

/// The queue of a controller has its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct QueueLabels {
    name: &'static str,
    controller: &'static str,
}

/// Counts the reconciliations of each controller.
#[derive(Debug, Clone)]
pub(crate) struct ReconcileMetrics {
    total: Family<Result, Counter>,
    errors: Family<ControllerLabel, Counter>,
    seconds: Family<ControllerLabel, Histogram, fn() -> Histogram>,
}

impl ReconcileMetrics {
    /// Declares them in the registry of all metrics.
    pub(crate) fn register(all: &mut Registry) -> Self {
        let registry = all.sub_registry_with_prefix("controller_runtime");
        let seconds =
            Family::new_with_constructor((|| Histogram::new(RECONCILE_BUCKETS)) as fn() -> Histogram);
        let total = "Reconciliations, by controller and result";
        let errors = "Reconciliations that failed, by controller";
        let time = "Time one reconciliation took, by controller";
        Self {
            total: declare(registry, "reconcile", total),
            errors: declare(registry, "reconcile_errors", errors),
            seconds: register_with_unit(registry, "reconcile_time", time, Unit::Seconds, seconds),
        }
    }

    /// A reconciliation ended.
    pub(crate) fn ended(&self, controller: &'static str, took: Duration, ok: bool) {
        let label = ControllerLabel { controller };
        let errors = self.errors.get_or_create(&label);
        if !ok {
            errors.inc();
        }
        let result = if ok { "success" } else { "error" };
        self.total.get_or_create(&Result { controller, result }).inc();
        self.seconds.get_or_create(&label).observe(took.as_secs_f64());
    }
}

/// Follows one queue of objects, which it knows by their UIDs.
#[derive(Debug, Clone)]
pub(crate) struct WorkQueueMetrics {
    labels: QueueLabels,
    objects: Arc<Mutex<Objects>>,
    adds: Counter,
    retries: Counter,
    queue_seconds: Histogram,
    work_seconds: Histogram,
    reconciles: ReconcileMetrics,
}

#[derive(Debug, Default)]
struct Objects {
    waiting: BTreeMap<String, Instant>,
    working: BTreeMap<String, Instant>,
}

impl WorkQueueMetrics {
    /// Declares those of the queue of `controller` in the registry of all metrics.
    pub(crate) fn register(
        all: &mut Registry,
        controller: &'static str,
        reconciles: ReconcileMetrics,
    ) -> Self {
        let registry = all.sub_registry_with_prefix("workqueue");
        let labels = QueueLabels { name: controller, controller };
        let objects = Arc::new(Mutex::new(Objects::default()));
        let mut counter = |name, help| {
            register(registry, name, help, Family::<QueueLabels, Counter>::default())
                .get_or_create_owned(&labels)
        };
        let adds = counter("adds", "Objects added to the queue");
        let retries = counter("retries", "Objects added again after a failure");
        let mut histogram = |name, help| {
            // Those of client-go: 10 ns to 1,000 s.
            let histogram = || Histogram::new(exponential_buckets(1e-8, 10.0, 12));
            let family = Family::new_with_constructor(histogram as fn() -> Histogram);
            register_with_unit(registry, name, help, Unit::Seconds, family).get_or_create_owned(&labels)
        };
        let queue_seconds = histogram("queue_duration", "Time an object waited in the queue");
        let work_seconds = histogram("work_duration", "Time the work on an object took");
        registry.register_collector(Box::new(Snapshot { labels, objects: Arc::clone(&objects) }));
        Self { labels, objects, adds, retries, queue_seconds, work_seconds, reconciles }
    }

    /// These objects are due and not worked on; all others have left the queue.
    pub(crate) fn waiting<'a>(&self, now: Instant, due: impl Iterator<Item = &'a str>) {
        let due: BTreeSet<&str> = due.collect();
        let mut objects = self.objects();
        objects.waiting.retain(|uid, _| due.contains(uid.as_str()));
        for uid in due {
            if !objects.waiting.contains_key(uid) {
                objects.waiting.insert(uid.to_owned(), now);
                self.adds.inc();
            }
        }
    }

    /// Work on an object begins.
    pub(crate) fn started(&self, now: Instant, uid: &str) {
        let mut objects = self.objects();
        let since = objects.waiting.remove(uid).unwrap_or(now);
        self.queue_seconds.observe(now.saturating_duration_since(since).as_secs_f64());
        objects.working.insert(uid.to_owned(), now);
    }

    /// Work on an object ended.
    pub(crate) fn ended(&self, now: Instant, uid: &str, attempt: Attempt) {
        let Some(since) = self.objects().working.remove(uid) else { return };
        let took = now.saturating_duration_since(since);
        self.work_seconds.observe(took.as_secs_f64());
        if attempt == Attempt::Failed {
            self.retries.inc();
        }
        self.reconciles.ended(self.labels.controller, took, attempt == Attempt::Answered);
    }

    /// The queue ended, and what was in it.
    pub(crate) fn clear(&self) {
        *self.objects() = Objects::default();
    }

    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Collector of the queue's gauges, which are computed at each scrape.
#[derive(Debug)]
struct Snapshot {
    labels: QueueLabels,
    objects: Arc<Mutex<Objects>>,
}

impl Snapshot {
    /// Name, help and value of each gauge.
    fn gauges(&self, now: Instant) -> [(&'static str, &'static str, f64); 3] {
        let objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        let ages = objects.working.values().map(|since| now.saturating_duration_since(*since).as_secs_f64());
        let (sum, longest) =
            ages.fold((0.0, 0.0), |(sum, longest): (f64, f64), age| (sum + age, longest.max(age)));
        let unfinished = "Sum of the time that work in progress has taken so far.";
        let longest_help = "Time that the longest running work has taken so far.";
        [
            ("depth", "Objects in the queue.", objects.waiting.len() as f64),
            ("unfinished_work_seconds", unfinished, sum),
            ("longest_running_processor_seconds", longest_help, longest),
        ]
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::result::Result<(), fmt::Error> {
        for (name, help, value) in self.gauges(Instant::now()) {
            let gauge = Family::<QueueLabels, Gauge<f64, std::sync::atomic::AtomicU64>>::default();
            gauge.get_or_create(&self.labels).set(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fairlead_cluster::metrics::{Exposition, text};

    use super::*;

    const CONTROLLER: &str = "blockrequest";

    fn metrics() -> (WorkQueueMetrics, Registry) {
        let mut registry = Registry::default();
        let reconciles = ReconcileMetrics::register(&mut registry);
        (WorkQueueMetrics::register(&mut registry, CONTROLLER, reconciles), registry)
    }

    fn gauges(metrics: &WorkQueueMetrics, now: Instant) -> [f64; 3] {
        let snapshot = Snapshot { labels: metrics.labels, objects: Arc::clone(&metrics.objects) };
        snapshot.gauges(now).map(|(_, _, value)| value)
    }

    #[test]
    fn an_object_waits_is_worked_on_fails_and_is_added_again() {
        let (metrics, registry) = metrics();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        metrics.waiting(at(0), ["a", "b", "deleted"].into_iter());
        metrics.waiting(at(1), ["a", "b"].into_iter());
        assert_eq!(gauges(&metrics, at(1)), [2.0, 0.0, 0.0]);
        metrics.started(at(2), "a");
        metrics.started(at(5), "b");
        assert_eq!(gauges(&metrics, at(6)), [0.0, 5.0, 4.0]);
        metrics.ended(at(8), "a", Attempt::Failed);
        metrics.ended(at(8), "b", Attempt::Answered);
        metrics.waiting(at(9), ["a"].into_iter());
        let text = text(&registry, Exposition::Text);
        for line in [
            r#"workqueue_depth{name="blockrequest",controller="blockrequest"} 1.0"#,
            r#"workqueue_adds_total{name="blockrequest",controller="blockrequest"} 4"#,
            r#"workqueue_retries_total{name="blockrequest",controller="blockrequest"} 1"#,
            r#"workqueue_queue_duration_seconds_sum{name="blockrequest",controller="blockrequest"} 7.0"#,
            r#"workqueue_work_duration_seconds_sum{name="blockrequest",controller="blockrequest"} 9.0"#,
            r#"controller_runtime_reconcile_total{controller="blockrequest",result="error"} 1"#,
            r#"controller_runtime_reconcile_total{controller="blockrequest",result="success"} 1"#,
            r#"controller_runtime_reconcile_errors_total{controller="blockrequest"} 1"#,
            r#"controller_runtime_reconcile_time_seconds_count{controller="blockrequest"} 2"#,
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
        }
        metrics.clear();
        assert_eq!(gauges(&metrics, at(10)), [0.0, 0.0, 0.0]);
    }
}

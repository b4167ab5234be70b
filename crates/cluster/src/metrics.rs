//! What the metrics of all programs share. Names and units follow the Prometheus conventions; each subsystem declares and
//! registers its own.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::{Metric, Registry, Unit};

/// Registers a metric and returns the handle by which it is changed.
pub fn register<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

/// The same for a metric with a unit, which becomes the end of its name.
pub fn register_with_unit<M: Metric + Clone>(
    registry: &mut Registry,
    name: &str,
    help: &str,
    unit: Unit,
    metric: M,
) -> M {
    registry.register_with_unit(name, help, unit, metric.clone());
    metric
}

/// Whether something succeeded: `ok` or `error`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Outcome {
    result: &'static str,
}

impl From<bool> for Outcome {
    fn from(ok: bool) -> Self {
        Self { result: result(ok) }
    }
}

/// The value of a label `result`.
pub fn result(ok: bool) -> &'static str {
    if ok { "ok" } else { "error" }
}

/// An address pool.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Pool {
    /// Its name.
    pub pool: String,
}

/// The text of a scrape (OpenMetrics 1.0).
pub fn text(registry: &Registry) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = encode(&mut text, registry);
    text
}

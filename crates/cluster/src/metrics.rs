//! Labels and output that the metrics of all programs share. Names and units follow the Prometheus conventions; each subsystem declares and
//! registers its own.

use std::fmt::Write as _;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::{Metric, Registry, Unit};

/// Registers a metric without values and returns the handle by which it is changed.
pub fn declare<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    register(registry, name, help, M::default())
}

/// Registers a metric that has values, and returns the handle by which it is changed.
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
    /// Name of the pool.
    pub pool: String,
}

/// A format of scrapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exposition {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' text format 0.0.4, which every collector reads.
    Text,
}

impl Exposition {
    /// The format for a client with these `Accept` headers.
    pub fn accepted<'a>(mut headers: impl Iterator<Item = &'a str>) -> Self {
        match headers.any(|header| header.contains("application/openmetrics-text")) {
            true => Self::OpenMetrics,
            false => Self::Text,
        }
    }

    /// `Content-Type` of the format.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// The text of a scrape.
pub fn text(registry: &Registry, exposition: Exposition) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = encode(&mut text, registry);
    match exposition {
        Exposition::OpenMetrics => text,
        Exposition::Text => text_format(&text),
    }
}

/// OpenMetrics in the text format, where a counter's family has the name of its sample.
fn text_format(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        let comment = line.strip_prefix("# ").and_then(|comment| comment.split_once(' '));
        match comment {
            Some(("HELP", rest)) => help = rest.split_once(' '),
            Some(("TYPE", rest)) => {
                let (family, kind) = rest.split_once(' ').unwrap_or((rest, "untyped"));
                let suffix = if kind == "counter" { "_total" } else { "" };
                // Writing to a string cannot fail.
                if let Some((_, help)) = help.take() {
                    let _ = writeln!(text, "# HELP {family}{suffix} {help}");
                }
                let _ = writeln!(text, "# TYPE {family}{suffix} {kind}");
            }
            Some(("UNIT", _)) => {}
            _ if line == "# EOF" => {}
            _ => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::gauge::Gauge;

    use super::*;

    #[test]
    fn the_text_format_names_counters_by_their_samples() {
        let mut registry = Registry::default();
        register_with_unit(&mut registry, "sent", "Sent", Unit::Bytes, Counter::<u64>::default()).inc_by(3);
        register(&mut registry, "peers", "Peers", Gauge::<i64>::default()).set(2);
        let expected = "# HELP sent_bytes_total Sent.\n# TYPE sent_bytes_total counter\nsent_bytes_total 3\n\
                        # HELP peers Peers.\n# TYPE peers gauge\npeers 2\n";
        assert_eq!(text(&registry, Exposition::Text), expected);
        let open_metrics = text(&registry, Exposition::OpenMetrics);
        assert!(open_metrics.starts_with("# HELP sent_bytes Sent.\n# TYPE sent_bytes counter\n"));
        assert!(open_metrics.ends_with("# EOF\n"), "{open_metrics}");
    }

    #[test]
    fn a_client_gets_open_metrics_only_if_it_accepts_it() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2";
        assert_eq!(Exposition::accepted([prometheus].into_iter()), Exposition::OpenMetrics);
        assert_eq!(Exposition::accepted(["text/plain", "*/*"].into_iter()), Exposition::Text);
        assert_eq!(Exposition::accepted([].into_iter()), Exposition::Text);
    }
}

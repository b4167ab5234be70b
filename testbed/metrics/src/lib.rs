//! Compares the metrics that a program exposes with the dashboard, the alerts and the reference.
//!
//! * [`Exposed`]: the metrics and labels of a scrape.
//! * [`query`]: the metrics and labels that a PromQL expression uses, and the expressions of a dashboard.
//! * [`deployed_queries`]: those of the dashboard and the alerts in `deploy/`.
//! * [`reference`]: the tables of `docs/metrics.md`.
//! * [`promtool`]: Prometheus' own checks of metrics and rules.
//!
//! Not for: values. Tests of each program compare them.

mod deployed;
pub mod promtool;
pub mod query;
pub mod reference;

use std::collections::{BTreeMap, BTreeSet};

pub use deployed::{Program, deployed_queries};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

/// The metrics of a scrape in the text format, by the names of their samples.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Exposed(BTreeMap<String, Metric>);

/// A metric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metric {
    /// Name of the metric without the suffixes of a histogram.
    pub family: String,
    /// counter, gauge or histogram.
    pub kind: String,
    /// Help text that the program exposes, without its last period.
    pub help: String,
    /// Names of its labels.
    pub labels: BTreeSet<String>,
}

/// A scrape in the text format, where the family of a counter has the name of its sample.
///
/// # Errors
/// A metric cannot be encoded.
pub fn scrape(registry: &Registry) -> anyhow::Result<String> {
    let mut text = String::new();
    encode(&mut text, registry)?;
    for name in text.clone().lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"))
    {
        text = text.replace(&format!("# HELP {name} "), &format!("# HELP {name}_total "));
        text = text.replace(&format!("# TYPE {name} "), &format!("# TYPE {name}_total "));
    }
    Ok(text.replace("# EOF\n", ""))
}

impl Exposed {
    /// Parses a scrape.
    pub fn parse(text: &str) -> Self {
        let (mut helps, mut families) = (BTreeMap::new(), Vec::new());
        let mut metrics: BTreeMap<String, Metric> = BTreeMap::new();
        for line in text.lines() {
            if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
                helps.insert(name, help);
            } else if let Some((name, kind)) =
                line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
            {
                families.push((name, kind));
            } else if let Some((family, kind)) = families.last() {
                let (series, _) = line.rsplit_once(' ').unwrap_or((line, ""));
                let (name, labels) = series.split_once('{').unwrap_or((series, ""));
                let metric = metrics.entry(name.to_owned()).or_insert_with(|| Metric {
                    family: (*family).to_owned(),
                    kind: (*kind).to_owned(),
                    help: helps.get(family).copied().unwrap_or_default().trim_end_matches('.').to_owned(),
                    labels: BTreeSet::new(),
                });
                metric.labels.extend(label_names(labels));
            }
        }
        Self(metrics)
    }

    /// The metric with samples of this name.
    pub fn get(&self, name: &str) -> Option<&Metric> {
        self.0.get(name)
    }

    /// Each family once, with the labels of all its samples but `le`.
    pub fn families(&self) -> BTreeMap<&str, Metric> {
        let mut families: BTreeMap<&str, Metric> = BTreeMap::new();
        for metric in self.0.values() {
            let family = families.entry(&metric.family).or_insert_with(|| metric.clone());
            family.labels.extend(metric.labels.iter().filter(|label| *label != "le").cloned());
            family.labels.remove("le");
        }
        families
    }
}

/// `a="1",b="2"}`: values may contain anything but an unescaped quote.
fn label_names(labels: &str) -> Vec<String> {
    let (mut names, mut rest) = (Vec::new(), labels);
    while let Some((name, behind)) = rest.split_once("=\"") {
        names.push(name.trim_start_matches(',').to_owned());
        let mut escaped = false;
        let end = behind.find(|letter| {
            let ends = letter == '"' && !escaped;
            escaped = letter == '\\' && !escaped;
            ends
        });
        rest = end.and_then(|end| behind.get(end.saturating_add(1)..)).unwrap_or_default();
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_and_families_have_their_labels() {
        let text = "# HELP a_total All.\n# TYPE a_total counter\na_total{x=\"1,y=\\\"2\",z=\"}\"} 3\n\
                    # HELP h_seconds Time.\n# TYPE h_seconds histogram\nh_seconds_sum 1\nh_seconds_bucket{le=\"1\"} 1\n";
        let exposed = Exposed::parse(text);
        let counter = exposed.get("a_total").unwrap();
        assert_eq!((counter.kind.as_str(), counter.help.as_str()), ("counter", "All"));
        assert_eq!(counter.labels, BTreeSet::from(["x".to_owned(), "z".to_owned()]));
        assert_eq!(exposed.get("h_seconds_bucket").unwrap().labels, BTreeSet::from(["le".to_owned()]));
        assert_eq!(exposed.get("h_seconds"), None);
        let families: Vec<&str> = exposed.families().into_keys().collect();
        assert_eq!(families, ["a_total", "h_seconds"]);
        assert!(exposed.families()["h_seconds"].labels.is_empty());
    }
}

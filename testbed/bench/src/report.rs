//! Results of the measurements, as a table for people and as JSON for programs.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use serde::Serialize;

use crate::statistics::{Summary, ratios};

/// One quantity of one subject. The JSON has exactly the fields that are not skipped.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Measurement {
    /// The benchmark's name.
    pub(crate) case: &'static str,
    /// Program that was measured: ours or a peer's.
    pub(crate) subject: &'static str,
    /// Quantity that was measured.
    pub(crate) metric: String,
    /// Unit of value and samples.
    pub(crate) unit: &'static str,
    /// The median of the samples; no number, and `null` in JSON, if it could not be measured.
    pub(crate) value: f64,
    /// All of them, in the order they were taken.
    pub(crate) samples: Vec<f64>,
    /// The round of each.
    #[serde(skip)]
    pub(crate) rounds: Vec<usize>,
    /// The subject that the table divides this one by.
    #[serde(skip)]
    pub(crate) peer: Option<&'static str>,
}

impl Measurement {
    /// Takes the median of the samples, without a comparison.
    ///
    /// # Errors
    /// There is no sample.
    pub(crate) fn new(
        case: &'static str,
        subject: &'static str,
        metric: impl Into<String>,
        unit: &'static str,
        samples: Vec<f64>,
    ) -> Result<Self> {
        let metric = metric.into();
        let summary =
            Summary::of(&samples).with_context(|| format!("no sample of {subject}, {metric}, was taken"))?;
        let rounds = (0..samples.len()).collect();
        Ok(Self { case, subject, metric, unit, value: summary.median, samples, rounds, peer: None })
    }

    /// Row of a measurement that failed: without value and samples.
    pub(crate) fn failed(
        case: &'static str,
        subject: &'static str,
        metric: impl Into<String>,
        unit: &'static str,
    ) -> Self {
        let metric = metric.into();
        Self { case, subject, metric, unit, value: f64::NAN, samples: vec![], rounds: vec![], peer: None }
    }

    /// Says in which rounds the samples were taken, if some rounds have none.
    pub(crate) fn in_rounds(self, rounds: Vec<usize>) -> Self {
        Self { rounds, ..self }
    }

    /// Has the table show the ratio to this subject's samples of the same metric.
    pub(crate) fn against(self, peer: &'static str) -> Self {
        Self { peer: Some(peer), ..self }
    }
}

/// A duration as a sample.
pub(crate) fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// An array of measurements.
pub(crate) fn json(measurements: &[Measurement]) -> Result<String> {
    serde_json::to_string_pretty(measurements).context("cannot write the measurements as JSON")
}

/// A line per measurement, with the ratio to its peer.
pub(crate) fn table(measurements: &[Measurement]) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(["CASE", "METRIC", "SUBJECT", "MEDIAN", "LOWEST TO HIGHEST", "UNIT", "RATIO"]);
    for measurement in measurements {
        let (median, spread) = match Summary::of(&measurement.samples) {
            Some(Summary { median, lowest, highest }) => {
                (figure(median), format!("{} to {}", figure(lowest), figure(highest)))
            }
            None => ("failed".to_owned(), String::new()),
        };
        table.add_row([
            measurement.case.to_owned(),
            measurement.metric.clone(),
            measurement.subject.to_owned(),
            median,
            spread,
            measurement.unit.to_owned(),
            ratio(measurement, measurements),
        ]);
    }
    table.trim_fmt()
}

/// The median of the ratios and their spread; empty for a subject that is not compared.
fn ratio(ours: &Measurement, all: &[Measurement]) -> String {
    let peer = ours.peer.and_then(|subject| {
        all.iter().find(|one| (one.case, one.subject, &one.metric) == (ours.case, subject, &ours.metric))
    });
    let summary = peer.and_then(|peer| {
        let (own, peers) = neighbours(ours, peer);
        Summary::of(&ratios(&own, &peers))
    });
    match (summary, peer) {
        (Some(Summary { median, lowest, highest }), Some(peer)) => {
            format!("{} of {} ({} to {})", figure(median), peer.subject, figure(lowest), figure(highest))
        }
        _ => String::new(),
    }
}

/// Samples of both that were taken in the same round.
fn neighbours(ours: &Measurement, peer: &Measurement) -> (Vec<f64>, Vec<f64>) {
    let peers: BTreeMap<_, _> = peer.rounds.iter().zip(&peer.samples).collect();
    let own = ours.rounds.iter().zip(&ours.samples);
    own.filter_map(|(round, sample)| Some((*sample, **peers.get(round)?))).unzip()
}

/// Three significant digits, or all before the point.
pub(crate) fn figure(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        1.0.. => format!("{value:.2}"),
        0.1.. => format!("{value:.3}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured() -> Vec<Measurement> {
        vec![
            Measurement::new("tunnel", "fairlead", "TCP", "Mbit/s", vec![500.0, 1000.0, 600.0])
                .unwrap()
                .against("other"),
            Measurement::new("tunnel", "other", "TCP", "Mbit/s", vec![1000.0, 2000.0, 2000.0]).unwrap(),
        ]
    }

    #[test]
    fn json_has_the_median_and_all_samples_and_nothing_else() {
        let value: serde_json::Value = serde_json::from_str(&json(&measured()).unwrap()).unwrap();
        assert_eq!(
            value,
            serde_json::json!([
                {"case": "tunnel", "subject": "fairlead", "metric": "TCP", "unit": "Mbit/s",
                 "value": 600.0, "samples": [500.0, 1000.0, 600.0]},
                {"case": "tunnel", "subject": "other", "metric": "TCP", "unit": "Mbit/s",
                 "value": 2000.0, "samples": [1000.0, 2000.0, 2000.0]},
            ])
        );
    }

    #[test]
    fn the_table_shows_the_ratio_with_its_spread() {
        let table = table(&measured());
        let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines.len(), 3, "{table}");
        assert_eq!(
            lines[1].join(" "),
            "tunnel TCP fairlead 600 500 to 1000 Mbit/s 0.500 of other (0.300 to 0.500)"
        );
        assert_eq!(lines[2].join(" "), "tunnel TCP other 2000 1000 to 2000 Mbit/s");
    }

    #[test]
    fn a_ratio_is_of_samples_of_the_same_round() {
        let mut measured = measured();
        let missing = measured.remove(1);
        let peer = Measurement { samples: vec![1000.0, 2000.0], ..missing };
        measured.push(peer.in_rounds(vec![0, 2]));
        assert!(table(&measured).contains("0.400 of other (0.300 to 0.500)"), "{}", table(&measured));
    }

    #[test]
    fn a_failure_is_a_row_without_a_figure() {
        let failed = Measurement::failed("tunnel", "other", "TCP", "Mbit/s");
        let table = table(&[measured().remove(0), failed.clone()]);
        let line: Vec<&str> = table.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(line, ["tunnel", "TCP", "other", "failed", "Mbit/s"]);
        let value: serde_json::Value = serde_json::from_str(&json(&[failed]).unwrap()).unwrap();
        assert_eq!(
            (&value[0]["value"], &value[0]["samples"]),
            (&serde_json::Value::Null, &serde_json::json!([]))
        );
    }

    #[test]
    fn a_measurement_needs_a_sample() {
        let error = Measurement::new("plan", "fairlead", "1000 members", "ms", vec![]).unwrap_err();
        assert_eq!(error.to_string(), "no sample of fairlead, 1000 members, was taken");
    }

    #[test]
    fn figures_have_three_digits() {
        let shown = [12345.6, 123.4, 12.34, 1.234, 0.1234, 0.01234].map(figure);
        assert_eq!(shown, ["12346", "123", "12.3", "1.23", "0.123", "0.0123"]);
    }
}

//! The figures as `--json` prints them, and bar charts made from that, next to what cargo builds: `target/bench/CASE.json` and
//! `target/bench/CASE*.svg`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::report::{self, Measurement, figure};
use crate::{progress, release};

/// One picture: the rows with this unit whose metric begins so.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chart {
    pub(super) file: &'static str,
    pub(super) title: &'static str,
    pub(super) unit: &'static str,
    pub(super) metric: &'static str,
    /// The subject that is drawn in another colour.
    pub(super) highlighted: &'static str,
}

/// In pixels, as all that follow.
const WIDTH: u32 = 760;
const MARGIN: u32 = 16;
const TITLE: u32 = 40;
const HEADING: u32 = 34;
const ROW: u32 = 20;
/// Horizontal position where bars begin, and length of the longest one.
const BARS: u32 = 140;
const LONGEST: u32 = 460;

/// Row of the results in JSON. The value is missing if the measurement failed.
#[derive(Debug, Deserialize)]
struct Row {
    subject: String,
    metric: String,
    unit: String,
    value: Option<f64>,
    samples: Vec<f64>,
}

/// Writes the figures of a case and draws its charts. The run is worth more than these files: an error is only reported.
pub(super) fn write(case: &str, charts: &[Chart], measurements: &[Measurement]) {
    let written = directory()
        .and_then(|directory| write_to(&directory, case, charts, measurements).map(|()| directory));
    match written {
        Ok(directory) => progress(&format!("    charts and {case}.json are in {}", directory.display())),
        Err(error) => progress(&format!("    error: no charts: {error:#}")),
    }
}

fn directory() -> Result<PathBuf> {
    let program = std::env::current_exe().context("cannot find out where this program is")?;
    let target = release::target_directory(&program).context("cannot tell cargo's target directory")?;
    Ok(target.join("bench"))
}

fn write_to(directory: &Path, case: &str, charts: &[Chart], measurements: &[Measurement]) -> Result<()> {
    let write = |file: &str, content: &str| {
        let path = directory.join(file);
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))
    };
    let json = report::json(measurements)?;
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    write(&format!("{case}.json"), &json)?;
    charts.iter().try_for_each(|chart| write(chart.file, &draw(&json, *chart)?))
}

/// An SVG of the measurements in a JSON array: a bar for each median, grouped by metric, with a line from the lowest sample to the highest.
///
/// # Errors
/// It is no such array.
fn draw(json: &str, chart: Chart) -> Result<String> {
    let rows: Vec<Row> = serde_json::from_str(json).context("no array of measurements")?;
    let is_shown = |row: &&Row| row.unit == chart.unit && row.metric.starts_with(chart.metric);
    let rows: Vec<&Row> = rows.iter().filter(is_shown).collect();
    let most = rows.iter().flat_map(|row| &row.samples).copied().fold(0.0, f64::max);
    let (mut shapes, mut y, mut metric) = (text(MARGIN, 26, "title", chart.title), TITLE, "");
    for row in rows {
        if row.metric != metric {
            metric = &row.metric;
            shapes.push_str(&text(MARGIN, y.saturating_add(22), "heading", metric));
            y = y.saturating_add(HEADING);
        }
        shapes.push_str(&bar(row, y, most, row.subject == chart.highlighted));
        y = y.saturating_add(ROW);
    }
    let height = y.saturating_add(MARGIN);
    Ok(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\">\n\
         <style>text {{ font: 12px sans-serif; fill: #1f2328 }} .title {{ font-size: 16px }} .heading {{ font-weight: bold }}</style>\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n{shapes}</svg>\n"
    ))
}

fn bar(row: &Row, y: u32, most: f64, is_highlighted: bool) -> String {
    let baseline = y.saturating_add(14);
    let name = text(MARGIN, baseline, "name", &row.subject);
    let Some(value) = row.value else { return name + &text(BARS, baseline, "value", "failed") };
    let length = |value: f64| if most > 0.0 { value.max(0.0) / most * f64::from(LONGEST) } else { 0.0 };
    let colour = if is_highlighted { "#1f6feb" } else { "#9aa4b2" };
    let end =
        |pick: fn(f64, f64) -> f64| f64::from(BARS) + length(row.samples.iter().copied().fold(value, pick));
    let (lowest, highest, middle) = (end(f64::min), end(f64::max), y.saturating_add(9));
    let label = format!("{} {}", figure(value), row.unit);
    format!(
        "{name}<rect x=\"{BARS}\" y=\"{}\" width=\"{:.1}\" height=\"14\" fill=\"{colour}\"/>\n\
         <line x1=\"{lowest:.1}\" x2=\"{highest:.1}\" y1=\"{middle}\" y2=\"{middle}\" stroke=\"#1f2328\"/>\n{}",
        y.saturating_add(2),
        length(value),
        text(BARS.saturating_add(LONGEST).saturating_add(8), baseline, "value", &label)
    )
}

fn text(x: u32, y: u32, class: &str, content: &str) -> String {
    let content = content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<text x=\"{x}\" y=\"{y}\" class=\"{class}\">{content}</text>\n")
}

#[cfg(test)]
mod tests {
    use super::super::CHARTS;
    use super::*;

    const JSON: &str = r#"[
        {"case": "tunnel", "subject": "fairlead", "metric": "TCP, streams: 1", "unit": "Gbit/s",
         "value": 2.0, "samples": [1.0, 2.0, 4.0]},
        {"case": "tunnel", "subject": "wireguard-go", "metric": "TCP, streams: 1", "unit": "Gbit/s",
         "value": 1.0, "samples": [1.0]},
        {"case": "tunnel", "subject": "a<b & c", "metric": "TCP, streams: 4", "unit": "Gbit/s",
         "value": null, "samples": []},
        {"case": "tunnel", "subject": "cipher alone", "metric": "CPU", "unit": "s/GB", "value": 1, "samples": [1]}]"#;

    /// The names of all elements, in the order in which they begin; each must end, in the reverse order.
    fn elements(svg: &str) -> Vec<&str> {
        let (mut names, mut open) = (Vec::new(), Vec::new());
        for tag in svg.split('<').skip(1) {
            let (tag, content) = tag.split_once('>').unwrap();
            assert!(!content.contains('>') && tag.matches('"').count().is_multiple_of(2), "{tag}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name));
                continue;
            }
            let name = tag.split([' ', '/']).next().unwrap();
            names.push(name);
            if !tag.ends_with('/') {
                open.push(name);
            }
        }
        assert!(open.is_empty(), "{open:?}");
        names
    }

    #[test]
    fn a_chart_is_well_formed_and_names_every_subject_that_has_the_unit() {
        let [throughput, cpu, _] = CHARTS;
        let svg = draw(JSON, throughput).unwrap();
        let bars = elements(&svg).iter().filter(|name| **name == "rect").count();
        assert_eq!(bars, 1 + 2, "the background and a bar for each that did not fail");
        for expected in
            ["fairlead", "wireguard-go", "a&lt;b &amp; c", "failed", "TCP, streams: 4", "2.00 Gbit/s"]
        {
            assert!(svg.contains(&format!(">{expected}<")), "{expected}: {svg}");
        }
        assert!(!svg.contains("cipher") && draw(JSON, cpu).unwrap().contains(">cipher alone<"));
    }

    #[test]
    fn the_highest_sample_is_as_far_as_anything_reaches() {
        let svg = draw(JSON, CHARTS[0]).unwrap();
        assert!(svg.contains("width=\"230.0\""), "half of it: {svg}");
        assert!(svg.contains("x1=\"255.0\" x2=\"600.0\""), "{svg}");
    }

    #[test]
    fn nothing_measured_makes_an_empty_chart() {
        for chart in CHARTS {
            assert_eq!(elements(&draw("[]", chart).unwrap()), ["svg", "style", "rect", "text"]);
        }
        assert!(draw("{}", CHARTS[0]).is_err());
    }

    #[test]
    fn all_charts_are_written_and_the_figures() {
        let directory = tempfile::tempdir().unwrap();
        let measured = Measurement::new("tunnel", "fairlead", "TCP", "Gbit/s", vec![1.0]).unwrap();
        let failed = Measurement::failed("tunnel", "other", "TCP", "Gbit/s");
        let all = [measured, failed];
        write_to(&directory.path().join("new"), "tunnel", &CHARTS, &all).unwrap();
        let written = |file: &str| fs::read_to_string(directory.path().join("new").join(file)).unwrap();
        for chart in CHARTS {
            elements(&written(chart.file));
        }
        assert_eq!(written("tunnel.json"), report::json(&all).unwrap());
    }
}

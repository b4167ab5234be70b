//! Metrics and labels that PromQL expressions use. No full parser: a word that it cannot read it takes for a metric, which is then unknown.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::Exposed;

/// Labels that Prometheus adds to every sample.
const TARGET_LABELS: &[&str] = &["container", "instance", "job", "namespace", "node", "pod"];
/// Words that are followed by a list of labels.
const LABEL_LISTS: &[&str] = &["by", "group_left", "group_right", "ignoring", "on", "without"];
/// Operators that are words.
const OPERATORS: &[&str] = &["and", "bool", "inf", "offset", "or", "unless"];

/// An expression, and the labels that its legend shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Query {
    /// In PromQL.
    pub expression: String,
    /// Names of labels.
    pub legend: Vec<String>,
}

/// All queries of a Grafana dashboard, those of its variables included.
///
/// # Errors
/// It is no JSON.
pub fn of_dashboard(dashboard: &str) -> Result<Vec<Query>> {
    let dashboard: Value = serde_json::from_str(dashboard).context("the dashboard is no JSON")?;
    let mut queries = Vec::new();
    collect(&dashboard, &mut queries);
    Ok(queries)
}

/// All queries of a file of Prometheus rules in YAML: the values of `expr`, on one line or folded.
pub fn of_rules(rules: &str) -> Vec<Query> {
    let mut queries = Vec::new();
    let mut lines = rules.lines().peekable();
    while let Some(line) = lines.next() {
        let Some((indent, first)) = line.split_once("expr: ") else { continue };
        let mut expression = vec![first.trim_start_matches(">-").trim()];
        let is_deeper = |line: &&str| line.starts_with(&" ".repeat(indent.len().saturating_add(1)));
        while let Some(more) = lines.next_if(is_deeper) {
            expression.push(more.trim());
        }
        queries.push(Query { expression: expression.join(" ").trim().to_owned(), legend: Vec::new() });
    }
    queries
}

fn collect(value: &Value, queries: &mut Vec<Query>) {
    if let Some(expression) = value["expr"].as_str() {
        let legend = value["legendFormat"].as_str().unwrap_or_default();
        queries.push(Query { expression: expression.to_owned(), legend: legend_labels(legend) });
    }
    // `label_values(METRIC, LABEL)` of a variable.
    if let Some((metric, label)) = value["definition"]
        .as_str()
        .and_then(|text| text.strip_prefix("label_values(")?.strip_suffix(')')?.split_once(", "))
    {
        queries.push(Query { expression: metric.to_owned(), legend: vec![label.to_owned()] });
    }
    match value {
        Value::Array(items) => items.iter().for_each(|item| collect(item, queries)),
        Value::Object(fields) => fields.values().for_each(|field| collect(field, queries)),
        _ => {}
    }
}

/// `{{a}} to {{b}}`
fn legend_labels(legend: &str) -> Vec<String> {
    let labels = legend.split("{{").skip(1).filter_map(|rest| rest.split_once("}}"));
    labels.map(|(label, _)| label.trim().to_owned()).collect()
}

impl Query {
    /// Each metric with the labels that its selectors use, and the labels that other parts of the expression use.
    pub fn uses(&self) -> (BTreeMap<String, BTreeSet<String>>, BTreeSet<String>) {
        let (mut metrics, mut labels) = (BTreeMap::<String, BTreeSet<String>>::new(), BTreeSet::new());
        labels.extend(self.legend.iter().cloned());
        let tokens = tokens(&self.expression);
        let mut index = 0;
        while let Some(token) = tokens.get(index) {
            index += 1;
            let next = tokens.get(index).map(String::as_str);
            let is_word = token.starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '_');
            if LABEL_LISTS.contains(&token.as_str()) {
                let list: Vec<&String> =
                    tokens.iter().skip(index + 1).take_while(|word| *word != ")").collect();
                index += list.len() + 2;
                labels.extend(list.into_iter().filter(|word| *word != ",").cloned());
            } else if is_word
                && !matches!(next, Some("(" | "by" | "without"))
                && !OPERATORS.contains(&token.as_str())
            {
                let selector = (next == Some("{")).then(|| tokens.iter().skip(index + 1));
                let selector: Vec<&String> =
                    selector.into_iter().flatten().take_while(|word| *word != "}").collect();
                index += if next == Some("{") { selector.len() + 2 } else { 0 };
                let names = selector
                    .iter()
                    .filter(|word| word.starts_with(|letter: char| letter.is_ascii_alphabetic()));
                metrics.entry(token.clone()).or_default().extend(names.map(|name| (*name).clone()));
            }
        }
        (metrics, labels)
    }

    /// Metrics that `is_ours` selects, and their labels, that the expression uses and the program does not expose.
    pub fn unknown(&self, exposed: &Exposed, is_ours: impl Fn(&str) -> bool) -> Vec<String> {
        let (metrics, labels) = self.uses();
        let mut unknown = Vec::new();
        let mut known = BTreeSet::new();
        for (name, selected) in metrics.iter().filter(|(name, _)| is_ours(name)) {
            let Some(metric) = exposed.get(name) else {
                unknown.push(format!("metric {name} in {}", self.expression));
                continue;
            };
            let of_metric = |label: &&String| !metric.labels.contains(*label) && !is_target_label(label);
            unknown.extend(selected.iter().filter(of_metric).map(|label| format!("label {label} of {name}")));
            known.extend(metric.labels.iter().cloned());
        }
        // Labels of lists and legends belong to one of the metrics, which all have to be ours then.
        if metrics.keys().all(|name| is_ours(name)) {
            let missing = labels.iter().filter(|label| !known.contains(*label) && !is_target_label(label));
            unknown.extend(missing.map(|label| format!("label {label} in {}", self.expression)));
        }
        unknown
    }
}

fn is_target_label(label: &str) -> bool {
    TARGET_LABELS.contains(&label)
}

/// Words and single signs. Strings, numbers and durations in brackets are left out.
fn tokens(expression: &str) -> Vec<String> {
    let mut tokens: Vec<String> = Vec::new();
    let mut letters = expression.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '"' => while letters.next().is_some_and(|letter| letter != '"') {},
            '[' => while letters.next().is_some_and(|letter| letter != ']') {},
            _ if letter.is_ascii_alphabetic() || letter == '_' => {
                let mut word = letter.to_string();
                while let Some(more) = letters.next_if(|next| next.is_ascii_alphanumeric() || *next == '_') {
                    word.push(more);
                }
                tokens.push(word);
            }
            // Numbers and durations.
            _ if letter.is_ascii_digit() => {
                while letters.next_if(|next| next.is_ascii_alphanumeric() || *next == '.').is_some() {}
            }
            _ if letter.is_whitespace() => {}
            _ => tokens.push(letter.to_string()),
        }
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(words: &[&str]) -> BTreeSet<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    fn query(expression: &str, legend: &str) -> Query {
        Query { expression: expression.to_owned(), legend: legend_labels(legend) }
    }

    #[test]
    fn metrics_and_labels_are_found_wherever_they_are() {
        let query = query(
            "histogram_quantile(0.5, sum by (le, pool) (rate(a_bucket{pool=~\"x{2}\", b!=\"\"}[5m]))) / on (instance) (c > bool 0)",
            "{{pool}} of {{instance}}",
        );
        let (metrics, labels) = query.uses();
        let expected =
            BTreeMap::from([("a_bucket".to_owned(), set(&["b", "pool"])), ("c".to_owned(), set(&[]))]);
        assert_eq!((metrics, labels), (expected, set(&["instance", "le", "pool"])));
    }

    #[test]
    fn an_unknown_metric_and_each_unknown_label_are_named() {
        let exposed = Exposed::parse("# TYPE a gauge\na{pool=\"x\"} 1\n");
        let unknown = |expression: &str, legend: &str| query(expression, legend).unknown(&exposed, |_| true);
        assert_eq!(unknown("sum by (pool) (a{instance=\"1\"})", "{{pool}}"), Vec::<String>::new());
        assert_eq!(unknown("b", ""), ["metric b in b"]);
        assert_eq!(unknown("a{verb=\"x\"}", ""), ["label verb of a"]);
        assert_eq!(unknown("sum by (node_name) (a)", "{{verb}}").len(), 2);
    }

    #[test]
    fn folded_expressions_of_rules_are_one_query() {
        let rules = "- alert: A\n  expr: >-\n    a\n    > 0\n  for: 5m\n- alert: B\n  expr: b\n";
        let found: Vec<String> = of_rules(rules).into_iter().map(|query| query.expression).collect();
        assert_eq!(found, ["a > 0", "b"]);
    }

    #[test]
    fn variables_are_queries_too() {
        let dashboard = r#"{"templating": {"list": [{"definition": "label_values(a, pool)"}]}, "panels": [{"targets": [{"expr": "a"}]}]}"#;
        let found = of_dashboard(dashboard).unwrap();
        assert_eq!(found.len(), 2);
        assert!(found.iter().any(|query| query.legend == ["pool"]));
    }
}

//! The result of a test. Pure.

use serde_json::{Value, json};

use super::plan::{Target, Test};
use super::probe::Outcome;
use crate::output::{or_dash, table};

/// One connection and what came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) test: Test,
    pub(super) from: String,
    pub(super) to: String,
    pub(super) address: String,
    /// Milliseconds, or why it failed.
    pub(super) result: Result<u32, String>,
}

/// The rows of one probe pod, from its termination message or why there is none.
pub(super) fn rows(node: &str, targets: &[Target], message: Result<&str, String>) -> Vec<Row> {
    let outcomes = message.and_then(|text| {
        serde_json::from_str::<Vec<Outcome>>(text)
            .map_err(|_| format!("the probe pod wrote no result: {text}"))
    });
    let result = |index: usize| match &outcomes {
        Ok(outcomes) => match outcomes.iter().find(|outcome| outcome.index == index) {
            Some(Outcome { milliseconds: Some(milliseconds), .. }) => Ok(*milliseconds),
            Some(Outcome { error, .. }) => Err(error.clone().unwrap_or_default()),
            None => Err("the probe pod wrote no result".to_owned()),
        },
        Err(error) => Err(error.clone()),
    };
    let row = |(index, target): (usize, &Target)| Row {
        test: target.test,
        from: node.to_owned(),
        to: target.to.clone(),
        address: target.address.clone(),
        result: result(index),
    };
    targets.iter().enumerate().map(row).collect()
}

/// Whether everything succeeded.
pub(super) fn succeeded(rows: &[Row]) -> bool {
    rows.iter().all(|row| row.result.is_ok())
}

/// The connections as a table; without `wide`, those inside one node that succeeded are only counted.
pub(super) fn text(rows: &[Row], wide: bool) -> String {
    let mut connections = table(&["TEST", "FROM", "TO", "ADDRESS", "RESULT", "TIME"]);
    for row in rows {
        let (result, time) = match &row.result {
            Ok(milliseconds) => ("ok".to_owned(), format!("{milliseconds} ms")),
            Err(error) => (format!("FAILED: {error}"), "-".to_owned()),
        };
        if wide || row.result.is_err() || row.from != row.to {
            let (from, to) = (or_dash(&row.from), row.to.clone());
            connections.add_row([row.test.to_string(), from, to, row.address.clone(), result, time]);
        }
    }
    let good = rows.iter().filter(|row| row.result.is_ok()).count();
    format!("{connections}\n\n{good} of {} succeeded\n", rows.len())
}

/// The connections for scripts.
pub(super) fn data(rows: &[Row]) -> Value {
    let connection = |row: &Row| {
        json!({
            "test": row.test.to_string(), "from": row.from, "to": row.to, "address": row.address,
            "ok": row.result.is_ok(), "milliseconds": row.result.as_ref().ok(), "error": row.result.as_ref().err(),
        })
    };
    json!({ "ok": succeeded(rows), "connections": rows.iter().map(connection).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets() -> Vec<Target> {
        let target = |to: &str, address: &str| Target {
            test: Test::PodToPod,
            to: to.to_owned(),
            address: address.to_owned(),
            name: None,
        };
        vec![target("n1", "10.0.0.1:8080"), target("n2", "10.0.1.1:8080")]
    }

    #[test]
    fn a_failed_connection_is_named_with_its_reason() {
        let rows = rows("n1", &targets(), Ok(r#"[{"i":0,"m":2},{"i":1,"e":"timed out"}]"#));
        assert!(!succeeded(&rows));
        let text = text(&rows, false);
        for word in ["pod to pod", "n2", "10.0.1.1:8080", "FAILED: timed out", "1 of 2 succeeded"] {
            assert!(text.contains(word), "{word} is missing in\n{text}");
        }
        assert_eq!(data(&rows)["ok"], false);
        assert_eq!(data(&rows)["connections"][0]["milliseconds"], 2);
    }

    #[test]
    fn a_result_that_is_missing_is_a_failure() {
        for message in
            [Ok(r#"[{"i":0,"m":2}]"#), Ok("out of memory"), Err("the image cannot be pulled".to_owned())]
        {
            let rows = rows("n1", &targets(), message);
            assert_eq!(rows.len(), 2);
            assert!(rows[1].result.is_err(), "{rows:?}");
        }
        assert!(succeeded(&rows("n1", &targets(), Ok(r#"[{"i":0,"m":2},{"i":1,"m":0}]"#))));
    }
}

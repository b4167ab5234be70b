//! The events of libtest's JSON output (`--format json --report-time`), one a line.

use std::fmt;
use std::time::Duration;

use serde_json::Value;

/// Arguments that make libtest report events. They are unstable: the toolchain is pinned, and [`ENVIRONMENT`] allows them.
pub(crate) const ARGUMENTS: &[&str] = &["-Zunstable-options", "--format=json", "--report-time"];
/// The variable that allows unstable options of libtest on a stable toolchain.
pub(crate) const ENVIRONMENT: (&str, &str) = ("RUSTC_BOOTSTRAP", "1");

/// Numbers of tests.
#[derive(Debug, Default, PartialEq, Eq, Clone, Copy)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// Tests that did run.
    pub(crate) fn ran(self) -> u64 {
        self.passed + self.failed
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failed, skipped } = self;
        write!(formatter, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// The end of one test.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub(crate) enum Result {
    Failed,
    Ignored,
    Passed,
}

/// One line of a test executable's output.
#[derive(Debug, PartialEq, Eq, Clone)]
pub(crate) enum Event {
    /// A test ended, with its captured output.
    Ended { name: String, result: Result, time: Duration, output: String },
    /// Output that is no event, as with `--nocapture`.
    Output(String),
    /// A test began.
    Started(String),
}

impl Event {
    /// Reads a line. With `--nocapture` an event can follow output of a test that has no line break: then the output comes
    /// first.
    pub(crate) fn parse(line: &str) -> Vec<Self> {
        if let Some(event) = Self::json(line) {
            return event.into_iter().collect();
        }
        if let Some((output, rest)) = line.find("{ \"type\": \"").and_then(|at| line.split_at_checked(at))
            && let Some(event) = Self::json(rest)
        {
            return std::iter::once(Self::Output(output.to_owned())).chain(event).collect();
        }
        vec![Self::Output(line.to_owned())]
    }

    /// The event of a JSON object of libtest; an inner `None` is one that says nothing new.
    fn json(line: &str) -> Option<Option<Self>> {
        let value: Value = line.starts_with('{').then(|| serde_json::from_str(line).ok())??;
        let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let result = match (text("type").as_str(), text("event").as_str()) {
            ("test", "started") => return Some(Some(Self::Started(text("name")))),
            ("test", "ok") => Result::Passed,
            ("test", "failed") => Result::Failed,
            ("test", "ignored") => Result::Ignored,
            ("suite" | "test" | "report", _) => return Some(None),
            _ => return None,
        };
        let seconds = value.get("exec_time").and_then(Value::as_f64).unwrap_or_default();
        let time = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        Some(Some(Self::Ended { name: text("name"), result, time, output: text("stdout") }))
    }
}

/// Reads `NAME: test` lines, as `--list --format terse` prints them.
pub(crate) fn list(output: &str) -> Vec<String> {
    output.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(name: &str, result: Result, time: Duration, output: &str) -> Event {
        Event::Ended { name: name.to_owned(), result, time, output: output.to_owned() }
    }

    #[test]
    fn events_are_read_as_libtest_writes_them() {
        let lines = [
            (r#"{ "type": "suite", "event": "started", "test_count": 3 }"#, vec![]),
            (
                r#"{ "type": "test", "event": "started", "name": "a::b" }"#,
                vec![Event::Started("a::b".into())],
            ),
            (
                r#"{ "type": "test", "name": "a::b", "event": "ok", "exec_time": 1.5 }"#,
                vec![ended("a::b", Result::Passed, Duration::from_millis(1500), "")],
            ),
            (
                r#"{ "type": "test", "name": "c", "event": "failed", "exec_time": 0.0, "stdout": "panicked\n" }"#,
                vec![ended("c", Result::Failed, Duration::ZERO, "panicked\n")],
            ),
            (
                r#"{ "type": "test", "name": "d", "event": "ignored", "message": "slow" }"#,
                vec![ended("d", Result::Ignored, Duration::ZERO, "")],
            ),
            (r#"{ "type": "test", "event": "timeout", "name": "d" }"#, vec![]),
            (r#"{ "type": "suite", "event": "failed", "passed": 1, "failed": 1, "ignored": 1 }"#, vec![]),
        ];
        for (line, events) in lines {
            assert_eq!(Event::parse(line), events, "{line}");
        }
    }

    #[test]
    fn output_of_tests_is_kept_also_before_an_event_on_the_same_line() {
        let started = r#"{ "type": "test", "event": "started", "name": "a" }"#;
        for (line, output) in
            [("waiting", "waiting"), ("", ""), ("{}", "{}"), ("{\"type\": 1", "{\"type\": 1")]
        {
            assert_eq!(Event::parse(line), [Event::Output(output.to_owned())]);
        }
        assert_eq!(
            Event::parse(&format!("no line break{started}")),
            [Event::Output("no line break".into()), Event::Started("a".into())]
        );
    }

    #[test]
    fn a_list_has_tests_only() {
        assert_eq!(list("a::b: test\nc: benchmark\nd: test\n\n2 tests, 1 benchmark\n"), ["a::b", "d"]);
    }
}

//! What test executables report.

use std::fmt;

/// How many tests passed, failed and were ignored.
#[derive(Debug, Default, PartialEq, Eq, Clone, Copy)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Counts {
    /// Reads `test result: ok. 3 passed; 0 failed; 1 ignored; …`, as libtest prints it.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let rest = line.strip_prefix("test result: ")?;
        let (_, rest) = rest.split_once(". ")?;
        let mut counts = Self::default();
        for part in rest.split(';') {
            let Some((number, what)) = part.trim().split_once(' ') else { continue };
            let Ok(number) = number.parse() else { continue };
            match what {
                "failed" => counts.failed = number,
                "ignored" => counts.skipped = number,
                "passed" => counts.passed = number,
                _ => {}
            }
        }
        Some(counts)
    }

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

/// What the lines of one test executable say so far: all that is known when it is killed before its summary.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// The summaries, added up; none before the first.
    pub(crate) reported: Option<Counts>,
    single: Counts,
    failed: Vec<String>,
    slow: Vec<String>,
}

impl Tally {
    /// Reads `test NAME ... ok` and the like, `test NAME has been running for over 60 seconds`, and summaries.
    pub(crate) fn line(&mut self, line: &str) {
        if let Some(counts) = Counts::parse(line) {
            self.reported.get_or_insert_default().add(counts);
        }
        let Some(rest) = line.strip_prefix("test ") else { return };
        if let Some((name, _)) = rest.split_once(" has been running for over ") {
            self.slow.push(name.to_owned());
        }
        let Some((name, result)) = rest.split_once(" ... ") else { return };
        match result.split([' ', ',']).next() {
            Some("FAILED") => {
                self.single.failed += 1;
                self.failed.push(name.to_owned());
            }
            Some("ignored") => self.single.skipped += 1,
            Some("ok") => self.single.passed += 1,
            _ => return,
        }
        self.slow.retain(|slow| slow != name);
    }

    /// The summaries, or without one the tests that did end.
    pub(crate) fn counts(&self) -> Counts {
        self.reported.unwrap_or(self.single)
    }

    /// Names of the tests that failed, and of those that did not end, as a message has them.
    pub(crate) fn names(&self) -> String {
        let list = |what: &str, names: &[String]| match names {
            [] => String::new(),
            names => format!("; {what}: {}", names.join(", ")),
        };
        list("failed", &self.failed) + &list("did not end", &self.slow)
    }
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn counts_are_read_from_libtest() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.01s";
        assert_eq!(Counts::parse(line), Some(Counts { passed: 12, failed: 3, skipped: 1 }));
        assert_eq!(Counts::parse("running 3 tests"), None);
    }

    #[test]
    fn the_counting_line_names_all_three() {
        assert_eq!(
            Counts { passed: 12, failed: 3, skipped: 1 }.to_string(),
            "12 passed, 3 failed, 1 skipped"
        );
    }

    #[test]
    fn a_killed_executable_is_known_by_its_lines() {
        let mut tally = Tally::default();
        for line in [
            "running 4 tests",
            "test mesh::slow has been running for over 60 seconds",
            "test mesh::hangs has been running for over 60 seconds",
            "test mesh::a ... ok",
            "test mesh::slow ... FAILED",
            "test mesh::b ... ignored, needs a machine",
        ] {
            tally.line(line);
        }
        assert_eq!(tally.counts(), Counts { passed: 1, failed: 1, skipped: 1 });
        assert_eq!(tally.names(), "; failed: mesh::slow; did not end: mesh::hangs");
        tally.line("test result: FAILED. 2 passed; 2 failed; 1 ignored");
        assert_eq!(tally.counts(), Counts { passed: 2, failed: 2, skipped: 1 });
    }
}

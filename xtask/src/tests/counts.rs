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
}

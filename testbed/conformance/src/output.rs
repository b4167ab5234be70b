//! Output of ginkgo with `-v`, read line by line as it comes. Pure.
//!
//! ```text
//! Will run 47 of 7579 specs
//! • [0.127 seconds]
//! [sig-network] Services should … [Conformance] [sig-network, Conformance]
//! • [FAILED] [168.041 seconds]
//! [sig-network] …
//! S [SKIPPED] [0.032 seconds]
//! [sig-network] …
//! ```

/// Numbers of tests, by result.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Tests that were chosen.
    pub(crate) wanted: u64,
    /// Tests that passed.
    pub(crate) passed: u64,
    /// Tests that failed, in whatever way.
    pub(crate) failed: u64,
    /// Tests that found that they do not apply.
    pub(crate) skipped: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, other: Self) {
        self.wanted = self.wanted.saturating_add(other.wanted);
        self.passed = self.passed.saturating_add(other.passed);
        self.failed = self.failed.saturating_add(other.failed);
        self.skipped = self.skipped.saturating_add(other.skipped);
    }

    /// Nothing chosen is no success.
    pub(crate) fn all_passed(&self) -> bool {
        self.wanted > 0 && self.failed == 0 && self.passed == self.wanted
    }

    /// Whether the runner's own success or failure follows from them. If not, something beside the tests went wrong: the
    /// cluster before them, or the runner.
    pub(crate) fn explain(&self, success: bool) -> bool {
        if success { self.failed == 0 && self.finished() == self.wanted } else { self.failed > 0 }
    }

    fn finished(&self) -> u64 {
        self.passed.saturating_add(self.failed).saturating_add(self.skipped)
    }
}

/// A test's end.
#[derive(Debug, Clone, PartialEq, Eq)]
struct End {
    /// `passed`, or what went wrong in ginkgo's word.
    outcome: String,
    /// As printed: `0.127 seconds`.
    duration: String,
}

/// Reads the lines.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    /// Counts up to the last line that was read.
    pub(crate) counts: Counts,
    /// The test that this ends is named by the next line.
    ended: Option<End>,
}

impl Reader {
    /// Takes the next line; returns the progress to report.
    pub(crate) fn line(&mut self, line: &str) -> Option<String> {
        if let Some(end) = self.ended.take() {
            return Some(self.name(&end, line));
        }
        if let Some(number) = line.strip_prefix("Will run ").and_then(|rest| rest.split(' ').next()) {
            self.counts.wanted = number.parse().unwrap_or(self.counts.wanted);
            return Some(line.to_owned());
        }
        self.ended = parse_end(line);
        None
    }

    fn name(&mut self, end: &End, name: &str) -> String {
        let count = match end.outcome.as_str() {
            "passed" => &mut self.counts.passed,
            "skipped" => &mut self.counts.skipped,
            _ => &mut self.counts.failed,
        };
        *count = count.saturating_add(1);
        format!(
            "{} of {}: {} {} ({})",
            self.counts.finished(),
            self.counts.wanted,
            end.outcome,
            without_labels(name),
            end.duration
        )
    }
}

/// `• [0.127 seconds]`, `• [FAILED] [168.041 seconds]`, `S [SKIPPED] [0.032 seconds]`
fn parse_end(line: &str) -> Option<End> {
    let rest = line.strip_prefix("• [").or_else(|| line.strip_prefix("S ["))?.strip_suffix(']')?;
    let (outcome, duration) = match rest.split_once("] [") {
        Some((outcome, duration)) => (outcome.to_lowercase(), duration),
        None => ("passed".to_owned(), rest),
    };
    duration.ends_with(" seconds").then(|| End { outcome, duration: duration.to_owned() })
}

/// The last brackets hold the labels, which the name has already.
fn without_labels(name: &str) -> &str {
    name.rsplit_once(" [").map_or(name, |(rest, _)| rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
Running Suite: Kubernetes e2e suite - /x
Will run 3 of 7579 specs
Running in parallel across 3 processes
------------------------------
[SynchronizedBeforeSuite] PASSED [0.038 seconds]
[SynchronizedBeforeSuite] 
SSSSSSS
------------------------------
• [0.127 seconds]
[sig-network] Services should serve [Conformance] [sig-network, Conformance]
k8s.io/kubernetes@v1.36.2/test/e2e/network/service.go:254

  Timeline >>
  STEP: Creating a kubernetes client
------------------------------
• [FAILED] [168.041 seconds]
[sig-network] Pods [It] should reach [sig-network, Feature:IPv6DualStack]
------------------------------
S [SKIPPED] [0.032 seconds]
[sig-network] SCTP should reach [sig-network]
";

    #[test]
    fn ends_are_counted_and_named() {
        let mut reader = Reader::default();
        let said: Vec<String> = LOG.lines().filter_map(|line| reader.line(line)).collect();
        assert_eq!(
            said,
            [
                "Will run 3 of 7579 specs",
                "1 of 3: passed [sig-network] Services should serve [Conformance] (0.127 seconds)",
                "2 of 3: failed [sig-network] Pods [It] should reach (168.041 seconds)",
                "3 of 3: skipped [sig-network] SCTP should reach (0.032 seconds)",
            ]
        );
        assert_eq!(reader.counts, Counts { wanted: 3, passed: 1, failed: 1, skipped: 1 });
    }

    #[test]
    fn success_is_that_all_of_at_least_one_passed() {
        let counts = |wanted, passed, failed, skipped| Counts { wanted, passed, failed, skipped };
        assert!(counts(47, 47, 0, 0).all_passed());
        for bad in [counts(0, 0, 0, 0), counts(47, 46, 1, 0), counts(47, 46, 0, 1), counts(47, 46, 0, 0)] {
            assert!(!bad.all_passed(), "{bad:?}");
        }
    }

    #[test]
    fn an_end_that_no_test_explains_is_noticed() {
        let counts = |wanted, passed, failed, skipped| Counts { wanted, passed, failed, skipped };
        assert!(counts(47, 47, 0, 0).explain(true));
        assert!(counts(47, 46, 0, 1).explain(true));
        assert!(counts(47, 20, 1, 0).explain(false));
        assert!(!counts(47, 47, 0, 0).explain(false));
        assert!(!counts(47, 46, 0, 0).explain(true));
        assert!(!counts(0, 0, 0, 0).explain(false));
    }
}

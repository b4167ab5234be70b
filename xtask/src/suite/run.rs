//! Runs one job: as many processes as it takes to hear of each of its tests.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use super::Outcome;
use super::jobs::{Filter, Job};
use super::libtest::{self, Counts, Event, Result};
use super::times::Time;
use crate::process::{self, Ended};
use crate::steps::{self, say};

/// Names the test executables to those that run others in a VM: asking cargo for them would wait for whatever else it builds.
const PROGRAMS: &str = "FAIRLEAD_TEST_PROGRAMS";
/// A file to which tests append a line with the reason when they return without having tested (`testbed_netns::skipped`).
const SKIPS: &str = "FAIRLEAD_TEST_SKIPS";

/// Outcome of a job, with its time and that of each of its tests.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) outcome: Outcome,
    pub(crate) tests: Vec<(String, Duration)>,
    pub(crate) time: Option<Time>,
}

/// State of a job's tests.
struct Progress {
    name: String,
    limit: Duration,
    counts: Counts,
    running: BTreeMap<String, Instant>,
    times: Vec<(String, Duration)>,
    failed: Vec<String>,
}

impl Progress {
    fn line(&mut self, line: &str) {
        for event in Event::parse(line) {
            self.event(event);
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Ended { name, result, time, output } => {
                self.running.remove(&name);
                self.ended(name, result, time, &output);
            }
            Event::Output(line) => say(&format!("{} | {line}", self.name)),
            Event::Started(name) => drop(self.running.insert(name, Instant::now())),
        }
    }

    fn ended(&mut self, name: String, result: Result, time: Duration, output: &str) {
        let (number, word) = match result {
            Result::Failed => (&mut self.counts.failed, "FAILED"),
            Result::Ignored => (&mut self.counts.skipped, "ignored"),
            Result::Passed => (&mut self.counts.passed, "ok"),
        };
        *number += 1;
        say(&format!("{} | {name} ... {word} ({:.1} s)", self.name, time.as_secs_f64()));
        if result == Result::Failed {
            say(output);
            self.failed.push(name.clone());
        }
        self.times.push((name, time));
    }

    /// Whether no test is over its limit.
    fn is_in_time(&self) -> bool {
        self.running.values().all(|start| start.elapsed() < self.limit)
    }

    /// Takes the tests that were running when their process died or was killed as failed, and says why.
    fn interrupted(&mut self) -> Vec<String> {
        let running = std::mem::take(&mut self.running);
        let problem = |(name, start): (String, Instant)| {
            let time = start.elapsed();
            self.counts.failed += 1;
            let problem = if time < self.limit {
                format!("{name} ended with its process")
            } else {
                format!("{name} hung: it was killed after {:.0} s; its output is above", time.as_secs_f64())
            };
            self.times.push((name, time));
            problem
        };
        running.into_iter().map(problem).collect()
    }

    fn knows(&self, test: &str) -> bool {
        self.times.iter().any(|(known, _)| known == test)
    }
}

/// Runs a job. A test that hangs or kills the process fails, and those that had not begun run in another one.
pub(crate) fn run(job: &Job<'_>, filter: &Filter, programs: &str) -> Report {
    let start = Instant::now();
    let mut progress = Progress {
        name: job.name(),
        limit: job.limit,
        counts: Counts::default(),
        running: BTreeMap::new(),
        times: Vec::new(),
        failed: Vec::new(),
    };
    let mut problems = Vec::new();
    let mut cpu = Duration::ZERO;
    let skips = steps::target().join(format!(
        "skips-{}-{}",
        job.executable.package,
        job.module.as_deref().unwrap_or("unit")
    ));
    drop(std::fs::remove_file(&skips));
    loop {
        let left: Vec<&String> = job.tests.iter().filter(|test| !progress.knows(test)).collect();
        if left.is_empty() {
            break;
        }
        let ended = round(job, &left, filter, (programs, &skips), &mut progress);
        cpu += ended.as_ref().map_or(Duration::ZERO, |ended| ended.cpu);
        problems.extend(progress.interrupted());
        if !left.iter().any(|test| progress.knows(test)) {
            problems.push(why(&ended));
            progress.counts.failed += 1;
            break;
        }
        if ended.is_ok_and(|ended| !ended.success) && problems.is_empty() && progress.failed.is_empty() {
            problems.push("exited with an error, though no test failed".to_owned());
            progress.counts.failed += 1;
        }
    }
    problems.extend(progress.failed.iter().map(|name| format!("{name} failed")));
    count_skips(&skips, &mut progress);
    let time = Time { seconds: start.elapsed().as_secs_f64(), cpu: cpu.as_secs_f64() };
    say(&format!(
        "    {}: {} in {:.0} s ({:.0} s of processor time)",
        progress.name, progress.counts, time.seconds, time.cpu
    ));
    let problems = problems.into_iter().map(|problem| format!("{}: {problem}", progress.name)).collect();
    Report { outcome: Outcome { counts: progress.counts, problems }, tests: progress.times, time: Some(time) }
}

/// One process for the tests that are left.
fn round(
    job: &Job<'_>,
    tests: &[&String],
    filter: &Filter,
    (programs, skips): (&str, &Path),
    progress: &mut Progress,
) -> std::result::Result<Ended, process::Error> {
    let mut command = process::dies_with_us(job.executable.path.as_std_path());
    command
        .args(libtest::ARGUMENTS)
        .args(filter.ignored_arguments())
        .args((filter.nocapture || job.ring.nocapture).then_some("--nocapture"))
        .arg("--exact")
        .args(tests)
        .current_dir(&job.executable.directory)
        .env("CARGO_MANIFEST_DIR", &job.executable.directory)
        .env(libtest::ENVIRONMENT.0, libtest::ENVIRONMENT.1)
        .env(PROGRAMS, programs)
        .env(SKIPS, skips);
    process::run(&mut command, |line| {
        if let Some(line) = line {
            progress.line(line);
        }
        progress.is_in_time()
    })
}

/// Reason why a process told of no test.
fn why(ended: &std::result::Result<Ended, process::Error>) -> String {
    match ended {
        Ok(ended) if ended.success => "ended without a test result".to_owned(),
        Ok(_) => "died before its first test".to_owned(),
        Err(error) => error.to_string(),
    }
}

/// Tests that passed only because they could not test anything count as skipped, each once. A line is `EXECUTABLE TEST REASON`.
fn count_skips(skips: &Path, progress: &mut Progress) {
    let text = std::fs::read_to_string(skips).unwrap_or_default();
    let reasons: BTreeMap<&str, &str> =
        text.lines().filter_map(|line| line.split_once(' ')?.1.split_once(' ')).collect();
    for (test, reason) in reasons {
        say(&format!("{} | {test} is skipped: {reason}", progress.name));
        progress.counts.passed = progress.counts.passed.saturating_sub(1);
        progress.counts.skipped += 1;
    }
    drop(std::fs::remove_file(skips));
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::suite::executables::Executable;
    use crate::suite::rings::{RINGS, Ring};

    /// A directory with a test executable that is a shell script, gone with it.
    struct Script(Executable);

    impl Script {
        fn new(name: &str, text: &str) -> Self {
            let directory = std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
            fs::create_dir_all(&directory).unwrap();
            let path = directory.join("script");
            let start = "started() { echo \"{ \\\"type\\\": \\\"test\\\", \\\"event\\\": \\\"started\\\", \\\"name\\\": \\\"$1\\\" }\"; }
                ended() { echo \"{ \\\"type\\\": \\\"test\\\", \\\"name\\\": \\\"$1\\\", \\\"event\\\": \\\"$2\\\", \\\"exec_time\\\": 0.5 }\"; }";
            fs::write(&path, format!("#!/bin/sh\n{start}\n{text}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            let directory = directory.to_str().unwrap();
            Self(Executable {
                package: name.to_owned(),
                directory: directory.into(),
                path: path.to_str().unwrap().into(),
                is_integration: false,
            })
        }

        fn run(&self, ring: &'static Ring, tests: &[&str]) -> Report {
            let tests = tests.iter().map(|test| (*test).to_owned()).collect();
            let job = Job {
                ring,
                executable: &self.0,
                module: None,
                tests,
                seconds: 1.0,
                share: 10,
                alone: false,
                limit: ring.limit,
            };
            run(&job, &Filter::default(), "a unit /bin/a\n")
        }
    }

    impl Drop for Script {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0.directory);
        }
    }

    /// The first ring, with a limit of a second.
    static IMPATIENT: Ring = Ring { limit: Duration::from_secs(1), ..RINGS[0] };

    fn counts(passed: u64, failed: u64) -> Counts {
        Counts { passed, failed, skipped: 0 }
    }

    #[test]
    fn a_test_that_hangs_fails_by_name_and_the_others_run_all_the_same() {
        let script = Script::new(
            "hangs",
            "case \"$*\" in *' a'*) started a; ended a ok; started b; sleep 1000;; esac; started c; ended c ok",
        );
        let report = script.run(&IMPATIENT, &["a", "b", "c"]);
        assert_eq!(report.outcome.counts, counts(2, 1));
        assert_eq!(report.outcome.problems.len(), 1);
        assert!(report.outcome.problems[0].contains("b hung"), "{report:?}");
    }

    #[test]
    fn a_test_that_kills_its_process_fails_by_name_and_the_others_run_all_the_same() {
        let script = Script::new(
            "dies",
            "case \"$*\" in *' a'*) started a; kill -SEGV $$;; esac; started b; ended b ok",
        );
        let report = script.run(&RINGS[0], &["a", "b"]);
        assert_eq!(report.outcome.counts, counts(1, 1));
        assert!(report.outcome.problems[0].contains("a ended with its process"), "{report:?}");
    }

    #[test]
    fn an_executable_that_reports_nothing_or_fails_without_a_failed_test_fails() {
        let silent = Script::new("silent", "true").run(&RINGS[0], &["a"]).outcome;
        assert_eq!(silent.counts, counts(0, 1));
        assert!(silent.problems[0].contains("without a test result"), "{silent:?}");
        let error = Script::new("error", "started a; ended a ok; exit 101").run(&RINGS[0], &["a"]).outcome;
        assert_eq!(error.counts, counts(1, 1));
        let failed =
            Script::new("failed", "started a; ended a failed; exit 101").run(&RINGS[0], &["a"]).outcome;
        assert_eq!((failed.counts, failed.problems.len()), (counts(0, 1), 1));
    }

    #[test]
    fn a_test_that_could_not_test_counts_as_skipped() {
        let text = "started a; for i in 1 2; do echo 'script a no kernel' >>$FAIRLEAD_TEST_SKIPS; done; ended a ok; started b; ended b ok";
        let report = Script::new("skips", text).run(&RINGS[0], &["a", "b"]);
        assert_eq!(report.outcome.counts, Counts { passed: 1, failed: 0, skipped: 1 });
    }

    #[test]
    fn an_executable_is_told_of_all_others() {
        let text = "[ \"$FAIRLEAD_TEST_PROGRAMS\" = 'a unit /bin/a
' ] && { started a; ended a ok; }";
        assert_eq!(Script::new("told", text).run(&RINGS[0], &["a"]).outcome.counts, counts(1, 0));
    }
}

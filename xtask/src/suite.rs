//! `cargo xtask test`: builds all tests, runs those of the chosen rings, adds up the counts, and fails when something did not run.

mod changed;
mod executables;
mod jobs;
mod libtest;
mod rings;
mod run;
mod schedule;
mod times;

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use crate::process;
use crate::setup::{self, Kubernetes};
use crate::steps::{self, Result, print, say};
use executables::Executable;
use jobs::{Filter, Ignored, Job, Selection};
use libtest::Counts;
use rings::Ring;
use run::Report;
use times::Times;

/// Number of the slowest tests that a run names at its end.
const SLOWEST: usize = 20;
/// Hundredths of each processor that jobs may use by `times.tsv`; the rest is for what they do at the same moment.
const LOAD: u32 = 90;

/// Outcome of tests: counts, and every reason why they are no success.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcome {
    counts: Counts,
    problems: Vec<String>,
}

impl Outcome {
    fn add(&mut self, other: Self) {
        self.counts.add(other.counts);
        self.problems.extend(other.problems);
    }

    /// A problem that is no failed test: it counts as one, so that no sum hides it.
    fn fail(&mut self, problem: String) {
        self.counts.failed += 1;
        self.problems.push(problem);
    }
}

/// Sets up what the chosen rings need, runs them all even when a test fails, and prints the sum last.
pub(crate) fn run(arguments: &[String]) -> Result {
    if let Some((_, rest)) = arguments.split_first().filter(|(first, _)| *first == "conformance") {
        return steps::conformance(rest);
    }
    let (names, filter) = match arguments.iter().position(|argument| argument == "--") {
        Some(at) => (arguments.get(..at).unwrap_or_default(), arguments.get(at + 1..).unwrap_or_default()),
        None => (arguments, &[][..]),
    };
    let mut filter = Filter::parse(filter)?;
    let (changed, names) = changed(names)?;
    let mut chosen = rings::choose(&names, &filter)?;
    if let Some(changed) = &changed {
        chosen.rings.retain(|ring| ring.packages.iter().any(|package| changed.contains(*package)));
        let names: Vec<&str> = changed.iter().map(String::as_str).collect();
        say(&format!("==> a change can break the tests of {} packages: {}", names.len(), names.join(" ")));
    }
    if chosen.selection == Selection::Soak {
        filter.ignored = Ignored::Too;
    }
    let start = Instant::now();
    let executables = set_up(&chosen.rings)?;
    rings::assign(&executables)?;
    let built = start.elapsed();
    let mut jobs = plan(&chosen.rings, &executables, chosen.selection, &filter)?;
    if let Some(changed) = &changed {
        jobs.retain(|job| changed.contains(&job.executable.package));
    }
    let before = process::machine_time();
    let reports = run_jobs(&jobs, &executables, &filter);
    let busy = process::machine_time().saturating_sub(before);
    let total = sum(&chosen.rings, &jobs, &reports, &filter);
    say_times(&jobs, &reports, built, start.elapsed(), busy);
    print(&format!("{}\n", total.counts));
    if total.problems.is_empty() { Ok(()) } else { Err(total.problems.join("\n       ")) }
}

/// The packages that a change can break, if `--changed` or `--changed=REVISION` is among the names, and the other names.
fn changed(names: &[String]) -> std::result::Result<(Option<BTreeSet<String>>, Vec<String>), String> {
    let (options, names): (Vec<String>, Vec<String>) =
        names.iter().cloned().partition(|name| name.starts_with('-'));
    match options.as_slice() {
        [] => Ok((None, names)),
        [option] if option == "--changed" => Ok((Some(changed::packages(None)?), names)),
        [option] if option.starts_with("--changed=") => {
            Ok((Some(changed::packages(option.strip_prefix("--changed="))?), names))
        }
        unknown => Err(format!("unknown option {}; there is --changed[=REVISION]", unknown.join(" "))),
    }
}

fn set_up(chosen: &[&Ring]) -> std::result::Result<Vec<Executable>, String> {
    let mut kubernetes = Vec::new();
    if chosen.iter().any(|ring| ring.needs_control_plane()) {
        kubernetes.push(Kubernetes::ControlPlane);
    }
    if chosen.iter().any(|ring| ring.needs_images()) {
        kubernetes.push(Kubernetes::Images);
    }
    setup::prepare(&kubernetes, executables::build)
}

/// The jobs of the rings, in the order in which they begin.
fn plan<'a>(
    rings: &[&'static Ring],
    executables: &'a [Executable],
    selection: Selection,
    filter: &Filter,
) -> std::result::Result<Vec<Job<'a>>, String> {
    let times = Times::kept();
    let mut jobs = Vec::new();
    for ring in rings {
        for executable in executables.iter().filter(|it| ring.packages.contains(&it.package.as_str())) {
            let tests = jobs::list(executable, filter)?;
            jobs.extend(jobs::plan(ring, executable, tests, selection, &times));
        }
    }
    jobs::order(&mut jobs);
    Ok(jobs)
}

fn run_jobs(jobs: &[Job<'_>], executables: &[Executable], filter: &Filter) -> Vec<Report> {
    let programs = jobs::programs(executables);
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let capacity = LOAD.saturating_mul(u32::try_from(processors).unwrap_or(u32::MAX));
    say(&format!(
        "==> tests: {} in {} processes",
        jobs.iter().map(|job| job.tests.len()).sum::<usize>(),
        jobs.len()
    ));
    schedule::run(jobs, capacity, |job| run::run(job, filter, &programs))
}

/// Adds up the jobs. Without a filter every ring must have run a test, with one at least one of them.
fn sum(rings: &[&Ring], jobs: &[Job<'_>], reports: &[Report], filter: &Filter) -> Outcome {
    let mut total = Outcome::default();
    for ring in rings {
        let mut of_ring = Outcome::default();
        for (_, report) in jobs.iter().zip(reports).filter(|(job, _)| job.ring.name == ring.name) {
            let Outcome { counts, problems } = &report.outcome;
            of_ring.add(Outcome { counts: *counts, problems: problems.clone() });
        }
        say(&format!("    {}: {}", ring.name, of_ring.counts));
        if !filter.is_by_name() && of_ring.counts.ran() == 0 {
            of_ring.fail(format!("the ring {} ran no test", ring.name));
        }
        total.add(of_ring);
    }
    if filter.is_by_name() && total.counts.ran() == 0 {
        total.fail(format!("no test of the chosen rings matches {:?}", filter.describe()));
    }
    total
}

/// Names the slowest tests and what the run consisted of, and writes the times of all jobs for `times.tsv`. `busy` is the processor time of
/// the whole machine: jobs are not told of what processes used that did not end before them, such as nodes that lose their power.
fn say_times(jobs: &[Job<'_>], reports: &[Report], built: Duration, all: Duration, busy: Duration) {
    let mut tests: Vec<(Duration, String)> = Vec::new();
    let mut times = Times::default();
    for (job, report) in jobs.iter().zip(reports) {
        tests.extend(
            report.tests.iter().map(|(test, time)| (*time, format!("{} {test}", job.executable.package))),
        );
        if let Some(time) = report.time {
            times.insert(&job.executable.package, job.module.as_deref().unwrap_or_default(), time);
        }
    }
    tests.sort_by(|a, b| b.cmp(a));
    say("==> the slowest tests");
    for (time, name) in tests.iter().take(SLOWEST) {
        say(&format!("{:8.1} s  {name}", time.as_secs_f64()));
    }
    let file = steps::target().join("test-times.tsv");
    if let Err(error) = fs::write(&file, times.table()) {
        say(&format!("cannot write {}: {error}", file.display()));
    }
    let cpu: f64 = reports.iter().filter_map(|report| report.time).map(|time| time.cpu).sum();
    say(&format!(
        "tests: {:.0} s in all: {:.0} s set-up and build, {:.0} s tests, which used {cpu:.0} s of processor time, \
         and all programs of the machine {:.0} s",
        all.as_secs_f64(),
        built.as_secs_f64(),
        all.saturating_sub(built).as_secs_f64(),
        busy.as_secs_f64(),
    ));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::rings::RINGS;

    fn outcome(rings: &[&'static Ring], counts: &[Counts], filter: &[&str]) -> Outcome {
        let executable = Executable {
            package: "p".to_owned(),
            directory: "/".into(),
            path: "/".into(),
            is_integration: false,
        };
        let job = |ring: &&'static Ring| Job {
            ring,
            executable: &executable,
            module: None,
            tests: Vec::new(),
            seconds: 1.0,
            share: 10,
            alone: false,
            limit: ring.limit,
        };
        let jobs: Vec<Job<'_>> = rings.iter().map(job).collect();
        let report = |counts: &Counts| Report {
            outcome: Outcome { counts: *counts, problems: Vec::new() },
            ..Report::default()
        };
        let reports: Vec<Report> = counts.iter().map(report).collect();
        let words: Vec<String> = filter.iter().map(|word| (*word).to_owned()).collect();
        sum(rings, &jobs, &reports, &Filter::parse(&words).unwrap())
    }

    fn counts(passed: u64, failed: u64) -> Counts {
        Counts { passed, failed, skipped: 0 }
    }

    #[test]
    fn a_ring_without_a_test_fails() {
        let total = outcome(&[&RINGS[0], &RINGS[1]], &[counts(3, 0), counts(0, 0)], &[]);
        assert_eq!(total.counts, counts(3, 1));
        assert_eq!(total.problems, ["the ring lab ran no test"]);
        assert_eq!(outcome(&[&RINGS[0]], &[counts(3, 0)], &[]).counts, counts(3, 0));
    }

    #[test]
    fn a_filter_that_matches_in_no_ring_fails() {
        let rings = [&RINGS[0], &RINGS[1]];
        let total = outcome(&rings, &[counts(0, 0), counts(0, 0)], &["drain"]);
        assert_eq!(total.counts, counts(0, 1));
        assert!(total.problems[0].contains("matches \"drain\""), "{total:?}");
        assert_eq!(outcome(&rings, &[counts(0, 0), counts(1, 0)], &["drain"]).counts, counts(1, 0));
    }
}

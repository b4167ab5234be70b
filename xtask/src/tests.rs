//! `cargo xtask test`: runs the rings one after another, or beside each other where they mostly wait, adds up the counts, and fails when something did not run.

mod counts;
mod executables;
mod rings;

use std::ffi::OsStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::process;
use crate::setup::{self, Kubernetes};
use crate::steps::{self, Result, print, say};
use counts::{Counts, Tally};
use executables::Executable;
use rings::Ring;

/// Names the test executables to those that run others in a VM: asking cargo for them would wait for whatever else it builds.
const PROGRAMS: &str = "FAIRLEAD_TEST_PROGRAMS";

/// What a ring or one test executable came to: the counts of libtest, and every reason why it is no success.
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

/// Sets up what the chosen rings need, runs them all even when one fails, and prints the sum last.
pub(crate) fn run(arguments: &[String]) -> Result {
    if let Some((_, rest)) = arguments.split_first().filter(|(first, _)| *first == "conformance") {
        return steps::conformance(rest);
    }
    let (names, filter) = match arguments.iter().position(|argument| argument == "--") {
        Some(at) => (arguments.get(..at).unwrap_or_default(), arguments.get(at + 1..).unwrap_or_default()),
        None => (arguments, &[][..]),
    };
    let chosen = rings::choose(names)?;
    let start = Instant::now();
    let executables = set_up(&chosen)?;
    rings::assign(&executables)?;
    let outcomes = run_rings(&chosen, &executables, filter);
    let total = sum(outcomes, filter);
    say(&format!("tests: {:.0} s in all", start.elapsed().as_secs_f64()));
    print(&format!("{}\n", total.counts));
    if total.problems.is_empty() { Ok(()) } else { Err(total.problems.join("\n       ")) }
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

/// Adds up the rings. Without a filter every ring must have run a test, with one at least one of them.
fn sum(outcomes: Vec<(&str, Outcome)>, filter: &[String]) -> Outcome {
    let mut total = Outcome::default();
    for (ring, outcome) in outcomes {
        let no_test = filter.is_empty() && outcome.counts.ran() == 0;
        total.add(outcome);
        if no_test {
            total.fail(format!("the ring {ring} ran no test"));
        }
    }
    if !filter.is_empty() && total.counts.ran() == 0 {
        total.fail(format!("no test of the chosen rings matches {:?}", filter.join(" ")));
    }
    total
}

/// One after another, apart from those that run beside the next one; the outcomes are in the order of the rings.
fn run_rings<'a>(
    chosen: &[&'a Ring],
    executables: &[Executable],
    filter: &[String],
) -> Vec<(&'a str, Outcome)> {
    thread::scope(|scope| {
        let mut outcomes = Vec::new();
        let mut beside = Vec::new();
        for ring in chosen {
            if ring.beside_next {
                beside.push((ring.name, scope.spawn(|| run_ring(ring, executables, filter))));
                continue;
            }
            let outcome = run_ring(ring, executables, filter);
            outcomes.extend(beside.drain(..).map(join));
            outcomes.push((ring.name, outcome));
        }
        outcomes.extend(beside.drain(..).map(join));
        outcomes
    })
}

fn join<'a>((name, ring): (&'a str, thread::ScopedJoinHandle<'_, Outcome>)) -> (&'a str, Outcome) {
    // A panic there has failed this program already.
    (name, ring.join().unwrap_or_default())
}

fn run_ring(ring: &Ring, executables: &[Executable], filter: &[String]) -> Outcome {
    let start = Instant::now();
    say(&format!("==> tests: {}", ring.name));
    let programs = std::env::join_paths(executables.iter().map(|it| &it.path)).unwrap_or_default();
    let of_ring: Vec<&Executable> = executables
        .iter()
        .filter(|executable| ring.packages.contains(&executable.package.as_str()))
        .collect();
    let place = |executable: &Executable, names: &[&str]| {
        let file = executable.path.file_name().unwrap_or_default();
        names.iter().position(|name| file.strip_prefix(name).is_some_and(|rest| rest.starts_with('-')))
    };
    let (waiting, mut others): (Vec<&Executable>, Vec<&Executable>) =
        of_ring.into_iter().partition(|executable| place(executable, ring.waiting).is_some());
    others.sort_by_key(|executable| place(executable, ring.first).unwrap_or(usize::MAX));
    let run = |executable: &Executable| run_one(executable, &programs, ring.options, filter, ring.limit);
    let outcomes = thread::scope(|scope| {
        let beside = scope.spawn(|| run_parallel(&waiting, 1, run));
        let others = run_parallel(&others, ring.parallel, run);
        // A panic there has failed this program already.
        others.into_iter().chain(beside.join().unwrap_or_default()).collect::<Vec<_>>()
    });
    let mut total = Outcome::default();
    outcomes.into_iter().for_each(|outcome| total.add(outcome));
    let seconds = start.elapsed().as_secs_f64();
    say(&format!("    {}: {} in {seconds:.0} s", ring.name, total.counts));
    total
}

/// Runs test executables, some concurrently; the outcomes are in the order of the executables.
fn run_parallel(
    executables: &[&Executable],
    parallel: usize,
    run: impl Fn(&Executable) -> Outcome + Sync,
) -> Vec<Outcome> {
    let next = AtomicUsize::new(0);
    let outcomes: Vec<OnceLock<Outcome>> = executables.iter().map(|_| OnceLock::new()).collect();
    let work = || {
        while let Some(index) =
            Some(next.fetch_add(1, Ordering::Relaxed)).filter(|index| *index < outcomes.len())
        {
            if let (Some(executable), Some(outcome)) = (executables.get(index), outcomes.get(index)) {
                let _ = outcome.set(run(executable));
            }
        }
    };
    thread::scope(|scope| (0..parallel).for_each(|_| drop(scope.spawn(work))));
    outcomes.into_iter().map(|outcome| outcome.into_inner().unwrap_or_default()).collect()
}

fn run_one(
    executable: &Executable,
    programs: &OsStr,
    options: &[&str],
    filter: &[String],
    limit: Duration,
) -> Outcome {
    let name = executable.path.file_name().unwrap_or_default().to_owned();
    say(&format!("--- {} {name}", executable.package));
    let tag = format!("{name:.12} | ");
    let mut command = process::dies_with_us(executable.path.as_std_path());
    command
        .args(options)
        .args(filter)
        .current_dir(&executable.directory)
        .env("CARGO_MANIFEST_DIR", &executable.directory)
        .env(PROGRAMS, programs);
    let start = Instant::now();
    let mut tally = Tally::default();
    let ended = process::run(&mut command, limit, |line| {
        tally.line(line);
        say(&format!("{tag}{line}"));
    });
    let outcome = judge(executable.path.as_str(), &tally, ended);
    say(&format!("    {name}: {} in {:.0} s", outcome.counts, start.elapsed().as_secs_f64()));
    outcome
}

/// Whatever the reason of a failure is, at least one test failed.
fn judge(path: &str, tally: &Tally, ended: std::result::Result<bool, process::Error>) -> Outcome {
    let mut outcome = Outcome { counts: tally.counts(), problems: Vec::new() };
    let names = tally.names();
    match (ended, tally.reported) {
        (Ok(true), Some(_)) => {}
        (Ok(true), None) => outcome.fail(format!("{path} ended without a test result{names}")),
        (Ok(false), Some(counts)) if counts.failed > 0 => {
            outcome.problems.push(format!("{path} failed{names}"));
        }
        (Ok(false), _) => outcome.fail(format!("{path} died{names}")),
        (Err(error), _) => outcome.fail(format!("{path} {error}{names}")),
    }
    outcome
}

#[cfg(test)]
mod unit {
    use super::*;

    fn counts(passed: u64, failed: u64) -> Counts {
        Counts { passed, failed, skipped: 0 }
    }

    fn outcome(passed: u64, failed: u64) -> Outcome {
        Outcome { counts: counts(passed, failed), problems: Vec::new() }
    }

    /// A test executable that is a shell script.
    fn script(text: &str, limit: Duration) -> Outcome {
        let shell = Executable { package: "x".to_owned(), directory: "/".into(), path: "/bin/sh".into() };
        run_one(&shell, OsStr::new("/bin/a:/bin/b"), &[], &["-c".to_owned(), text.to_owned()], limit)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_ring_without_a_test_fails() {
        let total = sum(vec![("pure", outcome(3, 0)), ("lab", outcome(0, 0))], &[]);
        assert_eq!(
            total,
            Outcome { counts: counts(3, 1), problems: vec!["the ring lab ran no test".to_owned()] }
        );
        assert_eq!(sum(vec![("pure", outcome(3, 0))], &[]), outcome(3, 0));
    }

    #[test]
    fn a_filter_that_matches_in_no_ring_fails() {
        let filter = ["drain".to_owned()];
        let total = sum(vec![("pure", outcome(0, 0)), ("lab", outcome(0, 0))], &filter);
        assert_eq!(total.counts, counts(0, 1));
        assert!(total.problems[0].contains("matches \"drain\""), "{total:?}");
        assert_eq!(sum(vec![("pure", outcome(0, 0)), ("lab", outcome(1, 0))], &filter), outcome(1, 0));
    }

    #[test]
    fn results_of_an_executable_are_added_up() {
        let result =
            "test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s";
        assert_eq!(script(&format!("echo '{result}'; echo '{result}'"), LONG), outcome(4, 0));
    }

    #[test]
    fn an_executable_is_told_of_all_others() {
        let text = "[ $FAIRLEAD_TEST_PROGRAMS = /bin/a:/bin/b ] && echo 'test result: ok. 1 passed; 0 failed; 0 ignored'";
        assert_eq!(script(text, LONG), outcome(1, 0));
    }

    #[test]
    fn an_executable_that_fails_without_a_failed_test_counts_as_one() {
        let result =
            |failed| format!("echo 'test result: FAILED. 1 passed; {failed} failed; 0 ignored'; exit 101");
        let failed = script(&result(2), LONG);
        assert_eq!((failed.counts, failed.problems.len()), (counts(1, 2), 1));
        let died = script("kill -SEGV $$", LONG);
        assert_eq!((died.counts, died.problems), (counts(0, 1), vec!["/bin/sh died".to_owned()]));
        let silent = script("true", LONG);
        assert_eq!(silent.counts, counts(0, 1));
        assert!(silent.problems[0].contains("without a test result"), "{silent:?}");
    }

    #[test]
    fn an_executable_that_hangs_fails_and_keeps_what_it_counted() {
        let text = "echo 'test result: ok. 1 passed; 0 failed; 0 ignored'; sleep 1000";
        let hung = script(text, Duration::from_secs(2));
        assert_eq!(hung.counts, counts(1, 1));
        assert!(hung.problems[0].contains("was killed after 2.0 s"), "{hung:?}");
    }

    #[test]
    fn outcomes_keep_the_order_of_the_executables() {
        let all: Vec<Executable> = (0..8)
            .map(|number| Executable { package: number.to_string(), directory: "/".into(), path: "/".into() })
            .collect();
        let all: Vec<&Executable> = all.iter().collect();
        let number = |executable: &Executable| executable.package.parse().unwrap();
        let outcomes = run_parallel(&all, 3, |executable| outcome(number(executable), 0));
        assert_eq!(outcomes, (0..8).map(|passed| outcome(passed, 0)).collect::<Vec<_>>());
    }
}

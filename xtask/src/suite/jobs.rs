//! Processes that run the tests: one for each module of integration tests, which are programs of their own in all but the link, and one for
//! the unit tests of each crate.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use super::executables::Executable;
use super::libtest;
use super::rings::{Ring, Soaked};
use super::times::Times;

/// Options for test executables and words to look for in the names of tests.
#[derive(Debug, Default, PartialEq, Eq, Clone)]
pub(crate) struct Filter {
    pub(crate) ignored: Ignored,
    pub(crate) nocapture: bool,
    words: Vec<String>,
}

/// Selection of tests with `#[ignore]`.
#[derive(Debug, Default, PartialEq, Eq, Clone, Copy)]
pub(crate) enum Ignored {
    #[default]
    No,
    Only,
    Too,
}

impl Filter {
    /// Reads `--ignored`, `--include-ignored`, `--nocapture` and words.
    pub(crate) fn parse(arguments: &[String]) -> Result<Self, String> {
        let mut filter = Self::default();
        for argument in arguments {
            match argument.as_str() {
                "--ignored" => filter.ignored = Ignored::Only,
                "--include-ignored" => filter.ignored = Ignored::Too,
                "--nocapture" => filter.nocapture = true,
                option if option.starts_with('-') => {
                    return Err(format!(
                        "option {option} after -- is unknown; there are: --ignored --include-ignored --nocapture"
                    ));
                }
                word => filter.words.push(word.to_owned()),
            }
        }
        Ok(filter)
    }

    /// Whether the caller chose tests by their names.
    pub(crate) fn is_by_name(&self) -> bool {
        !self.words.is_empty()
    }

    pub(crate) fn describe(&self) -> String {
        self.words.join(" ")
    }

    fn matches(&self, name: &str) -> bool {
        self.words.is_empty() || self.words.iter().any(|word| name.contains(word.as_str()))
    }

    /// The arguments that name ignored tests for libtest.
    pub(crate) fn ignored_arguments(&self) -> &'static [&'static str] {
        match self.ignored {
            Ignored::No => &[],
            Ignored::Only => &["--ignored"],
            Ignored::Too => &["--include-ignored"],
        }
    }
}

/// Tests that one process runs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Job<'a> {
    pub(crate) ring: &'static Ring,
    pub(crate) executable: &'a Executable,
    /// The module of integration tests; none for unit tests.
    pub(crate) module: Option<String>,
    pub(crate) tests: Vec<String>,
    /// Seconds that it took before, or those of a typical job of its ring.
    pub(crate) seconds: f64,
    /// Processors that it uses, in hundredths.
    pub(crate) share: u32,
    /// Whether it measures or counts losses: nothing runs beside it.
    pub(crate) alone: bool,
    /// Time of one test, after which it is taken for hung.
    pub(crate) limit: Duration,
}

/// Limit of tests of the soak, the longest of which takes an hour.
const SOAK_LIMIT: Duration = Duration::from_secs(2 * 60 * 60);

impl Job<'_> {
    pub(crate) fn name(&self) -> String {
        match &self.module {
            Some(module) => format!("{} {module}", self.executable.package),
            None => format!("{} (unit tests)", self.executable.package),
        }
    }
}

/// The names of an executable's tests that the filter lets through.
pub(crate) fn list(executable: &Executable, filter: &Filter) -> Result<Vec<String>, String> {
    let mut command = Command::new(executable.path.as_std_path());
    command.args(["--list", "--format=terse"]).args(filter.ignored_arguments());
    let output = command.output().map_err(|error| format!("cannot run {}: {error}", executable.path))?;
    if !output.status.success() {
        return Err(format!("{} --list failed: {}", executable.path, output.status));
    }
    let mut names = libtest::list(&String::from_utf8_lossy(&output.stdout));
    names.retain(|name| filter.matches(name));
    Ok(names)
}

/// The jobs of an executable of a ring, in the order of their modules. Tests of the soak run only there, or by name.
pub(crate) fn plan<'a>(
    ring: &'static Ring,
    executable: &'a Executable,
    tests: Vec<String>,
    selection: Selection,
    times: &Times,
) -> Vec<Job<'a>> {
    let mut modules: BTreeMap<Option<String>, Vec<String>> = BTreeMap::new();
    for test in tests {
        if selection.has(ring.soaks(&executable.package, &test).is_some()) {
            let module =
                executable.is_integration.then(|| test.split("::").next().unwrap_or(&test).to_owned());
            modules.entry(module).or_default().push(test);
        }
    }
    let job = |(module, tests): (Option<String>, Vec<String>)| {
        let name = module.as_deref().unwrap_or_default();
        let time = times.of(&executable.package, name).unwrap_or(ring.typical);
        let soaked: Vec<&Soaked> =
            tests.iter().filter_map(|test| ring.soaks(&executable.package, test)).collect();
        let limit = if soaked.is_empty() { ring.limit } else { SOAK_LIMIT };
        let alone = ring.alone.contains(&name) || soaked.iter().any(|soaked| soaked.alone);
        let share = time.share().max(ring.least);
        Job { ring, executable, module, tests, seconds: time.seconds, share, alone, limit }
    };
    modules.into_iter().map(job).collect()
}

/// Selection of the tests of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Selection {
    All,
    /// Tests that are too long for every run.
    Soak,
    WithoutSoak,
}

impl Selection {
    fn has(self, soaks: bool) -> bool {
        match self {
            Self::All => true,
            Self::Soak => soaks,
            Self::WithoutSoak => !soaks,
        }
    }
}

/// Sorts jobs so that those begin first that take longest: none is left alone at the end. Those that need the machine to
/// themselves come last.
pub(crate) fn order(jobs: &mut [Job<'_>]) {
    jobs.sort_by(|a, b| a.alone.cmp(&b.alone).then(b.seconds.total_cmp(&a.seconds)));
}

/// All executables, each as `PACKAGE KIND PATH` on a line, for tests that run other tests.
pub(crate) fn programs(executables: &[Executable]) -> String {
    let line = |executable: &Executable| {
        let kind = if executable.is_integration { "integration" } else { "unit" };
        format!("{} {kind} {}\n", executable.package, executable.path)
    };
    executables.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::rings::RINGS;
    use crate::suite::times::Time;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    fn executable(package: &str, is_integration: bool) -> Executable {
        Executable { package: package.to_owned(), directory: "/".into(), path: "/".into(), is_integration }
    }

    fn ring(name: &str) -> &'static Ring {
        RINGS.iter().find(|ring| ring.name == name).unwrap()
    }

    #[test]
    fn options_that_would_be_ignored_are_refused() {
        let filter = Filter::parse(&words(&["--ignored", "drain", "--nocapture"])).unwrap();
        assert!(filter.matches("a::drain_takes_a_second") && !filter.matches("a::b"));
        assert!(filter.nocapture && filter.ignored == Ignored::Only && filter.is_by_name());
        assert!(Filter::parse(&words(&["--test-threads=1"])).unwrap_err().contains("--test-threads=1"));
    }

    #[test]
    fn integration_tests_have_a_process_for_each_module_and_unit_tests_one_for_all() {
        let of = |executable: &Executable| -> Vec<(Option<String>, usize)> {
            let tests = words(&["b::one", "a::x::two", "b::three"]);
            let jobs = plan(ring("lab"), executable, tests, Selection::All, &Times::default());
            jobs.into_iter().map(|job| (job.module, job.tests.len())).collect()
        };
        assert_eq!(of(&executable("p", true)), [(Some("a".to_owned()), 1), (Some("b".to_owned()), 2)]);
        assert_eq!(of(&executable("p", false)), [(None, 3)]);
    }

    #[test]
    fn the_soak_and_every_run_share_no_test_and_leave_none_out() {
        let ring = ring("demo");
        let soaked = ring.soak.iter().find(|soaked| soaked.alone && !soaked.name.contains("::")).unwrap();
        let tests = vec![format!("{}::one", soaked.name), "other::two".to_owned()];
        let executable = executable(soaked.package, true);
        let of = |selection| -> Vec<String> {
            let jobs = plan(ring, &executable, tests.clone(), selection, &Times::default());
            jobs.into_iter().flat_map(|job| job.tests).collect()
        };
        assert_eq!(of(Selection::Soak), [tests[0].as_str()]);
        assert_eq!(of(Selection::WithoutSoak), [tests[1].as_str()]);
        assert_eq!(of(Selection::All).len(), 2);
        let jobs = plan(ring, &executable, tests.clone(), Selection::Soak, &Times::default());
        assert!(soaked.alone && jobs.iter().all(|job| job.alone && job.limit == SOAK_LIMIT));
    }

    #[test]
    fn a_cluster_of_real_nodes_has_its_share_although_the_table_has_less() {
        let mut times = Times::default();
        times.insert("p", "mesh", Time { seconds: 400.0, cpu: 80.0 });
        let share = |name| {
            let tests = words(&["mesh::a"]);
            plan(ring(name), &executable("p", true), tests, Selection::All, &times)[0].share
        };
        assert_eq!((share("nodes"), share("demo")), (50, 20));
    }

    #[test]
    fn the_longest_begin_first_and_those_that_measure_last() {
        let executable = executable("p", true);
        let tests = words(&["short::a", "long::a", "alone::a"]);
        let mut jobs = plan(ring("lab"), &executable, tests, Selection::All, &Times::default());
        for job in &mut jobs {
            job.alone = job.module.as_deref() == Some("alone");
            job.seconds = if job.module.as_deref() == Some("short") { 1.0 } else { 9.0 };
        }
        order(&mut jobs);
        let modules: Vec<&str> = jobs.iter().filter_map(|job| job.module.as_deref()).collect();
        assert_eq!(modules, ["long", "short", "alone"]);
    }
}

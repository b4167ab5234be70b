//! `cargo xtask test`: every ring, one after another, with the counts added up.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use crate::setup;
use crate::steps::{self, Result, cargo, print, say};

/// A group of packages tested together, from the cheapest to the dearest.
struct Ring {
    name: &'static str,
    packages: &'static [&'static str],
    /// Test programs that run side by side: those of the demo mostly wait.
    at_once: usize,
    /// Only when it is named: a whole cluster of real nodes wants a machine to itself.
    when_named: bool,
}

const RINGS: &[Ring] = &[
    Ring {
        name: "pure",
        packages: &[
            "fairlead-address",
            "fairlead-api",
            "fairlead-ipam",
            "fairlead-topology",
            "fairlead-path",
            "fairlead-wire",
            "fairlead-cluster",
            "fairlead-cni-plugin",
            "fairlead-node",
            "fairlead-controller",
            "fairlead-image",
            "fairlead-conformance",
            "fairlead",
            "xtask",
        ],
        at_once: 1,
        when_named: false,
    },
    Ring {
        name: "lab",
        packages: &[
            "testbed-lab",
            "fairlead-netlink",
            "fairlead-dataplane",
            "fairlead-tunnel",
            "fairlead-bench",
        ],
        at_once: 1,
        when_named: false,
    },
    Ring { name: "kube", packages: &["testbed-kube"], at_once: 1, when_named: false },
    Ring { name: "vm", packages: &["testbed-vm"], at_once: 1, when_named: false },
    Ring { name: "demo", packages: &["fairlead-demo"], at_once: 2, when_named: false },
    Ring { name: "nodes", packages: &["testbed-nodes"], at_once: 1, when_named: true },
];

/// What the test programs reported.
#[derive(Debug, Default, PartialEq, Eq, Clone, Copy)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

/// Sets up what the wanted rings need, runs them all even when one fails, and prints the sum last.
pub(crate) fn run(arguments: &[String]) -> Result {
    if let Some((_, rest)) = arguments.split_first().filter(|(first, _)| *first == "conformance") {
        return steps::conformance(rest);
    }
    let (names, filter) = match arguments.iter().position(|argument| argument == "--") {
        Some(at) => (arguments.get(..at).unwrap_or_default(), arguments.get(at + 1..).unwrap_or_default()),
        None => (arguments, &[][..]),
    };
    let wanted = choose(names)?;
    let start = Instant::now();
    setup::packages()?;
    setup::programs()?;
    if wanted.iter().any(|ring| matches!(ring.name, "kube" | "demo" | "nodes")) {
        setup::control_plane()?;
    }
    if wanted.iter().any(|ring| ring.name == "nodes") {
        setup::images()?;
    }
    let programs = build()?;
    let (mut total, mut broken) = (Counts::default(), Vec::new());
    for ring in wanted {
        let began = Instant::now();
        say(&format!("==> tests: {}", ring.name));
        let of_ring: Vec<&Program> =
            programs.iter().filter(|program| ring.packages.contains(&program.package.as_str())).collect();
        let mut counts = Counts::default();
        let outcomes = run_programs(&of_ring, ring.at_once, filter);
        if outcomes.len() != of_ring.len() {
            return Err(format!(
                "ring {}: only {} of {} test programs ran",
                ring.name,
                outcomes.len(),
                of_ring.len()
            ));
        }
        for (program, outcome) in of_ring.iter().zip(outcomes) {
            let (one, success) = outcome?;
            counts.add(one);
            if !success {
                // One that died printed no count; it must not look as if nothing had happened.
                counts.failed += u64::from(one.failed == 0);
                broken.push(program.path.clone());
            }
        }
        let seconds = began.elapsed().as_secs_f64();
        say(&format!(
            "    {}: {} passed, {} failed in {seconds:.0} s",
            ring.name, counts.passed, counts.failed
        ));
        total.add(counts);
    }
    say(&format!(
        "tests: {:.0} s in all (budget: 1500 s from nothing, 480 s again)",
        start.elapsed().as_secs_f64()
    ));
    print(&format!("{} passed, {} failed, {} skipped\n", total.passed, total.failed, total.ignored));
    if broken.is_empty() { Ok(()) } else { Err(format!("failed: {}", broken.join(", "))) }
}

fn choose(names: &[String]) -> std::result::Result<Vec<&'static Ring>, String> {
    if let Some(unknown) = names.iter().find(|name| !RINGS.iter().any(|ring| ring.name == name.as_str())) {
        let known: Vec<&str> = RINGS.iter().map(|ring| ring.name).collect();
        return Err(format!("there is no test ring {unknown:?}; there are: {}", known.join(" ")));
    }
    let is_wanted = |ring: &&Ring| {
        if names.is_empty() { !ring.when_named } else { names.iter().any(|name| name == ring.name) }
    };
    Ok(RINGS.iter().filter(is_wanted).collect())
}

/// One test executable.
struct Program {
    package: String,
    directory: PathBuf,
    path: String,
}

/// Builds all tests at once (see [`setup::programs`]) and lists the executables.
fn build() -> std::result::Result<Vec<Program>, String> {
    say("==> building the tests");
    let mut command = cargo(&["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]);
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot run cargo test --no-run: {error}"))?;
    if !output.status.success() {
        return Err("the tests do not compile".to_owned());
    }
    String::from_utf8_lossy(&output.stdout).lines().filter_map(executable).map(program).collect()
}

/// The manifest and executable that one line of cargo's JSON messages names, if it is about a test.
fn executable(line: &str) -> Option<(&str, &str)> {
    let value = |key: &str| {
        let (_, rest) = line.split_once(&format!("\"{key}\":\""))?;
        rest.split_once('"').map(|(value, _)| value)
    };
    // Of the target and the profile, which both have a field `test`, the profile says how it was built.
    let is_test =
        line.contains("\"reason\":\"compiler-artifact\"") && line.contains("\"test\":true},\"features\":");
    is_test.then(|| value("manifest_path").zip(value("executable"))).flatten()
}

fn program((manifest, path): (&str, &str)) -> std::result::Result<Program, String> {
    let text =
        std::fs::read_to_string(manifest).map_err(|error| format!("cannot read {manifest}: {error}"))?;
    let package = text
        .lines()
        .find_map(|line| line.strip_prefix("name = "))
        .ok_or_else(|| format!("{manifest} names no package"))?
        .trim_matches('"')
        .to_owned();
    let directory = Path::new(manifest).parent().map(Path::to_owned).unwrap_or_default();
    Ok(Program { package, directory, path: path.to_owned() })
}

type Outcome = std::result::Result<(Counts, bool), String>;

/// Runs test programs, some side by side; the outcomes are in the order of the programs.
fn run_programs(programs: &[&Program], at_once: usize, filter: &[String]) -> Vec<Outcome> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(program) = programs.get(index) else { return done };
            done.push((index, run_program(program, filter)));
        }
    };
    let mut outcomes: Vec<(usize, Outcome)> = thread::scope(|scope| {
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
    });
    outcomes.sort_by_key(|(index, _)| *index);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

fn run_program(program: &Program, filter: &[String]) -> Outcome {
    let failed = |error| format!("cannot run {}: {error}", program.path);
    let mut child = Command::new(&program.path)
        .args(filter)
        .current_dir(&program.directory)
        .env("CARGO_MANIFEST_DIR", &program.directory)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let name = Path::new(&program.path).file_name().unwrap_or_default().to_string_lossy().into_owned();
    say(&format!("--- {} {name}", program.package));
    let tag = format!("{:.12} | ", name);
    let mut counts = Counts::default();
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines() {
            let line = line.map_err(failed)?;
            if let Some(one) = parse(&line) {
                counts.add(one);
            }
            say(&format!("{tag}{line}"));
        }
    }
    let success = child.wait().map_err(failed)?.success();
    Ok((counts, success))
}

/// Reads `test result: ok. 3 passed; 0 failed; 1 ignored; …`.
fn parse(line: &str) -> Option<Counts> {
    let rest = line.strip_prefix("test result: ")?;
    let (_, rest) = rest.split_once(". ")?;
    let mut counts = Counts::default();
    for part in rest.split(';') {
        let Some((number, what)) = part.trim().split_once(' ') else { continue };
        let Ok(number) = number.parse() else { continue };
        match what {
            "passed" => counts.passed = number,
            "failed" => counts.failed = number,
            "ignored" => counts.ignored = number,
            _ => {}
        }
    }
    Some(counts)
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn counts_are_read_from_libtest() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.01s";
        assert_eq!(parse(line), Some(Counts { passed: 12, failed: 3, ignored: 1 }));
        assert_eq!(parse("running 3 tests"), None);
    }

    #[test]
    fn test_executables_are_found_in_cargos_messages() {
        let line = r#"{"reason":"compiler-artifact","package_id":"x","manifest_path":"/w/a/Cargo.toml","target":{"kind":["test"],"name":"t","test":true},"profile":{"opt_level":"0","test":true},"features":[],"filenames":["/t/a"],"executable":"/t/a","fresh":true}"#;
        assert_eq!(executable(line), Some(("/w/a/Cargo.toml", "/t/a")));
        let program = line.replace("\"test\":true},\"features\"", "\"test\":false},\"features\"");
        assert_eq!(executable(&program), None);
    }

    #[test]
    fn an_unknown_ring_is_named() {
        let error = choose(&["labb".to_owned()]).err().unwrap();
        assert!(error.contains("labb") && error.contains("pure"), "{error}");
    }

    #[test]
    fn without_a_name_all_rings_run_but_those_that_want_the_machine_to_themselves() {
        let names = |wanted: &[&str]| {
            let wanted: Vec<String> = wanted.iter().map(|name| (*name).to_owned()).collect();
            choose(&wanted).unwrap().iter().map(|ring| ring.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&[]), ["pure", "lab", "kube", "vm", "demo"]);
        assert_eq!(names(&["nodes", "pure"]), ["pure", "nodes"]);
    }

    #[test]
    fn every_workspace_package_is_in_a_ring() {
        let members = |folder: &str| std::fs::read_dir(crate::steps::root().join(folder)).unwrap();
        for entry in members("crates").chain(members("testbed")) {
            let text = std::fs::read_to_string(entry.unwrap().path().join("Cargo.toml")).unwrap();
            let name = text
                .lines()
                .find_map(|line| line.strip_prefix("name = "))
                .unwrap()
                .trim_matches('"')
                .to_owned();
            assert!(RINGS.iter().any(|ring| ring.packages.contains(&name.as_str())), "{name} is in no ring");
        }
    }
}

//! `cargo xtask test`: every ring, one after another, with the counts added up.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Instant;

use crate::setup;
use crate::steps::{Result, cargo, print, say};

/// A group of packages tested together, from the cheapest to the dearest.
struct Ring {
    name: &'static str,
    packages: &'static [&'static str],
    features: &'static [&'static str],
}

const RINGS: &[Ring] = &[
    Ring {
        name: "pure",
        packages: &[
            "fairlead-api",
            "fairlead-ipam",
            "fairlead-topology",
            "fairlead-path",
            "fairlead-wire",
            "fairlead-cni-plugin",
            "fairlead-node",
            "fairlead-controller",
            "fairlead",
            "xtask",
        ],
        features: &["fairlead-api/resources"],
    },
    Ring {
        name: "lab",
        packages: &["testbed-lab", "fairlead-netlink", "fairlead-dataplane", "fairlead-tunnel"],
        features: &[],
    },
    Ring { name: "kube", packages: &["testbed-kube"], features: &[] },
    Ring { name: "vm", packages: &["testbed-vm"], features: &[] },
    Ring { name: "demo", packages: &["fairlead-demo"], features: &[] },
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
    let (names, filter) = match arguments.iter().position(|argument| argument == "--") {
        Some(at) => (arguments.get(..at).unwrap_or_default(), arguments.get(at + 1..).unwrap_or_default()),
        None => (arguments, &[][..]),
    };
    let wanted = choose(names)?;
    let start = Instant::now();
    setup::packages()?;
    if wanted.iter().any(|ring| matches!(ring.name, "kube" | "demo")) {
        setup::control_plane()?;
        setup::product()?;
    }
    let (mut total, mut broken) = (Counts::default(), Vec::new());
    for ring in wanted {
        let began = Instant::now();
        say(&format!("==> tests: {}", ring.name));
        let (counts, success) = run_ring(ring, filter)?;
        say(&format!(
            "    {}: {} passed, {} failed, {} ignored in {:.0} s",
            ring.name,
            counts.passed,
            counts.failed,
            counts.ignored,
            began.elapsed().as_secs_f64()
        ));
        total.add(counts);
        if !success {
            broken.push(ring.name);
        }
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
    Ok(RINGS.iter().filter(|ring| names.is_empty() || names.iter().any(|name| name == ring.name)).collect())
}

fn run_ring(ring: &Ring, filter: &[String]) -> std::result::Result<(Counts, bool), String> {
    let mut command = cargo(&["test", "--no-fail-fast"]);
    for package in ring.packages {
        command.args(["-p", package]);
    }
    if !ring.features.is_empty() {
        command.args(["--features", &ring.features.join(",")]);
    }
    if !filter.is_empty() {
        command.arg("--").args(filter);
    }
    let mut child =
        command.stdout(Stdio::piped()).spawn().map_err(|error| format!("cannot run cargo test: {error}"))?;
    let mut counts = Counts::default();
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines() {
            let line = line.map_err(|error| format!("cannot read what cargo test prints: {error}"))?;
            if let Some(one) = parse(&line) {
                counts.add(one);
            }
            say(&line);
        }
    }
    let status = child.wait().map_err(|error| format!("cannot wait for cargo test: {error}"))?;
    Ok((counts, status.success()))
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
    fn an_unknown_ring_is_named() {
        let error = choose(&["labb".to_owned()]).err().unwrap();
        assert!(error.contains("labb") && error.contains("pure"), "{error}");
    }

    #[test]
    fn every_workspace_package_is_in_a_ring() {
        let manifest = std::fs::read_dir(crate::steps::root().join("crates")).unwrap();
        for entry in manifest {
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

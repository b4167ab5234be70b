//! One front door for developers.
//!
//! `cargo xtask demo|test|nodes|bench|image|generate|lint` do all their own set-up: Debian packages, the Kubernetes test bed from
//! Go modules, the builds. This program only runs other programs and counts; it does not link the product, so that it
//! compiles quickly. Progress goes to stderr, results to stdout.

mod image;
mod laws;
mod process;
mod setup;
mod steps;
mod suite;

use std::env;
use std::process::ExitCode;

const HELP: &str = "\
Usage: cargo xtask COMMAND

Commands:
  demo [--topology NAME] [--keep] [--json]
                          run the demo: pods on nodes in different networks reach each other
  test [RING...] [-- WORD...]
                          run the tests; rings: pure lab kube vm demo (all of them without a name), and nodes (only by name)
  test --changed[=REVISION] [RING...]
                          run the tests of packages that a change since REVISION can break; without one, since the
                          commit that this branch has in common with origin/main
  test soak               run the tests that are too long for every run (over an hour)
  test conformance [--families ipv4|dual] [--network mesh|relay|router|stock] [--focus REGEX]
                          run Kubernetes's own network conformance tests on three real nodes (no ring; --help says more)
  nodes [--network mesh|router|stock] [--ipv4-only]
                          a cluster of real nodes to inspect: kubelet, containerd, kube-proxy, and Fairlead from
                          deploy/; runs until Ctrl-C
  bench [NAME] [--json]   run benchmarks: peers and ours in one run
  image [--tag NAME] [--output FILE] [--debug]
                          build the OCI image that deploy/ runs, without an engine; --debug: of the debug build,
                          for clusters on this machine
  generate [--check]      write deploy/crds, warnings and docs/metrics.md from the code; with --check only compare
                          them
  lint                    rustfmt, clippy (fuzz targets, too), the laws of ARCHITECTURE.md and the generated files; prints the
                          number of production lines
  setup                   only the set-up of demo and test

Needs root on Debian 12 with Rust and Go (1.26 or newer). Traffic stays inside network namespaces.
";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let (command, rest) = match arguments.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => ("help", &[][..]),
    };
    let outcome = match command {
        "demo" => steps::demo(rest),
        "test" => suite::run(rest),
        "nodes" => steps::nodes(rest),
        "bench" => steps::bench(rest),
        "image" => image::make(rest),
        "generate" => steps::generate(rest),
        "lint" => steps::lint(),
        "setup" => setup::everything(),
        "help" | "--help" | "-h" => {
            steps::print(HELP);
            Ok(())
        }
        other => Err(format!("unknown command {other:?}\n\n{HELP}")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            steps::say(&format!("error: {message}"));
            ExitCode::FAILURE
        }
    }
}
